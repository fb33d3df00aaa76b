#!/usr/bin/env bash
# Installs what the project builds with, by apt; with another package manager it says in one line what to
# install. Does nothing when all is there. Exit 1 when something the build cannot do without is missing and
# cannot be installed.
#
#   install_deps.sh [--required | --quickstart] [--dry-run | --packages]
#
#   --required      only what the build cannot do without
#   --quickstart    that, and what `make quickstart` and the scripts in data/ use
#   --dry-run       says what would be installed and how much that is, and installs nothing
#   --packages      prints the names of the missing packages, for this machine's manager, and nothing else
set -u

say() { printf 'install_deps: %s\n' "$*"; }
fail() { printf 'install_deps: error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

dry_run='' names_only='' set=all
for option in "$@"; do
    case $option in
        --required | --quickstart) set=${option#--} ;;
        --dry-run) dry_run=1 ;;
        --packages) names_only=1 ;;
        --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) printf 'install_deps: error: unknown option "%s"; see --help\n' "$option" >&2; exit 2 ;;
    esac
done

# What is needed, one row each: required by the build, used by make quickstart too, or by the rest alone
# ("extra").
#        name      need       apt              dnf               pacman   zypper           apk           brew
parts='
         gcc       required   gcc,libc6-dev    gcc               gcc      gcc              gcc,musl-dev  gcc
         make      required   make             make              make     make             make          make
         perl      required   perl             perl              perl     perl             perl,perl-utils perl
         jansson   required   libjansson-dev   jansson-devel     jansson  libjansson-devel jansson-dev   jansson
         OpenBLAS  quickstart libopenblas-dev  openblas-devel    openblas openblas-devel   openblas-dev  openblas
         PCRE2     quickstart libpcre2-dev     pcre2-devel       pcre2    pcre2-devel      pcre2-dev     pcre2
         wget      quickstart wget,ca-certificates wget              wget     wget             wget          wget
         libsodium extra      libsodium-dev    libsodium-devel   libsodium libsodium-devel libsodium-dev libsodium
         gnuplot   extra      gnuplot-nox      gnuplot           gnuplot  gnuplot          gnuplot       gnuplot'
# The CUDA program is linked by g++: needed where nvcc is.
if have nvcc || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    parts="$parts
         g++       required   g++              gcc-c++           gcc      gcc-c++          g++           gcc"
fi

purpose() {
    case $1 in
        gcc | make | perl | jansson) echo 'the build and its tests' ;;
        g++) echo 'the CUDA program' ;;
        OpenBLAS) echo 'fast matrix products on the CPU' ;;
        PCRE2) echo "GPT-2's tokens" ;;
        wget) echo 'the downloads of data/' ;;
        libsodium) echo 'ranks on several machines' ;;
        gnuplot) echo 'plots' ;;
    esac
}

# A library counts as there when a program with it compiles and links: that proves header and library, however
# installed.
links() {
    local dir status
    dir=$(mktemp -d) || fail "no temporary folder can be made"
    printf '%b\n' "$1" >"$dir/probe.c"
    shift
    gcc "$dir/probe.c" -o "$dir/probe" "$@" >/dev/null 2>&1
    status=$?
    rm -rf "$dir"
    return $status
}

present() {
    case $1 in
        gcc) have gcc && links 'int main(void){return 0;}' ;;
        g++) have g++ ;;
        make) have make ;;
        # Tests run under prove; the scripts use core modules that Debian's perl-base alone lacks.
        perl) have perl && have prove && perl -MTest::More -MJSON::PP -MCompress::Zlib -MDigest::SHA -e 1 \
            2>/dev/null ;;
        jansson) links '#include <jansson.h>\nint main(void){json_object();}' -ljansson ;;
        OpenBLAS) links '#include <cblas.h>\nint main(void){return openblas_get_num_threads()<1;}' \
            -I/usr/include/openblas -lopenblas ;;
        PCRE2) links '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\nint main(void){pcre2_code_free(0);}' \
            -lpcre2-8 ;;
        # Debian's curl and wget do without certificates, and then refuse every server.
        wget) { have curl || have wget; } && { [ "$manager" != apt-get ] || [ -e "$certificates" ]; } ;;
        libsodium) links '#include <sodium.h>\nint main(void){return sodium_init();}' -lsodium ;;
        gnuplot) have gnuplot ;;
    esac
}
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}

in_set() { [ "$set" = all ] || [ "$1" = required ] || [ "$1" = "$set" ]; }

