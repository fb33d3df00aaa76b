#!/usr/bin/env bash
# Rate of `tokenize` beside tiktoken on the same text and machine, one after the other.
#   dev/bench/bench_tokenizer.sh [--csv FILE] VOCABULARY TEXT.jsonl[.xz]
# VOCABULARY is a folder with GPT-2's vocab.bpe, encoder.json and r50k_base.tiktoken (data/gpt2_vocab.sh fetches them).
# tiktoken's figure is encode_ordinary alone, texts already in memory; ours is the whole program, from JSON to shards on disk,
# with the one-thread run pinned to one core. Best of three each. The tokens are compared.
set -euo pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"
cd "$(dirname "$0")/../.."
[ $# = 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
vocabulary=$1 text=$2
[ -x ./tokenize ] || { echo "bench_tokenizer: ./tokenize is missing: run make first" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $text in
*.xz) xz -dc "$text" >"$work/text.jsonl" ;;
*) ln -s "$(realpath "$text")" "$work/text.jsonl" ;;
esac

# MB of text per second of the best of three runs with $1 threads, whatever else stands before the program.
ours() {
    local threads=$1 best=0 rate
    shift
    for _ in 1 2 3; do
        rate=$("$@" ./tokenize --threads "$threads" --vocab "$vocabulary" --val-fraction 1 --val-out "$work/out.bin" \
            --out "$work/x" "$work/text.jsonl" | awk '/ MB of text,/ { print $(NF - 1) }')
        best=$(awk -v a="$best" -v b="$rate" 'BEGIN { print (b > a) ? b : a }')
    done
    echo "$best"
}

theirs=$(python3 dev/bench/tiktoken_peer.py rate "$vocabulary/r50k_base.tiktoken" "$work/text.jsonl")
figure "$(cpu_machine)" 'tiktoken, one core' GPT-2 "$theirs" MB/s
printf '%-28s %8.1f MB/s\n' "tiktoken, 1 thread" "$theirs"
cores=$(nproc)
for threads in $(awk -v n="$cores" 'BEGIN { for (t = 1; t < n; t *= 2) print t; print n }'); do
    pin=
    [ "$threads" -gt 1 ] || pin="taskset -c $(taskset -pc $$ | sed 's/.*: //; s/[,-].*//')"
    rate=$(ours "$threads" env $pin)
    figure "$(cpu_machine)" "tokenize, $threads threads" GPT-2 "$rate" MB/s
    awk -v r="$rate" -v t="$theirs" -v n="$threads" -v one="$([ -n "$pin" ] && echo ' (one core)')" \
        'BEGIN { printf "%-28s %8.1f MB/s   %.2f x tiktoken\n", "tokenize, " n " threads" one, r, r / t }'
done
python3 dev/bench/tiktoken_peer.py compare "$vocabulary/r50k_base.tiktoken" "$work/text.jsonl" "$work/out.bin"
