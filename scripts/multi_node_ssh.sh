#!/usr/bin/env bash
# Several machines that ssh reaches without a password, with or without MPI. The first is rank 0's.
#   scripts/multi_node_ssh.sh "host1 host2" GPUS_PER_HOST [train_gpt's options]
#   WITH=mpi  starts the ranks by mpirun in place of ssh          PORT=29500  where rank 0 listens
# Every machine needs this folder under the same path. When a rank fails, all end. Without MPI, Ctrl-C finishes the step and saves.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -ge 2 && $2 =~ ^[1-8]$ ]] || { echo 'usage: multi_node_ssh.sh "HOST1 HOST2 ..." GPUS_PER_HOST [options]' >&2; exit 2; }
read -ra hosts <<<"$1"
per_host=$2 world=$((${#hosts[@]} * $2)) port=${PORT:-29500}
shift 2
export MASTER_ADDR=${hosts[0]} MASTER_PORT=$port

if [[ ${WITH:-ssh} == mpi ]]; then
    slots=$(printf "%s:$per_host," "${hosts[@]}")
    exec mpirun -np "$world" -H "${slots%,}" -x MASTER_ADDR -x MASTER_PORT ./train_gpt "$@"
fi

command=$(printf '%q ' ./train_gpt "$@")
pid_file=/tmp/train_gpt.$MASTER_PORT.pid # of rank 0, on its machine: when one rank is asked to stop, all do
stop() { ssh "${hosts[0]}" "kill -TERM \$(cat $pid_file)"; }
trap stop INT TERM HUP
pids=()
rank=0
for host in "${hosts[@]}"; do
    for ((local = 0; local < per_host; local++)); do
        here=
        ((rank)) || here="echo \$\$ >$pid_file;"
        # setsid: Ctrl-C is for this script alone
        setsid ssh "$host" "cd $(printf %q "$PWD") && $here RANK=$rank LOCAL_RANK=$local WORLD_SIZE=$world MASTER_ADDR=$MASTER_ADDR \
            MASTER_PORT=$port exec $command" </dev/null &
        pids+=($!)
        rank=$((rank + 1))
    done
done
status=0
for pid in "${pids[@]}"; do
    while :; do # a trapped signal ends wait early
        code=0
        wait "$pid" || code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((code == 0)) || status=$code
done
exit $status
