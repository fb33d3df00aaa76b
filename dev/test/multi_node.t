#!/usr/bin/env perl
# scripts/multi_node_ssh.sh with an imitated ssh and trainer: who is started where, with which words, and how it ends.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
use Time::HiRes qw(sleep);

sub program { my ($path, $text) = @_; spew($path, $text); chmod 0755, $path }

mkdir "$dir/$_" for qw(bin copy copy/scripts);
program("$dir/copy/scripts/multi_node_ssh.sh", slurp("$root/scripts/multi_node_ssh.sh"));
program("$dir/copy/scripts/multi_node.slurm", slurp("$root/scripts/multi_node.slurm"));
program("$dir/bin/ssh", qq(#!/bin/bash\nprintf '%s\\n' "\$*" >>'$dir/command_lines'\nhost=\$1\nshift\nHOST=\$host exec sh -c "\$*"\n));
program("$dir/bin/mpirun", qq(#!/bin/bash\necho "mpirun \$*"; echo "\$TRAIN_GPT_SECRET" >>'$dir/secrets'\n));
program("$dir/bin/srun", qq(#!/bin/bash\necho "srun \$*, port \$MASTER_PORT"; echo "\$TRAIN_GPT_SECRET" >>'$dir/secrets'\n));
program("$dir/copy/train_gpt", <<"END");
#!/bin/bash
trap 'touch stopped; exit 3' TERM
echo "\$TRAIN_GPT_SECRET" >>'$dir/secrets'
END
spew("$dir/copy/train_gpt", slurp("$dir/copy/train_gpt") . <<'END');
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK on $HOST, meets $MASTER_ADDR:$MASTER_PORT, $# words: $*"
[[ $* == *fail* && $RANK == 1 ]] && exit 7
[[ $* == *wait* ]] || exit 0
while [[ ! -e stopped ]]; do sleep 0.02; done
exit 3
END
$ENV{PATH} = "$dir/bin:$ENV{PATH}";
delete @ENV{qw(TRAIN_GPT_SECRET SLURM_SUBMIT_DIR)};
mkdir $ENV{TMPDIR} = "$dir/tmp";
my $script = "$dir/copy/scripts/multi_node_ssh.sh";
$ENV{PORT} = first_port;

# All secrets since the last call.
sub secrets { my @all = split /\n/, slurp("$dir/secrets"); unlink "$dir/secrets"; return @all }

my ($status, $out, $err) = run($script, 'one two', 2, '--out', "a b's", '--sample', '$HOME');
is($status, 0, 'four ranks on two machines') or diag $err;
my @expected = map { my $host = $_ < 2 ? 'one' : 'two'; my $local = $_ % 2; "$_ of 4, $local on $host, meets one:$ENV{PORT}, 4 words: --out a b's --sample \$HOME" } 0 .. 3;
is_deeply([sort split /\n/, $out], \@expected, 'each knows who it is, and words arrive as they were');
my @made = secrets();
ok(@made == 4 && (grep { $_ eq $made[0] } @made) == 4 && $made[0] =~ /^[0-9a-f]{64}$/, 'and all have one secret of 32 bytes');
($status) = run($script, 'one two', 1);
my @again = secrets();
ok(@again == 2 && $again[0] =~ /^[0-9a-f]{64}$/ && $again[0] ne $made[0], 'another run another one');
my $lines = slurp("$dir/command_lines");
ok(length $lines > 500 && !(grep { index($lines, $_) >= 0 } @made, @again), 'none stands in a command line, where ps shows it');
{
    local $ENV{TRAIN_GPT_SECRET} = q(a secret of one's "own" $HOME);
    run($script, 'one two', 1);
    is_deeply([secrets()], [($ENV{TRAIN_GPT_SECRET}) x 2], 'one that is set is taken as it is');
}
($status) = run($script, 'one two', 1, '--out', 'fail');
is($status, 7, 'the status of a rank that fails');

secrets();
my $run = start($script, 'one two', 1, '--out', 'wait');
for (1 .. 400) { last if (() = slurp("$dir/secrets") =~ /\n/g) == 2; sleep 0.02 }
sleep 0.1;
kill 'INT', $run->{pid};
($status) = finish($run, 20);
is($status, 3, 'asked to stop, all end with the status of an interrupted run');
is_deeply([glob "$dir/tmp/*"], [], 'nothing is left in the folder for temporary files');

# Words from outside are words: no command of theirs runs, on either side.
for (['a port that is a command', qr/^multi_node_ssh: error: PORT .* is no port number$/m, '1; touch X', 'one two'],
    ['a port that is one over there', qr/is no port number$/m, '1$(touch X)', 'one two'],
    ['a port too large', qr/PORT 65536 is no port number$/m, 65536, 'one two'],
    ['a host that is a command', qr/'.*' is no name of a host$/m, 29500, 'one;touch${IFS}X'],
    ['a host that is an option of ssh', qr/is no name of a host$/m, 29500, 'one -oProxyCommand=touch${IFS}X'],
    ['no host', qr/no host is given$/m, 29500, ' '])
{
    my ($what, $pattern, $port, $hosts) = @$_;
    local $ENV{PORT} = $port;
    ($status, undef, $err) = run($script, $hosts, 1);
    ok($status eq '2' && $err =~ $pattern && !-e 'X' && !-e "$dir/copy/X", "$what: " . $err =~ s{\n}{}r);
}
($status) = run($script, 'one', 1, '--out', "';touch X;'", '$(touch X)', '`touch X`', "line\nbreak");
ok($status eq '0' && !-e "$dir/copy/X", 'options that are commands are options');

secrets();
{
    local $ENV{WITH} = 'mpi';
    ($status, $out) = run($script, 'one two', 4, '--gpus', 'all');
    is($out, "mpirun -np 8 -H one:4,two:4 -x MASTER_ADDR -x MASTER_PORT -x TRAIN_GPT_SECRET ./train_gpt --gpus all\n", 'with MPI');
    like((secrets())[0], qr/^[0-9a-f]{64}$/, 'which gets the secret in its environment');
}
for (['no words', 2], ['no number', 2, 'one'], ['a number that is none', 2, 'one', 'x']) {
    my ($what, $expected, @words) = @$_;
    ($status, undef, $err) = run($script, @words);
    ok($status eq $expected && $err =~ /^usage:/, $what);
}
($status, $out) = run($script, '--help');
ok($status eq '0' && $out =~ /TRAIN_GPT_SECRET/ && $out !~ /^set /m, '--help');

# Slurm: srun hands the environment on.
{
    local @ENV{qw(SLURM_JOB_ID SLURM_SUBMIT_DIR)} = (123456, "$dir/copy");
    ($status, $out) = run("$dir/copy/scripts/multi_node.slurm", '--preset', 'x');
    is($out, "srun --kill-on-bad-exit=1 ./train_gpt --preset x, port 23456\n", 'Slurm: a port from the number of the job');
    like((secrets())[0], qr/^[0-9a-f]{64}$/, 'and a secret');
    delete $ENV{SLURM_JOB_ID};
    ($status, $out, $err) = run("$dir/copy/scripts/multi_node.slurm", '--preset', 'x');
    ok($status eq '2' && $out eq '' && $err =~ /\Amulti_node\.slurm: error: this is no job of Slurm: give the script to sbatch, [^\n]+\n\z/, 'outside of Slurm: one line')
        or diag "$status $out$err";
}
done_testing;
