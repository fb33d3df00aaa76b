#!/usr/bin/env perl
# What cannot work gets one line on stderr and a status, and nothing that was there before is lost: options, shards, checkpoints,
# disks that fill up.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
my $train = write_shard('train_1.bin', documents(24000, 1));
my $val = write_shard('val.bin', documents(700, 2));
my @run = ($trainer, @tiny, '--out', "$dir/out");
# One step is enough where a fault should show before it.
my @short = (@run, qw(--num-scheduled 2 --num-extension 0));

# ---- options: status 2 -------------------------------------------------------------------------------------------------

for (['an unknown option', qr/unknown option --lerning-rate; see --help/, '--lerning-rate', 1],
    ['a word that is no option', qr/unexpected argument 'train'/, 'train'],
    ['a missing value', qr/--seed: needs a value/, '--seed'],
    ['an unknown preset', qr/no preset 'huge'; there are .*tiny/, '--preset', 'huge'],
    ['no number', qr/--num-scheduled: 'many' is not a number/, '--num-scheduled', 'many'],
    ['half a number', qr/--num-scheduled: '3x' is not a number/, '--num-scheduled=3x'],
    ['a fraction of a step', qr/'2.5' is not a whole number/, '--num-scheduled', '2.5'],
    ['no steps', qr/--num-scheduled: 0 is out of range, must be 1 to/, '--num-scheduled', 0],
    ['a negative size', qr/--model-dim: -64 is out of range/, '--model-dim', -64],
    ['micro-batches of no tokens', qr/--micro-batch-tokens: 0 is out of range/, '--micro-batch-tokens', 0],
    ['groups that do not make a step', qr/--group-micro-batches is 3; it must divide the step's 8 micro-batches/, '--group-micro-batches', 3],
    ['no micro-batches', qr/--micro-batches: 0 is out of range/, '--micro-batches', 0],
    ['no validation tokens', qr/--val-tokens: 0 is out of range/, '--val-tokens', 0],
    ['infinity', qr/--adam-rate: 'inf' is not a number/, '--adam-rate', 'inf'],
    ['an unknown variant', qr/--ns: 'muon' is none of kj\|/, '--ns', 'muon'],
    ['a flag with another value', qr/--repeat: takes no value, or 0 or 1/, '--repeat=yes'],
    ['heads that do not divide the width', qr/--model-dim 32 is not a multiple of --num-heads 3/, '--num-heads', 3],
    ['heads that are too narrow', qr/head width 4 /, '--num-heads', 8],
    ['heads that are too wide', qr/head width 8192 /, '--model-dim', 8192, '--num-heads', 1],
    ['a step too large to count', qr/too many tokens for one step/, '--micro-batches', 4096, '--micro-batch-tokens', 16777216],
    ['a window too large to count', qr/--window-final: at most 32767 blocks/, '--block-size', 65536, '--window-final', 1000000],
    ['windows that are no numbers', qr/--window-schedule: '3,,7' is not a list/, '--window-schedule', '3,,7'],
    ['two sources of weights', qr/--init-from and --resume exclude each other/, '--init-from', 'a', '--resume', 'b'],
    ['a stop behind the end', qr/--stop-at 21 lies behind the last step, 20/, '--stop-at', 21],
    ['validation in odd pieces', qr/--val-tokens 700 is not a multiple of a validation sequence, 512/, '--val-tokens', 700],
    ['--eval-only of nothing', qr/need weights: --init-from or --resume/, '--eval-only'])
{
    my ($what, $pattern, @options) = @$_;
    refuses($what, 2, $pattern, @run, @options);
}
ok(!glob("$dir/out/*"), 'a refused command line leaves no run folder behind');

# ---- shards: status 1 --------------------------------------------------------------------------------------------------

my $good = slurp($train);
sub header { my ($word, $value) = @_; my @words = unpack 'l<256', $good; $words[$word] = $value; return pack('l<256', @words) . substr $good, 1024 }
my %shard = (
    empty => ['', qr/the file is empty/],
    short_header => [substr($good, 0, 500), qr/truncated: 500 bytes/],
    truncated => [substr($good, 0, -1), qr/truncated: 49023 bytes, but its header promises 24000 tokens/],
    oversized => ["$good\0\0", qr/longer than its header says/],
    foreign => ["PK\3\4" . 'x' x 5000, qr/not a token shard/],
    version => [header(1, 2), qr/version 2, only version 1/],
    negative => [header(2, -5), qr/promises -5 tokens/],
    id => [substr($good, 0, 1024 + 100) . "\xff\xff" . substr($good, 1024 + 102), qr/token 50 has id 65535, outside the vocabulary of 257/],
    no_start => [pack('l<256', 20240520, 1, 12000, 257, 257, (0) x 251) . "a\0" x 12000, qr/holds no document start \(token 256\)/],
    too_small => [pack('l<256', 20240520, 1, 300, 257, 257, (0) x 251) . "\0\1" . "a\0" x 299, qr/too small: its 300 tokens/],
);
for my $name (sort keys %shard) {
    my ($bytes, $pattern) = @{$shard{$name}};
    spew("$dir/bad_$name.bin", $bytes);
    refuses("training shard: $name", 1, qr/bad_$name\.bin: .*$pattern/, @short, '--train-files', "$dir/bad_$name.bin");
    next if $name eq 'too_small';
    refuses("validation shard: $name", 1, qr/bad_$name\.bin: .*$pattern/, @short, '--val-files', "$dir/bad_$name.bin");
}
refuses('GPUs for the CPU program', 2, qr/--gpus 2: this is the CPU program; --ranks N starts/, @short, '--gpus', 2) if $trainer =~ /_cpu$/;
{
    local @ENV{qw(RANK WORLD_SIZE)} = (1, 2);
    refuses('a rank that knows no rank 0', 2, qr/started as rank 1 of 2 \(WORLD_SIZE\), but MASTER_ADDR, .* is not set/, @short);
}
for ('2x', '-1', 0) {
    local @ENV{qw(RANK WORLD_SIZE)} = (0, $_);
    refuses("$_ ranks", 2, qr/WORLD_SIZE is '$_' and not a number of ranks/, @short);
}
{
    local @ENV{qw(RANK WORLD_SIZE LOCAL_WORLD_SIZE)} = (1, 2, 2);
    refuses('ranks of ranks', 2, qr/--gpus and --ranks start ranks, but this is one of 2/, @short, '--ranks', 2) if $trainer =~ /_cpu$/;
}
refuses('a glob that matches nothing', 1, qr/--train-files: no file matches '\/none\*\.bin'/, @short, '--train-files', '/none*.bin');
refuses('no validation shard', 1, qr/--val-files: no file matches/, @short, '--val-files', "$dir/none.bin");
refuses('several validation shards', 1, qr/matches 2 files/, @short, '--val-files', "$dir/bad_t*.bin");
refuses('a folder', 1, qr/is a directory/, @short, '--train-files', $dir);
SKIP: {
    skip 'the superuser may read everything', 1 if $> == 0;
    chmod 0000, my $locked = write_shard('locked.bin', documents(24000, 1));
    refuses('an unreadable shard', 1, qr/locked\.bin: cannot be opened: Permission denied/, @short, '--train-files', $locked);
}
symlink 'loop.bin', "$dir/loop.bin";
refuses('a shard that cannot be opened', 1, qr/(loop\.bin: cannot be opened|no file matches)/, @short, '--train-files', "$dir/loop.bin");
refuses('a vocabulary smaller than the token ids', 1, qr/vocabulary of 257, but 200 is needed/, @short, '--vocab-size', 200);
spew("$dir/gpt2.bin", pack('l<256', 20240520, 1, 24000, (0) x 253) . pack('S<*', (50256, (1) x 99) x 240));
refuses('training and validation of two vocabularies', 1, qr/val\.bin: holds ids of a vocabulary of 257, but 50257/, @short, '--train-files', "$dir/gpt2.bin");
refuses('too little validation text', 1, qr/holds 700 tokens, but --val-tokens 1024 needs one more.*at most --val-tokens 512/, @short, '--val-tokens', 1024);

# ---- the data ends, the folder is wrong --------------------------------------------------------------------------------

write_shard('small.bin', documents(6000, 3));
my ($status, $out, $err) = run(@run, '--train-files', "$dir/small.bin", '--out', "$dir/ended", '--checkpoint-every', 2);
ok($status eq '1' && $err =~ /\A[^\n]*step \d+: .*the training data ends here, after 1 pass .*--repeat or --epochs\n\z/, 'the data ends: one line') or diag $err;
my ($last) = $err =~ /step (\d+):/;
is(newest("$dir/ended"), checkpoint("$dir/ended", $last), 'and the state of that step is saved');
my @given = (@run, '--train-files', "$dir/small.bin", '--epochs', 4);
run_ok('more passes go on from it', @given, '--out', "$dir/ended", '--resume', "$dir/ended");
run_ok('--epochs 4 goes round', @given, '--out', "$dir/epochs");
is(same_state(map { checkpoint("$dir/$_", 20) } qw(ended epochs)), '', 'to the same bits as if the data had not ended');
run_ok('and so does --repeat', @run, '--train-files', "$dir/small.bin", '--out', "$dir/repeat", '--repeat');
spew("$dir/file", 'precious');
refuses('--out is a file', 1, qr/--out .*file: cannot make this folder/, @short, '--out', "$dir/file");
refuses('--out is empty', 1, qr{--out is empty; give a folder}, @short, '--out', '');
refuses('--out lies in a file', 1, qr/--out .*cannot make this folder: Not a directory/, @short, '--out', "$dir/file/below");
is(slurp("$dir/file"), 'precious', 'which is left alone');
for ('other_train', 'other_val') { # a vocabulary that is neither bytes nor GPT-2
    spew("$dir/$_.bin", header(3, 300));
}
my @other = (@short, '--train-files', "$dir/other_train.bin", '--val-files', "$dir/other_val.bin", '--out', "$dir/other");
refuses('a sample without its vocabulary', 1, qr/--sample needs --vocab, a folder/, @other, '--sample', 'abc');
refuses('a sample with another vocabulary', 1, qr/--vocab bytes: has 257 tokens, the model 300/, @other, '--sample', 'abc', '--vocab', 'bytes');
refuses('a vocabulary that is missing', 1, qr/--vocab: .*none/, @other, '--sample', 'abc', '--vocab', "$dir/none");
ok(!glob("$dir/other/*"), 'before any training');
# The context is what validation evaluates at a time, at most its sequence of 512 tokens.
refuses('a prompt longer than the context', 1,
    qr/--sample: the prompt has 511 tokens; without a cache \(--kv-cache\) sequences of (\d+) tokens leave room for (??{ $1 <= 512 ? $1 - 2 : 'less' })$/m,
    @short, '--kv-cache', 'off', '--sample', 'a' x 511, '--out', "$dir/prompt");
refuses('a context too short for any prompt', 1, qr/--sample: the prompt has 0 tokens; without a cache .* sequences of 15 tokens leave room for 0/,
    @short, '--kv-cache', 'off', '--sample', '', '--val-tokens', 15, '--out', "$dir/prompt");
ok(!glob("$dir/prompt/*"), 'before any training, too');
refuses('--save-init into nowhere', 1, qr/--save-init: .*No such file or directory/, @short, '--save-init', "$dir/nowhere/init.safetensors");

# ---- checkpoints -------------------------------------------------------------------------------------------------------

run_ok('a run to damage', @run, '--stop-at', 3, '--save-init', "$dir/init.safetensors");
my $checkpoint = checkpoint("$dir/out", 3);
my @go_on = ($trainer, @tiny, '--out', "$dir/resumed");
my $bytes = slurp($checkpoint);
spew("$dir/cut.safetensors", substr $bytes, 0, length($bytes) / 2);
spew("$dir/text.safetensors", 'no container at all');
spew("$dir/nothing.safetensors", '');
mkdir "$dir/no_checkpoints";
refuses("--resume: $_->[0]", 1, $_->[1], @go_on, '--resume', "$dir/$_->[0]")
    for ['cut.safetensors', qr/--resume: .*cut\.safetensors: /], ['text.safetensors', qr/text\.safetensors: /],
    ['nothing.safetensors', qr/nothing\.safetensors: /], ['missing.safetensors', qr/missing\.safetensors: .*No such file/],
    ['no_checkpoints', qr/no_checkpoints: no checkpoint \(step_\*\.safetensors\) in this folder or its run folders; name the folder that holds the run, like runs\/quickstart$/];
refuses('--resume from weights alone', 1, qr/holds weights but no training state .*use --init-from/, @go_on, '--resume', "$dir/init.safetensors");

sub damaged { my ($name, $change) = @_; return rewrite($checkpoint, "$dir/$name.safetensors", $change) }
my $missing = damaged('lacking', sub { $_[0] ne 'blocks.3.mlp.c_fc' });
refuses('a missing tensor', 1, qr/lacking\.safetensors: .*blocks\.3\.mlp\.c_fc/, @go_on, '--resume', $missing);
refuses('a missing tensor of --init-from', 1, qr/lacking\.safetensors: .*blocks\.3\.mlp\.c_fc/, @go_on, '--init-from', $missing);
my $turned = damaged('turned', sub { $_[1]{shape} = [128, 32] if $_[0] eq 'blocks.3.mlp.c_fc'; 1 });
refuses('a tensor of another shape', 1, qr/turned\.safetensors: .*blocks\.3\.mlp\.c_fc.*32.*128.*128.*32/, @go_on, '--resume', $turned);
my $state = damaged('state', sub { $_[0] ne 'lm_head.weight.adam_v' });
refuses('a missing moment', 1, qr/state\.safetensors: .*lm_head\.weight\.adam_v/, @go_on, '--resume', $state);
my $left = damaged('left', sub { $_[0] ne 'embed.weight.grad' });
refuses('a missing left-over gradient', 1, qr/left\.safetensors: .*embed\.weight\.grad/, @go_on, '--resume', $left);
my $integers = damaged('integers', sub { $_[1]{dtype} = 'I32' if $_[0] eq 'blocks.3.mlp.c_fc'; 1 });
refuses('a tensor of integers', 1, qr/integers\.safetensors: .*blocks\.3\.mlp\.c_fc.*I32/, @go_on, '--resume', $integers);
my $scalars = damaged('scalars', sub { @{$_[1]}{qw(shape bytes)} = ([40], "\0" x 160) if $_[0] eq 'scalars'; 1 });
refuses('too few scalars', 1, qr/scalars: expected F32 with 62 to 64 values/, @go_on, '--init-from', $scalars);
for (['step', -1], ['step', 99999], ['data.position', 'here'], ['rope.window', 0], ['rope.window', 2147483647],
    ['rope.scale', 'nan'], ['step', '3x'], ['step', ' 3'], ['train_ms', 'nan'], ['train_ms', -1], ['train_ms', '12ms'], ['data.position', '0 0'],
    ['data.position', '0 0 1 2']) {
    my ($key, $value) = @$_;
    my $file = damaged('meta', sub { $_[2]{$key} = "$value"; 1 });
    refuses("$key of $value", 1, qr/training state in its metadata is damaged/, @go_on, '--resume', $file);
}
for (-5, 0, 'abc', 99999999) {
    my $file = damaged('vocabulary', sub { $_[2]{'option.vocab-size'} = "$_"; 1 });
    refuses("a vocabulary of $_", 1, qr/vocabulary\.safetensors: does not say its vocabulary; give --vocab-size/, $trainer, qw(--preset tiny --model-dim 32 --num-heads 2 --mlp-dim 128 --init-from), $file, qw(--sample a));
}
for (['rope.scale', 0.2], ['rope.window', 7]) {
    my ($key, $value) = @$_;
    my $file = damaged('schedule', sub { $_[2]{$key} = "$value"; 1 });
    refuses("$key of $value, which is not the schedule's", 1,
        qr/training state is damaged: window \d+, attention scale/, @go_on, '--resume', $file);
}

# Random changes of the file itself, and checksums that are gone.
my ($random, $start) = (4711, 8 + unpack 'Q<', $bytes);
for (1 .. 8) {
    $random = ($random * 1103515245 + 12345) % 2**31;
    my $at = $start + $random % (length($bytes) - $start);
    my $changed = $bytes;
    substr($changed, $at, 1) = chr(255 ^ ord substr $bytes, $at, 1);
    spew("$dir/changed.safetensors", $changed);
    refuses("byte $at is another", 1,
        qr/changed\.safetensors: tensor '[^']+' does not have its checksum: the file is damaged/, @go_on, '--resume',
        "$dir/changed.safetensors");
}
spew("$dir/changed.safetensors", $bytes =~ s/"step":"3"/"step":"2"/r);
refuses('another step in the header', 1, qr/changed\.safetensors: the header does not have its checksum/,
    @go_on, '--resume', "$dir/changed.safetensors");
