#!/usr/bin/env perl
# The prefix term of the loss: tables from a vocabulary of the test's own, the first loss counted by hand, weights that fall, resume,
# ranks; no vocabulary, another one, single bytes.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use MIME::Base64 qw(encode_base64);
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;

# 256 bytes, 8 pairs ab, bc, ... and 7 triples abc, bcd, ...; then the token that begins documents.
my @longer = ((map { chr(97 + $_) . chr(98 + $_) } 0 .. 7), (map { chr(97 + $_) . chr(98 + $_) . chr(99 + $_) } 0 .. 6));
my $rank = 0;
my $vocabulary = spew("$dir/small.tiktoken", join '', map { encode_base64($_, '') . ' ' . $rank++ . "\n" } (map { chr } 0 .. 255), @longer);
my $document = $rank;

# Documents of bytes 97 .. 104 and of the longer tokens.
sub ids {
    my ($tokens, $seed) = @_;
    return map { $_ == 256 ? $document : $_ % 3 ? $_ : 256 + $_ % 15 } documents($tokens, $seed);
}
sub shard { my ($name, @ids) = @_; return spew("$dir/$name", pack('l<256', 20240520, 1, scalar(@ids), $document + 1, $document + 1, (0) x 251) . pack('S<*', @ids)) }
my @train = ids(20000, 5);
shard('train_1.bin', @train);
shard('val.bin', ids(700, 2));

# The share of targets that have a prefix in the first step: 8 sequences of 64, each of whole documents but for the last one's end.
sub first_share {
    my ($found, $at) = (0, 0);
    for (1 .. 8) {
        my @sequence;
        while (@sequence < 65) {
            my @own = ($train[$at++]);
            push @own, $train[$at++] while $train[$at] != $document;
            push @sequence, @own;
        }
        $found += grep { $_ > 255 && $_ != $document } @sequence[1 .. 64];
    }
    return $found / (8 * 64);
}

my @prefix = (@tiny, '--stage-prefix', '0.25,0.5-0,0', '--vocab', $vocabulary, '--verbose');
my ($status, $out, $err) = run($trainer, @prefix, '--out', "$dir/whole");
if ($err =~ /without PCRE2/) {
    plan skip_all => 'built without PCRE2';
}
is($status, '0', 'a loss with a prefix term') or diag $err;
like($out, qr/rate 1, prefix 0.25; .*rate 1, prefix 0.5-0; .*rate 1; .*rate 1$/m, 'the log says its weights');
like($out, qr/^data: 15 of 272 tokens begin with a shorter one/m, 'and how many tokens have one');
my $share = first_share();
my $losses = losses("$dir/whole");
cmp_ok($share, '>', 0.1, "targets with a prefix: $share");
cmp_ok(abs($losses->{1} / ((1 + 0.25 * $share) * log 384) - 1), '<', 1e-5, "the first loss is that of both: $losses->{1}");

for my $stop (3, 8) {
    run_ok("stop at $stop", $trainer, @prefix, '--out', "$dir/s$stop", '--stop-at', $stop);
    run_ok("resume at $stop", $trainer, @prefix, '--out', "$dir/s$stop", '--resume', checkpoint("$dir/s$stop", $stop));
    is(same_state(checkpoint("$dir/whole", 20), checkpoint("$dir/s$stop", 20)), '', "$stop + " . (20 - $stop) . ' steps end in the same bits');
}
SKIP: {
    skip 'one GPU has one rank', 2 if $trainer !~ /cpu/;
    run_ok('two ranks', $trainer, @prefix, '--out', "$dir/two", '--ranks', 2);
    my $two = losses("$dir/two");
    my ($worst) = sort { $b <=> $a } map { abs($two->{$_} - $losses->{$_}) } 1 .. 20;
    cmp_ok($worst, '<', 0.05, "two ranks: losses differ by at most $worst");
}

# The weight is 0 from step 11 on, and validation never has the term: only the steps before differ from a run without it.
run_ok('no prefix term', $trainer, @tiny, '--out', "$dir/none");
my $none = losses("$dir/none");
cmp_ok(abs($none->{1} / log(384) - 1), '<', 1e-5, 'without it the first loss is that of the targets');
is_deeply([map { $_->{0} } val_losses("$dir/whole"), val_losses("$dir/none")], [(val_losses("$dir/none"))->{0}, (val_losses("$dir/none"))->{0}], 'the first validation is the same');

# ---- vocabularies ----------------------------------------------------------------------------------------------------------

refuses('no vocabulary', 1, qr{prefix term of the loss \(--stage-prefix\) needs --vocab, a folder|--vocab data/vocab: has \d+ tokens}, $trainer, @tiny, '--stage-prefix', '1,1,1', '--out', "$dir/bad");
refuses('a missing one', 1, qr/--vocab: .*absent/, $trainer, @tiny, '--stage-prefix', '1,1,1', '--vocab', "$dir/absent", '--out', "$dir/bad");
refuses('of another size', 1, qr/--vocab bytes: has 257 tokens, the model 272/, $trainer, @tiny, '--stage-prefix', '1,1,1', '--vocab', 'bytes', '--out', "$dir/bad");

my @bytes = map { s/train_\*/byte_*/r =~ s/val\.bin/byteval.bin/r } @tiny;
write_shard('byte_1.bin', documents(20000, 5));
write_shard('byteval.bin', documents(700, 2));
($out) = run_ok('single bytes', $trainer, @bytes, '--stage-prefix', '1,1,1', '--out', "$dir/bytes");
like($out, qr/^data: the tokens are single bytes: the loss has no prefix term/m, 'the log says that there is no prefix');
run_ok('and without the option', $trainer, @bytes, '--out', "$dir/plain");
is(same_state(checkpoint("$dir/bytes", 20), checkpoint("$dir/plain", 20)), 'option.stage-prefix', 'nothing but the option is another');
done_testing;
