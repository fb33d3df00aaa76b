#!/usr/bin/env perl
# dev/bench/twin_parity.py: what it makes of two complete runs, and of runs that fail.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => 'python3 is not installed' if !grep { -x "$_/python3" } split /:/, $ENV{PATH} // '';

# A folder in which all runs are complete: losses of 30 steps, the twin's later ones by $apart off, and last validations.
sub complete_runs {
    my ($name, $apart, $ours, $twin) = @_;
    my $out = "$dir/$name";
    mkdir $_ or die for $out, "$out/ours", "$out/ours/run";
    spew("$out/ours/run/run.jsonl", join '', map { sprintf qq({"event":"step","step":%d,"loss":%.6f,"ms":%d}\n), $_, 5 - $_ / 100, 100 + $_ } 1 .. 30);
    spew("$out/twin.log", join('', map { sprintf "%d %.6f -\n", $_ - 1, 5 - $_ / 100 - ($_ > 20 ? $apart : 1) } 1 .. 30) . "30 - -\n");
    spew("$out/ours.txt", "step:30/30 val_loss:$ours train_time:1ms step_avg:1.00ms\npeak\n");
    spew("$out/twin.txt", "30 steps in 1.0 s; median 201.5 ms a step, 3 tokens/s\npeak memory 1 MiB\n");
    spew("$out/twin_validated.txt", "val_loss:$twin\n");
    return $out;
}

sub parity { my ($out, @more) = @_; my $run = start('python3', "$root/dev/bench/twin_parity.py", '--train', 'x', '--val', 'y', '--steps', 30, '--out', $out, @more); return finish($run, 60) }

my ($status, $text) = parity(complete_runs('near', 0.002, '3.5010', '3.5000'));
is($status, 0, 'within the limits');
like($text, qr/of steps 21 to 30: mean of absolute differences 0\.0020 .*largest 0\.0020 .*mean \+0\.0020$/m, 'differences after the first 20 steps') or diag $text;
like($text, qr/^last validation: 3\.5010, the twin 3\.5000: \+0\.0010 /m, 'validations');
like($text, qr/^step: 116\.0 ms, the twin 201\.5 ms, medians$/m, 'step times');

is((parity(complete_runs('far', 0.02, '3.5', '3.5')))[0], 1, 'losses too far apart');
is((parity(complete_runs('worse', 0.002, '3.5060', '3.5000')))[0], 1, 'a validation too high');
is((parity(complete_runs('better', 0.002, '3.4', '3.5')))[0], 0, 'a lower one is not');

my $short = complete_runs('short', 0.002, '3.5', '3.5');
spew("$short/twin.log", "0 5 -\n");
($status, undef, my $err) = parity($short);
ok($status == 1 && $err =~ /\Atwin_parity: \Q$short\E: 30 and 1 steps, 30 were expected\n\z/, 'a log that is not complete') or diag "$status $err";
($status, undef, $err) = parity("$dir/none", '--trainer', 'false');
ok($status == 1 && $err =~ m{\Atwin_parity: false ended with status 1: see \S+/ours\.txt\.unfinished\n\z}, 'a trainer that fails') or diag "$status $err";
mkdir "$dir/none/ours" or die;
($status, undef, $err) = parity("$dir/none", '--trainer', 'false');
ok($status == 1 && -d "$dir/none/ours.unfinished-1" && !-e "$dir/none/ours", 'the folder of an unfinished run is kept aside');
($status, undef, $err) = parity("$dir/none", '--trainer', "$dir/absent");
ok($status == 1 && $err =~ m{\Atwin_parity: .*absent.*\n\z}, 'a trainer that is not there') or diag "$status $err";
done_testing;
