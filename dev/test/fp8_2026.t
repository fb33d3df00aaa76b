#!/usr/bin/env perl
# FP8 in both directions (the records of August 2026) in whole runs of 8 steps: what checkpoints hold, stop and go on at every step, the
# same scales on any number of ranks; and what is refused.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
no warnings 'qw'; # commas in lists of options

plan skip_all => "$_ is missing: run make" for grep { !-x } $trainer, $exact;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(1400, 2));
my @small = (qw(--micro-batches 4 --val-every 4 --max-document 40), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my @fp8 = (qw(--preset toy-2026-08 --head fp8 --mlp fp8-backward --qkv fp8));
my ($steps, $layers) = (8, 6);

sub train { # the folder of the run
    my ($program, $name, @options) = @_;
    my ($out) = run_ok($name, $program, @small, '--out', "$dir/$name", @options);
    return wantarray ? ("$dir/$name", $out) : "$dir/$name";
}
sub scales { my ($x) = tensors($_[0]); return {map { $_ => join ' ', @{floats($x->{$_})} } grep { /^fp8/ } keys %$x} }

# ---- checkpoints -------------------------------------------------------------------------------------------------------

my %whole;
for my $rule (qw(by-micro-batch sequential)) {
    my @rule = (@fp8, '--fp8-scales', $rule);
    ($whole{$rule}, my $out) = train($trainer, $rule, @rule);
    like($out, qr/; head fp8, MLP fp8-backward, QKV fp8$/m, "$rule: the log says what is FP8");
    my ($x) = tensors(newest($whole{$rule}));
    my @sets = $rule eq 'sequential' ? 0 : 0 .. 3;
    is_deeply({map { $_ => "@{$x->{$_}{shape}}" } grep { /^fp8/ } keys %$x},
        {map { my $set = $_; map { ("fp8.mlp_$_.$set.scale", "1 $layers") } qw(input activation gradient) } @sets}, '  the scales are in the checkpoint');
    for my $stop (1 .. $steps - 1) {
        train($trainer, "$rule-$stop", @rule, '--stop-at', $stop);
        train($trainer, "$rule-$stop", '--resume', "$dir/$rule-$stop");
        is(same_state(newest($whole{$rule}), newest("$dir/$rule-$stop")), '', "  $stop + " . ($steps - $stop) . ' steps end in the same bits');
    }
}
isnt(join(' ', map { $_ // '' } @{losses($whole{sequential})}{1 .. $steps}), join(' ', map { $_ // '' } @{losses($whole{'by-micro-batch'})}{1 .. $steps}), 'they are two runs');

# Alone, each of the two is a run of its own.
my %run = (both => losses($whole{'by-micro-batch'}), map { my $name = $_->[0]; $name => losses(train($trainer, $name, @fp8, @$_[1 .. $#$_])) }
    ['mlp', qw(--qkv bf16)], ['qkv', qw(--mlp bf16)], ['head', qw(--mlp bf16 --qkv bf16)]);
is(scalar(keys %{{map { join(' ', @{$_}{1 .. $steps}) => 1 } values %run}}), 4, 'MLP in FP8, q, k and v in FP8, both, and neither: four runs');
for my $name (qw(mlp qkv both)) {
    my ($worst) = sort { $b <=> $a } map { abs($run{$name}{$_} / $run{head}{$_} - 1) } 1 .. $steps;
    cmp_ok($worst, '<', 0.02, "  $name: losses within $worst of those in bf16");
}
is_deeply(scales(newest("$dir/qkv")), {}, '  those of q, k and v are constants: a checkpoint has none');

# ---- ranks -------------------------------------------------------------------------------------------------------------

# One step: all ranks have the same weights, so that every micro-batch has the same activations and gradients on any of them.
my $init = "$dir/init.safetensors";
train($exact, 'init', @fp8, '--save-init', $init, '--stop-at', 1);
my $of_one = scales(newest("$dir/init"));
is_deeply({map { $_ => 1 } map { $of_one->{$_} } grep { /gradient/ } keys %$of_one}, {join(' ', (unpack 'f<', pack 'f<', 1e-7) x $layers) => 1},
    'c_proj is zero: gradients have the least scale');
is(scalar(keys %{{reverse %$of_one}}), 9, 'no two sets of the others are equal');
for my $ranks (2, 4) {
    my @ranks = (@fp8, '--init-from', $init, '--ranks', $ranks);
    is_deeply(scales(newest(train($exact, "first$ranks", @ranks, '--stop-at', 1))), $of_one, "$ranks ranks: the scales of one");
    my $folder = train($exact, "ranks$ranks", @ranks);
    train($exact, "ranks$ranks-4", @ranks, '--stop-at', 4);
    train($exact, "ranks$ranks-4", '--ranks', $ranks, '--resume', "$dir/ranks$ranks-4");
    is(same_state(newest($folder), newest("$dir/ranks$ranks-4")), '', '  stop and go on: the same bits');
}
# What one rank left goes on on four: the scales of a step's micro-batches are those of one rank.
train($exact, 'one-then-four', @fp8, '--init-from', $init, '--stop-at', 3);
my ($then_one, $then_four) = map { my $name = "then$_"; run_ok($name, 'cp', '-r', "$dir/one-then-four", "$dir/$name");
    scales(newest(train($exact, $name, '--ranks', $_, '--resume', "$dir/$name", '--stop-at', 4))) } 1, 4;
is_deeply($then_four, $then_one, 'three steps on one rank, one on four: the scales of one');

# ---- the preset --------------------------------------------------------------------------------------------------------

# At a small size, over all of its stages.
my (undef, $out) = train($trainer, 'preset', qw(--preset 2026-08-06 --model-dim 96 --mlp-dim 64 --block-size 1 --stage-tokens 32,48,64,64 --stage-documents 20,40,40,40 --micro-batch-tokens 64),
    qw(--num-scheduled 5 --num-extension 1 --val-tokens 512));
like($out, qr/; head fp8, MLP fp8-backward, QKV fp8$/m, '  FP8 is its default, both ways');
like($out, qr/^data: the tokens are single bytes: validations leave none out$/m, '  so is the mask of the last validation');

# ---- what is refused ---------------------------------------------------------------------------------------------------

refuses('one order of all micro-batches on two ranks', 2, qr/--fp8-scales sequential is for one GPU, and this run has 2 ranks/, $exact, @small, @fp8, qw(--fp8-scales sequential --ranks 2), '--out', "$dir/refused");
refuses('the same for q, k and v alone', 2, qr/--fp8-scales sequential is for one GPU/, $exact, @small, @fp8, qw(--mlp bf16 --fp8-scales sequential --ranks 2), '--out', "$dir/refused");
refuses('the forward alone, with scales of both directions', 2, qr/--mlp fp8: the scales of the network of preset toy-2026-08 are for both directions; use fp8-backward or bf16/, $trainer, @small, qw(--preset toy-2026-08 --mlp fp8), '--out', "$dir/refused");
refuses('a backward without scales', 2, qr/--mlp fp8-backward: the network of preset $_ has no scales for the backward; use fp8 or bf16/, $trainer, @small, '--preset', $_, qw(--mlp fp8-backward), '--out', "$dir/refused") for qw(toy-2026);
refuses('an MLP that no codes fit', 2, qr/error: --mlp fp8-backward: --model-dim and --mlp-dim must be multiples of 16$/, $trainer, @small, @fp8, qw(--mlp-dim 56), '--out', "$dir/refused");
refuses('q, k and v of a record with scales of the MLP alone', 2, qr/--qkv fp8: the network of preset 2025-11-18 has no scales for that; use bf16/, $trainer, @small, qw(--preset 2025-11-18 --qkv fp8), '--out', "$dir/refused");
refuses('q, k and v without scales', 2, qr/--qkv fp8: the network of preset toy-2026 has no scales for that; use bf16/, $trainer, @small, qw(--preset toy-2026 --qkv fp8), '--out', "$dir/refused");

done_testing;
