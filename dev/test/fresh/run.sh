#!/usr/bin/env bash
# Both commands of README on bare Debian systems, as a newcomer runs them: make quickstart and make test, as
# root and as a user without sudo, and what they say when the network is cut. Needs root, debootstrap and a
# mirror. Prints TAP with times.
#
#   run.sh [options] SUITE...        SUITE: bookworm, trixie or another one that debootstrap knows
#
#   --users LIST      root,user (both)
#   --commands LIST   quickstart,test (both)
#   --cut LIST        before,after (both): the network cut before and after the packages are installed; none
#   --cache DIR       bare systems are kept here between runs; fresh/ in the user's cache folder by default
#   --renew           makes them anew
#   --logs DIR        what every command printed; build/fresh by default
#   --keep            leaves the systems that were used in DIR of --cache
#
# The tracked and new files of this working tree are what is tried. Mirror and apt's settings are those of
# this machine.
#
# Exit: 0 all is well, 1 something is not, 2 wrong use, 3 a system could not be made (nothing is known of it).
set -u -o pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd) || exit 1

fail() { printf 'fresh: error: %s\n' "$2" >&2; exit "$1"; }
contains() { [[ ",$1," == *",$2,"* ]]; }

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/train_gpt/fresh
logs=$project/build/fresh users=root,user commands=quickstart,test cut=before,after renew='' keep='' suites=()

# check_list OPTION VALUE WORD...: every word of the value is known.
check_list() {
    local option=$1 value=$2 word
    shift 2
    for word in ${value//,/ }; do
        contains "$(IFS=,; echo "$*")" "$word" || fail 2 "$option: \"$word\" is none of: $*"
    done
    [ -n "${value//,/}" ] || fail 2 "$option needs at least one of: $*"
}
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --renew) renew=1; shift; continue ;;
        --keep) keep=1; shift; continue ;;
        --users | --commands | --cut | --cache | --logs) [ $# -ge 2 ] || fail 2 "$1 needs a value" ;;
        -*) fail 2 "unknown option \"$1\"; see --help" ;;
        *) suites+=("$1"); shift; continue ;;
    esac
    case $1 in
        --users) users=$2; check_list "$1" "$2" root user ;;
        --commands) commands=$2; check_list "$1" "$2" quickstart test ;;
        --cut) cut=$2; check_list "$1" "$2" before after none ;;
        --cache) cache=$2 ;;
        --logs) logs=$2 ;;
    esac
    shift 2
