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
is(join(' ', Compare::ticks(0, 10)), '0 2 4 6 8 10', 'ticks');
is(join(' ', map { sprintf '%g', $_ } Compare::ticks(3.28, 3.61)), '3.3 3.35 3.4 3.45 3.5 3.55 3.6', 'ticks of losses');

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
unlike($page, qr{<one>|https?://|<script|<link}, 'nothing is fetched, and names are names');

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

my $log = "source\n" . '=' x 100 . "\ncompiler\n" . '=' x 100 . "\nstep:0/2 val_loss:9.0000 train_time:0ms step_avg:0.00ms\n"
    . "step:1/2 train_time:9ms step_avg:9.00ms\nstep:1/2 val_loss:-nan train_time:9ms step_avg:9.00ms\nstep:2/2 train_time:18ms step_avg:9.00ms\n"
    . "step:2/2 val_loss:inf train_time:18ms step_avg:9.00ms\n";
spew("$dir/log.txt", $log);
($status, $out) = compare('--output', "$dir/log.html", '--set', 'a', $a[0], '--set', 'b', "$dir/log.txt");
like($out, qr{^compare: note: \Q$dir/log.txt\E: 2 of 3 validation losses are no finite numbers \(the first at step 1\)}m, 'the same in a log');
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
done_testing;
