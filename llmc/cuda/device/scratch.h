// Memory that ops need beside their arguments: partial sums, counters, slabs. Every stream has its own. Ops
// of one stream follow each other and may use the same bytes; streams may run any op at the same time. A
// captured graph uses the memory of the stream that it was captured on: it is launched there.
#pragma once
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    SCRATCH_ROPE,
    SCRATCH_MIX,
    SCRATCH_EMBED,
    SCRATCH_TABLE_GRAD,
    SCRATCH_GENERATOR,
    SCRATCH_WEIGHT_SCALE,
    SCRATCH_QKV,
    SCRATCH_GATES,
    SCRATCH_HEADS,
    SCRATCH_NORMUON,
    SCRATCH_NS_NORMS,
    SCRATCH_NS_CHAIN,
    SCRATCH_LIBRARY,      // workspace of cuBLASLt
    SCRATCH_WEIGHT_GRADS, // sm90_weight_grad.cu
    SCRATCH_FP8_SLAB,     // mlp_fp8.cu
    SCRATCH_ATTENTION,    // sm90 kernels, counters of forward and backward
    SCRATCH_DQ_STATE,     // sm90 kernels, backward
    SCRATCH_CUDNN,        // workspace of cuDNN's plans
    SCRATCH_COUNTERS,     // scratch_counter
    SCRATCHES
} ScratchOp;

// What a stream's memory for `op` holds; the largest call counts. A plan may grow later: ops take larger
// memory then, and graphs captured before keep theirs.
void scratch_plan(ScratchOp op, size_t bytes);
size_t scratch_planned(ScratchOp op);

// The stream's memory for `op`: zeroed when it is new, and counters are zero between ops. Fatal when more is
// asked for than planned. The first stream takes what scratch_reserve has made; another stream's memory is
// allocated at its first op or by scratch_ready.
void *scratch_of(Stream s, ScratchOp op, size_t bytes);
float *scratch_floats(Stream s, ScratchOp op, size_t floats);
unsigned *scratch_counter(Stream s, ScratchOp op); // of CTAs that have arrived, for grid-wide sums

void scratch_reserve(void);       // all that is planned, for one stream
void scratch_ready(Stream s);     // all that is planned, before a capture: there nothing can be allocated
void scratch_give_back(Stream s); // s is done and will be destroyed: the next stream takes its memory
void scratch_close(void);

#ifdef __cplusplus
}
#endif
