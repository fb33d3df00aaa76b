#!/usr/bin/env perl
# Several ranks train as one does: the same losses and weights up to the order of summation, checkpoints that do not depend on the
# number of ranks, and one clear end when a rank cannot go on.
#
# Where the limits come from. Gradients of the micro-batches are added in fp32; ranks only change the order. The sum of 8 terms
# has 7 roundings of at most u = 2^-24 of a partial sum, in either order, so for the first step's gradient
#     |difference| <= 2 * 7 u * sum of |terms| <= 14 u sqrt(8) |sum|        unless the terms point against each other.
# After that, steps amplify rounding, and how much is measured and not assumed: a yardstick run on one rank starts from weights
# moved by one unit in the last place. Each of 20 steps may add one such error: ranks must stay within 20 yardsticks. In the bf16
# build every error soon flips a rounding of weights or activations, which is thousands of times as large: runs are then
# equally far apart whatever moved them at first, so there it is 3 yardsticks.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;
use Fcntl ();
use Time::HiRes qw(sleep time);

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
plan skip_all => 'ranks of the CUDA program have tests of their own: gpu/ranks.t' if $trainer !~ /_cpu$/;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my @ranks = (2, 4, 8);

my $noted; # stderr of the last one
sub train { # 20 steps of a program on so many ranks; the folder of the run
    my ($program, $ranks, $name, @options) = @_;
    my @command = ($program, @tiny, '--out', "$dir/$name", @options);
    (undef, $noted) = run_ok("$name: $ranks rank" . ($ranks > 1 ? 's' : ''), @command, '--ranks', $ranks);
    return "$dir/$name";
}

# ---- the gradient of a step --------------------------------------------------------------------------------------------

# The lm_head's gradient that the first step leaves behind: whole sums, before any factor.
sub first_gradient {
    my ($program, $ranks, $name) = @_;
    my ($tensors) = tensors(checkpoint(train($program, $ranks, $name, '--stop-at', 1), 1));
    return floats($tensors->{'lm_head.weight.grad'});
}

my $sum_limit = 14 * 2**-24 * sqrt 8;
my $one = first_gradient($trainer, 1, 'gradient1');
for my $ranks (@ranks) {
    my $distance = distance($one, first_gradient($trainer, $ranks, "gradient$ranks"));
    cmp_ok($distance, '<=', $sum_limit, "the gradient of a step on $ranks ranks is that of one: $distance");
}
# The mistakes of old trainers would not pass: sums that are not brought to the same scale, and sums kept in bf16.
cmp_ok(distance($one, [map { $_ * 2 } @$one]), '>', $sum_limit, 'a gradient that grows with the ranks is over the limit');
cmp_ok(distance($one, [map { $_ / 4 } @$one]), '>', $sum_limit, 'so is one that shrinks with them');
my $rounded = floats({dtype => 'BF16', bytes => to_bf16(@$one)});
cmp_ok(distance($one, $rounded), '>', 100 * $sum_limit, 'and one that went through bf16 once, by ' . distance($one, $rounded));

# ---- 20 steps ----------------------------------------------------------------------------------------------------------

# Moves every fp32 weight that is not zero by one unit in the last place, up or down.
sub perturb {
    my ($from, $to) = @_;
    my $seed = 5;
    return rewrite($from, $to, sub {
        my (undef, $tensor) = @_;
        return 1 if $tensor->{dtype} ne 'F32';
        my $move = sub { ($seed = ($seed * 1103515245 + 12345) % 2**31) & 65536 ? 1 : -1 };
        $tensor->{bytes} = pack 'V*', map { $_ & 0x7fffffff ? $_ + $move->() : $_ } unpack 'V*', $tensor->{bytes};
    });
}

