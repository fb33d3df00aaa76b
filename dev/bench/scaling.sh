#!/usr/bin/env bash
# Step time on 1, 2, 4 and 8 GPUs, as far as this machine has them, with the communication that is exposed; the collectives alone.
#   dev/bench/scaling.sh [--csv FILE] TRAIN_FILES VAL_FILES [train_gpt's options]
#   STEPS=60  steps before the profiled ones; all but the first quarter and the last two are timed, the same ones for every number of GPUs:
#             a step gets faster while a model learns
# One GPU is the mean of all of them, each training alone at the same time: they differ by a percent, and are as hot as they are
# when they train together.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
steps=${STEPS:-60}
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
source "$(dirname "${BASH_SOURCE[0]}")/step_time.sh"
shape="window 11, steps $((steps / 4))-$((steps - 2))"

if [[ -x build/cuda/test_comm_gpu && $gpus -gt 1 ]]; then build/cuda/test_comm_gpu --bench ${figures_file:+--csv "$figures_file"}; fi
for ((g = 0; g < gpus; g++)); do step_time "alone$g" "$g," "$@" & done
wait_for "$gpus"
one=$(mean "$work"/alone*.ms)
figure "$(gpu_machine 1)" step "$shape" "$one" ms
echo "1 GPU: $one ms a step ($(cat "$work"/alone*.ms | xargs))"
for ranks in 2 4 8; do
    ((ranks <= gpus)) || break
    step_time "$ranks" "$ranks" --profile "$steps" "$@"
    ms=$(cat "$work/$ranks.ms") times=$(awk -v one="$one" '{ printf "%.2f", one / $1 }' "$work/$ranks.ms")
    figure "$(gpu_machine "$ranks")" step "$shape" "$ms" ms
    figure "$(gpu_machine "$ranks")" 'speed-up over one GPU' "$shape" "$times" times
    echo "$ranks GPUs: $ms ms a step, $times times one GPU"
    grep -h 'exposed communication' "$work/$ranks.txt" || true
done
