#!/usr/bin/env perl
# scripts/record and scripts/plot_curve: the statistics against known values, a whole submission, and everything refused.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(remove_tree);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(slurp);
use Test::More;
my $ROOT;
BEGIN { $ROOT = dirname(dirname(dirname(abs_path(__FILE__)))) }
require "$ROOT/scripts/record";

my $DIR = tempdir(CLEANUP => 1);
mkdir "$DIR/records";
mkdir "$DIR/bin"; # a PATH without gnuplot
symlink $^X, "$DIR/bin/perl";
symlink '/usr/bin/env', "$DIR/bin/env";
my @SEED_LOSSES = qw(3.2804 3.2754 3.2753 3.2800 3.2780 3.2813 3.2778 3.2771 3.2780 3.2783);
my $SEPARATOR = '=' x 100;

# ---- statistics --------------------------------------------------------------------------------------------------------

# |a - b| relative to b.
sub close_to {
    my ($got, $expected, $limit, $what) = @_;
    my $error = abs($got - $expected) / abs($expected);
    ok($error <= $limit, sprintf '%s: %.9g, relative error %.1e', $what, $got, $error);
}

# Closed forms of P(T <= t) for 1, 2, 3 and 4 degrees of freedom.
my $PI = 4 * atan2(1, 1);
my %CLOSED = (
    1 => sub { 0.5 + atan2($_[0], 1) / $PI },
    2 => sub { 0.5 + $_[0] / (2 * sqrt(2 + $_[0]**2)) },
    3 => sub { my $u = $_[0] / sqrt 3; 0.5 + ($u / (1 + $u * $u) + atan2($u, 1)) / $PI },
    4 => sub { my $q = $_[0] / sqrt(4 + $_[0]**2); 0.5 + 0.75 * ($q - $q**3 / 3) },
);
for my $dof (sort keys %CLOSED) {
    close_to(Record::student_cdf($_, $dof), $CLOSED{$dof}->($_), 1e-11, "P(T <= $_), $dof dof") for -3.5, -1, -0.01, 0.7, 12;
}

# Upper critical values of printed tables: degrees of freedom, one-sided p, t (to the digits printed).
for (
    [5, 0.05, 2.015048], [9, 0.01, 2.821438], [9, 0.005, 3.249836], [9, 0.001, 4.296806], [1, 0.01, 31.820516],
    [19, 0.01, 2.539483], [30, 0.05, 1.697261], [30, 0.01, 2.457262], [120, 0.01, 2.357825], [1000, 0.05, 1.646379],
  )
{
    my ($dof, $p, $t) = @$_;
    close_to(Record::student_cdf(-$t, $dof), $p, 3e-6, "table: t = -$t, $dof dof");
}

# A far tail keeps its digits: 3 dof, P(T <= -t) = (2/pi) * sqrt(3)^3 / (3 t^3) * (1 + O(1/t^2)) .
close_to(Record::student_cdf(-1e4, 3), 2 / $PI * 3**1.5 / 3 / 1e12, 1e-6, 'far tail');

# Simpson's rule over the density of 9 degrees of freedom, an independent way to the same number.
sub simpson_tail {
    my ($t) = @_; # P(T <= -t) = 1/2 - integral from 0 to t
    my $density = sub { 128 / (35 * 3 * $PI) * (1 + $_[0]**2 / 9)**-5 };
    my ($n, $sum) = (2000, 0);
    $sum += ($_ == 0 || $_ == $n ? 1 : $_ % 2 ? 4 : 2) * $density->($_ * $t / $n) for 0 .. $n;
    return 0.5 - $sum * $t / $n / 3;
}
close_to(Record::student_cdf(-$_, 9), simpson_tail($_), 1e-9, "quadrature: t = -$_, 9 dof") for 0.3, 1.7, 2.9;

