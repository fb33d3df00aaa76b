#!/usr/bin/env bash
# scripts/embed_source.sh: what it puts into the program is the source, byte for byte.
set -u
cd "$(dirname "$0")/../.." || exit 1
count=0
failed=0
ok() { # ok STATUS NAME
    count=$((count + 1))
    if [[ $1 -eq 0 ]]; then echo "ok $count - $2"; else echo "not ok $count - $2"; failed=1; fi
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
embed=$PWD/scripts/embed_source.sh

cat >"$work/show.c" <<'C'
#include <stdio.h>
#include <string.h>
extern const char program_source[], program_commit[];
extern const size_t program_source_size;
int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) return puts(program_commit) < 0;
    return strlen(program_source) != program_source_size || fwrite(program_source, 1, program_source_size, stdout) != program_source_size;
}
C
build() { ${CC:-gcc} -std=c11 -Wall -Wextra -Werror -o "$work/show" "$work/show.c" "$1"; }

# A small tree with everything that a C string literal could spoil.
root=$work/root
mkdir -p "$root/llmc/cpu" "$root/llmc/cuda" "$root/dev"
printf '// "quoted" \\n back\\slash ??/ trigraph ??= %%d\n\ttab\n\n' >"$root/train_gpt.cu"
printf 'int a; // \xc3\xa9 \\' >"$root/llmc/a.c"
printf 'int b;\n' >"$root/llmc/cpu/b.h"
printf '__global__ k();\n' >"$root/llmc/cuda/k.cu"
printf 'inline\n' >"$root/llmc/cuda/k.cuh"
printf 'no source\n' | tee "$root/llmc/notes.txt" "$root/dev/d.c" >/dev/null
{
    printf '// ---- train_gpt.cu ----\n'; cat "$root/train_gpt.cu"
    printf '// ---- llmc/a.c ----\n'; cat "$root/llmc/a.c"; echo
    for file in llmc/cpu/b.h llmc/cuda/k.cu llmc/cuda/k.cuh; do printf '// ---- %s ----\n' "$file"; cat "$root/$file"; done
} >"$work/wanted"
"$embed" "$work/out/text.c" "$root" && build "$work/out/text.c" && "$work/show" >"$work/found"
ok $? 'a tree of odd characters is embedded and compiles without a warning'
cmp "$work/wanted" "$work/found"
ok $? 'every byte is there, files in order, nothing else'

touch -d '2001-01-01' "$work/out/text.c"
"$embed" "$work/out/text.c" "$root"
[[ $(date -r "$work/out/text.c" +%Y) == 2001 ]]
ok $? 'an unchanged source leaves the file alone'
# What is compiled must be newer, too: nothing else tells make that the text has changed.
echo 'int c;' >"$root/llmc/c.c"
"$embed" "$work/out/text.c" "$root"
grep -q 'int c;' "$work/out/text.txt" && [[ $(echo $(ls "$work/out")) == 'text.c text.txt' ]] &&
    [[ $(date -r "$work/out/text.c" +%Y) != 2001 ]]
ok $? 'a new source file changes it, both files are new, and no temporary file stays'

if command -v git >/dev/null; then
    unset $(git rev-parse --local-env-vars) # or, run from a hook, it would be the wrong repository that is changed
    git -C "$root" init -q && git -C "$root" add . &&
        git -C "$root" -c user.name=a -c user.email=a@b commit -q --no-verify -m x
    "$embed" "$work/out/text.c" "$root" && build "$work/out/text.c"
    [[ $("$work/show" commit) == "$(git -C "$root" rev-parse HEAD)" ]]
    ok $? 'the commit is the one checked out'
    echo 'int d;' >>"$root/llmc/c.c"
    "$embed" "$work/out/text.c" "$root" && build "$work/out/text.c"
    [[ $("$work/show" commit) == "$(git -C "$root" rev-parse HEAD) and uncommitted changes" ]]
    ok $? 'changes since then are admitted'
else
    count=$((count + 1)); echo "ok $count # SKIP no git"
fi

"$embed" "$work/whole.c" && build "$work/whole.c" && "$work/show" | grep -q '^// ---- llmc/base/common.c ----$'
ok $? 'the project itself'
message=$("$embed" "$work/none.c" "$work/out" 2>&1)
[[ $? -eq 1 && $message == "embed_source: error: "* && ! -e $work/none.c ]]
ok $? 'a folder that holds no source is refused'
echo "1..$count"
exit $failed
