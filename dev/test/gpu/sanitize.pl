#!/usr/bin/env perl
# Small training runs under every tool of compute-sanitizer: memory accesses and leaks, races in shared memory, reads of memory that
# nothing wrote, barriers. One validation and two steps on each path, checkpoint and all. TAP; make sanitize-gpu runs it under prove.
#   sanitize.pl [TOOL ...]     memcheck racecheck initcheck synccheck by default
# cuDNN's attention backward for Hopper (9.14) is reported for races and for a barrier: racecheck runs with the own kernels, which it then
# checks as well, and synccheck leaves out all libraries. racecheck cannot leave anything out: kernels of cuBLASLt that it has not prepared
# end in an illegal access. So it also watches the products that are timed at the start, and takes the longest. Heads of 128 are for the
# other tools: in the attention backward for them all lanes of a warp write, __syncwarp, and one lane arrives at a barrier; racecheck
# reports such writes, whose order it seems not to follow (H200, 2026-11-22).
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
my @libraries = map { ('--kernel-name-exclude', "kernel_substring=$_") } qw(cudnn nvjet cutlass xmma cublas);
my %tool_options = (memcheck => ['--leak-check', 'full'], synccheck => \@libraries);
my %run_options = (racecheck => [qw(--attention own --graphs off --val-every 0 --val-tokens 128)]);
my @run = (@tiny, '--micro-batches', 1, qw(--val-every 2 --stop-at 2));
my $wide = ['FP8, a head of 128', qw(--head fp8 --model-dim 128 --num-heads 1 --micro-batch-tokens 128)];
my $narrow = ['FP8', qw(--head fp8 --model-dim 64 --micro-batch-tokens 80 --val-tokens 640)];
my @paths = (['bf16', qw(--head bf16)], ['deterministic', qw(--head bf16 --deterministic)], ['portable', qw(--head fp8 --portable)]);
for my $tool (@ARGV ? @ARGV : qw(memcheck racecheck initcheck synccheck)) {
    my @tool = ($sanitizer, '--tool', $tool, '--error-exitcode', 99, @{$tool_options{$tool} // []});
    my @command = (@tool, "$root/train_gpt", @run, @{$run_options{$tool} // []});
    my @runs = map { my ($name, @more) = @$_; [$name, start(@command, @more, '--out', "$dir/$tool$name")] } $tool eq 'racecheck' ? $narrow : $wide, @paths; # all at once
    for (@runs) {
        my ($name, $run) = @$_;
        my ($status, $out, $err) = finish($run, 600);
        my ($summary) = reverse grep { /SUMMARY/ } split /\n/, $out;
        ok($status eq '0', "$tool, $name: " . ($summary // 'no summary')) or diag "status $status\n", substr($out, 0, 4000), substr($err, 0, 1000);
    }
}
done_testing;
