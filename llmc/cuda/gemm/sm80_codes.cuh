// The sm80 GEMM with codes in its epilogue, on GPUs whose library multiplies by mma.sync, too.
#pragma once
#include "llmc/cuda/gemm/codes_epilogue.cuh"

// The product of p's codes on the FP8 units. False, with nothing launched, when the GPU, the build, the sizes
// or the alignment of the operands do not allow it. Results lie on multiples of 16 bytes, y's codes and the
// codes of 8.
bool sm80_gemm_codes_fp8(Stream s, const Fp8Product *p, const CodesEpilogue *e);
// The same of values of the codes, any of which are bf16 numbers, for rows 0 to N - 1 of e.  x (N, p->in);
// w (p->out, p->in)
void sm80_gemm_codes_bf16(Stream s, const Fp8Product *p, const CodesEpilogue *e, const floatX *x,
                          const floatX *w, int N);
