#!/usr/bin/env perl
# Networks of August 2026, whose heads of q and k are narrower than those of v, trained on the GPU and on the CPU from the same
# weights: losses of all steps, on every path.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my ($cpu, $gpu) = ("$root/train_gpt_cpu", "$root/train_gpt");
$ENV{OMP_NUM_THREADS} = `nproc` > 8 ? 8 : `nproc` + 0;
write_shard('train_1.bin', documents(30000, 1));
write_shard('val.bin', documents(5000, 2));
my $steps = 8;
my @small = (qw(--preset toy-2026-08 --num-heads 2 --mlp-dim 512 --val-every 8 --adam-rate 0.001 --muon-rate 0.003 --repeat), '--train-files',
    "$dir/train_*.bin", '--val-files', "$dir/val.bin");

# The root of the mean square of the differences of two runs' training losses; inf when one lacks steps.
sub difference {
    my ($one, $other) = map { losses("$dir/$_") } @_;
    my $squares = 0;
    for (1 .. $steps) {
        return 'inf' if !defined $one->{$_} || !defined $other->{$_};
        $squares += ($one->{$_} - $other->{$_})**2;
    }
    return sqrt($squares / $steps);
}

# Widths of 96 and 128, which Hopper has kernels for, and of 48 and 64, which are portable ones' everywhere.
for my $e (128, 64) {
    my @size = (@small, '--model-dim', 2 * $e);
    my $init = "$dir/init$e.safetensors";
    run_ok("heads of $e: initial weights", $cpu, @size, qw(--stop-at 1 --val-every 0 --save-init), $init, '--out', "$dir/init$e");
    my @runs = ([exact => $exact], [bf16 => $cpu], [gpu => $gpu], [portable => $gpu, '--portable'], [deterministic => $gpu, '--deterministic']);
    run_together(map { my ($name, $program, @options) = @$_; ["$name", $program, @size, @options, '--init-from', $init, '--out', "$dir/$name$e"] } @runs);
    my $rounding = difference("bf16$e", "exact$e");
    ok($rounding > 0 && $rounding < 5e-3, "bf16 on the CPU is off by $rounding (root mean square of $steps steps)");
    for my $name (qw(gpu portable deterministic)) {
        my $error = difference("$name$e", "exact$e");
        cmp_ok($error, '<=', 3 * $rounding, "$name: at most three times that: $error");
    }
    my ($here, $there) = map { val_losses("$dir/$_$e")->{$steps} // 'none' } qw(gpu exact);
    cmp_ok(abs($here - $there), '<=', 4 * $rounding, "and the last validation, $here and $there");
}
done_testing;
