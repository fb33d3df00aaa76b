#!/usr/bin/env perl
# The log of a whole run ends with the checksum of the shard that was validated on; scripts/record takes a run
# for a record by it.
use strict;
use warnings;
use Digest::SHA qw(sha256_hex);
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
use lib "$root/scripts";
use RunLog;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(30000, 1));
my $odd = write_shard("val \\ it's\n.bin", documents(600, 2));
my @options = @tiny;
splice @options, -1, 1, glob_quoted($odd);

sub glob_quoted { my ($path) = @_; return $path =~ s/([\\*?\[])/\\$1/gr }
sub log_of { my ($folder) = @_; my ($path) = RunLog::files($folder, 'txt'); return RunLog::parse($path) }

run_ok('a run', $trainer, @options, '--out', "$dir/a");
my $log = log_of("$dir/a");
is_deeply(
    $log->{validation},
    {sha256 => sha256_hex(slurp($odd)), vocabulary => 257, tokens => 512},
    'checksum of the file, vocabulary, tokens');
is(RunLog::unfinished($log), '', 'the log of a whole run');

my ($status, $out, $err) = run("$root/scripts/record", '--name', 'Tiny', '--what', 'x', '--records', $dir,
    map { RunLog::files("$dir/$_", 'txt') } qw(a a));
is($status, 1, 'one run twice is refused');
run_ok('another seed', $trainer, @options, '--out', "$dir/b", '--seed', 2);
($status, $out, $err) = run("$root/scripts/record", '--name', 'Tiny', '--what', 'x', '--records', $dir,
    map { RunLog::files("$dir/$_", 'txt') } qw(a b));
like(
    $out,
qr/^Experiment, no record: the validation data is not that of FineWeb \(SHA-256\); a vocabulary of 257 ids/m,
    'runs on other text are an experiment') or diag $err;

run_ok('a run that stops early', $trainer, @options, '--out', "$dir/c", '--stop-at', 3);
ok(!defined log_of("$dir/c")->{validation}, 'has no such line');
{
    mkdir "$dir/bin";
    local $ENV{PATH} = "$dir/bin"; # without sha256sum
    run_ok('a machine without sha256sum', $trainer, @options, '--out', "$dir/d");
}
like(
    substr(log_text_of("$dir/d"), -200),
    qr/^validation data: SHA-256 not known, vocabulary of 257 ids, 512 tokens predicted\npeak memory/m,
    'says that it is not known');
sub log_text_of { my ($path) = RunLog::files($_[0], 'txt'); return slurp($path) }
done_testing;
