#!/usr/bin/env perl
# dev/test/on_gpu, with made-up GPUs and programs: every program gets a GPU with a free place, how it ended is told, a limit of time is a
# failure that says what it cut off.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

sub script { my ($name, $text) = @_; spew("$dir/$name", "#!/bin/sh\n$text"); chmod 0755, "$dir/$name"; return "$dir/$name" }
mkdir "$dir/bin";
script('bin/nvidia-smi', "echo 'GPU 0: one'; echo 'GPU 1: another'\n");
delete $ENV{CUDA_VISIBLE_DEVICES};
$ENV{PATH} = "$dir/bin:$ENV{PATH}";
chdir $dir or die;

sub together { return map { [finish($_, 30)] } map { start("$root/dev/test/on_gpu", $_) } @_ }
my @waits = map { script("waits$_", "echo \"ok 1 - on \$CUDA_VISIBLE_DEVICES\"; sleep 1; echo 1..1\n") } 1 .. 4;
$ENV{ON_EACH_GPU} = 2;
is(join(' ', sort map { $_->[1] =~ /on (\S+)/ ? $1 : 'none' } together(@waits)), '0 0 1 1', 'four programs share two GPUs evenly');
$ENV{ON_EACH_GPU} = 1;
my ($first, $second) = together($waits[0], script('pair', "echo 'ok 1'; sleep 0.1; echo 1..1\n"));
is("$first->[0] $second->[0]", '0 0', 'one on each');
{
    local $ENV{CUDA_VISIBLE_DEVICES} = '1';
    my $began = time;
    my @runs = together(@waits[0, 1]);
    is(join(' ', map { $_->[1] =~ /on (\S+)/ } @runs), '1 1', 'a GPU that is not ours stays out of it');
    cmp_ok(time - $began, '>=', 2, 'and who finds no place waits');
}
{
    local $ENV{ON_EACH_GPU} = 0;
    my ($run) = together(script('alone', "echo \"ok 1 - on [\$CUDA_VISIBLE_DEVICES]\"; echo 1..1\n"));
    like($run->[1], qr/on \[\]/, 'who runs alone sees all');
}

my ($failed) = together(script('fails', "echo 'ok 1'; echo '# fine'; echo 'not ok 2 - sums'; echo '# 3 in place of 4' >&2; echo 'ok 3'; echo 1..3; exit 5\n"));
is($failed->[0], 5, 'an exit status is handed on');
is($failed->[2], "# 3 in place of 4\n", 'what a failed check says is for whoever looks');
my ($log) = map { slurp($_) } glob "$dir/build/test_gpu/*fails.log";
is($log =~ tr/\n//, 6, 'the log has it all') or diag $log;
my ($killed) = together(script('killed', "echo 'ok 1'; kill -SEGV \$\$\n"));
is($killed->[0], 139, 'so is a signal');
$ENV{TEST_SECONDS} = 5;
my $own_group = "sleep 20.$$"; # as TrainTest::start has it
sub left { return grep { slurp("$_/cmdline") =~ /^sleep\x00\Q20.$$\E/ } glob '/proc/[0-9]*' }
my ($late) = together(script('late', "perl -e 'setpgrp; exec qw($own_group)' >/dev/null 2>&1 & echo 'ok 1'; echo 'ok 2'; sleep 20; echo 'ok 3'; echo 1..3\n"));
is($late->[0], 1, 'a limit of time is a failure');
like($late->[1], qr/^ok 2\nnot ok 3 - .*late ended after 5 s: what comes after check 2 was not run$/m, 'that says what was cut off');
is(scalar(() = left()), 0, 'and nothing of it is left');
done_testing;