# Largest distance among the tensors of a kind: weights, moments (of both optimizers), scalars and gates are judged by kind, since
# single small tensors scatter.
sub distances {
    my ($a, $b) = map { (tensors(checkpoint("$_", 20)))[0] } @_;
    my (%of, %count);
    for my $name (sort keys %$a) {
        next if $name eq 'rope.frequency';
        my $kind = $name =~ /\.(adam_m|adam_v|momentum|second)$/ ? $1 : $name =~ /weight$/ ? ($name =~ /gate/ ? 'gates' : 'tables') : 'matrices';
        push @{$of{$kind}}, distance(floats($a->{$name}), floats($b->{$name}));
    }
    return {map { my $kind = $_; my $sum = 0; $sum += $_**2 for @{$of{$kind}}; $kind => sqrt($sum / @{$of{$kind}}) } keys %of};
}

sub loss_distance {
    my ($first, $second, $from) = @_;
    my ($a, $b, $most) = (losses($first), losses($second), 0);
    for (($from // 1) .. 20) { my $d = abs($a->{$_} - $b->{$_}); $most = $d if $d > $most }
    return $most;
}

my %allowed = (fp32 => 20, bf16 => 3);
my %loss_limit;
sub compare_ranks {
    my ($program, $what, @options) = @_;
    my $reference = train($program, 1, "$what-1", '--save-init', "$dir/$what-init.safetensors", @options);
    my $moved = perturb("$dir/$what-init.safetensors", "$dir/$what-moved.safetensors");
    my $yardstick = train($program, 1, "$what-yardstick", '--init-from', $moved, @options);
    my $limits = distances($reference, $yardstick);
    $loss_limit{$what} = $allowed{$what} * loss_distance($reference, $yardstick);
    for my $ranks (@ranks) {
        my $folder = train($program, $ranks, "$what-$ranks", @options);
        my $found = distances($reference, $folder);
        for my $kind (sort keys %$found) {
            cmp_ok($found->{$kind}, '<=', $allowed{$what} * $limits->{$kind}, sprintf '%s, %d ranks: %s within %.2g yardsticks', $what, $ranks, $kind,
                $found->{$kind} / $limits->{$kind});
        }
        my $loss = loss_distance($reference, $folder);
        cmp_ok($loss, '<=', $loss_limit{$what}, "$what, $ranks ranks: all 20 losses, to $loss of $loss_limit{$what}");
    }
    return if $what ne 'fp32';
    # Optimizers forget the scale of a gradient, their moments do not.
    for my $kind (qw(momentum adam_m)) { cmp_ok(0.5, '>', $allowed{fp32} * $limits->{$kind}, "$what: $kind off by a factor of 2 would be over the limit") }
}

SKIP: {
    skip "$exact is missing: make " . $exact =~ s{^\Q$root/}{}r, 1 if !-x $exact;
    compare_ranks($exact, 'fp32', '--ns-dtype', 'fp32');
}
compare_ranks($trainer, 'bf16');
for my $ranks (@ranks) {
    my ($a, $b) = map { (tensors(checkpoint("$dir/bf16-$_", 20)))[1] } 1, $ranks;
    is($b->{'data.position'}, $a->{'data.position'}, 'from the same data');
}

# ---- checkpoints know no ranks -----------------------------------------------------------------------------------------

train($trainer, 4, 'stopped', '--stop-at', 9);
my $four = train($trainer, 4, 'bf16-4-again');
is(same_state(newest($four), newest("$dir/bf16-4")), '', 'four ranks, twice: the same bits');
# A gradient that waits from an odd step to the next is summed over the ranks for the file, in another order than later; else a run
# that stops and goes on is the run that never stopped.
train($trainer, 4, 'even', '--stop-at', 10);
is(same_state(newest(train($trainer, 4, 'even', '--resume', "$dir/even")), newest("$dir/bf16-4")), '', 'four ranks, 10 + 10 steps: the same bits');
unlike($noted, qr/the checkpoint is of a run with/, 'no word of ranks where they are as many');
for my $ranks (1, 2, 8) {
    my $folder = train($trainer, $ranks, "from4-$ranks", '--resume', "$dir/stopped");
    like($noted, qr/\A[^\n]* note: the checkpoint is of a run with 4 ranks, this one has $ranks: gradients are added in another order, [^\n]+\n\z/, 'a note says so, once');
    my $loss = loss_distance("$dir/bf16-1", $folder, 10);
    cmp_ok($loss, '<=', $loss_limit{bf16}, "a checkpoint of 4 ranks at an odd step resumes on $ranks: losses to $loss");
}

# ---- what cannot work --------------------------------------------------------------------------------------------------

# Ranks as something else starts them, here from one list of options each.
my $port = first_port;
sub started {
    my @options = @_;
    my @runs;
    $port++;
    for my $rank (0 .. $#options) {
        local @ENV{qw(RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT)} = ($rank, scalar @options, scalar @options, $port);
        push @runs, start($trainer, @tiny, @{$options[$rank]});
    }
    return @runs;
}

# All runs end by themselves, none of them well, with one line among them that matches.
sub fails {
    my ($what, $pattern, $seconds, @runs) = @_;
    my ($began, @status, $text) = (time);
    for my $run (@runs) {
        my ($status, undef, $err) = finish($run, 40);
        push @status, $status;
        $text .= $err;
    }
    my $took = time - $began;
    my @ours = grep { /^train_gpt/ } split /\n/, $text; # mpirun adds lines of its own
    ok(!(grep { $_ eq '0' || $_ eq 'timeout' } @status) && @ours == 1 && $ours[0] =~ $pattern, "$what: " . ($ours[0] // 'nothing'))
        or diag "status @status\n$text";
    cmp_ok($took, '<', $seconds, 'and all ranks end');
}

my @usual = ('--out', "$dir/bad");
fails("$_ ranks", qr/--ranks $_: must be 1, 2, 4 or 8/, 20, start($trainer, @tiny, @usual, '--ranks', $_)) for 3, 5, 6, 7;
fails('more ranks than micro-batches', qr/--ranks 4: .* --micro-batches 2/, 20, start($trainer, @tiny, @usual, qw(--ranks 4 --micro-batches 2)));
fails('what all ranks meet is told once', qr/\(rank 0\).*: no file matches/, 20, start($trainer, @tiny, '--ranks', 4, '--train-files', "$dir/none.bin"));
# Options that differ from rank 0's: a wrong loss, a rank that waits for ever, an array that is too short, if nobody looked.
fails("a rank with another @$_[0]", qr/rank 1 was started with other options/, 20, started(\@usual, [@usual, @$_]))
    for [qw(--seed 5)], [qw(--muon-rate 0.1)], [qw(--val-every 7)], [qw(--mlp-dim 256)], [qw(--num-scheduled 12)];
fails('three ranks that something has started', qr/3 ranks \(WORLD_SIZE\): must be 1, 2, 4 or 8/, 20, (started((\@usual) x 3))[0]);
# One rank finds its shard cut short; the others are waiting for it in a collective. One sees other files under the same name.
spew("$dir/cut.bin", substr slurp("$dir/train_1.bin"), 0, 20000);
write_shard('other.bin', documents(20000, 3));
fails('one rank of two fails', qr/rank 1.*cut\.bin: truncated/, 20, started(\@usual, [@usual, '--train-files', "$dir/cut.bin"]));
fails('one rank with another shard list', qr/rank 1.*not those of rank 0/, 20, started(\@usual, [@usual, '--train-files', "$dir/other.bin"]));

# Ranks that go on until something happens to one of them, from their third step on.
sub long { my ($name) = @_; return (qw(--num-scheduled 1000000 --repeat --val-every 0 --out), "$dir/$name") }

sub wait_for_steps {
    my ($name) = @_;
    my $end = time + 40;
    sleep 0.02 while time < $end && !losses("$dir/$name")->{3};
}

# The processes of a run's ranks, rank 0 first: by when they were started.
sub ranks_of {
    my ($run) = @_;
    my %began = map { (slurp("$_/stat") =~ /^(\d+) \(.*\) \S (\d+)(?: \S+){17} (\d+)/ && $2 == $run->{pid}) ? ($1 => $3) : () } glob '/proc/[0-9]*';
    return sort { $began{$a} <=> $began{$b} || $a <=> $b } keys %began;
}

my $run = start($trainer, @tiny, long('killed'), '--ranks', 2);
wait_for_steps('killed');
kill 'KILL', (ranks_of($run))[1];
fails('a rank that is killed', qr/\(rank 1\): error: killed by signal 9/, 10, $run);
for ([2, 1], [4, 0]) {
    my ($ranks, $stops) = @$_;
    $run = start($trainer, @tiny, long("standstill $stops"), '--ranks', $ranks, qw(--timeout 5)); # a busy machine can need seconds for a step
    wait_for_steps("standstill $stops");
    kill 'STOP', (ranks_of($run))[$stops];
    fails("rank $stops of $ranks stands still", qr/\(rank $stops\): error: no progress for 5 s \(--timeout\)/, 15, $run);
}
my %said = (1 => 5, 0 => 12); # rank 0, which knows for whom all wait, speaks first
for my $stops (1, 0) {
    my @runs = started(([long("outside $stops"), '--timeout', 5]) x 2);
    my $other = 1 - $stops;
    wait_for_steps("outside $stops");
    kill 'STOP', $runs[$stops]{pid};
    fails("rank $stops of those that something has started", qr/\(rank $other\): error: no progress for $said{$stops} s \(--timeout\), waiting for rank $stops/, $said{$stops} + 10, $runs[$other]);
    kill 'KILL', $runs[$stops]{pid};
    finish($runs[$stops], 10);
}

# ---- how they are started ----------------------------------------------------------------------------------------------

# No library of MPI's is in any process: on some systems it takes SIGHUP at load, and the end of a terminal would end a run that
# nohup protects. The program's own handler leaves the signal alone then.
$run = start('nohup', $trainer, @tiny, long('nohup'), '--ranks', 2);
wait_for_steps('nohup');
my @children = ranks_of($run);
my $libraries = join '', map { slurp("/proc/$_/maps") } $run->{pid}, @children;
is(scalar @children, 2, 'a launching process and two ranks');
unlike($libraries, qr/lib(?:mpi|ucs|ucp|open-rte|pmix)/, 'load no library of MPI');
kill 'HUP', -$run->{pid};
my $seen = keys %{losses("$dir/nohup")};
my $end = time + 20;
sleep 0.02 while time < $end && keys %{losses("$dir/nohup")} < $seen + 5;
cmp_ok(scalar(keys %{losses("$dir/nohup")}), '>=', $seen + 5, 'and go on under nohup when their terminal goes');
kill 'TERM', $run->{pid};
my $answer = "train_gpt: note: interrupted: this step will be finished and saved; a second request ends at once, without saving\n";
is(join(' ', (finish($run, 20))[0, 2]), "3 $answer", 'until they are asked to end, which the launching process answers');

# A terminal sends Ctrl-C to all processes of its group.
for my $by ('--ranks', 'something') {
    my @group = $by eq '--ranks' ? start($trainer, @tiny, long("by $by"), '--ranks', 2) : started([long("by $by")], [long("by $by")]);
    wait_for_steps("by $by");
    kill 'INT', -$_->{pid} for @group;
    my @ends = map { [(finish($_, 20))[0, 2]] } @group;
    is(join('', map { $_->[1] } @ends), $answer, "ranks that $by has started answer Ctrl-C once");
    is(scalar(grep { $_->[0] eq '3' } @ends), scalar @group, 'and all end with status 3');
}

# It ends `| tee log`, too, often first: nobody reads the answer then, and the ranks save all the same.
for my $ranks (1, 2) {
    my $name = "pipe $ranks";
    pipe(my $reader, my $writer) or die "pipe: $!";
    fcntl $writer, Fcntl::F_SETFD, 0;
    $run = start('sh', '-c', 'exec "$@" >&' . fileno($writer) . ' 2>&1', 'sh', $trainer, @tiny, long($name), '--ranks', $ranks);
    close $writer;
    wait_for_steps($name);
    close $reader;
    kill 'TERM', $run->{pid};
    is((finish($run, 60))[0], 3, "$ranks ranks are asked to end when nobody reads what they say");
    ok(newest("$dir/$name"), 'and save');
}

# Before the first step there is nothing to save: one rank is asked, and all end. The network is large, so that its start takes seconds.
my @slow = (@tiny, qw(--model-dim 512 --mlp-dim 2048 --num-heads 4 --micro-batches 64 --micro-batch-tokens 1024 --val-every 0 --train-files),
    write_shard('long.bin', documents(140000, 3)));
for my $by ('--ranks', 'something') {
    my @out = (@slow, '--out', "$dir/early $by");
    my @group = $by eq '--ranks' ? start($trainer, @out, '--ranks', 2) : started(\@out, \@out);
    my $end = time + 60;
    sleep 0.01 while !-s "$group[0]{out}.2" && time < $end; # that it is for a GPU
    kill 'TERM', $by eq '--ranks' ? (ranks_of($group[0]))[1] : $group[0]{pid};
    my @ends = map { [(finish($_, 120))[0, 2]] } @group;
    is(join(' ', map { $_->[0] } @ends), join(' ', (3) x @group), "one of the ranks that $by has started is asked before the first step: all end") or diag map { $_->[1] } @ends;
    my $line = 'interrupted: the run ends before its first step; a second request ends at once';
    is(scalar(() = join('', map { $_->[1] } @ends) =~ /\Q$line\E/g), $by eq '--ranks' ? 0 : 1, $by eq '--ranks' ? 'at once' : 'which one says');
    is(scalar(() = checkpoints("$dir/early $by")), 0, 'and nothing is saved');
}

# Ranks that something has started may have nothing to share.
my @sample = ('--resume', "$dir/bf16-2", qw(--sample a --num-tokens 5 --temperature 0));
my ($alone) = run_ok('one rank writes a sample', $trainer, @sample);
{
    local $ENV{LOCAL_WORLD_SIZE} = 2;
    my @two = map { local @ENV{qw(RANK WORLD_SIZE MASTER_PORT)} = ($_, 2, $port + 1); start($trainer, @sample) } 0, 1;
    my @ends = map { [finish($_, 40)] } @two;
    is(join("|", map { @$_[0, 1] } @ends), "0|$alone|0|", 'the first of two ranks writes the same');
}

SKIP: {
    skip 'no mpirun', 5 if !have_mpi();
    my $folder = "$dir/mpirun";
    run_ok('mpirun: 2 ranks', mpirun(2, $trainer, @tiny, '--out', $folder));
    is(same_state(newest($folder), newest("$dir/bf16-2")), '', 'the same bits as --ranks 2');
    spew("$dir/other_options", "#!/bin/sh\n[ \"\$OMPI_COMM_WORLD_RANK\" = 1 ] && set -- \"\$@\" --seed 5\nexec '$trainer' \"\$@\"\n");
    chmod 0755, "$dir/other_options";
    fails('mpirun: a rank with other options', qr/rank 1 was started with other options/, 20, start(mpirun(2, "$dir/other_options", @tiny, @usual)));
    my @both = map { start(mpirun(2, $trainer, @tiny, '--out', "$dir/mpirun$_")) } 1, 2;
    my @ends = map { [finish($_, 60)] } @both;
    is(join(' ', map { $_->[0] } @ends), '0 0', 'mpirun twice at once: each finds its own ranks') or diag map { $_->[2] } @ends;
}
done_testing;