# Fills missing and required_missing (names), packages (for the manager in $1, a column of the table), and the
# two lists to be read out: packages of the required parts, and those of the others with their purposes.
look() {
    local column=$1 name need apt dnf pacman zypper apk brew of
    missing='' required_missing='' packages='' required_packages='' optional_packages=''
    while read -r name need apt dnf pacman zypper apk brew; do
        [ -n "$name" ] && in_set "$need" || continue
        present "$name" && continue
        of=${!column//,/ }
        missing="$missing $name"
        packages="$packages $of"
        if [ "$need" = required ]; then
            required_missing="$required_missing $name"
            required_packages="$required_packages $of"
        else
            optional_packages="${optional_packages:+$optional_packages, }$of ($(purpose "$name"))"
        fi
    done <<<"$parts"
    missing=${missing# } required_missing=${required_missing# }
    packages=${packages# } required_packages=${required_packages# }
}

# The names of all parts of the set, with commas.
all_parts() {
    local name need rest list=''
    while read -r name need rest; do
        [ -n "$name" ] && in_set "$need" && list="$list, $name"
    done <<<"$parts"
    printf '%s' "${list#, }"
}

manager=none
for name in apt-get dnf pacman zypper apk brew; do
    if have "$name"; then manager=$name; break; fi
done
column=${manager/apt-get/apt}
[ "$manager" = none ] && column=apt
look "$column"
if [ -n "$names_only" ]; then
    printf '%s\n' "$packages"
    exit 0
fi
if [ -z "$missing" ]; then
    say "all there: $(all_parts)"
    exit 0
fi

# The end when nothing could be installed: an error if the build needs it, else a note.
give_up() {
    if [ -n "$required_missing" ]; then fail "missing: $missing. $1"; fi
    say "note: missing, the build goes on without: $missing. $1"
    exit 0
}

case $manager in
    apt-get) ;;
    none) give_up "No package manager was found; these are Debian's names of what to install: $packages" ;;
    dnf) give_up "Install with: dnf install $packages" ;;
    pacman) give_up "Install with: pacman -S --needed $packages" ;;
    zypper) give_up "Install with: zypper install $packages" ;;
    apk) give_up "Install with: apk add $packages" ;;
    brew) give_up "Install with: brew install $packages" ;;
esac

root=()
if [ "$(id -u)" != 0 ]; then
    have sudo || [ -n "$dry_run" ] ||
        give_up "Not root, and there is no sudo; as root run: apt-get install --no-install-recommends $packages"
    root=(sudo)
    [ -t 0 ] || root=(sudo -n) # nobody there to type a password
fi

# How much that is, as far as apt-get knows now: "57 packages, 82 MB to download". Nothing where it has no
# package lists.
amount() {
    local count bytes
    count=$(apt-get -qq -s install --no-install-recommends $packages 2>/dev/null | grep -c '^Inst ')
    bytes=$(apt-get -qq -y --print-uris install --no-install-recommends $packages 2>/dev/null | {
        total=0
        while read -r uri name size rest; do
            case $size in '' | *[!0-9]*) ;; *) total=$((total + size)) ;; esac
        done
        echo "$total"
    })
    [ "$count" = 0 ] || printf '%s packages with what they need, %s MB to download' "$count" \
        $(((bytes + 999999) / 1000000))
}
announce() {
    local much
    much=$(amount)
    [ -z "$required_packages" ] || say "required: $required_packages"
    [ -z "$optional_packages" ] || say "optional: $optional_packages"
    say "$1 with apt-get: ${much:-how much that is apt-get does not know before an update}"
}
if [ -n "$dry_run" ]; then
    announce 'would install'
    exit 0
fi

log=$(mktemp) || fail "no temporary file can be made"
trap 'rm -f "$log"' EXIT
apt() {
    ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
        apt-get -qq -o DPkg::Lock::Timeout=120 \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@" </dev/null
}
reason() { grep -m 1 '^E:' "$log" || grep -m 1 '^W:' "$log" || tail -n 1 "$log"; }

# apt-get's progress, which it mixes into its output: dlstatus and pmstatus lines with a percentage. A
# terminal shows each, a log one every ten seconds. All other lines go to $log.
show_progress() {
    local line kind rest percent shown=$SECONDS
    : >"$log"
    while IFS= read -r line; do
        case $line in
            dlstatus:*:*:*) kind=fetching ;;
            pmstatus:*:*:*) kind=installing ;;
            *) printf '%s\n' "$line" >>"$log"; continue ;;
        esac
        IFS=: read -r _ _ percent rest <<<"$line"
        if [ -t 1 ]; then
            printf '\rinstall_deps: %-10s %3s%%' "$kind" "${percent%%.*}"
        elif [ $((SECONDS - shown)) -ge 10 ]; then
            shown=$SECONDS
            say "$kind: ${percent%%.*}%"
        fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
}
install() {
    apt -o APT::Status-Fd=1 install -y --no-install-recommends "$@" 2>&1 | show_progress
    return "${PIPESTATUS[0]}"
}

say "reading the package lists (apt-get update)"
not_updated=''
apt -o APT::Update::Error-Mode=any update >"$log" 2>&1 || not_updated=$(reason)
announce installing
# One package that a mirror lacks must not keep the others out; without a network there is no use in going on.
if ! install $packages; then
    failed=''
    if [ -n "$not_updated" ] && ! grep -q '^dpkg: error' "$log"; then
        look apt
        give_up "They cannot be fetched (${not_updated#[EW]: }): is there a network?"
    fi
    for package in $packages; do
        install "$package" || failed="$failed $package ($(reason))"
    done
    [ -z "$failed" ] || say "note: not installed:$failed"
fi
look apt
[ -z "$missing" ] || give_up "apt-get did not install them; see the lines above"
say "done"
