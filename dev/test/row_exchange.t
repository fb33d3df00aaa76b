#!/usr/bin/env perl
# --pair-exchange rows: of the table that is read by pairs of tokens only touched rows travel, and every run ends in the bits of the dense
# exchange: over changes of size, with steps whose rows are too many, validations, checkpoints between the two steps of an update.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
plan skip_all => 'ranks of the CUDA program: gpu/ranks.t' if $trainer !~ /_cpu$/;
srand 7;
write_shard('train_1.bin', map { $_ % 512 ? int rand 256 : 256 } 0 .. 46000); # no pair is frequent
write_shard('val.bin', documents(700, 2));
my @sizes = (qw(--model-dim 48 --mlp-dim 64 --micro-batches 4 --micro-batch-tokens 192 --stage-tokens), '64,128,192');
my @run = (qw(--preset tiny-2026), @sizes, qw(--num-scheduled 10 --num-extension 2 --val-tokens 512 --val-every 5 --train-files), "$dir/train_*.bin",
    '--val-files', "$dir/val.bin");

sub train {
    my ($name, @options) = @_;
    my ($out) = run_ok($name, $trainer, @run, '--out', "$dir/$name", @options);
    return $out;
}
my $same = 'option.pair-exchange';

for my $ranks (1, 2, 4) {
    my @ranks = ('--ranks', $ranks);
    train("dense$ranks", @ranks, qw(--pair-exchange dense --checkpoint-every 3));
    train("rows$ranks", @ranks, qw(--pair-exchange rows --checkpoint-every 3));
    for my $step (3, 6, 9, 12) { # after 3 and 9 gradients wait for the next step
        my ($dense, $rows) = map { checkpoint("$dir/$_$ranks", $step) } 'dense', 'rows';
        is(same_state($dense, $rows), $same, "$ranks ranks, step $step: the same bits");
    }
    is_deeply(losses("$dir/rows$ranks"), losses("$dir/dense$ranks"), 'the same losses');
    is_deeply(val_losses("$dir/rows$ranks"), val_losses("$dir/dense$ranks"), 'the same validations');
    next if $ranks == 1;
    train("resumed$ranks", @ranks, qw(--pair-exchange rows --resume), checkpoint("$dir/dense$ranks", 3));
    is(same_state(checkpoint("$dir/dense$ranks", 12), checkpoint("$dir/resumed$ranks", 12)), $same, 'from a checkpoint between the steps of an update');
}

# What ran: the first stage by rows, both ways; the last reads more than half of an owner's rows.
my %calls;
for my $tokens (64, 1024) {
    my $out = train("ops$tokens", qw(--ranks 2 --pair-exchange rows --profile 7 --repeat --val-every 0 --micro-batch-tokens), $tokens, '--stage-tokens', "$tokens,$tokens,$tokens");
    %{$calls{$tokens}} = $out =~ /^profile: ([a-z]\w+) +([\d.]+) +[\d.]+ +[\d.]+%/mg;
}
is($calls{64}{rows_take}, 0.5, 'gradients travel by rows at every other step');
is($calls{64}{rows_store}, 1, 'and values at every one');
is($calls{1024}{rows_take}, undef, 'but not where half of the table is read');

# Rows are what auto chooses, if they can be split.
my $chosen = train('auto', qw(--ranks 2 --profile 7 --repeat --val-every 0 --micro-batch-tokens 64 --stage-tokens), '64,64,64');
like($chosen, qr/^profile: rows_take +0\.5 /m, 'rows travel where nothing is asked for');
my @odd = (qw(--preset toy-2026 --ranks 2 --micro-batch-tokens 64), '--stage-prefix', '', '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my ($dense) = run_ok('rows that cannot be split', $trainer, @odd, qw(--num-scheduled 60 --num-extension 2 --stop-at 14 --profile 7 --repeat --val-every 0), '--out', "$dir/odd");
like($dense, qr/^profile: all/m, 'are profiled');
unlike($dense, qr/^profile: rows_take/m, 'and stay dense');
refuses('rows that cannot be split', 2, qr/--pair-exchange rows: the 97 rows of bigram_embed.weight cannot be split over 2 ranks/, $trainer,
    @odd, qw(--stop-at 1 --pair-exchange rows --out), "$dir/split");
done_testing;
