#!/usr/bin/env perl
# A run that stops and goes on ends in the same bits as one that never stopped: at even and odd steps, across shards and window
# changes, after signals, and after SIGKILL at random moments of saving.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
use Time::HiRes qw(sleep time);

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
# Shards of about six steps each, so that 20 steps cross several boundaries.
write_shard("train_$_.bin", documents(6000, 10 + $_)) for 1 .. 5;
write_shard('val.bin', documents(700, 2));

run_ok('20 steps at once', $trainer, @tiny, '--out', "$dir/whole");
my $whole = checkpoint("$dir/whole", 20);
my (%shard, %window);

# 5, 6: around a window change; 7, 8: in the second shard; 9 odd, 10 even; 16: the extension begins; 19: the last step.
for my $stop (1, 5, 6, 7, 8, 9, 10, 16, 19) {
    run_ok("stop at $stop", $trainer, @tiny, '--out', "$dir/s$stop", '--stop-at', $stop);
    my $checkpoint = checkpoint("$dir/s$stop", $stop);
    my ($tensors, $metadata) = tensors($checkpoint);
    $shard{(split ' ', $metadata->{'data.position'})[1]} = $window{$metadata->{'rope.window'}} = 1;
    is(exists $tensors->{'lm_head.weight.grad'} ? 1 : 0, $stop % 2, "an odd number of steps leaves a gradient: $stop");
    run_ok("resume at $stop", $trainer, @tiny, '--out', "$dir/s$stop", '--resume', $stop % 2 ? $checkpoint : "$dir/s$stop");
    is(same_state($whole, checkpoint("$dir/s$stop", 20)), '', "$stop + " . (20 - $stop) . ' steps end in the same bits as 20');
    is_deeply(losses("$dir/s$stop"), losses("$dir/whole"), 'with the same losses on the way');
}
ok(keys %shard >= 3, 'the stops lay in several shards: ' . join ' ', sort keys %shard);
is_deeply([sort { $a <=> $b } keys %window], [3, 7, 11, 13], 'and in all windows of the schedule');

# FP8: codes and scales of the forward follow from the weights and are no state; those of both ways are.
for my $mlp (qw(fp8 fp8-backward)) {
    my @fp8 = (@tiny, qw(--head fp8 --mlp), $mlp);
    run_ok($mlp, $trainer, @fp8, '--out', "$dir/$mlp");
    for my $stop (7, 10) {
        run_ok("$mlp: stop at $stop", $trainer, @fp8, '--out', "$dir/${mlp}_$stop", '--stop-at', $stop);
        run_ok("$mlp: resume at $stop", $trainer, @tiny, qw(--head fp8 --out), "$dir/${mlp}_$stop", '--resume', "$dir/${mlp}_$stop"); # --mlp as it was
        is(same_state(map { checkpoint("$dir/$_", 20) } $mlp, "${mlp}_$stop"), '', "$mlp: $stop + " . (20 - $stop) . ' steps end in the same bits as 20');
    }
}

# A checkpoint of the last step has nothing left to do, and says so by ending well, in one line and without a log.
for my $ranks (1, 2) {
    my @before = map { $_ => slurp($_) } glob "'$dir/s1'/*/*";
    my ($out, $err) = run_ok("resume at the end, $ranks ranks", $trainer, '--resume', "$dir/s1", '--ranks', $ranks);
    is($out, '', 'nothing is trained');
    like($err, qr{\Atrain_gpt(?: \(rank 0\))?: note: \Q$dir\E/s1/.*/step_000020\.safetensors: this run is finished, all 20 steps and the last validation are done; .*\n\z}, 'one line says that it is finished');
    is_deeply([map { $_ => slurp($_) } glob "'$dir/s1'/*/*"], \@before, 'and no file of it is changed or made');
}
{
    my ($out) = run_ok('with data and a prompt', $trainer, @tiny, '--out', "$dir/s1", '--resume', "$dir/s1", qw(--sample abc --num-tokens 5));
    like($out, qr/\A\nabc[^\n]*\n\z/, 'the text is all');
}
# Killed before its last validation, it has that left.
{
    is(unlink(grep { slurp($_) =~ m{^step:20/20 val_loss:}m } logs("$dir/s19", 'txt')), 1, 'the log of its end is removed');
    my ($out, $err) = run_ok('resume before the last validation', $trainer, '--resume', "$dir/s19");
    like($out, qr{^step:20/20 val_loss:}m, 'which is made');
    is($err, '', 'without a note');
    ($out, $err) = run_ok('once more', $trainer, '--resume', "$dir/s19");
    like($err, qr/ this run is finished, /, 'and the run is finished');
}

