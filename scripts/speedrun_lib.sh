# A series of runs for a track of the speedrun. Sourced, not run, by speedrun_8xH100.sh and speedrun_1xH200.sh, which set
#   track          8xH100: number and name of the GPUs that its times are taken on
#   preset runs out gpus keep     of the series
#   fixed          what the track does not let further arguments name, beside --seed, --out, --preset and --gpus
# and call speedrun with their arguments.

say() { printf 'speedrun: %s\n' "$*"; }
fail() { printf 'speedrun: error: %s\n' "$*" >&2; exit 1; }

given() { # whether an option is among the arguments behind it
    local want=$1 a
    shift
    for a; do
        [[ $a == "$want" || $a == "$want="* ]] && return
    done
    return 1
}

check_arguments() {
    local option
    [[ $runs =~ ^[1-9][0-9]{0,3}$ ]] || fail "RUNS=$runs is no number of runs"
    # Only compared as text: [[ KEEP -eq 1 ]] would run commands that stand in KEEP.
    [[ $keep == 0 || $keep == 1 ]] || fail "KEEP=$keep is neither 0 nor 1"
    [[ -x ./train_gpt ]] || fail "./train_gpt is missing: run make (it needs nvcc and cuDNN; make says what it found)"
    for option in --seed --out --preset --gpus; do
        given $option "$@" && fail "$option is set here: RUNS, OUT, PRESET and GPUS choose seeds, folder, preset and GPUs"
    done
    for option in $fixed; do
        given "$option" "$@" && fail "$option: all runs of track $track have the same"
    done
    return 0
}

check_machine() {
    local names found named used count=${track%%x*} model=${track#*x}
    names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true)
    [[ -n $names ]] || fail "nvidia-smi finds no GPU here"
    found=$(wc -l <<<"$names") named=$(grep -c "$model" <<<"$names" || true) used=$gpus
    [[ $used != all ]] || used=$found
    if [[ $used != "$count" || $named -ne $found ]]; then
        say "note: $found GPUs ($named of them $model), GPUS=$gpus; times of the track are taken on $count x $model"
    fi
}

fetch_data() {
    if given --train-files "$@" && given --val-files "$@"; then
        say "shards: as given"
    else
        data/fineweb10B.sh 9 || fail "the shards are not complete (see above); call this again to continue"
    fi
    # Some presets' losses need the bytes of the tokens.
    given --vocab "$@" || [[ -e data/vocab ]] || data/gpt2_vocab.sh || fail "the vocabulary did not arrive (see above)"
}

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

speedrun() {
    local run status
    check_arguments "$@"
    check_machine
    fetch_data "$@"
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
    say "all runs are there. A submission: scripts/record --track $track --name NAME --what 'what changed' $(printf %q "$out")/[0-9]*/*/*.txt"
}
