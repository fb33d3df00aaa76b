#!/usr/bin/env bash
# A few steps on one GPU in the way that shows errors where they happen: ops one by one in place of graphs, every launch waited for,
# sums in a fixed order.
#   TOOL="compute-sanitizer --error-exitcode 9"  runs under a tool        PRESET=2025-10-27  STEPS=6
#   further arguments go to train_gpt, e.g. --train-files and --val-files
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x ./train_gpt ]] || { echo "debug_1gpu: ./train_gpt is missing: run make" >&2; exit 1; }
# shellcheck disable=SC2086  # TOOL is a command with arguments
CUDA_LAUNCH_BLOCKING=1 exec ${TOOL:-} ./train_gpt --preset "${PRESET:-2025-10-27}" --gpus 1 --graphs off --deterministic --val-tokens 262144 \
    --val-every 2 --stop-at "${STEPS:-6}" --out runs/debug "$@"
