#!/usr/bin/env bash
# The speedrun as its track asks for it: all GPUs of one machine, meant for eight H100, on FineWeb10B, several runs in a row. Each run
# has a seed and a folder of its own; scripts/record makes a submission from their logs.
#   RUNS=10  PRESET=2026-08-06  OUT=runs/speedrun_$PRESET  GPUS=all  KEEP=0      further arguments go to train_gpt
#
# Called again it goes on: runs whose log is whole are kept, folders of runs that ended early move to OUT/unfinished. The shards are
# fetched to data/fineweb10B, and those that are there are checked, unless --train-files and --val-files say where others are;
# the vocabulary to data/vocab. KEEP=1 keeps the 2 GB checkpoint at the end of every run.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
track=8xH100 fixed=""
runs=${RUNS:-10} preset=${PRESET:-2026-08-06} gpus=${GPUS:-all} keep=${KEEP:-0}
out=${OUT:-runs/speedrun_$preset}
. scripts/speedrun_lib.sh
speedrun "$@"
