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
my @small = (qw(--preset tiny --model-dim 256 --num-heads 2 --mlp-dim 1024 --micro-batch-tokens 128 --num-scheduled 16
    --num-extension 4 --val-tokens 1024 --val-every 10), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my $steps = 20;

# The largest difference of two runs' training losses, and the number of steps that both have.
sub compare {
    my ($one, $other) = map { losses("$dir/$_") } @_;
    my @both = grep { exists $other->{$_} } keys %$one;
    my $most = 0;
    for (@both) { my $d = abs $one->{$_} - $other->{$_}; $most = $d if !($d <= $most) }
    return ($most, scalar @both);
}

# ---- the same run on both ----------------------------------------------------------------------------------------------

my $init = "$dir/init.safetensors";
my @runs = (['gpu', 'cpu', qw(--head bf16)], ['deterministic', 'cpu', qw(--head bf16 --deterministic)],
    ['portable', 'cpu', qw(--head bf16 --portable)], ['fp8', 'cpu_fp8', qw(--head fp8)],
    ['fp8_portable', 'cpu_fp8', qw(--head fp8 --portable)]);
run_ok("$steps steps on the CPU", $cpu, @small, qw(--head bf16 --out), "$dir/cpu", '--save-init', $init);
run_together(['with the FP8 head', $cpu, @small, qw(--head fp8 --out), "$dir/cpu_fp8", '--init-from', $init],
    map { my ($name, $beside, @options) = @$_;
        ["on the GPU, @options", $gpu, @small, @options, '--out', "$dir/$name", '--init-from', $init] } @runs);
for (@runs) {
    my ($name, $beside, @options) = @$_;
    my ($most, $count) = compare($name, $beside);
    is($count, $steps, "@options: as many steps");
    cmp_ok($most, '<=', 2e-3, 'training losses of all steps as on the CPU, but for rounding');
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
isnt(same_state(map { "$dir/$_/step_000020.safetensors" } qw(gpu portable)), '', 'the two paths are two: other bits');

# ---- checkpoints from one to the other ---------------------------------------------------------------------------------

my @bf16 = (@small, qw(--head bf16));
for my $way ([gpu => $gpu, cpu => $cpu], [cpu => $cpu, gpu => $gpu]) {
    my ($from, $first, $to, $second) = @$way;
    my $name = "${from}_to_$to";
    # A finished run has nothing left to do: loaded and saved again, everything must be as it was.
    my $final = "$dir/$from/step_000020.safetensors";
    run_together(["the last checkpoint of the $from on the $to", $second, @bf16, '--out', "$dir/$name", '--resume', $final],
        map { ["$_ steps on the $from", $first, @bf16, '--out', "$dir/$name$_", '--init-from', $init, '--stop-at', $_] } 6, 7);
    is(same_state($final, "$dir/$name/step_000020.safetensors"), '', 'weights and optimizer state keep every bit');
    run_together(map { ["the rest on the $to", $second, @bf16, '--out', "$dir/$name$_", '--resume', "$dir/$name$_"] } 6, 7);
    for my $stop (6, 7) { # after an odd number of steps, a gradient is part of the state
        my ($most, $count) = compare("$name$stop", 'cpu');
        is($count, $steps, "$stop steps on the $from, " . ($steps - $stop) . " on the $to");
        cmp_ok($most, '<=', 2e-3, 'all losses as on the CPU, but for rounding');
    }
}
done_testing;
