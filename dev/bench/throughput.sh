#!/usr/bin/env bash
# Training throughput of train_gpt_cpu beside the PyTorch twin, one after the other on the same cores, shards and initial weights.
#   dev/bench/throughput.sh [--csv FILE] [TRAIN_SHARD VAL_SHARD]     default: the byte shards of make quickstart
#   STEPS=12  training steps of each run
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
train=${1:-data/quickstart/bytes_train_000001.bin} val=${2:-data/quickstart/heldout_val_000000.bin}
steps=${STEPS:-12} threads=$(nproc)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[[ -s $train && -s $val ]] || { echo "throughput: no shards at $train, $val: run make quickstart first" >&2; exit 1; }
python3 -c 'import torch' 2>/dev/null || { echo "throughput: the twin needs PyTorch (pip install torch safetensors)" >&2; exit 1; }

common=(--preset tiny --head bf16 --train-files "$train" --val-files "$val" --val-every 0)
median() { sort -g | awk '{x[NR] = $1} END {print (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2}'; }

OMP_NUM_THREADS=$threads ./train_gpt_cpu "${common[@]}" --stop-at "$steps" --out "$work/c" --save-init "$work/init.safetensors" >"$work/c.txt"
ours=$(sed -n 's/.*"event": *"step".*"ms": *\([0-9.]*\).*/\1/p' "$work"/c/*/*.jsonl | tail -n +3 | median)
figure "$(cpu_machine)" "step, train_gpt_cpu" "preset tiny" "$ours" ms

best= mode=
for variant in "float32" "bf16" "float32 --compile"; do
    OMP_NUM_THREADS=$threads python3 dev/reference/train.py "${common[@]}" --dtype $variant --steps "$steps" --threads "$threads" \
        --init-from "$work/init.safetensors" --log "$work/twin.txt" >"$work/twin_out.txt" 2>&1 ||
        { echo "twin ($variant): failed: $(tail -n 1 "$work/twin_out.txt")"; continue; }
    ms=$(sed -n 's/.*median \([0-9.]*\) ms a step.*/\1/p' "$work/twin_out.txt")
    figure "$(cpu_machine)" "step, PyTorch reference, $variant" "preset tiny" "$ms" ms
    echo "twin ($variant): $ms ms a step"
    if [[ -z $best ]] || awk "BEGIN {exit !($ms < $best)}"; then best=$ms mode=$variant; fi
done
awk -v ours="$ours" -v best="$best" -v mode="$mode" 'BEGIN {
    printf "train_gpt_cpu: %.1f ms a step, %.0f tokens/s; the fastest twin (%s): %.1f ms; ratio twin / ours %.2f\n", ours, 4096e3 / ours, mode, best, best / ours }'
