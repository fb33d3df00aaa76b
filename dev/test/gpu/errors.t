#!/usr/bin/env perl
# What goes wrong on a GPU is said in one line, with a non-zero exit status.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my $gpu = "$root/train_gpt";
write_shard('train_1.bin', documents(6000, 1));
write_shard('val.bin', documents(700, 2));
my $device = qr/^train_gpt: error: device 99 does not exist: this machine has \d+ \(0 to \d+\)$/m;
refuses('a device that does not exist', 1, $device, $gpu, @tiny, qw(--device 99 --out), "$dir/device");
{
    local $ENV{CUDA_VISIBLE_DEVICES} = '';
    refuses('no device at all', 1, qr/^train_gpt: error: no CUDA device .*nvidia-smi/m, $gpu, @tiny, '--out', "$dir/none");
}

# A million tokens in one micro-batch of a wide network, at once: one layer's hidden values alone take 128 GiB.
my $tokens = 1 << 20;
my $documents = pack('S<*', 256, (97) x 1023) x ($tokens / 1024 + 2);
spew("$dir/long.bin", pack('l<256', 20240520, 1, length($documents) / 2, 257, 257, (0) x 251) . $documents);
my @absurd = ($gpu, @tiny, '--micro-batches', 1, '--micro-batch-tokens', $tokens, '--val-tokens', $tokens, '--mlp-dim', 65536, '--launch-tokens', 0,
    '--out', "$dir/absurd");
my $memory = qr/^train_gpt: error: no device memory for .*: [\d.]+ MiB wanted, .* MiB free .*use smaller micro-batches$/m;
refuses('a micro-batch beyond all memory', 1, $memory, @absurd, '--train-files', "$dir/long.bin", '--val-files', "$dir/long.bin");
refuses('a width that the kernels do not take', 1, qr/^train_gpt: error: .*the head width must be a multiple of 8/m,
    $gpu, @tiny, qw(--model-dim 24 --num-heads 2 --out), "$dir/width");
refuses('q and k of another width than v', 2, qr/^train_gpt: error: --network toy-2026-08: heads of q and k are 12 wide and those of v 16: .*use train_gpt_cpu$/m,
    $gpu, qw(--preset toy-2026-08 --out), "$dir/narrow");
done_testing;
