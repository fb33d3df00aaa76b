# For scaling.sh, graphs.sh and by_turns.sh, which source it after they have set $steps and, where a schedule has more than one, $stages:
# what all do with their arguments, and the time of a step. Sets $trainer, $train, $val, $gpus and the folder $work; $@ keeps the rest.

name=$(basename "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 2 ]] || { echo "usage: $name TRAIN_FILES VAL_FILES [options]" >&2; exit 2; }
[[ $steps =~ ^[1-9][0-9]{0,5}$ ]] && ((steps >= 4)) || { echo "$name: STEPS=$steps is no number of steps from 4 on" >&2; exit 2; }
stages=${stages:-1}
[[ $stages =~ ^[1-9]$ ]] && ((stages == 1 || steps / stages >= 10)) || { echo "$name: STAGES=$stages: at most 9, of ten steps and more" >&2; exit 2; }
# The steps of a stage that are not timed, beside its last two. Where the batch grows, the log reports the first five steps too short: 137 ms
# in all for steps of 473 ms after steps of 312 (preset 2026-07-17, one H200), 85 of them in the fifth. Probably the host runs ahead of the queue.
skipped=$((steps / stages / 4))
((stages == 1 || skipped >= 6)) || skipped=6
train=$1 val=$2 trainer=${TRAINER:-./train_gpt}
shift 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
((gpus)) || { echo "$name: no GPU here" >&2; exit 1; }
work=$(mktemp -d)
window="window 11"
[[ $* != *--window-schedule* ]] || window="window of the options"
set -m # a group of processes for each job: what still trains is ended with its trainer where another has failed
trap 'exec 2>/dev/null; for job in $(jobs -p); do kill -- -"$job" || true; done; wait; rm -rf "$work"' EXIT

shape() { # STAGE: what its time is of
    local length=$((steps / stages)) of=$window
    ((stages == 1)) || of="stage $1 of $stages"
    echo "$of, steps $((length * ($1 - 1) + skipped))-$((length * $1 - 2))"
}

step_time() { # NAME GPUS options: trains, writes the mean time of steps of each stage to NAME.ms, a line a stage
    local name=$1 list=$2 schedule=(--window-schedule 11)
    shift 2
    ((stages == 1)) || schedule=(--num-scheduled "$steps" --num-extension 4)
    "$trainer" --gpus "$list" "${schedule[@]}" --val-every 0 --repeat --train-files "$train" --val-files "$val" \
        --stop-at $((steps + 4)) --out "$work/$name" "$@" >"$work/$name.txt" 2>&1 || { tail -n 3 "$work/$name.txt" >&2; return 1; }
    # train_time is cumulative: its difference over the timed steps. Without a graph the host is half a step behind the queue and catches up
    # in the last step before a pause: the two before the profiled ones are left out.
    awk -F'[:/ ]' -v length_="$((steps / stages))" -v stages="$stages" -v skipped="$skipped" '
        /^step:[0-9]+\/[0-9]+ train_time:/ { sub("ms", "", $5); at[$2] = $5 }
        END { for (k = 0; k < stages; k++) { from = k * length_ + skipped; to = (k + 1) * length_ - 2
                  printf "%.2f\n", (at[to] - at[from]) / (to - from) } }' "$work/$name"/*/*.txt >"$work/$name.ms"
    rm -rf "${work:?}/$name"
}

mean_of_stage() { local stage=$1; shift; awk -v stage="$stage" 'FNR == stage { sum += $1; n++ } END { printf "%.2f", sum / n }' "$@"; }

mean() { awk '{ sum += $1 } END { printf "%.2f", sum / NR }' "$@"; }

wait_for() { # JOBS: until so many have ended
    local left
    for ((left = $1; left > 0; left--)); do wait -n || return 1; done
}