my $test = Record::test_below(3.28, @SEED_LOSSES);
is(sprintf('%.4f', $test->{p}), '0.0083', 'ten known losses: p = 0.0083');
close_to($test->{mean}, 3.27816, 1e-12, 'their mean');
ok(Record::test_below(3.27, @SEED_LOSSES)->{p} > 0.99, 'p is near 1 when the mean is above the target');
is(Record::test_below(3.28, 3.27, 3.27, 3.27)->{p}, undef, 'equal losses allow no test');

# ---- logs --------------------------------------------------------------------------------------------------------------

my $FINEWEB = '5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640'; # of the published validation shard

# The text of a log; %change replaces parts: total, loss (final), seed, preset, source, compiler, gpu, gpus (how many), ms (per step),
# data (the line of the validation data).
sub log_text {
    my %o = (total => 500, loss => '3.2780', seed => 1, preset => '2025-11-18', source => "int main(void)\n{\n}\n", compiler => 'gcc 12',
        gpu => 'NVIDIA H100', gpus => 8, ms => 71, data => "sha256 $FINEWEB, vocabulary of 50257 ids, 10485760 tokens predicted", @_);
    my $text = "$o{source}$SEPARATOR\ncompiler: $o{compiler}\ngit commit: 0123abcd\n";
    $text .= "command line: ./train_gpt --preset $o{preset} --seed $o{seed} --out runs/$o{seed}\n";
    $text .= "Fri Nov 20 20:49:4$o{seed} 2026\n+-----------------------------+\n";
    $text .= "|   $_  $o{gpu}    On  | 0000:1$_:00.0 Off |\n" for 0 .. $o{gpus} - 1;
    $text .= "$SEPARATOR\n";
    for my $step (0 .. $o{total}) {
        my $ms = $step * $o{ms} + $o{seed};
        $ms = 0 if !$step;
        my $average = sprintf '%.2f', $ms / ($step || 1);
        $text .= "step:$step/$o{total} train_time:${ms}ms step_avg:${average}ms\n" if $step;
        next if $step % 250 && $step != $o{total};
        my $loss = $step == $o{total} ? $o{loss} : sprintf '%.4f', 10.8258 - ($step ? 7 + 0.001 * $o{seed} : 0);
        $text .= "step:$step/$o{total} val_loss:$loss train_time:${ms}ms step_avg:${average}ms\n";
    }
    $text .= "validation data: $o{data}\n" if $o{data} ne '';
    return $text . "peak memory allocated: 30123 MiB reserved: 31000 MiB\n";
}

my $count = 0;
sub write_log {
    my ($text, $name) = @_;
    $name //= sprintf '%02d.txt', $count++;
    open my $out, '>', "$DIR/$name" or die;
    print $out $text;
    close $out;
    return "$DIR/$name";
}

# (exit status, stdout, stderr)
sub run_script {
    my ($script, @arguments) = @_;
    my $pid = fork // die;
    if (!$pid) {
        open STDOUT, '>', "$DIR/stdout" or die;
        open STDERR, '>', "$DIR/stderr" or die;
        exec "$ROOT/scripts/$script", @arguments or die;
    }
    waitpid $pid, 0;
    my $status = $?;
    return ($status & 127 ? "signal $status" : $status >> 8, map { slurp("$DIR/$_") } 'stdout', 'stderr');
}

sub leftovers {
    opendir my $d, "$DIR/records" or die;
    return join ' ', grep { !/^\.\.?$/ } readdir $d;
}

sub record { run_script('record', '--records', "$DIR/records", '--date', '2026-01-02', @_) }

# One clear line on stderr, the status given, and nothing left in the records folder.
sub refused {
    my ($what, $pattern, @logs) = @_;
    my ($status, $out, $err) = record('--name', 'Refused', '--what', 'x', @logs);
    my $clear = $status eq 1 && $out eq '' && $err =~ /\Arecord: error: [^\n]*\n\z/ && $err =~ $pattern && leftovers() eq '';
    ok($clear, "refused: $what") or diag("status $status\n$err" . leftovers());
}

