#!/usr/bin/env bash
# Whether the CUDA program can be built: toolkit, architectures, cuDNN's header and a C++ compiler. The
# Makefile asks before it compiles. Silent when all is well; else one line that says what is wrong and what to
# do, and exit 1.
#
#   check_cuda.sh NVCC CUDNN_VERSION ARCHITECTURE...
#
#   CUDNN_VERSION    of the header that was found; empty when there is none
set -u
[ "${1-}" = --help ] && { sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
[ $# -ge 2 ] || { echo 'usage: check_cuda.sh NVCC CUDNN_VERSION ARCHITECTURE...' >&2; exit 2; }
read -r -a nvcc <<<"$1" # may be "ccache nvcc"
cudnn=$2
shift 2

fail() { printf '%s\n' "$*" >&2; exit 1; }
known="80, 86, 89, 90a, 100a, 103a, 120a or native"

release=$("${nvcc[@]}" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\),.*/\1/p')
[ -n "$release" ] ||
    fail "${nvcc[*]} does not say which version it is: set NVCC, or NVCC= for the CPU program alone"
major=${release%.*} minor=${release#*.}
[ "$major" -gt 12 ] || { [ "$major" = 12 ] && [ "$minor" -ge 4 ]; } ||
    fail "nvcc $release is too old: CUDA 12.4 or later is needed; NVCC= builds the CPU program alone"

[ $# -gt 0 ] || fail "GPU_ARCH names no architecture: give $known"
for arch in "$@"; do
    [ "$arch" != native ] || fail "GPU_ARCH=native: nvidia-smi finds no GPU here; give ${known% or native}"
    [[ $arch =~ ^([0-9]{2,3})[af]?$ ]] || fail "GPU_ARCH: \"$arch\" is no architecture: give $known"
    [ "${BASH_REMATCH[1]}" -ge 80 ] ||
        fail "GPU_ARCH=$arch: the kernels need compute capability 8.0 (A100) or later: give $known"
    "${nvcc[@]}" --dryrun -gencode "arch=compute_$arch,code=sm_$arch" -x cu -c /dev/null -o /dev/null \
        >/dev/null 2>&1 || {
        codes=$("${nvcc[@]}" --list-gpu-code 2>/dev/null |
            sed -n 's/^sm_\([89][0-9]\|1[0-9][0-9]\)$/\1/p' | sort -n | tr '\n' ' ')
        fail "GPU_ARCH=$arch: nvcc $release does not know it, only ${codes% }; \
give one of these or install a newer toolkit"
    }
done

[ -n "$cudnn" ] ||
    fail "cuDNN 9 is missing (cudnn.h): install it, or name its folders in CPATH and LIBRARY_PATH"
[ "${cudnn%%.*}" -ge 9 ] 2>/dev/null || fail "cuDNN $cudnn is too old: version 9 is needed"
command -v g++ >/dev/null || fail "g++ is missing: run scripts/install_deps.sh"
