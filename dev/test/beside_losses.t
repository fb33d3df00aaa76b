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
