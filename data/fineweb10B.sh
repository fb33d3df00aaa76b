#!/usr/bin/env bash
# Fetches the public token shards of FineWeb10B (GPT-2 tokens) from the Hugging Face hub: one validation shard and N training
# shards of 100M tokens, 200 MB each.
#
#   fineweb10B.sh [N] [--out DIR]      N: 1 to 103, 9 by default, enough for a run; DIR: fineweb10B/ beside this script
#   fineweb10B.sh --check FILE...      only checks shards that are here: header, and size against the header's token count
#
# Finished shards are kept, partial ones are continued. FINEWEB_URL is another place to fetch from (also file://).
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
program=fineweb10B
. "$here/fetch_lib.sh"

url=${FINEWEB_URL:-https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main}
header_bytes=1024 magic=20240520 most=103

# Prints what is wrong with a shard; silent and zero when it is good.
check_shard() {
    local bytes words
    [ -r "$1" ] || { echo "missing or unreadable"; return 1; }
    bytes=$(file_bytes "$1")
    [ "$bytes" -ge $header_bytes ] || { echo "only $bytes bytes, less than a header"; return 1; }
    read -r -a words < <(od -An -t d4 -N 12 "$1")
    [ "${words[0]}" = $magic ] || { echo "not a token shard (magic ${words[0]}, not $magic)"; return 1; }
    [ "${words[1]}" = 1 ] || { echo "shard version ${words[1]}, not 1"; return 1; }
    [ "${words[2]}" -gt 0 ] || { echo "header says ${words[2]} tokens"; return 1; }
    local expected=$((header_bytes + 2 * words[2]))
    [ "$bytes" = $expected ] || { echo "$bytes bytes, but ${words[2]} tokens need $expected"; return 1; }
}

check_only() {
    local bad=0 why
    [ $# -gt 0 ] || usage_error "--check needs files"
    for file in "$@"; do
        if why=$(check_shard "$file"); then
            say "$file: good, $((($(file_bytes "$file") - header_bytes) / 2)) tokens"
        else
            printf '%s: error: %s: %s\n' "$program" "$file" "$why" >&2
            bad=1
        fi
    done
    exit $bad
}

count=9 out=$here/fineweb10B
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --check) shift; check_only "$@" ;;
        --out) [ $# -ge 2 ] || usage_error "--out needs a value"; out=$2; shift 2 ;;
        -*) usage_error "unknown option \"$1\"" ;;
        *) count=$1; shift ;;
    esac
done
case $count in '' | *[!0-9]* | ????*) usage_error "the number of training shards lies between 1 and $most, not \"$count\"" ;; esac
count=$((10#$count))
[ "$count" -ge 1 ] && [ "$count" -le $most ] || usage_error "the number of training shards lies between 1 and $most, not $count"
mkdir -p "$out" || fail "$out cannot be made"

names=(fineweb_val_000000.bin)
for i in $(seq 1 "$count"); do names+=("$(printf 'fineweb_train_%06d.bin' "$i")"); done
missing=0
for name in "${names[@]}"; do [ -e "$out/$name" ] || missing=$((missing + 1)); done
free_mb=$(df -Pm "$out" | awk 'NR == 2 { print $4 }')
# Only said: how much of a partial file is on the disk already is not worth working out.
[ "$free_mb" -ge $((200 * missing)) ] || say "note: $free_mb MB are free in $out; $missing shards of 200 MB are to come"

number=0
for name in "${names[@]}"; do
    number=$((number + 1))
    [ -e "$out/$name" ] || say "[$number/${#names[@]}] $name"
    fetch_checked "$url/$name" "$out/$name" check_shard
done
say "${#names[@]} shards in $out"
