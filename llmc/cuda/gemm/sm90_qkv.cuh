// The QKV products of sm90_qkv.cu. Each returns false, with nothing launched, when the path, the build, the
// head width or the alignment do not allow it.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

void sm90_qkv_reserve(void);
bool sm90_qkv_takes(int e); // heads of this width
// qkv_product_forward; with value embeddings v is left alone.
bool sm90_qkv(Stream s, const QkvProductForward *a, int N, int H, int e);
// qkv_heads_forward; with a value embedding or a mixture v is left alone, and the last plane of raw is raw v.
bool sm90_qkv_heads(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e);
