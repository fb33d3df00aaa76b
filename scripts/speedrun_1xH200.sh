#!/usr/bin/env bash
# The speedrun for one GPU, an H200: preset 2026-07-17 on FineWeb10B to a validation loss of 3.28, several runs
# in a row, each with a seed and a folder of its own. scripts/record --track 1xH200 checks their logs, makes a
# page of them, and the list of all such entries by time, records/leaderboard_1xH200.md.
#   RUNS=5  OUT=runs/speedrun_1xH200  KEEP=0
# Further arguments go to train_gpt, but none that names other data or weights.
#
# A run takes about seven minutes. Of several GPUs it takes the first that CUDA_VISIBLE_DEVICES names. Called
# again it goes on: runs whose log is whole are kept, folders of runs that ended early move to OUT/unfinished.
# Shards and vocabulary are fetched to data/fineweb10B and data/vocab, and shards that are there are checked.
# KEEP=1 keeps the checkpoint at the end of every run.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
track=1xH200 fixed="--train-files --val-files --val-tokens --init-from --resume --config"
runs=${RUNS:-5} preset=2026-07-17 gpus=1 keep=${KEEP:-0}
out=${OUT:-runs/speedrun_1xH200}
. scripts/speedrun_lib.sh
[[ ! ${PRESET+x} && ! ${GPUS+x} ]] || fail "PRESET and GPUS: this track has one preset and one GPU"
speedrun "$@"
