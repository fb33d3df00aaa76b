#!/usr/bin/env perl
# scripts/compare: the test against a published example and against closed forms, a page of made-up runs, and what is refused.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp);
use Test::More;
my $ROOT;
BEGIN { $ROOT = dirname(dirname(dirname(abs_path(__FILE__)))) }
require "$ROOT/scripts/compare";
my $dir = tempdir(CLEANUP => 1);

# ---- statistics --------------------------------------------------------------------------------------------------------

sub near { my ($got, $expected, $limit, $what) = @_; ok(abs($got - $expected) <= $limit, "$what: $got") or diag "expected $expected" }

# Two samples of equal size and equal variance: Welch's test is then Student's with 2 (n - 1) degrees of freedom.
my $r = Compare::welch([1, 2, 3], [3, 4, 5]);
near($r->{t}, 2 / sqrt(2 / 3), 1e-12, 't of equal variances');
near($r->{dof}, 4, 1e-12, 'its degrees of freedom');
my $q = $r->{t} / sqrt(4 + $r->{t}**2);
near($r->{p}, 2 * (1 - (0.5 + 0.75 * ($q - $q**3 / 3))), 1e-12, 'p by the closed form for 4 degrees of freedom');
near(Compare::quantile(0.975, 4), 2.7764451, 1e-6, 'the 97.5% quantile of a printed table');
near(Compare::quantile(0.975, 30), 2.0422725, 1e-6, 'another');
# One sample nearly without spread: the degrees of freedom are those of the other.
$r = Compare::welch([1, 2, 3, 4], [5, 5.0000001]);
near($r->{dof}, 3, 1e-6, 'degrees of freedom of very unequal variances');
$r = Compare::welch([1, 2], [3]);
ok(!defined $r->{p} && $r->{difference} == 1.5, 'one run in a set: a difference and no test');
ok(!defined Compare::welch([1, 1], [2, 2])->{p}, 'no spread at all: no test');
is(join(' ', SvgPlot::ticks(0, 10)), '0 2 4 6 8 10', 'ticks');
is(join(' ', map { sprintf '%g', $_ } SvgPlot::ticks(3.28, 3.61)), '3.3 3.35 3.4 3.45 3.5 3.55 3.6', 'ticks of losses');

# ---- a page ------------------------------------------------------------------------------------------------------------

sub made_up_run { # JSON lines of 60 steps
    my ($name, $offset, $ms) = @_;
    my $text = qq({"event":"options","run":"x","options":{}}\n{"event":"validation","step":0,"val_loss":9,"train_ms":0}\n);
    for my $step (1 .. 60) {
        $text .= sprintf qq({"event":"step","step":%d,"loss":%.4f,"lr":1,"ms":%.3f,"train_ms":1}\n), $step, 9 / $step + $offset, $step < 5 ? 900 : $ms;
        $text .= sprintf qq({"event":"validation","step":%d,"val_loss":%.4f,"train_ms":1}\n), $step, 8 / $step + $offset if $step % 20 == 0;
    }
    return spew("$dir/$name.jsonl", $text);
}
sub compare { my @command = map { "'$_'" } "$ROOT/scripts/compare", @_; my $out = `@command 2>&1`; return ($? >> 8, $out) }

