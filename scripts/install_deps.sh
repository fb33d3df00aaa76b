#!/usr/bin/env bash
# Installs what the project builds with, by apt; with another package manager it says in one line what to install.
# Does nothing when all is there. Exit 1 when something the build cannot do without is missing and cannot be installed.
#
#   install_deps.sh [--dry-run | --required]     --required: only what the build cannot do without
set -u

say() { printf 'install_deps: %s\n' "$*"; }
fail() { printf 'install_deps: error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

dry_run= optional=yes
case "${1-}" in
    '') ;;
    --dry-run) dry_run=1 ;;
    --required) optional= ;;
    --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) printf 'install_deps: error: unknown option "%s"; --dry-run and --required are known\n' "$1" >&2; exit 2 ;;
esac

# What is needed, one row each; "-" where the package above already brings it.
#        name      need      apt              dnf               pacman   zypper           apk           brew
parts='
         gcc       required  gcc,libc6-dev    gcc               gcc      gcc              gcc,musl-dev  gcc
         make      required  make             make              make     make             make          make
         perl      required  perl             perl              perl     perl             perl,perl-utils perl
         jansson   required  libjansson-dev   jansson-devel     jansson  libjansson-devel jansson-dev   jansson
         OpenBLAS  optional  libopenblas-dev  openblas-devel    openblas openblas-devel   openblas-dev  openblas
         PCRE2     optional  libpcre2-dev     pcre2-devel       pcre2    pcre2-devel      pcre2-dev     pcre2
         gnuplot   optional  gnuplot-nox      gnuplot           gnuplot  gnuplot          gnuplot       gnuplot'

# A library counts as there when a program with it compiles and links: that proves header and library, however installed.
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
        make) have make ;;
        # Tests run under prove; the scripts use core modules that Debian's perl-base alone lacks.
        perl) have perl && have prove && perl -MTest::More -MJSON::PP -MCompress::Zlib -MDigest::SHA -e 1 2>/dev/null ;;
        jansson) links '#include <jansson.h>\nint main(void){json_object();}' -ljansson ;;
        OpenBLAS) links '#include <cblas.h>\nint main(void){return openblas_get_num_threads()<1;}' -lopenblas ;;
        PCRE2) links '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\nint main(void){pcre2_code_free(0);}' -lpcre2-8 ;;
        gnuplot) have gnuplot ;;
    esac
}

# Fills missing (names), required_missing (names) and packages (for the manager in $1, a column of the table).
look() {
    local column=$1 name need apt dnf pacman zypper apk brew
    missing='' required_missing='' packages=''
    while read -r name need apt dnf pacman zypper apk brew; do
        [ -n "$name" ] || continue
        [ -n "$optional" ] || [ "$need" = required ] || continue
        present "$name" && continue
        missing="$missing $name"
        [ "$need" = optional ] || required_missing="$required_missing $name"
        local of=${!column//,/ }
        packages="$packages $of"
    done <<<"$parts"
    missing=${missing# } required_missing=${required_missing# } packages=${packages# }
}

manager=none
for name in apt-get dnf pacman zypper apk brew; do
    if have "$name"; then manager=$name; break; fi
done
column=${manager/apt-get/apt}
[ "$manager" = none ] && column=apt
look "$column"
if [ -z "$missing" ]; then
    say "all there: gcc, make, perl, jansson${optional:+, OpenBLAS, PCRE2, gnuplot}"
    exit 0
fi

# The end when nothing could be installed: an error if the build needs it, else a note.
give_up() {
    if [ -n "$required_missing" ]; then fail "missing: $missing. $1"; fi
    say "note: missing, the build goes on without: $missing. $1"
    exit 0
}

root=()
if [ "$(id -u)" != 0 ]; then
    if have sudo; then
        root=(sudo)
        [ -t 0 ] || root=(sudo -n) # nobody there to type a password
    fi
fi
as_root() { ${root[@]+"${root[@]}"} "$@"; }

case $manager in
    apt-get) ;;
    none) give_up "No package manager was found; these are Debian's names of what to install: $packages" ;;
    dnf) give_up "Install with: dnf install $packages" ;;
    pacman) give_up "Install with: pacman -S --needed $packages" ;;
    zypper) give_up "Install with: zypper install $packages" ;;
    apk) give_up "Install with: apk add $packages" ;;
    brew) give_up "Install with: brew install $packages" ;;
esac
if [ -n "$dry_run" ]; then
    say "would install with apt-get: $packages"
    exit 0
fi
[ "$(id -u)" = 0 ] || [ ${#root[@]} -gt 0 ] || give_up "Not root, and there is no sudo; as root run: apt-get install $packages"

apt() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 -qq "$@" </dev/null; }
log=$(mktemp) || fail "no temporary file can be made"
trap 'rm -f "$log"' EXIT
say "installing with apt-get: $packages"
apt update >"$log" 2>&1 || say "note: apt-get update failed ($(grep -m 1 '^[EW]:' "$log" || tail -n 1 "$log")); trying the lists that are there"
# One package a mirror lacks must not keep the others out.
if ! apt install -y --no-install-recommends $packages >"$log" 2>&1; then
    for package in $packages; do
        apt install -y --no-install-recommends "$package" >"$log" 2>&1 ||
            say "note: $package was not installed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
    done
fi
look apt
[ -z "$missing" ] || give_up "apt-get did not install them; see the lines above"
say "done"
