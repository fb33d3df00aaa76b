#!/usr/bin/env perl
# Every run has a folder of its own below --out; --resume finds the newest checkpoint, takes the options that it holds and goes on
# in its folder; where nothing can be written shows before anything else; and runs whose loss is no number fail.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../../scripts";
use TrainTest;
use File::Basename qw(basename dirname);
use RunLog;
use Test::More;
use Time::HiRes qw(sleep time);

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
my @uuid = ('[0-9a-f]{8}', '-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}');
sub entries { my ($folder) = @_; opendir my $d, $folder or return; return sort grep { !/^\.\.?$/ } readdir $d }
sub folders { my ($out) = @_; return grep { -d } map { "$out/$_" } entries($out) }

# A closed standard stream does not give its number to a file or a socket of the run.
for my $ranks (1, 2) {
    my $path = "$dir/closed$ranks";
    my ($status) = run('sh', '-c', 'exec "$@" <&- >&- 2>&-', 'sh', $trainer, @tiny, qw(--num-scheduled 4 --num-extension 0 --ranks), $ranks, '--out', $path);
    is($status, 0, "$ranks ranks with all standard streams closed");
    my @lines = split /\n/, log_text($path, 'jsonl');
    is(scalar(grep { /^\{.*\}\z/ } @lines), scalar @lines, 'and nothing but records in the log');
    ($status) = run('sh', '-c', 'exec "$@" <&-', 'sh', $trainer, '--resume', $path, '--eval-only', '--ranks', $ranks);
    is($status, 0, 'and standard input alone in a validation');
}

# ---- one folder a run --------------------------------------------------------------------------------------------------

# The path of the first shows that a run with no options but these makes the folders above its own.
my $out = "$dir/new/runs";
my @both = map { start($trainer, @tiny, '--out', $out, '--seed', $_, '--checkpoint-every', 8) } 1, 2;
for (@both) {
    my ($status, undef, $err) = finish($_);
    is("$status $err", '0 ', 'two runs of the same second into one --out');
}
my @runs = folders($out);
is(scalar @runs, 2, 'make two folders');
is_deeply([entries($out)], [map { basename($_) } @runs], 'and nothing beside them');
for my $run (@runs) {
    my ($id) = basename($run) =~ /\A\d{4}-\d\d-\d\d_tiny_([0-9a-f]{8})\z/;
    ok($id, 'named by date, preset and id: ' . basename($run)) or next;
    my @files = entries($run);
    is(scalar @files, 6, 'with three checkpoints, two logs and its options');
    like($files[0], qr/\A$id$uuid[1]\.jsonl\z/, 'whose names begin with the id');
    is_deeply([@files[2 .. 5]], ['run.toml', map { sprintf 'step_%06d.safetensors', $_ } 8, 16, 20], 'checkpoints lie beside them');
}
my %seed = map { (tensors("$_/step_000020.safetensors"))[1]{'option.seed'} => $_ } @runs;
is(join(' ', sort keys %seed), '1 2', 'none wrote over the other');

# ---- --resume with nothing else ----------------------------------------------------------------------------------------

my ($first, $second) = @seed{1, 2};
my $whole = "$first/step_000020.safetensors";
unlink $whole;
rename "$second/step_000020.safetensors", "$dir/whole2";
rename "$second/step_000016.safetensors", "$dir/sixteen2";
utime time - 50, time - 50, glob "$second/step*";
my ($console) = run_ok('--resume OUT, without any other option', $trainer, '--resume', $out);
like($console, qr{^resumed \Q$first\E/step_000016\.safetensors: 16 of 20 steps are done$}m, 'takes the newest run and says so');
like($console, qr{^log \Q$first\E/}m, 'goes on in its folder');
ok(-s $whole && !-e "$second/step_000020.safetensors", 'and leaves the other alone');
is(scalar(folders($out)), 2, 'no folder is added');
run_ok('--resume RUN', $trainer, '--resume', "$second/");
is(same_state("$dir/whole2", "$second/step_000020.safetensors"), '', 'ends in the bits of the run that was not stopped');
is((tensors($whole))[1]{'option.checkpoint-every'}, 8, 'options go on with it');
my @logs = RunLog::files($out, 'txt');
is(scalar(grep { index($_, $second) == 0 } @logs), 2, 'the log is a new one, in the same folder');
is(scalar(keys %{{map { substr(basename($_), 0, 8) => 1 } grep { index($_, $second) == 0 } @logs}}), 1, 'and has the id of the run');
my ($log) = grep { $_->{resumed} } map { RunLog::parse($_) } grep { index($_, $second) == 0 } @logs;
is($log && $log->{resumed}, "from step 8, $second/step_000008.safetensors", 'its head says where it begins');
like(RunLog::unfinished($log), qr/\Ait is the log of a resumed run \(from step 8, .*\), not of a whole one\z/, 'so that it is no record');

