#!/usr/bin/env bash
# Step time on 1, 2, 4 and 8 GPUs, as far as this machine has them, with the communication that is exposed; the collectives alone.
#   dev/bench/scaling.sh TRAIN_FILES VAL_FILES [train_gpt's options]
#   STEPS=30  steps before the profiled ones; the last 22 of them are timed
set -eu -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 2 ]] || { echo 'usage: scaling.sh TRAIN_FILES VAL_FILES [options]' >&2; exit 2; }
train=$1 val=$2 steps=${STEPS:-30} trainer=${TRAINER:-./train_gpt}
shift 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ -x build/cuda/test_comm_gpu && $gpus -gt 1 ]]; then build/cuda/test_comm_gpu --bench; fi
one=
for ranks in 1 2 4 8; do
    ((ranks == 1 || ranks <= gpus)) || break
    "$trainer" --gpus $ranks --window-schedule 11 --val-every 0 --repeat --train-files "$train" --val-files "$val" \
        --profile "$steps" --stop-at $((steps + 4)) --out "$work/$ranks" "$@" >"$work/$ranks.txt" || { tail -n 3 "$work/$ranks.txt"; exit 1; }
    # train_time is cumulative: its difference over the timed steps
    awk -F'[:/ ]' -v ranks=$ranks -v from=$((steps - 22)) -v to="$steps" -v one="$one" '
        /^step:[0-9]+\/[0-9]+ train_time:/ { sub("ms", "", $5); at[$2] = $5 }
        END { ms = (at[to] - at[from]) / (to - from); printf "%d GPUs: %.2f ms a step", ranks, ms
              if (one) printf ", %.2f times one GPU", one / ms
              printf "\n" }' "$work/$ranks"/logs/*.txt | tee "$work/line"
    [[ -n $one ]] || one=$(sed 's/.*: \([0-9.]*\) ms.*/\1/' "$work/line")
    grep -h 'exposed communication' "$work/$ranks.txt" || true
    rm -rf "${work:?}/$ranks"
done
