#!/usr/bin/env bash
# Step time on 1, 2, 4 and 8 GPUs, as far as this machine has them, with the communication that is exposed; the collectives alone.
#   dev/bench/scaling.sh [--csv FILE] TRAIN_FILES VAL_FILES [train_gpt's options]
#   STEPS=60  steps before the profiled ones, the same for every number of GPUs: a step gets faster while a model learns. Not timed: the
#             first quarter of a stage, with several stages at least six steps, and the last two
#   STAGES=1  3: those of a preset of 2026, so that many equal parts of STEPS; else all steps are at window 11
# One GPU is the mean of all of them, each training alone at the same time: they differ by a percent, and are as hot as they are
# when they train together.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
steps=${STEPS:-60} stages=${STAGES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
source "$(dirname "${BASH_SOURCE[0]}")/step_time.sh"

if [[ -x build/cuda/test_comm_gpu && $gpus -gt 1 ]]; then build/cuda/test_comm_gpu --bench ${figures_file:+--csv "$figures_file"}; fi
for ((g = 0; g < gpus; g++)); do step_time "alone$g" "$g," "$@" & done
wait_for "$gpus"
for ((k = 1; k <= stages; k++)); do
    one[k]=$(mean_of_stage "$k" "$work"/alone*.ms)
    figure "$(gpu_machine 1)" step "$(shape "$k")" "${one[k]}" ms
    echo "1 GPU, $(shape "$k"): ${one[k]} ms a step ($(awk -v k="$k" 'FNR == k' "$work"/alone*.ms | xargs))"
done
for ranks in 2 4 8; do
    ((ranks <= gpus)) || break
    step_time "$ranks" "$ranks" --profile "$steps" "$@"
    for ((k = 1; k <= stages; k++)); do
        ms=$(mean_of_stage "$k" "$work/$ranks.ms") times=$(awk -v one="${one[k]}" -v k="$k" 'FNR == k { printf "%.2f", one / $1 }' "$work/$ranks.ms")
        figure "$(gpu_machine "$ranks")" step "$(shape "$k")" "$ms" ms
        figure "$(gpu_machine "$ranks")" 'speed-up over one GPU' "$(shape "$k")" "$times" times
        echo "$ranks GPUs, $(shape "$k"): $ms ms a step, $times times one GPU"
    done
    grep -h 'exposed communication' "$work/$ranks.txt" || true
done
