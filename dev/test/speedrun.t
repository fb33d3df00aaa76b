#!/usr/bin/env perl
# scripts/speedrun_8xH100.sh and speedrun_1xH200.sh as on a fresh machine, with stand-ins for the server, nvidia-smi and the trainer:
# what is fetched, what is run, and how it goes on after a failure.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Copy qw(copy);
use File::Path qw(make_path);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
plan skip_all => 'curl is not here' if system 'command -v curl >/dev/null';
my $dir = tempdir(CLEANUP => 1);
make_path(map { "$dir/$_" } qw(scripts data bin server records));
for (qw(scripts/speedrun_8xH100.sh scripts/speedrun_1xH200.sh scripts/speedrun_lib.sh scripts/RunLog.pm data/fineweb10B.sh data/fetch_lib.sh)) {
    copy("$root/$_", "$dir/$_") or die "$_: $!";
    chmod 0755, "$dir/$_";
}
sub program { my ($name, $text) = @_; spew("$dir/$name", $text); chmod 0755, "$dir/$name" }
my @names = ('fineweb_val_000000.bin', map { sprintf 'fineweb_train_%06d.bin', $_ } 1 .. 9);
spew("$dir/server/$names[$_]", pack('l<3 x1012', 20240520, 1, 50 + $_) . pack('S<*', (1) x (50 + $_))) for 0 .. 9;
$ENV{FINEWEB_URL} = "file://$dir/server";
$ENV{PATH} = "$dir/bin:$ENV{PATH}";
delete @ENV{qw(RUNS PRESET OUT GPUS KEEP FAIL_AT)};

my $track = '8xH100';
program('data/gpt2_vocab.sh', "#!/bin/sh\nmkdir data/vocab\n");
sub gpus { my ($count, $name) = @_; program('bin/nvidia-smi', "#!/bin/sh\n" . ($count ? "echo '$name'\n" x $count : "exit 9\n")) }

