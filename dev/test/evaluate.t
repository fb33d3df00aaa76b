#!/usr/bin/env perl
# Evaluations: losses beside the PyTorch reference, in training, by several ranks, and from a checkpoint alone.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../../scripts";
use EvalMaterial qw(write_items made_up);
use JSON::PP ();
use TrainTest;
use RunLog;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_items($dir);
my @files = map { ('--eval', $_) } "hellaswag=$dir/hellaswag.jsonl", "lambada=$dir/lambada.jsonl", "text=$dir/text.txt";

# Losses of --eval-items by task, in the order of the texts; and all of its records.
sub items {
    my ($path) = @_;
    my (%losses, @all);
    for (map { JSON::PP::decode_json($_) } split /\n/, slurp($path)) {
        push @all, $_;
        push @{$losses{$_->{task}}}, @{$_->{losses}};
    }
    return (\%losses, \@all);
}

# The largest relative difference, and the root of the mean square.
sub differences {
    my ($got, $want) = @_;
    return ('inf', 'inf') if @$got != @$want;
    my ($worst, $squares) = (0, 0);
    for my $i (0 .. $#$got) {
        my $relative = abs($got->[$i] - $want->[$i]) / ($want->[$i] + 0 || 1);
        $worst = $relative if !($relative <= $worst);
        $squares += $relative**2;
    }
    return ($worst, sqrt($squares / @$got));
}

# ---- beside the reference ----------------------------------------------------------------------------------------------

# fp32: an instance of the loss of a text is a sum over tens of tokens, each exact to some 2^-24 of it. bf16: the streams are
# rounded to 2^-9 in each of the layers, which a text's loss shows as a fraction of that in the mean.
my %network = ('2025-11-18' => [qw(--model-dim 32 --num-heads 2 --mlp-dim 64 --block-size 4 --micro-batch-tokens 512 --head bf16)],
    'toy-2026' => []);
for my $name (sort keys %network) {
    my @size = ('--preset', $name, @{$network{$name}}, qw(--vocab-size 257 --num-scheduled 6 --num-extension 2 --max-document 48));
    my ($golden) = tensors("$root/dev/reference/golden/evaluation-$name.safetensors");
    my @right = unpack 'l<*', $golden->{right}{bytes};
    write_shard('any.bin', documents(9000, 1));
    my @shards = map { ("--$_-files", "$dir/any.bin") } qw(train val);
    run_ok("$name: initial weights", $exact, @size, @shards, qw(--val-tokens 128 --stop-at 1 --out), "$dir/init-$name",
        '--save-init', "$dir/init-$name.safetensors");
    my $weights = rewrite("$dir/init-$name.safetensors", "$dir/made-$name.safetensors", sub {
        my ($tensor, $t) = @_;
        @$t{qw(bytes dtype)} = (pack('f<*', made_up($tensor, length($t->{bytes}) / 4)), 'F32');
    });
    for my $build (['fp32', $exact], ['bf16', $trainer]) {
        my ($what, $program) = @$build;
        my ($out) = run_ok("$name, $what", $program, @size, '--init-from', $weights, @files, '--eval-items', "$dir/items");
        my ($losses) = items("$dir/items");
        for my $task (qw(hellaswag lambada text)) {
            my ($worst, $mean) = differences($losses->{$task}, floats($golden->{$task}));
            my ($size, $limit) = $what eq 'fp32' ? ($worst, 1e-6) : ($mean, 2e-3);
            cmp_ok($size, '<=', $limit, "$name, $what: losses of $task are those of the reference");
        }
        next if $what ne 'fp32';
        my $text = sprintf 'accuracy %.4f \+- 0\.\d{4}, accuracy_normalised %.4f \+- 0\.\d{4}; 200 items', map { $_ / 200 } @right;
        like($out, qr/^hellaswag \Q$dir\E\/hellaswag.jsonl: $text, /m, "and the right answers: @right of 200");
        my $bits = 0;
        $bits += $_ for @{floats($golden->{text})};
        $bits = sprintf '%.4f', $bits / log(2) / -s "$dir/text.txt";
        like($out, qr/^text \S+: bits_per_byte \Q$bits\E \+- /m, "and $bits bits per byte");
        # Other batches: what stands in front of a text does not change its losses.
        run_ok('in larger batches', $program, @size, '--init-from', $weights, @files, '--eval-items', "$dir/larger",
            $name eq 'toy-2026' ? ('--stage-tokens', '32,48,4096,4096') : ('--micro-batch-tokens', 4096));
        my ($larger) = items("$dir/larger");
        my ($worst) = differences($larger->{hellaswag}, $losses->{hellaswag});
        cmp_ok($worst, '<=', 1e-6, 'the same losses');
    }
}

