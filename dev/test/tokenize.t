#!/usr/bin/env perl
# The tokenize program: what it writes, token by token, against documents encoded here; that it does not depend on threads or
# chunks; what it refuses. With the published vocabulary, tiktoken and a corpus at hand: identical on all of its validation text.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(make_path);
use File::Temp qw(tempdir);
use IPC::Open3 qw(open3);
use MIME::Base64 qw(encode_base64);
use POSIX qw(mkfifo);
use Symbol qw(gensym);
use FindBin;
use IO::Select;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp wait_for_signal_set);
use Test::More;
use Time::HiRes qw(sleep);

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
my $program = $ENV{TOKENIZE} // "$root/tokenize";
BAIL_OUT("$program is missing: run make first") unless -x $program;
my $dir = tempdir(CLEANUP => 1);
my $data = $ENV{SHARED_DATA} // "$root/../shared/data";

# ---- running and reading -----------------------------------------------------------------------------------------------


# Exit status, stdout, stderr; the first argument may be a reference to the bytes of standard input.
sub run {
    my $input = ref $_[0] ? ${ shift() } : '';
    spew("$dir/stdin", $input);
    my @command = map { "'" . s/'/'\\''/gr . "'" } @_;
    system "'$program' @command <'$dir/stdin' >'$dir/stdout' 2>'$dir/stderr'";
    return ($? & 127 ? 'signal ' . ($? & 127) : $? >> 8, slurp("$dir/stdout"), slurp("$dir/stderr"));
}

