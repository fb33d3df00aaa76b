#!/usr/bin/env perl
# data/order2.c against a second implementation of its formula, against sources of known entropy, and on bad input.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use JSON::PP qw(encode_json);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
my $dir = tempdir(CLEANUP => 1);
my $compiler = $ENV{CC} // 'gcc';
my $log = `cd '$root' && $compiler -std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all -I. data/order2.c llmc/base/common.c llmc/text/jsonl.c llmc/base/utf8.c -o '$dir/order2' -ljansson -lm 2>&1`;
is($? . $log, '0', 'compiles without a warning');

sub write_file {
    my ($name, $bytes) = @_;
    open my $out, '>:raw', "$dir/$name" or die;
    print $out $bytes;
    close $out;
    return "$dir/$name";
}

# Documents of bytes below 128, which are the same bytes in UTF-8.
sub write_jsonl {
    my ($name, @documents) = @_;
    return write_file($name, join '', map { encode_json({text => $_, source => 'x'}) . "\n" } @documents);
}

# (status, stdout, stderr)
sub order2 {
    my $pid = fork // die;
    if (!$pid) {
        open STDOUT, '>', "$dir/stdout" or die;
        open STDERR, '>', "$dir/stderr" or die;
        exec "$dir/order2", @_ or die;
    }
    waitpid $pid, 0;
    my $status = $? & 127 ? "signal $?" : $? >> 8;
    return ($status, map { open my $in, '<', "$dir/$_" or die; local $/; scalar(<$in>) // '' } 'stdout', 'stderr');
}

sub bits_per_byte {
    my ($status, $out, $err) = order2(@_);
    my ($bits) = $out =~ /\Aorder-2 byte model: ([0-9.]+) bits per byte, [0-9.]+ nats per token\n/;
    diag("$status $out$err") if !defined $bits;
    return $bits // 'nothing';
}

my $seed = 7;
sub random { $seed = ($seed * 1103515245 + 12345) % 2**31; return $seed / 2**31 }
sub pick { my $r = random(); for (0 .. $#_) { return $_ if ($r -= $_[$_]) < 0 } return $#_ }

# ---- the formula, a second time ----------------------------------------------------------------------------------------

# Modified Kneser-Ney as in the comment of data/order2.c, with hashes: a context is a string of symbols "a,b".
sub train {
    my (%count, @orders);
    for my $document (@_) {
        my @s = (256, 256, unpack('C*', $document), 256);
        $count{"$s[$_-2],$s[$_-1]"}{$s[$_]}++ for 2 .. $#s;
    }
    for my $k (2, 1, 0) {
        my %of_counts;
        $of_counts{$_}++ for map { values %$_ } values %count;
        my @n = map { $of_counts{$_} // 0 } 0 .. 4;
        my $known = !grep { !$_ } @n[1 .. 4];
        my @d = (0, map { my $d = $known ? $_ - ($_ + 1) * $n[1] / ($n[1] + 2 * $n[2]) * $n[$_ + 1] / $n[$_] : 0.75; $d > 0.05 ? $d : 0.05 } 1 .. 3);
        $orders[$k] = {count => {%count}, d => \@d};
        my %lower;
        for my $h (keys %count) { $lower{$h =~ s/^\d+,?//r}{$_}++ for keys %{$count{$h}} }
        %count = %lower;
    }
    return \@orders;
}

sub probability {
    my ($orders, $k, $context, $symbol) = @_;
    return 1 / 257 if $k < 0;
    my $lower = probability($orders, $k - 1, $context =~ s/^\d+,?//r, $symbol);
    my ($counts, $d) = ($orders->[$k]{count}{$context}, $orders->[$k]{d});
    return $lower if !$counts;
    my ($total, $discount) = (0, 0);
    for (values %$counts) { $total += $_; $discount += $d->[$_ > 3 ? 3 : $_] }
    my $c = $counts->{$symbol} // 0;
    return ($c - $d->[$c > 3 ? 3 : $c] + $discount * $lower) / $total;
}

# Bits and targets of documents.
sub evaluate {
    my ($orders, @documents) = @_;
    my ($bits, $targets) = (0, 0);
    for my $document (@documents) {
        my @s = (256, 256, unpack('C*', $document), 256);
        for (2 .. $#s) { $bits -= log(probability($orders, 2, "$s[$_-2],$s[$_-1]", $s[$_])) / log 2; $targets++ }
    }
    return ($bits, $targets);
}

# Words of unequal frequency, so that counts of 1 to 4 occur in every order.
my @words = map { join '', map { chr 97 + int(26 * random()**2) } 0 .. 5 * random() } 1 .. 60;
sub text { join ' ', map { $words[60 * random()**2] } 1 .. $_[0] }
my @train = map { text(40) } 1 .. 30;
my @val = (map({ text(25) } 1 .. 8), 'ZZ unseen \x01', 'x');
my $model = train(@train);
for my $context ('256,256', '97,98', '32,97', '90,90', '256,120') {
    my $sum = 0;
    $sum += probability($model, 2, $context, $_) for 0 .. 256;
    ok(abs($sum - 1) < 1e-12, "second implementation: probabilities after $context sum to one");
}
ok((grep { $_ != 0.75 } map { @{$_->{d}}[1 .. 3] } @$model) >= 6, 'its discounts are estimated, not the fallback');

my ($train_file, $val_file) = (write_jsonl('train.jsonl', @train), write_jsonl('val.jsonl', @val));
my ($bits, $targets) = evaluate($model, @val);
my $bytes = 0;
$bytes += length for @val;
my ($status, $out, $err) = order2($train_file, $val_file);
my ($got_bits, $got_nats) = $out =~ /: ([0-9.]+) bits per byte, ([0-9.]+) nats per token/;
ok(abs($got_bits - $bits / $bytes) < 1e-6, "both implementations: $got_bits bits per byte, " . $bits / $bytes);
ok(abs($got_nats - $bits * log(2) / $targets) < 1e-6, "nats per token: $got_nats");
my $train_bytes = 0;
$train_bytes += length for @train;
like($out, qr/^evaluated on $bytes bytes in 10 documents, trained on $train_bytes bytes in 30 documents$/m, 'what it was measured on');

# Too small to estimate discounts; every byte value; NUL inside JSON; plain text is one document.
my ($tiny_bits) = evaluate(train('ab'), 'ba');
ok(abs(bits_per_byte(write_file('a', 'ab'), write_file('b', 'ba')) - $tiny_bits / 2) < 1e-6, 'two bytes to train on');
my $every = join '', map { chr } 0 .. 255, reverse 0 .. 255;
my ($every_bits) = evaluate(train($every), $every);
ok(abs(bits_per_byte(write_file('every', $every), "$dir/every") - $every_bits / 512) < 1e-6, 'every byte value');
is(bits_per_byte(write_jsonl('nul.jsonl', "a\0b\0c"), write_jsonl('nul2.jsonl', "c\0a")), bits_per_byte(write_file('nul', "a\0b\0c"), write_file('nul2', "c\0a")), 'a NUL is a byte like any other, in JSON as in text');
is(bits_per_byte(write_file('blank.jsonl', "\n\n" . encode_json({text => 'ab'}) . "\r\n\n"), "$dir/b"), bits_per_byte("$dir/a", "$dir/b"), 'empty lines are skipped');

# ---- sources of known entropy ------------------------------------------------------------------------------------------

# An order-2 source over 4 letters: each pair has a permutation of these probabilities, so each letter has the same entropy.
my @p = (0.6, 0.25, 0.1, 0.05);
my $entropy = 0;
$entropy -= $_ * log($_) / log(2) for @p;
sub markov {
    my ($n) = @_;
    my ($a, $b, $text) = (0, 0, '');
    for (1 .. $n) {
        my $c = (pick(@p) + 3 * $a + $b) % 4;
        $text .= chr 65 + $c;
        ($a, $b) = ($b, $c);
    }
    return $text;
}
my $markov = bits_per_byte(write_file('markov', markov(200_000)), write_file('markov2', markov(200_000)));
ok(abs($markov - $entropy) < 0.01, sprintf 'a source of order 2: %.4f bits, entropy %.4f', $markov, $entropy);
my $noise = bits_per_byte(write_file('noise', join '', map { chr 256 * random() } 1 .. 300_000), write_file('noise2', join '', map { chr 256 * random() } 1 .. 50_000));
ok($noise > 8 && $noise < 8.5, "random bytes: $noise bits, a little over 8");
my $period = bits_per_byte(write_file('period', 'abcdefg' x 5000), write_file('period2', 'abcdefg' x 500));
ok($period < 0.01, "a text that repeats itself: $period bits");

# ---- bad input ---------------------------------------------------------------------------------------------------------

write_file('empty', '');
mkdir "$dir/folder";
my %bad = (
    'truncated.jsonl' => qq({"text":"a"}\n{"text":"b), 'array.jsonl' => "[1]\n", 'number.jsonl' => qq({"text":1}\n), 'other.jsonl' => qq({"body":"a"}\n),
    'two.jsonl' => qq({"text":"a"} {"text":"b"}\n), 'deep.jsonl' => '[' x 100_000, 'binary.jsonl' => "\0\1\2\n", 'null.jsonl' => "null\n", 'after.jsonl' => qq({"text":"a"}\0x\n),
);
for my $name (sort keys %bad) {
    ($status, $out, $err) = order2(write_file($name, $bad{$name}), $val_file);
    my $line = $name eq 'truncated.jsonl' ? 2 : 1;
    ok($status eq 1 && $out eq '' && $err =~ /\Aorder2: error: \Q$dir\/$name\E: line $line: [^\n]*\n\z/, "refused: $name") or diag("$status $out$err");
}
for (["$dir/absent", qr/cannot read the text .*: No such file/], ["$dir/folder", qr/is a folder; name a regular/], ['/dev/zero', qr/is a device; name a regular/], ["$dir/empty", qr/holds no text/]) {
    my ($path, $pattern) = @$_;
    for my $arguments ([$path, $val_file], [$train_file, $path]) {
        ($status, $out, $err) = order2(@$arguments);
        ok($status eq 1 && $out eq '' && $err =~ /\Aorder2: error: [^\n]*\n\z/ && $err =~ $pattern, "refused: $pattern") or diag("$status $out$err");
    }
}
($status, $out, $err) = order2($train_file);
ok($status eq 2 && $err =~ /\Aorder2: error: two files are needed[^\n]*\n\z/, 'one file only: exit 2');
SKIP: {
    skip 'no /dev/full', 1 if !-e '/dev/full';
    is(system("'$dir/order2' '$train_file' '$val_file' >/dev/full 2>'$dir/stderr'") >> 8, 1, 'a full disk is told');
}
done_testing();
