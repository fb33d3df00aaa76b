#!/usr/bin/env perl
# Validations that leave out tokens which cannot follow the one before (--val-mask): the last one, all, or none; on ranks, without training,
# and with vocabularies that have no such tokens or cannot be used.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use MIME::Base64 qw(encode_base64);
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;

# A vocabulary of bytes and of some pairs of them, and text that it would write: where a pair is a token its bytes do not stand alone.
sub vocabulary { my ($name, @tokens) = @_; my $rank = 0; return spew("$dir/$name", join '', map { encode_base64($_, '') . ' ' . $rank++ . "\n" } @tokens) }
my @pairs = map { chr(97 + $_) . chr(98 + $_) } 0 .. 7;
my $vocabulary = vocabulary('small.tiktoken', (map { chr } 0 .. 255), @pairs);
my $document = 256 + @pairs;
sub shard {
    my ($name, @ids) = @_;
    my %pair = map { $pairs[$_] => 256 + $_ } 0 .. $#pairs;
    my @text;
    for (@ids) {
        my $id = $_ == 256 ? $document : $_;
        my $joined = @text && $id < 256 && $text[-1] < 256 ? $pair{chr($text[-1]) . chr $id} : undef;
        if ($joined) { $text[-1] = $joined }
        else         { push @text, $id }
    }
    return spew("$dir/$name", pack('l<256', 20240520, 1, scalar(@text), $document + 1, $document + 1, (0) x 251) . pack('S<*', @text));
}
shard('train_1.bin', documents(24000, 5));
my $val = shard('val.bin', documents(2400, 2));
my @run = (qw(--preset toy-2026 --val-every 4 --train-files), "$dir/train_*.bin", '--val-files', $val, '--vocab', $vocabulary);

my %loss;
for my $mask (qw(none last all)) {
    my ($status, $out, $err) = run($trainer, @run, '--out', "$dir/$mask", '--val-mask', $mask);
    plan skip_all => 'built without PCRE2' if $err =~ /without PCRE2/;
    is($status, '0', "--val-mask $mask") or diag $err;
    $loss{$mask} = val_losses("$dir/$mask");
    my $line = {none => qr/leave/, last => qr/^data: the last validation leaves out tokens/m, all => qr/^data: validations leave out tokens/m}->{$mask};
    $mask eq 'none' ? unlike($out, $line, '  the log says nothing') : like($out, $line, '  the log says so');
}
is_deeply([map { $loss{last}{$_} } 0, 4], [map { $loss{none}{$_} } 0, 4], 'last: those before are as without');
is($loss{last}{8}, $loss{all}{8}, '  and the last one as with all');
cmp_ok($loss{none}{$_} - $loss{all}{$_}, '>', 0.001, "step $_: the loss is lower where some tokens cannot be, $loss{all}{$_} of $loss{none}{$_}") for 0, 4, 8;
is(same_state(newest("$dir/none"), newest("$dir/all")), 'option.val-mask', 'training does not change');
my ($again) = run_ok('validation alone', $trainer, @run[0, 1], qw(--eval-only --val-mask last --val-files), $val, '--vocab', $vocabulary, '--resume', newest("$dir/none"));
is(($again =~ /val_loss:([\d.]+)/)[0], $loss{last}{8}, '  has the same loss');
SKIP: {
    skip 'one GPU has one rank', 2 if $trainer !~ /cpu/;
    run_ok('two ranks', $trainer, @run, '--out', "$dir/two", qw(--val-mask all --ranks 2));
    is(val_losses("$dir/two")->{0}, $loss{all}{0}, '  the loss of one');
}

write_shard('byte_1.bin', documents(24000, 1));
write_shard('byteval.bin', documents(1400, 2));
my ($out) = run_ok('bytes', $trainer, qw(--preset toy-2026 --stop-at 1 --val-mask all --train-files), "$dir/byte_1.bin", '--val-files', "$dir/byteval.bin", '--out', "$dir/bytes");
like($out, qr/^data: the tokens are single bytes: validations leave none out$/m, '  none is left out');

my @plain = (qw(--preset tiny --micro-batch-tokens 64 --val-tokens 512 --val-mask last --train-files), "$dir/train_*.bin", '--val-files', $val, '--out', "$dir/bad");
refuses('no vocabulary', 1, qr{the mask of a validation \(--val-mask\) needs --vocab, a folder|--vocab data/vocab: has \d+ tokens}, $trainer, @plain);
my $unmade = vocabulary('unmade.tiktoken', (map { chr } 0 .. 255), @pairs[0 .. 6], 'xyzw');
refuses('a vocabulary that no merges make', 1, qr/--vocab: .*token 263.*: --val-mask needs a vocabulary that merges make/, $trainer, @plain, '--vocab', $unmade);
done_testing;
