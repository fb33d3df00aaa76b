#!/usr/bin/env perl
# A run of the records of 2026 at a small size, over all of its stages: sizes, windows with YaRN, targets, the prefix term and the head
# that parts from the embedding change in mid-run. Log, resume at every step, ranks, validation.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use MIME::Base64 qw(encode_base64);
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;

# A vocabulary of bytes and of some pairs of them.
my $rank = 0;
my $vocabulary = spew("$dir/small.tiktoken", join '', map { encode_base64($_, '') . ' ' . $rank++ . "\n" } (map { chr } 0 .. 255), map { chr(97 + $_) . chr(98 + $_) } 0 .. 7);
my $document = $rank;
sub shard {
    my ($name, @ids) = @_;
    @ids = map { $_ == 256 ? $document : $_ % 3 ? $_ : 256 + $_ % 8 } @ids;
    return spew("$dir/$name", pack('l<256', 20240520, 1, scalar(@ids), $document + 1, $document + 1, (0) x 251) . pack('S<*', @ids));
}
shard('train_1.bin', documents(9000, 5));
shard('val.bin', documents(700, 2));
my @run = (qw(--preset toy-2026 --verbose --train-files), "$dir/train_*.bin", '--val-files', "$dir/val.bin", '--vocab', $vocabulary);

my ($status, $out, $err) = run($trainer, @run, '--out', "$dir/whole");
plan skip_all => 'built without PCRE2' if $err =~ /without PCRE2/;
is($status, '0', '8 steps') or diag $err;
like($out, qr/^stages: from step 0: 2 x 32 tokens, documents cut at 20, windows 3 and 9, rate 1, targets 1:0.5:0.25-0, prefix 0.25; from step 2: 2 x 48 tokens, documents cut at 40, windows 5 and 13, rate 1.52, targets 1:0.5-0, prefix 0.25-0; from step 3: 2 x 64 tokens, documents cut at 40, windows 6 and 15, rate 1.73; from step 5: 2 x 64 tokens, documents cut at 40, windows 7 and 17, rate 1.73$/m,
    'the log says what each stage is');
like($out, qr/^data: 8 of 265 tokens begin with a shorter one/m, 'and how many tokens have a prefix');
my $whole = checkpoint("$dir/whole", 8);

# How many elements of the embedding (384, 48) are not those of the head (48, 384).
sub parted {
    my $tensors = (tensors($_[0]))[0];
    my ($embed, $head) = map { floats($tensors->{$_}) } 'embed.weight', 'lm_head.weight';
    return scalar grep { my $t = $_; grep { $embed->[48 * $t + $_] != $head->[384 * $_ + $t] } 0 .. 47 } 0 .. 383;
}

# The tied head parts after step 3; the stages begin at 2, 3 and 5.
for my $stop (1 .. 7) {
    run_ok("stop at $stop", $trainer, @run, '--out', "$dir/s$stop", '--stop-at', $stop);
    run_ok("resume at $stop", $trainer, @run, '--out', "$dir/s$stop", '--resume', checkpoint("$dir/s$stop", $stop));
    is(same_state($whole, checkpoint("$dir/s$stop", 8)), '', "$stop + " . (8 - $stop) . ' steps end in the same bits as 8');
}

is(parted(checkpoint("$dir/s4", 4)), 0, 'after step 3 the embedding is the head');
is(parted(checkpoint("$dir/s5", 5)), 0, 'and after step 4, which updates neither');
cmp_ok(parted($whole), '>', 100, 'then they part');

# The last validation has a window of its own; a validation does not depend on the steps around it.
my ($again) = run_ok('validation of the last weights', $trainer, @run[0, 1], '--eval-only', '--val-files', "$dir/val.bin", '--resume', $whole);
is(($again =~ /val_loss:([\d.]+)/)[0], val_losses("$dir/whole")->{8}, 'validated again: the same loss');
run_ok('other windows in the last validation', $trainer, @run, '--out', "$dir/window", '--window-final', 2);
is(same_state($whole, checkpoint("$dir/window", 8)), 'option.window-final', 'change no weight');
isnt(val_losses("$dir/window")->{8}, val_losses("$dir/whole")->{8}, 'but its loss');

SKIP: {
    skip 'one GPU has one rank', 3 if $trainer !~ /cpu/;
    run_ok('two ranks', $trainer, @run, '--out', "$dir/two", '--ranks', 2);
    my ($one, $two) = map { losses($_) } "$dir/whole", "$dir/two";
    my ($worst) = sort { $b <=> $a } map { abs($two->{$_} / $one->{$_} - 1) } 1 .. 8;
    cmp_ok($worst, '<', 0.01, "two ranks: losses differ by at most $worst of them");
    is((tensors(checkpoint("$dir/two", 8)))[1]{'data.position'}, (tensors($whole))[1]{'data.position'}, 'and take the same data');
}

# The preset for a CPU, on bytes. Eight of them are equally frequent: ln 8 = 2.08 is the loss of who knows no more than that.
write_shard('byte_1.bin', documents(40000, 1));
write_shard('byteval.bin', documents(1400, 2));
($out) = run_ok('tiny-2026', $trainer, qw(--preset tiny-2026 --num-scheduled 28 --num-extension 2 --stage-tokens), '64,96,128,128', qw(--val-tokens 1024 --val-every 15 --train-files), "$dir/byte_1.bin",
    '--val-files', "$dir/byteval.bin", '--out', "$dir/tiny");
like($out, qr/^data: the tokens are single bytes: the loss has no prefix term$/m, 'bytes have no prefix');
like($out, qr/^loss: a training step's has several targets/m, 'the log says why the loss is higher than val_loss');
my $loss = val_losses("$dir/tiny");
ok($loss->{0} > 5.9 && $loss->{15} < 3 && ($loss->{30} // 9) < 1.8, "its loss falls from $loss->{0} over $loss->{15} to $loss->{30}");

refuses('no vocabulary', 1, qr{prefix term of the loss \(--stage-prefix\) needs --vocab, a folder|--vocab data/vocab: has \d+ tokens}, $trainer, @run[0 .. 6], '--out', "$dir/bad");
done_testing;
