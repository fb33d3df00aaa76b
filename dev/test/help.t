#!/usr/bin/env perl
# Every script says with --help what it does: to standard output, status 0, whatever is missing on the
# machine, and nothing is written. Scripts that need a program which is not built say so in one line.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(start finish);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
my $dir = tempdir(CLEANUP => 1);

chdir $dir or die;

sub first_line { my ($path) = @_; open my $f, '<', $path or return ''; return <$f> // '' }

my @scripts = grep { first_line($_) =~ /^#!/ }
    glob "$root/scripts/* $root/data/*.sh $root/data/*.pl $root/dev/bench/* $root/dev/method/* $root/dev/reference/*.py";
cmp_ok(scalar @scripts, '>=', 20, 'scripts are found');
my $python = grep { -x "$_/python3" } split /:/, $ENV{PATH};
if (!$python) {
    @scripts = grep { first_line($_) !~ /python/ } @scripts;
    diag 'no python3 here: its scripts are left out';
}
my @runs = map { [$_, start(/\.py$/ ? ('python3', $_) : $_, '--help')] } @scripts;
for (@runs) {
    my ($script, $run) = @$_;
    my ($status, $out, $err) = finish($run, 60);
    my $name = $script =~ s{^\Q$root\E/}{}r;
    ok($status eq '0' && $out =~ /\w.*\n/ && length $out < 12000 && $out !~ /^#!|^set -/m && $err eq '',
        "$name --help")
        or diag "status $status\n$out$err";
}
is_deeply([glob "$dir/*"], [], 'nothing was written');

# ---- without the program -----------------------------------------------------------------------------------

my $missing = qr/ is missing: run make.*\n\z/;
for (
    [qw(dev/bench/fidelity --trainer ./absent --train x --val y --out runs)],
    [qw(dev/bench/twin_parity.py --trainer ./absent --train x --val y --out runs)],)
{
    my ($script, @arguments) = @$_;
    next if $script =~ /\.py$/ && !$python;
    my ($status, $out, $err) = finish(start("$root/$script", @arguments), 60);
    ok($status ne '0' && $out eq '' && $err =~ /\A[a-z_]+: [^\n]*\n\z/ && $err =~ $missing,
        "$script without the program: one line")
        or diag "status $status\n$out$err";
}
ok(!-e "$dir/runs", 'and no folder');
done_testing;
