#!/usr/bin/env perl
# Whole runs of the trainer: its log to the character, the same bits for the same seed and any number of threads, weights in and
# out, validation and samples from a checkpoint, and every Newton-Schulz variant.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../../scripts";
use File::Basename qw(basename);
use JSON::PP ();
use TrainTest;
use RunLog;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));

# ---- the log -----------------------------------------------------------------------------------------------------------

my ($out) = run_ok('20 steps', $trainer, @tiny, '--out', "$dir/a", '--save-init', "$dir/init.safetensors");
my ($log) = logs("$dir/a", 'txt');
like($log, qr{/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.txt$}, 'the log is named by a UUID of version 4');
my @parts = split /^={100}\n/m, slurp($log), -1;
is(scalar @parts, 3, 'two lines of 100 =');
like($parts[0], qr/int main\(int argc, char \*\*argv\).*newton_schulz/s, 'the source stands first');
like($parts[1], qr/^ranks: 1 \(/m, 'the head says how many ranks there are');
like($parts[1], qr/^git commit: .*^command line: .*train_gpt_cpu.* --preset tiny .*nvidia-smi/ms, 'then versions, command line and nvidia-smi');

my $time = qr/train_time:(\d+)ms step_avg:(\d+\.\d\d)ms/;
my @expected = (qr{^step:0/20 val_loss:\d+\.\d{4} $time\n});
for my $step (1 .. 20) {
    push @expected, qr{^step:$step/20 $time\n};
    push @expected, qr{^step:$step/20 val_loss:\d+\.\d{4} $time\n} if $step % 5 == 0;
}
push @expected, qr{^validation data: sha256 [0-9a-f]{64}, vocabulary of 257 ids, 512 tokens predicted\n};
push @expected, qr{^peak memory allocated: \d+ MiB reserved: \d+ MiB\n};
my @lines = split /^/m, $parts[2];
is(scalar @lines, scalar @expected, 'one line for each step and validation, and the memory');
is(scalar(grep { ($lines[$_] // '') !~ /$expected[$_]\z/ } 0 .. $#expected), 0, 'every line to the character') or diag $parts[2];
my $parsed = eval { RunLog::parse($log) };
ok($parsed && RunLog::unfinished($parsed) eq '', 'the record tool reads it as a complete run') or diag $@;
my $val = val_losses("$dir/a");
is($val->{0}, '5.9506', 'the first loss is ln 384: the head is zero, and padding columns count');
cmp_ok($val->{20}, '<', 4, "the validation loss falls, to $val->{20}");
is(scalar keys %{losses("$dir/a")}, 20, 'the JSON lines hold the loss of every step');
like($out, qr{^step 20/20  loss .*  lr 0\.00\d+  .*tokens/s  eta 0:00$}m, 'the console shows loss, learning rate, speed, remaining time');
like($out, qr/^optimizer: NorMuon, Newton-Schulz polar, 5 iterations$/m, 'and the optimizer');
unlike($out, qr/^memory: |^Newton-Schulz: /m, 'but no details');
like(log_text("$dir/a", 'jsonl'), qr/"memory: [^"]* MiB/, 'which the JSON lines hold');

# ---- the same bits -----------------------------------------------------------------------------------------------------

my $final = checkpoint("$dir/a", 20);
run_ok('the same again', $trainer, @tiny, '--out', "$dir/b");
is(same_state($final, checkpoint("$dir/b", 20)), '', 'same seed: the same final state, bit for bit');
is_deeply(losses("$dir/b"), losses("$dir/a"), 'and the same losses');
{
    local $ENV{OMP_NUM_THREADS};
    delete $ENV{OMP_NUM_THREADS};
    run_ok('two threads', $trainer, @tiny, '--out', "$dir/threads", '--threads', 2);
    like(log_text("$dir/threads"), qr/OpenMP \d+, 2 threads/, '--threads 2 is heeded') if log_text("$dir/threads") !~ /OpenMP absent/;
}
is(same_state($final, checkpoint("$dir/threads", 20)), '', 'one thread and two: the same bits');
run_ok('another seed', $trainer, @tiny, '--out', "$dir/seed", '--seed', 7, '--stop-at', 6);
my ($one, $other) = map { losses("$dir/$_") } qw(a seed);
is($other->{1}, $one->{1}, 'another seed: at step 0 the zero head hides it');
isnt($other->{6}, $one->{6}, 'and then the losses differ');

# ---- weights in and out ------------------------------------------------------------------------------------------------

run_ok('--init-from', $trainer, @tiny, '--out', "$dir/c", '--init-from', "$dir/init.safetensors", '--seed', 7, '--save-init', "$dir/again.safetensors");
my ($init, $meta) = tensors("$dir/init.safetensors");
my ($again) = tensors("$dir/again.safetensors");
is_deeply($again, $init, '--init-from and --save-init: the same tensors, bit for bit');
my ($from_init, $from_seed) = map { (tensors($_))[0] } checkpoint("$dir/c", 20), $final;
is_deeply($from_init, $from_seed, 'training from the saved weights gives the bits of the run that saved them');
is($meta->{'option.seed'}, 1337, 'the file says which options made it');
is_deeply([map { $init->{$_}{dtype} } qw(embed.weight smear_gate.weight blocks.1.mlp.c_fc scalars)], [qw(BF16 BF16 F32 F32)], 'dtypes of the public layout');
is_deeply($init->{scalars}{shape}, [64], '64 scalars in one dimension');

# The same weights as another program would write them.
sub variant { my ($name, $change) = @_; return rewrite("$dir/init.safetensors", "$dir/$name.safetensors", $change) }
sub first_losses { # of a run from this file, as text
    my ($file, $what) = @_;
    run_ok($what, $trainer, @tiny, '--out', "$file.run", '--init-from', $file, '--stop-at', 4);
    return join ' ', map { losses("$file.run")->{$_} } 1 .. 4;
}
my $known = join ' ', map { $one->{$_} } 1 .. 4;
my $wide = variant('f32', sub {
    my (undef, $t) = @_;
    @$t{qw(bytes dtype)} = (pack('f<*', @{floats($t)}), 'F32');
});
is(first_losses($wide, 'tables as F32'), $known, 'tables as F32 give the same run');
for my $count (62, 63) {
    my $file = variant("scalars$count", sub {
        my ($name, $t) = @_;
        ($t->{bytes}, $t->{shape}) = (substr($t->{bytes}, 0, 4 * $count), [$count]) if $name eq 'scalars';
        return 1;
    });
    is(first_losses($file, "$count scalars in one dimension"), $known, "$count scalars give the same run");
}

# As a model under torch.compile names its tensors.
sub prefixed {
    my ($tensors) = tensors("$dir/init.safetensors");
    my $file = slurp("$dir/init.safetensors");
    my $length = unpack 'Q<', $file;
    my %header = map { my $t = $tensors->{$_}; ("_orig_mod.$_",
        {map { $_ => $t->{$_} } qw(dtype shape data_offsets)}) } keys %$tensors;
    my $json = JSON::PP->new->canonical->encode(\%header);
    return spew("$dir/prefixed.safetensors", pack('Q<', length $json) . $json . substr $file, 8 + $length);
}
is(first_losses(prefixed(), 'names with _orig_mod.'), $known, 'names with _orig_mod. give the same run');

# Without the padding of the scalars.
run_ok('--save-scalars 62', $trainer, @tiny, '--out', "$dir/c62", '--save-init', "$dir/init62.safetensors",
    qw(--save-scalars 62 --stop-at 4));
my ($short) = tensors("$dir/init62.safetensors");
is_deeply($short->{scalars}{shape}, [62], '62 scalars are saved');
is($short->{scalars}{bytes}, substr($init->{scalars}{bytes}, 0, 248), 'the first ones');
is(join(' ', grep { $short->{$_}{bytes} ne $init->{$_}{bytes} } sort keys %$init), 'scalars',
    'all else as ever');
my ($stopped) = newest("$dir/c62");
is_deeply((tensors($stopped))[0]{scalars}{shape}, [62], 'in checkpoints, too');
run_ok('from which training goes on', $trainer, @tiny, '--resume', $stopped, '--out', "$dir/c62");
my ($on) = tensors(newest("$dir/c62"));
is(join(' ', grep { $on->{$_}{bytes} ne $from_seed->{$_}{bytes} } sort keys %$from_seed), 'scalars',
    'to the same bits');
is($on->{scalars}{bytes}, substr($from_seed->{scalars}{bytes}, 0, 248), 'in the scalars that are used, too');

# ---- validation and samples --------------------------------------------------------------------------------------------

($out) = run_ok('--eval-only --resume', $trainer, @tiny, '--eval-only', '--resume', "$dir/a");
is($out, "val_loss:$val->{20}\n", "--eval-only of the last checkpoint is the run's last validation");
($out) = run_ok('--eval-only --init-from', $trainer, @tiny, '--eval-only', '--init-from', $final);
is($out, "val_loss:$val->{20}\n", 'and so are its weights alone, with the windows of the end');
run_ok('stopped', $trainer, @tiny, '--out', "$dir/ten", '--stop-at', 10);
($out) = run_ok('--eval-only in the middle', $trainer, @tiny, '--eval-only', '--resume', "$dir/ten");
is($out, "val_loss:$val->{10}\n", "--eval-only in the middle is that step's validation");

my @size = @tiny[0 .. 17]; # without data
my @sample = ($trainer, @size, '--sample', 'abc', '--num-tokens', 40);
my ($first) = run_ok('a sample', @sample, '--resume', "$dir/a");
like($first, qr/^\nabc.+\n\z/s, 'it continues the prompt');
is((run_ok('again', @sample, '--resume', "$dir/a"))[0], $first, 'deterministic');
is((run_ok('from weights', @sample, '--init-from', $final, '--vocab-size', 257))[0], $first, 'from the weights alone: the same text');
isnt((run_ok('another seed', @sample, '--resume', "$dir/a", '--seed', 5))[0], $first, 'another seed draws other text');
my ($likeliest) = run_ok('temperature 0', @sample, '--resume', "$dir/a", '--temperature', 0);
like($likeliest, qr/^\nabc[a-h]*\n\z/, 'the likeliest bytes are those of the training text: ' . ($likeliest =~ s/\n//gr));
is((run_ok('another seed', @sample, '--resume', "$dir/a", '--temperature', 0, '--seed', 5))[0], $likeliest, '--temperature 0 does not draw');
is((run_ok('top-k 1', @sample, '--resume', "$dir/a", '--top-k', 1))[0], $likeliest, '--top-k 1 is the same');

# ---- every variant trains ----------------------------------------------------------------------------------------------

for my $ns (qw(kj you gram turbo turbo-gram)) {
    run_ok("--ns $ns", $trainer, @tiny, '--out', "$dir/$ns", '--ns', $ns, '--val-every', 0);
    my $loss = val_losses("$dir/$ns")->{20};
    cmp_ok($loss, '<', $val->{0} - 1, "--ns $ns learns: $loss");
    isnt(losses("$dir/$ns")->{20}, $one->{20}, "--ns $ns is not polar");
}
run_ok('FP8 head', $trainer, @tiny, '--out', "$dir/fp8", '--head', 'fp8');
cmp_ok(abs(val_losses("$dir/fp8")->{20} - $val->{20}), '<', 0.1, 'the FP8 head learns about the same');
run_ok('FP8 MLP', $trainer, @tiny, '--out', "$dir/fp8_mlp", '--mlp', 'fp8');
cmp_ok(abs(val_losses("$dir/fp8_mlp")->{20} - $val->{20}), '<', 0.1, 'the FP8 MLP learns about the same');
isnt(losses("$dir/fp8_mlp")->{20}, $one->{20}, 'and is not that of bf16');
is(val_losses("$dir/fp8_mlp")->{0}, $val->{0}, 'whose validation it has');
run_ok('FP8 MLP both ways', $trainer, @tiny, '--out', "$dir/fp8_both", '--mlp', 'fp8-backward');
cmp_ok(abs(val_losses("$dir/fp8_both")->{20} - $val->{20}), '<', 0.1, 'the FP8 MLP both ways learns about the same');
isnt(losses("$dir/fp8_both")->{20}, losses("$dir/fp8_mlp")->{20}, 'and is not that of the forward alone');

# A step of 2e13 FLOPs: the line is there before it, and the run is not waited for.
write_shard('long_1.bin', documents(140000, 3));
my @large = ($trainer, @tiny, qw(--model-dim 512 --mlp-dim 2048 --num-heads 4 --micro-batches 64 --micro-batch-tokens 1024 --val-tokens 65536),
    '--train-files', "$dir/long_1.bin", '--val-files', "$dir/long_1.bin", '--out');
my $large = start(@large, "$dir/early");
my $end = time + 60;
select undef, undef, undef, 0.02 while !-s "$large->{out}.2" && time < $end;
is(slurp("/proc/$large->{pid}/comm"), basename($trainer) . "\n", 'ps and top show the name of the program');
kill 'TERM', $large->{pid};
my ($ended, undef, $early) = finish($large, 60);
ok($ended eq '3' && $early !~ /interrupted/, 'a signal before the first step ends it at once: there is nothing to save') or diag "$ended $early";
$large = start(@large, "$dir/large");
$end = time + 60;
select undef, undef, undef, 0.02 while slurp("$large->{out}.1") !~ /^start-up: /m && time < $end;
sleep 2; # what follows that line takes milliseconds, and the step half a minute
kill 'TERM', $large->{pid};
$end = time + 10;
select undef, undef, undef, 0.02 while slurp("$large->{out}.2") !~ /interrupted/ && time < $end;
kill 'KILL', $large->{pid};
my ($too_large, $answer, @more) = split /\n/, (finish($large))[2];
like($too_large, qr/\Atrain_gpt: note: \d+\.\d million parameters and 65536 tokens a step are for a GPU: a step will take very long on the CPU; /, 'a step that is too large for a CPU has a line');
ok($answer =~ /\Atrain_gpt: note: interrupted: this step will be finished and saved; / && !@more && !keys %{losses("$dir/large")}, 'and a signal an answer before it ends');
is((run($trainer, @tiny, qw(--stop-at 1 --out), "$dir/small"))[2], '', 'and a small one none');
# ---- a schedule without an end -----------------------------------------------------------------------------------------

# What is counted over all steps is counted by stage: the start takes no minutes.
for my $ranks (1, 2) {
    my ($status, undef, $err) = finish(start($trainer, @tiny, qw(--repeat --num-scheduled 900000000 --stop-at 2 --ranks), $ranks, '--out', "$dir/endless$ranks"), 30);
    is("$status $err", '0 ', "900 million steps begin at once, $ranks ranks");
}
my ($status, undef, $none) = finish(start($trainer, '--init-from', newest("$dir/endless1"), @tiny[0 .. 13], qw(--num-scheduled 900000000 --sample abc --num-tokens 3)), 30);
is($status, 0, 'and weights are used under their schedule');
done_testing;
