#!/usr/bin/env bash
# Collectives in the captured graph of a step or outside of it: the same steps with --graphs on and off, on 1, 2, 4 and 8 GPUs.
#   dev/bench/graphs.sh [--csv FILE] TRAIN_FILES VAL_FILES [train_gpt's options]
#   STEPS=40  steps before the profiled ones; all but the first quarter and the last two are timed
# Without a graph all ops are queued one by one, not only the collectives. The host queues a step ahead: whether a GPU waits for it
# all the same is seen in the share of a step in which a kernel runs.
# As many groups of GPUs as there are train at once, every second one without graphs first; a single group has two turns of each.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
steps=${STEPS:-40}
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
source "$(dirname "${BASH_SOURCE[0]}")/step_time.sh"

turns() { # RANKS GROUP options: both ways on the GPUs of a group
    local ranks=$1 group=$2 list turn ways=(on off)
    shift 2
    list=$(seq -s, $((ranks * group)) $((ranks * group + ranks - 1))),
    ((group % 2 == 0)) || ways=(off on)
    ((2 * ranks <= gpus)) || ways=(on off off on)
    for turn in "${!ways[@]}"; do
        step_time "$ranks.${ways[turn]}.$group.$turn" "$list" --graphs "${ways[turn]}" --profile "$steps" "$@" || return 1
    done
}

for ranks in 1 2 4 8; do
    ((ranks <= gpus)) || break
    for ((g = 0; g < gpus / ranks; g++)); do turns $ranks $g "$@" & done
    wait_for $((gpus / ranks))
    for way in on off; do
        ms=$(mean "$work/$ranks.$way".*.ms)
        figure "$(gpu_machine "$ranks")" "step, graphs $way" "window 11, steps $((steps / 4))-$((steps - 2))" "$ms" ms
        echo "$ranks GPUs, graphs $way: $ms ms a step ($(cat "$work/$ranks.$way".*.ms | xargs))"
        grep -h 'with a kernel running\|exposed communication' "$work/$ranks.$way".0.*.txt || true
    done
done
