#!/usr/bin/env bash
# Step times of several programs, or of one with several options, by turns on the same GPUs: only so are differences of a percent seen,
# as machines differ by five and a GPU's clock by what it did before.
#   dev/bench/by_turns.sh [--csv FILE] TRAIN_FILES VAL_FILES 'PROGRAM [option ...]' 'PROGRAM [option ...]' ...
#   ROUNDS=2  turns of each
#   STEPS=36  steps of a turn. Not timed: the first quarter of a stage, with several stages at least six steps, and the last two
#   STAGES=1  3: those of a preset of 2026, so that many equal parts of STEPS (48, say); else all steps are at window 11, or as the
#             options say
#   GPU=0     which GPU trains
#   GPUS=1    2, 4, ...: so many train together, and GPU does not matter
# Every time is printed, and its row written, as soon as it is there; the means and their ratios to the first program's come last.
#   dev/bench/by_turns.sh 'corpus/s0_train_*.bin' 'corpus/v_val_*.bin' '../before/train_gpt --window-schedule 3' './train_gpt --window-schedule 3'
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
steps=${STEPS:-36} stages=${STAGES:-1} rounds=${ROUNDS:-2} gpu=${GPU:-0} together=${GPUS:-1}
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
source "$(dirname "${BASH_SOURCE[0]}")/step_time.sh"
[[ $rounds =~ ^[1-9][0-9]?$ && $gpu =~ ^[0-9]+$ ]] || { echo "by_turns.sh: ROUNDS=$rounds is no number from 1 to 99, or GPU=$gpu none of a GPU" >&2; exit 2; }
[[ $together =~ ^[1-9][0-9]?$ ]] && ((together <= gpus)) || { echo "by_turns.sh: GPUS=$together: this machine has $gpus" >&2; exit 2; }
list=$gpu,
((together == 1)) || list=$together
(($#)) || { echo "by_turns.sh: no program: PROGRAM and its options, in quotes" >&2; exit 2; }

for ((round = 1; round <= rounds; round++)); do
    for ((p = 1; p <= $#; p++)); do
        read -ra command <<<"${!p}"
        trainer=${command[0]}
        step_time "$p.$round" "$list" "${command[@]:1}"
        for ((k = 1; k <= stages; k++)); do
            ms=$(mean_of_stage "$k" "$work/$p.$round.ms")
            figure "$(gpu_machine "$together")" 'step, by turns' "${!p}, $(shape "$k"), turn $round" "$ms" ms
            echo "turn $round: $ms ms, $(shape "$k"): ${!p}"
        done
    done
done
for ((k = 1; k <= stages; k++)); do
    first=$(mean_of_stage "$k" "$work"/1.*.ms)
    for ((p = 1; p <= $#; p++)); do
        ms=$(mean_of_stage "$k" "$work/$p".*.ms)
        echo "mean: $ms ms, $(awk -v a="$ms" -v b="$first" 'BEGIN { printf "%.3f", a / b }') of the first, $(shape "$k"): ${!p}"
    done
done
