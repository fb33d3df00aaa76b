#!/usr/bin/env perl
# dev/test/fresh/run.sh, with imitated debootstrap, unshare and chroot: what it calls good and bad, and when it says that a system
# could not be made. No system is made and nothing is installed; the real ones take minutes.
use strict;
use warnings;
use Cwd            qw(abs_path);
use File::Basename qw(dirname);
use File::Temp     qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(slurp);
use Test::More;

my $script = dirname(abs_path(__FILE__)) . '/fresh/run.sh';
my $dir    = tempdir(CLEANUP => 1);
mkdir "$dir/bin";

sub program {
    my ($name, $text) = @_;
    open my $out, '>', "$dir/bin/$name" or die;
    print $out "#!/bin/sh\n$text\n";
    close $out;
    chmod 0755, "$dir/bin/$name";
}

sub run {
    local $ENV{PATH} = "$dir/bin:$ENV{PATH}";
    my $all  = join ' ', map {"'$_'"} $script, '--cache', "$dir/cache", '--logs', "$dir/logs", @_;
    my $text = `$all 2>&1`;
    return ($? >> 8, $text);
}

# What a system prints and its status, for: its making, and each command by network and user.
my %good = (
    'make'                     => ['', 0],
    'cut root make quickstart' =>
      ['install_deps: error: missing: gcc. They cannot be fetched (no route): is there a network?', 1],
    'connected user make quickstart' => [
        'install_deps: error: missing: gcc. Not root, and there is no sudo; as root run: apt-get install gcc perl',
        1
    ],
    'connected root apt-get install gcc perl --yes' => ['', 0],
    'connected root make quickstart'                =>
      ['order-2 byte model 2.7 bits per byte, this model 1.8 bits per byte: below it', 0],
    'connected root make test' => ['Files=40, Tests=2700, 300 wallclock secs', 0],
    map({ ("cut root $_" => ['data: error: the file did not arrive (see above)', 1]) } 'quickstart_text.sh',
        'gpt2_vocab.sh', 'fineweb10B.sh 1'),
);

sub systems {
    my (%of) = @_;
    my $cases = '';
    for my $case (sort keys %of) {
        my ($network, $user, $command) = $case =~ /^(cut|connected) (\w+) (.*)$/;
        my ($text, $status) = @{$of{$case}};
        next if !$network;
        $cases .= "'$network $user '*'$command') echo '$text'; exit $status ;;\n";
    }

    # unshare [options] bash -c SCRIPT inside TREE USER HOME FOLDER COMMAND, or: unshare [options] true
    program('unshare', <<"END");
network=connected
while :; do
    case \$1 in
        --net) network=cut ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
[ "\$1" = true ] && exit 0
[ -d "\$5\$8" ] || { echo 'no such folder'; exit 9; }
case "\$network \$6 \$9" in
    *'install make'|*' make') echo '$of{make}[0]'; exit $of{make}[1] ;;
$cases
esac
echo "unexpected: \$network \$6 \$9"
exit 99
END
}
program('id',          'echo 0');
program('chroot',      'exit 0');
program('debootstrap', 'mkdir -p "$3/etc/apt/apt.conf.d"');
program('apt-get',     'exit 0');
program('apt-config',  'exit 0');
program('git',         'printf "Makefile\\0"');               # of ls-files

# ---- wrong use, and machines that cannot ------------------------------------------------------------------------------