# ---- in training -------------------------------------------------------------------------------------------------------

# A language in which b follows a, a space b, and a the space.
my @ids = map { (256, (97, 98, 32) x 30) } 1 .. 450;
write_shard('train_1.bin', @ids);
write_shard('val.bin', @ids[0 .. 699]);
spew("$dir/words.jsonl", join '', map { qq({"text":"ab ab ab ab $_"}\n) } ('ab', 'ba', 'ab', 'bb') x 5);
spew("$dir/endings.jsonl", join '', map { qq({"ctx":"ab ab ab","label":$_,"endings":["ba ba","bbb ab ab","ab ab","aa ab ab"]}\n) } (2) x 5);
my @made = map { ('--eval', $_) } "hellaswag=$dir/endings.jsonl", "lambada=$dir/words.jsonl", "text=$dir/text.txt";
my @run = (@tiny, qw(--num-scheduled 36 --max-document 200), @made);

my ($out) = run_ok('--eval-every', $trainer, @run, qw(--eval-every 30 --checkpoint-every 30 --tensorboard --out), "$dir/a", '--eval-items', "$dir/all");
my ($log) = logs("$dir/a", 'txt');
my %line;
for (split /\n/, slurp($log)) { $line{$1}{$2} = $3 if m{^evaluation: step:(\d+)/40 (\S+) \S+: (.*), \S+ s$} }
is_deeply([sort { $a <=> $b } keys %line], [30, 40], 'after 30 steps and after the last, in the log');
like($line{40}{lambada}, qr/^accuracy 0\.5000 \+- 0\.1147, perplexity [1-9]\d*\.\d{4} \+- \S+; 20 items$/, 'the words that the language has are predicted');
is($line{40}{hellaswag}, 'accuracy 1.0000 +- 0.0000, accuracy_normalised 1.0000 +- 0.0000; 5 items', 'and its endings chosen');
my $parsed = eval { RunLog::parse($log) };
ok($parsed && RunLog::unfinished($parsed) eq '', 'the record tool reads the log') or diag $@;
my @events = grep { $_->{event} eq 'evaluation' } map { JSON::PP::decode_json($_) } split /\n/, log_text("$dir/a", 'jsonl');
is(join(' ', map {"$_->{step}:$_->{task}"} @events), '30:hellaswag 30:lambada 30:text 40:hellaswag 40:lambada 40:text', 'JSON lines, too');
is_deeply([@{$events[4]}{qw(accuracy items file)}], [0.5, 20, "$dir/words.jsonl"], 'with their numbers');
like($line{40}{text}, qr/^bits_per_byte \Q@{[sprintf '%.4f +- %.4f', @{$events[5]}{qw(bits_per_byte bits_per_byte_stderr)}]}\E, loss /, 'the same ones');
is(scalar(() = $out =~ /^evaluation: step:/mg), 6, 'and the console');
my (undef, $all) = items("$dir/all");
is_deeply([map { $_->{exact} ? 1 : 0 } grep { $_->{step} == 40 && $_->{task} eq 'lambada' } @$all], [(1, 0, 1, 0) x 5], 'which of them, item by item');
is_deeply({map { $_ => $all->[0]{$_} } qw(item line label choice choice_normalised tokens)},
    {item => 1, line => 1, label => 2, choice => 2, choice_normalised => 2, tokens => [6, 10, 6, 9]}, 'an item');

run_ok('a run that stops', $trainer, @run, qw(--eval-every 10 --stop-at 15 --out), "$dir/stops", '--eval-items', "$dir/parts");
my $whole = slurp("$dir/parts");
spew("$dir/parts", $whole . '{"event":"item","step":15,"ta'); # as of a process that was killed
run_ok('and goes on', $trainer, '--resume', "$dir/stops", '--eval-items', "$dir/parts");
is(substr(slurp("$dir/parts"), 0, length $whole), $whole, 'behind the last whole line');
my (undef, $parts) = items("$dir/parts");
is(join(' ', map { my $step = $_; $step . ':' . grep { $_->{step} == $step } @$parts } 10, 20, 30, 40), join(' ', map { "$_:" . (@$all / 2) } 10, 20, 30, 40), 'has the items of both parts');