# Two runs in one folder: the highest step is taken, which may be the older run's.
{
    my ($old, $new) = map { checkpoint("$dir/s10", $_) } 20, 10;
    utime undef, undef, $new;
    utime time - 60, time - 60, $old;
    my ($status, $out, $err) = run($trainer, @tiny, '--out', "$dir/again", '--resume', "$dir/s10");
    is($status, 0, 'a folder with a younger checkpoint of a lower step') or diag $err;
    like($err, qr/note: .*: step 20 is taken, the last one; step 10 was written after it/, 'a note says so');
    like($err, qr{^\S+ note: .*/s10/.*/step_000020\.safetensors: this run is finished, }m, 'and what it holds');
    ok(!logs("$dir/again", 'txt'), 'there is no log elsewhere');
}

# The test can fail: a gradient that is lost on the way shows.
my $crippled = rewrite(checkpoint("$dir/s9", 9), "$dir/crippled.safetensors", sub {
    my ($name, $tensor) = @_;
    $tensor->{bytes} = "\0" x length $tensor->{bytes} if $name eq 'lm_head.weight.grad';
    return 1;
});
run_ok('without the left-over gradient', $trainer, @tiny, '--out', "$dir/crippled", '--resume', $crippled);
isnt(same_state($whole, checkpoint("$dir/crippled", 20)), '', 'a lost left-over gradient is noticed');

# ---- signals -----------------------------------------------------------------------------------------------------------

sub steps_done { my ($folder) = @_; return scalar(() = log_text($folder) =~ /^step:\d+\/20 train_time/mg) }

sub wait_for_step {
    my ($folder, $step) = @_;
    my $end = time + 30;
    sleep 0.002 while steps_done($folder) < $step && time < $end;
}

my $answer = qr/train_gpt(?: \(rank 0\))?: note: interrupted: this step will be finished and saved; a second request ends at once, without saving\n/;

