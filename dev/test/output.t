#!/usr/bin/env perl
# Standard output that cannot be written: results are nowhere else, so their loss is an error. Training only copies its log there.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
plan skip_all => 'no /dev/full' if !-e '/dev/full';
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
spew("$dir/text.txt", 'abc def ' x 20);
run_ok('a run', $trainer, @tiny, '--out', "$dir/run");

# Status and errors, without notes.
sub full { my ($status, undef, $err) = run('bash', '-c', '"$@" >/dev/full', 'full', @_); return ($status, $err =~ s/^\S+(?: \(rank 0\))?: note: .*\n//gmr) }
sub closed { my ($status, undef, $err) = run('bash', '-c', 'exec 3> >(true); wait $!; "$@" >&3', 'closed', @_); return ($status, $err =~ s/^\S+: note: .*\n//gmr) }

my @resume = ($trainer, '--resume', "$dir/run");
my @asked = (
    ['--sample', @resume, qw(--sample abc --num-tokens 20)],
    ['--eval', @resume, '--eval', "text=$dir/text.txt"],
    ['--eval-only', @resume, '--eval-only'],
    ['--eval-only, two ranks', @resume, qw(--eval-only --ranks 2)],
    ['--describe', @resume, '--describe'],
    ['--help', $trainer, '--help'],
    ['tokenize --help', "$root/tokenize", '--help'],
    ['order2 --help', "$root/order2", '--help'],
    ['training with a sample', $trainer, @tiny, '--out', "$dir/sampled", qw(--sample abc --num-tokens 5)],
);
for (@asked) {
    my ($what, @command) = @$_;
    my ($status, $err) = full(@command);
    is($status, 1, "$what: a full disk has status 1");
    like($err, qr/\A\w+(?: \(rank 0\))?: error: standard output: No space left on device(?: \(at step 20\))?\n\z/, 'and one line');
}
for (grep { $_->[0] !~ /ranks/ } @asked) { # a rank that ends without a message has one from its parent
    my ($what, @command) = @$_;
    my ($status, $err) = closed(@command);
    ok($status ne '0' && $err eq '', "$what: a closed pipe has another status than 0, and no message") or diag "$status $err";
}
is(join(' ', full($trainer, @tiny, '--out', "$dir/trained")), '0 ', 'training alone goes on');
is(same_state(newest("$dir/trained"), newest("$dir/run")), '', 'to its end');
done_testing;