# Writes a log, whole unless its seed is $FAIL_AT, and a checkpoint; notes how it was called.
my $trainer = <<'END';
#!/usr/bin/env perl
my %o = @ARGV;
open my $calls, '>>', 'calls'; print $calls "@ARGV\n";
my $folder = "$o{'--out'}/2026-11-22_x_$$";
system "mkdir -p '$folder'";
my $name = "$folder/log$$.txt";
open my $log, '>', $name;
my $ms = 100 * ($ENV{SPEED} // 1);
my ($half, $average) = ($ms / 2, sprintf '%.2f', $ms / 2);
my $loss = sprintf '%.4f', 3.27 + 0.0001 * $o{'--seed'};
print $log "source\n", '=' x 100, "\nCUDA 13\ncommand line: ./train_gpt @ARGV\nnvidia-smi\n", ($ENV{GPU_TABLE} // join '', map { "|   $_  NVIDIA H100 80GB HBM3    On  | 0000 |\n" } 0 .. 7), '=' x 100, "\n",
    "step:0/2 val_loss:10.8258 train_time:0ms step_avg:0.00ms\nstep:1/2 train_time:${half}ms step_avg:${average}ms\n";
spew("$name"); sub spew { my $j = $_[0] =~ s/txt$/jsonl/r; open my $f, '>', $j; print $f "{}\n" }
open my $c, '>', "$folder/step_000002.safetensors";
exit 3 if $o{'--seed'} == ($ENV{FAIL_AT} // 0);
print $log "step:2/2 train_time:${ms}ms step_avg:${average}ms\nstep:2/2 val_loss:$loss train_time:${ms}ms step_avg:${average}ms\n",
    "validation data: sha256 5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640, ",
    "vocabulary of 50257 ids, 10485760 tokens predicted\n",
    "peak memory allocated: 100 MiB reserved: 200 MiB\n";
END

# run(words...) -> status, output. Environment by local %ENV.
sub run {
    my @words = map { "'$_'" } @_;
    my $out = `cd / && '$dir/scripts/speedrun_$track.sh' @words 2>&1 </dev/null`;
    return ($? >> 8, $out);
}
sub calls { my @calls = split /\n/, slurp("$dir/calls"); unlink "$dir/calls"; return @calls }
sub refused { my ($what, $pattern, @words) = @_; my ($status, $out) = run(@words); ok($status == 1 && $out =~ $pattern, $what) or diag $out }

# ---- what is missing shows before anything is fetched ------------------------------------------------------------------

gpus(8, 'NVIDIA H100 80GB HBM3');
refused('no trainer', qr/\Aspeedrun: error: \.\/train_gpt is missing: run make.*\n\z/);
program('train_gpt', $trainer);
gpus(0);
refused('no GPU', qr/error: nvidia-smi finds no GPU/);
gpus(8, 'NVIDIA H100 80GB HBM3');
refused("$_, which the script sets", qr/error: $_ is set here/, $_, 5) for qw(--seed --out --preset --gpus);
refused('its other spelling', qr/error: --seed is set here/, '--seed=5');
{
    local $ENV{RUNS} = 'many';
    refused('no number of runs', qr/error: RUNS=many is no number/);
}
ok(!-e "$dir/data/fineweb10B", 'nothing was fetched');

# ---- a fresh machine ---------------------------------------------------------------------------------------------------

$ENV{RUNS} = 3;
my ($status, $out) = run('--head', 'bf16');
is($status, 0, 'three runs') or diag $out;
is_deeply([sort map { s{.*/}{}r } glob "$dir/data/fineweb10B/*"], [sort @names], 'all shards were fetched');
my $folder = 'runs/speedrun_2026-08-06';
is_deeply([calls()], [map { "--preset 2026-08-06 --gpus all --seed $_ --out $folder/$_ --head bf16" } 1 .. 3], 'each with its seed and folder');
ok(-d "$dir/data/vocab", 'and the vocabulary');
unlike($out, qr/note:/, 'eight H100 need no remark');
is_deeply([glob "$dir/$folder/*/*/*.safetensors"], [], 'no checkpoints are left');
my ($last) = $out =~ /A submission: scripts\/(.*)\n\z/;
$last =~ s/--name NAME --what 'what changed'/--name Test --what x --records '$dir\/records'/;
my $made = `cd '$dir' && '$root/scripts/'$last 2>&1`;
like($made, qr/^Record: the mean final loss of 3 runs is below 3\.28/m, 'the last line makes a submission') or diag $made;

($status, $out) = run('--head', 'bf16');
is_deeply([$status, calls()], [0], 'called again nothing is run: all is there') or diag $out;

# ---- data that is partly there -----------------------------------------------------------------------------------------

unlink "$dir/data/fineweb10B/$_" for @names[0, 4];
spew("$dir/data/fineweb10B/$names[5]", substr slurp("$dir/server/$names[5]"), 0, 1030);
($status, $out) = run();
is($status, 0, 'missing validation, a missing and a short shard') or diag $out;
is(join(' ', grep { slurp("$dir/data/fineweb10B/$_") ne slurp("$dir/server/$_") } @names), '', 'all are whole then');
rename "$dir/server/$names[3]", "$dir/server/gone";
unlink "$dir/data/fineweb10B/$names[3]";
refused('a shard that cannot be had', qr/the shards are not complete/);
is_deeply([calls()], [], 'nothing is run without it');
($status, $out) = run('--train-files', 'x_*.bin', '--val-files=y.bin');
ok($status == 0 && $out =~ /shards: as given/, 'unless the shards are elsewhere') or diag $out;
rename "$dir/server/gone", "$dir/server/$names[3]";

# ---- a run that fails --------------------------------------------------------------------------------------------------

$ENV{OUT} = "$dir/other place";
{
    local $ENV{FAIL_AT} = 2;
    refused('a run that is interrupted', qr/error: run 2 ended with status 3.*call this again/);
    is(scalar(calls()), 2, 'ends the series');
}
($status, $out) = run();
is($status, 0, 'called again') or diag $out;
is_deeply([map { /--seed (\d)/ } calls()], [2, 3], 'it goes on with that run');
is(scalar(() = glob "'$dir/other place/unfinished/*/*.{txt,jsonl}'"), 2, 'whose first folder was set aside, lines and all');
is(scalar(() = glob "'$dir/other place/[0-9]*/*/*.txt'"), 3, 'one whole log is left of each run');

# ---- other machines ----------------------------------------------------------------------------------------------------

$ENV{OUT} = "$dir/few";
gpus(4, 'NVIDIA H200');
($status, $out) = run();
ok($status == 0 && $out =~ /note: 4 GPUs \(0 of them H100\), GPUS=all; times of the track are taken on 8 x H100/, 'four H200: a remark') or diag $out;
gpus(8, 'NVIDIA H100 80GB HBM3');
@ENV{qw(GPUS OUT KEEP PRESET)} = (2, "$dir/two", 1, '2025-11-18');
calls();
($status, $out) = run();
ok($status == 0 && $out =~ /note: 8 GPUs \(8 of them H100\), GPUS=2/, 'two of eight: as well');
is((calls())[0], "--preset 2025-11-18 --gpus 2 --seed 1 --out $dir/two/1", 'as asked');
is(scalar(() = glob "$dir/two/*/*/*.safetensors"), 3, 'KEEP=1 keeps checkpoints');
# ---- one GPU -----------------------------------------------------------------------------------------------------------

delete @ENV{qw(GPUS OUT KEEP PRESET)};
$track = '1xH200';
calls();
gpus(1, 'NVIDIA H200');
$ENV{GPU_TABLE} = "|   0  NVIDIA H200    On  | 0000 |\n";
refused("$_, which is the same in all runs", qr/error: $_: all runs of track 1xH200 have the same/, $_, 'x')
    for qw(--train-files --val-files --val-tokens --init-from --resume --config);
for (qw(PRESET GPUS)) {
    local $ENV{$_} = 1;
    refused("$_ is not asked for", qr/error: PRESET and GPUS: this track has one preset and one GPU/);
}
($status, $out) = run('--ns', 'gram');
is($status, 0, 'three runs on an H200') or diag $out;
is_deeply([calls()], [map {"--preset 2026-07-17 --gpus 1 --seed $_ --out runs/speedrun_1xH200/$_ --ns gram"} 1 .. 3], 'with its preset');
unlike($out, qr/note:/, 'which needs no remark');
sub entry { # the last line of a series, as an entry of that name
    my ($text, $name, $what) = @_;
    my ($line) = $text =~ /A submission: scripts\/(.*)\n\z/;
    $line =~ s/--name NAME --what 'what changed'/--name $name --date 2026-11-23 --what '$what' --records '$dir\/records'/;
    return `cd '$dir' && '$root/scripts/'$line 2>&1`;
}
like(entry($out, 'First', 'Gram form | and more'), qr/^Record: the mean final loss of 3 runs is below 3\.28/m, 'an entry');
sub board { return grep {/^\| \d/} split /\n/, slurp("$dir/records/leaderboard_1xH200.md") }
is_deeply([board()], ['| 1 | 0.1 +- 0.0 | 2 | 3.27020 | 1.7e-05 | 3 | [First](2026-11-23_First) | Gram form \\| and more |'], 'is on the list');
{
    local @ENV{qw(OUT SPEED)} = ("$dir/faster", 0.5);
    ($status, $out) = run();
    like(entry($out, 'Second', 'half the time'), qr/^Record: /m, 'a faster one');
    local @ENV{qw(OUT GPU_TABLE)} = ("$dir/h100", "|   0  NVIDIA H100    On  | 0000 |\n");
    gpus(1, 'NVIDIA H100');
    ($status, $out) = run();
    ok($status == 0 && $out =~ /note: 1 GPUs \(0 of them H200\), GPUS=1; times of the track are taken on 1 x H200/, 'an H100: a remark');
    like(entry($out, 'Third', 'another GPU'), qr/^Experiment, no record: 1 x NVIDIA H100, not 1 x H200\.$/m, 'which is no entry');
}
is(join(' ', map {/\[(\w+)\]/} board()), 'Second First', 'the fastest stands first, an experiment does not');
ok(-s "$dir/records/2026-11-23_Third/README.md", 'but has its page');
done_testing;
