#!/usr/bin/env bash
# From nothing to a sample: real text, byte shards, a short training run of the tiny preset, its loss beside that of an order-2 byte
# model on the same text, and a continuation written by the model. `make quickstart` builds the programs first.
#   TEXT=path         own text in place of the six novels
#   PRESET=tiny-2026  the network of record 89 in place of record 45's
#   STEPS=300         scheduled steps, in place of the preset's
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=data/quickstart out=runs/quickstart
network=(--preset "${PRESET:-tiny}" ${STEPS:+--num-scheduled "$STEPS"})

say() { printf '\n== %s\n' "$*"; }

trainer=./train_gpt_cpu
if [[ -x ./train_gpt ]] && nvidia-smi -L >/dev/null 2>&1; then trainer=./train_gpt; fi

say "text"
data/quickstart_text.sh # fetches nothing when it is there; own text of an earlier run makes way for the novels
cat $data/SOURCE

say "tokens (bytes)"
./tokenize --vocab bytes --out $data/ --name bytes --input $data/train.jsonl
./tokenize --vocab bytes --out $data/ --name heldout --val-fraction 1 --input $data/val.jsonl

say "the model to beat: order-2 byte statistics of the same text"
./order2 $data/train.jsonl $data/val.jsonl | tee $data/order2.txt

say "training with $trainer"
# The run before is kept until this one has a checkpoint: a mistake in PRESET or STEPS must not delete it.
has_checkpoint() { compgen -G "$1/*/*.safetensors" >/dev/null; }
one_run() {
    if has_checkpoint $out; then rm -rf $out.before; fi
    if [[ -d $out.before ]]; then rm -rf $out; mv $out.before $out; fi
}
one_run
if [[ -d $out ]]; then mv $out $out.before; fi
trap one_run EXIT
$trainer "${network[@]}" --repeat --out $out \
    --train-files "$data/bytes_train_*.bin" --val-files "$data/heldout_val_*.bin"
one_run

say "validation on all of the held-out text, and a sample"
tokens=$(od -An -td4 -j8 -N4 $data/heldout_val_000000.bin)
sequence=4096 prompt="It was"
((tokens > sequence)) || sequence=16
[[ -z ${TEXT-} ]] || prompt=$(perl -CO -MJSON::PP -ne 'print decode_json($_)->{text} =~ /\A(\S+)/; exit' $data/val.jsonl)
$trainer "${network[@]}" --resume $out --eval-only --val-files "$data/heldout_val_*.bin" \
    --val-tokens $(((tokens - 1) / sequence * sequence)) --sample "$prompt" --num-tokens 400 | tee $data/eval.txt

loss=$(sed -n 's/^val_loss:\([0-9.]*\)$/\1/p' $data/eval.txt)
say "result"
awk -v loss="$loss" -v own="${TEXT:+1}" -v order2="$(cat $data/order2.txt)" -v documents="$(wc -l <$data/val.jsonl)" -v tokens="$tokens" 'BEGIN {
    match(order2, /[0-9.]+ bits per byte/); bar = substr(order2, RSTART, RLENGTH) + 0
    bits = loss / log(2) * tokens / (tokens - documents)   # tokens count the document ends too
    printf "order-2 byte model %.3f bits per byte, this model %.3f bits per byte: %s\n", bar, bits, bits < bar ? "below it" : "NOT below it"
    if (own && bits >= bar) print "(a small text is seen many times and learned by heart; from 1 MB on the model gets below)"
    exit !(own || bits < bar) }'
printf 'more text: %s --resume %s --sample %q; its curve: scripts/watch --once %s\n' "$trainer" $out "$prompt" $out