# The tokens of a shard, as the bytes they are stored in, after a check of its header; undef with a diagnosis when it is wrong.
sub shard {
    my ($path, $vocab, $document) = @_;
    my $bytes = slurp($path);
    return diag "no file $path" if !defined $bytes;
    my ($magic, $version, $count, @rest) = unpack 'l<256', $bytes;
    return diag "header of $path" if $magic != 20240520 || $version != 1 || length($bytes) != 1024 + 2 * $count;
    return diag "vocabulary words of $path: @rest[0, 1]" if $rest[0] != $vocab || $rest[1] != $document;
    return diag "other header words of $path" if grep { $_ } @rest[2 .. $#rest];
    return substr $bytes, 1024;
}
sub byte_tokens { return join '', map { my $bytes = $_; "\0\1" . $bytes =~ s/(.)/$1\0/gsr } @_ } # 256, then the bytes, as uint16
sub same { my ($got, @documents) = @_; return $got && $got eq byte_tokens(@documents) }
sub shards_in { return map { s{.*/}{}r } glob "$_[0]/*" }

sub refuses {
    my ($what, $status, $pattern, @arguments) = @_;
    my ($got, undef, $err) = run(@arguments);
    my @lines = split /\n/, $err;
    ok($got eq $status && @lines == 1 && $err =~ $pattern, "$what: " . ($lines[0] // 'no message')) or diag "status $got: $err";
}

# A call for one set leaves the other one of that name, and says so.
{
    spew("$dir/two.txt", join "\n\n", map { "text number $_" } 1 .. 200);
    my @two = ('--input', "$dir/two.txt", qw(--vocab bytes --split blank-lines --name two --out), "$dir/two");
    my (undef, undef, $fresh) = run(@two, '--val-fraction', 0.1);
    my (undef, undef, $train) = run(@two);
    my (undef, undef, $val) = run(@two, '--val-fraction', 1);
    unlike($fresh, qr/earlier call/, 'both sets: no remark');
    like($train, qr{note: .*two_val_000000\.bin is of an earlier call and stays: }, 'training alone: the older validation set is named');
    like($val, qr{note: .*two_train_000001\.bin is of an earlier call and stays: }, 'validation alone: the older training set');
}

# All names in a folder, those with a leading dot too.
sub all_in { opendir my $d, $_[0] or return (); return sort grep { !/^\.\.?$/ } readdir $d }

# A call that waits for text on standard input: its process, where to write, and what it prints.
sub begin {
    my @command = @_;
    my $pid = open3(my $to, my $from, 0, @command);
    wait_for_signal_set($pid, SigBlk => 2);
    return ($pid, $to, $from);
}

# Two calls at once for one data set: the second is refused, and what the first writes is all there is.
{
    my @busy = (qw(--vocab bytes --name busy --out), "$dir/busy/");
    my ($pid, $to, $from) = begin($program, @busy, '-');
    for (1 .. 1000) { last if -e "$dir/busy/.busy_tokenize.lock"; sleep 0.01 }
    spew("$dir/second.txt", 'second');
    refuses('a second call for a data set', 1, qr{another tokenize is writing this data set, \S+/busy/busy$}, @busy, "$dir/second.txt");
    my ($got) = run(qw(--vocab bytes --name idle --out), "$dir/busy/", "$dir/second.txt");
    is($got, '0', 'another data set in the folder may be written');
    print $to 'first';
    close $to;
    waitpid $pid, 0;
    ok($? == 0 && same(shard("$dir/busy/busy_train_000001.bin", 257, 257), 'first'), 'and the first call is as if it had been alone');
    is_deeply([grep { /^\./ } all_in("$dir/busy")], [], 'no hidden file is left');
}

# What a call that was killed has left has a name that no pattern of shards matches, and the next call removes it.
{
    my @killed = (qw(--vocab bytes --threads 1 --shard-tokens 5 --split blank-lines --val-fraction 0.1 --name mine --out), "$dir/killed/");
    my ($pid, $to, $from) = begin($program, @killed, '-');
    print $to +('some words ' x 4000 . "\n\n") x 300; # more than the ring of jobs holds
    $to->flush;
    for (1 .. 1000) { last if grep({ /tmp/ } all_in("$dir/killed")) > 2; sleep 0.01 }
    kill KILL => $pid;
    waitpid $pid, 0;
    my $temporary = grep { /tmp/ } all_in("$dir/killed");
    ok($temporary > 2 && !(() = glob "$dir/killed/mine_train_* $dir/killed/mine_val_*"), 'killed: no pattern matches its temporary files');
    spew("$dir/killed/.else_train_000001.bin.tmp.$pid", '');
    spew("$dir/killed/.mine_train_000009.bin.tmp.$$", '');
    run(@killed, spew("$dir/short.txt", "one\n\n" x 10));
    is_deeply([grep { /^\./ } all_in("$dir/killed")], [".else_train_000001.bin.tmp.$pid", ".mine_train_000009.bin.tmp.$$"],
        'and the next call removes them, but none of another data set or a live process');
}

# A terminal that is closed ends it as SIGINT does, unless that is ignored.
for my $ignored (0, 1) {
    my @hangup = ($^X, '-e', '$SIG{HUP} = shift; exec @ARGV', $ignored ? 'IGNORE' : 'DEFAULT', $program);
    my ($pid, $to, $from) = begin(@hangup, qw(--vocab bytes --name hup --out), "$dir/hup$ignored/", '-');
    kill HUP => $pid;
    print $to 'text' if $ignored;
    close $to if $ignored;
    my $said = join '', <$from>;
    waitpid $pid, 0;
    like("$? $said", $ignored ? qr/^0 / : qr/^768 tokenize: error: interrupted; nothing was written\n\z/, 'SIGHUP ' . ($ignored ? 'is ignored under nohup' : 'interrupts'));
    my @there = all_in("$dir/hup$ignored");
    is(scalar(@there), $ignored ? 2 : 0, 'and the files are there or not: ' . @there);
}

# ---- text files, folders, standard input -------------------------------------------------------------------------------

my $seed = 7;
sub random { $seed = ($seed * 1103515245 + 12345) % 2**31; return int($seed / 65536) % $_[0] }
sub words { my ($n) = @_; return join '', map { join('', map { chr 97 + random(26) } 0 .. random(7)) . (random(9) ? ' ' : "\n") } 1 .. $n }

make_path("$dir/texts/b/deep", "$dir/texts/a.d", "$dir/packed");
my %text = ('texts/B.txt' => 'capital', 'texts/a.d/x' => "x\n", 'texts/a.txt' => "caf\xC3\xA9", 'texts/b/1' => '', 'texts/b/deep/2' => 'two');
spew("$dir/$_", $text{$_}) for keys %text;
spew("$dir/texts/.hidden", 'not this');
my @in_order = @text{sort keys %text};

my ($status, $out, $err) = run('--input', "$dir/texts", '--vocab', 'bytes', '--out', "$dir/folder/new", '--name', 'small');
ok($status eq 0 && same(shard("$dir/folder/new/small_train_000001.bin", 257, 257), @in_order), 'a folder, in name order, hidden files left out')
    or diag $err;
like($out, qr/^5 documents, .* 22 tokens/m, 'the summary counts documents and tokens');
is_deeply([shards_in("$dir/folder/new")], ['small_tokenize.txt', 'small_train_000001.bin'], 'no other file is left');
unlike($err, qr/left out of/, 'and nothing is said of them');
{
    make_path("$dir/linked/deep");
    spew("$dir/linked/a.txt", 'here');
    mkfifo("$dir/linked/deep/fifo", 0600) or die;
    symlink $$_[0], "$dir/linked/$$_[1]" or die for ["$dir/texts", 'more'], ["$dir/nowhere", 'none'], ["$dir/texts/B.txt", 'own.txt'];
    (undef, undef, $err) = run(qw(--vocab bytes --out), "$dir/links", "$dir/linked");
    ok(same(shard("$dir/links_train_000001.bin", 257, 257), 'here', 'capital'), 'a link to a file is read');
    like($err, qr{\Atokenize: note: left out of the input folder \S+/linked, .*: 3, the first is \S+/linked/deep/fifo; .*\n\z}, 'others are named');
}
run('--vocab', 'bytes', '--out', "$dir/prefix", "$dir/texts/B.txt", "$dir/texts/a.txt");
ok(same(shard("$dir/prefix_train_000001.bin", 257, 257), @text{'texts/B.txt', 'texts/a.txt'}), '--out as the start of file names');
run(\"from a pipe", '--vocab', 'bytes', '--out', "$dir/stdin_text", '--input', '-');
ok(same(shard("$dir/stdin_text_train_000001.bin", 257, 257), 'from a pipe'), 'standard input as text');

($status, undef, $err) = run(\"good \xFF\xE2\x82 bad\xC3", '--vocab', 'bytes', '--out', "$dir/broken", '--input', '-');
ok($status eq 0 && same(shard("$dir/broken_train_000001.bin", 257, 257), "good \xEF\xBF\xBD\xEF\xBF\xBD bad\xEF\xBF\xBD"),
    'invalid UTF-8 is replaced');
like($err, qr/note: 3 invalid UTF-8 sequences .* standard input/, 'and counted');

# ---- JSONL -------------------------------------------------------------------------------------------------------------

spew("$dir/r.jsonl", qq({"text": "one"}\n\n  \r\n{"src": 1, "text": "t\\u00e9\\ud83d\\ude00\\ud83d"}\r\n{"text": ""}\n{"text": "a\\u0000b"}));
(undef, undef, $err) = run('--vocab', 'bytes', '--out', "$dir/r", "$dir/r.jsonl");
ok(same(shard("$dir/r_train_000001.bin", 257, 257), 'one', "t\xC3\xA9\xF0\x9F\x98\x80\xEF\xBF\xBD", '', "a\0b"),
    'JSONL: escapes, blank lines, an empty text, a lone surrogate, U+0000, no newline at the end');
like($err, qr/note: 1 invalid UTF-8 sequences /, 'and the lone surrogate is counted');
spew("$dir/r8.jsonl", qq({"text":"caf\xC3\xA9 x\\ud876\\udc00y", "url":"\xC3\xBC", "n":123456789012345678901234567890}\n));
($status, undef, $err) = run('--vocab', 'bytes', '--out', "$dir/r8", "$dir/r8.jsonl");
ok($status eq 0 && same(shard("$dir/r8_train_000001.bin", 257, 257), "caf\xC3\xA9 x\xF0\xAD\xA0\x80y"),
    'JSONL: bytes above 127, a surrogate pair for U+2D800, a number of 30 digits') or diag $err;
run(\qq({"text": "piped"}\n), '--format', 'jsonl', '--vocab', 'bytes', '--out', "$dir/p", '-');
ok(same(shard("$dir/p_train_000001.bin", 257, 257), 'piped'), 'JSONL from standard input');

# ---- threads, chunks, shards, validation -------------------------------------------------------------------------------

my @documents = map { words(1 + random(400)) } 1 .. 1500;
push @documents, words(500000), 'z' x 3000000, words(30); # chunks in one document, one without a space
sub json_line { return '{"text": "' . ($_[0] =~ s/\n/\\n/gr) . qq("}\n) }
spew("$dir/many.jsonl", join '', map { json_line($_) } @documents);
spew("$dir/long.txt", $documents[1500]);

for my $threads (1, 3) {
    run('--vocab', 'bytes', '--threads', $threads, '--out', "$dir/t$threads", "$dir/many.jsonl", "$dir/long.txt");
    my $got = shard("$dir/t${threads}_train_000001.bin", 257, 257);
    ok(same($got, @documents, $documents[1500]), "1504 documents of 10 MB with $threads threads");
}

run('--vocab', 'bytes', '--out', "$dir/cut/", '--shard-tokens', 400000, '--val-tokens', 5000, "$dir/many.jsonl");
my @parts = map { shard($_, 257, 257) } glob "$dir/cut/text_train_*.bin";
my $val = shard("$dir/cut/text_val_000000.bin", 257, 257);
ok(@parts > 3 && !grep({ !/^\x00\x01/ } @parts, $val), scalar(@parts) . ' shards, each begins with a document');
ok(same(join('', $val, @parts), @documents), 'validation and shards together are the input');
ok(length($val) >= 2 * 5000 && length($val) < 2 * 9000, 'validation: whole documents up to --val-tokens');
ok(!grep({ length($_) < 2 * 400000 } @parts[0 .. $#parts - 1]), 'every shard but the last has --shard-tokens');
run('--vocab', 'bytes', '--out', "$dir/cut/", '--shard-tokens', 4000000, "$dir/many.jsonl");
is(scalar(my @left = glob "$dir/cut/text_train_*.bin"), 2, 'a smaller data set of the same name leaves no older shards behind');

{
    my @gap = (qw(--vocab bytes --split blank-lines --name gap --out), "$dir/gap/", spew("$dir/short.txt", "one\n\n" x 10));
    run(@gap, '--shard-tokens', 5);
    unlink glob "$dir/gap/gap_train_00000[23].bin";
    spew("$dir/gap/$_", '') for qw(gap_train_1000000.bin gap_train_mine.bin other_train_000007.bin);
    (undef, undef, my $said) = run(@gap);
    is_deeply([shards_in("$dir/gap")], [qw(gap_tokenize.txt gap_train_000001.bin gap_train_mine.bin other_train_000007.bin)],
        'nor does it where their numbers have gaps; files of other names stay');
    like($said, qr/note: removed \d+ shards of an older/, 'and says how many it removed');
}

run('--vocab', 'bytes', '--out', "$dir/f", '--val-fraction', 0.1, '--val-out', "$dir/own_val.bin", "$dir/many.jsonl");
my @tenth = @documents[grep { $_ % 10 == 9 } 0 .. $#documents];
my @others = @documents[grep { $_ % 10 != 9 } 0 .. $#documents];
ok(same(shard("$dir/own_val.bin", 257, 257), @tenth) && same(shard("$dir/f_train_000001.bin", 257, 257), @others),
    'validation by fraction, to a file of its own');
run('--vocab', 'bytes', '--out', "$dir/all", '--val-fraction', 1, "$dir/r.jsonl");
ok(-e "$dir/all_val_000000.bin" && !-e "$dir/all_train_000001.bin", '--val-fraction 1: validation alone');

# ---- what is refused ---------------------------------------------------------------------------------------------------

my @to = ('--vocab', 'bytes', '--out', "$dir/refused/", '--threads', 2);
refuses('missing input', 1, qr{cannot read the input .*/nothing: No such}, @to, "$dir/nothing");
make_path("$dir/empty");
refuses('empty folder', 1, qr/holds no files/, @to, "$dir/empty");
spew("$dir/empty.txt", '');
refuses('empty file', 1, qr/holds no text/, @to, "$dir/empty.txt");
for my $case (['cut off', '{"text": "a', qr/bad.jsonl:2: not a JSON record/], ['not JSON', 'text', qr/bad.jsonl:2: not a JSON record/],
    ['two on a line', '{"text": "a"} {"text": "b"}', qr/bad.jsonl:2: not a JSON record/], ['without text', '{"txt": "a"}', qr/bad.jsonl:2: .*no field "text"/],
    ['text that is a number', '{"text": 3}', qr/bad.jsonl:2: .*not a string/], ['an array', '["text"]', qr/bad.jsonl:2: .*no field "text"/])
{
    spew("$dir/bad.jsonl", qq({"text": "good"}\n$case->[1]\n{"text": "good"}\n));
    refuses("record $case->[0]", 1, $case->[2], @to, "$dir/bad.jsonl");
}
{
    my @packed = (['gzip', 'gzip -dc', "\x1f\x8b\x08\0"], ['xz', 'xz -dc', "\xfd7zXZ\0"], ['zstd', 'zstd -dc', "\x28\xb5\x2f\xfd"],
        ['bzip2', 'bzip2 -dc', 'BZh91AY&SY'], ['zip', 'unzip -p', "PK\3\4"]);
    for (@packed) {
        my ($name, $unpack, $begin) = @$_;
        my $path = spew("$dir/packed/a.$name", $begin . "\0" x 1000);
        my $line = qr/ is compressed \($name\), not text; unpack it, or pipe in what \Q$unpack\E writes of it$/;
        refuses("a file of $name", 1, qr/\Atokenize: error: \Q$path\E$line/, @to, "$dir/texts", $path);
        refuses('in a pipe', 1, qr/\Atokenize: error: standard input$line/, \slurp($path), @to, '-');
        refuses('as JSONL', 1, $line, @to, '--format', 'jsonl', $path);
    }
    refuses('one in a folder', 1, qr{/packed/a\.bzip2 is compressed}, @to, '--split', 'blank-lines', "$dir/packed");
    my ($got, undef, $said) = run('--vocab', 'bytes', '--out', "$dir/short", spew("$dir/short.txt", "BZh91AY&S"));
    is("$got $said", '0 ', 'text that begins nearly so is text');
}
{
    my @twice = ('--vocab', 'bytes', '--split', 'blank-lines', '--out', "$dir/twice/", spew("$dir/twice.txt", "one\n\ntwo\n\nthree\n"));
    refuses('a validation set that is the training set', 1, qr{--val-out \S+/\./text_train_000009\.bin has the name of a shard of the training set}, qw(--val-fraction 0.5 --val-out),
        "$dir/twice/./text_train_000009.bin", @twice);
    is_deeply([shards_in("$dir/twice")], [], 'and no file is left');
    run(@twice);
    refuses('shards in an input folder', 1, qr{/twice/text_train_000001\.bin is a shard of tokens, not text; keep --out outside}, @to, "$dir/twice");
}
spew("$dir/late.jsonl", slurp("$dir/many.jsonl") . "oops\n");
refuses('a bad record far into a file', 1, qr/late.jsonl:1504: /, @to, "$dir/late.jsonl");
refuses('validation that takes everything', 1, qr/leaves none for training/, @to, '--val-tokens', 100000000, "$dir/many.jsonl");
refuses('a fraction of too few documents', 1, qr/is not one document/, @to, '--val-fraction', 0.01, "$dir/texts");
is_deeply([shards_in("$dir/refused")], [], 'after all these, no file is left');
refuses('missing vocabulary', 1, qr{no vocabulary at .*/nothing}, '--vocab', "$dir/nothing", '--out', "$dir/x", "$dir/texts");
refuses('folder without vocabulary', 1, qr/vocab.bpe and encoder.json missing/, '--vocab', "$dir/empty", '--out', "$dir/x", "$dir/texts");
refuses('output folder that is a file', 1, qr/cannot make the folder|cannot write/, '--vocab', 'bytes', '--out', "$dir/empty.txt/x/", "$dir/texts");
refuses('unknown option', 2, qr/unknown option --frobnicate/, @to, '--frobnicate', "$dir/texts");
refuses('no input', 2, qr/no --input/, @to);
refuses('no vocabulary', 2, qr/no --vocab/, '--out', "$dir/x", "$dir/texts");
refuses('no threads', 2, qr/--threads 0: expected/, @to, '--threads', 0, "$dir/texts");
refuses('a count that is no number', 2, qr/--shard-tokens 1e6: expected/, @to, '--shard-tokens', '1e6', "$dir/texts");
refuses('a fraction above one', 2, qr/--val-fraction 2: expected/, @to, '--val-fraction', 2, "$dir/texts");
refuses('two rules for validation', 2, qr/exclude each other/, @to, '--val-fraction', 0.5, '--val-tokens', 5, "$dir/texts");
refuses('a value left out', 2, qr/--vocab needs a value/, '--vocab');

# An output that would replace an input, or that nothing can be renamed to, is refused before anything is read or replaced.
{
    make_path("$dir/own");
    my $mine = spew("$dir/own/mine.txt", "one\n\ntwo\n\nthree\n");
    my @own = (qw(--vocab bytes --split blank-lines --name own --out), "$dir/own/");
    my @half = qw(--val-fraction 0.5 --val-out);
    run(@own, spew("$dir/older.txt", 'older'));
    my $older = slurp("$dir/own/own_train_000001.bin");
    link $mine, "$dir/own/hard" or die;
    my $read = qr{ is read and would be replaced; give the output another name$};
    refuses('--val-out that is an input', 1, qr{/own/\./mine\.txt$read}, @own, @half, "$dir/own/./mine.txt", $mine);
    refuses('...or another name of it', 1, $read, @own, @half, "$dir/own/hard", $mine);
    refuses('...or of standard input', 1, $read, @own, @half, "$dir/stdin", '-');
    refuses('a shard that is an input', 1, $read, @own, spew("$dir/own/own_train_000002.bin", 'text'));
    is(slurp("$dir/own/own_train_000002.bin") . slurp($mine), "textone\n\ntwo\n\nthree\n", 'and the inputs are as they were');
    unlink "$dir/own/own_train_000002.bin";
    my $odd = qr{ is no regular file and cannot be replaced; give another name$};
    refuses('--val-out that is a folder', 1, $odd, @own, @half, "$dir/empty", $mine);
    mkfifo("$dir/fifo", 0600) or die;
    refuses('--val-out that is a FIFO', 1, $odd, @own, @half, "$dir/fifo", $mine);
    refuses('--val-out without a name', 1, qr{'' is no name for a file to write}, @own, @half, '', $mine);
    make_path("$dir/own/own_val_000000.bin");
    refuses('a validation set that is a folder', 1, $odd, @own, qw(--val-fraction 0.5), $mine);
    is(slurp("$dir/own/own_train_000001.bin"), $older, 'and the older training set is as it was');
    make_path("$dir/own/own_train_000003.bin");
    refuses('a shard that is a folder', 1, $odd, @own, $mine);
}

# Nobody reads what it prints: all files are there, and its status says so.
{
    my @gone = (qw(--vocab bytes --split blank-lines --shard-tokens 5 --val-fraction 0.2 --name gone --out), "$dir/gone/");
    my ($pid, $to, $from) = begin('sh', '-c', 'exec "$@" 2>"$0"', "$dir/said", $program, @gone, '-');
    close $from;
    print $to "one\n\n" x 10;
    close $to;
    waitpid $pid, 0;
    is($? . ' ' . slurp("$dir/said"), "256 tokenize: error: cannot write to standard output: Broken pipe; the shards are complete\n", 'standard output is closed');
    is_deeply([all_in("$dir/gone")], ['gone_tokenize.txt', (map { "gone_train_00000$_.bin" } 1 .. 4), 'gone_val_000000.bin'], 'and all files are there');
}

# A limit on file size stands in for a full disk: the write fails halfway, the data set that was there survives.
my $before = slurp("$dir/t1_train_000001.bin");
system "ulimit -f 2000; '$program' --vocab bytes --out '$dir/t1' '$dir/many.jsonl' >'$dir/stdout' 2>'$dir/stderr'";
ok($? >> 8 == 1 && slurp("$dir/stderr") =~ /^tokenize: error: cannot write \S+: .*\n\z/, 'a write that fails: ' . slurp("$dir/stderr") =~ s/\n//r);
ok($before eq slurp("$dir/t1_train_000001.bin") && !glob("$dir/t1*.tmp"), 'and the older shard is as it was');

# Interrupted: while it waits for its input, just before it does, and behind the last bytes of a pipe that stays open.
sub interrupt {
    my ($input, $wait) = @_;
    my $pid = open3(my $to, my $from, my $messages = gensym, $program, @to, '-');
    syswrite $to, $input;
    wait_for_signal_set($pid, SigBlk => 2);
    sleep $wait;
    kill INT => $pid;
    my $said = '';
    my $ends = IO::Select->new($messages)->can_read(30) && sysread $messages, $said, 1000;
    kill KILL => $pid if !$ends;
    waitpid $pid, 0;
    return !$ends ? 'goes on' : ($? >> 8) . " $said";
}
my @answers = map { interrupt($_ & 1 ? 'text' : '', $_ % 10 ? 0 : 0.1) } 1 .. 40;
my @wrong = grep { !/\A3 tokenize: error: interrupted; nothing was written\n\z/ } @answers;
is("@wrong", '', 'interrupted 40 times: its own status, one line');
is_deeply([shards_in("$dir/refused")], [], 'and no file left');

# ---- chunks with merges ------------------------------------------------------------------------------------------------

# A file is encoded in chunks, a record whole: tokens of up to three bytes across every possible seam must come out the same.
my $rank = 0;
spew("$dir/small.tiktoken", join '', map { encode_base64($_, '') . ' ' . $rank++ . "\n" }
    (map { chr } 0 .. 255), (map { my $x = $_; map { "$x$_" } 'a' .. 'z', ' ' } 'a' .. 'z', ' '), (map { " a$_" } 'a' .. 'z'));
spew("$dir/long.jsonl", json_line($documents[1500]));
($status, undef, $err) = run('--vocab', "$dir/small.tiktoken", '--out', "$dir/whole", "$dir/long.jsonl");
SKIP: {
    skip 'built without PCRE2', 2 if $err =~ /without PCRE2/;
    run('--vocab', "$dir/small.tiktoken", '--out', "$dir/chunks", "$dir/long.txt");
    my ($whole, $chunks) = map { shard("$dir/${_}_train_000001.bin", $rank + 1, $rank + 1) } 'whole', 'chunks';
    ok($whole && $chunks eq $whole, 'chunks of a file do not show in its tokens');
    ok(length($whole) < 1.5 * length($documents[1500]), 'though tokens of several bytes are there');
}

# ---- the published vocabulary ------------------------------------------------------------------------------------------

SKIP: {
    skip 'a corpus and GPT-2 vocabulary are not here', 2 unless -d "$data/corpus" && -d "$data/tokenizer";
    skip 'tiktoken is not here', 2 if system "python3 -c 'import tiktoken, numpy' >/dev/null 2>&1";
    skip 'built without PCRE2', 2 if $err =~ /without PCRE2/;
    system "xz -dc '$data/corpus/val.jsonl.xz' >'$dir/val.jsonl'";
    my @vocabularies = ("$data/tokenizer", "$data/tokenizer/r50k_base.tiktoken");
    my @made = map { "$dir/val_$_.bin" } 0, 1;
    run('--vocab', $vocabularies[$_], '--val-fraction', 1, '--val-out', $made[$_], '--out', "$dir/x", "$dir/val.jsonl") for 0, 1;
    chomp(my $verdict = `python3 '$root/dev/bench/tiktoken_peer.py' compare '$vocabularies[1]' '$dir/val.jsonl' '$made[0]' 2>&1`);
    like($verdict, qr/^identical: /, 'all of the validation text against tiktoken');
    is(system('cmp', @made), 0, 'merges and rank file give the same tokens') and diag $verdict;
}
done_testing;