my $bare = damaged('bare', sub { $_[2]{format} = 'gpt-speedrun checkpoint 2 '; 1 });
refuses('a format that is not known', 1,
    qr/bare\.safetensors: is of format 'gpt-speedrun checkpoint 2 ', which this program does not know/, @go_on, '--resume', $bare);
spew("$dir/bare.safetensors", slurp($bare) =~ s/checkpoint 2 "/checkpoint 2"/r =~ s/^(.{8})/pack 'Q<',
    unpack('Q<', $1) - 1/ser);
refuses('checksums that are gone', 1, qr/bare\.safetensors: has lost its checksums/, @go_on, '--resume',
    "$dir/bare.safetensors");

for (['0 7 0', qr/shard/], ['0 0 999999', qr/./], ['-1 0 0', qr/./]) {
    my ($position, $pattern) = @$_;
    my $file = damaged('position', sub { $_[2]{'data.position'} = $position; 1 });
    refuses("a data position that is not there ($position)", 1, $pattern, @go_on, '--resume', $file);
}
for (['--weight-decay', '0.5', '1.2'], ['--ns', 'turbo', 'polar'], ['--num-scheduled', 17, 16], ['--mlp-dim', 256, 128], ['--head', 'fp8', 'bf16'], ['--mlp', 'fp8', 'bf16']) {
    my ($option, $value, $was) = @$_;
    refuses("$option differs", 1, qr/made with $option \Q$was\E\S*, but this run has \Q$value\E/, @go_on, '--resume', $checkpoint, $option, $value);
}
refuses('another preset', 1, qr/made with --preset tiny and --network 2025-11-18, but this run has 2025-10-27 and 2025-10-27;/, @go_on, '--resume', $checkpoint,
    '--preset', '2025-10-27');
