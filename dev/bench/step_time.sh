# For scaling.sh and graphs.sh, which source it after they have set $steps: what both do with their arguments, and the time of a
# step. Sets $trainer, $train, $val, $gpus and the folder $work; $@ keeps the options of train_gpt.

name=$(basename "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 2 ]] || { echo "usage: $name TRAIN_FILES VAL_FILES [options]" >&2; exit 2; }
[[ $steps =~ ^[1-9][0-9]{0,5}$ ]] && ((steps >= 4)) || { echo "$name: STEPS=$steps is no number of steps from 4 on" >&2; exit 2; }
train=$1 val=$2 trainer=${TRAINER:-./train_gpt}
shift 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
((gpus)) || { echo "$name: no GPU here" >&2; exit 1; }
work=$(mktemp -d)
set -m # a group of processes for each job: what still trains is ended with its trainer where another has failed
trap 'exec 2>/dev/null; for job in $(jobs -p); do kill -- -"$job" || true; done; wait; rm -rf "$work"' EXIT

step_time() { # NAME GPUS options: trains at window 11, writes the mean of steps $steps/4 to $steps - 2 to NAME.ms
    local name=$1 list=$2
    shift 2
    "$trainer" --gpus "$list" --window-schedule 11 --val-every 0 --repeat --train-files "$train" --val-files "$val" \
        --stop-at $((steps + 4)) --out "$work/$name" "$@" >"$work/$name.txt" || { tail -n 3 "$work/$name.txt" >&2; return 1; }
    # train_time is cumulative: its difference over the timed steps. Without a graph the host is half a step behind the queue and
    # catches up in the last step before a pause: the two before the profiled ones are left out.
    awk -F'[:/ ]' -v from=$((steps / 4)) -v to=$((steps - 2)) '
        /^step:[0-9]+\/[0-9]+ train_time:/ { sub("ms", "", $5); at[$2] = $5 }
        END { printf "%.2f\n", (at[to] - at[from]) / (to - from) }' "$work/$name"/*/*.txt >"$work/$name.ms"
    rm -rf "${work:?}/$name"
}

mean() { awk '{ sum += $1 } END { printf "%.2f", sum / NR }' "$@"; }

wait_for() { # JOBS: until so many have ended
    local left
    for ((left = $1; left > 0; left--)); do wait -n || return 1; done
}
