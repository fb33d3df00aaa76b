#!/usr/bin/env perl
# Stages of a schedule that differ in micro-batches, documents, windows and rates: memory, batches, log and resume follow, on any
# number of ranks. By the toy record, which is a table and nothing else, and by options on another preset.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard("train_$_.bin", documents(9000, 10 + $_)) for 1 .. 4;
write_shard('val.bin', documents(700, 2));
my @data = ('--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");

# The toy: 6 steps of 8 x 64 tokens, 6 of 8 x 128, 4 of 8 x 96.
my @toy = (qw(--preset toy --verbose), @data);
my ($out) = run_ok('the toy record', $trainer, @toy, '--out', "$dir/whole");
like($out, qr/^stages: from step 0: 8 x 64 tokens, documents cut at 32, windows 8 and 16, rate 1; from step 6: 8 x 128 tokens, documents cut at 64, windows 16 and 32, rate 1.5; from step 12: 8 x 96 tokens, documents cut at 64, windows 16 and 40, rate 1$/m,
    'the log says what each stage is');
my $whole = checkpoint("$dir/whole", 16);
my ($tensors, $metadata) = tensors($whole);
is_deeply([sort map { /^layers\.(\d)\.qkvo$/ } keys %$tensors], [0, 2, 4], 'layers 0, 2 and 4 have attention');
is_deeply([sort map { /^layers\.(\d)\.up$/ } keys %$tensors], [0, 1, 3, 4], 'all but layer 2 have an MLP');
my $losses = losses("$dir/whole");
cmp_ok($losses->{16}, '<', $losses->{1} - 1, "it learns: $losses->{1} to $losses->{16}");
my %lr = map { /"event":"step","step":(\d+),.*"lr":([-\d.]+)/ ? ($1 => $2) : () } split /\n/, log_text("$dir/whole", 'jsonl');
is_deeply([map { sprintf '%.6f', $lr{$_} / 0.03 } 1, 5, 7, 8, 13], ['1.000000', '1.000000', map { sprintf '%.6f', $_ } 0.1 + 1.4 * 0.5 / 0.6, 0.1 + 1.4 * (5 / 12) / 0.6, 0.1 + 0.9 * 0.0001 / 0.6],
    'rates by stage, and the fall over the last 0.6 of the scheduled steps');

# Around both changes of size, at odd and even steps.
for my $stop (5, 6, 7, 12, 13) {
    run_ok("stop at $stop", $trainer, @toy, '--out', "$dir/s$stop", '--stop-at', $stop);
    run_ok("resume at $stop", $trainer, @toy, '--out', "$dir/s$stop", '--resume', checkpoint("$dir/s$stop", $stop));
    is(same_state($whole, checkpoint("$dir/s$stop", 16)), '', "$stop + " . (16 - $stop) . ' steps end in the same bits as 16');
}

# Three targets, then two, then one. At the start the head is zero, so that each of 384 columns has the same share; the last two rows
# of a sequence of 64 have fewer targets.
my @targets = (qw(--preset toy-targets --verbose), @data);
($out) = run_ok('a loss of several targets', $trainer, @targets, '--out', "$dir/targets");
like($out, qr/^stages: .* rate 1, targets 1:0.5:0.25-0; .* rate 1.5, targets 1:0.5-0; .* rate 1$/m, 'the log says their weights');
my $of_targets = losses("$dir/targets");
cmp_ok(abs($of_targets->{1} - (64 + 0.5 * 63 + 0.25 * 62) / 64 * log 384), '<', 1e-4, "the first loss is that of three targets: $of_targets->{1}");
cmp_ok($of_targets->{16}, '<', $losses->{1} - 1, "and one target is learned: $of_targets->{16}");
run_ok('stop while weights fall', $trainer, @targets, '--out', "$dir/targets8", '--stop-at', 8);
run_ok('resume there', $trainer, @targets, '--out', "$dir/targets8", '--resume', checkpoint("$dir/targets8", 8));
is(same_state(checkpoint("$dir/targets", 16), checkpoint("$dir/targets8", 16)), '', 'the same bits');

# On two ranks: the same data, losses to the rounding of bf16 sums.
SKIP: {
    skip 'one GPU has one rank', 2 if $trainer !~ /cpu/;
    run_ok('two ranks', $trainer, @toy, '--out', "$dir/two", '--ranks', 2);
    is((tensors(checkpoint("$dir/two", 16)))[1]{'data.position'}, $metadata->{'data.position'}, 'two ranks take the same data');
    my $two = losses("$dir/two");
    my ($worst) = sort { $b <=> $a } map { abs($two->{$_} - $losses->{$_}) } 1 .. 16;
    cmp_ok($worst, '<', 0.05, "two ranks: losses differ by at most $worst");
}

# Three stages and an extension by options. Memory is planned for the largest, once.
sub memory { my ($text) = @_; return $text =~ /^memory: activations +([\d.]+) MiB/m ? $1 : undef }
my @stages = (@tiny, '--verbose', '--stage-tokens', '32,64,48,16', '--stage-documents', '16,32,64');
($out) = run_ok('three stages by options', $trainer, @stages, '--out', "$dir/three");
my ($short) = run_ok('short windows by stage', $trainer, @tiny, '--verbose', '--window-short', '1,2,3,4', '--out', "$dir/short");
like($short, qr/windows 4 and 12, .*windows 8 and 28, .*windows 12 and 44, .*windows 16 and 52,/, 'the log says them');
my ($plain) = run_ok('one size', $trainer, @tiny, '--verbose', '--out', "$dir/one");
is(memory($out), memory($plain), 'activations take what the largest stage needs');
like($out, qr/from step 6: 8 x 64 tokens, documents cut at 32, .*from step 11: 8 x 48 tokens, documents cut at 64, .*from step 16: 8 x 16 tokens, documents cut at 64/, 'the log names them');
for my $stop (11, 16) {
    run_ok("stop at $stop", $trainer, @stages, '--out', "$dir/t$stop", '--stop-at', $stop);
    run_ok("resume at $stop", $trainer, @stages, '--out', "$dir/t$stop", '--resume', checkpoint("$dir/t$stop", $stop));
    is(same_state(checkpoint("$dir/three", 20), checkpoint("$dir/t$stop", 20)), '', "stages and a stop at $stop: the same bits");
}

# A list with the value of all stages is the option for all.
run_ok('the same size, written four times', $trainer, @tiny, '--out', "$dir/same", '--stage-tokens', '64,64,64,64', '--stage-rates', '1,1,1');
is_deeply(losses("$dir/same"), losses("$dir/one"), 'the same losses');

# Words, counts, bounds.
my @go = ($trainer, @tiny, '--out', "$dir/bad");
refuses('a list of words', 2, qr/--stage-tokens: '64,x' is not a list of numbers/, @go, '--stage-tokens', '64,x');
refuses('too few entries', 2, qr/--stage-documents: '64,32' has 2 entries; the 3 stages of --window-schedule need 3, or one more/, @go, '--stage-documents', '64,32');
refuses('no multiple of 16', 2, qr/--stage-tokens: 40 must be 16 to \d+, a multiple of 16/, @go, '--stage-tokens', '64,40,64');
refuses('too many tokens', 2, qr/--stage-tokens: 16777216 must be 16 to/, @go, '--micro-batches', 64, '--stage-tokens', '64,16777216,64');
refuses('half a token', 2, qr/--stage-documents: 2.5 must be .* whole number/, @go, '--stage-documents', '64,2.5,64');
refuses('no list of targets', 2, qr/--stage-targets: '1:x' is not a list of weights by stage/, @go, '--stage-targets', '1:x');
refuses('too many targets', 2, qr/--stage-targets: '1:1:1:1' is not .* at most 3 targets/, @go, '--stage-targets', '1:1:1:1');
refuses('targets of too few stages', 2, qr/--stage-targets: '1,1' has 2 entries; the 3 stages/, @go, '--stage-targets', '1,1');
refuses('no next token', 2, qr/--stage-targets: the next token's weight must be above 0/, @go, '--stage-targets', '1-0,1,1');
refuses('a share above 1', 2, qr/--rate-starts: 1\.5 must be 0 to 1/, @go, '--rate-starts', '0,0.4,1.5');
refuses('too few shares', 2, qr/--rate-starts: '0,0\.4' has 2 entries/, @go, '--rate-starts', '0,0.4');
refuses('a rate too high', 2, qr/--stage-rates: 2000 must be 0 to 1000/, @go, '--stage-rates', '1,2000,1');
refuses('half a block', 2, qr/--window-short: 1.5 must be 1 to \d+, a whole number/, @go, '--window-short', '1,1.5,2');
refuses('short windows of too few stages', 2, qr/--window-short: '1' has 1 entries; the 3 stages/, @go, '--window-short', '1');
refuses('no weight of a prefix', 2, qr/--stage-prefix: '0.25,x,0' is not a list of weights/, @go, '--stage-prefix', '0.25,x,0');
refuses('two weights of prefixes', 2, qr/--stage-prefix: a stage has one weight/, @go, '--stage-prefix', '0.25,1:1,0');
refuses('other stages than the checkpoint', 1, qr/--stage-tokens 32,64,48,16, but this run has 32,64,48;/, $trainer, @tiny, '--out', "$dir/t11",
    '--stage-tokens', '32,64,48', '--stage-documents', '16,32,64', '--resume', checkpoint("$dir/t11", 20));

done_testing;
