#!/usr/bin/env bash
# Writes a C file that holds the program's own source, for the head of every log, and the commit it was built from
# (llmc/base/source.h). The source is train_gpt.cu and all of llmc/, each file under a line with its name. It is a
# text file beside the C file, which the assembler includes as it is: no compiler reads it. Both files are replaced
# only when one of them changes, so that calling this at every build costs no recompilation. A release has no git
# checkout: its file VERSION (make dist) has the commit.
#
#   embed_source.sh OUTPUT.c [ROOT]     ROOT: the project's folder, by default the one above this script
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
export LC_ALL=C

[[ $# -ge 1 && $# -le 2 ]] || { echo 'usage: embed_source.sh OUTPUT.c [ROOT]' >&2; exit 2; }
output=$1
root=${2:-$(dirname "${BASH_SOURCE[0]}")/..}
[[ -f $root/train_gpt.cu && -d $root/llmc ]] || { echo "embed_source: error: $root holds no train_gpt.cu and llmc/" >&2; exit 1; }

# Under each file's name; a newline that is missing at a file's end is added.
sources() {
    cd -- "$root"
    { echo train_gpt.cu
      find llmc -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) | sort
    } | xargs -d '\n' awk 'FNR == 1 { printf "// ---- %s ----\n", FILENAME } { print }'
}

commit() {
    local id
    if [[ -f $root/VERSION ]]; then
        head -n 1 "$root/VERSION"
    elif ! id=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        echo 'unknown: not built in a git checkout'
    elif [[ -n $(git -C "$root" status --porcelain -- train_gpt.cu llmc 2>/dev/null) ]]; then
        echo "$id and uncommitted changes"
    else
        echo "$id"
    fi
}

mkdir -p "$(dirname "$output")"
text=${output%.c}.txt
trap 'rm -f "$text.$$" "$output.$$"' EXIT
(sources) >"$text.$$"
cat >"$output.$$" <<END
#include <stddef.h>
extern const char program_source[], program_commit[];
extern const size_t program_source_size;
__asm__(".section .rodata\n"
        ".global program_source\n"
        "program_source: .incbin \"$text\"\n"
        ".byte 0\n"
        ".previous\n");
const size_t program_source_size = $(stat -c %s "$text.$$");
const char program_commit[] = "$(commit)";
END
if ! cmp -s "$text.$$" "$text" || ! cmp -s "$output.$$" "$output"; then
    mv "$text.$$" "$text"
    mv "$output.$$" "$output"
fi
