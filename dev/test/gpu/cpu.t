#!/usr/bin/env perl
# The CUDA program beside the CPU program: the same weights and tokens give the same losses on every path of the GPU, and
# checkpoints go from one to the other in both directions.
use strict;
use warnings;
use File::Basename qw(basename);
use File::Copy qw(copy);
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
my $units = device_line('portable') =~ /compute capability (\d+\.\d+)/ && $1 >= 8.9; # Ada and later
like(device_line('fp8_portable'), $units ? qr/FP8 head on the FP8 units, products by cuBLASLt/ : qr/FP8 head emulated in bf16 \(no FP8 units\)/,
    'for the FP8 head, too');
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

# ---- FP8 in both directions --------------------------------------------------------------------------------

# The records of August 2026 with narrower heads over all their stages, and their small network with heads of 96 and 128. Two runs on the
# CPU from weights of which each was moved by a unit in the last place of fp32, either way, are at most 1.3e-3 apart at a step and 1.2e-3 in
# the last validation, and their delayed scales, which are maxima, by a factor of 1.13 after the last step and of 1.08 after the third; what
# FP8 itself does to the losses is no more than that.
my @of_both = (qw(--head fp8 --mlp fp8-backward --qkv fp8 --adam-rate 0.001 --muon-rate 0.003), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my @stages = (qw(--model-dim 192 --mlp-dim 128 --block-size 1 --micro-batch-tokens 128 --micro-batches 2 --num-scheduled 16 --num-extension 4
    --val-tokens 1024 --val-every 10), '--stage-tokens', '128,192,256,256', '--stage-documents', '40,60,80,80', @of_both);
# 2026-05-27 has codes of the MLP's first product alone, and no delayed scales; 2025-11-18 has scales of the MLP alone.
my @both = (['2026-05-27', 20, 0, @stages, qw(--mlp fp8 --qkv bf16)], ['2026-08-03', 20, 11, @stages], ['2026-08-06', 20, 11, @stages],
    ['2025-11-18', 20, 12, @stages, qw(--num-heads 2 --qkv bf16), '--window-schedule', '3,7,11'], ['toy-2026-08', 8, 6, qw(--model-dim 256 --num-heads 2 --mlp-dim 512 --val-every 8 --repeat), @of_both]);
sub scales { my ($x) = tensors(checkpoint("$dir/$_[0]", $_[1])); return map { @{floats($x->{$_})} } sort grep { /^fp8/ } keys %$x }
sub factor { # the largest between two runs' scales, and how many there are
    my ($step, @runs) = @_;
    my ($one, $other) = map { [scales($_, $step)] } @runs;
    my $most = @$one == @$other ? 1 : 'inf';
    for (0 .. $#$one) {
        my $f = $one->[$_] > $other->[$_] ? $one->[$_] / $other->[$_] : $other->[$_] / $one->[$_];
        $most = $f if !($f <= $most);
    }
    return ($most, scalar @$one);
}
for (@both) {
    my ($record, $last, $layers, @options) = @$_;
    my ($init, @run) = ("$dir/$record.safetensors", '--preset', $record, @options);
    run_ok("weights of $record", $cpu, @run, qw(--stop-at 1 --val-every 0 --save-init), $init, '--out', "$dir/${record}_init");
    push @run, '--init-from', $init, qw(--checkpoint-every 3);
    run_together(["$record on the CPU", $cpu, @run, '--out', "$dir/${record}_cpu"],
        map { ["on the GPU $_", $gpu, @run, $_ || (), '--out', "$dir/${record}_gpu$_"] } '', '--portable');
    for my $path ('', '--portable') {
        my @pair = ("${record}_gpu$path", "${record}_cpu");
        my ($most, undef, $count) = compare(@pair);
        is($count, $last, "$record $path: as many steps");
        cmp_ok($most, '<=', 4e-3, "losses as on the CPU, but for rounding: $most");
        my ($here, $there) = map { val_losses("$dir/$_")->{$last} // 'none' } @pair;
        cmp_ok(abs($here - $there), '<=', 4e-3, "and the last validation, $here and $there");
        my ($early, $many) = factor(3, @pair);
        is($many, 3 * $layers * 2, "scales of three tensors, $layers layers and two micro-batches");
        cmp_ok($early, '<=', 1.25, "after three steps the CPU's but for a factor of $early");
        my ($late) = factor($last, @pair);
        cmp_ok($late, '<=', 1.4, "at the end, too: $late");
    }
}
like(device_line('2026-08-06_gpu--portable'), $units ? qr/FP8 MLP and QKV on the FP8 units by cuBLASLt/
    : qr/FP8 MLP and QKV emulated in bf16 \(no FP8 units\)/, 'and on which path the MLP was');

# ---- checkpoints from one to the other ---------------------------------------------------------------------------------

my @bf16 = (@small, qw(--head bf16));
my @more;
for my $way ([gpu => cpu => $cpu], [cpu => gpu => $gpu]) {
    my ($from, $to, $program) = @$way;
    # Beside its log, the last checkpoint is of a run that is finished and is not continued.
    mkdir "$dir/${from}_end" or BAIL_OUT("$dir/${from}_end: $!");
    my $end = "$dir/${from}_end/" . basename(checkpoint("$dir/$from", $steps));
    copy(checkpoint("$dir/$from", $steps), $end) or BAIL_OUT("$end: $!");
    push @more, map { [$from, $to, $_, $_ == $steps ? $end : checkpoint("$dir/$from", $_), "${from}_to_$to$_", $program] } @stops, $steps;
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
