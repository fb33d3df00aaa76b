// The two paths of the products with a squared ReLU.
#pragma once
#include "llmc/cuda/cuda_common.cuh"

// True where device_has_wgmma() and the driver can describe tiles. Before any other call, outside of a capture.
bool relu2_tensor_open(void);
// out = relu(x w)^2, or with y: out = (x w) * 2 sqrt(y).  x (N, in), w (in, width), y and out (N, width), all bf16
// False, with nothing queued, when the chip, the build or the alignment do not allow it.
bool relu2_tensor(Stream s, floatX *out, const floatX *x, const floatX *w, const floatX *y, int N, int in, int width);
