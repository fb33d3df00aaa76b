#!/usr/bin/env perl
# All that the host does in steps of the CUDA program, without a GPU: no_gpu/no_gpu.h stands in for CUDA, kernels do nothing. Every preset
# in full size, on Hopper's path and on that of other GPUs: each plan, launch, tensor map and product is one that a GPU would take.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Time::HiRes qw(sleep);
use Test::More;

my ($gpu, $stand_in, $refusals) = ("$root/train_gpt", "$root/build/no_gpu/no_gpu.so", "$root/build/no_gpu/refusals");
plan skip_all => 'no nvcc: no CUDA program' if !-x $gpu || !-e $stand_in;

# ---- what it refuses ---------------------------------------------------------------------------------------------------

sub stand_in { my (@command) = @_; local $ENV{LD_PRELOAD} = $stand_in; return run(@command) }

my @cases = slurp("$root/dev/test/no_gpu/refusals.c") =~ /!strcmp\(name, "([^"]+)"\)/g;
for (@cases) {
    my ($status, $out, $err) = stand_in($refusals, $_);
    my $wanted = $_ eq 'fine' ? 0 : 99;
    ok($status eq $wanted && ($err =~ /^no_gpu: .+\n\z/ || !$wanted), "$_: status $wanted, and one line") or diag("$status: $err");
}

# ---- steps -------------------------------------------------------------------------------------------------------------

# As many tokens as a step of the largest batch has.
my @tokens = documents(60000, 1);
write_shard('train_1.bin', (@tokens) x 14);
write_shard('val.bin', documents(9000, 2));
my @five = (qw(--num-scheduled 3 --num-extension 2 --val-tokens 2048 --val-every 0 --repeat --gpus 1 --self-check never),
    '--train-files', "$dir/train_1.bin", '--val-files', "$dir/val.bin");
my $of_hopper = qr/sm90|attention_queries|head_logits_kernel/;
my (%launched, $runs);

