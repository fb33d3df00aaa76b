// Start-up check of the sm90 kernels.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// After everything is reserved, where device_has_wgmma(); unless it has passed before (check_cache.h). Ends
// the program with EXIT_DEVICE and the kernel's name when results are wrong.
void self_check(void);
