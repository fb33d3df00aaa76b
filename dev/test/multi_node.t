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
program("$dir/bin/ssh", qq(#!/bin/bash\nhost=\$1\nshift\nHOST=\$host exec bash -c "\$*"\n));
program("$dir/bin/mpirun", qq(#!/bin/bash\necho "mpirun \$*"\n));
program("$dir/copy/train_gpt", <<'END');
#!/bin/bash
trap 'touch stopped; exit 3' TERM
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK on $HOST, meets $MASTER_ADDR:$MASTER_PORT, $# words: $*"
[[ $* == *fail* && $RANK == 1 ]] && exit 7
[[ $* == *wait* ]] || exit 0
while [[ ! -e stopped ]]; do sleep 0.05; done
exit 3
END
$ENV{PATH} = "$dir/bin:$ENV{PATH}";
my $script = "$dir/copy/scripts/multi_node_ssh.sh";
$ENV{PORT} = 20000 + $$ % 20000;

my ($status, $out, $err) = run($script, 'one two', 2, '--out', "a b's", '--sample', '$HOME');
is($status, 0, 'four ranks on two machines') or diag $err;
my @expected = map { my $host = $_ < 2 ? 'one' : 'two'; my $local = $_ % 2; "$_ of 4, $local on $host, meets one:$ENV{PORT}, 4 words: --out a b's --sample \$HOME" } 0 .. 3;
is_deeply([sort split /\n/, $out], \@expected, 'each knows who it is, and words arrive as they were');
($status) = run($script, 'one two', 1, '--out', 'fail');
is($status, 7, 'the status of a rank that fails');

my $run = start($script, 'one two', 1, '--out', 'wait');
my $ready = "/tmp/train_gpt.$ENV{PORT}.pid";
for (1 .. 200) { last if -s $ready; sleep 0.05 }
sleep 0.3; # the trainer's own start
kill 'INT', $run->{pid};
($status) = finish($run, 20);
is($status, 3, 'asked to stop, all end with the status of an interrupted run');
unlink $ready;

$ENV{WITH} = 'mpi';
($status, $out) = run($script, 'one two', 4, '--gpus', 'all');
is($out, "mpirun -np 8 -H one:4,two:4 -x MASTER_ADDR -x MASTER_PORT ./train_gpt --gpus all\n", 'with MPI');
for (['no words', 2], ['no number', 2, 'one'], ['a number that is none', 2, 'one', 'x']) {
    my ($what, $expected, @words) = @$_;
    ($status, undef, $err) = run($script, @words);
    ok($status eq $expected && $err =~ /^usage:/, $what);
}
done_testing;
