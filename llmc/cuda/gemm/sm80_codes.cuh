// The sm80 GEMM with codes in its epilogue, on GPUs whose library multiplies by mma.sync, too.
#pragma once
#include "llmc/cuda/gemm/codes_epilogue.cuh"

// The product of p's codes on the FP8 units. False, with nothing launched, when the GPU, the build, the sizes
// or the alignment do not allow it.
bool sm80_codes_of_codes(Stream s, const Fp8Product *p, const CodesEpilogue *e);
// The same of values of the codes, any of which are bf16 numbers, for rows 0 to N - 1 of e.  x (N, p->in);
// w (p->out, p->in)
void sm80_codes_of_values(Stream s, const Fp8Product *p, const CodesEpilogue *e, const floatX *x,
                          const floatX *w, int N);
