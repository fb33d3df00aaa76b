#!/usr/bin/env perl
# The CUDA program where there is no GPU, its kernels run by the CPU (dev/test/emulate): whole steps of both kinds of network beside the
# CPU program's, from the same weights and tokens.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my ($cpu, $emulated) = ("$root/train_gpt_cpu", "$root/build/emulated/train_gpt");
plan skip_all => 'no nvcc: no CUDA program' if !-x $emulated;
$ENV{NO_GPU} = '8.9 24';

# ---- what it finds -----------------------------------------------------------------------------------------------------

my $faults = "$root/build/emulated/faults";
sub fault { my ($name, $order) = @_; local $ENV{EMULATE_ORDER} = $order // ''; return join ' ', run($faults, $name) }
is(fault('fine', $_), "0 2416 2416\n ", "a kernel without a fault, $_") for 'forward', 'backward';
isnt(fault('race', 'forward'), fault('race', 'backward'), 'a missing barrier: the order of threads shows');
my %said = (lane_that_ended => qr/31 of 64 threads wait for others/, barrier_of_some => qr/64 of 64 threads wait for others/,
    different_instructions => qr/meet in different instructions/, outside_of_mask => qr/shuffle from lane 8, which is not in the mask 000000ff/,
    misaligned => qr/ldmatrix from \S+: not aligned/, map { $_ => qr/an access to \S+, outside of every array/ } qw(store_past_the_end past_shared_memory));
like(fault($_), qr/\A99  emulate: k.kernel, CTA 0 0 0, thread \d+: .*$said{$_}.*\n\z/, "$_: one line, with kernel, CTA and thread") for sort keys %said;
like(fault('copy_past_the_end'), qr/\A99  no_gpu: cp.async: 16 bytes at \S+ are not inside device memory\n\z/, 'a copy from behind an array');

# ---- whole steps -------------------------------------------------------------------------------------------------------

write_shard('train_1.bin', documents(30000, 1));
write_shard('val.bin', documents(2000, 2));
# Learning rates and limits as in gpu/cpu.t, which says where they are from; so few steps are less far apart.
my @short = (qw(--adam-rate 0.001 --muon-rate 0.003 --num-scheduled 3 --num-extension 1 --micro-batch-tokens 256 --micro-batches 1 --repeat --val-tokens 256 --val-every 0),
    '--train-files', "$dir/train_1.bin", '--val-files', "$dir/val.bin");
my %limit = (tiny => 2e-3, 'tiny-2026' => 4e-3);

for my $preset (sort keys %limit) {
    my ($there, $here) = map { "$dir/${preset}_$_" } qw(cpu emulated);
    run_ok("$preset on the CPU", $cpu, '--preset', $preset, @short, '--out', $there);
    run_ok("$preset, emulated", $emulated, '--preset', $preset, @short, qw(--gpus 1 --self-check always --out), $here);
    like(log_text($here, 'jsonl'), qr/start-up: [^"]*self-check \d/, 'whose self-check has passed');
    my ($wanted, $got) = map { losses($_) } $there, $here;
    is(keys %$got, 4, 'four steps');
    cmp_ok(abs($got->{$_} - $wanted->{$_}), '<=', $limit{$preset}, "loss of step $_: $got->{$_}, $wanted->{$_}") for sort keys %$wanted;
    my ($last, $wanted_last) = map { val_losses($_)->{4} // 'none' } $here, $there;
    cmp_ok(abs($last - $wanted_last), '<=', $limit{$preset}, "and the validation: $last, $wanted_last");
    cmp_ok($wanted->{1} - $wanted->{4}, '>', 0.01, 'the steps change the weights');
}

done_testing;