# Five steps, over all stages; the kernels that were launched.
sub five_steps {
    my ($on, @options) = @_;
    my $out = "$dir/out" . ++$runs;
    local ($ENV{NO_GPU}, $ENV{NO_GPU_LAUNCHES}) = ($on, "$out.launches");
    my ($status, $said, $err) = stand_in($gpu, @options, @five, '--out', $out);
    my @kernels = grep { !/^0 / } split /\n/, slurp("$out.launches");
    ok($status eq 0 && keys %{losses($out)} == 5, "@options on $on GiB") or diag("$status: $err");
    unlink glob "$out/*/*.safetensors";
    $launched{s/^\d+ //r} = 1 for @kernels;
    return @kernels;
}

my @presets = map { m{/(\d{4}-\d\d-\d\d)\.c$} } glob "$root/llmc/records/*.c";
cmp_ok(scalar @presets, '>=', 9, "presets: @presets");
for my $preset (@presets) {
    cmp_ok(scalar(grep { /$of_hopper/ } five_steps('9.0 80', '--preset', $preset)), '>=', 8, 'with kernels for Hopper');
}
five_steps('9.0 80', @$_) for [qw(--preset 2025-10-27 --deterministic)], [qw(--preset 2025-11-18 --head bf16 --launch-tokens 8192)],
    [qw(--preset 2025-11-18 --mlp fp8)], [qw(--preset 2025-11-18 --mlp fp8-backward)], [qw(--preset 2026-07-17 --mlp bf16 --deterministic)], [qw(--preset 2026-08-03 --mlp bf16 --qkv bf16)];
for (['9.0 80', '--portable'], ['8.0 40'], ['8.9 24'], ['12.0 32']) {
    my ($on, @options) = @$_;
    is(scalar(grep { /$of_hopper/ } five_steps($on, '--preset', $_, @options)), 0, 'with kernels for all GPUs') for qw(2025-11-18 2026-08-06);
}
my ($log) = map { slurp($_) } logs("$dir/out$runs", 'jsonl');
like($log, qr/attention forward by [^(]+ for any GPU \(not cuDNN: not used for this network's heads\)/, 'and no plan of cuDNN where no op would take it');

# ---- products in FP8 ---------------------------------------------------------------------------------------------------

# Which GPUs have units for them, and by what; where cuBLASLt has no algorithm, the start notices it, and the values of the codes are multiplied.
# The epilogues of mma.sync are taken where cuBLASLt has nothing faster.
# Validation has its products in bf16.
my @of_fp8 = qw(codes_gemm_kernel/E4m3 sm80_qkv_heads_kernel/bfloat16 sm80_qkv_heads_kernel/E4m3);
my $no_algorithm = 'cuBLASLt has no algorithm for its products in FP8';
for (['8.0 40', 'emulated in bf16 (no FP8 units)', 'emulated in bf16 (no FP8 units)', qw(decode_kernel decode_columns_kernel codes_gemm_kernel/bfloat16 sm80_qkv_heads_kernel/bfloat16)],
    ['8.9 24', 'on the FP8 units, products by cuBLASLt', 'on the FP8 units by mma.sync and cuBLASLt', @of_fp8],
    ['9.0 80', 'on the FP8 units, products by cuBLASLt', 'on the FP8 units by cuBLASLt'],
    ['12.0 32', 'on the FP8 units, products by cuBLASLt', 'on the FP8 units by mma.sync and cuBLASLt', @of_fp8],
    ['8.9 24', "emulated in bf16 ($no_algorithm)",
        'on the FP8 units by mma.sync, plain products emulated in bf16 (cuBLASLt has no algorithm for them in FP8)', qw(decode_kernel decode_columns_kernel), @of_fp8],
    ['12.0 32', 'on the FP8 units, products by cuBLASLt',
        'on the FP8 units by mma.sync and cuBLASLt, gradients of weights emulated in bf16 (cuBLASLt has no algorithm for them in FP8)',
        'decode_columns_kernel', @of_fp8],
    ['9.0 80', "emulated in bf16 ($no_algorithm)", "emulated in bf16 ($no_algorithm)", qw(decode_kernel decode_columns_kernel)]) {
    my ($on, $head, $mlp, @expected) = @$_;
    local $ENV{NO_GPU_WITHOUT_FP8} = $head =~ /no algorithm/ ? 'all' : 'gradients' if "$head $mlp" =~ /no algorithm/;
    my @kernels = five_steps($on, qw(--preset 2026-08-06 --portable));
    is(scalar(grep { slurp($_) =~ /FP8 head \Q$head, FP8 MLP and QKV $mlp\E[,;]/ } logs("$dir/out$runs", 'jsonl')), 1, "the log says so: $mlp");
    my @found = grep { my ($name, $element) = split m{/}; grep { /\b\w*$name\w*/ && (!$element || /$element/) } @kernels }
        qw(decode_kernel decode_columns_kernel), map { ("$_/bfloat16", "$_/E4m3") } qw(codes_gemm_kernel sm80_qkv_heads_kernel);
    is("@found", "@expected", 'and so it is: ' . (@expected ? "@expected" : 'none of them'));
}

# ---- a Hopper GPU whose kernels cannot run ------------------------------------------------------------------------------

for (['clusters', 'the device has no room for a cluster'], ['tensor maps', 'the driver has no tensor maps']) {
    (local $ENV{NO_GPU_WITHOUT}, my $why) = @$_;
    for my $preset (qw(2025-11-18 2026-08-06)) {
        my @kernels = five_steps('9.0 140', '--preset', $preset);
        like(slurp((logs("$dir/out$runs", 'jsonl'))[0]), qr/bf16 storage, portable kernels \(\Q$why\E\)/, "without $ENV{NO_GPU_WITHOUT}: $preset says so");
        is(join(' ', grep { $_ =~ $of_hopper } @kernels), '', 'and has none of those kernels');
    }
}

# ---- shared memory of the gate's gradient, of which 128 heads of 12 inputs fill what a block has without asking ---------

five_steps('8.9 24', qw(--preset tiny --model-dim 1024 --num-heads 128 --mlp-dim 256));

# ---- the start ---------------------------------------------------------------------------------------------------------

# No kernel has results here, so the self-check goes through all of them and finds those wrong that do not begin with another's result.
my ($status, undef, $err) = stand_in($gpu, qw(--preset 2025-11-18), @five, qw(--self-check always --out), "$dir/check");
is($status, 4, 'the self-check fails');
like($err, qr/\A[^\n]*the self-check found wrong results[^\n]*: products \(NN\) by 1 [^\n]+\n\z/, 'in one line');
is(scalar(() = $err =~ / by 1 \(limit /g), 22, 'which names all kernels');
for (['8.9 24', 8], ['8.0 40', 7]) {
    (local $ENV{NO_GPU}, my $kernels) = @$_;
    ($status, undef, $err) = stand_in($gpu, qw(--preset 2025-11-18), @five, qw(--self-check always --out), "$dir/check");
    is($status, 4, "that of the portable kernels fails on $ENV{NO_GPU} GiB");
    like($err, qr/\A(?:[^\n]*: note: [^\n]+\n)*[^\n]*the self-check found wrong results[^\n]*: products with relu\^2 by 1 [^\n]+; these differ from the host's: y of attention [^\n]+ by 1; try another driver or GPU\n\z/, 'in one line');
    is(scalar(() = $err =~ / by 1 \(limit /g), $kernels, "which names $kernels");
}

{
    local $ENV{NO_GPU} = '9.0 2';
    ($status, undef, $err) = stand_in($gpu, qw(--preset 2025-11-18), @five, '--out', "$dir/memory");
    is($status, 1, 'a GPU of 2 GiB');
    like($err, qr/\A[^\n]*no device memory for [^\n]+ of 2048\.0 MiB free[^\n]+\n\z/, 'is too small, which one line says');
}

# The portable attention beside that of Hopper, in a window that is shorter than the batch of the check.
($status, undef, $err) = stand_in($gpu, qw(--preset tiny --model-dim 128 --num-heads 1 --block-size 8 --micro-batch-tokens 1024), @five, qw(--self-check always --out), "$dir/check");
is($status, 4, 'the self-check with one head and short windows');
like($err, qr/these differ from the host's: products \(NN\) by 1 /, 'has memory for attention');

# Gradients of scores of the portable attention: sizes of stages that do not divide, and windows longer than all documents on a small card.
five_steps('8.9 24', qw(--preset tiny --model-dim 768 --num-heads 6 --block-size 128 --window-extension 32 --micro-batches 1),
    "--window-schedule", "32,32,32", "--stage-tokens", "32256,32256,32768");
five_steps("8.9 11", qw(--preset 2025-11-18 --window-extension 256), "--window-schedule", "256,256,256");

# A card whose memory is too small for a micro-batch gets launches that fit, if the preset offers them.
sub says_memory { return scalar grep { slurp($_) =~ /memory: activations of \d+ tokens .+: launches of \d+ tokens/ } logs("$dir/out$runs", 'jsonl') }
for (['8.9 24', '2025-11-18', 0], ['8.9 6', '2025-11-18', 1]) {
    my ($on, $preset, $launches) = @$_;
    five_steps($on, '--preset', $preset);
    is(says_memory(), $launches, $launches ? 'in launches that fit, and says so' : 'at once');
}

# What offers no launches takes smaller micro-batches and says so. Where the command line says how large they are, it ends with the options that fit.
for (['8.9 8', '2026-07-17'], ['8.9 6', '2025-11-18', qw(--mlp fp8-backward)]) {
    my ($on, $preset, @options) = @$_;
    five_steps($on, '--preset', $preset, @options);
    my ($text) = map { slurp($_) } logs("$dir/out$runs", 'jsonl');
    my ($took) = $text =~ /memory: activations of \d+ tokens take \d+ MiB, and \d+ are free: (--micro-batches .+?), as many tokens a step, cut into other documents than the preset's"/;
    ok($took, "$preset on $on GiB takes " . ($took // 'nothing'));
    my %option = ($took // '') =~ /--(\S+) (\S+)/g;
    is_deeply([map { $text =~ /"$_":(?:"([\d,]+)"|(\d+))/ ? $1 // $2 : "no $_" } sort keys %option], [map { $option{$_} } sort keys %option], 'which its options are');
    local ($ENV{NO_GPU}, $ENV{NO_GPU_LAUNCHES}) = ($on, "$dir/none.launches");
    my ($status, undef, $err) = stand_in($gpu, '--preset', $preset, @options, @five, qw(--micro-batches 8 --out), "$dir/small");
    is($status, 1, 'a number that is given stays');
    like($err, qr/^train_gpt: error: activations of \d+ tokens take \d+ MiB, and \d+ are free: give \Q$took\E, as many tokens a step, cut into other documents$/m, 'and the line says what would fit');
}

# With GPT-2's vocabulary, whose tables take most of the memory: what cards of 24 and 16 GB do.
{
    my @bytes = @five;
    for ('train_1.bin', 'val.bin') {
        my @ids = unpack 'x1024 S<*', slurp("$dir/$_");
        spew("$dir/gpt2_$_", pack('l<256', 20240520, 1, scalar(@ids), (0) x 253) . pack('S<*', map { $_ == 256 ? 50256 : $_ } @ids));
    }
    @five = map { s{/(train_1|val)\.bin$}{/gpt2_$1.bin}r } @bytes;
    for (['12.0 24', ''], ['8.9 16', '--micro-batches 16 --micro-batch-tokens 16384 --stage-tokens 8192,16384,24576,24576']) {
        my ($on, $takes) = @$_;
        five_steps($on, qw(--preset 2026-07-17 --stage-prefix), '');
        my ($took) = map { slurp($_) =~ /memory: activations of .+?: (--micro-batches .+?), as many tokens a step/ ? $1 : '' } logs("$dir/out$runs", 'jsonl');
        is($took, $takes, $takes || 'at once');
    }
    @five = @bytes;
}

# ---- energy ------------------------------------------------------------------------------------------------------------

# A microjoule for each launch of an op's graph (no_gpu/nvml.c): what the table must say of every op.
{
    local $ENV{LD_LIBRARY_PATH} = "$root/build/no_gpu/nvml";
    local $ENV{LD_PRELOAD} = $stand_in;
    my @measured = ($gpu, @tiny, qw(--self-check never --gpus 1 --stop-at 2 --val-every 0 --profile-energy 0.5 --out));
    my ($out) = run_ok('a run that measures energy', @measured, "$dir/energy");
    my %mJ = $out =~ /^profile: ([a-z]\w+) +\d+ +[\d.]+ +\d+ +(-?[\d.e-]+) +-?[\d.]+ +-?[\d.]+%$/mg;
    cmp_ok(scalar keys %mJ, '>', 20, keys(%mJ) . ' ops in the table');
    is(join(' ', map {"$_ $mJ{$_}"} grep { abs($mJ{$_} - 1e-3) > 1e-4 } sort keys %mJ), '', 'each with the microjoule of a launch');

    local $ENV{NO_GPU_COUNTER} = 1000;
    my ($status, undef, $err) = run(@measured, "$dir/stuck");
    is($status, 4, 'a counter that stands still');
    like($err, qr/error: the device's counter of energy moved 0 times only: ask for more seconds\n\z/, 'ends the run, which one line says');
    is(scalar(() = checkpoints("$dir/stuck")), 1, 'and its checkpoint is there');
    my $run = start(@measured, "$dir/signal", '--profile-energy', 600);
    for (1 .. 600) { last if () = checkpoints("$dir/signal"); sleep 0.1 }
    sleep 2; # from the checkpoint to the measurement
    kill INT => $run->{pid};
    ($status) = finish($run, 60);
    is($status, 3, 'a signal ends it at once');
}
done_testing;
