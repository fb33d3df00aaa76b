#!/usr/bin/env perl
# Small training runs under every tool of compute-sanitizer: memory accesses and leaks, races in shared memory, reads of memory that
# nothing wrote, barriers. One validation and two steps on each path, checkpoint and all. TAP; make sanitize-gpu runs it under prove.
#   sanitize.pl [TOOL ...]     memcheck racecheck initcheck synccheck by default
# Two tools leave cuDNN out, whose attention backward for Hopper (9.14) they report for a barrier and for races; synccheck leaves out all
# libraries. racecheck cannot: it fails when kernels of cuBLASLt run that it has not prepared, so it takes minutes, with all the products
# that are timed at the start.
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
sub without { return map { ('--kernel-name-exclude', "kernel_substring=$_") } @_ }
my %options = (memcheck => ['--leak-check', 'full'], racecheck => [without('cudnn')], initcheck => [],
    synccheck => [without(qw(cudnn nvjet cutlass xmma cublas))]);
my @run = (@tiny, '--micro-batches', 1, qw(--val-every 2 --stop-at 2));
my @paths = (['bf16', qw(--head bf16)], ['FP8', qw(--head fp8 --model-dim 64 --micro-batch-tokens 80 --val-tokens 640)],
    ['deterministic', qw(--head bf16 --deterministic)], ['portable', qw(--head fp8 --portable)]);
for my $tool (@ARGV ? @ARGV : qw(memcheck racecheck initcheck synccheck)) {
    for my $path (@paths) {
        my ($name, @more) = @$path;
        my @command = ("$root/train_gpt", @run, @more, '--out', "$dir/$tool$name");
        my ($status, $out, $err) = finish(start($sanitizer, '--tool', $tool, '--error-exitcode', 99, @{$options{$tool}}, @command), 600);
        my ($summary) = reverse grep { /SUMMARY/ } split /\n/, $out;
        ok($status eq '0', "$tool, $name: " . ($summary // 'no summary')) or diag "status $status\n", substr($out, 0, 4000), substr($err, 0, 1000);
    }
}
done_testing;
