#!/usr/bin/env perl
# A step in 4 large micro-batches or in 16 small ones: the same result within rounding, and less memory. TRAIN_GPT names the program.
#
# The loader gives every micro-batch whole documents from its start and drops the document that it ends in, so two shards hold the
# same documents, with one to drop wherever a micro-batch of that shard ends. What is left: the first token of a micro-batch has no
# token before it to take a share of (the smear gate), which counts from the second step on.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;

my ($small, $steps) = (64, 8);
my ($large, $seed) = (4 * $small, 1);
sub random { my ($below) = @_; $seed = ($seed * 1103515245 + 12345) % 2**31; return int($seed / 65536) % $below }

# Documents that fill `small` tokens.
sub documents_of_a_batch {
    my @documents;
    for (my $left = $small; $left;) {
        my $length = 2 + random(30);
        $length = $left if $left - $length < 2;
        my $last = random(8);
        push @documents, [256, map { 97 + ($last = random(4) ? ($last + 1) % 8 : random(8)) } 2 .. $length];
        $left -= $length;
    }
    return @documents;
}

my @batches = map { [documents_of_a_batch()] } 1 .. 16 * $steps;
sub shard { # with a document to drop after so many small batches
    my ($name, $every) = @_;
    return write_shard($name, map { ((map { @$_ } @{$batches[$_]}), ($_ + 1) % $every ? () : (256, 97)) } 0 .. $#batches);
}
my %files = (large => shard('large.bin', 4), small => shard('small.bin', 1));
write_shard('val.bin', documents(5000, 2));

my %run = (large => [4, $large], small => [16, $small]);

sub peak { return log_text($_[0]) =~ /^peak memory allocated: (\d+) MiB/m ? $1 : undef }
sub train {
    my ($what, $program, $size) = @_;
    my ($count, $tokens) = @{$run{$size}};
    my $out = "$dir/$what.$size";
    run_ok("$what: $count micro-batches of $tokens tokens", $program, @tiny, '--train-files', $files{$size}, '--val-tokens', 4096,
        '--micro-batches', $count, '--micro-batch-tokens', $tokens, '--max-document', $small, '--stop-at', $steps, '--val-every', 0,
        '--out', $out);
    return losses($out);
}

# First step: the same arithmetic but for the order of sums. bf16 rounds activations alike in both; gradients are summed in fp32.
for (['as it is', $trainer, 1e-5, 3e-3], ['in fp32', $exact, 2e-6, 3e-4]) {
    my ($what, $program, $first, $rest) = @$_;
    next if $program eq $exact && ($trainer !~ /_cpu$/ || !-x $exact);
    my ($one, $other) = map { train($what =~ s/ /_/gr, $program, $_) } qw(large small);
    my @difference = map { abs($one->{$_} - $other->{$_}) } 1 .. $steps;
    cmp_ok($difference[0], '<', $first, "$what: loss of step 1, $one->{1}");
    my ($most) = sort { $b <=> $a } @difference;
    cmp_ok($most, '<', $rest, "of steps 1 to $steps, at most $most apart");
    validations($what, $program);
}

# A validation sequence of as many tokens, at once or in parts: of one model, the same loss but for the order of sums. Where tiles of
# a kernel begin may depend on the part on a GPU, and turn roundings to bf16: 5e-3 of a token's loss (its logit's rounding, 2^-9 of
# some 5, times dz/dl), so 8e-5 of the mean of 4096 if none were alike.
sub validations {
    my ($what, $program) = @_;
    my $name = $what =~ s/ /_/gr;
    my @loss = map {
        my ($tokens, $least, $most) = @$_;
        my $out = "$dir/$name.validation.$tokens";
        my ($text) = run_ok("$what: a validation with micro-batches of $tokens tokens", $program, @tiny, '--val-tokens', 4096,
            '--train-files', $files{large}, '--micro-batches', 4 * $large / $tokens, '--micro-batch-tokens', $tokens, '--stop-at', 1,
            '--val-every', 1, '--verbose', '--init-from', newest("$dir/$name.large"), '--out', $out);
        my ($at_once) = $text =~ /validation [\d.]+ for (\d+) tokens at a time/;
        ok($at_once >= $least && $at_once <= $most, "$at_once tokens at a time");
        log_text($out, 'jsonl') =~ /"val_loss":([\d.]+)/;
        $1;
    } [$large, 4 * $large, 4 * $large], [$large / 16, $large / 2, $large];
    cmp_ok(abs($loss[0] - $loss[1]), '<', $trainer =~ /_cpu$/ ? 1e-6 : 4e-4, "the same loss, $loss[0]");
}
done_testing;