refuses('--init-from of another size', 1, qr/init\.safetensors: .*: expected .*384.*64.*found .*384.*32|embed\.weight/, @go_on, '--init-from', "$dir/init.safetensors", '--model-dim', 64);
refuses('a stop that is past', 2, qr/--stop-at 2: the checkpoint is already at step 3/, @go_on, '--resume', $checkpoint, '--stop-at', 2);
is(slurp($checkpoint), $bytes, 'the checkpoint itself is untouched');

# ---- little memory -----------------------------------------------------------------------------------------------------

# kB of address space: too little for a library, for one buffer of OpenBLAS, for one of each thread. Its allocator tries for ever.
SKIP: {
    skip 'sanitizers need address space of their own', 6 if ($ENV{BUILD} // '') =~ /sanitize/;
    for my $limit (40_000, 52_000, 60_000, 120_000, 174_000, 250_000) {
        ($status, $out, $err) = finish(start('bash', '-c', "ulimit -v $limit; exec \"\$@\"", 'bash', @run, '--stop-at', 1, '--threads', 2), 30);
        my $lines = () = $err =~ /\n/g;
        ok($status eq 0 || $status eq 1 && $lines == 1, "ulimit -v $limit: status $status, " . substr $err, 0, 120) or diag $err;
    }
}

# ---- a full disk during a save -----------------------------------------------------------------------------------------

# A limit on the size of files, in blocks of 1024 bytes, fails a write exactly like a full disk. The log begins with the
# source, so the model is made as large as it takes that only the checkpoint does not fit.
my ($full, @large) = ("$dir/full", @tiny, '--mlp-dim', 1024);
run_ok('up to step 6', $trainer, @large, '--out', $full, '--stop-at', 6);
my $old = slurp(checkpoint("$full", 6));
cmp_ok(length $old, '>', 2 * length log_text($full), 'the checkpoint is much larger than the log');
my $limit = int((length($old) - 100_000) / 1024);
my @limited = ('bash', '-c', "ulimit -f $limit; exec \"\$@\"", 'bash', $trainer, @large, '--out', $full);
($status, $out, $err) = run(@limited, '--resume', $full, '--checkpoint-every', 6);
is($status, 1, 'a run whose last save fails has failed');
my @notes = split /\n/, $err;
ok(@notes == 3 && $notes[0] =~ /checkpoint not saved, training goes on: .*step_000012\.safetensors: .*make room/ && $notes[2] =~ /step_000020/,
    "but it goes on to the end: $notes[0]") or diag $err;
ok(val_losses($full)->{20}, 'with the last validation');
is(slurp(checkpoint("$full", 6)), $old, 'the old checkpoint survives');
is_deeply([map { s{.*/}{}r } glob "$full/*/step*"], ['step_000006.safetensors'], 'and no half-written file is left');
run_ok('with room again, it resumes', $trainer, @large, '--out', $full, '--resume', $full);
run_ok('the whole run', $trainer, @large, '--out', "$dir/whole");
is(same_state(checkpoint("$full", 20), checkpoint("$dir/whole", 20)), '', 'and nothing was lost');

SKIP: {
    my $mount = "$dir/tmpfs";
    mkdir $mount;
    run_ok('a run with one checkpoint', $trainer, @tiny, '--out', "$dir/one", '--stop-at', 5);
    my $room = length(slurp(checkpoint("$dir/one", 5))) / 2; # and what the run took
    $room += -s for glob "$dir/one/*/*";
    skip 'cannot mount a small file system', 7 if system('mount', '-t', 'tmpfs', '-o', 'size=' . int($room), 'none', $mount) != 0;
    ($status, $out, $err) = run($trainer, @tiny, '--out', $mount, '--checkpoint-every', 5); # the first fits, the second does not
    ok($status eq '1' && $err =~ /step_000010\.safetensors: .*No space left on device/, 'a full file system is named') or diag "$status $err";
    ok(eval { tensors(checkpoint("$mount", 5)); 1 }, 'and the checkpoint before is whole') or diag $@;
    unlike($err, qr/ are free on this disk/, 'there was room for one at the start');
    my $size = -s checkpoint("$dir/whole", 20);
    for my $ranks (1, 2) {
        system "umount '$mount'; mount -t tmpfs -o size=" . ($size & ~4095) . " none '$mount'";
        ($status, $out, $err) = run($trainer, @large, '--ranks', $ranks, '--out', $mount);
        my @lines = split /\n/, $err;
        my ($free, $needed) = $lines[0] =~ / note: \Q$mount\E\S+: ([\d.]+) MiB are free on this disk, and a checkpoint takes ([\d.]+): make room before one is saved$/;
        ok($status eq '1' && $free && $lines[1] =~ /checkpoint not saved/ && $err !~ /are free.*are free/s, "too little room has a note at the start, $ranks ranks: $lines[0]") or diag $err;
        cmp_ok(abs(($needed // 0) - $size / 2**20), '<', 0.1, "which knows the size of a checkpoint, $size bytes");
    }
    system "umount '$mount'";
}
done_testing;
