#!/usr/bin/env perl
# Device memory at full size: a step of 8 micro-batches of 32768 tokens fits into 12,000 MiB, validation included; one of 32 of 8192
# gives the same losses within rounding and takes less, by most of three quarters of the activations (6217 MiB, model.c); the table
# adds up.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my $gpu = "$root/train_gpt";
my ($free) = map { /(\d+)/ } `nvidia-smi -i $ENV{CUDA_VISIBLE_DEVICES} --query-gpu=memory.free --format=csv,noheader,nounits 2>/dev/null`;
plan skip_all => 'less than 14 GB of device memory are free' if ($free // 0) < 14000;

# All documents are the same, so that it does not matter which ones the ends of micro-batches drop.
my ($seed, $length) = (1, 1024);
my $document = pack 'S<*', 50256, map { $seed = ($seed * 1103515245 + 12345) % 2**31; int($seed / 65536) % 50256 } 2 .. $length;
sub shard { my ($name, $count) = @_; spew("$dir/$name", pack('l<256', 20240520, 1, $count * $length, (0) x 253) . $document x $count) }
shard('train_1.bin', 3 * (256 + 32) + 1);
shard('val.bin', 257);

my (%loss, %validation, %peak);
for ([8, 32768], [32, 8192]) {
    my ($count, $tokens) = @$_;
    my $out = "$dir/$tokens";
    my ($text) = run_ok("3 steps of $count micro-batches of $tokens tokens", $gpu, '--train-files', "$dir/train_1.bin", '--val-files', "$dir/val.bin",
        '--val-tokens', 262144, '--micro-batches', $count, '--micro-batch-tokens', $tokens, '--val-every', 2, '--stop-at', 3, '--verbose', '--out', $out);
    unlink newest($out);
    $loss{$tokens} = losses($out);
    $validation{$tokens} = val_losses($out)->{2};
    ($peak{$tokens}) = log_text($out) =~ /^peak memory allocated: (\d+) MiB/m;
    my %row = $text =~ /^memory: ([a-z, ]+?) +([\d.]+) MiB/mg;
    my $sum = 0;
    $sum += $row{$_} for grep { !/sum|context/ } keys %row;
    cmp_ok(abs($sum - $row{sum}), '<', 1, "its table: $row{sum} MiB, $row{'context, libraries'} MiB more for context and libraries")
        || diag $text;
}
cmp_ok($peak{32768}, '<=', 12000, "micro-batches of 32768 tokens: $peak{32768} MiB");
cmp_ok($peak{8192}, '<', $peak{32768} - 4000, "of 8192: $peak{8192} MiB");
my @difference = map { abs($loss{32768}{$_} - $loss{8192}{$_}) } 1 .. 3;
ok(!(grep { !($_ < 2e-3) } @difference), "their losses differ by @difference");
cmp_ok(abs($validation{32768} - $validation{8192}), '<', 2e-3, "validations: $validation{32768}, $validation{8192}");
done_testing;
