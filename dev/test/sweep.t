#!/usr/bin/env perl
# scripts/sweep: every combination is run once, the table is that of its runs, and a sweep that was interrupted, or whose runs were
# killed, goes on to the losses of one that was not.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../../scripts";
use TrainTest;
use RunStats qw(mean mean_and_sd welch p_text);
no warnings 'qw'; # values have commas
use Test::More;
use Text::ParseWords qw(parse_line);
use Time::HiRes qw(sleep time);

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my @command = ('--', $trainer, @tiny, qw(--num-scheduled 4 --num-extension 1 --val-every 0));
sub sweep { return ("$root/scripts/sweep", @_) }
sub rows { # of a CSV file, by their titles
    my ($path) = @_;
    my ($names, @rows) = map { [parse_line(',', 0, $_)] } split /\n/, slurp($path);
    return map { my %row; @row{@$names} = @$_; \%row } @rows;
}
sub log_count { my ($folder) = @_; return scalar(() = glob "$folder/*/*.jsonl") }

# ---- a grid ----------------------------------------------------------------------------------------------------

my @grid = (qw(--grid muon-rate=0.02,0.05 --grid seed=1,2,3 --jobs 2 --out), "$dir/grid");
my ($out) = run_ok('a grid of two rates and three seeds', sweep(@grid, @command));
like($out, qr/^sweep: 6 of 6 runs are to be done$/m, 'six runs');
my @runs = rows("$dir/grid/runs.csv");
is(join(' ', map { "$_->{'muon-rate'}/$_->{seed}" } @runs), '0.02/1 0.02/2 0.02/3 0.05/1 0.05/2 0.05/3', 'in runs.csv');
my @wrong = grep { val_losses($_->{folder})->{5} ne sprintf '%.4f', $_->{val_loss} } @runs;
is(scalar @wrong, 0, 'with the losses of their logs');
my ($first, $second) = my @table = rows("$dir/grid/table.csv");
my @losses = ([map { $_->{val_loss} } @runs[0 .. 2]], [map { $_->{val_loss} } @runs[3 .. 5]]);
my $test = welch(@losses);
is(scalar @table, 2, 'the table has two rows');
is($table[$_]{val_loss}, sprintf('%.5f', mean(@{$losses[$_]})), 'mean') for 0, 1;
is($table[$_]{standard_error}, sprintf('%.5f', (mean_and_sd(@{$losses[$_]}))[1] / sqrt 3), 'standard error') for 0, 1;
is("$second->{difference} $second->{p}", sprintf('%+.5f ', $test->{difference}) . p_text($test->{p}), "difference and p of Welch's test");
is("$first->{difference}$first->{p}", '', 'the first row is not compared with itself');
is("$first->{runs} $first->{diverged} $first->{step}", '3 0 5', 'runs and steps');
like($out, qr/^muon-rate +runs +diverged .*^ +0\.02 +3 +0 +5 .*\n +0\.05 .*^6 of 6 runs are finished/ms, 'it is printed');
is(slurp("$dir/grid/table.txt"), $out =~ s/^sweep: .*\n//gmr, 'and written');
is(scalar(() = glob "$dir/grid/*/*/step_*"), 0, 'checkpoints of finished runs are removed');

my %logs = map { $_ => 1 } glob "$dir/grid/*/*/*.jsonl";
($out) = run_ok('once more, with a seed more', sweep((map { s/1,2,3/1,2,3,4/r } @grid), '--keep', @command));
like($out, qr/^sweep: 2 of 8 runs are to be done$/m, 'two runs are added');
is(scalar(grep { !$logs{$_} } glob "$dir/grid/*/*/*.jsonl"), 2, 'and none is repeated');
is(scalar(() = glob "$dir/grid/*,seed=4/*/step_*"), 2, '--keep keeps their checkpoints');
is((rows("$dir/grid/table.csv"))[0]{runs}, 4, 'the table has them');
refuses('another command in its folder', 1, qr/error: \S+seed=1 was made with another command: .*; give another --out/, sweep(@grid, @command, '--repeat'));
my ($failed) = run(sweep(qw(--grid seed=1 --out), "$dir/wrong", @command, '--train-files', 'absent'));
is($failed, 1, 'a command that fails before it makes a run');
run_ok('does not keep the right one from its folder', sweep(qw(--grid seed=1 --out), "$dir/wrong", @command));
($out) = run_ok('--table', sweep(@grid, '--table', @command));
unlike($out, qr/to be done/, 'runs nothing');

# ---- interrupted, killed ---------------------------------------------------------------------------------------

# Runs of 40 steps with a checkpoint after each; the whole group is killed in the middle of the first.
my @long = ('--', $trainer, @tiny, qw(--repeat --num-scheduled 36 --num-extension 4 --val-every 0 --checkpoint-every 1 --init-from), "$dir/init.safetensors");
run_ok('weights to begin with', $trainer, @tiny, qw(--stop-at 1 --save-init), "$dir/init.safetensors", '--out', "$dir/init");
my @seeds = (qw(--grid seed=1,2 --out), "$dir/whole");
run_ok('a sweep without a disturbance', sweep(@seeds, @long));
my @killed = (qw(--grid seed=1,2 --out), "$dir/killed");
sub wait_for { my ($pattern) = @_; my $end = time + 60; sleep 0.005 while !(my @there = glob $pattern) && time < $end }
my $run = start(sweep(@killed, @long));
wait_for("$dir/killed/seed=1/*/step_000003*");
kill 'KILL', -$run->{pid};
finish($run);
$run = start(sweep(@killed, @long));
wait_for("$dir/killed/seed=2/*/step_000003*");
kill 'TERM', $run->{pid};
(my $status, $out, my $err) = finish($run);
is("$status $err", '3 ', 'SIGTERM: status 3');
like($out, qr/^sweep: 2 of 2 runs.*^sweep: seed=1: loss .*^sweep: seed=2: stopped before its end\n.*^runs .*^sweep: call this again to go on$/ms, 'and the table so far');
run_ok('the third time', sweep(@killed, @long));
is_deeply(losses("$dir/killed/seed=$_"), losses("$dir/whole/seed=$_"), "seed $_: the losses of a run that was not killed") for 1, 2;
is(join(' ', map { log_count("$dir/killed/seed=$_") } 1, 2), '2 2', 'each went on once');

# One that was killed before its first checkpoint: nothing is left but a log.
spew("$dir/killed/seed=2/sweep.json", slurp("$dir/killed/seed=2/sweep.json") =~ s/"status":0/"status":null/r);
run_ok('a run without a checkpoint', sweep(@killed, @long));
is(log_count("$dir/killed/seed=2"), 1, 'begins anew');
is(scalar(() = glob "$dir/killed/unfinished/*/*.jsonl"), 2, 'and what it left lies aside');
is_deeply(losses("$dir/killed/seed=2"), losses("$dir/whole/seed=2"), 'with the same losses');

# ---- runs that end badly ---------------------------------------------------------------------------------------

($status, $out, $err) = run(sweep('--case', 'muon-rate=0.03 window-schedule=3,7', '--case', 'adam-rate=1000 muon-rate=1000', '--case', 'num-heads=5', '--out', "$dir/bad", @command));
is("$status $err", '1 ', 'a run that fails: status 1');
like($out, qr/^sweep: num-heads=5: failed with status 2: train_gpt: error: --model-dim 32 is not a multiple of --num-heads 5$/m, 'says which and why');
like($out, qr/^sweep: adam-rate=1000,muon-rate=1000: diverged, /m, 'a run that diverges');
($first, $second) = @table = rows("$dir/bad/table.csv");
is(scalar @table, 2, 'is a row of the table, one that fails is not');
is("$second->{runs} $second->{diverged} $second->{val_loss}", '1 1 ', 'without a loss');
cmp_ok($first->{val_loss}, '>', 1, 'a value with a comma');
is($first->{standard_error}, '', 'one run has no standard error');
($status, $out) = run(sweep(qw(--grid seed=1,2 --out), "$dir/after", @command, qw(--stop-after 0.001s)));
is($status, 3, 'runs that --stop-after ended: status 3');
like($out, qr/^sweep: seed=2: stopped before its end\n.*^No run is finished\.$/ms, 'no run is finished');

# ---- GPUs ------------------------------------------------------------------------------------------------------

# A program in place of the trainer: it writes down its words, and one validation.
my $program = spew("$dir/trainer", <<'END');
#!/usr/bin/env perl
my ($out) = map { /^--out=(.*)/ } @ARGV;
mkdir "$out/run";
open my $f, '>', "$out/run/x.jsonl";
print $f qq({"event":"validation","step":2,"val_loss":1.5,"train_ms":9,"words":"@ARGV"}\n);
END
chmod 0755, $program;
run_ok('--gpus', sweep(qw(--grid ns=kj,polar,turbo --gpus 3,5 --out), "$dir/gpus", '--', $program, '--seed', 4));
my %words = map { m{/gpus/(.*?)/} => slurp($_) =~ /"words":"(.*?)"/ } glob "'$dir/gpus'/*/run/x.jsonl";
like($words{'ns=kj'}, qr/^--seed 4 --ns=kj --out=\S+ --gpus=3,$/, 'a run has one GPU');
like($words{'ns=polar'}, qr/ --gpus=5,$/, 'the second the other');
like($words{'ns=turbo'}, qr/ --gpus=[35],$/, 'the third the one that is free first');
is(join(' ', map { "$_->{ns}:$_->{val_loss}:$_->{step_ms}" } rows("$dir/gpus/table.csv")), 'kj:1.50000:4.50 polar:1.50000:4.50 turbo:1.50000:4.50', 'and the table has them');

# ---- results that are lost, a folder that cannot be written -------------------------------------------------------

# A program in place of the trainer: ns=empty leaves an empty log until it is told to be good, ns=wall makes a folder of the file that
# sweep will write next, ns=long goes on until it is ended.
$program = spew("$dir/odd", <<'END');
#!/usr/bin/env perl
my ($out, $ns) = map { my $name = $_; map { /^--$name=(.*)/ } @ARGV } qw(out ns);
mkdir "$out/run$$";
open my $f, '>', "$out/run$$/x.jsonl";
if ($ns eq 'wall') { select undef, undef, undef, 0.01 until -e "$out/../ns=long/pid"; mkdir "$out/sweep.json.part" }
if ($ns eq 'long') {
    $SIG{TERM} = sub { open my $e, '>', "$out/ended"; exit 3 };
    open my $p, '>', "$out/pid"; print $p $$; close $p;
    sleep 60;
}
print $f qq({"event":"validation","step":2,"val_loss":1.5,"train_ms":9}\n) if $ns ne 'empty' || -e "$out/../good";
open my $c, '>', "$out/run$$/step_000002.safetensors";
END
chmod 0755, $program;
my @lost = (qw(--grid ns=empty,kj --out), "$dir/lost", '--', $program);
my $lost = qr/^sweep: ns=empty: finished, but no validation is in its logs; its result is lost, and a sweep runs it anew$/m;
($status, $out, $err) = run(sweep(@lost));
is("$status $err", '1 ', 'a run whose log is empty: status 1');
like($out, qr/$lost.*^sweep: ns=kj: loss 1\.5000, .*^1 of 2 runs are finished/ms, 'it counts as failed, and the others go on');
($out) = run_ok('--table of these', sweep('--table', @lost));
like($out, qr/$lost.*^1 of 2 runs are finished/ms, 'has those that are finished');
spew("$dir/lost/good", '');
($out) = run_ok('the next call', sweep(@lost));
like($out, qr/^sweep: 1 of 2 runs.*^sweep: ns=empty: loss 1\.5000, .*^2 of 2 runs are finished/ms, 'runs it anew');
is(scalar(() = glob "$dir/lost/unfinished/run*/step_*"), 1, 'in place of going on from its last checkpoint');
my ($there) = glob "'$dir/lost/ns=empty'/run*";
spew("$there/00000000-0000-4000-8000-000000000000.jsonl", '');
($out) = run_ok('an empty log beside that of the run', sweep(@lost));
like($out, qr/^sweep: 0 of 2 runs.*^2 of 2 runs are finished/ms, 'is passed over');
spew("$dir/lost/ns=kj/sweep.json", '');
refuses('an empty sweep.json', 1, qr{ns=kj/sweep\.json: not written by sweep; remove it to run this anew$}, sweep(@lost));
unlink "$dir/lost/ns=kj/sweep.json";
run_ok('without it', sweep(@lost));

($status, $out, $err) = run(sweep(qw(--grid ns=wall,long --jobs 2 --out), "$dir/wall", '--', $program));
is($status, 1, 'a state that cannot be written: status 1');
like($err, qr{\Asweep: error: \S+/ns=wall/sweep\.json cannot be written: Is a directory\n\z}, 'says so');
ok(-e "$dir/wall/ns=long/ended", 'and ends the other run first');
my $alive = kill 0, slurp("$dir/wall/ns=long/pid");
is(system('flock', '-n', "$dir/wall/lock", 'true') . $alive, '00', 'so that nobody holds the lock');
kill 'KILL', slurp("$dir/wall/ns=long/pid") if $alive;

# ---- what is refused -------------------------------------------------------------------------------------------

refuses('no command', 2, qr/-- COMMAND is missing/, sweep(qw(--grid seed=1)));
refuses('a command without --', 2, qr/train: the command comes after --/, sweep(qw(--grid seed=1 train)));
refuses('a grid without values', 2, qr/--grid seed: NAME=VALUE/, sweep(qw(--grid seed), @command));
refuses('an option that is set here', 2, qr/--grid: out is set here/, sweep(qw(--grid out=a), @command));
refuses('--out in the command', 2, qr/--out is set here; give --out FOLDER before --/, sweep(qw(--grid seed=1), @command, '--out=x'));
refuses('an option twice', 2, qr/--grid seed: is given twice/, sweep(qw(--grid seed=1 --grid seed=2), @command));
refuses('a value twice', 1, qr/the run "seed=1" is there twice/, sweep(qw(--grid seed=1,1 --out), "$dir/twice", @command));
refuses('--jobs 0', 2, qr/--jobs 0: 1 at least/, sweep(qw(--jobs 0), @command));
refuses('--gpus x', 2, qr/--gpus x: a list like 0,1/, sweep(qw(--gpus x), @command));
my $lock = start('flock', "$dir/grid/lock", 'sleep', 60);
sleep 0.01 until system('flock', '-n', "$dir/grid/lock", 'true');
refuses('two at once', 1, qr/grid: another sweep, or a run of one, is at work here/, sweep(@grid, @command));
kill 'KILL', -$lock->{pid};
finish($lock);
done_testing;
