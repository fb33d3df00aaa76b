#!/usr/bin/env bash
# The speedrun as its track asks for it: all GPUs of one machine, meant for eight H100, on FineWeb10B, several runs in a row. Each run
# has a seed and a folder of its own; scripts/record makes a submission from their logs.
#   RUNS=10  PRESET=2025-10-27  OUT=runs/speedrun_$PRESET  GPUS=all  KEEP=0      further arguments go to train_gpt
#
# Called again it goes on: runs whose log is whole are kept, folders of runs that ended early move to OUT/unfinished. The shards are
# fetched to data/fineweb10B, and those that are there are checked, unless --train-files and --val-files say where others are.
# KEEP=1 keeps the 2 GB checkpoint at the end of every run.
set -eu -o pipefail
[[ ${1-} != --help ]] || { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs=${RUNS:-10} preset=${PRESET:-2025-10-27} gpus=${GPUS:-all} keep=${KEEP:-0}
out=${OUT:-runs/speedrun_$preset}

say() { printf 'speedrun: %s\n' "$*"; }
fail() { printf 'speedrun: error: %s\n' "$*" >&2; exit 1; }

[[ $runs =~ ^[1-9][0-9]{0,3}$ ]] || fail "RUNS=$runs is no number of runs"
# Only compared as text: [[ KEEP -eq 1 ]] would run commands that stand in KEEP.
[[ $keep == 0 || $keep == 1 ]] || fail "KEEP=$keep is neither 0 nor 1"
[[ -x ./train_gpt ]] || fail "./train_gpt is missing: run make (it needs nvcc and cuDNN; make says what it found)"
for argument; do
    case $argument in
        --seed | --seed=* | --out | --out=* | --preset | --preset=* | --gpus | --gpus=*)
            fail "${argument%%=*} is set here: RUNS, OUT, PRESET and GPUS choose seeds, folder, preset and GPUs" ;;
    esac
done

# ---- the machine -------------------------------------------------------------------------------------------------------
names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true)
[[ -n $names ]] || fail "nvidia-smi finds no GPU here"
found=$(wc -l <<<"$names") h100=$(grep -c H100 <<<"$names" || true)
if [[ $found -ne 8 || $h100 -ne 8 || $gpus != all && $gpus != 8 ]]; then
    say "note: $found GPUs ($h100 of them H100), GPUS=$gpus; times of the track are taken on eight H100"
fi

# ---- the data ----------------------------------------------------------------------------------------------------------
given() { local want=$1 a; shift; for a; do [[ $a == "$want" || $a == "$want="* ]] && return; done; return 1; }
if given --train-files "$@" && given --val-files "$@"; then
    say "shards: as given"
else
    data/fineweb10B.sh 9 || fail "the shards are not complete (see above); call this again to continue"
fi

# ---- the runs ----------------------------------------------------------------------------------------------------------
whole() { # whether a log is that of a whole run
    perl -Iscripts -MRunLog -e 'my $l = eval { RunLog::parse($ARGV[0]) }; exit($l && RunLog::unfinished($l) eq "" ? 0 : 1)' "$1"
}

# Sets run folders aside whose log is not whole. True when a whole one is left.
finished() {
    local folder log done=1
    for folder in "$1"/*/; do
        folder=${folder%/} log=$(echo "$folder"/*.txt)
        if [[ ! -e $folder ]]; then
            continue
        elif whole "$log"; then
            done=0
        else
            mkdir -p "$out/unfinished"
            mv "$folder" "$out/unfinished/"
            say "$folder holds no log of a whole run: moved to $out/unfinished"
        fi
    done
    return $done
}

for ((run = 1; run <= runs; run++)); do
    if finished "$out/$run"; then
        say "run $run of $runs is there already: $(echo "$out/$run"/*/*.txt)"
        continue
    fi
    say "run $run of $runs"
    status=0
    ./train_gpt --preset "$preset" --gpus "$gpus" --seed "$run" --out "$out/$run" "$@" || status=$?
    [[ $status -eq 0 ]] || fail "run $run ended with status $status (see above); call this again: runs that are whole are kept"
    [[ $keep == 1 ]] || rm -f "$out/$run"/*/step_*.safetensors
done
say "all runs are there. A submission: scripts/record --name NAME --what 'what changed' $(printf %q "$out")/[0-9]*/*/*.txt"
