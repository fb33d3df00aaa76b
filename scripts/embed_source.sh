#!/usr/bin/env bash
# Writes a C file that holds the program's own source, for the head of every log, and the commit it was built from:
#   const char program_source[]; const size_t program_source_size; const char program_commit[];
# The source is train_gpt.cu and all of llmc/, each file under a line with its name. The C file is touched only when it
# changes, so that calling this at every build costs no recompilation.
#
#   embed_source.sh OUTPUT.c [ROOT]     ROOT: the project's folder, by default the one above this script
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
export LC_ALL=C

[[ $# -ge 1 && $# -le 2 ]] || { echo 'usage: embed_source.sh OUTPUT.c [ROOT]' >&2; exit 2; }
output=$1
root=${2:-$(dirname "${BASH_SOURCE[0]}")/..}
[[ -f $root/train_gpt.cu && -d $root/llmc ]] || { echo "embed_source: error: $root holds no train_gpt.cu and llmc/" >&2; exit 1; }

list_sources() {
    echo train_gpt.cu
    (cd -- "$root" && find llmc -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \)) | sort
}

# One C string literal for each line. "?" is escaped because of trigraphs; a missing newline at a file's end is added.
as_literals() { sed -e 's/[\\"?]/\\&/g' -e 's/^/"/' -e 's/$/\\n"/'; }

commit() {
    local id
    if ! id=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        echo 'unknown: not built in a git checkout'
    elif [[ -n $(git -C "$root" status --porcelain -- train_gpt.cu llmc 2>/dev/null) ]]; then
        echo "$id and uncommitted changes"
    else
        echo "$id"
    fi
}

mkdir -p "$(dirname "$output")"
new=$output.$$
trap 'rm -f "$new"' EXIT
{
    echo '#include <stddef.h>'
    echo 'extern const char program_source[], program_commit[];'
    echo 'extern const size_t program_source_size;'
    printf 'const char program_commit[] = "%s";\n' "$(commit)"
    echo 'const char program_source[] ='
    list_sources | while IFS= read -r file; do
        printf '// ---- %s ----\n' "$file" | as_literals
        as_literals <"$root/$file"
    done
    echo ';'
    echo 'const size_t program_source_size = sizeof program_source - 1;'
} >"$new"
cmp -s "$new" "$output" || mv "$new" "$output"
