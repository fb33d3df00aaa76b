#!/usr/bin/env perl
# The small record of 2026 (8 steps: stages begin at 2, 3 and 5, embedding and head part after step 3): files under the published
# names and shapes, runs that stop and go on anywhere, and the same run on several ranks.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$_ is missing: run make" for grep { !-x } $trainer, $exact;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(1400, 2));
my @small = (qw(--preset toy-2026 --micro-batches 4 --val-every 4 --max-document 40), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
my ($steps, $vocab, $d, $layers) = (8, 384, 48, 6);

sub train { # the folder of the run
    my ($program, $name, @options) = @_;
    run_ok($name, $program, @small, '--out', "$dir/$name", @options);
    return "$dir/$name";
}

# ---- the file of weights -----------------------------------------------------------------------------------------------

my $init = "$dir/init.safetensors";
my $whole = train($exact, 'whole', '--save-init', $init);
my ($weights) = tensors($init);
is_deeply({map { $_ => join ' ', @{$weights->{$_}{shape}} } keys %$weights}, {
    'embed.weight' => "$vocab $d", 'lm_head.weight' => "$d $vocab", value_embeds => 5 * $vocab . " $d", 'bigram_embed.weight' => "97 $d",
    qk_bank => "30 16 $d", vo_bank => "10 $d $d", mlp_bank => "7 2 64 $d", ve_gate_bank => '5 6 12', 'smear_gate.weight' => '1 12',
    scalars => 14, resid_lambdas => '6 2', post_lambdas => '6 2', _mudd_gate_scale => '', mudd_w1 => "2 8 $d", mudd_w2 => '2 14 8',
    mudd_b2 => '2 14', mudd_gate_w1 => "2 8 $d", mudd_gate_w2 => '2 29 8', mudd_gate_b2 => '2 29', bigram_sign_table => "32 $d"},
    '19 parameters and the signs, under the published names and shapes');

sub transposed { my ($x, $rows, $cols) = @_; return [map { my $c = $_; map { $x->[$_ * $cols + $c] } 0 .. $rows - 1 } 0 .. $cols - 1] }
sub rounded { return floats({dtype => 'BF16', bytes => to_bf16(@{$_[0]})}) }
sub matrices { my ($x, $from, $count, $size) = @_; return [@$x[$from * $size .. ($from + $count) * $size - 1]] }
sub spread { my ($x) = @_; my ($most, $square) = (0, 0); for (@$x) { $most = abs if abs > $most; $square += $_**2 } return ($most, sqrt($square / @$x)) }

my %at = map { $_ => floats($weights->{$_}) } keys %$weights;
is_deeply($at{'embed.weight'}, transposed($at{'lm_head.weight'}, $d, $vocab), 'the embedding is the head, transposed');
my $bound = sqrt(3) / 2 / sqrt $d;
for (['lm_head.weight', 0.005], [value_embeds => 0.01]) {
    my (undef, $deviation) = spread($at{$_->[0]});
    ok(abs($deviation / $_->[1] - 1) < 0.03, "$_->[0]: the deviation is $deviation");
}
for (['qk_bank', 0, $bound], ['vo_bank', 0, $bound], ['mudd_w1', 0, 1 / sqrt $d], ['mudd_gate_w1', 0, 1 / sqrt $d]) {
    my ($most, $deviation) = spread($at{$_->[0]});
    ok($most <= $_->[2] * 1.004 && abs($deviation * sqrt(3) / $_->[2] - 1) < 0.06, "$_->[0]: even up to $_->[2]");
}
is_deeply([grep { $_ } @{$at{$_}}], [], "$_ is zero") for qw(bigram_embed.weight ve_gate_bank smear_gate.weight mudd_w2 mudd_gate_w2);
my $matrix = 64 * $d;
is_deeply([grep { $_ } map { @{matrices($at{mlp_bank}, 2 * $_ + 1, 1, $matrix)} } 0 .. $layers], [], 'c_proj is zero');
ok((!grep { my ($most) = spread(matrices($at{mlp_bank}, 2 * $_, 1, $matrix)); $most < 0.9 * $bound } 0 .. $layers - 1), 'c_fc is not, in every layer');
is_deeply([grep { $_ } @{matrices($at{mlp_bank}, 2 * $layers, 1, $matrix)}], [], 'but in the layer of padding');
is_deeply($at{$_}, rounded($at{$_}), "$_: lower halves are zero") for qw(qk_bank vo_bank mlp_bank);
is_deeply([sort { $a <=> $b } keys %{{map { $_ => 1 } @{$at{bigram_sign_table}}}}], [-1, 1], 'signs are 1 and -1');
my $positive = grep { $_ > 0 } @{$at{bigram_sign_table}};
ok(abs($positive - 16 * $d) < 4 * sqrt(8 * $d), "about as many of both: $positive of " . 32 * $d);
is_deeply([map { sprintf '%.6g', $_ } @{$at{scalars}}], [(0.5, 1) x 6, 0, -1.5], 'scalars');
is_deeply([map { sprintf '%.6g', $_ } map { @{$at{$_}} } qw(resid_lambdas post_lambdas _mudd_gate_scale)], [(1.04881) x 12, (1) x 12, 0.1], 'lambdas, and the scale of the gates');
is_deeply([map { sprintf '%g', $_ } @{$at{mudd_b2}}], [(0) x 6, 20, 20, 10.4881, 10, 0, 0.5, 10.4881, 10, 0, -5, (0) x 12], 'biases of mu and nu');

my $again = train($exact, 'again', '--init-from', $init);
is(same_state(newest($whole), newest($again)), '', 'a run from the file is the run that wrote it');
my $out = train($trainer, 'bf16-init', '--save-init', "$dir/bf16.safetensors", qw(--stop-at 1));
my ($half) = tensors("$dir/bf16.safetensors");
is(join(' ', sort map { $half->{$_}{dtype} eq 'F32' ? $_ : () } keys %$half), '_mudd_gate_scale mlp_bank post_lambdas qk_bank resid_lambdas scalars vo_bank', 'bf16 build: banks and scalars are F32');

# Banks of another number of ranks, without padding, and in bf16.
my %size = (qk_bank => 16 * $d, vo_bank => $d * $d, mlp_bank => 2 * $matrix);
my %count = (qk_bank => 64, vo_bank => 24, mlp_bank => 6);
my $other = rewrite($init, "$dir/padded.safetensors", sub {
    my ($name, $x) = @_;
    return 1 if !$size{$name};
    $x->{shape}[0] = $count{$name};
    my @values = @{floats($x)}[0 .. $size{$name} * $count{$name} - 1];
    @$x{qw(dtype bytes)} = ('BF16', to_bf16(map { $_ // 0 } @values));
    return 1;
});
is(same_state(newest($whole), newest(train($exact, 'padded', '--init-from', $other))), '', 'banks with more matrices, or without the padding, in BF16: the same run');

# What the PyTorch program of record 89 writes besides, without metadata.
my %scales = map { ("_mlp_down_${_}_scales" => {dtype => 'F32', shape => [12], bytes => pack 'f<*', (1) x 12}) } qw(act proj proj_next);
my $theirs = rewrite($init, "$dir/theirs.safetensors", sub { %{$_[2]} = (); return 1 }, %scales);
is(same_state(newest($whole), newest(train($exact, 'theirs', '--init-from', $theirs))), '', 'a file with the scales of FP8 of another program: the same run');

sub refused {
    my ($what, $pattern, $tensor, $change) = @_;
    my $file = rewrite($init, "$dir/refused.safetensors", sub { $change->($_[1]) if $_[0] eq $tensor; return $_[0] ne $tensor || $_[1]{shape} });
    refuses($what, 1, $pattern, $exact, @small, '--out', "$dir/refused", '--init-from', $file);
}
refused('too few matrices', qr/refused\.safetensors: .*qk_bank: its first extent is 29, but .* needs 30/, 'qk_bank', sub { $_[0]{shape}[0] = 29; substr $_[0]{bytes}, -64 * $d, 64 * $d, '' });
refused('another orientation', qr/lm_head\.weight.*48.*384.*384.*48/, 'lm_head.weight', sub { $_[0]{shape} = [$vocab, $d] });
refused('embedding and head that differ', qr/embed\.weight: differs from lm_head\.weight, and both are one until step 3/, 'embed.weight', sub { substr $_[0]{bytes}, 4000, 1, 'x' });
refused('a sign that is none', qr/bigram_sign_table: holds other values than 1 and -1/, 'bigram_sign_table', sub { substr $_[0]{bytes}, 400, 4, pack 'f<', 0.5 });
refused('no signs', qr/bigram_sign_table/, 'bigram_sign_table', sub { delete $_[0]{shape} });

# ---- stop and go on ----------------------------------------------------------------------------------------------------

for my $stop (1 .. $steps - 1) {
    my $folder = train($exact, "stop$stop", '--stop-at', $stop);
    my ($x) = tensors(checkpoint($folder, $stop));
    my %has = map { $_ => exists $x->{$_} ? 1 : 0 } qw(embed.weight.grad lm_head.weight.grad embed.weight.adam_m lm_head.weight.adam_m);
    my ($tied, $odd) = ($stop <= 3, $stop % 2);
    is_deeply(\%has, {'embed.weight.grad' => !$tied && $odd ? 1 : 0, 'lm_head.weight.grad' => $odd, 'embed.weight.adam_m' => $tied ? 0 : 1, 'lm_head.weight.adam_m' => 1},
        "$stop steps: embedding and head are " . ($tied ? 'one' : 'two'));
    my $equal = "@{floats($x->{'embed.weight'})}" eq "@{transposed(floats($x->{'lm_head.weight'}), $d, $vocab)}" ? 1 : 0;
    is($equal, $stop <= 5 ? 1 : 0, '  and ' . ($equal ? 'equal' : 'differ'));
    is($x->{'embed.weight.adam_v'}{bytes}, $x->{'lm_head.weight.adam_v'}{bytes}, '  so is their state') if $stop == 4;
    train($exact, "stop$stop", '--resume', checkpoint($folder, $stop));
    is(same_state(newest($whole), checkpoint($folder, $steps)), '', "$stop + " . ($steps - $stop) . ' steps end in the same bits');
}
my ($end) = tensors(newest("$dir/bf16-init"));
ok("@{floats($end->{qk_bank})}" ne "@{rounded(floats($end->{qk_bank}))}", 'bf16 build: a checkpoint holds lower halves of the banks');

# ---- several ranks -----------------------------------------------------------------------------------------------------

# Sums in another order. How far that goes is measured by runs whose first weights are moved by one unit in the last place (of bf16
# for what is stored so): each of 8 steps may add one such error, the root mean square of three runs. One run does not measure it: adam_m is
# mostly that of one number, _mudd_gate_scale, a sum over all tokens, which three runs moved by 1.3e-4, 2.9e-4 and 8e-4 (-march=x86-64-v3).
my $seed = 5;
my $move = sub { ($seed = ($seed * 1103515245 + 12345) % 2**31) & 65536 ? 1 : -1 };
sub moved {
    return rewrite($init, "$dir/moved.safetensors", sub {
        my ($name, $x) = @_;
        $x->{bytes} = pack 'V*', map { $_ & 0x7fffffff ? $_ + $move->() : $_ } unpack 'V*', $x->{bytes} if $name !~ /embed.weight|lm_head|sign/;
        return 1;
    });
}
sub distances {
    my ($one, $other) = map { (tensors(newest($_)))[0] } @_;
    my (%sum, %count);
    for my $name (grep { !/rope|sign/ } keys %$one) {
        my $kind = $name =~ /(adam_m|adam_v|momentum|second)$/ ? $1 : $name =~ /embed|lm_head/ ? 'tables' : $name =~ /bank/ ? 'banks' : 'small';
        $sum{$kind} += distance(floats($one->{$name}), floats($other->{$name}))**2;
        $count{$kind}++;
    }
    return {map { $_ => sqrt $sum{$_} / $count{$_} } keys %sum};
}
my $yardstick = {};
for my $run (1 .. 3) {
    my $found = distances($whole, train($exact, "yardstick$run", '--init-from', moved()));
    $yardstick->{$_} += $found->{$_}**2 / 3 for keys %$found;
}
$_ = sqrt for values %$yardstick;
for my $ranks (2, 4) {
    my $folder = train($exact, "ranks$ranks", '--ranks', $ranks);
    my $found = distances($whole, $folder);
    cmp_ok($found->{$_}, '<=', $steps * $yardstick->{$_}, sprintf '%d ranks: %s within %.2g yardsticks of %.2g', $ranks, $_, $found->{$_} / $yardstick->{$_}, $yardstick->{$_}) for sort keys %$found;
    for my $stop (4, 6) {
        train($exact, "ranks$ranks-$stop", '--ranks', $ranks, '--stop-at', $stop);
        train($exact, "ranks$ranks-$stop", '--ranks', $ranks, '--resume', "$dir/ranks$ranks-$stop");
        is(same_state(newest($folder), newest("$dir/ranks$ranks-$stop")), '', "$ranks ranks: $stop + " . ($steps - $stop) . ' steps end in the same bits');
    }
}
# The network of August, whose attention is three rows.
my ($alone, $shared) = map { losses(train($exact, "august$_", '--ranks', $_, qw(--preset toy-2026-08))) } 1, 2;
my ($worst) = sort { $b <=> $a } map { abs($shared->{$_} / $alone->{$_} - 1) } 1 .. $steps;
cmp_ok($worst, '<', 1e-6, "toy-2026-08 on two ranks: losses within $worst");
# What one rank left goes on on four, and the other way.
for ([1, 4], [4, 1]) {
    my ($first, $then) = @$_;
    train($exact, "from$first", '--ranks', $first, '--stop-at', 3);
    my $found = distances($whole, train($exact, "from$first", '--ranks', $then, '--resume', "$dir/from$first"));
    cmp_ok($found->{$_}, '<=', $steps * $yardstick->{$_}, "$first ranks, then $then: $_") for sort keys %$found;
}

# ---- delayed scales of the MLP's FP8 -----------------------------------------------------------------------------------

my @fp8 = qw(--head fp8 --mlp fp8);
sub scales { my ($x) = tensors(newest($_[0])); return {map { $_ => join ' ', @{floats($x->{$_})} } grep { /^fp8/ } keys %$x} }
for my $rule (qw(by-micro-batch sequential)) {
    my @rule = (@fp8, '--fp8-scales', $rule);
    my $folder = train($trainer, "fp8-$rule", @rule);
    my ($x) = tensors(newest($folder));
    is_deeply({map { $_ => "@{$x->{$_}{shape}}" } grep { /^fp8/ } keys %$x},
        {map { $_ => "1 $layers" } 'fp8.mlp_down.next_scale', map { "fp8.mlp_activation.$_.scale" } $rule eq 'sequential' ? 0 : 0 .. 3}, "$rule: scales in the checkpoint");
    for my $stop (1, 4) { # c_proj's scales are exact, and delayed
        train($trainer, "fp8-$rule-$stop", @rule, '--stop-at', $stop);
        train($trainer, "fp8-$rule-$stop", '--resume', "$dir/fp8-$rule-$stop", '--fp8-scales', $rule);
        is(same_state(newest($folder), newest("$dir/fp8-$rule-$stop")), '', "$rule: $stop + " . ($steps - $stop) . ' steps end in the same bits');
    }
}
isnt(join(' ', map { $_ // '' } @{losses("$dir/fp8-sequential")}{1 .. $steps}), join(' ', map { $_ // '' } @{losses("$dir/fp8-by-micro-batch")}{1 .. $steps}), 'they are two runs');
# One step: all ranks have the same weights, so that every micro-batch has the same activations on any of them.
my $of_one = scales(train($exact, 'fp8-one', @fp8, '--init-from', $init, '--stop-at', 1));
for my $ranks (2, 4) {
    my @ranks = (@fp8, '--init-from', $init, '--ranks', $ranks);
    is_deeply(scales(train($exact, "fp8-first$ranks", @ranks, '--stop-at', 1)), $of_one, "$ranks ranks: the scales of one");
    my $folder = train($exact, "fp8-ranks$ranks", @ranks);
    train($exact, "fp8-ranks$ranks-4", @ranks, '--stop-at', 4);
    train($exact, "fp8-ranks$ranks-4", '--ranks', $ranks, '--resume', "$dir/fp8-ranks$ranks-4");
    is(same_state(newest($folder), newest("$dir/fp8-ranks$ranks-4")), '', '  stop and go on: the same bits');
}
is(scalar(keys %{{reverse %$of_one}}), 5, 'no two sets are equal');
refuses('one order of all micro-batches on two ranks', 2, qr/--fp8-scales sequential is for one GPU, and this run has 2 ranks/, $exact, @small, @fp8, qw(--fp8-scales sequential --ranks 2), '--out', "$dir/refused");

# ---- MLP up alone in FP8 -----------------------------------------------------------------------------------------------

my @may = (qw(--preset 2026-05-27 --model-dim 48 --mlp-dim 64 --block-size 1 --micro-batch-tokens 64 --stage-tokens), '32,48,64,64', '--stage-documents', '20,40,40,40',
    qw(--num-scheduled 5 --num-extension 3 --val-tokens 512 --head bf16));
my $may = train($trainer, 'may', @may);
like(log_text($may, 'jsonl'), qr/; head bf16, MLP fp8 \(up alone\), QKV bf16/, '2026-05-27: the log says what is FP8');
is_deeply(scales($may), {}, '  its scales follow from the weights and the batch: a checkpoint has none');
for my $stop (1, 4) {
    train($trainer, "may-$stop", @may, '--stop-at', $stop);
    train($trainer, "may-$stop", @may, '--resume', "$dir/may-$stop");
    is(same_state(newest($may), newest("$dir/may-$stop")), '', "  $stop + " . ($steps - $stop) . ' steps end in the same bits');
}
# The first step's MLP down is zero, and so is what FP8 does.
my ($up, $none) = map { losses($_) } $may, train($trainer, 'may-bf16', @may, qw(--mlp bf16));
is($up->{1}, $none->{1}, '  the first loss is that in bf16');
my @apart = sort { $a <=> $b } map { abs($up->{$_} / $none->{$_} - 1) } 3 .. $steps;
ok($apart[0] > 0 && $apart[-1] < 0.02, "  the others are apart, by $apart[0] to $apart[-1]");
refuses('scales of both directions', 2, qr/--mlp fp8-backward: the network of preset 2026-05-27 has no scales for the backward; use fp8 or bf16/, $trainer, @small, @may, qw(--mlp fp8-backward), '--out', "$dir/refused");

done_testing;
