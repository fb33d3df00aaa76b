#!/usr/bin/env perl
# The self-check of the program's kernels: it passes, is remembered for this GPU and path, runs when it is asked for.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

my $gpu = "$root/train_gpt";
write_shard('train_1.bin', documents(6000, 1));
write_shard('val.bin', documents(700, 2));

# Heads of width 128: attention's kernels for Hopper take no other.
my $runs = 0;
sub start_up { # the log's line
    my ($what, $cache, @options) = @_;
    local $ENV{XDG_CACHE_HOME} = $cache;
    my $out = "$dir/run" . ++$runs;
    run_ok($what, $gpu, @tiny, qw(--model-dim 256 --num-heads 2 --stop-at 1), @options, '--out', $out);
    return (log_text($out, 'jsonl') =~ /"(start-up: [^"]*)"/)[0] // 'no line';
}

my $cache = "$dir/cache";
like(start_up('the first run', $cache), qr/self-check \d/, 'checks');
my @files = glob "$cache/train_gpt/*";
is(scalar @files, 1, 'and remembers it');
my $lines = qr/^self-check passed\ngpu .*\nchecks .*\nprogram [0-9a-f]{16,}\ndriver CUDA \d+, .*\d/;
like(slurp($files[0] // ''), $lines, 'for what');
like(start_up('the second run', $cache), qr/self-check \(passed before\) 0\.0/, 'does not check');
like(start_up('--self-check always', $cache, qw(--self-check always)), qr/self-check \d/, 'checks');
unlike(start_up('--self-check never', $cache, qw(--self-check never)), qr/self-check/, 'does not check');
like(start_up('--portable', $cache, '--portable'), qr/self-check \d/, 'checks the portable kernels');
like(start_up('--portable again', $cache, '--portable'), qr/self-check \(passed before\) 0\.0/, 'and remembers that');
@files = grep { slurp($_) !~ /--portable/ } glob "$cache/train_gpt/*";
like(start_up('other sizes', $cache, qw(--model-dim 384 --num-heads 3)), qr/self-check \d/, 'are checked');
spew($files[0], 'damaged') if @files;
like(start_up('a damaged file', $cache), qr/self-check \d/, 'does not count');
like(start_up('no folder', '/proc/self'), qr/self-check \d/, 'checks');
like(start_up('no folder again', '/proc/self'), qr/self-check \d/, 'checks again');
done_testing;
