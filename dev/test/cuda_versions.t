#!/usr/bin/env perl
# Which CUDA the program takes: what scripts/check_cuda.sh says of toolkits (an imitated nvcc), what make does with GPU_ARCH, how
# wheels are linked, and what the program says of a driver that is too old (a runtime library that answers like one). No GPU.
use strict;
use warnings;
use Cwd            qw(abs_path);
use File::Basename qw(dirname);
use File::Temp     qw(tempdir);
use Test::More;

chdir dirname(dirname(dirname(abs_path(__FILE__)))) or die;
delete @ENV{qw(MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL)};    # of a make that runs this test
my $dir = tempdir(CLEANUP => 1);

sub program {
    my ($name, $text) = @_;
    open my $out, '>', "$dir/$name" or die;
    print $out "#!/bin/sh\n$text\n";
    close $out;
    chmod 0755, "$dir/$name";
    return "$dir/$name";
}

# ---- toolkits and architectures ----------------------------------------------------------------------------------------

# An nvcc of this release that knows these architectures.
sub nvcc {
    my ($release, @known) = @_;
    my $codes = join '\n', map {"sm_$_"} @known;
    my $any   = join '|',  map {"*compute_$_,*"} @known;
    return program('nvcc', <<"END");
case "\$*" in
    *--version) echo 'Cuda compilation tools, release $release, V$release.99' ;;
    *--list-gpu-code) printf '$codes\\n' ;;
    $any) ;;
    *) exit 1 ;;
esac
END
}

# What check_cuda.sh prints; it fails when, and only when, that is not nothing.
program('g++', 'exit 0'); # needed by the CUDA program only, so it may be missing here
sub check {
    my $all  = join ' ', map {"'$_'"} @_;
    local $ENV{PATH} = "$ENV{PATH}:$dir";
    my $text = `scripts/check_cuda.sh $all 2>&1`;
    return (($? != 0) != ($text ne '')) ? "status $? with: $text" : $text;
}

my @of_12_4 = qw(75 80 86 89 90 90a);
my $old     = nvcc('12.4', @of_12_4);
is(check($old,       '9.1.0', '90a'),            '', 'CUDA 12.4 for Hopper');
is(check($old,       '9.1.0', qw(80 86 89 90a)), '', 'several architectures');
is(check("env $old", '9.1.0', '90a'),            '', 'a compiler of two words');
is(
    check($old, '9.1.0', '100a'),
    "GPU_ARCH=100a: nvcc 12.4 does not know it, only 80 86 89 90; give one of these or install a newer toolkit\n",
    'an architecture that the toolkit does not know'
);
like(
    check($old, '9.1.0', '90a', '75'),
    qr/^GPU_ARCH=75: the kernels need compute capability 8\.0 .*\n\z/,
    'one that the kernels do not know'
);
like(
    check($old, '9.1.0', $_),
    qr/^GPU_ARCH: "\Q$_\E" is no architecture: give 80, .* or native\n\z/,
    "GPU_ARCH=$_"
) for '90x', 'sm_90a', 'hopper', '9', '9.0';
like(
    check($old, '9.1.0', 'native'),
    qr/^GPU_ARCH=native: nvidia-smi finds no GPU here; give 80, .*120a\n\z/,
    'GPU_ARCH=native without a GPU'
);
like(check($old, '9.1.0'), qr/^GPU_ARCH names no architecture: give 80, /, 'GPU_ARCH= with nothing');
like(check($old, '',      '90a'), qr/^cuDNN 9 is missing .*CPATH and LIBRARY_PATH\n\z/,   'no cuDNN');
like(check($old, '8.9.7', '90a'), qr/^cuDNN 8\.9\.7 is too old: version 9 is needed\n\z/, 'cuDNN 8');

for (['12.3', 1], ['11.8', 1], ['12.10', ''], ['13.0', ''], ['14.0', '']) {
    my ($release, $refused) = @$_;
    my $text = check(nvcc($release, @of_12_4), '9.1.0', '90a');
    is(
        $text,
        $refused
          && "nvcc $release is too old: CUDA 12.4 or later is needed; NVCC= builds the CPU program alone\n",
        "CUDA $release"
    );
}
like(
    check(program('nvcc', 'exit 1'), '9.1.0', '90a'),
    qr/nvcc does not say which version it is: set NVCC/,
    'an nvcc that does not run'
);

# ---- make --------------------------------------------------------------------------------------------------------------

