#!/usr/bin/env perl
# A shard that fails in mid-run: the steps until then are saved, the end is one line and a status, and with
# the shard put back the run goes on to the same bits.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use Test::More;
use Time::HiRes qw(sleep time);
use TrainTest;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
# About five steps each: the fourth is read once the third is in use. It is longer than the pieces that tell
# shards apart.
write_shard("train_$_.bin", documents(4200, 10 + $_)) for 1 .. 3;
my $last = write_shard('train_4.bin', documents(14000, 14));
my $good = slurp($last);
my $other = slurp(write_shard('other', documents(14000, 99)));
write_shard('val.bin', documents(700, 2));
run_ok('20 steps at once', $trainer, @tiny, '--out', "$dir/whole");
my $whole = newest("$dir/whole");

# The command's end when $change happened to the last shard while the run was in its first ones.
sub changed_in_mid_run {
    my ($out, $change, @command) = @_;
    for (1 .. 10) {
        spew($last, $good);
        system 'rm', '-rf', $out;
        my $run = start(@command, '--out', $out);
        my $end = time + 60;
        my $begun = sub { keys %{losses($out)} };
        sleep 0.002 while !$begun->() && time < $end && kill 0, $run->{pid};
        kill 'STOP', -$run->{pid};
        my $early = $begun->() && $begun->() < 8;
        $change->() if $early;
        kill 'CONT', -$run->{pid};
        my @end = finish($run);
        return @end if $early;
    }
    return ('never early enough', '', '');
}

my %change = (
    replaced => [sub { spew("$last.new", $other); rename "$last.new", $last },
        qr/train_4\.bin: was replaced or changed since the run began; put back/],
    truncated => [sub { truncate $last, 3000 }, qr/train_4\.bin: truncated: 3000 bytes/],
    removed => [sub { unlink $last }, qr/train_4\.bin: cannot be opened: No such file/],
    damaged => [sub { spew($last, substr($good, 0, 10024) . "\xff\xff" . substr $good, 10026) },
        qr/train_4\.bin: token 4500 has id 65535/],
);
for my $name (sort keys %change) {
    my ($change, $pattern) = @{$change{$name}};
    for my $ranks ($name eq 'removed' ? ([], ['--ranks', 2]) : []) {
        my $out = "$dir/$name" . @$ranks;
        my ($status, $stdout, $err) = changed_in_mid_run($out, $change, $trainer, @tiny, @$ranks);
        my ($step) = $err =~ /step (\d+): /;
        ok($status eq '1' && $err =~ /\A[^\n]*$pattern.*\n\z/, "$name @$ranks: " . substr($err, 0, 150))
            or diag "$status $err";
        my $saved = newest($out) // '';
        like($saved, qr/step_0*$step\.safetensors$/, "and step $step is saved") or next;
        spew($last, $good);
        run_ok('with the shard put back it goes on', $trainer, @tiny, @$ranks, '--resume', $saved, '--out',
            $out);
        my $different = join ' ', grep { @$ranks == 0 || /^data/ } split / /,
            same_state(newest($out), $whole); # sums over ranks differ in the last bits
        is($different, '', 'to the same bits as if nothing had happened');
    }
}

# Two ranks with copies of their own, one of which is bad: rank 0 saves and tells what rank 1 has found.
mkdir "$dir/copy";
spew("$dir/copy/train_$_.bin", slurp("$dir/train_$_.bin")) for 1 .. 3;
spew("$dir/copy/train_4.bin", substr($good, 0, 10024) . "\xff\xff" . substr $good, 10026);
my @ranks = map {
    local @ENV{qw(RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT)} = ($_, 2, 2, first_port);
    start($trainer, @tiny, '--out', "$dir/one", $_ ? ('--train-files', "$dir/copy/train_*.bin") : ());
} 0, 1;
my (@status, $text);
for (@ranks) {
    my ($status, undef, $err) = finish($_, 60);
    push @status, $status;
    $text .= $err;
}
my @lines = grep { /error/ } split /\n/, $text;
ok($status[0] eq '1' && $status[1] =~ /^[1-9]$/ && @lines == 1 &&
    $lines[0] =~ /step 15: rank 1: .*copy\/train_4\.bin: token 4500 has id 65535/,
    "a bad copy of one rank: $lines[0]") or diag "@status\n$text";
like(newest("$dir/one"), qr/step_000015\.safetensors$/, 'all save');
run_ok('without it', $trainer, @tiny, '--ranks', 2, '--resume', newest("$dir/one"), '--out', "$dir/one");
my $two = same_state(newest("$dir/one"), newest("$dir/removed2"));
is($two, '', 'they go on to the bits of two healthy ranks');

# A shard of two long documents has not one group of short ones, which its size does not tell: the run goes on with the next, and so
# does one that stops in between.
write_shard('long_1.bin', documents(6000, 21));
write_shard('long_2.bin', (256, (97) x 9999) x 2);
write_shard('long_3.bin', documents(14000, 23));
my @long = ($trainer, @tiny, qw(--max-document 100 --train-files), "$dir/long_?.bin", '--out');
my (undef, $said) = run_ok('a shard without a group', @long, "$dir/long", '--ranks', 2);
like($said, qr/\A[^\n]*note: \S+long_2\.bin is passed over: [^\n]+\n\z/, 'is passed over, with a note');
run_ok('a run that stops before it', @long, "$dir/long_stops", '--stop-at', 4);
run_ok('and goes on', $trainer, '--resume', "$dir/long_stops");
run_ok('at once', @long, "$dir/long_whole");
is(same_state(newest("$dir/long_stops"), newest("$dir/long_whole")), '', 'has the same bits');
done_testing;
