#!/usr/bin/env perl
# The CUDA program beside the CPU program: the same weights and tokens give the same losses on every path of the GPU, and
# checkpoints go from one to the other in both directions.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my ($cpu, $gpu) = ("$root/train_gpt_cpu", "$root/train_gpt");
$ENV{OMP_NUM_THREADS} = `nproc` > 8 ? 8 : `nproc` + 0; # the CPU's run is the long one here; too small for more
write_shard('train_1.bin', documents(30000, 1));
write_shard('val.bin', documents(5000, 2));
# Learning rates at which rounding stays rounding. Two runs on the CPU from weights of which each was moved by a unit in the last place
# of fp32, either way, are at most 6.1e-4 apart at a step with the bf16 head, and 1.7e-3 (root mean square of the steps: 6.5e-4) with
# the FP8 head, whose codes turn by 6% or 12% at once; at eight and ten times these rates 2.6e-3 and 3.9e-3. The loss falls from 5.95 to 3.73.
my @small = (qw(--preset tiny --model-dim 256 --num-heads 2 --mlp-dim 512 --micro-batch-tokens 128 --num-scheduled 16 --num-extension 4
    --adam-rate 0.001 --muon-rate 0.003 --val-tokens 1024 --val-every 10), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my $steps = 20;

# Of two runs' training losses: the largest difference, its root mean square, and the number of steps that both have.
sub compare {
    my ($one, $other) = map { losses("$dir/$_") } @_;
    my @both = grep { exists $other->{$_} } keys %$one;
    my ($most, $squares) = (0, 0);
    for (@both) {
        my $d = abs $one->{$_} - $other->{$_};
        $most = $d if !($d <= $most);
        $squares += $d * $d;
    }
    return ($most, @both ? sqrt($squares / @both) : 'inf', scalar @both);
}

# ---- the same run on both ----------------------------------------------------------------------------------------------

my $init = "$dir/init.safetensors";
my @runs = (['gpu', 'cpu', qw(--head bf16)], ['deterministic', 'cpu', qw(--head bf16 --deterministic)],
    ['portable', 'cpu', qw(--head bf16 --portable)], ['fp8', 'cpu_fp8', qw(--head fp8)],
    ['fp8_portable', 'cpu_fp8', qw(--head fp8 --portable)]);
my @stops = (7, 14); # after an odd number of steps, a gradient is part of the state
run_ok('initial weights', $cpu, @small, qw(--head bf16 --stop-at 1 --val-every 0 --save-init), $init, '--out', "$dir/init");
run_together(["$steps steps on the CPU", $cpu, @small, qw(--head bf16 --checkpoint-every 7 --out), "$dir/cpu", '--init-from', $init],
    ['with the FP8 head', $cpu, @small, qw(--head fp8 --out), "$dir/cpu_fp8", '--init-from', $init],
    map { my ($name, $beside, @options) = @$_;
        ["on the GPU, @options", $gpu, @small, @options, $name eq 'gpu' ? qw(--checkpoint-every 7) : (), '--out', "$dir/$name",
            '--init-from', $init] } @runs);
# What the FP8 head changes, root mean square: the two programs' FP8 heads are a tenth of that apart at most.
my (undef, $effect) = compare('cpu_fp8', 'cpu');
for (@runs) {
    my ($name, $beside, @options) = @$_;
    my ($most, $mean, $count) = compare($name, $beside);
    is($count, $steps, "@options: as many steps");
    if ($beside eq 'cpu') { cmp_ok($most, '<=', 2e-3, "training losses of all steps as on the CPU, but for rounding: $most") }
    else { cmp_ok($mean, '<=', $effect / 10, "training losses as on the CPU, but for rounding: $mean (at most $most; FP8 itself: $effect)") }
    my ($here, $there) = map { val_losses("$dir/$_")->{$steps} // 'none' } $name, $beside;
    cmp_ok(abs($here - $there), '<=', 2e-3, "and the last validation, $here and $there");
}
# The event of a run that says which kernels ran.
sub device_line {
    my ($folder) = @_;
    return (grep { /\(device \d+, compute capability \d/ } split /\n/, log_text("$dir/$folder", 'jsonl'))[0] // 'none';
}
like(device_line('gpu'), qr/ (kernels for Hopper|portable kernels \(c)/, 'the log says which kernels ran');
like(device_line('portable'), qr/portable kernels \(--portable\), head in bf16, .*own kernels for any GPU \(not cuDNN: --portable\)/,
    'and that --portable was heeded');
like(device_line('fp8_portable'), qr/FP8 head emulated in bf16 \(no FP8 units on this path\)/, 'for the FP8 head, too');
my @other = grep { !/^option\./ } split / /, same_state(map { checkpoint("$dir/$_", 20) } qw(gpu portable));
ok(@other > 0, 'the two paths are two: other bits in ' . @other . ' tensors');

# ---- matrices of more rows than columns --------------------------------------------------------------------

# NorMuon enlarges their updates: the MLP's, and the gates of 16 heads.
my @narrow = (@small, qw(--num-heads 16 --mlp-dim 128 --head bf16 --num-scheduled 6 --num-extension 2));
run_ok('weights of a narrow model', $cpu, @narrow, qw(--stop-at 1 --val-every 0 --save-init),
    "$dir/narrow.safetensors", '--out', "$dir/narrow_init");
run_together(map { my ($program, $name) = @$_; ["narrow, $name", $program, @narrow, '--out', "$dir/$name",
    '--init-from', "$dir/narrow.safetensors"] }
    [$cpu, 'narrow_cpu'], [$gpu, 'narrow_gpu']);
my ($narrow, undef, $narrow_steps) = compare('narrow_gpu', 'narrow_cpu');
is($narrow_steps, 8, 'a narrow model: as many steps');
cmp_ok($narrow, '<=', 2e-3, "and the CPU's losses, but for rounding: $narrow");

# ---- checkpoints from one to the other ---------------------------------------------------------------------------------

my @bf16 = (@small, qw(--head bf16));
my @more;
for my $way ([gpu => cpu => $cpu], [cpu => gpu => $gpu]) {
    my ($from, $to, $program) = @$way;
    push @more, map { [$from, $to, $_, checkpoint("$dir/$from", $_), "${from}_to_$to$_", $program] } @stops, $steps;
}
run_together(map { my ($from, $to, $stop, $file, $name, $program) = @$_;
    ["from step $stop of the $from on the $to", $program, @bf16, '--out', "$dir/$name", '--resume', $file] } @more);
for (@more) {
    my ($from, $to, $stop, $file, $name) = @$_;
    # A finished run has nothing left to do: loaded and saved again, everything must be as it was.
    if ($stop == $steps) {
        is(same_state($file, checkpoint("$dir/$name", 20)), '', "$from to $to: weights and optimizer state keep every bit");
        next;
    }
    my ($most, undef, $count) = compare($name, 'cpu');
    is($count, $steps - $stop, "$stop steps on the $from, $count on the $to");
    cmp_ok($most, '<=', 2e-3, "all losses as on the CPU, but for rounding: $most");
}
done_testing;