# A toolkit folder with nothing but headers and libraries as Python's wheels have them: numbered, without lib*.so.
nvcc('12.4', @of_12_4);
for my $folder (qw(home home/include home/lib wheel wheel/include wheel/lib)) { mkdir "$dir/$folder" or die }
for (
    [
        'wheel/include/cudnn_version.h',
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 8\n#define CUDNN_PATCHLEVEL 7\n"
    ],
    ['wheel/include/nccl.h',       "#define NCCL_MAJOR 2\n#define NCCL_MINOR 25\n#define NCCL_PATCH 1\n"],
    ['home/lib/libcudart.so',      ''],
    ['home/lib/libcublasLt.so.12', ''],
    ['wheel/lib/libcudnn.so.9',    '']
  )
{
    open my $out, '>', "$dir/$_->[0]" or die;
    print $out $_->[1];
    close $out;
}

# Lines that make prints, with a toolkit in $dir/home and this GPU of nvidia-smi.
sub make {
    my ($gpu, @arguments) = @_;
    program('nvidia-smi', "echo '$gpu'");
    local $ENV{PATH}         = "$dir:$ENV{PATH}";
    local $ENV{CPATH}        = "$dir/wheel/include";
    local $ENV{LIBRARY_PATH} = "$dir/wheel/lib:$dir/wheel/lib/stubs";
    my $all = join ' ', map {"'$_'"} 'make', '--no-print-directory', "CUDA_HOME=$dir/home", "NVCC=$dir/nvcc",
      @arguments;
    return `$all 2>&1`;
}

my $found = make('', 'found');
like($found, qr/^cuDNN +9\.8\.7\nNCCL +2\.25\.1\n/m, 'make finds headers by CPATH and says their versions')
  or diag($found);
my ($link) = grep {/ -o train_gpt /} split /\n/, make('', '-n', '-B', 'train_gpt');
like(
    $link,
    qr/ -L\Q$dir\E\/home\/lib -L\Q$dir\E\/wheel\/lib -Wl,-rpath,\Q$dir\E\/home\/lib -Wl,-rpath,\Q$dir\E\/wheel\/lib /,
    'folders of LIBRARY_PATH are searched at run time, too; stubs are not'
);
like(
    $link,
    qr/ -l:libcublasLt\.so\.12 -l:libcudnn\.so\.9 -lcudart /,
    'and numbered libraries of wheels are linked'
);
for (['9.0', '90a'], ['8.9', '89'], ['12.0', '120a'], ['10.0', '100a']) {
    my ($gpu, $arch) = @$_;
    like(
        make($gpu, 'GPU_ARCH=native', 'found'),
        qr/^nvcc +12\.4 for sm_$arch$/m,
        "GPU_ARCH=native on a GPU of compute capability $gpu"
    );
}
for (['8.6', '86'], ["8.9\n8.6\n8.9", '86 sm_89'], ['9.0', '90a'], ['7.5', '90a'], ['', '90a'], ['No devices were found', '90a']) {
    my ($gpu, $arch) = @$_;
    like(make($gpu, 'found'), qr/^nvcc +12\.4 for sm_$arch$/m, "without GPU_ARCH, GPUs: '@{[join ' ', split /\n/, $gpu]}'");
}
my $refused = make('', 'GPU_ARCH=75', 'NVCC=' . nvcc('12.4', @of_12_4), 'build/cuda/flags');
like(
    $refused,
    qr/^GPU_ARCH=75: [^\n]*\nmake: \*\*\* [^\n]*\n\z/,
    'make GPU_ARCH=75: one line, and no compiler runs'
);

# ---- drivers -----------------------------------------------------------------------------------------------------------

# The program with a CUDA runtime whose answer is that the driver supports this version (0: there is no driver).
sub with_driver {
    my ($version) = @_;
    open my $out, '>', "$dir/driver.c" or die;
    print $out
      "int cudaGetDeviceCount(int *n) { *n = 0; return 35; }\nint cudaDriverGetVersion(int *v) { *v = $version; return 0; }\n";
    close $out;
    system('gcc', '-shared', '-fPIC', "$dir/driver.c", '-o', "$dir/driver.so") == 0 or die;
    my $text = `LD_PRELOAD=$dir/driver.so ./train_gpt --preset tiny --out $dir/runs 2>&1`;
    return ($? >> 8) . ": $text";
}

SKIP: {
    skip 'no CUDA program here', 2 if !-x 'train_gpt';
    like(
        with_driver(12040),
        qr/\A1: .*error: the NVIDIA driver is too old: it supports CUDA up to 12\.4, this program was built with CUDA \d+\.\d+: update the driver \(to \d+ or later\), or rebuild with a toolkit of CUDA 12 \(12\.4 or later\)\n\z/,
        'a driver that is too old: one line with both versions'
    );
    like(
        with_driver(0),
        qr/\A1: .*error: no NVIDIA driver here: install one \(for CUDA \d+: \d+ or later\), or run the CPU program\n\z/,
        'no driver'
    );
}
done_testing;
