#!/usr/bin/env bash
# Several machines that ssh reaches without a password. The first is rank 0's.
#
#   scripts/multi_node_ssh.sh "HOST1 HOST2" GPUS_PER_HOST [train_gpt's options]
#
#   WITH=mpi     mpirun starts the ranks in place of ssh          PORT=29500   where rank 0 listens
#   TRAIN_GPT_SECRET   what the ranks prove each other who they are with; made for this run when it is not set
#
# Every machine needs this folder under the same path. When a rank fails, all end. Ctrl-C finishes the step and saves; before
# the first step there is none (not with WITH=mpi: mpirun ends its processes).
set -eu -o pipefail
fail() { printf 'multi_node_ssh: error: %s\n' "$*" >&2; exit 2; }

[[ ${1-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -ge 2 && $2 =~ ^[1-8]$ ]] || { echo 'usage: multi_node_ssh.sh "HOST1 HOST2 ..." GPUS_PER_HOST [options]' >&2; exit 2; }
read -ra hosts <<<"$1"
per_host=$2 world=$((${#hosts[@]} * $2)) port=${PORT:-29500}
shift 2
((${#hosts[@]})) || fail 'no host is given'
[[ $world =~ ^[1248]$ ]] || fail "$world ranks (${#hosts[@]} hosts with $per_host): must be 1, 2, 4 or 8"
# Both end up in command lines; a host that begins with - would be an option of ssh's.
for host in "${hosts[@]}"; do
    [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.@:%-]*$ ]] || fail "'$(printf %q "$host")' is no name of a host"
done
[[ $port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535 ]] || fail "PORT $(printf %q "$port") is no port number"
export TRAIN_GPT_SECRET=${TRAIN_GPT_SECRET:-$(od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n')}
export MASTER_ADDR=${hosts[0]#*@} MASTER_PORT=$port

if [[ ${WITH:-ssh} == mpi ]]; then
    slots=$(printf "%s:$per_host," "${hosts[@]}")
    # -x with the name alone: the value goes over mpirun's own connections and stands in no command line
    exec mpirun -np "$world" -H "${slots%,}" -x MASTER_ADDR -x MASTER_PORT -x TRAIN_GPT_SECRET ./train_gpt "$@"
fi

# What a machine runs. The secret is the first line of its input, where ps does not show it; a second line asks the rank to finish
# its step, save and end.
remote=$(cat <<'END'
IFS= read -r TRAIN_GPT_SECRET && export TRAIN_GPT_SECRET || exit 2
exec 3<&0
"$@" </dev/null 3<&- & rank=$!
{ read -r stop <&3 && kill -TERM "$rank"; } & listener=$!
exec 3<&-
wait "$rank"
status=$?
kill "$listener" 2>/dev/null
exit "$status"
END
)
quote() { printf "'%s' " "${@//\'/\'\\\'\'}"; } # for any shell over there
words=$(quote sh -c "$remote" sh ./train_gpt "$@")
folder=$(mktemp -d) # of this user alone
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/rank_0"

pids=()
for ((rank = 0; rank < world; rank++)); do
    variables="RANK=$rank LOCAL_RANK=$((rank % per_host)) LOCAL_WORLD_SIZE=$per_host WORLD_SIZE=$world"
    variables+=" MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$port"
    command="cd $(quote "$PWD")&& exec env $variables $words"
    # setsid: Ctrl-C is for this script alone
    if ((rank == 0)); then
        setsid ssh "${hosts[0]}" "$command" <"$folder/rank_0" &
        exec {to_rank_0}>"$folder/rank_0"
        printf '%s\n' "$TRAIN_GPT_SECRET" >&"$to_rank_0"
    else
        setsid ssh "${hosts[rank / per_host]}" "$command" <<<"$TRAIN_GPT_SECRET" {to_rank_0}>&- &
    fi
    pids+=($!)
done

# When one rank is asked to stop, all do: they agree on the step.
stop() { echo stop >&"$to_rank_0" || true; }
trap stop INT TERM HUP
trap '' PIPE

status=0
for pid in "${pids[@]}"; do
    while :; do # a trapped signal ends wait early
        code=0
        wait "$pid" || code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((code == 0)) || status=$code
done
exit "$status"
