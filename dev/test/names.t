#!/usr/bin/env perl
# Names from outside: what is no regular file is refused at once, never waited for, and a name with line
# ends or escape sequences is printed as one line that a terminal does not obey.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use POSIX qw(mkfifo);
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
my $train       = write_shard('train_1.bin', documents(24000, 1));
my $val         = write_shard('val.bin',     documents(700,   2));
my $checkpoints = "$dir/checkpoints";
run_ok(
    'a checkpoint to read',
    $trainer, @tiny, qw(--num-scheduled 1 --num-extension 0),
    '--out',  $checkpoints
);
my ($checkpoint) = sort(glob("$checkpoints/*.safetensors"), glob("$checkpoints/*/*.safetensors"));
spew("$dir/good.txt", 'word ' x 1000);
my @tokenize = ("$root/tokenize", '--out', "$dir/tokens/");

# ---- FIFOs: nobody ever writes to these ----------------------------------------------------------------

mkdir "$dir/$_" or die for 'vocab', 'fifos';
mkfifo("$dir/$_", 0600)
    or die
    for 'fifo', 'fifo.jsonl', 'fifo.tiktoken', 'fifo.bin', 'fifo.safetensors', 'vocab/vocab.bpe',
    'vocab/encoder.json';
my $no_file = qr/regular file|FIFO/;
refuses('tokenize --input', 1, $no_file, @tokenize, '--vocab', 'bytes', '--input', "$dir/$_")
    for 'fifo', 'fifo.jsonl';
refuses("tokenize --vocab $_", 1, $no_file, @tokenize, '--vocab', "$dir/$_", '--input', "$dir/good.txt")
    for 'fifo.tiktoken', 'vocab', 'vocab/vocab.bpe';
refuses("tokenize --input $_", 1, $no_file, @tokenize, '--vocab', 'bytes', '--input', $_) for '/dev/zero';
refuses('order2',              1, $no_file, "$root/order2", "$dir/fifo",     "$dir/good.txt");
refuses('order2, the second',  1, $no_file, "$root/order2", "$dir/good.txt", "$dir/fifo.jsonl");
refuses("train $_",            1, $no_file, $trainer,       @tiny, '--out', "$dir/out", $_, "$dir/fifo.bin")
    for '--train-files', '--val-files';
refuses("train $_", 1, $no_file, $trainer, @tiny, '--out', "$dir/out", $_, "$dir/fifo.safetensors")
    for '--resume', '--init-from';
refuses(
    'sample --vocab', 1,          $no_file, $trainer,  @tiny, '--init-from',
    $checkpoint,      '--sample', 'a',      '--vocab', "$dir/$_"
) for 'fifo.tiktoken', 'vocab';

for ('fifo', 'fifo.jsonl') {
    my ($status, undef, $err) =
        finish(start("$root/data/quickstart_text.sh", '--text', "$dir/$_", '--out', "$dir/text"), 20);
    ok($status eq '1' && $err =~ /\A[^\n]*not a regular file[^\n]*\n\z/, "quickstart_text --text $_")
        or diag "$status $err";
}
for (
    ['compare',    '--output', "$dir/x.html",           '--set', 'a', "$dir/fifo", '--set', 'b', "$dir/fifo"],
    ['plot_curve', '--output',            "$dir/x.png", "$dir/fifo"],
    ['watch',      '--once',              "$dir/fifo.jsonl"],
    ['record',     qw(--name x --what y), "$dir/fifo",  "$dir/fifo"]
) {
    my ($script, @arguments) = @$_;
    my ($status, undef, $err) = finish(start("$root/scripts/$script", @arguments), 20);
    ok($status =~ /^[12]$/ && $err =~ /not a regular file/, $script) or diag "$status $err";
}
my ($status, undef, $err) =
    run($trainer, @tiny, '--out', $checkpoints, qw(--num-scheduled 1 --num-extension 0),
    '--train-files', '/dev/stdin');
is($status, 1, '/dev/stdin is no shard');

# ---- names that break lines or colour the terminal -----------------------------------------------------

my $name  = "line\nend\e[31m\x7f\xc2\x9b\xff caf\xc3\xa9";
my $shown = qr/line\\nend\\x1b\[31m\\x7f\\u009b\\xff caf\xc3\xa9/;
refuses('tokenize, an input that is missing',
    1, $shown, @tokenize, '--vocab', 'bytes', '--input', "$dir/$name");
refuses('tokenize, a vocabulary that is missing',
    1, $shown, @tokenize, '--vocab', "$dir/$name", '--input', "$dir/good.txt");
refuses('tokenize, an unknown option', 2, qr/line\\nend/, @tokenize, "--line\nend");
spew("$dir/$name.jsonl", qq({"text":"a"}\n{"\e[2Ja": x}\n));
refuses(
    'tokenize, a bad record',
    1, qr/$shown\.jsonl:2: not a JSON record: [^\e]*\z/,
    @tokenize, '--vocab', 'bytes', '--input', "$dir/$name.jsonl"
);
refuses('order2, a text that is missing', 1, $shown, "$root/order2", "$dir/$name", "$dir/good.txt");
refuses("train, missing $_", 1, $shown, $trainer, @tiny, '--out', "$dir/out", $_, "$dir/$name")
    for '--train-files', '--val-files', '--resume', '--init-from';
spew("$dir/$name.bin", 'x' x 2000);
refuses(
    'train, a bad shard', 1,       qr/$shown\.bin: /, $trainer,
    @tiny,                '--out', "$dir/out",        '--train-files',
    "$dir/$name.bin"
);
spew("$dir/$name.safetensors", pack('Q<', 13) . qq({"\e[2J\n": 1 }));
refuses(
    'train, a bad checkpoint', 1,       qr/$shown\.safetensors: [^\e]*\z/, $trainer,
    @tiny,                     '--out', "$dir/out",                        '--init-from',
    "$dir/$name.safetensors"
);

# What goes well prints names, too.
my ($out) = run_ok(
    'tokenize into such a folder', "$root/tokenize", '--vocab', 'bytes',
    '--out', "$dir/$name/", "$dir/good.txt"
);
like($out, qr/$shown\/text_train_000001\.bin: \d+ tokens/, 'tokenize: the shard it wrote');
unlike($out, qr/\e/, 'without a control character');
($out) = run_ok(
    'train into such a folder',
    $trainer, @tiny, qw(--num-scheduled 1 --num-extension 0),
    '--out',  "$dir/$name"
);
like($out, qr/^log .*$shown/m,   'train: the log');
like($out, qr/^saved .*$shown/m, 'train: the checkpoint');
unlike($out, qr/\e/, 'without a control character');
($out) = run_ok('sample from it, whose options hold that name',
    $trainer, '--resume', "$dir/$name", '--sample', "caf\xc3\xa9", '--num-tokens', 20);
ok(length $out >= 20, 'is written');
done_testing();
