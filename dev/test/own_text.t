#!/usr/bin/env perl
# One text file of one's own, from 50 kB on, all the way: tokenize --split, training, validation, a sample,
# and TEXT= make quickstart.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;

# A play, as in Tiny Shakespeare: names, lines of verse, blank lines between speeches. Word order has some
# sense, so that a model can learn it.
my $seed = 11;
sub random { $seed = ($seed * 1103515245 + 12345) % 2**31; return int($seed / 65536) % $_[0] }
my @words = map {
    join '', map { substr('bcdfghlmnprstvw', random(15), 1) . substr('aeiou', random(5), 1) } 0 .. random(3)
} 1 .. 300;

sub verse {
    my $at = random(300);
    return join(' ', map { $at = ($at * 7 + random(5)) % 300; $words[$at] } 1 .. 5 + random(4));
}

sub play {
    my ($bytes) = @_;
    my $text = '';
    while (length $text < $bytes) {
        $text .= ucfirst($words[random(12)]) . ' ' . ucfirst($words[12 + random(12)]) . ":\n";
        my $lines = 1 + random(7);
        $text .= ucfirst(verse()) . ($_ == $lines ? ".\n" : ",\n") for 1 .. $lines;
        $text .= "\n";
    }
    return $text;
}

# shard($path) -> the documents of a byte shard, as text.
sub shard {
    my ($path) = @_;
    my $text   = join '', map { $_ == 256 ? "\x{100}" : chr } unpack 'S<*', substr slurp($path), 1024;
    return split /\x{100}/, substr($text, 1), -1;
}

my @tokenize = ("$root/tokenize", '--vocab', 'bytes');

sub pieces {
    my ($what, $bytes, @options) = @_;
    my $path = spew("$dir/piece.txt", $bytes);
    run_ok($what, @tokenize, '--out', "$dir/pieces", @options, $path);
    return [shard("$dir/pieces_train_000001.bin")];
}

# ---- --split -------------------------------------------------------------------------------------------

is_deeply(
    pieces('--split blank-lines', "\n \n one\ntwo \n\nthree\n \t\n\n\nfour", '--split', 'blank-lines'),
    ["one\ntwo", 'three', 'four'],
    'documents stand between blank lines'
);
is_deeply(
    pieces('the same with CR LF', "one\r\ntwo\r\n\r\nthree\r\n", '--split', 'blank-lines'),
    ["one\r\ntwo", 'three'],
    'lines that end with CR LF'
);
is_deeply(pieces('--split none', "a\n\nb"), ["a\n\nb"], 'without --split a file is a document');
my $sentences = join ' ', map {"This is sentence number $_ of the text."} 10 .. 59;
my $got       = pieces('--split 100', $sentences, '--split', 100);
is(join(' ', @$got), $sentences, 'pieces of bytes: nothing is lost');
ok(
    !(grep { length > 100 || !/\AThis.*\.\z/s } @$got) && @$got == 25,
    'each ends with a sentence and has at most 100 bytes'
);
$got = pieces('--split 100 without sentences', join(' ', ('word') x 200), '--split', 100);
ok(!(grep { length > 100 || !/\Aword( word)*\z/ } @$got), 'else between words');
my $accents = "\xC3\xA9" x 500;
$got = pieces('--split 101 without spaces', $accents, '--split', 101);
ok(!(grep { length > 101 || !/\A(?:\xC3\xA9)+\z/ } @$got) && join('', @$got) eq $accents,
    'else between characters');
$got = pieces('--split 100 of paragraphs', "aa bb. cc\n\n" x 40, '--split', 100);
ok(!(grep { !/cc\z/ } @$got), 'best of all at a blank line');

