# For scaling.sh and graphs.sh, which source it: the time of a step. They set $trainer, $train, $val, $steps, $gpus and the folder $work.

name=$(basename "$0")
((gpus)) || { echo "$name: no GPU here" >&2; exit 1; }
[[ $steps =~ ^[1-9][0-9]{0,5}$ ]] && ((steps >= 4)) || { echo "$name: STEPS=$steps is no number of steps from 4 on" >&2; exit 2; }

step_time() { # NAME GPUS options: trains at window 11, writes the mean of steps $steps/4 to $steps - 2 to NAME.ms
    local name=$1 list=$2
    shift 2
    "$trainer" --gpus "$list" --window-schedule 11 --val-every 0 --repeat --train-files "$train" --val-files "$val" \
        --stop-at $((steps + 4)) --out "$work/$name" "$@" >"$work/$name.txt" || { tail -n 3 "$work/$name.txt" >&2; return 1; }
    # train_time is cumulative: its difference over the timed steps. Without a graph the host is half a step behind the queue and
    # catches up in the last step before a pause: the two before the profiled ones are left out.
    awk -F'[:/ ]' -v from=$((steps / 4)) -v to=$((steps - 2)) '
        /^step:[0-9]+\/[0-9]+ train_time:/ { sub("ms", "", $5); at[$2] = $5 }
        END { printf "%.2f\n", (at[to] - at[from]) / (to - from) }' "$work/$name"/logs/*.txt >"$work/$name.ms"
    rm -rf "${work:?}/$name"
}

mean() { awk '{ sum += $1 } END { printf "%.2f", sum / NR }' "$@"; }
