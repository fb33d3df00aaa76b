// What the CUDA backend offers beside llmc/ops/ns_ops.h: scratch memory for the Newton-Schulz primitives, and
// which path a shape takes.
#pragma once
#include "llmc/ops/ns_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

// How products are computed, or whole iterations.
//   NS_PATH_TENSOR    Hopper's tensor memory accelerator and warpgroup products, chains of them in one kernel
//   NS_PATH_PORTABLE  mma.sync (bf16, fp16) or plain fp32 arithmetic, a kernel each; any shape, any GPU
//   NS_PATH_SMALL     the whole iteration in one kernel, whose squares stay on chip: iterations only
typedef enum { NS_PATH_TENSOR, NS_PATH_PORTABLE, NS_PATH_SMALL } NsPath;

// Plans the primitives' scratch memory; call after backend_open and before any of them.
void ns_reserve(void);
void ns_release(void); // another device may be opened

// The path of matrices (n, m); of squares m = n.
NsPath ns_product_path(NsDtype dtype, int n, int m);
NsPath ns_iteration_path(NsDtype dtype, int n, int m);
const char *ns_path_name(NsPath path);

#ifdef __cplusplus
}
#endif
