#!/usr/bin/env perl
# --profile: every op says its name and cost, the table counts calls as the network has them, and the run's mathematics does not change.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

# Every function that queues work on a stream, but for those that are no op.
my %other = map { $_ => 1 } qw(event_record graph_launch profile_energy profile_record profile_stop stream_destroy stream_synchronize stream_wait ns_chain_begin ns_chain_end qkv_heads_apart);
my @ops = grep { !$other{$_} } map { slurp($_) =~ /^void (\w+)\((?:Stream s|const ProductContext \*c|NsChain \*chain)\b/mg } glob("$root/llmc/ops/*.h"), "$root/llmc/dist/comm.h";
cmp_ok(scalar @ops, '>', 40, scalar(@ops) . ' ops in the contracts');
my %cost = map { $_ => 1 } slurp("$root/llmc/ops/costs.h") =~ /^(?:COST\(|static inline OpCost cost_)(\w+)/mg;
is(join(' ', grep { !$cost{$_} } @ops), '', 'each has its cost');
for my $backend (qw(cpu cuda)) {
    my %named = map { $_ => 1 } map { slurp($_) =~ /^(?:extern "C" )?void (\w+)\([^;{]*\)\n\{\n    OP_(?:SCOPE|PART)\(\1\b/mg }
        split /\n/, qx(find '$root/llmc/$backend' -name '*.c' -o -name '*.cu');
    is(join(' ', grep { !$named{$_} } @ops), '', "$backend: each begins with its name and cost");
}

SKIP: {
    skip "$trainer is missing: run make", 1 if !-x $trainer;
    write_shard('train_1.bin', documents(24000, 1));
    write_shard('val.bin', documents(700, 2));
    my ($out) = run_ok('a profiled run', $trainer, @tiny, '--deterministic', '--out', "$dir/profiled", '--profile', 7);
    run_ok('and one without', $trainer, @tiny, '--deterministic', '--out', "$dir/plain");
    is(same_state(newest("$dir/profiled"), newest("$dir/plain")), 'option.profile' , 'end in the same state but for that option');
    is_deeply(losses("$dir/profiled"), losses("$dir/plain"), 'with the same losses');

    my %row = $out =~ /^profile: ([a-z]\w+) +([\d.]+) +[\d.]+ +[\d.]+%/mg;
    my $layers = 8; # times micro-batches
    is($row{attention_forward}, 10 * $layers, 'ten layers have attention');
    is($row{matmul_relu2_backward}, 11 * $layers, 'eleven an MLP');
    is($row{embedding_grad}, 6 * $layers, 'and six inputs are of a table');
    is($row{adam_update}, 2.5, 'Adam steps at every other step');
    my ($share, $sum) = $out =~ /^profile: sum of kernel times \/ step time: ([\d.]+) \(([\d.]+) of [\d.]+ ms, mean of 2 steps\)$/m;
    ok($share && $share > 0.2 && $share < 5, 'sum of ops over the time of a step: ' . ($share // 'no such line'));
    # How much of a traced step that is, is up to the host: these kernels are short. But few of them overlap.
    my ($running, $busy, $span) = $out =~ /^profile: time with a kernel running \/ time of these steps: ([\d.]+) \(([\d.]+) of ([\d.]+) ms\)$/m;
    ok($running && $running <= 1 && abs($running - $busy / $span) < 0.001, 'and the share of the traced steps in which one ran: ' . ($running // 'no such line'));
    ok($busy && $busy > 0.8 * $sum && $busy < 1.001 * $sum, 'which is as long as they took by themselves: ' . ($busy // 'no time') . ' of ' . ($sum // 'none') . ' ms');
    my $log = log_text("$dir/profiled", 'jsonl');
    like($log, qr/"event":"message","text":"profile: op +calls/, 'the table is in the JSON lines');
    my ($told) = $log =~ /"text":"profile: steps (\d+) to (\d+)"/;
    is($told, 11, 'it begins where no validation falls into it');
    is_deeply(val_losses("$dir/profiled"), val_losses("$dir/plain"), 'and none is left out');
    my $text = log_text("$dir/profiled");
    my @told = $out =~ /^(profile: .*)$/mg;
    is_deeply([$text =~ /^(profile: .*)$/mg], \@told, 'the table is in the log as well, line by line as on the console');
    require lib;
    lib->import("$root/scripts");
    require RunLog;
    my ($path) = logs("$dir/profiled", 'txt');
    is(eval { RunLog::unfinished(RunLog::parse($path)) } // $@, '', 'which is a log like others');

    run_ok('checkpoints all along', $trainer, @tiny, '--out', "$dir/saved", qw(--profile 6 --checkpoint-every 4 --val-every 0));
    is_deeply([map { /(\d+)\.safe/ } checkpoints("$dir/saved")], [qw(000004 000008 000012 000016 000020)], 'none is left out');
    refuses('a validation before every third step', 2, qr/--profile 6: no 4 steps of one size follow each other.*--val-every 3/, $trainer, @tiny,
        '--profile', 6, '--val-every', 3, '--out', "$dir/every");
    ($out) = run_ok('over a change of size', $trainer, qw(--preset toy --num-scheduled 40 --repeat --val-every 0 --profile 18 --train-files), "$dir/train_1.bin",
        '--val-files', "$dir/val.bin", '--out', "$dir/sizes");
    like($out, qr/^profile: steps 27 to 30\n(?:.*\n)*profile: sum of kernel times .* mean of 2 steps\)$/m,
        'all steps, timed and traced, are of the size that step 20 begins');
    refuses('too few steps before it', 2, qr/--profile 5: needs at least 6 steps/, $trainer, @tiny, '--profile', 5);
    refuses('more steps than the run has', 2, qr/--profile 17: needs 21 steps, and the run has 20/, $trainer, @tiny, '--profile', 17,
        '--out', "$dir/long");
    my $cpu = "$root/train_gpt_cpu"; # a GPU has a counter
    refuses('energy without a counter', 2, qr/--profile-energy: this device does not tell its energy/, $cpu, @tiny, qw(--profile-energy 1 --stop-at 4),
        '--out', "$dir/energy");
    refuses('also with several ranks', 2, qr/--profile-energy: this device does not tell its energy/, $cpu, @tiny, qw(--ranks 2 --profile-energy 1 --stop-at 4),
        '--out', "$dir/energy");
    refuses('too short a time', 2, qr/--profile-energy 0\.1: give 0\.5 seconds or more/, $trainer, @tiny, qw(--profile-energy 0.1 --stop-at 4));
    refuses('energy of the last step', 2, qr/--profile-energy: needs --stop-at before the last step, 20:/, $trainer, @tiny, '--profile-energy', 1);
    refuses('energy where nothing is trained', 2, qr/--profile-energy: nothing is trained here/, $trainer, @tiny, qw(--profile-energy 1 --stop-at 4 --eval-only --init-from a));
    refuses('nothing to time', 2, qr/--profile: nothing is trained here/, $trainer, @tiny, '--profile', 8, '--eval-only', '--init-from', 'a');
}
done_testing;
