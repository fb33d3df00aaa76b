#!/usr/bin/env bash
# Gets the English text that `make quickstart` trains on: the six novels of Jane Austen (4 MB, public domain), out of a
# small Debian/Ubuntu package, which is downloaded and unpacked but not installed, or else from Project Gutenberg.
#
#   quickstart_text.sh [--text PATH] [--from apt|web] [--out DIR]
#
#   --text PATH   own text instead: a text file, a folder of *.txt, or JSONL with a "text" field (also: TEXT=PATH)
#   --from        only this way of getting the novels
#   --out DIR     where text.jsonl, train.jsonl, val.jsonl and SOURCE go; quickstart/ beside this script by default
#
# PASSAGE_BYTES (1000; of own text 500) is the size of a document; GUTENBERG_URL is the mirror of the web way.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
say() { printf 'quickstart_text: %s\n' "$*"; }
fail() { printf 'quickstart_text: error: %s\n' "${*//[[:cntrl:]]/?}" >&2; exit 1; } # names may hold anything
usage_error() { printf 'quickstart_text: error: %s; see --help\n' "$*" >&2; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }

text=${TEXT-} from='' out=$here/quickstart
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --text | --from | --out) [ $# -ge 2 ] || usage_error "$1 needs a value" ;;
        *) usage_error "unknown option \"$1\"" ;;
    esac
    case $1 in --text) text=$2 ;; --from) from=$2 ;; --out) out=$2 ;; esac
    shift 2
done
case $from in '' | apt | web) ;; *) usage_error "--from is apt or web, not \"$from\"" ;; esac
# A micro-batch of the tiny preset takes 512 tokens of a document; of a small text nothing should be left over.
default=1000
[ -z "$text" ] || default=500
passage=${PASSAGE_BYTES:-$default}
case $passage in *[!0-9]* | ??????*) passage=0 ;; esac
[ "$passage" -ge 200 ] && [ "$passage" -le 65536 ] || usage_error "PASSAGE_BYTES lies between 200 and 65536"

novels='158 141 121 105 1342 161' # Gutenberg's numbers: Emma, Mansfield Park, Northanger Abbey, Persuasion, Pride, Sense
package=r-cran-janeaustenr
licence='public domain'

mkdir -p "$out" || fail "$out cannot be made"
work=$(mktemp -d "$out/.work.XXXXXX") || fail "$out cannot be written to"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# Cuts what was fetched into documents and splits them; see quickstart_text.pl. SOURCE appears last: with it, all is there.
cut_text() {
    local kind=$1 source=$2
    shift 2
    perl "$here/quickstart_text.pl" "$kind" "$passage" "$work" "$@" || return 1
    printf '%s\ndocuments of at most %s bytes\n' "$source" "$passage" >"$work/SOURCE"
    rm -f "$out/SOURCE"
    mv -f "$work"/text.jsonl "$work"/train.jsonl "$work"/val.jsonl "$out" && mv -f "$work/SOURCE" "$out" || fail "$out cannot be written to"
    say "$source -> $out/train.jsonl, val.jsonl"
}

# apt-get download needs no root. Without package lists (a fresh container) they are fetched into a private folder.
apt_download() { (cd "$work" && apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@" download $package) >"$work/apt.log" 2>&1; }
from_apt() {
    have apt-get && have dpkg-deb || { say "note: no apt-get here"; return 1; }
    if ! apt_download; then
        local private=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
        apt-get -qq "${private[@]}" -o Acquire::Retries=1 -o Acquire::http::Timeout=20 update >"$work/update.log" 2>&1
        apt_download "${private[@]}" || { say "note: apt-get cannot download $package: $(grep -m 1 '^E:' "$work/apt.log")"; return 1; }
    fi
    dpkg-deb -x "$work"/$package*.deb "$work/unpacked" || return 1
    local deb
    deb=$(basename "$work"/$package*.deb .deb)
    cut_text rdb "Six novels of Jane Austen ($licence), from the package ${deb%_*}" "$work/unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
}

fetch() {
    if have curl; then curl -fsSL --retry 1 --connect-timeout 15 --max-time 120 -o "$2" "$1" 2>"$work/fetch.log"
    elif have wget; then wget -q -T 30 -t 2 -O "$2" "$1" 2>"$work/fetch.log"
    else echo "neither curl nor wget is installed" >"$work/fetch.log"; return 1; fi
}
from_web() {
    local base=${GUTENBERG_URL:-https://www.gutenberg.org/cache/epub} number files=()
    for number in $novels; do
        fetch "$base/$number/pg$number.txt" "$work/$number.txt" ||
            { say "note: $base/$number/pg$number.txt cannot be fetched: $(head -n 1 "$work/fetch.log")"; return 1; }
        files+=("$work/$number.txt")
    done
    cut_text gutenberg "Six novels of Jane Austen ($licence in the USA and the EU), from Project Gutenberg" "${files[@]}"
}

if [ -n "$text" ]; then
    [ -z "$from" ] || usage_error "--text and --from exclude each other"
    [ -r "$text" ] || fail "$text cannot be read; give a text file, a folder of *.txt, or JSONL"
    cut_text own "Own text, $text" "$text" || exit 1
    exit 0
fi
# Made before, by the same rule: nothing to fetch.
if [ -s "$out/train.jsonl" ] && [ -s "$out/val.jsonl" ] && [ -s "$out/text.jsonl" ] && grep -qs '^Six novels' "$out/SOURCE" &&
    grep -qs "^documents of at most $passage bytes\$" "$out/SOURCE"; then
    say "there already: $(head -n 1 "$out/SOURCE")"
    exit 0
fi
if [ "$from" != web ] && from_apt; then exit 0; fi
if [ "$from" != apt ] && from_web; then exit 0; fi
fail "no text could be fetched (see above); give your own: TEXT=path make quickstart"
