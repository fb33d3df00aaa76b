#!/usr/bin/env bash
# Step time on 1, 2, 4 and 8 GPUs, as far as this machine has them, with the communication that is exposed; the collectives alone.
#   dev/bench/scaling.sh TRAIN_FILES VAL_FILES [train_gpt's options]
#   STEPS=60  steps before the profiled ones; the last three quarters of them are timed, the same ones for every number of GPUs:
#             a step gets faster while a model learns
# One GPU is the mean of all of them, each training alone at the same time: they differ by a percent, and are as hot as they are
# when they train together.
set -eu -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 2 ]] || { echo 'usage: scaling.sh TRAIN_FILES VAL_FILES [options]' >&2; exit 2; }
train=$1 val=$2 steps=${STEPS:-60} trainer=${TRAINER:-./train_gpt}
shift 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() { # NAME GPUS options: trains, and writes the mean step to NAME.ms
    local name=$1 list=$2
    shift 2
    "$trainer" --gpus "$list" --window-schedule 11 --val-every 0 --repeat --train-files "$train" --val-files "$val" \
        --stop-at $((steps + 4)) --out "$work/$name" "$@" >"$work/$name.txt" || { tail -n 3 "$work/$name.txt" >&2; return 1; }
    # train_time is cumulative: its difference over the timed steps
    awk -F'[:/ ]' -v from=$((steps / 4)) -v to="$steps" '
        /^step:[0-9]+\/[0-9]+ train_time:/ { sub("ms", "", $5); at[$2] = $5 }
        END { printf "%.2f\n", (at[to] - at[from]) / (to - from) }' "$work/$name"/logs/*.txt >"$work/$name.ms"
    rm -rf "${work:?}/$name"
}

if [[ -x build/cuda/test_comm_gpu && $gpus -gt 1 ]]; then build/cuda/test_comm_gpu --bench; fi
alone=()
for ((g = 0; g < gpus; g++)); do run "alone$g" "$g," "$@" & alone+=($!); done
for pid in "${alone[@]}"; do wait "$pid"; done
one=$(cat "$work"/alone*.ms | awk '{ sum += $1 } END { printf "%.2f", sum / NR }')
echo "1 GPU: $one ms a step ($(cat "$work"/alone*.ms | xargs))"
for ranks in 2 4 8; do
    ((ranks <= gpus)) || break
    run "$ranks" "$ranks" --profile "$steps" "$@"
    awk -v ranks=$ranks -v one="$one" '{ printf "%d GPUs: %s ms a step, %.2f times one GPU\n", ranks, $1, one / $1 }' "$work/$ranks.ms"
    grep -h 'exposed communication' "$work/$ranks.txt" || true
done