# ---- options here and there --------------------------------------------------------------------------------------------

($console) = run_ok('--resume RUN --sample', $trainer, '--resume', $first, '--sample', 'abc', '--num-tokens', 20);
like($console, qr/\A\nabc/, 'writes only that');
($console) = run_ok('--resume RUN --eval-only', $trainer, '--resume', $first, '--eval-only');
my ($last) = map { $_->{validations}[-1][1] } grep { $_->{resumed} } map { RunLog::parse($_) } glob "$first/*.txt";
is($console, "val_loss:$last\n", 'validates with its data');
my $sixteen = "$first/step_000016.safetensors";
run_ok('an option given here', $trainer, '--resume', $sixteen, '--out', "$dir/given", '--val-every', 1, '--preset', 'tiny');
is(join(' ', sort { $a <=> $b } keys %{val_losses("$dir/given")}), '16 17 18 19 20', 'overrides that of the checkpoint');
is((tensors($whole))[1]{'option.val-every'}, 5, 'and with another --out the run goes on in a folder of its own');
refuses('an option that shapes the model', 1, qr/made with --mlp-dim 128, but this run has 64; leave --mlp-dim out to resume with/,
    $trainer, '--resume', $first, '--mlp-dim', 64);
refuses('and one that is a fraction, in few digits', 1, qr/made with --muon-rate 0\.\d{1,4}, but this run has 0\.07; /, $trainer, '--resume', $first, '--muon-rate', 0.07);
run_ok('numbers of 17 digits, as older checkpoints have them,', $trainer, '--resume',
    rewrite($sixteen, "$dir/digits.safetensors", sub { $_ = sprintf '%.17g', $_ for grep { /^0\.\d+$/ } values %{$_[2]}; 1 }), '--out', "$dir/digits");
run_ok('--epochs where the run had --repeat', $trainer, '--resume', rewrite($sixteen, "$dir/repeat.safetensors", sub { $_[2]{'option.repeat'} = '1' }),
    '--epochs', 2, '--out', "$dir/epochs");
refuses("$_->[0] of a checkpoint", 1, $_->[2], $trainer, '--resume', rewrite($sixteen, "$dir/bad.safetensors", sub { $_[2]{"option.$_->[0]"} = $_->[1]; 1 }))
    for ['preset', '../up', qr/an option of the checkpoint: --preset: there is no preset '\.\.\/up'/],
    ['num-heads', 'x', qr/bad\.safetensors: an option of the checkpoint: --num-heads: 'x' is not a number/];

# ---- what lies in a folder ---------------------------------------------------------------------------------------------

{ # files of other names, and folders
    my $strays = "$dir/strays";
    mkdir $_ or die for $strays, "$strays/best", "$strays/best/step_000099.safetensors";
    rename "$dir/sixteen2", "$strays/best/step_000016.safetensors";
    spew("$strays/best/$_", '') for 'step_7.safetensors', 'step_0000031.safetensors', 'step_000018.safetensors.tmp.1';
    spew("$strays/best/01234567-89ab-4def-8123-456789abcdef.txt", "x\n"); # by which a renamed folder is known
    ($console) = run_ok('a folder with strays', $trainer, '--resume', $strays);
    like($console, qr{^resumed \Q$strays\E/best/step_000016\.safetensors: }m, 'only the names that the program writes count');
    is(same_state("$dir/whole2", "$strays/best/step_000020.safetensors"), '', 'a run folder may be renamed');
    is(scalar(() = glob "$strays/best/01234567-????-4*.txt"), 2, 'and keeps its id');
}
{ # half-written checkpoints: of a process that is gone, of one that lives, of another file
    my $gone = fork // die "fork: $!\n";
    exit 0 if !$gone;
    waitpid $gone, 0;
    my $halves = "$dir/halves";
    run_ok('a run to go on', $trainer, @tiny, '--out', $halves, '--stop-at', 4);
    my ($run) = folders($halves);
    spew("$run/$_", '') for "step_000017.safetensors.tmp.$gone", 'step_000017.safetensors.tmp.1', "notes.tmp.$gone";
    run_ok('which goes on', $trainer, '--resume', $halves, '--stop-at', 6);
    is_deeply([grep {/tmp/} entries($run)], ["notes.tmp.$gone", 'step_000017.safetensors.tmp.1'], 'without what a dead process left of a checkpoint');
}
{ # as runs were laid out before
    my $old = "$dir/old";
    mkdir $_ or die for $old, "$old/logs";
    rewrite($sixteen, "$old/step_000016.safetensors", sub { 1 });
    spew("$old/logs/01234567-89ab-4def-8123-456789abcdef.txt", "x\n");
    run_ok('a folder of the old layout', $trainer, '--resume', $old);
    is_deeply([map { basename($_) } checkpoints($old)], ['step_000020.safetensors'], 'the run goes on in a run folder inside');
    run_ok('once more', $trainer, '--resume', $old);
    is(scalar(() = folders($old)), 2, 'and then in that, which is newer');
}

