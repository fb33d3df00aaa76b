#!/usr/bin/env perl
# dev/bench/by_turns.sh and scaling.sh with stand-ins for nvidia-smi and the trainer, whose steps take as long as its options say: which
# steps of which stage are timed, the order of turns, means and rows.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

mkdir "$dir/bin" or die "$dir/bin: $!\n";
spew("$dir/bin/nvidia-smi", <<'END');
#!/bin/sh
case $1 in -L) echo 'GPU 0: X (UUID: 0)'; echo 'GPU 1: X (UUID: 1)';; *) echo X; echo X;; esac
END
# A step of stage k of three takes --seed + k ms on one GPU, half of that on two; the first six of a stage and the last 100 more.
spew("$dir/trainer", <<'END');
#!/usr/bin/env perl
my %o;
my @rest = @ARGV;
while (@rest) { my $n = shift @rest; $o{$n} = @rest && $rest[0] !~ /^--/ ? shift @rest : 1 }
exit 1 if $o{'--seed'} == 13;
my ($length, $ms) = ($o{'--num-scheduled'} ? $o{'--num-scheduled'} / 3 : 1000, 0);
my $gpus = $o{'--gpus'} =~ /^(\d)$/ ? $1 : 1;
mkdir $o{'--out'}; mkdir "$o{'--out'}/run";
open my $log, '>', "$o{'--out'}/run/x.txt";
for my $t (1 .. $o{'--stop-at'}) {
    my ($k, $in) = (int(($t - 1) / $length), ($t - 1) % $length + 1);
    $ms += ($o{'--seed'} + $k) / $gpus + ($in <= 6 || $in == $length ? 100 : 0);
    printf $log "step:%d/%d train_time:%.2fms step_avg:1ms\n", $t, 99, $ms;
}
END
chmod 0755, "$dir/bin/nvidia-smi", "$dir/trainer";
$ENV{PATH} = "$dir/bin:$ENV{PATH}";
delete $ENV{$_} for qw(STEPS STAGES ROUNDS GPU GPUS TRAINER);

my @turns = ("$root/dev/bench/by_turns.sh", '--csv', "$dir/rows.csv", 'train', 'val');
{
    local ($ENV{STEPS}, $ENV{STAGES}) = (48, 3);
    my ($out) = run_ok('two programs in three stages', @turns, "$dir/trainer --seed 100", "$dir/trainer --seed 90 --mlp fp8");
    my @times = $out =~ /^turn (\d): (\S+) ms, stage (\d) of 3, steps (\S+): \S+ --seed (\d+)/mg;
    my @wanted = map { my $r = $_; map { my $s = $_; map { ($r, sprintf('%.2f', $s + $_ - 1), $_, (16 * $_ - 10) . '-' . (16 * $_ - 2), $s) } 1 .. 3 } 100, 90 } 1, 2;
    is_deeply(\@times, \@wanted, 'by turns, every stage without its first six steps and its last two');
    like($out, qr/^mean: 91\.00 ms, 0\.901 of the first, stage 2 of 3, steps 22-30: \S+ --seed 90 --mlp fp8$/m, 'and the means');
    my @rows = split /\n/, slurp("$dir/rows.csv");
    is(scalar @rows, 1 + 12, 'a row for each time');
    like($rows[-1], qr/,1 x X,"step, by turns","\S+ --seed 90 --mlp fp8, stage 3 of 3, steps 38-46, turn 2",92\.00,ms,/, 'that says of what');
}
my ($out) = run_ok('one stage', @turns, "$dir/trainer --seed 100");
like($out, qr/^turn 2: 100\.00 ms, window 11, steps 9-34: /m, 'is all steps at one window');
{
    local ($ENV{GPUS}, $ENV{ROUNDS}) = (2, 1);
    ($out) = run_ok('two GPUs', @turns, "$dir/trainer --seed 100");
    like($out, qr/^turn 1: 50\.00 ms, window 11, steps 9-34: /m, 'train together');
    like((split /\n/, slurp("$dir/rows.csv"))[-1], qr/,2 x X,"step, by turns",/, 'and the row says so');
    $ENV{GPUS} = 3;
    refuses('more GPUs than there are', 2, qr/^by_turns\.sh: GPUS=3: this machine has 2/, @turns, "$dir/trainer --seed 100");
}
refuses('no program', 2, qr/^by_turns\.sh: no program: /, @turns);
{
    my ($status, $said, $err) = run(@turns, "$dir/trainer --seed 5", "$dir/trainer --seed 13");
    is($status, 1, 'a trainer that fails ends it');
    like($said, qr/^turn 1: 5\.00 ms/m, 'after what was timed');
}
{
    local ($ENV{STEPS}, $ENV{STAGES}) = (29, 3);
    refuses('stages of nine steps', 2, qr/STAGES=3: at most 9, of ten steps and more/, @turns, "$dir/trainer --seed 100");
}
{
    local ($ENV{STEPS}, $ENV{STAGES}, $ENV{TRAINER}) = (48, 3, "$dir/trainer");
    ($out) = run_ok('scaling over stages', "$root/dev/bench/scaling.sh", 'train', 'val', '--seed', 100);
    like($out, qr/^1 GPU, stage 2 of 3, steps 22-30: 101\.00 ms a step \(101\.00 101\.00\)$/m, 'one GPU, the mean of both');
    like($out, qr/^2 GPUs, stage 3 of 3, steps 38-46: 51\.00 ms a step, 2\.00 times one GPU$/m, 'two');
}
done_testing;
