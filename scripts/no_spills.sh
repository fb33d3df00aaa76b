#!/usr/bin/env bash
# Compiles a CUDA file, and refuses kernels whose values do not fit into registers: ptxas then spills some to local
# memory, which costs time and shows nowhere else. What spills on purpose stands in the list below.
#
#   no_spills.sh refuse|show NVCC ARGUMENT...     show: architectures or toolkits that the kernels were not fitted to
set -u -o pipefail
[ "${1-}" = --help ] && { sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0; }
[ $# -ge 2 ] && [[ $1 = refuse || $1 = show ]] || { echo 'usage: no_spills.sh refuse|show NVCC ARGUMENT...' >&2; exit 2; }

# Kernel, bytes that it may store, why (CUDA 13.0). Where a part is named, the kernel was compiled without it.
known='
attention_sm90::backward_qkv_kernel 32 dk, dv, scores and dp take 192 of 232 registers; a smaller tile has more traffic in shared memory
chain_kernel<__half> 148 the epilogue of products scaled by AOL (none without it): once a slice of 64 rows, not in the mainloop
chain_kernel<__nv_bfloat16> 60 the same epilogue (32 without it), and the other two of AOL
q_backward_kernel 16 three CTAs a multiprocessor, 168 registers, for more loads in flight (none with two); bound by memory
attention::dc_backward_queries_kernel<128> 28 two stages, as GPUs with 99 KB a block need (none with three)
attention::dc_backward_queries_kernel<64> 16 the same
load_kept_kernel<float> 8 three CTAs a multiprocessor, for more loads in flight; fp32 alone
codes_gemm_kernel<sm80::E4m3 160 where ptxas lowers its products to fp16 (9.0 to 11.0): launched by tests alone
sm80_qkv_heads_kernel<sm80::E4m3,128> 160 the same
sm80_qkv_heads_kernel<sm80::E4m3,96> 160 the same
gate_backward_128_kernel<6> 68 model widths of 1025 to 1536, which no preset has
gate_backward_128_kernel<8> 368 model widths of 1537 to 2048, which no preset has
__cuda_sm20_rcp_rn_f32_slowpath 12 the division in these two, for denormal numbers
'

what=$1
shift
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$@" -Xptxas -warn-spills 2>"$said"
status=$?

# Prints what the compiler said but for known spills; status 1 when there are others.
if c++filt <"$said" | awk -v known="$known" '
    BEGIN {
        lines = split(known, line, "\n")
        for (i = 1; i <= lines; i++)
            if (split(line[i], word, " ")) may[word[1]] = word[2]
    }
    /^ptxas warning *: Registers are spilled to local memory in function / {
        kernel = bytes = $0
        sub(/^[^\047]*\047(void )?(\(anonymous namespace\)::)?/, "", kernel)
        sub(/(,? ?\(|\047).*/, "", kernel)
        gsub(/ /, "", kernel)
        sub(/.*\047, /, "", bytes)
        if (bytes + 0 <= may[kernel] + 0) next
        spilled = 1
    }
    { print }
    END { exit spilled }' >&2; then
    exit "$status"
fi
[ "$status" = 0 ] && [ "$what" = refuse ] || exit "$status"
for ((i = 1; i < $#; i++)); do
    if [ "${!i}" = -o ]; then i=$((i + 1)) && rm -f "${!i}"; fi
done
echo 'error: registers are spilled: let the kernel hold less, or name it and the reason in scripts/no_spills.sh' >&2
exit 1
