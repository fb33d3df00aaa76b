#!/usr/bin/env perl
# --tensorboard: the events of a run and of the run that goes on from its checkpoint say what the JSON lines
# say; read here, and by TensorBoard itself where it is installed (PYTHON: the interpreter that has it).
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use JSON::PP ();
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my $out = "$dir/runs";
run_ok('a run until step 8', $trainer, @tiny, '--tensorboard', '--out', $out, qw(--stop-at 8 --checkpoint-every 5));
my ($run) = glob "$out/*";
my @before = glob "$run/*tfevents*";
is(scalar @before, 1, 'writes an event file into its folder');
run_ok('and goes on from step 5', $trainer, '--resume', "$run/step_000005.safetensors");
my @files = sort glob "$run/*tfevents*";
is(scalar @files, 2, 'in a second file');
is($files[0], $before[0], 'whose name comes later');

# ---- what the logs say -------------------------------------------------------------------------------------

# tag => {step => value}, of all JSON lines of a run. The steps after a checkpoint count as they were taken last.
my %tag = (
    loss => 'loss/train', lr => 'schedule/learning_rate', momentum => 'schedule/momentum', ms => 'speed/step_ms',
    val_loss => 'loss/validation');
my %wanted;
sub forget { my ($of, $first) = @_; for my $steps (values %$of) { delete @$steps{grep { $_ >= $first } keys %$steps} } }
my @logs = sort { $a =~ /"resumed"/ <=> $b =~ /"resumed"/ } map { slurp($_) } glob "$run/*.jsonl";
for my $line (map { split /\n/ } @logs) {
    my $record = JSON::PP::decode_json($line);
    forget(\%wanted, 1 + $1) if ($record->{resumed} // '') =~ /from step (\d+)/;
    for (grep { defined $record->{$_} } keys %tag) { $wanted{$tag{$_}}{$record->{step}} = $record->{$_} }
}
is(join(' ', map { scalar keys %{$wanted{$_}} } sort keys %wanted), '20 5 20 20 20',
    'the JSON lines hold all steps');

# Whether tag => {step => value} is the same to the precision of fp32.
sub same_numbers {
    my ($got, $what) = @_;
    my @different;
    for my $name (sort keys %wanted) {
        push @different, "$name: " . join ' ', sort keys %{$got->{$name} // {}}
            if join(' ', sort keys %{$wanted{$name}}) ne join(' ', sort keys %{$got->{$name} // {}});
        for my $step (keys %{$wanted{$name}}) {
            my ($a, $b) = ($wanted{$name}{$step}, $got->{$name}{$step} // 'nan');
            push @different, "$name $step: $a, $b" if !(abs($a - $b) <= 1e-7 * abs $a);
        }
    }
    is(join("\n", @different), '', $what);
}

# ---- the events, field by field ----------------------------------------------------------------------------

sub varint { # at the front of $_[0], which loses it
    my ($x, $shift) = (0, 0);
    while (1) {
        my $byte = ord substr $_[0], 0, 1, '';
        $x |= ($byte & 127) << $shift;
        return $x if $byte < 128;
        $shift += 7;
    }
}

# A message's fields in order, [number, bytes or number].
sub fields {
    my ($bytes) = @_;
    my @fields;
    while (length $bytes) {
        my $key = varint($bytes);
        my $type = $key & 7;
        push @fields, [$key >> 3,
            $type == 0 ? varint($bytes)
          : $type == 1 ? unpack('d<', substr $bytes, 0, 8, '')
          : $type == 5 ? unpack('f<', substr $bytes, 0, 4, '')
          : do { my $n = varint($bytes); substr $bytes, 0, $n, '' }];
    }
    return @fields;
}

my (%got, @versions, @starts);
for my $file (@files) {
    my $bytes = slurp($file);
    while (length $bytes) {
        my $length = unpack 'Q<', $bytes;
        my %event = map { @$_ } fields(substr $bytes, 12, $length);
        substr $bytes, 0, 16 + $length, '';
        push @versions, $event{3} if defined $event{3};
        if (defined $event{7}) {
            push @starts, $event{2};
            forget(\%got, $event{2});
        }
        for my $value (map { $_->[1] } fields($event{5} // '')) {
            my %value = map { @$_ } fields($value);
            $got{$value{1}}{$event{2} // 0} = $value{2};
        }
    }
}
is("@versions", 'brain.Event:2 brain.Event:2', 'each file begins with its version');
is("@starts", '6', 'the second one with the step it starts with');
same_numbers(\%got, 'and all numbers are those of the JSON lines');

# ---- TensorBoard -------------------------------------------------------------------------------------------

my $python = $ENV{PYTHON} // 'python3';
SKIP: {
    skip "tensorboard is not here: PYTHON=... names an interpreter that has it", 3
        if system "'$python' -c 'import tensorboard' >/dev/null 2>&1";
    spew("$dir/read.py", <<'END');
import json, sys
from tensorboard.backend.event_processing import event_accumulator
reader = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={event_accumulator.SCALARS: 0})
reader.Reload()
print(json.dumps({tag: [[e.step, e.value] for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}))
END
    my ($status, $text, $err) = run($python, "$dir/read.py", $run);
    my $read = eval { JSON::PP::decode_json($text) };
    ok($status eq '0' && $read, 'TensorBoard reads the folder') or diag "$status\n$err";
    my @train = @{$read->{'loss/train'} // []};
    is(scalar @train, 20, 'every step once');
    my %read = map { my $tag = $_; $tag => {map { @$_ } @{$read->{$tag}}} } keys %{$read // {}};
    same_numbers(\%read, 'and finds the same numbers');
}
done_testing();
