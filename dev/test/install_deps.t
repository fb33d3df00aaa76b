#!/usr/bin/env perl
# scripts/install_deps.sh on imitated machines: a PATH that holds a few basic tools and one package manager that only
# writes down how it was called. Nothing is installed.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(remove_tree);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(slurp);
use Test::More;

my $script = dirname(dirname(dirname(abs_path(__FILE__)))) . '/scripts/install_deps.sh';
my $dir = tempdir(CLEANUP => 1);

sub found { (grep { -x } map { "$_/$_[0]" } split /:/, $ENV{PATH})[0] }

sub program {
    my ($name, $text) = @_;
    open my $out, '>', "$dir/bin/$name" or die;
    print $out "#!" . found('bash') . "\n$text\n";
    close $out;
    chmod 0755, "$dir/bin/$name";
}

# A machine with these programs only: each is [name, text of a shell script]. $uid is what `id -u` answers.
# Returns (exit status, stdout, stderr, calls of the package manager).
sub on_machine {
    my ($uid, $arguments, @programs) = @_;
    remove_tree("$dir/bin");
    unlink "$dir/calls";
    mkdir "$dir/bin";
    for (qw(bash env mktemp rm sed grep tail touch)) { symlink found($_), "$dir/bin/$_" or die }
    program('id', "echo $uid");
    program(@$_) for @programs;
    my $pid = fork // die;
    if (!$pid) {
        open STDIN, '<', '/dev/null' or die;
        open STDOUT, '>', "$dir/stdout" or die;
        open STDERR, '>', "$dir/stderr" or die;
        $ENV{PATH} = "$dir/bin";
        delete $ENV{DEBIAN_FRONTEND};
        $ENV{CUDA_HOME} = "$dir/cuda";
        $ENV{SSL_CERT_FILE} = "$dir/bin/bash"; # any file: certificates are there
        exec "$dir/bin/bash", $script, @$arguments or die;
    }
    waitpid $pid, 0;
    return ($? >> 8, map { slurp("$dir/$_") } 'stdout', 'stderr', 'calls');
}

my $recorder = "echo \"\${DEBIAN_FRONTEND-} \${0##*/} \$*\" >>'$dir/calls'";
# A gcc that makes every program, so that all libraries seem to be there; and one that finds no library.
my @tools = (['gcc', 'exit 0'], map { [$_, 'exit 0'] } qw(make perl prove wget gnuplot));
my @no_libraries = (['gcc', 'case "$*" in *" -l"*) exit 1;; esac'], @tools[1 .. $#tools]);
my @required = (['gcc', 'case "$*" in *-lopenblas*|*-lpcre2*|*-lsodium*) exit 1;; esac'], map { [$_, 'exit 0'] } qw(make perl prove));

my ($status, $out, $err, $calls) = on_machine(0, [], @tools, ['apt-get', $recorder]);
ok($status == 0 && $out =~ /^install_deps: all there: .*\n\z/ && $calls eq '', 'all there: says so, and apt-get is not called');

($status, $out, $err, $calls) = on_machine(0, [], @no_libraries, ['apt-get', "$recorder; exit 0"]);
ok($status == 1 && $err =~ /^install_deps: error: missing: jansson OpenBLAS PCRE2 libsodium\. [^\n]*\n\z/, 'apt-get that installs nothing: an error that names what is missing') or diag("$out$err");
like($calls, qr/^noninteractive apt-get .*update\n(?: apt-get .*\n){2}noninteractive apt-get .*install -y --no-install-recommends libjansson-dev libopenblas-dev libpcre2-dev libsodium-dev\n/, 'apt-get: update, then only what is missing, without questions');

# apt-get that knows how much there is to install, and says how far it is. A log gets a line every ten seconds: here none.
my $simulated = <<"END";
case "\$*" in
    *" -s install"*) printf 'Inst a\nConf a\nInst b\nInst c\n' ;;
    *--print-uris*) printf "'x:a' a.deb 2500000 MD5Sum:1\n'x:b' b.deb 1 MD5Sum:2\n" ;;
    *"install -y"*) printf 'dlstatus:1:7.1:Retrieving\npmstatus:a:50:Unpacking\n'; echo 'E: disk full'; exit 100 ;;
esac
END
($status, $out, $err, $calls) = on_machine(0, [], @no_libraries, ['apt-get', $simulated]);
like($out, qr/^install_deps: required: libjansson-dev\ninstall_deps: optional: libopenblas-dev \(fast [^)]*\), libpcre2-dev \([^)]*\), libsodium-dev \([^)]*\)\n/m, 'required packages are told from optional ones, with what these are for');
like($out, qr/^install_deps: installing with apt-get: 3 packages with what they need, 3 MB to download\n/m, 'and how much that is, before it starts');
like($out, qr/^install_deps: note: not installed: libjansson-dev \(E: disk full\) libopenblas-dev [^\n]*\n\z/m, 'packages that cannot be installed are tried one by one and named in one line') or diag("$out$err");
unlike("$out$err", qr/status:/, 'lines of progress stay inside');
($status, $out, $err) = on_machine(1000, ['--dry-run'], @no_libraries, ['apt-get', $simulated]);
ok($status == 0 && $out =~ /would install with apt-get: 3 packages/, '--dry-run says it too, to anyone');

