# Downloading for the scripts in this folder: say, fail, have, and fetch_part. Sourced, not run; needs $program.

say() { printf '%s: %s\n' "$program" "$*"; }
fail() { printf '%s: error: %s\n' "$program" "$*" >&2; exit 1; }
usage_error() { printf '%s: error: %s; see --help\n' "$program" "$*" >&2; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }
file_bytes() { stat -c %s "$1" 2>/dev/null || echo 0; }

# fetch_part URL FILE: continues FILE.part with what the server still has, or begins it. Non-zero when that did not succeed; what
# arrived stays in FILE.part for the next try.
fetch_part() {
    local url=$1 part=$2.part
    if have curl; then
        local show=(-sS)
        [ -t 2 ] && show=(--progress-bar)
        curl -fL "${show[@]}" --retry 5 --retry-delay 2 --connect-timeout 30 --speed-limit 1000 --speed-time 60 -C - -o "$part" "$url"
    elif have wget; then
        wget -q --show-progress --tries=5 --timeout=60 -c -O "$part" "$url"
    else
        fail "neither curl nor wget is here; install one of them"
    fi
}

# fetch_checked URL FILE CHECK: FILE appears under its name only when it is complete and `CHECK PATH` accepts it. CHECK prints
# what is wrong. A finished FILE is kept; a partial download is continued, and begun again if what comes out is not accepted.
fetch_checked() {
    local url=$1 file=$2 check=$3 why
    if [ -e "$file" ]; then
        why=$($check "$file") && { say "$file is here already"; return; }
        say "$file: $why; fetching it again"
        rm -f "$file" || fail "$file cannot be removed"
    fi
    # Complete but not renamed: a server answers a request for nothing more with an error.
    if [ ! -e "$file.part" ] || ! $check "$file.part" >/dev/null; then
        [ -e "$file.part" ] && say "continuing $file at $(file_bytes "$file.part") bytes"
        fetch_part "$url" "$file" || fail "$url did not arrive (see above); run this again to continue where it stopped"
    fi
    if ! why=$($check "$file.part"); then
        rm -f "$file.part"
        fail "$url: $why; the partial file was removed, run this again to fetch it afresh"
    fi
    mv -f "$file.part" "$file" || fail "$file cannot be written"
    say "$file: $(file_bytes "$file") bytes"
}

# Prints what is wrong with a file against $published_bytes and $published_sum; silent and zero when it is as published.
check_published() {
    [ "$(file_bytes "$1")" = "$published_bytes" ] || { echo "$(file_bytes "$1") bytes, not $published_bytes"; return 1; }
    [ "$(sha256sum <"$1" | cut -d ' ' -f 1)" = "$published_sum" ] || { echo "SHA-256 is not that of the published file"; return 1; }
}

# fetch_published URL FILE BYTES SHA256: a file of which these are known.
fetch_published() {
    published_bytes=$3 published_sum=$4
    fetch_checked "$1" "$2" check_published
}

# The rest of a script that fetches one such file: fetch_one NAME URL BYTES SHA256, then the script's own arguments, --help or
# --out DIR; DIR is evals/ beside the script by default.
fetch_one() {
    local name=$1 url=$2 bytes=$3 sum=$4 out=$here/evals
    shift 4
    while [ $# -gt 0 ]; do
        case $1 in
            --help) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0 ;;
            --out) [ $# -ge 2 ] || usage_error "--out needs a value"; out=$2; shift 2 ;;
            *) usage_error "unknown option \"$1\"" ;;
        esac
    done
    mkdir -p "$out" || fail "$out cannot be made"
    fetch_published "$url" "$out/$name" "$bytes" "$sum"
}