# ---- --keep-checkpoints ------------------------------------------------------------------------------------------------

my $others = () = glob "{$first,$second}/step*";
run_ok('--keep-checkpoints 2', $trainer, @tiny, '--out', $out, qw(--checkpoint-every 3 --keep-checkpoints 2));
my ($third) = grep { $_ ne $first && $_ ne $second } folders($out);
is_deeply([map { basename($_) } glob "$third/step*"], ['step_000018.safetensors', 'step_000020.safetensors'], 'keeps two');
is(scalar(() = glob "{$first,$second}/step*"), $others, 'those of other runs stay');
{
    my $full = "$dir/full";
    run_ok('a run to go on', $trainer, @tiny, '--out', $full, '--stop-at', 6);
    my $limit = int((-s newest($full)) / 1024) - 100;
    my ($status, undef, $err) = run('bash', '-c', "ulimit -f $limit; exec \"\$@\"", 'bash', $trainer, '--resume', $full,
        qw(--checkpoint-every 4 --keep-checkpoints 1));
    is($status, 1, 'new checkpoints that cannot be written') or diag $err;
    is_deeply([map { basename($_) } checkpoints($full)], ['step_000006.safetensors'], 'take the place of none');
}
{
    my $odd = "$dir/odd";
    run_ok('a run to go on', $trainer, @tiny, '--out', $odd, '--stop-at', 2);
    mkdir((folders($odd))[0] . '/step_000001.safetensors') or die;
    my (undef, $err) = run_ok('a folder with the name of a checkpoint', $trainer, '--resume', $odd, qw(--checkpoint-every 4 --keep-checkpoints 2));
    is($err, '', 'is not what --keep-checkpoints removes');
    is_deeply([map { basename($_) } grep { -f } checkpoints($odd)], ['step_000016.safetensors', 'step_000020.safetensors'], 'but what it should');
}

# ---- where nothing can be written --------------------------------------------------------------------------------------

# The training files are missing, too: that the folder is named shows that it was looked at first.
my @early = ($trainer, @tiny, '--train-files', "$dir/none.bin");
refuses('a folder that is there and cannot be written', 1, qr{--out /proc/self: cannot write into this folder: \w.*; give another --out},
    @early, '--out', '/proc/self');
refuses('a full disk', 1, qr/--out .*nospace: cannot write into this folder: File too large/, 'bash', '-o', 'pipefail', '-c', '(ulimit -f 0; exec "$@") 2>&1 | cat >&2', 'bash', @early,
    '--out', "$dir/nospace");
is_deeply([entries("$dir/nospace")], [], 'and no file is left of the attempt');
SKIP: {
    skip 'cannot become another user', 2 if $> != 0 || system 'setpriv', '--reuid=65534', '--clear-groups', 'test', '-x', $trainer;
    my @user = qw(setpriv --reuid=65534 --clear-groups);
    chmod 0755, $dir;
    mkdir "$dir/foreign", 0755 or die;
    refuses('a folder of someone else', 1, qr/--out .*foreign: cannot write into this folder: Permission denied/, @user, @early, '--out', "$dir/foreign");
    refuses('a run of someone else', 1, qr/\Q$first\E: cannot write into this folder: Permission denied/, @user, $trainer, '--resume', $first);
}
SKIP: {
    skip 'cannot become another user', 4 if $> != 0 || system 'setpriv', '--reuid=65534', '--clear-groups', 'test', '-x', $trainer;
    my @user = qw(setpriv --reuid=65534 --clear-groups);
    my $closed = "$dir/closed";
    run_ok('a run', $trainer, @tiny, '--out', $closed, '--stop-at', $_) for 2, 4;
    my ($newest) = newest($closed) =~ m{(.*)/};
    chmod 0700, $newest;
    my (undef, $err) = run_ok('the newest of two runs is closed to the user', @user, $trainer, '--resume', $closed, '--eval-only');
    like($err, qr/note: \Q$newest\E: cannot be read, and is left out: Permission denied/, 'which is said');
    refuses('the folder itself', 1, qr/--resume: \Q$newest\E: cannot be read: Permission denied/, @user, $trainer, '--resume', $newest);
}

