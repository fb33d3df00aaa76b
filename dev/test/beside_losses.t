#!/usr/bin/env perl
# Losses of runs beside those of PyTorch programs (dev/bench/beside_losses): means by stage, limits, what it refuses.
use strict;
use warnings;
use File::Path qw(make_path);
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my $tool = "$root/dev/bench/beside_losses";

# Two PyTorch runs of "9", 0.002 and 0.030 apart in stages of three steps; one of "9_bf16".
spew("$dir/kept.csv", join "\n", 'step,original_9_first,ours_9,original_9_second,original_9_bf16', '1,5.000,9,5.002,5', '2,4.000,9,4.002,4', '3,3.000,9,3.002,3',
    '4,2.000,9,2.030,2', '5,2.000,9,2.030,2', '6,2.000,9,2.030,2', '');

sub a_run {
    my ($name, @losses) = @_;
    my $folder = "$dir/2026-01-01_tiny_0000000$name";
    make_path($folder);
    my $step = 0;
    spew("$folder/run.jsonl", join '', map { $step++; qq({"event":"step","step":$step,"loss":$_,"ms":1}\n) } @losses);
    return $folder;
}
my $near = a_run(1, 5.0015, 4.0015, 3.0015, 2.020, 2.020, 2.020, 9);
my $far = a_run(2, 5.0, 4.0, 3.0, 2.030, 2.030, 2.030, 9);
my $short = a_run(3, 5, 4, 3, 2);

my ($status, $out) = run($tool, '--csv', "$dir/kept.csv", '--stages', 2, '9', $near);
is($status, '0', 'within the limits');
like($out, qr/^steps 1 to 3: 2 of PyTorch, mean 4\.0010, largest distance 0\.0020\n  \+0\.0005  passes       2026-01-01_tiny_00000001\n/, 'a stage');
like($out, qr/^steps 4 to 6: 2 of PyTorch, mean 2\.0150, largest distance 0\.0300\n  \+0\.0050  passes/m, 'the next');
($status, $out) = run($tool, '--csv', "$dir/kept.csv", '--stages', 2, '9', $near, $far);
is($status, '1', 'one that is too far');
like($out, qr/^  -0\.0010  passes .*2$/m, 'not in the first stage, in which it is as far as they are from their mean');
like($out, qr/^  \+0\.0150  over 0\.0100  .*2$/m, 'in the second, in which they are further apart than 0.01');
like($out, qr/^  \+0\.0100  their mean$/m, 'and the mean of two runs');
($status, $out) = run($tool, '--csv', "$dir/kept.csv", qw(--stages 1 --from 5), '9_bf16', $near);
is($status, '1', 'beside one run 0.01 counts');
like($out, qr/^steps 5 to 6: 1 of PyTorch/m, 'from a step on');

# Differences by stages of two steps: +0.004 and -0.002, -0.001; +0.030 and +0.031.
spew("$dir/pairs.csv", join "\n", 'step,a_pytorch,a_ours,b_pytorch,b_ours,b_ours_again,short_pytorch,short_ours', '1,5.000,5.004,5,4.998,4.998,5,4.999', '2,4.000,4.004,4,3.998,3.998,4,3.999',
    '3,3.000,3.030,3,3.032,3.030,,', '4,2.000,2.030,2,2.032,2.030,,', '');
($status, $out) = run($tool, '--stages', 2, '--pairs', "$dir/pairs.csv");
is($status, '1', 'pairs of which a stage does not pass');
like($out, qr/^b +-0\.0020  \+0\.0310\nshort +-0\.0010\nsteps 1 to 2: 3 pairs, mean \+0\.0003, standard error 0\.0019: passes$/m, 'the mean of further runs, a pair without the last stage');
like($out, qr/^steps 3 to 4: 2 pairs, mean \+0\.0305, standard error 0\.0005: further from zero/m, 'a difference that is no chance');
($status, $out) = run($tool, '--pairs', "$root/dev/notes/2026-11-28_seeds_beside_pytorch.csv");
is($status, '0', 'those that are kept pass');
spew("$dir/one.csv", "step,a_pytorch,a_ours\n1,5,5\n2,4,4\n");
($status, $out) = run($tool, qw(--stages 1 --pairs), "$dir/one.csv");
is($status, '1', 'one pair is not enough');
like($out, qr/^steps 1 to 2: 1 pairs, and a standard error needs two$/m, 'and the line says why');
refuses('pairs and runs', 2, qr/beside_losses: --pairs has all runs in its file: give no others/, $tool, '--pairs', "$dir/pairs.csv", '9');
refuses('no pairs', 2, qr/beside_losses: .*kept\.csv: no column NAME_pytorch/, $tool, '--pairs', "$dir/kept.csv");
spew("$dir/half.csv", "step,a_pytorch\n1,5\n2,4\n3,3\n");
refuses('half a pair', 2, qr/beside_losses: .*half\.csv: a_pytorch: no column a_ours/, $tool, '--pairs', "$dir/half.csv");
refuses('no such record', 2, qr/beside_losses: .*kept\.csv: no column original_8$/m, $tool, '--csv', "$dir/kept.csv", '8', $near);
refuses('a run that is too short', 2, qr/beside_losses: 2026-01-01_tiny_00000003: no training loss of step 5$/m, $tool, '--csv', "$dir/kept.csv", '9', $short);
refuses('no run', 2, qr/beside_losses: give a record and one run or more/, $tool, '89');
refuses('an unknown option', 2, qr/beside_losses: --stage: no such option/, $tool, '--stage', 3, '89', $near);
refuses('a number that is none', 2, qr/--stages 0: a number from 1 on/, $tool, '--stages', 0, '89', $near);
refuses('no such file', 2, qr/beside_losses: .*none\.csv: cannot be read/, $tool, '--csv', "$dir/none.csv", '89', $near);
refuses('a run shorter than what is kept', 2, qr/beside_losses: 2026-01-01_tiny_00000001: no training loss of step 8$/m, $tool, '89', $near);
refuses('steps that none has', 2, qr/beside_losses: --from 7: the PyTorch runs end at step 6$/m, $tool, '--csv', "$dir/kept.csv", qw(--from 7 9), $near);
refuses('stages of unequal length', 2, qr/beside_losses: --stages 4: 6 steps are not so many stages/, $tool, '--csv', "$dir/kept.csv", qw(--stages 4 9), $near);
done_testing;