my @a = map { made_up_run("a$_", 0.001 * $_, 100 + $_) } 1 .. 3;
my @b = map { made_up_run("b$_", 0.5 + 0.001 * $_, 90 + $_) } 1 .. 3;
my ($status, $out) = compare('--output', "$dir/page.html", '--set', 'old <one>', @a, '--set', 'new', @b);
is($status, 0, 'a page is made') or diag $out;
my $page = slurp("$dir/page.html");
my ($difference, $p) = $page =~ m{<tr><td>60</td><td>[0-9.]+</td><td>[0-9.]+</td><td>([-+0-9.]+)</td><td>[^<]*</td><td>([^<]*)</td></tr>};
is($difference, '+0.5000', 'the last validation');
cmp_ok($p, '<', 1e-6, 'differs for certain');
like($page, qr{50 steps that all runs have after step 10: old &lt;one&gt; 102\.00 ms, new 92\.00 ms; ratio 0\.9020}, 'step times without the first');
is(scalar(() = $page =~ /<svg /g), scalar(() = $page =~ m{</svg>}g), 'every plot is closed');
is(scalar(() = $page =~ /<svg /g), 5, 'five plots');
is(scalar(() = $page =~ /<polyline /g), 3 * 6 + 2, 'a curve for each run, and the differences');
unlike($page, qr{<one>|https?://|<script|<link|url\(|\@import}, 'nothing is fetched, and names are names');

# ---- in words ----------------------------------------------------------------------------------------------------------

my ($verdict) = $page =~ m{<div class="verdict">(.*?)</div>}s;
like($verdict, qr{<p>old &lt;one&gt; has the lower validation loss at step 60: 0\.1353 against 0\.6353 of new, 0\.5000 less \(79%\)\. That is not chance: sets of runs that are alike differ as much in less than 1 of 1000 comparisons \(p = [0-9.e-]+\)\. With 95% confidence it is between 0\.4977 and 0\.5023 less\.</p>},
    'the verdict on the loss');
like($verdict, qr{<p>new has the faster steps: 92\.00 ms against 102\.00 ms of old &lt;one&gt;, 10\.00 ms less \(9\.8%\)\. That is not chance: .*p = 0\.0003\)}, 'and on the step time');
(my $told = $verdict) =~ s/<.*?>//g;
$told =~ s/&lt;/</g;
$told =~ s/&gt;/>/g;
is($out, "$told$dir/page.html\n", 'the terminal has the same words');
like(join("\n", $page =~ /class="value">.*/g), qr{^class="value">step 60: old &lt;one&gt; 0\.1353, new 0\.6353</text>}m, 'values for the pointer');
like($page, qr{\@media\(prefers-color-scheme:dark\)}, 'colours for the dark');
like($page, qr{<b class="a">old &lt;one&gt;</b>: a1\.jsonl, a2\.jsonl, a3\.jsonl<}, 'the runs by their names');
like($page, qr{<p>All options are the same\.</p>|do not say their options}, 'no option differs');

# Differences of a size and spread that leave it open; sets of one run; equal losses; no validation.
sub verdict { my @sets = @_; my ($status, $text) = compare('--output', "$dir/v.html", '--set', 'a', @{$sets[0]}, '--set', 'b', @{$sets[1]}); return $text }
my @c = map { made_up_run("c$_", 0.0015 * $_, 100 + $_) } 1 .. 3;
like(verdict(\@a, \@c), qr{No set is shown to be better in the validation loss at step 60: a has 0\.\d+ against 0\.\d+ of b, 0\.\d+ less \(.*\), but sets of runs that are alike differ as much in \d+ of 100 comparisons .* between -0\.\d+ and 0\.\d+ less}, 'what can be chance');
like(verdict(\@a, \@c), qr{^No set is better in the time of a step: 102\.00 ms in both\.$}m, 'the same times');
like(verdict([$a[0]], [$b[0]]), qr{a has the lower .* cannot be said: a set of one run has no spread}, 'one run in a set');
like(verdict([$a[0], $a[0]], [$b[0], $b[0]]), qr{^compare: note: b: b1\.jsonl \(2\) has .*^a has the lower .* cannot be said: a set of one run has no spread}ms, 'copies of a run');
{ # A run and its copy, or one of the same seed, are one run, whatever the other set holds.
    my $copy = spew("$dir/copy.jsonl", slurp($a[0]));
    my $seed = spew("$dir/seed.jsonl", slurp($a[0]) =~ s/"ms":101\.000/"ms":103.000/gr);
    my ($alone, $copied, $repeated) = map { verdict([$a[0], @$_], \@b) } [], [$copy], [$seed];
    my $note = qr{compare: note: a: copy\.jsonl has the losses of a1\.jsonl and the step times of a1\.jsonl: they count once\n};
    is($copied =~ s/\A$note//r, $alone, 'a copy in one set changes nothing');
    like($copied, qr{\A$note}, 'which a note says');
    like(slurp("$dir/v.html"), qr{<b>The same:</b> seed\.jsonl has the losses of a1\.jsonl: they count once\.</p>}, 'and the page');
    unlike($repeated, qr{cannot be said.*cannot be said}s, 'one of the same seed has times of its own');
    my ($two, $three) = map { verdict([@a[0, 1], @$_], \@b) } [], [$copy];
    is($three =~ s/\A$note//r, $two, 'beside another run it does not make the spread smaller');
}
my $short = spew("$dir/short.jsonl", join "\n", (split /\n/, slurp($b[0]))[0 .. 30]);
like(verdict(\@a, [$short]), qr{validation loss at step 20, the last one that all runs have \(one goes on to 60\): }, 'a run that is behind');
my @bare = map { spew("$dir/bare$_.jsonl", join '', grep {/"loss"/} map {"$_\n"} split /\n/, slurp("$dir/$_.jsonl")) } qw(a1 b1);
like(verdict(map { [$_] } @bare), qr{a has the lower training loss in steps 41 to 60: }, 'without validations the mean of the last training losses');

# ---- options and names -------------------------------------------------------------------------------------------------

sub run_with { # made-up run $from in a folder, under these options
    my ($folder, $from, $options) = @_;
    mkdir "$dir/$folder";
    return spew("$dir/$folder/01234567-89ab-4def-8123-456789abcdef.jsonl", slurp($from) =~ s/"options":\{\}/"options":$options/r);
}
my @options = ('{"seed":1,"muon-rate":0.03,"ns":"polar","repeat":true,"out":"x"}', '{"seed":2,"muon-rate":"0.029999999999999999","ns":"<b>turbo","repeat":false,"out":"y","new":1}');
run_with('run_one', $a[0], $options[0]);
run_with('run_two', $b[0], $options[1]);
compare('--output', "$dir/o.html", '--set', 'a', "$dir/run_one/01234567-89ab-4def-8123-456789abcdef.jsonl", '--set', 'b', "$dir/run_two");
my $differing = slurp("$dir/o.html");
is(join(' ', $differing =~ m{<tr><td>([a-z-]+)</td><td>}g), 'new ns repeat seed', 'the options that differ, no names of files');
like($differing, qr{<tr><td>ns</td><td>polar</td><td>&lt;b&gt;turbo</td></tr>\n<tr><td>repeat</td><td>on</td><td>off</td></tr>}, 'with their values');
like($differing, qr{</b>: run_one</p>.*</b>: run_two</p>}s, 'runs in folders have the names of these');
unlike($differing, qr{01234567}, 'and no uuid');
mkdir "$dir/all";
rename "$dir/run_one", "$dir/all/x";
rename "$dir/run_two", "$dir/all/y";
compare('--output', "$dir/o.html", '--set', 'a', "$dir/all", '--set', 'b', "$dir/all/y");
like(slurp("$dir/o.html"), qr{</b>: x, y \(1\)</p>.*</b>: y \(2\)</p>}s, 'a folder of runs is all of them');
rename "$dir/all/y", "$dir/run_two";

# ---- losses that are no numbers ----------------------------------------------------------------------------------------

# A diverged run must not look like one that lacks a few points: console and page say what is left out.
sub diverged { my ($name, $from, $text) = @_; return spew("$dir/$name.jsonl", slurp("$dir/$from.jsonl") . $text) }
my $nan = diverged('nan', 'b1', qq({"event":"step","step":61,"loss":null,"ms":100}\n{"event":"step","step":62,"loss":"nan","ms":100}\n)
    . qq({"event":"validation","step":62,"val_loss":null,"train_ms":1}\n));
($status, $out) = compare('--output', "$dir/nan.html", '--set', 'a', @a, '--set', 'b', $nan, $b[1]);
is($status, 0, 'a run with NaN at its end') or diag $out;
my @lost = ('2 of 62 training losses are no finite numbers (the first at step 61) and are left out',
    '1 of 5 validation losses are no finite numbers (the first at step 62) and are left out');
like($out, qr{^compare: note: \Q$nan: $_\E$}m, "console: $_") for @lost;
like(slurp("$dir/nan.html"), qr{<p><b>Left out:</b> nan\.jsonl: \Q$_\E\.</p>}, "page: $_") for @lost;
unlike($out . slurp("$dir/page.html"), qr{: .*Left out|a1\.jsonl: }, 'nothing of that for runs without');

# The program writes no time for the first step after a resume.
my $resumed = spew("$dir/resumed.jsonl", slurp($b[0]) =~ s/("step":27,.*?"ms":)[0-9.]+/$1null/r);
($status, $out) = compare('--output', "$dir/resumed.html", '--set', 'a', @a, '--set', 'b', $resumed, $b[1]);
is($status, 0, 'a run that was resumed') or diag $out;
unlike($out . slurp("$dir/resumed.html"), qr/left out/i, 'lacks nothing');
like(slurp("$dir/resumed.html"), qr/49 steps that all runs have after step 10/, 'and has a step time less');

my $log = "source\n" . '=' x 100 . "\ncompiler\ncommand line: ./train_gpt --preset tiny --ns=turbo --repeat --train-files 'a b'\n" . '=' x 100 . "\nstep:0/2 val_loss:9.0000 train_time:0ms step_avg:0.00ms\n"
    . "step:1/2 train_time:9ms step_avg:9.00ms\nstep:1/2 val_loss:-nan train_time:9ms step_avg:9.00ms\nstep:2/2 train_time:18ms step_avg:9.00ms\n"
    . "step:2/2 val_loss:inf train_time:18ms step_avg:9.00ms\n";
spew("$dir/log.txt", $log);
($status, $out) = compare('--output', "$dir/log.html", '--set', 'a', $a[0], '--set', 'b', "$dir/log.txt");
like($out, qr{^compare: note: \Q$dir/log.txt\E: 2 of 3 validation losses are no finite numbers \(the first at step 1\)}m, 'the same in a log');
(my $other = $log) =~ s/ --ns=turbo --repeat/ --ns gram/;
spew("$dir/other.txt", $other);
compare('--output', "$dir/logs.html", '--set', 'a', "$dir/log.txt", '--set', 'b', "$dir/other.txt");
like(slurp("$dir/logs.html"), qr{<tr><td>ns</td><td>turbo</td><td>gram</td></tr>\n<tr><td>repeat</td><td>1</td><td>-</td></tr>\n</table>}, 'options of logs are those of the command line');
compare('--output', "$dir/mixed.html", '--set', 'a', "$dir/log.txt", '--set', 'b', "$dir/run_two");
is(join(' ', slurp("$dir/mixed.html") =~ m{<tr><td>([a-z-]+)</td><td>}g), 'ns preset repeat train-files', 'beside JSON lines only these are compared');
spew("$dir/all.jsonl", qq({"event":"step","step":1,"loss":null}\n));
($status, $out) = compare('--output', "$dir/all.html", '--set', 'a', $a[0], '--set', 'b', "$dir/all.jsonl");
ok($status == 1 && $out =~ /error: \Q$dir\E\/all\.jsonl: no finite number in it/, 'a run of nothing else is refused') or diag $out;

# ---- refused -----------------------------------------------------------------------------------------------------------

my @good = ('--output', "$dir/x.html", '--set', 'a', $a[0], '--set', 'b', $b[0]);
spew("$dir/empty.jsonl", qq({"event":"end"}\n));
spew("$dir/broken.jsonl", "{\n");
for (
    ['one set', 2, qr/1 sets; two/, @good[0 .. 4]],
    ['no output', 2, qr/--output FILE\.html/, @good[2 .. 7]],
    ['a log without a set', 2, qr/name its set/, $a[0]],
    ['two sets of one name', 2, qr/both sets are called "a"/, @good[0 .. 4], '--set', 'a', $b[0]],
    ['an empty set', 2, qr/"b" has no logs/, @good[0 .. 6]],
    ['an unknown option', 2, qr/unknown option --foo/, @good, '--foo'],
    ['a missing file', 1, qr/no such file/, @good, "$dir/none.jsonl"],
    ['no step', 1, qr/no step in it/, @good, "$dir/empty.jsonl"],
    ['a broken file', 1, qr/line 1: not JSON/, @good, "$dir/broken.jsonl"],
) {
    my ($what, $expected, $pattern, @arguments) = @$_;
    my ($got, $text) = compare(@arguments);
    ok($got == $expected && $text =~ $pattern && $text =~ tr/\n// == 1, "$what: $text");
}

# ---- a full disk -------------------------------------------------------------------------------------------------------

# A page whose former version is there, and one that is on /dev/full itself.
SKIP: {
    skip 'no /dev/full', 8 if !-e '/dev/full';
    spew("$dir/kept.html", 'before');
    symlink '/dev/full', "$dir/$_" for 'kept.html.part', 'full.html';
    for my $name ('full', 'kept') {
        my ($got, $text) = compare('--output', "$dir/$name.html", @good[2 .. 7]);
        is("$got $text", "1 compare: error: $dir/$name.html cannot be written: No space left on device\n", "$name.html: one line");
        ok(!-l "$dir/$name.html.part", 'and no part of it is left');
    }
    is(slurp("$dir/kept.html"), 'before', 'nor is the former page cut');
    symlink 'kept.html', "$dir/link.html";
    OutputFile::write_file("$dir/link.html", 'after');
    is(-l "$dir/link.html" ? slurp("$dir/kept.html") : 'no link', 'after', 'a link stays one');
    # What fits into a buffer fails when it is closed, not when it is printed.
    for my $bytes (9, 99999) {
        symlink '/dev/full', "$dir/bytes.part";
        my @warnings;
        local $SIG{__WARN__} = sub { push @warnings, @_ };
        my $good = eval { OutputFile::write_file("$dir/bytes", 'x' x $bytes); 1 };
        is(($good // '') . $@ . "@warnings", "$dir/bytes cannot be written: No space left on device\n", "$bytes bytes: one line");
    }
}
done_testing;