done
[ ${#suites[@]} -gt 0 ] || fail 2 "which systems? For example: run.sh bookworm trixie; see --help"
for suite in "${suites[@]}"; do
    [[ $suite =~ ^[a-z][a-z0-9.-]*$ ]] || fail 2 "\"$suite\" is not the name of a Debian suite"
done
[ "$(id -u)" = 0 ] || fail 3 "needs root: debootstrap and chroot do"
for tool in debootstrap unshare chroot git tar timeout; do
    command -v "$tool" >/dev/null ||
        fail 3 "$tool is not installed (Debian: apt-get install debootstrap git util-linux)"
done
unshare --mount --pid --fork --net true 2>/dev/null ||
    fail 3 "this machine allows no namespaces of one's own (unshare)"
mkdir -p "$cache" "$logs" || fail 1 "no folder can be made at $cache or $logs"
cache=$(cd "$cache" && pwd) logs=$(cd "$logs" && pwd)

# ---- bare systems ------------------------------------------------------------------------------------------

# Where this machine takes Debian's packages from; nothing: debootstrap's own choice.
mirror() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null |
        grep -v security | head -n 1
}

# make_base SUITE: the smallest Debian there is, as a tar file in the cache.
make_base() {
    local suite=$1 tree=$cache/$1.new proxy=''
    if [ -e "$cache/$suite.tar" ] && [ -z "$renew" ]; then return 0; fi
    rm -rf "$tree"
    eval "$(apt-config shell proxy Acquire::http::Proxy 2>/dev/null)"
    if ! http_proxy=${proxy:-${http_proxy-}} debootstrap --variant=minbase "$suite" "$tree" $(mirror) \
        >"$logs/$suite.debootstrap" 2>&1; then
        rm -rf "$tree"
        printf '# %s: debootstrap made no system: %s\n' "$suite" \
            "$(grep '^E:' "$logs/$suite.debootstrap" | tail -n 1)"
        return 1
    fi
    rm -f "$tree"/var/cache/apt/archives/*.deb
    tar -C "$tree" -cf "$cache/$suite.tar.new" . && mv "$cache/$suite.tar.new" "$cache/$suite.tar" ||
        fail 1 "$cache cannot be written"
    rm -rf "$tree"
}

# unpack SUITE USER: a bare system in $tree, with this machine's network settings, the project in the user's
# home, and make, which README asks for beside git.
unpack() {
    local suite=$1 user=$2
    tree=$cache/run.$$/$suite.$user
    home=$([ "$user" = root ] && echo /root || echo /home/user)
    mkdir -p "$tree" && tar -C "$tree" -xf "$cache/$suite.tar" || return 1
    apt-config dump | grep -E '^Acquire::(http|https|ftp|Check-|Max-|Min-|ForceIP|Retries)' \
        >"$tree/etc/apt/apt.conf.d/90host"
    cat /etc/resolv.conf >"$tree/etc/resolv.conf"
    printf '127.0.0.1 localhost\n' >"$tree/etc/hosts" # debootstrap makes none; installers and containers do
    [ "$user" = root ] || chroot "$tree" useradd --create-home user || return 1
    mkdir -p "$tree$home/gpt"
    (cd "$project" && git ls-files -z --cached --others --exclude-standard | xargs -0 -r ls -d 2>/dev/null |
        tar -cf - -T -) |
        tar -C "$tree$home/gpt" -xf - || return 1
    [ "$user" = root ] || chroot "$tree" chown -R user: "$home/gpt"
    inside connected root 300 "$logs/$suite.$user.make" \
        'apt-get -qq update && apt-get -qq install --no-install-recommends make'
}

# inside connected|cut USER SECONDS LOG COMMAND: runs a line of bash in $tree, in the project's folder. Leaves
# status and seconds. Whatever it started ends with it.
inside() {
    local network=$1 user=$2 limit=$3 log=$4 line=$5 begin=$SECONDS spaces=(--mount --pid --fork --kill-child)
    [ "$network" = connected ] || spaces+=(--net)
    timeout --kill-after=10 "$limit" unshare "${spaces[@]}" bash -c '
        mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mount --rbind /sys "$1/sys" || exit 125
        exec chroot --userspec="$2:$2" --groups= "$1" \
            /usr/bin/env -i HOME="$3" USER="$2" LANG=C.UTF-8 TERM=dumb \
            DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            bash -c "cd $4 || exit 125; $5"' \
        inside "$tree" "$user" "$([ "$user" = root ] && echo /root || echo "$home")" "$home/gpt" "$line" \
        </dev/null >"$log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=''
    seconds=$((SECONDS - begin))
    return $status
}

# ---- results -----------------------------------------------------------------------------------------------

count=0 bad=0 unknown=0
# result STATUS NAME [LOG]: a line of TAP; of what went wrong the end of the log, too.
result() {
    count=$((count + 1))
    if [ "$1" = 0 ]; then
        printf 'ok %d - %s (%d s)\n' "$count" "$2" "$seconds"
        return
    fi
    bad=$((bad + 1))
    printf 'not ok %d - %s (%d s, status %d)\n' "$count" "$2" "$seconds" "$status"
    tail -n 8 "$3" | sed 's/^/#   /'
    printf '#   all of it: %s\n' "$3"
}

# ends_with_one_line LOG PATTERN: the command failed, of its own accord, and exactly one line of its output is
# an error, like this.
ends_with_one_line() {
    [ "$status" != 0 ] && [ "$status" != 124 ] && [ "$(grep -c 'error: ' "$1")" = 1 ] &&
        grep -q -E "error: $2" "$1"
}

cut_before() {
    local log=$logs/$1.cut_before
    inside cut root 120 "$log" 'make quickstart'
    ends_with_one_line "$log" 'missing: .*cannot be fetched .*is there a network'
    result $? "$1, nothing installed, network cut: make quickstart says so in one line" "$log"
}

# The scripts that fetch data find a downloader, do not wait for ever, and say that nothing arrived.
cut_after() {
    local script log
    for script in quickstart_text.sh gpt2_vocab.sh 'fineweb10B.sh 1'; do
        log=$logs/$1.cut_after_${script%% *}
        inside cut root 120 "$log" "rm -rf data/quickstart; data/$script"
        ends_with_one_line "$log" '.*(did not arrive|could be fetched)' &&
            ! grep -q 'neither curl nor wget' "$log"
        result $? "$1, network cut: data/$script says so in one line" "$log"
    done
}

# A user who can install nothing is told in one line what the administrator runs; here the administrator does
# that.
ask_administrator() {
    local log=$logs/$1.user.refused line
    inside connected user 120 "$log" 'make quickstart'
    ends_with_one_line "$log" 'missing: .*as root run: apt-get install '
    result $? "$1, user without sudo: make quickstart names in one line what to install" "$log"
    line=$(sed -n 's/.*as root run: \(apt-get install [a-z0-9 .+-]*\)$/\1/p' "$log")
    inside connected root 900 "$logs/$1.user.administrator" "${line:-false} --yes"
    result $? "$1, and the administrator installs that" "$logs/$1.user.administrator"
}

run_commands() {
    local suite=$1 user=$2 command log detail
    for command in ${commands//,/ }; do
        log=$logs/$suite.$user.$command
        inside connected "$user" 2400 "$log" "make $command"
        detail=$(sed -n -e 's/^Files=.*\(Tests=[0-9]*\).*/, \1/p' \
            -e 's/^order-2 byte model.*: \(below it\)$/, \1/p' "$log" | tail -n 1)
        [ "$status" = 0 ] && [ -n "$detail" ]
        result $? "$suite, $user: make $command$detail" "$log"
    done
}

try_suite() {
    local suite=$1 user
    local begin=$SECONDS
    make_base "$suite" || { unknown=$((unknown + 1)); return; }
    printf '# %s: bare system of %s, %d s\n' "$suite" \
        "$(date -r "$cache/$suite.tar" +%Y-%m-%d)" $((SECONDS - begin))
    for user in ${users//,/ }; do
        if ! unpack "$suite" "$user"; then
            printf '# %s: make cannot be installed: %s\n' "$suite" "$(tail -n 1 "$logs/$suite.$user.make")"
            unknown=$((unknown + 1))
            return
        fi
        if [ "$user" = root ]; then
            contains "$cut" before && cut_before "$suite"
        else
            ask_administrator "$suite"
        fi
        run_commands "$suite" "$user"
        [ "$user" = root ] && contains "$cut" after && cut_after "$suite"
        [ -n "$keep" ] || rm -rf "$tree"
    done
}

[ -n "$keep" ] || trap 'rm -rf "$cache/run.$$" "$cache"/*.new' EXIT
child=''
trap '[ -z "$child" ] || { kill "$child"; wait "$child"; }; exit 130' INT TERM HUP
for suite in "${suites[@]}"; do try_suite "$suite"; done
printf '1..%d\n# %d of %d good%s, %d s in all; logs in %s\n' "$count" $((count - bad)) "$count" \
    "$([ "$unknown" = 0 ] || printf ', %d systems could not be made' "$unknown")" "$SECONDS" "$logs"
[ "$bad" = 0 ] || exit 1
[ "$unknown" = 0 ] || exit 3
