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
use Time::HiRes qw(time);

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
plan skip_all => 'no MPI: mpirun is missing, or the trainer was built without it' if !have_mpi();
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my @ranks = (2, 4, 8);

sub train { # 20 steps of a program on so many ranks; the folder of the run
    my ($program, $ranks, $name, @options) = @_;
    my @command = ($program, @tiny, '--out', "$dir/$name", @options);
    run_ok("$name: $ranks rank" . ($ranks > 1 ? 's' : ''), $ranks > 1 ? mpirun($ranks, @command) : @command);
    return "$dir/$name";
}

# ---- the gradient of a step --------------------------------------------------------------------------------------------

# The lm_head's gradient that the first step leaves behind: whole sums, before any factor.
sub first_gradient {
    my ($program, $ranks, $name) = @_;
    my ($tensors) = tensors(train($program, $ranks, $name, '--stop-at', 1) . '/step_000001.safetensors');
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
    my ($a, $b) = map { (tensors("$_/step_000020.safetensors"))[0] } @_;
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
    my ($a, $b) = map { (tensors("$dir/bf16-$_/step_000020.safetensors"))[1] } 1, $ranks;
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
for my $ranks (1, 2, 8) {
    my $folder = train($trainer, $ranks, "from4-$ranks", '--resume', "$dir/stopped");
    my $loss = loss_distance("$dir/bf16-1", $folder, 10);
    cmp_ok($loss, '<=', $loss_limit{bf16}, "a checkpoint of 4 ranks at an odd step resumes on $ranks: losses to $loss");
}

# ---- what cannot work --------------------------------------------------------------------------------------------------

# mpirun adds lines of its own; ours are counted.
sub one_line {
    my ($what, $pattern, $seconds, @command) = @_;
    my $began = time;
    my ($status, $out, $err) = finish(start(@command), 40);
    my @ours = grep { /^train_gpt/ } split /\n/, $err;
    ok($status ne '0' && $status ne 'timeout' && @ours == 1 && $ours[0] =~ $pattern, "$what: " . ($ours[0] // 'nothing')) or diag $err;
    cmp_ok(time - $began, '<', $seconds, 'and all ranks end');
}
one_line("$_ ranks", qr/$_ ranks: must be 1, 2, 4 or 8/, 20, mpirun($_, $trainer, @tiny)) for 3, 5, 6, 7;
one_line('more ranks than micro-batches', qr/4 ranks: .* --micro-batches 2/, 20, mpirun(4, $trainer, @tiny, '--micro-batches', 2));
one_line('a wrong option', qr/unknown option --nonsense/, 20, mpirun(2, $trainer, @tiny, '--nonsense'));
one_line('what all ranks meet is told once', qr/rank 0.*: no file matches/, 20, mpirun(4, $trainer, @tiny, '--train-files', "$dir/none.bin"));
# One rank finds its shard cut short; the others are waiting for it in a collective.
spew("$dir/cut.bin", substr slurp("$dir/train_1.bin"), 0, 20000);
spew("$dir/one_bad_rank", "#!/bin/sh\nif [ \"\$OMPI_COMM_WORLD_RANK\" = 1 ]; then files='$dir/cut.bin'; else files='$dir/train_1.bin'; fi\n"
    . "exec '$trainer' \"\$@\" --train-files \"\$files\"\n");
chmod 0755, "$dir/one_bad_rank";
one_line('one rank of two fails', qr/rank 1.*cut\.bin: truncated/, 20, mpirun(2, "$dir/one_bad_rank", @tiny, '--out', "$dir/bad"));
# One rank sees other files under the same name.
write_shard('other.bin', documents(20000, 3));
spew("$dir/one_other_rank", slurp("$dir/one_bad_rank") =~ s/cut\.bin/other.bin/r);
chmod 0755, "$dir/one_other_rank";
one_line('one rank with another shard list', qr/rank 1.*not those of rank 0/, 20, mpirun(2, "$dir/one_other_rank", @tiny, '--out', "$dir/bad"));
# A rank that dies without a word.
spew("$dir/one_dead_rank", "#!/bin/sh\nif [ \"\$OMPI_COMM_WORLD_RANK\" = 1 ]; then '$trainer' \"\$@\" & p=\$!; sleep 0.5; kill -9 \$p; exit 9; fi\n"
    . "exec '$trainer' \"\$@\"\n");
chmod 0755, "$dir/one_dead_rank";
my ($status) = finish(start(mpirun(2, "$dir/one_dead_rank", @tiny, qw(--num-scheduled 100000 --repeat), '--out', "$dir/dead")), 20);
ok($status ne '0' && $status ne 'timeout', "a rank that is killed ends the others: status $status");
done_testing;
