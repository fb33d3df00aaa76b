#!/usr/bin/env perl
# Small training runs under every tool of compute-sanitizer: memory accesses and leaks, races in shared memory, reads of memory that
# nothing wrote, barriers. One validation and two steps on each path, checkpoint and all. TAP; make sanitize-gpu runs it under prove.
#   sanitize.pl [TOOL ...]     racecheck memcheck initcheck synccheck by default
# cuDNN's attention backward for Hopper (9.14) is reported for races and for a barrier: racecheck runs with the own kernels, which it then
# checks as well, and synccheck leaves out all libraries. racecheck cannot leave anything out: kernels of cuBLASLt that it has not prepared
# end in an illegal access (version 2025.3, also with --num-cuda-barriers and with --kernel-name). So it also watches the products that are
# timed at the start, and takes the longest. At larger widths it reports races within cuBLASLt's own kernels for Hopper, therefore training
# is narrow there, and attention with heads of 128 comes alone, without a library.
# Once racecheck had 3 reports in the run with the FP8 head; five runs with it since had none (H200, 2026-11-22): which kernel it was is not known, and
# a failure tells each report now. These models are too narrow for Newton-Schulz of more than 256 rows (sm90_ns_chain.cu): small chains of it come alone.
#
# What the tools follow in Hopper's kernels is what threads load and store, not what the copy unit, stmatrix, ldmatrix and the tensor cores do (chains
# with errors put in, H200, 2026-11-22). memcheck finds a sum behind the workspace's end and no tile there: that is for the guard zones of test_ns_gpu.
# To initcheck what the copy unit has written was never written, so with it copies of the chains' results to the host are not checked. racecheck does
# not find a tile that is mirrored too early, but then two runs differ in their bits, which the test itself compares. A barrier that half of the lanes
# miss is a hang, which the limit of time ends.
#
# Where lanes of a warp write, or read, what another warp reads or overwrites by itself, every lane arrives at the barrier between them:
# racecheck does not follow the order that __syncwarp and one lane's arrival give (58 reports in attention,
# 90 in the chains, none with all lanes; H200, 2026-11-22).
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my ($sanitizer) = grep { -x } map { "$_/compute-sanitizer" } split(/:/, $ENV{PATH}), glob('/usr/local/cuda*/bin');
ok($sanitizer, 'compute-sanitizer is here') or BAIL_OUT('compute-sanitizer of the CUDA toolkit is needed');
write_shard('train_1.bin', documents(6000, 1));
write_shard('val.bin', documents(700, 2));
write_shard('val_2026.bin', documents(3000, 2));
my @libraries = map { ('--kernel-name-exclude', "kernel_substring=$_") } qw(cudnn nvjet cutlass xmma cublas);
my %tool_options = (memcheck => ['--leak-check', 'full'], synccheck => \@libraries);
my %run_options = (racecheck => [qw(--attention own --graphs off --val-every 0 --val-tokens 128)]);
my @run = ("$root/train_gpt", @tiny, '--micro-batches', 1, qw(--val-every 2 --stop-at 2));
my @wide = ('FP8, a head of 128', qw(--head fp8 --model-dim 128 --num-heads 1 --micro-batch-tokens 128));
my @narrow = ('FP8', qw(--head fp8 --model-dim 64 --micro-batch-tokens 80 --val-tokens 640));
# Narrow q and k, FP8 both ways, bigram rows, generators, dynamic convolution: all kernels of 2026 in a small network. Its products are too wide for racecheck.
my @records = ('record of 2026', "$root/train_gpt", qw(--preset toy-2026-08 --model-dim 256 --num-heads 2 --mlp-dim 512 --repeat --val-every 2
    --stop-at 2), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val_2026.bin");
my @attention = ('attention with heads of 128', "$root/build/cuda/test_attention_gpu", "$root/build/ref", 'small');
my @chains = ('chains of Newton-Schulz', "$root/build/cuda/test_ns_gpu", map { "$root/build/ref/libref_$_.so" } qw(fp32 bf16));
my @paths = (['bf16', qw(--head bf16)], ['deterministic', qw(--head bf16 --deterministic)], ['portable', qw(--head fp8 --portable)]);

my @runs; # all at once, on the GPUs by turns: a tool keeps one core busy, the GPU hardly
for my $tool (@ARGV ? @ARGV : qw(racecheck memcheck initcheck synccheck)) {
    for my $path ($tool eq 'racecheck' ? (\@narrow, \@attention) : (\@wide, \@records), \@chains, @paths) {
        my ($name, @command) = @$path;
        my @more = @{$tool_options{$tool} // []};
        @command = (@run, @{$run_options{$tool} // []}, @command, '--out', "$dir/$tool$name") if $command[0] =~ /^--/;
        push @command, '--out', "$dir/$tool$name" if $path == \@records;
        push @more, qw(--check-api-memory-access no) if $tool eq 'initcheck' && $path == \@chains;
        my @tool = ($sanitizer, '--port', 50000 + 20 * @runs, '--tool', $tool, qw(--error-exitcode 99), @more);
        local $ENV{CUDA_VISIBLE_DEVICES} = $gpus[@runs % @gpus] if @gpus;
        local $ENV{TEST_FILTER} = 'test_chains' if $path == \@chains;
        push @runs, ["$tool, $name", start(@tool, @command)];
    }
}
for (@runs) {
    my ($name, $run) = @$_;
    my ($status, $out, $err) = finish($run, 220);
    my ($summary) = reverse grep { /SUMMARY/ } split /\n/, $out;
    next if ok($status eq '0', "$name: " . ($summary // 'no summary'));
    my %seen; # a kernel that is launched in every layer is told once
    my @told = grep { !$seen{$_}++ } map { s/ \[\d+ hazards\]//r } grep { /^=+ +\S/ } split /\n/, $out;
    diag join "\n", "status $status", splice(@told, 0, 30), substr($err, -1000);
}
done_testing;