# Here apt-get install makes gcc find the libraries.
my $gcc = "case \"\$*\" in *' -l'*) [ -e '$dir/bin/installed' ];; esac";
($status, $out, $err) = on_machine(0, [], ['gcc', $gcc], @tools[1 .. $#tools], ['apt-get', "case \"\$*\" in *install*) touch '$dir/bin/installed';; esac"]);
ok($status == 0 && $out =~ /done\n\z/ && $err eq '', 'apt-get that works: done') or diag("$out$err");

# No network: update and install fail. The packages are not tried one by one: each could wait for a time-out.
($status, $out, $err, $calls) = on_machine(0, [], @no_libraries, ['apt-get', "$recorder; echo 'E: Could not resolve the mirror'; exit 100"]);
ok($status == 1 && $err =~ /\A[^\n]*cannot be fetched \(Could not resolve the mirror\): is there a network\?\n\z/, 'no network: one line says why') or diag("$out$err");
is(scalar(() = $calls =~ / install -y/g), 1, 'after a single try');

($status, $out, $err, $calls) = on_machine(0, [], @required, ['apt-get', "$recorder; exit 1"]);
ok($status == 0 && $out =~ /note: missing, the build goes on without: OpenBLAS PCRE2 wget libsodium gnuplot\./, 'only optional parts missing: a note') or diag("$out$err");

($status, $out, $err, $calls) = on_machine(0, ['--required'], @required, ['apt-get', $recorder]);
ok($status == 0 && $out =~ /^install_deps: all there: gcc, make, perl, jansson\n\z/ && $calls eq '', '--required: does not look for them') or diag("$out$err");

($status, $out, $err, $calls) = on_machine(1000, [], @no_libraries, ['apt-get', $recorder]);
ok($status == 1 && $err =~ /\A[^\n]*as root run: apt-get install --no-install-recommends libjansson-dev [^\n]*\n\z/ && $out eq '' && $calls eq '', 'neither root nor sudo: one line for the administrator');

($status, $out, $err, $calls) = on_machine(1000, [], @no_libraries, ['apt-get', 'exit 0'], ['sudo', $recorder]);
like($calls, qr/^ ?sudo -n env DEBIAN_FRONTEND=noninteractive .*apt-get .*update$/m, 'sudo, that must not ask for a password where nobody sits');

($status, $out, $err, $calls) = on_machine(0, ['--dry-run'], @no_libraries, ['apt-get', $recorder]);
ok($status == 0 && $out =~ /required: libjansson-dev\n/ && $calls !~ /update|install -y --no/, '--dry-run');

my @no_loader = grep { $_->[0] ne 'wget' } @tools;
($status, $out, $err, $calls) = on_machine(0, ['--quickstart'], @no_loader, ['apt-get', $recorder]);
like($calls, qr/ install -y --no-install-recommends wget ca-certificates$/m, 'neither curl nor wget: the data scripts need one, and certificates');
($status, $out, $err, $calls) = on_machine(0, ['--quickstart'], @no_loader, ['curl', 'exit 0'], ['apt-get', $recorder]);
ok($status == 0 && $calls eq '' && $out eq "install_deps: all there: gcc, make, perl, jansson, OpenBLAS, PCRE2, wget\n", 'curl will do; --quickstart does not ask for gnuplot');
($status, $out, $err, $calls) = on_machine(0, [], @tools, ['nvcc', 'exit 0'], ['apt-get', $recorder]);
like($calls, qr/ install -y --no-install-recommends g\+\+$/m, 'nvcc without g++: it is required then');
($status, $out, $err, $calls) = on_machine(1000, ['--packages'], @no_libraries, ['dnf', $recorder]);
ok($status == 0 && $out eq "jansson-devel openblas-devel pcre2-devel libsodium-devel\n" && $calls eq '', '--packages: names for other scripts');
($status, $out) = on_machine(0, ['--packages'], @tools, ['apt-get', $recorder]);
ok($status == 0 && $out eq "\n", '--packages where nothing is missing: an empty line');
($status, $out) = on_machine(0, ['--help'], @tools);
like($out, qr/\AInstalls what .*--required .*--quickstart .*--dry-run .*--packages .*nothing else\n\z/s, '--help');

for (['dnf', 'dnf install jansson-devel openblas-devel pcre2-devel'], ['pacman', 'pacman -S --needed jansson openblas pcre2'], ['zypper', 'zypper install libjansson-devel'],
    ['apk', 'apk add jansson-dev'], ['brew', 'brew install jansson openblas pcre2'])
{
    my ($manager, $line) = @$_;
    ($status, $out, $err, $calls) = on_machine(0, [], @no_libraries, [$manager, $recorder]);
    ok($status == 1 && $err =~ /\A[^\n]*Install with: \Q$line\E[^\n]*\n\z/ && $calls eq '', "$manager: one line with its names") or diag("$out$err");
}
($status, $out, $err) = on_machine(0, []);
like($err, qr/missing: gcc make perl jansson .*No package manager was found.*gcc libc6-dev make perl libjansson-dev/, 'a bare machine without package manager');
($status, $out, $err) = on_machine(0, ['--fast'], @tools);
ok($status == 2 && $err =~ /unknown option "--fast"/, 'unknown option: exit 2');
done_testing();