my ($file) = glob "'$dir/a'/*/run.toml";
like(slurp($file), qr{^eval = "hellaswag=\Q$dir\E/endings\.jsonl,lambada=\Q$dir\E/words\.jsonl,text=\Q$dir\E/text\.txt"$}m, 'the run file has all of them');
run_ok('without', $trainer, @tiny, qw(--num-scheduled 36 --max-document 200 --out), "$dir/b");
is(same_state_but_eval(newest("$dir/a"), newest("$dir/b")), '', 'evaluations change nothing in training');
sub same_state_but_eval {
    my ($one, $other) = @_;
    return join ' ', grep { !/^option\.(?:eval|tensorboard)/ } split / /, same_state($one, $other);
}

# ---- from a checkpoint -------------------------------------------------------------------------------------------------

# The same texts stand elsewhere in other batches, where bf16 rounds rope's angles otherwise: the same counts, and losses to 2^-9.
sub same_results {
    my ($what, $got, $want) = @_;
    my $number = qr/\d+\.\d{4}/;
    my @numbers = map { [/($number)/g] } $got, $want;
    my ($worst) = differences(@numbers);
    my @words = map {s/$number/N/gr} $got, $want;
    ok($words[0] eq $words[1] && $worst < 2**-9, "$what: $worst") or diag "$got\n$want";
}
sub results { my ($text) = @_; return join "\n", map {s/, \S+ s$//r} $text =~ /^(?:evaluation: \S+ )?((?:hellaswag|lambada|text) .*)$/mg }
my @given = ('--resume', newest("$dir/a"));
my ($alone) = run_ok('--resume with --eval alone', $trainer, @given, @made);
my $last = results($out =~ s/.*(?=^evaluation: step:40\/40 hellaswag)//smr);
same_results('the last results of the run', results($alone), $last);
($alone) = run_ok('in the middle', $trainer, '--resume', checkpoint("$dir/a", 30), @made);
same_results('those of that step', results($alone), results($out =~ s/^evaluation: step:40.*//smr));
my ($only) = run_ok('--eval-only', $trainer, @given, '--eval-only');
is($only, "val_loss:" . val_losses("$dir/a")->{40} . "\n", 'the evaluations of the checkpoint are not repeated by --eval-only');
my ($resumed) = run_ok('training goes on with them', $trainer, '--resume', checkpoint("$dir/a", 30), '--out', "$dir/c");
is(results($resumed =~ s/.*(?=^evaluation: step:40\/40 hellaswag)//smr), $last, 'to the same results');
my ($ranks, $notes) = run_ok('two ranks', $trainer, @given, @made, qw(--ranks 2));
same_results('the same results', results($ranks), $last);
is($notes =~ s/^\S+ \(rank 0\): note: resumed .*\n//r, '', 'and nothing else is said');

# ---- what is refused ---------------------------------------------------------------------------------------------------

refuses('another task', 2, qr/error: --eval 'mmlu=x': must be hellaswag=FILE, lambada=FILE or text=FILE$/, $trainer, @given, '--eval', 'mmlu=x');
refuses('no weights', 1, qr/error: --eval hellaswag: cannot read the input x: No such file/, $trainer, @tiny, '--out', "$dir/x", '--eval', 'hellaswag=x');
spew("$dir/cut.jsonl", substr slurp("$dir/hellaswag.jsonl"), 0, 300);
for my $ranks (1, 2) {
    refuses("a truncated line, $ranks ranks", 1, qr/error: --eval hellaswag: \S+cut.jsonl:2: is not a record of JSON: /, $trainer, '--ranks', $ranks,
        @given, '--eval', "hellaswag=$dir/cut.jsonl");
}
spew("$dir/long.jsonl", '{"text":"' . 'x' x 100000 . ' y"}');
refuses('too long a text', 1, qr/long.jsonl:1: "text" has 100002 tokens, and a batch has room for 2174; raise --micro-batch-tokens \(--resume keeps it; --init-from takes the same file\)$/, $trainer,
    qw(--preset tiny --model-dim 32 --num-heads 2 --mlp-dim 128 --head bf16 --micro-batch-tokens 512 --init-from), $given[1], '--eval', "lambada=$dir/long.jsonl");
refuses('no folder for the items', 1, qr{error: --eval-items: /nowhere/x cannot be written: No such file}, $trainer, @given, @made,
    '--eval-items', '/nowhere/x');
SKIP: {
    skip 'no /dev/full', 1 if !-e '/dev/full';
    my ($status, undef, $err) = run($trainer, @tiny, '--out', "$dir/full", @made, '--eval-items', '/dev/full');
    is("$status $err", "0 train_gpt: note: cannot write /dev/full: No space left on device; the run goes on without it\n", 'a full disk has one note');
}
refuses('options without --eval', 0, qr/note: --eval-every: not used: only --eval uses it/, $trainer, @tiny, '--out', "$dir/n", qw(--eval-every 5));
done_testing;
