#!/usr/bin/env perl
# Names that come from outside - of files, folders, runs, titles - are names only: no script runs what stands
# in them, reads them as a format or as an option, lets them into the HTML of a page, or breaks a message into
# several lines.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(make_path remove_tree);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp start finish);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
my $dir = tempdir(CLEANUP => 1);

chdir $dir or die; # what a name made to run would write, it writes here
my $gnuplot = grep { -x "$_/gnuplot" } split /:/, $ENV{PATH};

# What was made to run leaves a file "touched".
sub untouched { my ($what) = @_; ok(!-e 'touched', "$what: nothing was run"); unlink 'touched' }
sub call { return finish(start(@_), 60) }

my @NAMES = (
    '`touch touched`',
    '$(touch touched)',
    '"; touch touched; "',
    "' . system('touch touched') . '",
    "'; touch touched; '",
    '%n %s %d %999999d',
    '|touch touched',
    '-e touched',
    '@{[system q(touch touched)]}',
    "line\nbreak",
    "\e[31mred",
    '<img src=x onerror=alert(1)>',
    'a&b');

# ---- a run's files under such names ------------------------------------------------------------------------

my $SEPARATOR = '=' x 100;
sub log_text { # 3 steps
    my ($loss, $gpu) = @_;
    my $text =
          "int main(void);\n$SEPARATOR\ncompiler: gcc <b>\ncommand line: ./train_gpt --preset 2025-11-18\n"
        . "Fri Nov 20 20:49:41 2026\n|   0  "
        . ($gpu // 'NVIDIA <i>H200`')
        . "    On  | 0000:19:00.0 Off |\n$SEPARATOR\n"
        . "step:0/3 val_loss:10.8258 train_time:0ms step_avg:0.00ms\n";
    $text .= "step:$_/3 train_time:" . 70 * $_ . "ms step_avg:70.00ms\n" for 1 .. 3;
    return $text
        . "step:3/3 val_loss:$loss train_time:210ms step_avg:70.00ms\n"
        . "peak memory allocated: 10 MiB reserved: 20 MiB\n";
}
sub json_text {
    my ($offset) = @_;
    return join '', map {
        sprintf
qq({"event":"step","step":%d,"loss":%.3f,"ms":70}\n{"event":"validation","step":%d,"val_loss":%.3f}\n),
            $_, 5 - $_ / 9 + $offset, $_, 6 - $_ / 9 +
            $offset
    } 1 .. 12;
}

# ---- plot_curve --------------------------------------------------------------------------------------------

SKIP: {
    skip 'gnuplot is not installed', 2 * @NAMES + 2 if !$gnuplot;
    for my $i (0 .. $#NAMES) {
        my $name = $NAMES[$i] =~ tr{/}{_}r;
        my $path = spew("$dir/$name.jsonl", json_text(0));
        my ($status, $out, $err) =
            call("$root/scripts/plot_curve", '--output', "$dir/p$i.svg", '--title', $name, $path, '--label',
            $name);
        my $svg = slurp("$dir/p$i.svg");
        ok( $status eq '0' && $svg =~ /<svg/ && $svg !~ /<img|\e/,
            'plot_curve: title, label and file ' . RunLog::printable($name)) or diag "$status\n$out$err";
        untouched('plot_curve');
    }
    my $text = slurp("$dir/p0.svg");
    like($text, qr/`touch touched`/, 'the name itself stands in the plot');
    local $ENV{TMPDIR} = "$dir/it's `touch touched`";
    mkdir $ENV{TMPDIR};
    my ($status) = call("$root/scripts/plot_curve", '--output', "$dir/q.png", "$dir/a&b.jsonl");
    ok($status eq '0' && !-e 'touched', 'a folder for temporary files with such a name');
}
my ($status, $out, $err) = call("$root/scripts/plot_curve", '--output', 'x.png', "no\nsuch\efile.txt");
ok($status eq '1' && $err eq "plot_curve: error: no\\nsuch\\x1bfile.txt: no such file\n",
    'a message is one line, without escapes')
    or diag $err;

# ---- record ------------------------------------------------------------------------------------------------

mkdir 'records';
mkdir 'bin'; # a PATH without gnuplot, which has been tried above
symlink $^X, 'bin/perl';
symlink '/usr/bin/env', 'bin/env';
for my $name (@NAMES) {
    local $ENV{PATH} = "$dir/bin";
    my $folder = "$dir/runs/" . ($name =~ tr{/}{_}r);
    make_path($folder);
    my @logs = map { spew("$folder/run$_.txt", log_text("3.27$_" . '0')) } 1, 2;
    spew("$folder/other.txt", log_text('3.2750') =~ s/2025-11-18/2025-11-10/r);
    ($status, $out, $err) = call(
        "$root/scripts/record", '--records', "$dir/records", '--name',
        'N', '--date', '2026-01-02', '--what',
        'x', @logs);
    my $readme = slurp("$dir/records/2026-01-02_N/README.md");
    ok($status eq '0' && $readme =~ /\\<i\\>H200\\`/, 'record: logs in ' . RunLog::printable($name))
        or diag "$status\n$err$readme";
    remove_tree("$dir/records/2026-01-02_N");
    ($status, $out, $err) = call(
        "$root/scripts/record", '--records', "$dir/records", '--name',
        'N', '--what', 'x', $logs[0],
        "$folder/other.txt");
    my $shown = quotemeta RunLog::printable("$folder/other.txt");
    ok( $status eq '1'
            && $err =~
/\Arecord: error: $shown: mixed logs: its command line differs from that of [^\n]*run1\.txt in more[^\n]*\n\z/,
        'and refused, with their names as they are') or diag "$status\n$err";
    untouched('record');
}
{
    # A name that begins with a dash is given to plot_curve as a file, not as an option.
    my @logs = map { spew("$dir/-run$_.txt", log_text("3.27$_" . '0')) } 1, 2;
    ($status, $out, $err) = call(
        "$root/scripts/record", '--records', 'records', '--name',
        'D', '--date', '2026-01-02', '--what',
        'x', '--', '-run1.txt', '-run2.txt');
    ok($status eq '0' && (!$gnuplot || -s 'records/2026-01-02_D/loss.png'),
        'logs whose names begin with a dash')
        or diag "$status\n$err";
}

# ---- compare -----------------------------------------------------------------------------------------------

for my $i (0 .. $#NAMES) {
    my $name = $NAMES[$i] =~ tr{/}{_}r;
    my @sets = map {
        my $set = $_;
        [map { spew("$dir/$name.$set$_.jsonl", json_text($set + $_ / 100)) } 1, 2]
    } 0, 1;
    ($status, $out, $err) = call(
        "$root/scripts/compare", '--output', "$dir/c.html", '--title',
        $name, '--set', $name, @{$sets[0]},
        '--set', "$name-2", @{$sets[1]});
    my $page = slurp("$dir/c.html");
    my $ok = $status eq '0' && $page !~ /<img|\e|&(?!amp;|lt;|gt;|quot;|#39;|plusmn;)/ && $page =~ m{</html>};
    ok($ok, 'compare: sets, logs and title ' . RunLog::printable($name)) or diag "$status\n$out$err";
    untouched('compare');
}
spew("$dir/o.$_.jsonl", qq({"event":"options","options":{"$_":"$_","b":["<img>"]}}\n) . json_text(0)) for '<img src=x>', 'b';
call("$root/scripts/compare", '--output', "$dir/o.html", '--set', 'a', "$dir/o.<img src=x>.jsonl", '--set', 'b', "$dir/o.b.jsonl");
like(slurp("$dir/o.html"), qr/<td>&lt;img src=x&gt;<\/td><td>&lt;img src=x&gt;<\/td><td>-</, 'compare: options of such names');
unlike(slurp("$dir/o.html"), qr/<img/, 'are names');
my %evil = (preset => '<script>alert(1)</script>', note => '"><img src=x>');
my @lines = (qq({"event":"options","options":{"preset":"$evil{preset}","out":"\\"><img src=x>"}}\n));
spew("$dir/o$_.jsonl", join '', @lines, json_text($_)) for 1, 2;
call("$root/scripts/compare", '--output', "$dir/o.html", '--set', 'a', "$dir/o1.jsonl", '--set', 'b',
    "$dir/o2.jsonl");
unlike(slurp("$dir/o.html"), qr/<script|<img/, 'values of options do not get into the page as HTML');
spew("$dir/big$_.jsonl",
    json_text(0)
        . qq({"event":"step","step":13,"loss":1e999,"ms":1e400}\n{"event":"step","step":1e300,"loss":1,"ms":1}\n)
            . qq({"event":"step","step":14,"loss":1e14,"ms":1}\n)
) for 1, 2;
($status, $out, $err) =
    call("$root/scripts/compare", '--output', "$dir/big.html", '--set', 'a', "$dir/big1.jsonl", '--set', 'b',
    "$dir/big2.jsonl");
ok($status eq '0' && slurp("$dir/big.html") !~ /inf|nan/i, 'numbers beyond all bounds')
    or diag "$status\n$err";

# ---- watch -------------------------------------------------------------------------------------------------

# A picture of lines of the terminal's width: no character that it would obey, no line end of a name's.
sub pictured {
    my ($what, @runs) = @_;
    local @ENV{qw(LC_ALL COLUMNS LINES)} = ('C.UTF-8', 80, 20);
    my ($status, $out, $err) = call("$root/scripts/watch", '--once', @runs);
    ok($status eq '0' && $out !~ /[^ -~\n\x80-\xff]/ && ($out =~ tr/\n//) == 20, "watch: $what") or diag "$status\n$out$err";
    untouched('watch');
    return $out;
}
for my $name (map {tr{/}{_}r} @NAMES) {
    mkdir "$dir/$name-watched";
    spew($_, json_text(0)) for "$dir/$name-watched/$name.jsonl", "$dir/$name.jsonl";
    my $out = pictured('a folder and a file ' . RunLog::printable($name), '--', "$name-watched", "$dir/$name.jsonl");
    like($out, qr/^A .*watched .*\nB .*\.jsonl /, 'in a line each');
}
spew("$dir/evil.jsonl",
    qq({"event":"options","options":{"num-scheduled":"1e9\\u001b[2J","num-extension":[1],"stop-at":{}}}\n)
        . json_text(0)
        . qq({"event":"step","step":"13\\u001b[2J","loss":1}\n{"event":"step","step":[1],"loss":1}\n{"event":"step","step":13,"loss":1e999,"tokens":"x"}\n)
        . qq({"event":"failure","text":"\\u001b]0;title\\u0007\\nline"}\n));
like(pictured('hostile values', "$dir/evil.jsonl"), qr/loss nan .*\\x1b\]0;title\\x07\\nline/, 'are shown as they are');
unlike(pictured('numbers beyond all bounds', "$dir/big1.jsonl"), qr/inf/i, 'are left out');

# ---- fidelity, embed_source, speedrun ----------------------------------------------------------------------

for my $name (@NAMES) {
    my $folder = "$dir/fidelity/" . ($name =~ tr{/}{_}r) . '/seed-1337/run';
    make_path($folder);
    spew("$folder/x.jsonl",
qq({"event":"options","options":{"num-scheduled":"30"}}\n{"event":"validation","step":7,"val_loss":5.5000}\n)
    );
    ($status, $out, $err) = call("$root/dev/bench/fidelity", '--table', '--only', 'seed-1337', '--out',
        dirname(dirname($folder)));
    ok($status eq '0' && $out =~ /^\| seed-1337 \(unfinished\) \| - \/ - \/ - \| 7: 5\.5000 \|$/m,
        'fidelity: runs in ' . RunLog::printable($name))
        or diag "$status\n$out$err";
    untouched('fidelity');
}

make_path('tree/llmc');
spew('tree/train_gpt.cu', "int x;\n");
spew('tree/llmc/' . $_ . '.c', "int y;\n") for '"; system("touch touched"); "', '%n', '\\';
($status) = call("$root/scripts/embed_source.sh", "$dir/source.c", "$dir/tree");
spew("$dir/main.c",
qq(#include <stdio.h>\nextern const char program_source[];\n)
        . qq(int main(void) { fputs(program_source, stdout); }\n)
);
my $text = system('cc', '-o', "$dir/source", "$dir/source.c", "$dir/main.c") == 0 ? `./source` : '';
is( $text,
    join('',
        "// ---- train_gpt.cu ----\nint x;\n",
        map {"// ---- llmc/$_.c ----\nint y;\n"} '"; system("touch touched"); "',
        '%n', '\\'),
    'embed_source: files under such names') or diag $status;

make_path('speed/scripts');
spew("speed/scripts/$_.sh", slurp("$root/scripts/$_.sh")) for qw(speedrun_8xH100 speedrun_lib);
chmod 0755, 'speed/scripts/speedrun_8xH100.sh';
spew('speed/train_gpt', "#!/bin/sh\n");
chmod 0755, 'speed/train_gpt';
for my $variable (qw(KEEP RUNS)) {
    local $ENV{$variable} = "a[\$(touch $dir/touched)]";
    ($status, $out, $err) = call("$dir/speed/scripts/speedrun_8xH100.sh");
    ok($status eq '1' && $err =~ /\Aspeedrun: error: $variable=/, "speedrun: $variable is no arithmetic")
        or diag "$status\n$err";
    untouched('speedrun');
}
done_testing;
BEGIN { unshift @INC, dirname(dirname(dirname(abs_path(__FILE__)))) . '/scripts'; require RunLog }
