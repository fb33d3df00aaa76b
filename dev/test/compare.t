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
