// What the open device can do, and what this build and the user let it do. Every choice between a kernel for
// one kind of GPU and one for all asks here, so that a run is on one path throughout.
#pragma once
#include "llmc/ops/backend.h"
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif

// true: as if the device were not Hopper or later; the FP8 units of any GPU remain, which cuBLASLt drives.
// For --portable; before the reserve functions, not between.
void device_set_portable(bool portable);
bool device_is_portable(void);

bool device_has_wgmma(
    void); // Hopper's warpgroup products and tensor memory accelerator, compiled in (sm_90a)
// For what is found when resources are reserved: all kernels for Hopper are left out, as with --portable.
// why: static text
void device_leave_wgmma(const char *why);
bool device_has_bulk_copies(void); // rows to shared memory by the copy engine: Hopper and later
bool device_has_fp8(void);         // FP8 products on the tensor cores: Ada and later, portable or not
// Whether cuBLASLt's products are mma.sync, as those of the portable kernels. On the data center GPUs from
// Hopper on (9.0 to 11.0) they are faster ones, and ptxas lowers mma.sync of e4m3 to products in fp16.
bool device_library_uses_mma(void);
bool device_has_fp8_mma(void); // the same, and compiled for Ada or later: mma.sync of FP8

// Where a library's call has failed: ends the program with EXIT_DEVICE if that is because the GPU has.
void device_check_failure(const char *call, const char *file, int line);

bool stream_is_capturing(Stream s);
const char *device_path(void); // which path the kernels take, and why; static text

#ifdef __cplusplus
}
#endif
