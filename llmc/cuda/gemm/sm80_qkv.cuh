// The QKV products of sm80_qkv.cu, for GPUs without WGMMA. Each returns false, with nothing launched, when
// the head width, the alignment or the GPU do not allow it.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// qkv_product_forward and qkv_heads_forward, whole.
bool sm80_qkv(Stream s, const QkvProductForward *a, int N, int H, int e);
bool sm80_qkv_heads(Stream s, const QkvHeadsForward *a, int N, int H, int e);