my $good = write_log(log_text());
my @second = (loss => '3.2750', seed => 2);
refused('one log', qr/one log only/, $good);
refused('a pattern that the shell hands on', qr{/none/\*/\*\.txt: no file matches this pattern; are the runs in another}, $_ ? $good : (), "$DIR/none/*/*.txt") for 0, 1;
refused('one log with such a name', qr/one log only/, write_log(log_text(), 'a[1]*.txt'));
refused('the same file twice', qr/the same run/, $good, $good);
refused('a copy under another name', qr/the same run/, $good, write_log(log_text()));
refused('a copy with another header', qr/the same run/, $good, write_log(log_text() =~ s/--seed 1/--seed 3/r));
refused('another source', qr/source differs/, $good, write_log(log_text(@second, source => "int main(void)\n{ \n}\n")));
refused('another number of steps', qr/number of steps, 499, is not.*, 500;/, $good, write_log(log_text(@second, total => 499)));
refused('another preset', qr/command line differs/, $good, write_log(log_text(@second, preset => '2025-11-10')));
refused('another compiler', qr/version line "compiler: gcc 13" is not.*"compiler: gcc 12"/, $good, write_log(log_text(@second, compiler => 'gcc 13')));
refused('other GPUs', qr/GPUs, "8 x NVIDIA H200"/, $good, write_log(log_text(@second, gpu => 'NVIDIA H200')));
refused('other validation data', qr/its validation data is not that/, $good, write_log(log_text(@second, data => 'sha256 ' . '0' x 64 . ', vocabulary of 50257 ids, 10485760 tokens predicted')));
refused('NaN at the end', qr/validation loss of step 500 is nan/, $good, write_log(log_text(@second, loss => 'nan')));
refused('NaN as some libraries print it', qr/validation loss of step 500 is -nan/, $good, write_log(log_text(@second, loss => '-nan')));
refused('infinite loss on the way', qr/step 250 is inf/, $good, write_log(log_text(@second) =~ s{step:250/500 val_loss:\S+}{step:250/500 val_loss:inf}r));
refused('no peak memory', qr/peak memory, is missing/, $good, write_log(log_text(@second) =~ s/^peak.*\n//mr));
refused('no final validation', qr/validation of the last step, 500, is missing/, $good, write_log(log_text(@second) =~ s{^step:500/500 val.*\n}{}mr));
refused('stopped early', qr/stops after training step 299 of 500/, $good, write_log(log_text(@second) =~ s{^step:300/500 .*}{}smr));
refused('cut in a line', qr/stops after training step 299 of 500/, $good, write_log(log_text(@second) =~ s{^step:300/500 tra\K.*}{}smr));
refused('no step at all', qr/holds no step line/, $good, write_log(log_text(@second) =~ s{^step:0.*}{}smr));
refused('a resumed run', qr/does not begin with the validation of step 0/, $good, write_log(log_text(@second) =~ s{^step:0/.*?(?=^step:400/500 )}{}smr));
refused('a missing step', qr/training step 301 where 300 was expected/, $good, write_log(log_text(@second) =~ s{^step:300/500 .*\n}{}mr));
refused('a repeated validation', qr/second validation of step 250/, $good, write_log(log_text(@second) =~ s{^(step:250/500 val.*\n)}{$1$1}mr));
refused('another total inside', qr/501 steps in all, the lines before say 500/, $good, write_log(log_text(@second) =~ s{step:300/500}{step:300/501}r));
refused('five decimals', qr/not a line of a run's log/, $good, write_log(log_text(@second) =~ s{val_loss:3.2750}{val_loss:3.27500}r));
refused('a space more', qr/not a line of a run's log/, $good, write_log(log_text(@second) =~ s{^step:300/500 }{step:300/500  }mr));
refused('a wrong average', qr/step_avg:\S+ is not train_time/, $good, write_log(log_text(@second) =~ s{^step:300/500 train_time:\S+}{step:300/500 train_time:21500ms}mr));
refused('Windows line ends', qr/needs two lines of 100/, $good, write_log(log_text(@second) =~ s/\n/\r\n/gr));
refused('lines after the end', qr/after the end/, $good, write_log(log_text(@second) . "step:500/500 train_time:1ms step_avg:0.00ms\n"));
refused('no separators', qr/needs two lines of 100 '='/, $good, write_log("hello\n"));
refused('an empty file', qr/empty/, $good, write_log(''));
refused('random bytes', qr/needs two lines/, $good, write_log(join '', map { chr rand 256 } 1 .. 5000));
refused('a folder', qr/not a regular file/, $good, $DIR);
refused('a missing file', qr/no such file/, $good, "$DIR/absent.txt");
refused('a device that never ends', qr/not a regular file/, $good, '/dev/zero');
refused('a name that is no log\'s', qr/ends in .txt/, $good, write_log(log_text(@second), 'README.md'));
refused('a run repeated with its seed', qr/the same seed/, map { write_log(log_text(total => 1000, ms => $_)) } 71, 72);

# ---- usage -------------------------------------------------------------------------------------------------------------

for (
    ['no name', qr/--name is missing/, '--what', 'x', $good],
    ['a name with a slash', qr/letters, digits/, '--name', '../x', '--what', 'x', $good],
    ['no text', qr/--what is missing/, '--name', 'x', $good],
    ['a bad date', qr/YYYY-MM-DD/, '--name', 'x', '--what', 'x', '--date', '2026-13-01', $good],
    ['a bad time', qr/--time -1: a positive/, '--name', 'x', '--what', 'x', '--time', '-1', $good],
    ['a bad alpha', qr/between 0 and 1/, '--name', 'x', '--what', 'x', '--alpha', '2', $good],
    ['an alpha that is no number', qr/alpha/, '--name', 'x', '--what', 'x', '--alpha', 'small', $good],
    ['an unknown option', qr/unknown option/, '--name', 'x', '--what', 'x', '--colour', $good],
    ['no logs', qr/no log files/, '--name', 'x', '--what', 'x'],
  )
{
    my ($what, $pattern, @arguments) = @$_;
    my ($status, $out, $err) = record(@arguments);
    ok($status eq 2 && $err =~ /\Arecord: error: [^\n]*\n\z/ && $err =~ $pattern, "usage: $what") or diag("$status $err");
}
like((record('--help'))[1], qr/\Ausage: record/, '--help');

# ---- a whole record ----------------------------------------------------------------------------------------------------

my @logs = map { write_log(log_text(loss => $SEED_LOSSES[$_], seed => $_, ms => 70 + $_ % 3), sprintf 'run%02d.txt', $_) } 0 .. $#SEED_LOSSES;
my ($status, $out, $err) = record('--name', 'Seed', '--what', 'Nothing: these are *the* ten losses.', @logs);
my $folder = "$DIR/records/2026-01-02_Seed";
is($status, 0, 'ten runs: exit 0') or diag($err);
like($out, qr{^\Q$folder\E\n.*p = 0\.0083\nRecord:}s, 'prints the folder, the p-value and the verdict');
is(leftovers(), '2026-01-02_Seed', 'one folder, no temporary one');
my $readme = slurp("$folder/README.md") // '';
like($readme, qr/^# Seed, 2026-01-02\n\n\*\*Record: .*p = 0\.0083 \\< 0\.01\.\*\*\n/, 'README: title and verdict');
like($readme, qr/\n## What changed\n\nNothing: these are \*the\* ten losses\.\n/, 'README: what changed');
like($readme, qr/^\| \[run03\.txt\]\(run03\.txt\) \| 3\.2800 \| 35\.003 \| 70\.01 \| 30123 \|$/m, 'README: a row of the table');
like($readme, qr/^\| \*\*mean\*\* \| \*\*3\.27816\*\* \| \*\*35\.45[45]\*\* \| \*\*70\.91\*\* \| \|$/m, 'README: the means');
like($readme, qr/^\| \*\*sd\*\* \| 0\.00198 \|/m, 'README: the standard deviation');
like($readme, qr/t = -2\.9\d+, 9 degrees of freedom, p = 0\.0083/, 'README: the test');
like($readme, qr/500 steps on 8 x NVIDIA H100/, 'README: the GPUs');
is(RunLog::parse(write_log(log_text() =~ s/^git commit/ranks: $_->[0] (x)\ngit commit/mr))->{gpus}, "$_->[1] x NVIDIA H100", "GPUs of $_->[0] ranks") for [1, 1], [16, 16];
like($readme, qr/^    command line: \.\/train_gpt --preset 2025-11-18$/m, 'README: the command line, without seed and output');
is_deeply([map { slurp("$folder/" . s{.*/}{}r) } @logs], [map { slurp($_) } @logs], 'the logs are byte for byte the ones given');
SKIP: {
    skip 'gnuplot is not installed', 1 if !grep { -x "$_/gnuplot" } split /:/, $ENV{PATH};
    ok(!(grep { (slurp("$folder/$_") // '') !~ /\A\x89PNG/ || $readme !~ /\]\($_\)/ } 'loss.png', 'step_time.png'), 'both plots are there and shown');
}
my $before = slurp("$folder/README.md");
($status, $out, $err) = record('--name', 'Seed', '--what', 'again', @logs);
ok($status == 1 && $err =~ /exists already/ && slurp("$folder/README.md") eq $before, 'an existing folder is never overwritten');

($status, $out) = record('--name', 'Nine', '--what', 'x', @logs[0 .. 4]);
ok($status == 0 && $out =~ /^Not a record: .*p < 0\.01 is needed\.$/m, 'too large a p-value: made, and said not to be a record');
like(slurp("$DIR/records/2026-01-02_Nine/README.md"), qr/^\*\*Not a record: /m, 'its README says so');

# ---- what is no record, whatever its loss ------------------------------------------------------------------------------

sub experiment {
    my ($what, $pattern, $change, @options) = @_;
    local $ENV{PATH} = "$DIR/bin"; # without gnuplot
    my @few = map { write_log(log_text(loss => $SEED_LOSSES[$_], seed => $_, @$change)) } 1, 2, 8;
    my ($status, $out, $err) = record('--name', 'Experiment', '--what', 'x', @options, @few);
    my $text = slurp("$DIR/records/2026-01-02_Experiment/README.md") // '';
    my $good = $status eq 0 && $out =~ /^Experiment, no record: $pattern\.$/m && $text =~ /\A# [^\n]*\n\n\*\*Experiment, no record: [^\n]*\.\*\*\n/
        && $text =~ /One-sided one-sample t-test/;
    ok($good, "experiment: $what") or diag("status $status\n$out$err$text");
    remove_tree("$DIR/records/2026-01-02_Experiment");
}

sub data { my %o = (sha256 => $FINEWEB, vocabulary => 50257, tokens => 10485760, @_);
    return [data => "sha256 $o{sha256}, vocabulary of $o{vocabulary} ids, $o{tokens} tokens predicted"] }
experiment('a log of before the line', qr/the logs do not say what they were validated on \(.*\)/, [data => '']);
experiment('a checksum that could not be had', qr/the logs do not say .*/, [data => 'SHA-256 not known, vocabulary of 50257 ids, 10485760 tokens predicted']);
experiment('other text', qr/the validation data is not that of FineWeb \(SHA-256\)/, data(sha256 => 'a' x 64));
experiment('three runs on bytes of novels', qr/.*not that of FineWeb.*; a vocabulary of 257 ids, not GPT-2's 50257; 65536 validation tokens, not 10485760/,
    data(sha256 => 'b' x 64, vocabulary => 257, tokens => 65536));
experiment('fewer validation tokens', qr/1048576 validation tokens, not 10485760/, data(tokens => 1048576));
experiment('preset tiny', qr/preset tiny, which is no record \(give --time SECONDS for a new one\)/, [preset => 'tiny']);
experiment('no GPU', qr/no GPUs/, [gpus => 0]);
experiment('other GPUs', qr/8 x NVIDIA H200, not 8 x H100/, [gpu => 'NVIDIA H200']);
experiment('fewer GPUs', qr/4 x NVIDIA H100, not 8 x H100/, [gpus => 4]);
experiment('too slow', qr/135\.\d s of training, and 134\.9 s are to be beaten/, [ms => 270]);
my @records = map { m{/(2\d+-\d\d-\d\d)\.c\z} ? $1 : () } glob "$ROOT/llmc/records/*.c";
cmp_ok(scalar @records, '>=', 9, 'records of the program are found');
experiment("$_, too slow", qr/300\.\d s of training, and (?:1[0-3]\d|[67]\d)\.\d s are to be beaten/, [preset => $_, ms => 600]) for @records;
experiment('too slow for a limit', qr/35\.5 s of training, and 30\.0 s are to be beaten/, [], '--time', 30);
experiment('another target', qr/the target is 4, not 3\.28/, [], '--target', 4);
($status, $out) = record('--name', 'Own', '--what', 'x', '--time', 40, map { write_log(log_text(loss => $SEED_LOSSES[$_], seed => $_, preset => 'mine')) } 0 .. 9);
like($out, qr/^Record: .*p = 0\.0083/m, 'a new preset with its time to beat');

($status, $out) = record('--name', 'Equal', '--what', 'x', map { write_log(log_text(seed => $_)) } 6, 7);
like($out, qr/^Not a record: all 2 final losses are equal/m, 'equal losses are no record');

# Without gnuplot: a note, and the same record without plots.
{
    local $ENV{PATH} = "$DIR/bin";
    ($status, $out, $err) = record('--name', 'NoPlots', '--what', 'x', @logs);
    ok($status == 0 && $err =~ /gnuplot is not installed.*\nrecord: note: no plots/, 'without gnuplot: one note');
    my $text = slurp("$DIR/records/2026-01-02_NoPlots/README.md") // '';
    ok($text =~ /p = 0\.0083/ && $text !~ /\.png/, 'without gnuplot: README without plots');
}

# A records folder that is missing.
($status, $out, $err) = run_script('record', '--records', "$DIR/absent", '--name', 'x', '--what', 'x', @logs);
ok($status == 1 && $err =~ /\Arecord: error: [^\n]*no such folder[^\n]*\n\z/, 'a missing records folder');

# A full disk: no part of the list is left.
SKIP: {
    skip 'no /dev/full', 2 if !-e '/dev/full';
    mkdir "$DIR/board";
    symlink '/dev/full', "$DIR/board/leaderboard_1xH200.md.part";
    my $board = "$DIR/board/leaderboard_1xH200.md";
    my $made = eval { Record::make_board({track => '1xH200', records => "$DIR/board"}); 1 };
    is(($made // '') . $@, "$board cannot be written: No space left on device\n", 'a list that cannot be written');
    ok(!-l "$board.part", 'leaves no part of it');
}

# The track of one GPU.
my %fineweb = (
    sha256 => '5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640',
    vocabulary => 50257,
    tokens => 10485760,);
sub one_gpu {
    my ($what, $why, %differs) = @_;
    my %log = (
        validation => {%fineweb}, gpus => '1 x NVIDIA H200',
        preset => '2026-07-17', command => './train_gpt --preset 2026-07-17', %differs);
    is(join('; ', Record::breaches({track => '1xH200', target => 3.28}, \%log, 1e6)), $why, $what);
}
one_gpu('one H200, however long it took', '');
one_gpu($_, "$_, not 1 x H200", gpus => $_) for '2 x NVIDIA H200', '1 x NVIDIA H100', '1 x NVIDIA GH2000';
one_gpu('another preset', 'preset 2025-11-18, not 2026-07-17', preset => '2025-11-18');
one_gpu('other data and weights',
    '--train-files, which the track does not have; --resume, which the track does not have',
    command => "./train_gpt --train-files 'x' --resume=y --ns gram");
one_gpu('less validation', '5 validation tokens, not 10485760', validation => {%fineweb, tokens => 5});

# ---- plot_curve --------------------------------------------------------------------------------------------------------

my $lines = join '', map { qq({"event":"step","step":$_,"loss":) . (5 - $_ / 100) . qq(,"ms":70.5}\n) } 1 .. 40;
my $jsonl = write_log(qq({"event":"options","preset":"tiny"}\n$lines) . qq({"event":"step","step":41,"loss":null,"ms":70}\n), 'run.jsonl');
{
    my ($status, undef, $err) = run_script('plot_curve', '--output', "$DIR/nan.svg", $jsonl);
    like($err, qr/\Aplot_curve: note: \S+run\.jsonl: 1 of 41 points are no finite numbers \(the first at step 41\) and are left out\n/, 'a loss that is no number is left out and told');
}
my $running = write_log(log_text(@second) =~ s{^step:300/500 tra\K.*}{}smr, 'running.txt');
is_deeply([PlotCurveTest::points('loss', $jsonl)], [map { [10 * $_, 5 - (10 * $_ - 4.5) / 100] } 1 .. 4], 'JSON lines: loss averaged over ten steps');
my $validated = write_log(qq({"event":"validation","step":0,"val_loss":5}\n$lines) . qq({"event":"validation","step":40,"val_loss":4.6}\n), 'validated.jsonl');
is_deeply([PlotCurveTest::points('validation', $validated)], [[0, 5], [40, 4.6]], 'JSON lines: validations');
my $few = write_log($lines . qq({"event":"step","step":41,"loss":9,"ms":70}\n), 'few.jsonl');
is([PlotCurveTest::points('loss', $few)]->[-1][0], 40, 'a last group that is not full is left out');
is_deeply([PlotCurveTest::points('step-time', $running)]->[1], [20, 71], 'log: time per step');
is_deeply([map { $_->[0] } PlotCurveTest::points('loss', $running)], [0, 250], 'a run still going on is plotted as far as it is');
SKIP: {
    skip 'gnuplot is not installed', 2 if !grep { -x "$_/gnuplot" } split /:/, $ENV{PATH};
    run_script('plot_curve', '--output', "$DIR/a.png", '--title', 'He said "x" \\', $jsonl, $running, $logs[0]);
    like(slurp("$DIR/a.png"), qr/\A\x89PNG/, 'PNG');
    run_script('plot_curve', '--output', "$DIR/a.svg", '--quantity', 'step-time', '--label', 'one', '--label', 'two', @logs[0, 1]);
    like(slurp("$DIR/a.svg"), qr/<svg.*two/s, 'SVG with labels');
}
for (
    [2, qr/--output FILE\.png or FILE\.svg is missing/, $good], [2, qr/--output "x\.jpg": a picture ends in \.png or \.svg/, '--output', 'x.jpg', "$DIR/absent.txt"],
    [2, qr/2 labels for 1 logs/, '--output', "$DIR/b.png", '--label', 'a', '--label', 'b', $good],
    [2, qr/loss, validation or step-time/, '--output', "$DIR/b.png", '--quantity', 'memory', $good], [1, qr/no such file/, '--output', "$DIR/b.png", "$DIR/absent.txt"],
    [1, qr/line 1: not JSON/, '--output', "$DIR/b.png", write_log("x\n", 'bad.jsonl')], [1, qr/nothing to plot/, '--output', "$DIR/b.png", '--from', 900, $good],
  )
{
    my ($expected, $pattern, @arguments) = @$_;
    ($status, $out, $err) = run_script('plot_curve', @arguments);
    ok($status eq $expected && $err =~ /\Aplot_curve: error: [^\n]*\n\z/ && $err =~ $pattern && !-e "$DIR/b.png", "plot_curve refuses: $pattern") or diag("$status $err");
}

done_testing();

package PlotCurveTest;

sub points {
    my ($quantity, $path) = @_;
    require "$ROOT/scripts/plot_curve";
    local $SIG{__WARN__} = sub { };
    return map { [$_->[0], 0 + sprintf '%.9g', $_->[1]] } @{PlotCurve::curve({quantity => $quantity, average => 10, from => 0}, $path)};
}
