#!/usr/bin/env bash
# Tokens/s of --sample: the CPU program with presets tiny and tiny-2026, and the CUDA program, where there is a GPU, with presets
# 2025-11-18 and 2026-07-17; bytes and GPT-2's vocabulary; with and without a cache of keys and values; one text at a time and eight.
#   dev/bench/sampling.sh [--csv FILE] [train_gpt's options]
#   VOCAB=data/vocab  GPT-2's vocabulary (data/gpt2_vocab.sh); without it only bytes are measured
#   TOKENS=500        length of a text
#   STEPS=4           training steps before, on this program's own source
#   PRESETS, PROGRAMS others than those above
# Each figure is the median of three runs. The options are --sample's: --threads 1, --top-k 0.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
tokens=${TOKENS:-500} steps=${STEPS:-4} vocab=$(realpath -m -- "${VOCAB:-data/vocab}")
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$(basename "$0")
[[ $tokens =~ ^[1-9][0-9]{0,5}$ ]] || { echo "$name: TOKENS=$tokens is no length of a text" >&2; exit 2; }
[[ $steps =~ ^[1-9][0-9]{0,5}$ ]] || { echo "$name: STEPS=$steps is no number of steps" >&2; exit 2; }
programs=${PROGRAMS:-./train_gpt_cpu}
if [[ -z ${PROGRAMS-} && -x ./train_gpt ]] && nvidia-smi -L >/dev/null 2>&1; then programs+=' ./train_gpt'; fi
vocabularies=(bytes "$vocab")
[[ -e $vocab ]] || { echo "$name: no vocabulary in $vocab: bytes only"; vocabularies=(bytes); }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

find llmc dev -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu*' -o -name '*.md' -o -name '*.t' \) -print0 | sort -z |
    xargs -0 cat >"$work/source.txt"
for ((i = 0; i < 8; i++)); do echo "static int value_$i"; done >"$work/prompts.8"
head -n 1 "$work/prompts.8" >"$work/prompts.1"

run() { "$@" >"$work/log" 2>&1 || { tail -n 3 "$work/log" >&2; exit 1; }; } # COMMAND...: its output in the file log

train() { # PROGRAM PRESET VOCABULARY: a checkpoint in the folder run
    rm -rf "$work/run" "$work/shards"
    run ./tokenize --vocab "$3" --out "$work/shards/" --name text --split blank-lines --val-fraction 0.4 --input "$work/source.txt"
    run "$1" --preset "$2" --repeat --train-files "$work/shards/text_train_*" --val-files "$work/shards/text_val_*" \
        --vocab "$3" --val-every 0 --num-scheduled "$steps" --num-extension 0 --out "$work/run"
}

speed() { # PROGRAM options: the median of three runs
    local program=$1
    shift
    for _ in 1 2 3; do
        run "$program" --resume "$work/run" --num-tokens "$tokens" "$@"
        sed -n 's/.*sample: .* \([0-9]*\) tokens\/s.*/\1/p' "$work/log"
    done | sort -n | sed -n 2p
}

for program in $programs; do
    presets=${PRESETS:-tiny tiny-2026} machine=$(cpu_machine)
    if [[ $program != *_cpu ]]; then presets=${PRESETS:-2025-11-18 2026-07-17} machine=$(gpu_machine 1); fi
    for preset in $presets; do
        for vocabulary in "${vocabularies[@]}"; do
            train "$program" "$preset" "$vocabulary"
            words="GPT-2's vocabulary"
            [[ $vocabulary != bytes ]] || words=bytes
            for setting in 'off 1' 'on 1' 'on 8'; do
                read -r cache texts <<<"$setting"
                value=$(speed "$program" --vocab "$vocabulary" --kv-cache "$cache" --sample "@$work/prompts.$texts" --sample-batch "$texts" "$@")
                shape="preset $preset, $words, cache $cache, $texts at a time"
                figure "$machine" "$(basename "$program") --sample" "$shape" "$value" tokens/s
                echo "$program, $shape: $value tokens/s"
            done
        done
    done
done
