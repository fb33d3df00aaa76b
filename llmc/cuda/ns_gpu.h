// What the CUDA backend offers beside llmc/ns_ops.h: scratch memory for the Newton-Schulz primitives, and which path a shape takes.
#pragma once
#include "llmc/ns_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

// How a product is computed.
//   NS_PATH_TENSOR    Hopper's tensor memory accelerator and warpgroup products, straight from the operands
//   NS_PATH_REPACKED  the same, after x was copied to rows of a multiple of 16 bytes, which that unit demands
//   NS_PATH_PORTABLE  mma.sync (bf16, fp16) or plain fp32 arithmetic; any shape, any alignment, any GPU
typedef enum { NS_PATH_TENSOR, NS_PATH_REPACKED, NS_PATH_PORTABLE } NsPath;

// Sets scratch memory aside; call after backend_open and before any primitive. Calling again enlarges it: no work may be in flight.
//   repack_elements  largest batch * n * round_up(m, 8) of the 16-bit matrices whose m is no multiple of 8 and that shall take
//                    NS_PATH_REPACKED; 0: such matrices take NS_PATH_PORTABLE
void ns_reserve(int64_t repack_elements);
void ns_release(void);

// The path of ns_gram and ns_apply on (batch, n, m) matrices, with the present scratch; of ns_symmetric for m = n.
NsPath ns_product_path(NsDtype dtype, int n, int m, int batch);
const char *ns_path_name(NsPath path);

#ifdef __cplusplus
}
#endif
