#!/usr/bin/env bash
# Fetches HellaSwag's published validation set, 10,042 items, for `train_gpt --eval hellaswag=FILE`.
#
#   hellaswag.sh [--out DIR]      DIR: evals/ beside this script by default
#
# Size and SHA-256 are checked. HELLASWAG_URL is another place to fetch hellaswag_val.jsonl from (also file://).
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
program=hellaswag
. "$here/fetch_lib.sh"
public=https://raw.githubusercontent.com/rowanz/hellaswag/master/data
fetch_one hellaswag_val.jsonl "${HELLASWAG_URL:-$public}/hellaswag_val.jsonl" 12246618 \
    0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588 "$@"
