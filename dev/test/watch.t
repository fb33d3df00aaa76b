#!/usr/bin/env perl
# scripts/watch and the reader below it: pictures of made-up runs to the character, runs that still go on, that
# are resumed and that diverge, a terminal, and what is refused.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my $ROOT;
BEGIN { $ROOT = dirname(dirname(dirname(abs_path(__FILE__)))) }
require "$ROOT/scripts/watch";
binmode Test::More->builder->$_, ':utf8' for qw(output failure_output todo_output);
delete @ENV{qw(LC_ALL LC_CTYPE NO_COLOR)};
$ENV{LANG} = 'C.UTF-8';
@ENV{qw(COLUMNS LINES)} = (80, 24);
chdir $dir or die;

sub append { my ($path, $text) = @_; open my $f, '>>', $path or die "$path: $!"; print $f $text; close $f or die }
my $UUID = '01234567-89ab-4def-8123-456789abcdef';

sub options {
    my ($steps, $more) = @_;
    return qq({"event":"options","run":"$UUID",) . ($more // '') . qq("options":{"num-scheduled":$steps,"num-extension":0,"stop-at":0}}\n);
}

sub step {
    my ($step, $loss, $ms, $more) = @_;
    return qq({"event":"step","step":$step,"loss":$loss,"lr":0.01,"ms":$ms,) . ($more // '') . qq("train_ms":1}\n);
}
sub validation { my ($step, $loss) = @_; return qq({"event":"validation","step":$step,"val_loss":$loss,"train_ms":1}\n) }

# Rows of the picture, as characters.
sub once {
    my ($status, $out, $err) = run("$ROOT/scripts/watch", '--once', @_);
    utf8::decode($out);
    is($err, '', 'no message') if $status ne '0';
    return split /\n/, $out;
}

# ---- the reader --------------------------------------------------------------------------------------------

mkdir 'run';
my $file = "run/$UUID.jsonl";
append($file, options(40) . validation(0, 9) . step(1, 8, 100) . '{"event":"step","step":2,"lo');
my $run = RunEvents::open_run('run');
ok(RunEvents::follow($run), 'a run that goes on');
is(join(' ', keys %{$run->{training}}), '1', 'a line that is not whole yet waits');
ok(!RunEvents::follow($run), 'no news');
append($file, 'ss":7.5,"ms":90}' . "\n" . step(3, 7, 80) . step(4, 'null', 80));
ok(RunEvents::follow($run), 'news');
is_deeply($run->{training}, {1 => 8, 2 => 7.5, 3 => 7}, 'and now its number is there');
is_deeply($run->{times}, {1 => 100, 2 => 90, 3 => 80, 4 => 80}, 'with the times');
is(join('', RunEvents::dropped($run)), '1 of 4 training losses are no finite numbers (the first at step 4) and are left out',
    'what is no number is counted');
append('run/11234567-89ab-4def-8123-456789abcdef.jsonl', options(40, '"resumed":"from step 2, x",') . step(3, 6, 70));
utime time - 9, time - 9, $file;
ok(RunEvents::follow($run), 'another process goes on from step 2');
is_deeply($run->{training}, {1 => 8, 2 => 7.5, 3 => 6}, 'its steps replace those after the checkpoint');
is_deeply([$run->{dropped}, $run->{last}{step}, RunEvents::total_steps($run)], [{}, 3, 40], 'and what was wrong with them');
append('run/11234567-89ab-4def-8123-456789abcdef.jsonl', step(4, 5, 'null'));
RunEvents::follow($run);
is_deeply([$run->{training}{4}, $run->{times}{4}, $run->{dropped}], [5, undef, {}], 'a step without a time, as a resumed run has one, lacks nothing');
append($file, '');
is_deeply(RunEvents::read_run('run')->{training}, $run->{training}, 'the whole folder gives the same');
is(RunEvents::label($file), 'run', 'a file that is called by a uuid has the name of its folder');
is_deeply([RunEvents::labels('a.jsonl', $file, 'run')], ['a.jsonl', 'run (1)', 'run (2)'], 'names that are the same are numbered');
is_deeply(RunEvents::event('{"event":"step","step":3,"loss":null,"ms":1e-05}'), {event => 'step', step => 3, loss => undef, ms => 1e-05},
    'a line of numbers');
is_deeply(RunEvents::event('{"loss":"a\\"b","x":{}}'), {loss => 'a"b', x => {}}, 'and one of anything');
is(RunEvents::event($_), undef, "no object: $_") for '[1]', '{"a":1', '{"a":1}}', '';

# ---- pictures ----------------------------------------------------------------------------------------------

# Loss falls in a straight line from 8 to 4, a step takes 50 ms but for the first.
my $line = options(200) . join '', map { step($_, 8 - 4 * ($_ - 1) / 99, $_ == 1 ? 900 : 50, '"tokens":100,"tokens_left":' . 200 * (200 - $_) . ',') } 1 .. 100;
spew('line.jsonl', $line . validation(100, 5));
my @rows = once('line.jsonl');
is(scalar @rows, 24, 'a picture of as many rows as there are');
is($rows[0], 'A line.jsonl  step 100/200  loss 4.0000  val 5.0000  left 0:10  50.0 ms' . ' ' x 9, 'the run in a line; time left by tokens');
is((grep { length != 80 } map { /^(.*)$/ } grep { !/^\s*$/ } @rows[0, 1]), 0, 'in the width of the terminal');
my @picture = grep {/\x{2502}/} @rows[2 .. 12];
my @at = map { /\x{2502}( *)[\x{2801}-\x{28ff}]/ ? length $1 : -1 } @picture;
is(join(' ', sort { $a <=> $b } @at), "@at", 'a line that falls from the left to the right');
cmp_ok($at[0], '<=', 2, 'from its beginning');
cmp_ok($at[-1], '>=', 60, 'to its end');
is(scalar(grep {/A/} @picture), 1, 'with one mark');
like((grep {/A/} @picture)[0], qr/^ +5 .*A$/, 'at the validation');
like($rows[1], qr/^loss +$/, 'title');
like($rows[13], qr/^ {9}\x{2514}\x{2500}+20\x{2500}+40\x{2500}.*100$/, 'axis');
unlike($rows[16], qr/900/, 'the first step does not press all others together');
unlike(join('', @rows), qr/\e/, 'no colours where there is no terminal');
{
    local @ENV{qw(LANG COLUMNS LINES)} = ('C', 40, 16);
    my @plain = once('line.jsonl', '--from', 50);
    is(scalar(grep {/[^ -~]/} @plain), 0, 'a locale without UTF-8');
    like(join("\n", @plain), qr/\|.*[.':]/, 'has curves of other characters');
    is(scalar(grep { length > 40 } @plain), 0, 'in a narrow window');
    ok(!grep({ /^ +[5678] \|/ && /7\.|8/ } @plain), 'and --from leaves the rest out');
    @ENV{qw(COLUMNS LINES)} = (20, 5);
    is(scalar(once('line.jsonl', 'run')), 2, 'a window that is too small has the lines alone');
    for (['A', 1], ['A~', 2], ['A ~', 3], ['A l~', 4]) {
        (my $text, $ENV{COLUMNS}) = @$_;
        my ($status, $out) = finish(start("$ROOT/scripts/watch", '--once', 'line.jsonl'), 20);
        is("$status $out", "0 $text\n", "a window of $ENV{COLUMNS} columns");
    }
}
spew('diverged.jsonl', $line . step(101, 'null', 50) . qq({"event":"failure","text":"diverged"}\n));
spew('done.jsonl', $line . step($_, 4, 50, '"mfu":0.4512,')) for 200;
@rows = once('line.jsonl', 'diverged.jsonl', 'done.jsonl', 'run');
like($rows[1], qr/^B diverged\.jsonl  step 101\/200  loss nan  .* diverged   50\.0 ms +$/, 'a run that has diverged says so');
like($rows[2], qr/^C done\.jsonl +step 200\/200 .* done       50\.0 ms +$/, 'one that is over, with what fits');
$ENV{COLUMNS} = 100;
like((once('done.jsonl'))[0], qr/^A done\.jsonl +step 200\/200 .* done  50\.0 ms  MFU 45\.1% +$/, 'and all of it');
$ENV{COLUMNS} = 80;
like($rows[3], qr/^D run /, 'four runs in a picture');
spew('quiet.jsonl', $line);
utime time - 4000, time - 4000, 'quiet.jsonl';
like((once('quiet.jsonl'))[0], qr/quiet for 1:06:4\d/, 'one that nothing was heard of');
mkdir 'runs';
mkdir "runs/$_" for 'old', 'new', 'none';
spew("runs/$_/$UUID.jsonl", $line) for 'old', 'new';
utime time - 99, time - 99, "runs/old/$UUID.jsonl";
like((once())[0], qr/^A new /, 'without a name the newest of runs');
mkdir '2026-11-23_tiny_0123abcd';
like((once('2026-11-23_tiny_0123abcd'))[1], qr/nothing yet/, 'a run that has only just begun');
my $wide = "\xe6\xbc\xa2" x 60; # a letter of two columns
spew("$wide.jsonl", $line);
is(Watch::width((once("$wide.jsonl"))[0]), 80, 'a long name of wide letters does not break the line');

# ---- a terminal --------------------------------------------------------------------------------------------

SKIP: {
    skip 'script (of util-linux) is not here', 4 if system 'script -qec true /dev/null </dev/null >/dev/null 2>&1';
    spew('live.jsonl', options(40) . step(1, 8, 100));
    my $pid = open my $keys, '|-', "TERM=xterm script -qefc '$ROOT/scripts/watch --every 0.1 live.jsonl' screen >/dev/null 2>&1" or die;
    $keys->autoflush;
    my $until = sub {
        my ($pattern) = @_;
        my $end = time + 20;
        sleep 0.02 while time < $end && slurp('screen') !~ $pattern;
        return slurp('screen') =~ $pattern;
    };
    ok($until->(qr/step 1\/40 /), 'a picture');
    append('live.jsonl', step(2, 7, 100));
    ok($until->(qr/step 2\/40 /), 'that follows the run');
    like(slurp('screen'), qr/\e\[\?1049h.*\e\[36mA/s, 'on a screen of its own, with colours');
    print $keys 'q';
    ok($until->(qr/\e\[\?1049l/), 'and goes at a key');
    close $keys;
}

# ---- refused -----------------------------------------------------------------------------------------------

spew('broken.jsonl', options(4) . "{\n");
spew('log.txt', "text\n");
mkdir 'empty';
my @watch = "$ROOT/scripts/watch";
refuses(@$_) for
    ['a run that is not there', 1, qr/error: none: no such file or folder/, @watch, '--once', 'none'],
    ['a folder without runs', 1, qr/error: empty: no run: no \.jsonl file .* like runs\/quickstart$/m, @watch, '--once', 'empty'],
    ['a log', 1, qr/error: log\.txt: not a run: give its folder or its \.jsonl file/, @watch, '--once', 'log.txt'],
    ['a broken line', 1, qr/error: broken\.jsonl: line 2: not JSON/, @watch, '--once', 'broken.jsonl'],
    ['no terminal', 2, qr/the output is no terminal: --once/, @watch, 'line.jsonl'],
    ['a step', 2, qr/--from x: a step is needed/, @watch, '--once', '--from', 'x', 'run'],
    ['a pause', 2, qr/--every 0: seconds/, @watch, '--every', '0', 'run'],
    ['an option', 2, qr/unknown option --all; see watch --help/, @watch, '--all'];
done_testing;
