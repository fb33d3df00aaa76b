#!/usr/bin/env perl
# --sample: prompts from the command line, files and standard input; several at a time; text that appears as it is made; the cache
# of keys and values beside a computation of the whole text.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
use Encode ();

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(1100, 2));
my ($out, $err) = run_ok('a run with a sample at its end', $trainer, @tiny, '--out', "$dir/run", qw(--verbose --sample ab --num-tokens 30));
like($out, qr/\nab[^\n]+\n\z/, 'writes it');
like($out, qr/^memory: cache +\d+\.\d MiB/m, 'its cache is in the plan of the memory');
like($err, qr/^train_gpt: note: sample: \d+ tokens in \d+ ms, \d+ tokens\/s, and 2 tokens of prompts in \d+ ms; cache of keys and values \d+\.\d MiB$/m,
    'and its speed is told');

my @network = (qw(--preset tiny --micro-batch-tokens 64 --num-scheduled 1 --num-extension 0 --val-every 0 --val-tokens 512), @tiny[-4 .. -1]);
my @sample = ($trainer, '--resume', "$dir/run", '--num-tokens', 40);
sub text { my ($what, @options) = @_; return (run_ok($what, @sample, @options))[0] }
sub from { my ($input, @options) = @_; return ('bash', '-c', 'f=$1; shift; exec "$@" <"$f"', 'from', spew("$dir/input", $input), @sample, '--sample', '-', @options) }

# ---- prompts -----------------------------------------------------------------------------------------------------------

my $one = text('a prompt', '--sample', 'abc');
like($one, qr/\A\nabc[^\n]+\n\z/, 'is continued');
spew("$dir/prompts", "abc\n\nh\\ng\\\\\\t\r\nfed");
my $file = text('prompts of a file', '--sample', "\@$dir/prompts");
like($file, qr/\A\n== 1 of 3 ==\n(abc[^\n]+)\n\n== 2 of 3 ==\nh\ng\\\t[^\n]+\n\n== 3 of 3 ==\nfed[^\n]+\n\z/, 'each after its number, with escapes, without empty lines');
is("\n" . ($file =~ /1 of 3 ==\n(.*\n)/)[0], $one, 'the first is the same as alone');
is((run_ok('from standard input', from("abc\n\nh\\ng\\\\\\t\nfed\n")))[0], $file, 'the same');
is(text('one at a time', '--sample', "\@$dir/prompts", '--sample-batch', 1), $file, 'the same');
is(text('two at a time', '--sample', "\@$dir/prompts", '--sample-batch', 2), $file, 'the same');
is((run_ok('one line', from("abc")))[0], $one, 'is as one prompt');
isnt(text('another seed', '--sample', "\@$dir/prompts", '--seed', 4), $file, 'draws other texts');

refuses('a file that is missing', 1, qr/--sample: \Q$dir\E\/none: No such file/, $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--sample', "\@$dir/none");
refuses('a file without a name', 1, qr/--sample \@: the name of a file is missing/, $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--sample', '@');
refuses('a folder', 1, qr/--sample: \Q$dir\E: Is a directory/, $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--sample', "\@$dir");
spew("$dir/empty", "\n\n");
refuses('a file without prompts', 1, qr/--sample: .*empty: no prompt/, $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--sample', "\@$dir/empty");
spew("$dir/escape", "a\nb\\x\n");
refuses('an unknown escape', 1, qr/--sample: .*escape:2: a backslash begins none of/, $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--sample', "\@$dir/escape");
spew("$dir/zero", "a\0b\n");
refuses('a zero byte', 1, qr/--sample: .*zero:1: a zero byte/, $trainer, @tiny, '--out', "$dir/not", '--sample', "\@$dir/zero");
ok(!glob("$dir/not/*"), 'before any training');

# ---- which token -------------------------------------------------------------------------------------------------------

my @greedy = ('--sample', 'abcd', '--temperature', 0);
my $greedy = text('temperature 0', @greedy);
is(text('top-p near 0', '--sample', 'abcd', '--top-p', 0.0001), $greedy, '--top-p 0.0001 is the likeliest token');
my $other = text('a penalty', @greedy, '--repetition-penalty', 1.5);
isnt($other, $greedy, 'another text');
cmp_ok(scalar(keys %{{map { $_ => 1 } split //, $other}}), '>', scalar(keys %{{map { $_ => 1 } split //, $greedy}}), 'of more letters');
my $wild = text('bytes at random', qw(--temperature 100 --top-k 0 --num-tokens 400 --sample), "caf\xc3\xa9");
like($wild, qr/\A\ncaf\xc3\xa9/, 'a prompt of two-byte characters');
ok(defined eval { Encode::decode('UTF-8', my $copy = $wild, Encode::FB_CROAK) }, 'is continued in valid UTF-8');
like($wild, qr/\xef\xbf\xbd/, 'where bytes that are none show as U+FFFD');

# ---- the cache ---------------------------------------------------------------------------------------------------------

is(text('without a cache', @greedy, qw(--kv-cache off)), $greedy, 'the same text');
is(text('several without a cache', '--sample', "\@$dir/prompts", qw(--kv-cache off --temperature 0)),
    text('several with it', '--sample', "\@$dir/prompts", qw(--kv-cache on --temperature 0)), 'the same texts');
# A validation sequence has 512 tokens, and sampling alone takes 64 at a time.
my $long = text('a text beyond the context', @greedy, '--num-tokens', 700);
is(substr($long, 0, 40), substr($greedy, 0, 40), 'begins as a short one');
is(length $long, length("\nabcd\n") + 700, 'and goes on to its end');
my $prompt = substr('abcdefgh' x 100, 0, 700);
like(text('a prompt beyond the context', '--sample', $prompt, '--temperature', 0), qr/\A\n$prompt[^\n]+\n\z/, 'is continued');
refuses('without a cache', 1, qr/--sample: the prompt has 700 tokens; without a cache \(--kv-cache\) sequences of \d+ tokens leave room for/,
    $trainer, '--init-from', newest("$dir/run"), @tiny[0 .. 17], '--kv-cache', 'off', '--sample', $prompt);

# ---- its speed ---------------------------------------------------------------------------------------------------------

# With the cache two cores write a thousand tokens a second and more. Other tests run beside this one: the best of a few counts.
run_ok('one step of preset tiny', $trainer, @network, '--out', "$dir/full");
my $best = 0;
for (1 .. 5) {
    last if $best >= 50;
    my (undef, $speed) = run_ok('a text of it', $trainer, '--resume', "$dir/full", '--threads', 2, qw(--kv-cache on --sample ab --num-tokens 300));
    $speed =~ / tokens in (\d+) ms, (\d+) tokens\/s/ or next;
    $best = $2 if $2 > $best;
}
cmp_ok($best, '>=', 50, "$best tokens/s with preset tiny");

# ---- text appears as it is made ----------------------------------------------------------------------------------------

my $pid = open(my $text, '-|', @sample, @greedy, '--num-tokens', 1000000) // die "fork: $!";
local $SIG{ALRM} = sub { kill 'KILL', $pid };
alarm 60;
my $got = '';
while (length $got < 400 && sysread $text, my $piece, 4096) { $got .= $piece }
kill 'TERM', $pid;
close $text;
alarm 0;
cmp_ok(length $got, '>=', 400, 'a part of a text of a million tokens can be read while it is made');
done_testing();