# ---- two processes on one run ------------------------------------------------------------------------------------------

{
    my @long = ($trainer, '--resume', $sixteen, '--out', dirname($first), '--val-every', 1, '--val-tokens', 512 * 400, '--val-files',
        write_shard('long.bin', documents(512 * 400 + 1, 3)));
    my $running = start(@long);
    my $end = time + 60;
    my $logs = sub { scalar(() = glob "$first/*.txt") };
    my $before = $logs->();
    sleep 0.01 while $logs->() == $before && time < $end;
    kill 'STOP', $running->{pid}; # it keeps its lock however long the next one takes
    refuses('a run that goes on in another process', 1, qr/\Q$first\E: another process goes on with this run/, $trainer, '--resume', $first);
    kill 'KILL', $running->{pid};
    finish($running);
}
{ # a run that was just ended saves its last step, from which the next process goes on
    my $ended = "$dir/ended";
    my $running = start($trainer, @tiny, '--out', $ended, qw(--repeat --num-scheduled 100000 --checkpoint-every 1000));
    my $end = time + 60;
    sleep 0.01 while !(() = glob "$ended/*/*.jsonl") && time < $end;
    sleep 0.3;
    kill 'TERM', $running->{pid};
    my $next = start($trainer, '--resume', $ended, '--stop-after', '1s');
    my ($status, $first_out) = finish($running);
    my ($last) = $first_out =~ m{^saved .*/step_0*(\d+)\.safetensors}m;
    ($status, my $next_out) = finish($next, 60);
    is($status, 3, 'a run that is resumed while it ends') or diag $next_out;
    like($next_out, qr{^resumed .*/step_0*$last\.safetensors: }m, "goes on from its last step, $last");
}

# ---- losses that are no numbers ----------------------------------------------------------------------------------------

my $wild = "$dir/wild";
refuses('a run that diverges', 5, qr/training step \d+: the loss is (nan|infinite): the run has diverged/, $trainer, @tiny, '--out', $wild,
    qw(--adam-rate 1000 --muon-rate 1000 --val-every 0 --checkpoint-every 1 --keep-checkpoints 1));
like(log_text($wild, 'jsonl'), qr/"event":"failure","text":"diverged"\}\n\z/, 'its JSON lines end with that');
my ($kept) = checkpoints($wild);
($console) = run_ok('its first checkpoint left', $trainer, '--resume', $kept, '--eval-only');
like($console, qr/^val_loss:\d/, 'is one from before: none of those after took its place');
my $nan = sub {
    my ($name, $tensor) = @_;
    $tensor->{bytes} = pack('f<', 'nan') x (length($tensor->{bytes}) / 4) if $name eq 'scalars';
    return 1;
};
my $broken = rewrite($whole, "$dir/broken.safetensors", $nan);
refuses('a last validation', 5, qr/validation at step 20: the loss is nan: the run has diverged/, $trainer, '--resume', $broken, '--out', "$dir/last");
my ($status, undef, $err) = run($trainer, '--resume', $broken, '--eval-only');
is($status, 5, '--eval-only');
like($err, qr/error: .*broken\.safetensors: the validation loss of these weights is -?nan\n\z/, 'says which weights');
my (undef, $help) = run($trainer, '--help');
like($help, qr/^Exit status:\n  0  done\n  1  .*\n  2  .*\n  3  interrupted .*\n  4  a GPU failed\n  5  diverged: .*\n\z/m, '--help lists the exit statuses');
my %named; # presets that name an option twice
for my $line (grep { /^  \S+ .* with --/ } split /\n/, $help =~ s/\A.*\nPresets//sr) {
    my ($preset) = $line =~ /^  (\S+)/;
    my %times;
    $times{$_}++ for $line =~ /(--[a-z0-9-]+)/g;
    $named{$preset} = join ' ', grep { $times{$_} > 1 } sort keys %times;
}
cmp_ok(scalar keys %named, '>', 8, 'it lists what presets change: ' . join ' ', sort keys %named);
is_deeply([grep { $named{$_} ne '' } sort keys %named], [], 'each option once');
done_testing;