for my $signal (qw(INT TERM HUP)) {
    my $folder = "$dir/$signal";
    my $run = start($trainer, @tiny, '--out', $folder);
    wait_for_step($folder, 3);
    kill $signal, $run->{pid};
    my ($status, $out, $err) = finish($run);
    is($status, 3, "SIG$signal: exit status 3") or diag $err;
    my ($done, $saved) = (steps_done($folder), newest($folder) // '');
    ok($done >= 3 && $done < 20 && $saved eq checkpoint("$folder", $done), "it finished step $done and saved it");
    like($err, qr/\A$answer\z/, 'the request is acknowledged at once');
    like($out, qr/^interrupted after step $done, saving checkpoint$/m, 'and once more before the save');
    run_ok('resume', $trainer, @tiny, '--out', $folder, '--resume', $folder);
    is(same_state($whole, checkpoint("$folder", 20)), '', 'and went on to the same bits');
}

# timeout(1) and batch systems signal the process and then its group: one request, and not the second that ends without saving.
{
    my $folder = "$dir/twice";
    my $run = start($trainer, @tiny, '--out', $folder);
    wait_for_step($folder, 3);
    for (1 .. 5) { kill 'TERM', $run->{pid}; sleep 0.003 }
    my ($status, undef, $err) = finish($run);
    like("$status $err", qr/\A3 $answer\z/, 'signals in quick succession: exit status 3, one answer');
    my $done = steps_done($folder);
    is(newest($folder), checkpoint("$folder", $done), "step $done is saved");

    my @slow = (@tiny, '--resume', newest($folder), '--eval-only', '--val-tokens', 512 * 200, '--val-files', write_shard('long.bin', documents(512 * 200 + 1, 3)));
    $run = start($trainer, @slow);
    wait_for_signal_set($run->{pid}, SigCgt => 15);
    kill 'TERM', $run->{pid};
    ($status, undef, $err) = finish($run);
    is($status, 3, 'where nothing is to be saved, one signal is enough') or diag $err;
    unlike($err, qr/interrupted/, 'and there is no answer');

    # Behind the last step, too. Its validation takes long enough.
    $run = start($trainer, @tiny, '--out', "$dir/last", '--val-every', 0, '--resume', checkpoint("$dir/s19", 19), @slow[-4 .. -1]);
    my $end = time + 30;
    sleep 0.002 while slurp("$run->{out}.1") !~ /^saved \S+step_000020/m && time < $end; # no file is written between this line and the validation
    kill 'TERM', $run->{pid};
    ($status, undef, $err) = finish($run);
    is("$status $err", '0 ', 'nor in the last validation, which is made');

    $run = start('nohup', $trainer, @tiny, '--out', "$dir/nohup");
    wait_for_step("$dir/nohup", 3);
    kill 'HUP', $run->{pid};
    ($status, undef, $err) = finish($run);
    is("$status $err", '0 ', 'under nohup a closed terminal stops nothing');
}

# ---- older than an option ----------------------------------------------------------------------------------------------

{
    my $older = rewrite(checkpoint("$dir/s9", 9), "$dir/older.safetensors", sub { delete $_[2]{'option.group-micro-batches'}; 1 });
    my @go_on = ($trainer, @tiny, '--resume', $older, '--out', "$dir/older");
    run_ok('a checkpoint that does not know an option goes on with its default', @go_on);
    is(same_state($whole, newest("$dir/older")), '', 'to the same bits');
    refuses('and with nothing else', 1, qr/made with --group-micro-batches 0, but this run has 4/, @go_on, '--group-micro-batches', 4);
}

# ---- killed while saving -----------------------------------------------------------------------------------------------

# A checkpoint after every step. Each life saves once more and is killed as soon as the next save's temporary file shows.
my @saving = (@tiny, '--out', "$dir/killed", '--checkpoint-every', 1, '--val-every', 0);
sub saved { return my @there = checkpoints("$dir/killed") }
srand 20;
my ($kills, $finished, $half_written) = (0, 0, 0);
while ($kills < 30 && !$finished) {
    my @resume = newest("$dir/killed") ? ('--resume', "$dir/killed") : ();
    my $before = newest("$dir/killed") // '';
    my $run = start($trainer, @saving, @resume);
    my ($saved, $end) = (scalar(saved()), time + 20);
    sleep 0.001 while saved() <= $saved && time < $end;
    until ((() = glob "$dir/killed/*/*.tmp.*") || -e checkpoint("$dir/killed", 20) || time > $end) { }
    kill 'KILL', $run->{pid};
    my ($status, $out, $err) = finish($run);
    $kills += $status eq 'signal 9';
    $finished = $status eq '0';
    if ($status ne 'signal 9' && !$finished) {
        fail("attempt $kills after $before: status $status, $err");
        last;
    }
    $half_written += grep { /\.tmp\.\d+$/ } glob "$dir/killed/*/*";
    for my $checkpoint (saved()) {
        next if eval { tensors($checkpoint); 1 };
        fail("a complete name on an incomplete file: $checkpoint");
    }
}
cmp_ok($kills, '>', 3, "killed $kills times; $half_written times a half-written file lay there");
if (!$finished) { run_ok('the rest', $trainer, @saving, newest("$dir/killed") ? ('--resume', "$dir/killed") : ()) }
is(same_state($whole, checkpoint("$dir/killed", 20)), '', 'the newest checkpoint always went on, to the same bits');
is(scalar(glob "$dir/killed/*/step_000020.safetensors.tmp.*"), undef, 'and no half-written last one is left');
done_testing;
