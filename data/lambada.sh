#!/usr/bin/env bash
# Fetches LAMBADA's test set as OpenAI published it, 5,153 items, for `train_gpt --eval lambada=FILE`.
#
#   lambada.sh [--out DIR]      DIR: evals/ beside this script by default
#
# Size and SHA-256 are checked. LAMBADA_URL is another place to fetch lambada_test.jsonl from (also file://).
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
program=lambada
. "$here/fetch_lib.sh"
public=https://openaipublic.blob.core.windows.net/gpt-2/data
fetch_one lambada_test.jsonl "${LAMBADA_URL:-$public}/lambada_test.jsonl" 1819752 \
    4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226 "$@"
