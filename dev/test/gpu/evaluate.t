#!/usr/bin/env perl
# Evaluations on the GPU: losses of single texts beside the CPU programs, on every path; in training they change nothing.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..", "$FindBin::Bin/../../../scripts";
use EvalMaterial qw(write_items);
use JSON::PP ();
use TrainTest;
use Test::More;

my ($cpu, $gpu) = ("$root/train_gpt_cpu", "$root/train_gpt");
$ENV{OMP_NUM_THREADS} = `nproc` > 8 ? 8 : `nproc` + 0;
write_items($dir);
my @tasks = qw(hellaswag lambada text);
my @files = map { ('--eval', $_) } "hellaswag=$dir/hellaswag.jsonl", "lambada=$dir/lambada.jsonl", "text=$dir/text.txt";
write_shard('train_1.bin', documents(30000, 1));
write_shard('val.bin', documents(5000, 2));
my @small = (qw(--preset tiny --model-dim 256 --num-heads 2 --mlp-dim 512 --micro-batch-tokens 512 --num-scheduled 16 --num-extension 4
    --adam-rate 0.001 --muon-rate 0.003 --val-tokens 1024 --val-every 10 --head bf16 --repeat), '--train-files', "$dir/train_*.bin", '--val-files',
    "$dir/val.bin");

# Losses of --eval-items by task, in the order of the texts.
sub items {
    my ($name) = @_;
    my %losses;
    for (map { JSON::PP::decode_json($_) } split /\n/, slurp("$dir/$name.jsonl")) { push @{$losses{$_->{task}}}, @{$_->{losses}} }
    return \%losses;
}

# The root of the mean square of relative differences.
sub difference {
    my ($got, $want) = @_;
    return 'inf' if !$got || @$got != @$want;
    my $squares = 0;
    $squares += (($got->[$_] - $want->[$_]) / $want->[$_])**2 for 0 .. $#$got;
    return sqrt($squares / @$got);
}

# ---- beside the CPU ----------------------------------------------------------------------------------------

# Weights of a trained model, so that the streams of all layers count.
run_ok('a model', $cpu, @small, '--out', "$dir/model");
my @given = ('--resume', newest("$dir/model"), @files);
my @runs = ([exact => $exact], [bf16 => $cpu], [gpu => $gpu], [portable => $gpu, '--portable']);
run_together(map { my ($name, $program, @options) = @$_; ["evaluation, $name", $program, @given, @options, '--eval-items', "$dir/$name.jsonl"] } @runs);
my %losses = map { $_->[0] => items($_->[0]) } @runs;
for my $task (@tasks) {
    my $rounding = difference($losses{bf16}{$task}, $losses{exact}{$task});
    cmp_ok($rounding, '>', 0, "$task: bf16 on the CPU is not fp32 ($rounding)");
    for my $name (qw(gpu portable)) {
        my $error = difference($losses{$name}{$task}, $losses{exact}{$task});
        cmp_ok($error, '<=', 2 * $rounding, "$task, $name: the error is at most twice that of bf16 on the CPU: $error");
    }
}

# ---- several ranks ------------------------------------------------------------------------------------------

# Each has a share of the items; on one GPU one_gpu_nccl.cu stands in for NCCL.
my $stand_in = $ENV{ONE_GPU_NCCL} // "$root/build/one_gpu";
my $why = slurp($gpu) !~ /ncclReduceScatter/ ? 'built without NCCL' : @gpus == 1 && !-e "$stand_in/libnccl.so.2" ? 'no stand-in for NCCL' : '';
SKIP: {
    skip $why, 1 + @tasks if $why;
    local $ENV{LD_LIBRARY_PATH} = join ':', $stand_in, $ENV{LD_LIBRARY_PATH} // () if @gpus == 1;
    local $ENV{CUDA_VISIBLE_DEVICES} = join ',', @gpus;
    run_ok('evaluation on two ranks', $gpu, @given, '--gpus', @gpus == 1 ? '0,0' : '0,1', '--eval-items', "$dir/ranks.jsonl");
    my $ranks = items('ranks');
    for my $task (@tasks) {
        my ($rounding, $error) = map { difference($_->{$task}, $losses{exact}{$task}) } $losses{bf16}, $ranks;
        cmp_ok($error, '<=', 2 * $rounding, "$task: in the order of the items, as near to fp32 as on one: $error");
    }
}

# ---- in training -------------------------------------------------------------------------------------------

my @train = ($gpu, @small, qw(--deterministic --checkpoint-every 10));
run_together(['training with evaluations', @train, @files, qw(--eval-every 10 --out), "$dir/with"],
    ['and without', @train, '--out', "$dir/without"]);
for my $step (10, 20) {
    my @other = grep { !/^option\.eval/ } split / /, same_state(map { checkpoint("$dir/$_", $step) } qw(with without));
    is("@other", '', "step $step: evaluations change no bit");
}
my @events = grep { $_->{event} eq 'evaluation' } map { JSON::PP::decode_json($_) } split /\n/, log_text("$dir/with", 'jsonl');
is(join(' ', map {"$_->{step}:$_->{task}"} @events), join(' ', map { my $at = $_; map {"$at:$_"} @tasks } 10, 20), 'steps and tasks in the log');
done_testing;
