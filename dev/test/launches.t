#!/usr/bin/env perl
# --launch-tokens: a micro-batch in launches of whole documents is the same batch with the same losses to rounding, and needs less memory;
# on any number of ranks, over stages of several sizes, and stopped and gone on with bit for bit. TRAIN_GPT names the program.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard("train_$_.bin", documents(24000, $_)) for 1 .. 2;
write_shard('val.bin', documents(5000, 3));
my $cpu = $trainer =~ /_cpu$/;

# Documents of 6 to 60 tokens; windows change at steps 4, 6 and 9.
my @options = (@tiny, qw(--micro-batch-tokens 256 --max-document 60 --num-scheduled 8 --num-extension 2 --val-tokens 2048 --val-every 4 --verbose));

sub train {
    my ($program, $name, @more) = @_;
    my ($out) = run_ok("$name @more", $program, @options, '--out', "$dir/$name", @more);
    my %validations;
    for (map { split /\n/, slurp($_) } logs("$dir/$name", 'jsonl')) { $validations{$1} = $2 if /"step":(\d+),"val_loss":([\d.]+)/ }
    return {losses => losses("$dir/$name"), validations => \%validations, out => $out};
}

sub apart {
    my ($one, $other) = @_;
    my ($most) = sort { $b <=> $a } map { abs($one->{$_} - $other->{$_}) } keys %$one;
    return %$one && keys %$one == keys %$other ? $most : 'other steps';
}

# The smear's gate and factor are 0 at the start: from the second step on a launch depends on the token before it. In bf16 a token's
# loss follows roundings of gradients (2^-9) from then on.
for (['fp32', $exact, 1e-6, 1e-6], ['as it is', $trainer, 1e-5, 3e-3]) {
    my ($what, $program, $first, $rest) = @$_;
    next if $program eq $exact && (!$cpu || !-x $exact);
    my $name = $what =~ s/ /_/gr;
    my $whole = train($program, "$name.whole");
    my ($bytes) = $whole->{out} =~ /activations: training ([\d.]+) MiB, validation/;
    for my $tokens (64, 80, 128) {
        my $cut = train($program, "$name.$tokens", '--launch-tokens', $tokens);
        cmp_ok(abs($cut->{losses}{1} - $whole->{losses}{1}), '<', $first, "$what: launches of $tokens tokens: loss of step 1, $whole->{losses}{1}");
        my ($losses, $validations) = (apart($cut->{losses}, $whole->{losses}), apart($cut->{validations}, $whole->{validations}));
        cmp_ok($losses, '<', $rest, "losses of ten steps, at most $losses apart");
        cmp_ok($validations, '<', $rest, "validations, at most $validations apart");
        my ($least, $at_once) = $cut->{out} =~ /activations: training ([\d.]+) MiB for $tokens of 256 tokens at a time \(([\d.]+) for all\), validation/;
        my $share = $cpu ? $tokens / 256 + 0.1 : 1; # kernels of a GPU have some of any size
        ok(defined $least && $at_once == $bytes && $least < $bytes * $share, "$least MiB of activations in place of $bytes");
    }
    train($program, "$name.more", '--launch-tokens', 512);
    is(same_state(newest("$dir/$name.whole"), newest("$dir/$name.more")), 'option.launch-tokens', "$what: launches of more tokens than a micro-batch has: nothing else differs") if $cpu;
}

# Several micro-batches a rank, and one.
SKIP: {
    skip 'one GPU has one rank', 5 if !$cpu;
    my $program = -x $exact ? $exact : $trainer;
    my $limit = $program eq $exact ? 1e-6 : 3e-3;
    my $whole = train($program, 'alone');
    for my $ranks (2, 8) {
        my $cut = train($program, "ranks.$ranks", '--launch-tokens', 64, '--ranks', $ranks);
        my $losses = apart($cut->{losses}, $whole->{losses});
        cmp_ok($losses, '<', $limit, "$ranks ranks, whose steps differ in their launches: at most $losses apart");
    }
}

# Stopped and gone on with; of the toy only the second and third stage are cut.
my @toy = (qw(--preset toy --launch-tokens 80), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
for (['tiny', 10, [(grep { $_ ne '--verbose' } @options), '--launch-tokens', 64], 3, 5], $cpu ? ['toy', 16, \@toy, 7, 12] : ()) {
    my ($name, $steps, $arguments, @stops) = @$_;
    run_ok("$name, whole", $trainer, @$arguments, '--out', "$dir/$name");
    for my $stop (@stops) {
        run_ok("stop at $stop", $trainer, @$arguments, '--stop-at', $stop, '--out', "$dir/$name.$stop");
        run_ok('go on', $trainer, '--resume', checkpoint("$dir/$name.$stop", $stop), '--out', "$dir/$name.$stop", '--stop-at', 0);
        is(same_state(checkpoint("$dir/$name", $steps), checkpoint("$dir/$name.$stop", $steps)), '', 'the same bits')
            if $cpu;
    }
}

{
    my (undef, $err) = run_ok('--graphs on with launches', $trainer, @options, qw(--launch-tokens 64 --graphs on --stop-at 2), '--out', "$dir/graphs");
    is(scalar(() = $err =~ /note: --graphs: not used: launches of --launch-tokens run without CUDA graphs$/mg), 1, 'one line says that launches have none');
}
refuses('a launch that is no longer than documents', 2, qr/error: --launch-tokens 48: documents have up to 60 tokens \(--max-document\), and a launch must have more$/,
    $trainer, @options, '--launch-tokens', 48);
refuses('scales that follow micro-batches', 2, qr/error: --launch-tokens: not with --mlp fp8-backward, whose scales follow whole micro-batches; use a lower --micro-batch-tokens$/,
    $trainer, @options, qw(--launch-tokens 64 --mlp fp8-backward));
refuses('an odd number', 2, qr/error: --launch-tokens 70 is not a multiple of 16$/, $trainer, @options, '--launch-tokens', 70);
refuses('a preset of 2026', 2, qr/error: --launch-tokens: the network of preset 2026-07-17 does not offer it; use a lower --micro-batch-tokens$/,
    $trainer, qw(--preset tiny-2026 --launch-tokens 512));
refuses('several targets', 2, qr/error: --launch-tokens: not with several targets or a prefix term/, $trainer, qw(--preset toy-targets --launch-tokens 80));
done_testing;
