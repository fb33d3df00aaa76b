#!/usr/bin/env bash
# Fetches GPT-2's published vocabulary from OpenAI: encoder.json and vocab.bpe, and the same as the rank file
# r50k_base.tiktoken. `tokenize --vocab DIR` and `train_gpt --vocab DIR` read either.
#
#   gpt2_vocab.sh [--out DIR]      DIR: vocab/ beside this script by default
#
# Sizes and SHA-256 are checked. GPT2_VOCAB_URL is another place to fetch all three from (also file://).
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
program=gpt2_vocab
. "$here/fetch_lib.sh"

public=https://openaipublic.blob.core.windows.net
# name, folder on the public server, bytes, SHA-256
files=(
    "encoder.json gpt-2/encodings/main 1042301 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    "vocab.bpe gpt-2/encodings/main 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    "r50k_base.tiktoken encodings 835554 306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
)

out=$here/vocab
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --out) [ $# -ge 2 ] || usage_error "--out needs a value"; out=$2; shift 2 ;;
        *) usage_error "unknown option \"$1\"" ;;
    esac
done
mkdir -p "$out" || fail "$out cannot be made"

for row in "${files[@]}"; do
    read -r name folder bytes sum <<<"$row"
    fetch_published "${GPT2_VOCAB_URL:-$public/$folder}/$name" "$out/$name" "$bytes" "$sum"
done
say "vocabulary in $out"
