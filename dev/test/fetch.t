#!/usr/bin/env perl
# data/fineweb10B.sh and data/gpt2_vocab.sh against a folder that stands in for the server.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(make_path);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
plan skip_all => 'curl is not here' if system 'command -v curl >/dev/null';
my $dir = tempdir(CLEANUP => 1);
make_path("$dir/server");
$ENV{FINEWEB_URL} = "file://$dir/server";

sub shard { my ($tokens) = @_; return pack('l<3 x1012', 20240520, 1, $tokens) . pack 'S<*', map { $_ * 7 % 50257 } 1 .. $tokens }
sub run {
    my ($script, @arguments) = @_;
    my $out = `'$root/data/$script' @arguments 2>&1 </dev/null`;
    return ($? >> 8, $out);
}

my $name = 'fineweb_train_000001.bin';
my %server = ('fineweb_val_000000.bin' => shard(500), $name => shard(3000), 'fineweb_train_000002.bin' => shard(40));
spew("$dir/server/$_", $server{$_}) for keys %server;

my ($status, $out) = run('fineweb10B.sh', 2, '--out', "$dir/got");
is($status, 0, 'two shards and validation') or diag $out;
is_deeply({ map { s{.*/}{}r => slurp($_) } glob "$dir/got/*" }, \%server, 'all files as on the server, nothing else');
($status, $out) = run('fineweb10B.sh', 1, '--out', "$dir/got");
ok($status == 0 && 2 == (() = $out =~ /is here already/g), 'what is here is not fetched again');

# A partial file with an odd token in it: the token survives, so the file was continued.
my $odd = substr($server{$name}, 0, 1024) . pack('S<', 4242) . substr $server{$name}, 1026;
unlink "$dir/got/$name";
spew("$dir/got/$name.part", substr $odd, 0, 2000);
($status, $out) = run('fineweb10B.sh', 1, '--out', "$dir/got");
ok($status == 0 && slurp("$dir/got/$name") eq $odd && $out =~ /continuing .* at 2000 bytes/, 'a partial file is continued');
rename "$dir/got/$name", "$dir/got/$name.part";
($status, $out) = run('fineweb10B.sh', 1, '--out', "$dir/got");
ok($status == 0 && slurp("$dir/got/$name") eq $odd, 'a complete partial file only gets its name');

spew("$dir/got/$name", substr $server{$name}, 0, 3000);
($status, $out) = run('fineweb10B.sh', 1, '--out', "$dir/got");
ok($status == 0 && slurp("$dir/got/$name") eq $server{$name} && $out =~ /fetching it again/, 'a short file is replaced');

($status, $out) = run('fineweb10B.sh', 3, '--out', "$dir/got");
ok($status == 1 && $out =~ /000003.bin did not arrive/, 'a shard the server does not have');
for my $case (['another magic', pack('l<3 x1012', 1, 1, 5) . 'x' x 10, qr/not a token shard/],
    ['another version', pack('l<3 x1012', 20240520, 2, 5) . 'x' x 10, qr/shard version 2/],
    ['a web page', '<html>' . 'sorry ' x 300, qr/not a token shard/], ['too little', 'x' x 100, qr/only 100 bytes/],
    ['fewer tokens than the header says', substr(shard(50), 0, 1100), qr/1100 bytes, but 50 tokens need 1124/],
    ['more tokens than the header says', shard(50) . 'xx', qr/1126 bytes, but 50 tokens need 1124/],
    ['no tokens', shard(0), qr/header says 0 tokens/])
{
    my ($what, $bytes, $pattern) = @$case;
    spew("$dir/server/fineweb_train_000003.bin", $bytes);
    ($status, $out) = run('fineweb10B.sh', 3, '--out', "$dir/got");
    ok($status == 1 && $out =~ $pattern && !glob("$dir/got/*000003*"), "refused: $what");
    ($status, $out) = run('fineweb10B.sh', '--check', "$dir/got/$name", "$dir/server/fineweb_train_000003.bin");
    ok($status == 1 && $out =~ /good, 3000 tokens/ && $out =~ $pattern, "--check: $what");
}
for my $count (0, 104, -1, 'many', '1e1') {
    ($status, $out) = run('fineweb10B.sh', $count, '--out', "$dir/got");
    is($status, 2, "refused: $count shards");
}

# The vocabulary: a server with foreign files, and the published ones when they are at hand.
make_path("$dir/foreign");
spew("$dir/foreign/encoder.json", '{}');
($status, $out) = do { local $ENV{GPT2_VOCAB_URL} = "file://$dir/foreign"; run('gpt2_vocab.sh', '--out', "$dir/vocab") };
ok($status == 1 && $out =~ /2 bytes, not 1042301/ && !glob("$dir/vocab/*"), 'a vocabulary of another size is refused');
spew("$dir/foreign/encoder.json", 'x' x 1042301);
($status, $out) = do { local $ENV{GPT2_VOCAB_URL} = "file://$dir/foreign"; run('gpt2_vocab.sh', '--out', "$dir/vocab") };
ok($status == 1 && $out =~ /SHA-256/ && !glob("$dir/vocab/*"), 'and one of that size with other contents');
SKIP: {
    my $published = ($ENV{SHARED_DATA} // "$root/../shared/data") . '/tokenizer';
    skip 'the published vocabulary is not here', 1 unless -d $published;
    local $ENV{GPT2_VOCAB_URL} = 'file://' . abs_path($published);
    ($status, $out) = run('gpt2_vocab.sh', '--out', "$dir/vocab");
    ok($status == 0 && 3 == (() = glob "$dir/vocab/*"), 'the published files are accepted') or diag $out;
}

# Evaluations: the same check.
spew("$dir/foreign/hellaswag_val.jsonl", '{}');
spew("$dir/foreign/lambada_test.jsonl", 'x' x 1819752);
{
    local @ENV{qw(HELLASWAG_URL LAMBADA_URL)} = ("file://$dir/foreign") x 2;
    ($status, $out) = run('hellaswag.sh', '--out', "$dir/evals");
    ok($status == 1 && $out =~ /2 bytes, not 12246618/ && !glob("$dir/evals/*"), 'HellaSwag of another size is refused');
    ($status, $out) = run('lambada.sh', '--out', "$dir/evals");
    ok($status == 1 && $out =~ /SHA-256/ && !glob("$dir/evals/*"), 'LAMBADA with other contents is refused');
    ($status, $out) = run('lambada.sh', '--where', 'x');
    ok($status == 2 && $out =~ /unknown option "--where"/, 'an unknown option');
    ($status, $out) = run('hellaswag.sh', '--help');
    ok($status == 0 && $out =~ /\AFetches HellaSwag.*hellaswag\.sh \[--out DIR\]/s, '--help');
}
done_testing;
