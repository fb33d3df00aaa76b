#!/usr/bin/env perl
# --profile-energy: every op of the last step has its time, power and joules, of as many calls as the network has, behind a table of
# --profile, too, and what was saved before is what it would have been without.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my $gpu = "$root/train_gpt";
my ($limit) = map { /([\d.]+)/ } `nvidia-smi -i $ENV{CUDA_VISIBLE_DEVICES} --query-gpu=enforced.power.limit --format=csv,noheader,nounits 2>/dev/null`;
plan skip_all => 'no GPU that tells its power' if !$limit;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my @short = (@tiny, '--stop-at', 16, '--deterministic'); # a step of Adam's

my ($out) = run_ok('a run', $gpu, @short, qw(--profile 7 --profile-energy 0.5 --out), "$dir/measured");
run_ok('and one without', $gpu, @short, '--out', "$dir/plain");
is(same_state(newest("$dir/measured"), newest("$dir/plain")), 'option.profile option.profile-energy', 'save the same state but for these options');
like($out, qr/^profile: energy: ops of step 16, each 0.5 s alone$/m, 'the table says what it is of');

$out =~ s/.*^profile: energy: [^\n]*\n//ms; # the table of --profile
my ($idle) = $out =~ /^profile: op +calls .* less (\d+) W idle$/m;
my ($all, $with_idle) = $out =~ /^profile: all +(-?[\d.]+) +(-?[\d.]+) with the idle power in these [\d.]+ ms$/m;
my @row = $out =~ /^profile: ([a-z]\w+) +([\d.]+) +([\d.]+) +(\d+) +(-?[\d.e-]+) +(-?[\d.]+) +-?[\d.]+%$/mg;
my ($rows, $joules, %calls) = (0, 0);
while (my ($name, $calls, $us, $watts, $mJ, $J) = splice @row, 0, 6) {
    $calls{$name} = $calls;
    $joules += $J;
    $rows++;
    ok($us > 0 && $watts > 0 && $watts < 1.1 * $limit, "$name: $us us, $watts W") or next;
    # W and us are rounded; the idle power is, too.
    cmp_ok(abs(1e-3 * ($watts - ($idle // 0)) * $us - $mJ), '<', 1e-3 * (1.1 * $us + 0.01 * $watts) + 1e-4, "and $mJ mJ a call");
}
cmp_ok($rows, '>', 15, "$rows ops");
is($calls{attention_forward}, 10 * 8, 'ten layers have attention, times micro-batches');
is($calls{matmul_relu2_backward}, 11 * 8, 'eleven an MLP');
ok($calls{adam_update}, 'Adam, which steps at every other step');
cmp_ok(abs($joules - ($all // 1e9)), '<', 6e-4 * $rows, 'the last line is their sum');
cmp_ok($with_idle // 0, '>', $all // 1e9, 'or more with the idle power');
SKIP: {
    skip 'two GPUs are needed', 1 if @gpus < 2;
    local $ENV{CUDA_VISIBLE_DEVICES} = join ',', @gpus[0, 1];
    refuses('two GPUs', 2, qr/--profile-energy: 2 ranks share the run/, $gpu, @short, qw(--gpus 2 --profile-energy 1), '--out', "$dir/two");
}
done_testing;
