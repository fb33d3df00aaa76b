#!/usr/bin/env perl
# What make would do, read from its own dry run: the compiler lines of both programs, the GPU architecture in every line of nvcc,
# and the list of what the machine has. Nothing is built.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use Test::More;

chdir dirname(dirname(dirname(abs_path(__FILE__)))) or die;
delete @ENV{qw(MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL)}; # of a make that runs this test

sub make {
    open my $from, '-|', 'make', '--no-print-directory', @_ or die "make: $!";
    my @lines = <$from>;
    close $from;
    return ($?, @lines);
}

# Those lines of a dry run that compile this file.
sub compiling { my ($file, @lines) = @_; return grep { / -c \Q$file\E -o / } @lines }

# ---- what was found ----------------------------------------------------------------------------------------------------

my ($status, @found) = make('found');
is($status, 0, 'make found');
my %found = map { /^(\S+)\s+(\S.*)$/ ? ($1 => $2) : () } @found;
ok($found{$_}, "$_: " . ($found{$_} // 'not in the list')) for qw(compiler jansson OpenMP OpenBLAS libsodium PCRE2 nvcc);
my $nvcc = $found{nvcc} =~ /^\d/;
SKIP: {
    skip 'no nvcc', 2 if !$nvcc;
    ok($found{$_}, "$_: " . ($found{$_} // 'not in the list')) for qw(cuDNN NCCL);
}

# ---- the CPU program ---------------------------------------------------------------------------------------------------

($status, my @cpu) = make('-n', '-B', 'NVCC=', 'all');
is($status, 0, 'a build without nvcc');
is(scalar(grep { /USE_CUDA|-gencode|llmc\/cuda/ } @cpu), 0, 'has nothing of CUDA in it');
my ($program) = compiling('train_gpt.cu', @cpu);
like($program, qr/ -Wall -Wextra .* -x c -c train_gpt\.cu /, 'and takes train_gpt.cu as C, with warnings');
my @sources = grep { !m{^llmc/cuda/} } glob('llmc/*/*.c llmc/*/*/*.c');
is(scalar(grep { compiling($_, @cpu) != 1 } @sources), 0, 'every source of the CPU backend is compiled once: ' . @sources);
(undef, my @without) = make('found', 'NVCC=');
ok((grep { /^nvcc\s+no: CPU program only$/ } @without), 'and the list says so');

# ---- what is missing ---------------------------------------------------------------------------------------------------

# A goal that cannot be reached: one line that says what is missing (make adds one of its own), and no compiler runs.
sub lacks {
    my ($name, $message, @arguments) = @_;
    my $all = join ' ', map { "'$_'" } 'make', '--no-print-directory', '-j2', @arguments;
    my @lines = split /\n/, `$all 2>&1`;
    ok($? != 0 && $lines[0] =~ $message && !(grep { !/^make: \*\*\* / } @lines[1 .. $#lines]), $name) or diag(join "\n", @lines);
}
lacks('make without gcc', qr/^no-gcc is missing, or cannot make a program: run scripts\/install_deps\.sh$/, 'CC=no-gcc', 'NVCC=');
lacks('a program without gcc', qr/^no-gcc is missing/, 'CC=no-gcc', 'NVCC=', 'train_gpt_cpu');
lacks('make fuzz without clang', qr/^make fuzz: no-clang with libFuzzer is missing: install clang/, 'CLANG=no-clang', 'fuzz');
lacks("make $_ without nvcc", qr/^make $_: no nvcc here/, 'NVCC=', $_) for qw(sanitize-gpu test-gpu);
is(system('git', 'check-ignore', '-q', 'data/mine/mine_train_000001.bin'), 0, "git ignores the reader's own shards") if -e '.git';

is(join(' ', grep { !-x } glob('dev/test/*.t dev/test/gpu/*.t')), '', 'all test scripts can be run');

# ---- spilled registers -------------------------------------------------------------------------------------------------

# What a compiler says that only writes an object and this, and ends with the status; the script's status, its output, whether the object stays.
my $dir = tempdir(CLEANUP => 1);
sub compile {
    my ($what, $status, @said) = @_;
    open my $program, '>', "$dir/nvcc" or die;
    print $program "#!/bin/sh\ntouch $dir/o\ncat >&2 <<'END'\n", (map { "$_\n" } @said), "END\nexit $status\n";
    close $program;
    chmod 0755, "$dir/nvcc";
    my $out = `scripts/no_spills.sh $what $dir/nvcc -c x.cu -o $dir/o 2>&1`;
    return join ' ', $? >> 8, -e "$dir/o" ? 'kept' : 'removed', $out =~ tr/\n//;
}
# The first kernel of the script's list, and how much it may spill.
my ($known, $may) = do { local (@ARGV, $/) = 'scripts/no_spills.sh'; <> =~ /^known='\n(\S+) (\d+) /m } or die 'no list in scripts/no_spills.sh';
my @spill = map { "ptxas warning : Registers are spilled to local memory in function '$_->[0]', $_->[1] bytes spill stores, 4 bytes spill loads" }
    ['_Z4manyILi64EEvPf', 900], ["void $known(Arguments)", $may], ["void $known(Arguments)", $may + 4];
is(compile('refuse', 0), '0 kept 0', 'a kernel that spills nothing');
is(compile('refuse', 0, $spill[0]), '1 removed 2', 'one that spills is refused, by name');
is(compile('refuse', 0, $spill[1]), '0 kept 0', 'one of the list is not');
is(compile('refuse', 0, $spill[2]), '1 removed 2', 'unless it spills more than it may');
is(compile('show', 0, $spill[0]), '0 kept 1', 'for other GPUs it is shown');
is(compile('refuse', 7, 'x.cu(1): error: expected a ";"'), '7 kept 1', "the compiler's own errors stay as they are");

# ---- the self-check ----------------------------------------------------------------------------------------------------

# A case without a kernel ends every start on Hopper in an assertion, which nothing meets where there is no GPU.
sub text { local (@ARGV, $/) = $_[0]; return scalar <> }
my ($kernels, $cases) = (text('llmc/cuda/gemm/sm90_gemm.cu'), text('llmc/cuda/device/self_check.cu'));
my @kernels = sort map { /(\w+), (\w+), true/ ? "$1 $2 with a factor" : /(\w+), (\w+)/ ? "$1 $2" : () } $kernels =~ /\{(LAYOUT_\w+, EPILOGUE_\w+, \w+), sm90_gemm_kernel</g;
my @cases = sort map { /(\w+), (\w+), "[^"]*",/ ? "$1 $2 with a factor" : /(\w+), (\w+)/ ? "$1 $2" : () } $cases =~ /\{(LAYOUT_\w+, EPILOGUE_\w+, "[^"]*",?)/g;
cmp_ok(scalar @kernels, '>', 1, 'kernels of sm90_gemm.cu: ' . @kernels);
is("@cases", "@kernels", 'the self-check has a case for each of them, and no other');

# ---- the CUDA program --------------------------------------------------------------------------------------------------

# The architectures of a line of nvcc.
sub architectures { return join ' ', $_[0] =~ / -gencode arch=compute_(\w+),code=sm_\1(?= )/g }

SKIP: {
    skip 'no nvcc', 15 if !$nvcc;
    my @kernels = glob 'llmc/cuda/*/*.cu';
    my %instructions = map { my $text = do { local (@ARGV, $/) = $_; <> }; $_ => $text =~ /\basm volatile/ ? 1 : 0 } @kernels, glob 'llmc/cuda/*/*.cuh';
    my $headers = join '|', map { quotemeta } grep { /h$/ && $instructions{$_} } keys %instructions;
    my @special = grep { my $text = do { local (@ARGV, $/) = $_; <> }; $instructions{$_} || $text =~ /#include "(?:$headers)"/ } @kernels;
    for my $list ('', '80', '89', '90a', '100a', '80 89 90a 100a') {
        my $wanted = $list || '90a';
        my ($status, @lines) = make('-n', '-B', ($list ? "GPU_ARCH=$list" : ()), 'train_gpt', 'test-gpu-programs');
        is($status, 0, "programs and tests for $wanted" . ($list ? '' : ', which is the default'));
        my @right = grep { my @line = compiling($_, @lines); @line == 1 && $line[0] =~ /nvcc / && architectures($line[0]) eq $wanted } @kernels;
        ok(@right && @right == @kernels, 'is what nvcc is told for ' . @right . ' of ' . @kernels . ' files');
        next if $list eq '' || $list =~ / / || $list eq '90a'; # which make itself compiles
        # What only some GPUs have stands in inline assembly, which nothing but the real compiler checks.
        my @refused = grep {
            my ($line) = compiling($_, @lines);
            $line =~ s/ -MMD -MP -c (\S+) -o \S+/ -cubin $1 -o \/dev\/null/ && system("$line 2>/dev/null >&2") != 0;
        } @special;
        is("@refused", '', "and the compiler takes the assembly of all that have any, for $wanted: " . @special);
    }
}
done_testing;