for (
    ['no suite',                qr/which systems\?/,                          2],
    ['unknown option',          qr/unknown option "--fast"/,                  2, '--fast'],
    ['a suite that is no name', qr/"a\/b" is not the name of a Debian suite/, 2, 'a/b'],
    ['an unknown user', qr/--users: "guest" is none of: root user/, 2, '--users', 'root,guest',     'trixie'],
    ['no command',      qr/--commands needs at least one of: quickstart test/, 2, '--commands', '', 'trixie'],
    ['an option without its value', qr/--cut needs a value/, 2, '--cut']
  )
{
    my ($name, $message, $wanted, @arguments) = @$_;
    my ($status, $text) = run(@arguments);
    ok($status == $wanted && $text =~ /\Afresh: error: $message[^\n]*\n\z/, $name) or diag("$status: $text");
}
my ($status, $text) = run('--help');
ok($status == 0 && $text =~ /\ABoth commands.*--cache.*Exit: 0 [^\n]*\n\z/s, '--help') or diag($text);
systems(%good);
program('id', 'echo 1000');
($status, $text) = run('trixie');
ok($status == 3 && $text =~ /\Afresh: error: needs root: [^\n]*\n\z/, 'not root: status 3');
program('id',      'echo 0');
program('unshare', 'exit 1');
($status, $text) = run('trixie');
ok($status == 3 && $text =~ /\Afresh: error: this machine allows no namespaces/, 'no namespaces: status 3');

systems(%good);
my $works = slurp("$dir/bin/debootstrap") =~ s/^.*\n//r;
program('debootstrap', 'echo "I: begins"; echo "E: no such mirror"; exit 1');
($status, $text) = run('trixie');
ok(
    $status == 3
      && $text =~ /^# trixie: debootstrap made no system: E: no such mirror$/m
      && $text =~ /^1\.\.0$/m,
    'no mirror: status 3, says so, and reports no result'
);
program('debootstrap', $works);

# ---- good and bad results ----------------------------------------------------------------------------------------------

($status, $text) = run('--users', 'root', 'trixie');
is($status,                             0,        'a system on which all is well') or diag($text);
is(join('', $text =~ /^(ok|not ok)/mg), 'ok' x 6, 'network cut, both commands, three scripts that fetch');
like(
    $text,
    qr/^ok 2 - trixie, root: make quickstart, below it \(\d+ s\)\nok 3 - trixie, root: make test, Tests=2700 \(\d+ s\)$/m,
    'with what they came to, and times'
);
like($text, qr/^1\.\.6\n# 6 of 6 good, \d+ s in all; logs in /m, 'and the plan at the end');
ok(-s "$dir/cache/trixie.tar" && !glob("$dir/cache/run.*"), 'the bare system is kept, the used one is not');
program('debootstrap', 'echo "E: not again"; exit 1');
($status, $text) = run('--users', 'user', '--commands', 'quickstart', 'trixie');
like(
    $text,
    qr/^ok 1 - trixie, user without sudo: make quickstart names in one line .*\nok 2 - trixie, and the administrator installs that/m,
    'the kept one is used again; a user is told what to ask for'
);
ok(
    $status == 1
      && $text =~
      /^not ok 3 - trixie, user: make quickstart \(\d+ s, status 1\)\n#   install_deps: error: .*\n#   all of it: /m,
    'a command that fails: not ok, with the end of its output'
) or diag($text);

for (
    [
        'two lines of errors',
        'cut root make quickstart',
        "x: error: one\ninstall_deps: error: missing: gcc. They cannot be fetched (no): is there a network?",
        1
    ],
    ['no error at all', 'cut root make quickstart', 'all there',                          0],
    ['a time-out',      'cut root make quickstart', $good{'cut root make quickstart'}[0], 124],
    [
        'a result that is not below the bar',
        'connected root make quickstart',
        'order-2 byte model 2.7 bits per byte, this model 2.8 bits per byte: NOT below it', 0
    ],
    ['tests that did not run', 'connected root make test', 'nothing to be done', 0],
    [
        'no downloader',
        'cut root gpt2_vocab.sh',
        'data: error: neither curl nor wget is here; it did not arrive', 1
    ]
  )
{
    my ($name, $case, $output, $ended) = @$_;
    systems(%good, $case => [$output, $ended]);
    ($status, $text) = run('--users', 'root', 'trixie');
    ok($status == 1 && (() = $text =~ /^not ok/mg) == 1, "$name: one result that is not ok") or diag($text);
}
systems(%good, 'make' => ['E: no package make', 100]);
($status, $text) = run('--users', 'root', 'trixie');
ok($status == 3 && $text =~ /make cannot be installed: E: no package make/, 'not even make: status 3')
  or diag($text);
done_testing;
