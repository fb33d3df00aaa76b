#!/usr/bin/env perl
# With --deterministic a run on the GPU that stops and goes on ends in the same bits as one that never stopped, on every path, at
# even and odd steps, and after a signal, although a step is always queued ahead of the one that is reported.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;
use Time::HiRes qw(sleep time);

my $gpu = "$root/train_gpt";
write_shard("train_$_.bin", documents(6000, 10 + $_)) for 1 .. 5;
write_shard('val.bin', documents(700, 2));
# Heads of 128, which Hopper has kernels for, with texts and windows of several tiles of 128 keys, each of which adds to dq.
my @long = map { (256, grep { $_ != 256 } documents($_, $_)) } 900, 300, 1500, 77, 640, 2000, 1, 1200;
write_shard("long_$_.bin", (@long) x 6) for 1 .. 5;
my @wide = (qw(--head bf16 --model-dim 256 --num-heads 2 --block-size 64 --micro-batch-tokens 4096 --micro-batches 2), '--train-files', "$dir/long_*.bin");
my %options = (wide => \@wide, bf16 => [qw(--head bf16)], fp8 => [qw(--head fp8 --mlp fp8 --model-dim 64 --micro-batch-tokens 80 --val-tokens 640)],
    both => [qw(--head fp8 --mlp fp8-backward --model-dim 64 --micro-batch-tokens 80 --val-tokens 640)], portable => [qw(--head fp8 --mlp fp8 --portable)]);
my %stops = (bf16 => [1, 2, 5, 6, 7], wide => [1, 6, 7], fp8 => [6, 7], both => [6, 7], portable => [6, 7]);

sub command { # of a run to step 12 and its folder
    my ($name, $folder, @more) = @_;
    return ($gpu, @tiny, @{$options{$name}}, qw(--deterministic --stop-at 12), @more, '--out', "$dir/$folder");
}

# The bytes of the tensors as they lie in the file, and what its header says about them.
sub contents {
    my ($tensors) = tensors($_[0]);
    return join '', map { "$_ @{$tensors->{$_}{shape}} @{$tensors->{$_}{data_offsets}}\n$tensors->{$_}{bytes}" } sort keys %$tensors;
}

my @parts = map { my $name = $_; map { [$name, $_, "$name$_"] } @{$stops{$name}} } sort keys %stops;
run_together((map { ["$_: 12 steps", command($_, $_)] } sort keys %options), (map { ["$_: the same again", command($_, "again_$_")] } qw(bf16 wide)),
    map { my ($name, $stop, $folder) = @$_; ["$name: stop at $stop", command($name, $folder, '--stop-at', $stop)] } @parts);
run_together(map { my ($name, $stop, $folder) = @$_; ["$name: resume at $stop", command($name, $folder, '--resume', "$dir/$folder")] } @parts);
for (@parts) {
    my ($name, $stop, $folder) = @$_;
    my ($whole, $end) = map { checkpoint("$dir/$_", 12) } $name, $folder;
    is(same_state($whole, $end), '', "$name: $stop + " . (12 - $stop) . ' steps end in the state of 12');
    ok(contents($whole) eq contents($end), 'tensors byte for byte the same in the file');
    is_deeply(losses("$dir/$folder"), losses("$dir/$name"), 'with the same losses on the way');
}

# The small networks of 2026 over their stages, which begin at steps 2, 3 and 5; embedding and head are untied after step 3. In FP8
# the scales of record 89 follow the micro-batch before, those of 90 the step before.
write_shard('val_2026.bin', documents(3000, 2));
my @files = ('--train-files', "$dir/train_*.bin", '--val-files', "$dir/val_2026.bin");
my @six = qw(--preset toy-2026 --model-dim 768 --num-heads 6);
my %records = (89 => [@six, qw(--mlp fp8 --head fp8)], 90 => [qw(--preset toy-2026-08 --model-dim 256 --num-heads 2 --mlp fp8-backward --qkv fp8 --head fp8)], bf16 => [@six, qw(--mlp bf16)]);
my @record_parts = map { my $name = $_; map { [$name, $_, "record_$name$_"] } 1 .. ($name eq 'bf16' ? 5 : 7) } sort keys %records;

sub record_command { # of a run of 8 steps and its folder
    my ($name, $folder, @more) = @_;
    return ($gpu, @{$records{$name}}, qw(--mlp-dim 512 --micro-batches 4 --repeat --deterministic --val-every 4), @files, @more, '--out', "$dir/$folder");
}

run_together((map { ["record $_: 8 steps", record_command($_, "record_$_")] } sort keys %records),
    map { my ($name, $stop, $folder) = @$_; ["record $name: stop at $stop", record_command($name, $folder, '--stop-at', $stop)] } @record_parts);
run_together(map { my ($name, $stop, $folder) = @$_; ["record $name: resume at $stop", record_command($name, $folder, '--resume', checkpoint("$dir/$folder", $stop))] } @record_parts);
for (@record_parts) {
    my ($name, $stop, $folder) = @$_;
    my ($whole, $end) = map { checkpoint("$dir/$_", 8) } "record_$name", $folder;
    is(same_state($whole, $end), '', "record $name: $stop + " . (8 - $stop) . ' steps end in the state of 8');
    ok(contents($whole) eq contents($end), 'tensors byte for byte the same in the file');
}
my ($tensors) = tensors(checkpoint("$dir/record_89", 8));
like(join(' ', sort keys %$tensors), qr/fp8\.mlp_activation\.3\.scale .*fp8\.mlp_down\.next_scale/, 'a checkpoint of record 89 has its scales');

# A run's options as it wrote them: once more, and the state is the same.
my ($file) = glob "'$dir/bf16'/*/run.toml";
run_ok('--config run.toml', $gpu, '--config', $file // 'none', '--out', "$dir/repeated");
is(same_state(map { checkpoint("$dir/$_", 12) } qw(bf16 repeated)), '', 'repeats the run');
is(same_state(map { checkpoint("$dir/$_", 12) } $_, "again_$_"), '', "$_: twice the same run gives the same bits") for qw(bf16 wide);

# ---- a signal ----------------------------------------------------------------------------------------------------------

my @endless = ($gpu, @tiny, qw(--head bf16 --deterministic --repeat --val-every 0 --num-scheduled 20000));
my $run = start(@endless, '--out', "$dir/term");
my $end = time + 60;
sleep 0.01 while (() = log_text("$dir/term") =~ /^step:\d+\/\d+ train_time/mg) < 10 && time < $end;
kill 'TERM', $run->{pid};
my ($status, undef, $err) = finish($run);
is($status, 3, 'SIGTERM: exit status 3') or diag $err;
my ($saved) = (newest("$dir/term") // '') =~ /step_0*(\d+)\./;
ok($saved && $saved >= 10 && $saved < 20000, 'after a save at step ' . ($saved // 'none'));
my $stop = ($saved // 0) + 5;
run_together(['resume', @endless, '--resume', "$dir/term", '--out', "$dir/term", '--stop-at', $stop],
    ['the same run without the signal', @endless, '--out', "$dir/straight", '--stop-at', $stop]);
is(same_state(map { newest("$dir/$_") } qw(term straight)), '', "both end in the same bits at step $stop");
done_testing;
