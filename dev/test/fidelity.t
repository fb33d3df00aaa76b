#!/usr/bin/env perl
# dev/bench/fidelity: every run once, those of a stopped call kept, a table from the logs.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my $fidelity = "$root/dev/bench/fidelity";
plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(6000, 1));
write_shard('val.bin', documents(600, 2));
my @small = grep { !m{^--(train|val)-files$|/} } @tiny;
my @call = ($fidelity, '--trainer', $trainer, '--train', "$dir/train_*.bin", '--val', "$dir/val.bin", '--out', "$dir/runs");
my @rest = ('--', @small, qw(--val-every 10));

sub call { my $run = start(@_); return finish($run, 60) }

my ($status, $out) = call(@call, '--gpus', '0,1', '--only', 'seed-2,seed-3,turbo', @rest);
is($status, 0, 'three runs on two GPUs');
is(scalar(() = $out =~ /^GPU [01]: (seed-2|seed-3|turbo)$/mg), 3, 'each once') or diag $out;
my %row = map { /^\| (\S+) \|/ ? ($1 => $_) : () } split /\n/, $out;
like($row{$_}, qr{^\| \Q$_\E \| \S+ / \S+ / \S+ \| 0: 5\.\d{4}, 10: \d\.\d{4}, 20: \d\.\d{4} \|$}, "the losses of $_") for qw(seed-2 seed-3 turbo);
isnt($row{'seed-2'} =~ s/.*10: //r, $row{'seed-3'} =~ s/.*10: //r, 'seeds differ');
like(slurp("$dir/runs/turbo/console.txt"), qr/^optimizer: NorMuon, Newton-Schulz turbo, 4 iterations$/m, 'the variant was asked for');

unlink "$dir/runs/seed-3/complete";
($status, $out) = call(@call, '--only', 'seed-2,seed-3', @rest);
is($status, 0, 'called again');
like($out, qr/^GPU 0: seed-3$/m, 'what was not complete is run');
unlike($out, qr/^GPU 0: seed-2$/m, 'what was complete is not');
ok(-e "$dir/runs/seed-3.unfinished-1/console.txt", 'and what was there is kept');

($status, $out, my $err) = call(@call, '--only', 'seed-1337', @rest, '--model-dim', 7);
is($status, 1, 'a run that fails');
like($err, qr{seed-1337 ended with status \d+: see .*runs/seed-1337/console\.txt}, 'is named');
like($out, qr/seed-1337 \(unfinished\)/, 'and shown as such');
($status, undef, $err) = call(@call, '--only', 'seed-9');
ok($status == 2 && $err =~ /--only seed-9: no such run/, 'a run that is not known') or diag "$status $err";
($status, undef, $err) = call(@call, '--gpus', 'all');
ok($status == 2 && $err =~ /--gpus all: give numbers/, 'GPUs that are no numbers') or diag "$status $err";
done_testing;