# The same whatever the chunks: 3 MB from a file and from a pipe, one thread and three.
my $long = play(3_000_000);
$long .= 'x' x 1_500_000 . "\n\n" . play(100_000);
spew("$dir/long.txt", $long);
for my $how ('blank-lines', 700) {
    run_ok("--split $how, $_ threads",
        @tokenize, '--threads', $_, '--split', $how, '--out', "$dir/t$_", "$dir/long.txt")
        for 1, 3;
    is(slurp("$dir/t1_train_000001.bin"), slurp("$dir/t3_train_000001.bin"), 'the same shards');
    run_ok('from a pipe', 'sh', '-c',
        "cat $dir/long.txt | $root/tokenize --vocab bytes --split $how --out $dir/pipe -");
    is(slurp("$dir/pipe_train_000001.bin"), slurp("$dir/t1_train_000001.bin"), 'the same from a pipe');
    my @documents = shard("$dir/t1_train_000001.bin");
    is(join('', @documents) =~ s/\s+//gr, $long =~ s/\s+//gr, 'and no word of the text is missing');
    my @wanted = grep {length} map {s/\A\s+|\s+\z//gr} split /\n\s*\n/, $long;
    is_deeply(\@documents, \@wanted, 'documents as Perl splits them') if $how eq 'blank-lines';
}
refuses("--split $_", 2, qr/--split $_: expected none, blank-lines, or a number of bytes/,
    @tokenize, '--out', "$dir/x", '--split', $_, "$dir/long.txt")
    for 'lines', 3, 99999999, '7x';
like(slurp("$dir/t3_tokenize.txt"), qr/^split: 700$/m, 'NAME_tokenize.txt says how');
like(slurp("$dir/t3_tokenize.txt"), qr/^letters and numbers: none, tokens are bytes$/m, 'and which Unicode');

# ---- the whole way -------------------------------------------------------------------------------------

# A tiny network, with the tiny preset's own batches, validation and steps.
my @small = (qw(--preset tiny --model-dim 32 --num-heads 2 --mlp-dim 64 --val-every 0));

sub data {
    return ('--train-files', "$dir/$_[0]/text_train_*.bin", '--val-files', "$dir/$_[0]/text_val_*.bin");
}

my ($out, $err) = run_ok('one file without --split',
    @tokenize, '--out', "$dir/one/", spew("$dir/play.txt", play(1_100_000)));
like(
    $err,
    qr/note: training uses the first 2048 tokens of a document, 0% of these; --split blank-lines/,
    'is told what it needs'
);
refuses(
    '--val-fraction without --split', 1,         qr/not one document; .*--split/, @tokenize,
    '--out',                          "$dir/x/", '--val-fraction',                0.1,
    "$dir/play.txt"
);

sub tokenized {
    my ($name, $text) = @_;
    (undef, $err) = run_ok(
        "$name: one file", @tokenize,     '--out',          "$dir/$name/",
        '--split',         'blank-lines', '--val-fraction', 0.1,
        spew("$dir/$name.txt", $text)
    );
    is($err, '', 'without a complaint');
}
my $shortened =
    qr/^data: the training data give (\d+) of 320 steps, so the schedule is (\d+) \+ (\d+); --repeat trains/m;

tokenized('small', play(50_000));
($out) = run_ok('50 kB: training as it comes', $trainer, @small, data('small'), '--out', "$dir/runs");
my ($steps, $scheduled, $extension) = $out =~ $shortened;
ok(
    $steps
        && $steps == $scheduled + $extension
        && $out =~ /^data:.*so the schedule(?s:.*)^step:0\/$steps(?s:.*)^step:$steps\/$steps val_loss:/m,
    'the steps that the data give, said before'
) or diag $out;
my ($val) = $out =~ /^data: validation takes (\d+) of the \d+ tokens of /m;
ok($val && $val > 3000, 'the validation tokens that there are') or diag $out;
($out) = run_ok('a sample of it', $trainer, '--resume', "$dir/runs", '--sample', 'A', '--num-tokens', 50);
ok(length $out > 30, 'is written');
($out) = run_ok(
    '--repeat', $trainer,          @small, data('small'), '--repeat', '--num-scheduled',
    $steps + 3, '--num-extension', 0,      '--out',       "$dir/repeat"
);
my $more = $steps + 3;
like(
    $out,
    qr/^data: the training data give $steps steps a pass: $more steps are 1\.\d passes$/m,
    'says how often'
);
like($out, qr/^step:$more\/$more val_loss:/m, 'and trains all steps');

# 1.1 MB, Tiny Shakespeare's size: what it says before the first step; the steps are like those above.
tokenized('large', slurp("$dir/play.txt"));
my $run = start($trainer, @small, data('large'), '--out', "$dir/large_runs");
my $end = time + 60;
select undef, undef, undef, 0.02 while time < $end && slurp("$run->{out}.1") !~ /^step:0\//m;
kill 'INT', $run->{pid};
(my $status, $out) = finish($run, 60);
($steps) = $out =~ $shortened;
ok($status eq '3' && $steps > 150, "1.1 MB gives $steps steps a pass") or diag "$status $out";
unlike($out, qr/^data: validation takes/m, 'and enough for the preset\'s validation');

($status) = run($trainer, @small, data('small'), '--num-scheduled', 300, '--num-extension', 20, '--out',
    "$dir/asked");
isnt($status, '0', 'steps that were asked for and are not there: an error at the end of the data, as before');
like(
    log_text("$dir/asked", 'jsonl'),
    qr/the training data give \d+ of 320 steps: the run ends there; --repeat/,
    'told before'
);
refuses(
    '--val-tokens that are not there',
    1, qr/holds \d+ tokens, but --val-tokens 65536/,
    $trainer, @small, data('small'), '--val-tokens', 65536, '--out', "$dir/x"
);
($out) = run_ok('four ranks', $trainer, @small, data('small'), '--ranks', 4, '--out', "$dir/ranks");
like($out, qr/^data: the training data give/m, 'fit the data, too');

# ---- TEXT=path make quickstart -------------------------------------------------------------------------

mkdir "$dir/$_" for qw(q q/data);
symlink "$root/$_", "$dir/q/$_"                or die "$_: $!" for qw(scripts train_gpt_cpu tokenize order2);
symlink $_,         "$dir/q/data/" . s{.*/}{}r or die "$_: $!" for glob "$root/data/quickstart_text.*";
$ENV{TEXT}  = "$dir/small.txt";
$ENV{STEPS} = 2;
($out) = run_ok('quickstart on 50 kB', "$dir/q/scripts/quickstart.sh");
like(
    $out,
    qr/^== result\norder-2 byte model [\d.]+ bits per byte, this model [\d.]+ bits per byte: /m,
    'all the way to its result'
);
like($out, qr/^more text: \.\/train_gpt_cpu --resume runs\/quickstart --sample \S+; its curve: scripts\/watch --once runs\/quickstart\n\z/m,
    'and how to go on');
my ($sample) = $out =~ /^val_loss:[\d.]+\n+(.*?)\n+== result/ms;
cmp_ok(length($sample // ''), '>', 200, 'with a sample');
my @quickstart = map { JSON::PP::decode_json($_)->{text} } split /^/,
    slurp("$dir/q/data/quickstart/text.jsonl");
ok(!(grep { length > 500 } @quickstart) && $quickstart[0] =~ /\A\w+ \w+:\n/,
    'whose documents keep the lines of the play');

# A mistake leaves the run before; a new run takes its place, and nothing else stays.
sub kept { return join ' ', map { s{.*/runs/}{}r } sort glob "$dir/q/runs/*/*/*.safetensors" }
my $first = kept();
{
    local $ENV{STEPS} = 'two';
    my ($status) = run("$dir/q/scripts/quickstart.sh");
    isnt($status, 0, 'STEPS=two is refused');
    is(kept(), $first, 'and the run before is there');
}
run_ok('quickstart again', "$dir/q/scripts/quickstart.sh");
like(kept(), qr{\Aquickstart/\S+\z}, 'has one run');
isnt(kept(), $first, 'the new one');
done_testing();
