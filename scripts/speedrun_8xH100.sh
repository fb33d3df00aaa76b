#!/usr/bin/env bash
# The speedrun as its track asks for it: all GPUs of one machine, meant for eight H100, on FineWeb10B, several runs in a row. Each run
# has a seed and a folder of its own; scripts/record makes a submission from their logs.
#   RUNS=10  PRESET=2025-10-27  OUT=runs/speedrun  GPUS=all      further arguments go to train_gpt
set -eu -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs=${RUNS:-10} preset=${PRESET:-2025-10-27} out=${OUT:-runs/speedrun} gpus=${GPUS:-all}

[[ -x ./train_gpt ]] || { echo "speedrun: ./train_gpt is missing: run make" >&2; exit 1; }
found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
[[ $found -eq 8 ]] || echo "speedrun: this machine has $found GPUs; times of the track are taken on eight" >&2
[[ -s data/fineweb10B/fineweb_train_000009.bin ]] || data/fineweb10B.sh 9

for ((run = 1; run <= runs; run++)); do
    ./train_gpt --preset "$preset" --gpus "$gpus" --seed "$run" --out "$out/$run" "$@"
done
echo "scripts/record --name NAME --what 'what changed' $out/*/logs/*.txt"
