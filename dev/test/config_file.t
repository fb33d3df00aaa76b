#!/usr/bin/env perl
# Run files: --config takes options from a file, what a run writes repeats it bit for bit, mistakes are refused with file and line; and
# --stop-after, which ends a run on all ranks at the same step.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
sub folder { my ($out) = @_; my ($folder) = glob "$out/????-??-??_*"; return $folder // "$out: no run" }
sub without_comments { my ($path) = @_; return slurp($path) =~ s/^#.*\n//gmr }
# The options that the program logs for a run, as JSON.
sub options { my ($out) = @_; return JSON::PP::decode_json((split /\n/, log_text($out, 'jsonl'))[0])->{options} }

# The words of a command without some options and their values.
sub without {
    my ($words, @names) = @_;
    my @words = @$words;
    for my $name (@names) {
        my ($i) = grep { $words[$_] eq $name } 0 .. $#words;
        splice @words, $i, 2;
    }
    return @words;
}

# ---- a run once more -----------------------------------------------------------------------------------------

# A prompt with everything that a text in quotes could spoil. Nothing says how long the validation is: it is fitted to the shard.
my $prompt = "a \"b\" \\n # 'c'\n\t\x01\x7f = [caf\xc3\xa9]";
my @first = (@tiny, '--out', "$dir/first", qw(--seed 7 --ns turbo --adam-rate 0.0123 --repeat --num-tokens 5), '--sample', $prompt);
@first = without(\@first, '--val-tokens');
run_ok('a run', $trainer, @first);
my $file = folder("$dir/first") . '/run.toml';
ok(-s $file, 'writes run.toml into its folder');
run_ok('--config run.toml', $trainer, '--config', $file, '--out', "$dir/second");
is_deeply(losses("$dir/second"), losses("$dir/first"), 'has the same losses');
is(scalar keys %{losses("$dir/second")}, 20, 'in 20 steps');
is(same_state(newest("$dir/first"), newest("$dir/second")), '', 'and ends in the same bits');
my ($one, $other) = map { options("$dir/$_") } 'first', 'second';
is($other->{sample}, $one->{sample}, 'the prompt came through');
is(without_comments(folder("$dir/second") . '/run.toml') =~ s/^out = .*\n//mr, without_comments($file) =~ s/^out = .*\n//mr, 'its own run.toml says the same');
like(log_text("$dir/second"), qr/^command line: .* --preset=tiny .* --config \S+run\.toml --out/m, 'the log has the options of the file');
run_ok('with another seed on the command line', $trainer, '--config', $file, '--out', "$dir/third", '--seed', 8);
is(options("$dir/third")->{seed}, 8, 'which overrides that of the file');
isnt(losses("$dir/third")->{20}, losses("$dir/first")->{20}, 'and the losses differ');

my $python = "import json, sys, tomllib; print(json.dumps(tomllib.load(open(sys.argv[1], 'rb'))))";
SKIP: {
    my ($status, $json) = run('python3', '-c', $python, $file);
    skip 'no python3 with tomllib here', 1 if $status ne '0';
    my $read = JSON::PP::decode_json($json);
    my @differ = grep { ref $read->{$_} ? !!$read->{$_} != !!$one->{$_} : $read->{$_} ne $one->{$_} } keys %$read;
    is("@differ", '', 'a reader of TOML finds the values of the ' . keys(%$read) . ' options in it');
}

# The data of the file do not turn what the command line asks for into training.
my ($sample) = run_ok('a sample', $trainer, '--config', $file, '--resume', "$dir/first", qw(--sample abc --num-tokens 5 --out), "$dir/sample");
like($sample, qr/\A\nabc/, 'is only that');
ok(!-e "$dir/sample", 'and no run');
spew("$dir/text.txt", 'abc def ' x 20);
my ($evaluated) = run_ok('an evaluation', $trainer, '--config', $file, '--resume', "$dir/first", '--eval', "text=$dir/text.txt", '--out', "$dir/sample");
like($evaluated, qr/\Atext \S+: bits_per_byte \d+\.\d{4}, /, 'too');

# A schedule that small data shorten.
{
    my @words = without(\@tiny, qw(--num-scheduled --num-extension));
    write_shard('few.bin', documents(4000, 3));
    run_ok('a schedule that the data shorten', $trainer, @words, '--train-files', "$dir/few.bin", '--out', "$dir/few");
    my $steps = keys %{losses("$dir/few")};
    cmp_ok($steps, '<', 100, "to $steps steps");
    run_ok('again', $trainer, '--config', folder("$dir/few") . '/run.toml', '--out', "$dir/few2");
    is_deeply(losses("$dir/few2"), losses("$dir/few"), 'is as long, with the same losses');
}

# ---- a run that went on --------------------------------------------------------------------------------------

run_ok('a run until step 8', $trainer, @tiny, '--out', "$dir/halves", '--stop-at', 8);
run_ok('which goes on with more validations', $trainer, '--resume', "$dir/halves", '--val-every', 3);
my $halves = folder("$dir/halves");
like(slurp("$halves/run.toml"), qr/^stop-at = 8\n/m, 'run.toml is that of the first process');
my $second = slurp("$halves/run_000008.toml");
like($second, qr/^resume = "\Q$halves\E\/step_000008.safetensors"$/m, 'the second has its own, which names the checkpoint');
like($second, qr/^val-every = 3$/m, 'and what it was given');
unlike($second, qr/^stop-at/m, 'and does not stop where the first did');
my (undef, $ends) = run_ok('the first again', $trainer, '--config', "$halves/run.toml", '--out', "$dir/halves2");
like($ends, qr/\Atrain_gpt: note: --config: this run ends at step 8, as the file says \(stop-at\); --stop-at 0 trains to the end\n\z/, 'one line says that it stops');
my (undef, $goes) = run_ok('with --stop-at 0', $trainer, '--config', "$halves/run.toml", '--out', "$dir/halves4", '--stop-at', 0);
is($goes, '', 'there is no such line');
is(same_state(checkpoint("$dir/halves", 20), newest("$dir/halves4")), '', 'and it trains to the end');
is(same_state(checkpoint("$dir/halves", 8), newest("$dir/halves2")), '', 'ends in the same bits');
run_ok('the second again', $trainer, '--config', "$halves/run_000008.toml", '--out', "$dir/halves3");
is(same_state(checkpoint("$dir/halves", 20), newest("$dir/halves3")), '', 'goes on to the same bits');
ok(-s folder("$dir/halves3") . '/run.toml', 'its folder has a run.toml');

# ---- what a file may say -------------------------------------------------------------------------------------

sub file { my ($text) = @_; return spew("$dir/options.toml", $text) }
# The options of a run that ends at once: the data of these are never looked at.
sub shown {
    my ($text, @more) = @_;
    run_ok('a file', $trainer, @tiny, '--config', file($text), qw(--stop-at 1 --val-every 0), '--out', "$dir/shown", @more);
    return options("$dir/shown");
}
my $shown = shown("# all forms\r\n\r\n  repeat=true # a comment\nseed = +12\nlambda-init = 1.5e0\nhead = 'bf16'\nsave-init = '$dir/a\\n'\n"
        . "window-schedule = [ 3, 7,11, ]\nns-tuples = [\"1,0,0\"]\nsample = \"\\u00e9\\U0001F600\\t\\\\ # \\\"\"\ngraphs = \"off\"");
is_deeply([@$shown{qw(seed lambda-init head save-init window-schedule ns-tuples graphs)}], [12, 1.5, 'bf16', "$dir/a\\n", '3,7,11', '1,0,0', 'off'], 'values of every kind');
is($shown->{repeat}, JSON::PP::true, 'a flag');
is($shown->{sample}, "\x{e9}\x{1f600}\t\\ # \"", 'escapes');
$shown = shown("seed = 1\nval-every = 3\nadam-rate = 0.5\n", '--config', spew("$dir/second.toml", "seed = 2\nadam-rate = 0.25\n"), '--adam-rate', 0.125);
is_deeply([@$shown{qw(seed adam-rate val-every)}], [2, 0.125, 0], 'a later file overrides, and the command line does from both of its ends');

$shown = shown("\xef\xbb\xbfseed = 5\n");
is($shown->{seed}, 5, 'a byte order mark before the first line is no mistake');

my @refused = (
    ["# a\n\xef\xbb\xbfseed = 1\n", 2, qr/a line is  name = value/],
    ["seed = 1\nsede = 2\n", 2, qr/unknown option 'sede'; see --help/],
    ["seed = 1\n# x\nrepeat = true\nseed = 1\n", 4, qr/seed: is given already in line 1/],
    ["seed\n", 1, qr/a line is  name = value  or a comment/],
    ["[data]\n", 1, qr/a line is  name = value/],
    ["seed = 1 2\n", 1, qr/seed: more than a value: '2'/],
    ["seed = \"1\"\n", 1, qr/seed needs a number without quotes/],
    ["seed = true\n", 1, qr/seed needs a number/],
    ["seed = 1.5\n", 1, qr/--seed: '1\.5' is not a whole number/],
    ["seed = -1\n", 1, qr/--seed: -1 is out of range, must be 0 to/],
    ["seed = [1, 2]\n", 1, qr/seed: '\[1' is no value/],
    ["seed =\n", 1, qr/seed: '' is no value/],
    ["repeat = 1\n", 1, qr/repeat needs true or false/],
    ["\nout = runs\n", 2, qr/out: 'runs' is no value; texts stand in quotes/],
    ["out = 3\n", 1, qr/out needs a text in quotes/],
    ["out = \"runs\n", 1, qr/out: a text has no " at its end/],
    ["out = 'runs\"\n", 1, qr/out: a text has no ' at its end/],
    ["out = \"a\\qb\"\n", 1, qr/out: a text has \\q, which is no escape of TOML/],
    ["out = \"\\ud800\"\n", 1, qr/out: \\ud800 is no character/],
    ["out = \"\\u12\"\n", 1, qr/out: \\u12" is no character/],
    ["out = \"\"\"\nx\"\"\"\n", 1, qr/out: texts of several lines/],
    ["window-schedule = [3, 7\n11]\n", 1, qr/window-schedule: a list has no \] at its end/],
    ["window-schedule = [3 7]\n", 1, qr/window-schedule: a list has no \]/],
    ["head = 'fp4'\n", 1, qr/--head: 'fp4' is none of bf16\|fp8/],
    ["config = 'x'\n", 1, qr/config: belongs on the command line/],
);
for (@refused) {
    my ($text, $line, $why) = @$_;
    refuses('refused', 2, qr/: error: \Q$dir\E\/options\.toml:$line: $why/, $trainer, '--config', file($text));
}
refuses('a file that is no text', 2, qr/options\.toml: is no text/, $trainer, '--config', file("seed = 1\0\n"));
refuses('a file that is missing', 2, qr/cannot read the run file .*none\.toml: No such file/, $trainer, '--config', "$dir/none.toml");
refuses('a folder', 2, qr/cannot read the run file .*: it is a folder/, $trainer, '--config', $dir);
refuses('what the options say together', 2, qr/--repeat and --epochs exclude each other/, $trainer, '--config', file("repeat = true\n"), qw(--epochs 2));

# A script's variable that is not set; scripts/sweep gives the other two.
refuses("an empty @$_", 2, qr/--(?:resume|eval): is empty; name a (?:checkpoint or a folder|file, as text=FILE), or leave the option out$/, $trainer, @tiny, '--out', "$dir/empty", @$_)
    for ['--resume', ''], ['--resume='], ['--eval', ''], ['--eval=', '--init-from', newest("$dir/first")];
ok(!-e "$dir/empty", 'and nothing is trained');
run_ok('empty --init-from and --save-init', $trainer, @tiny, qw(--stop-at 1 --init-from= --save-init= --out), "$dir/initial");

# ---- --stop-after --------------------------------------------------------------------------------------------

run_ok('a whole run', $trainer, @tiny, '--out', "$dir/whole");
for my $ranks (1, 2) {
    my $out = "$dir/after$ranks";
    my ($status, $console, $err) = run($trainer, @tiny, '--out', $out, '--ranks', $ranks, '--stop-after', '0.001s');
    is("$status $err", '3 ', "--stop-after, $ranks ranks: status 3");
    like($console, qr/^interrupted after step 1, saving checkpoint$/m, 'after the step that was under way');
    unlike(slurp(folder($out) . '/run.toml'), qr/stop-after/, 'run.toml does not limit the time of a repeated run');
    run_ok('--resume', $trainer, '--resume', $out, '--ranks', $ranks);
    is_deeply(losses($out), losses("$dir/whole"), 'goes on to the end, with the losses of a run that was not stopped') if $ranks == 1;
    like(newest($out), qr/step_000020/, 'which it reaches');
}
run_ok('a run that ends before', $trainer, @tiny, '--out', "$dir/before", '--stop-after', '1.5h');
is(same_state(newest("$dir/whole"), newest("$dir/before")), '', 'is not stopped');
refuses("--stop-after $_", 2, qr/--stop-after: '\Q$_\E' is not a time, like 90s, 10m or 1\.5h/, $trainer, @tiny, '--stop-after', $_) for qw(90 s 10x -5s 0s 5mm 1e99s inf);
done_testing;
