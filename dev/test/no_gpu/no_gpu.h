// Stands in for CUDA where there is no GPU: so that a machine without one can run all that the host does in
// a step. A program finds it through LD_PRELOAD. Memory is the host's, kernels and products do nothing, and
// what results from them is zero. What is checked, and ends the program with one line and status 99, is what
// a GPU would refuse or what would go past an array:
//   launches           grid, block and shared memory within the limits; pointers of the arguments in memory
//   tensor maps        alignment, strides and box within the limits; the tensor inside one allocation
//   products           shapes that fit together; matrices inside one allocation; FP8's transposition
//   capture            no call that a stream under capture refuses
//
// NO_GPU: compute capability and memory in GiB, "9.0 140" if absent. NO_GPU_LAUNCHES: a file to which every
// kernel is written at the end, with its launches. NO_GPU_WITHOUT_FP8: cuBLASLt has no algorithm in FP8;
// gradients: none for those of weights in FP8.
//
// Limits: CUDA Programming Guide, "Compute Capabilities", and cuTensorMapEncodeTiled's page of the driver's
// reference.
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

enum { REFUSED = 99, SMS = 132 };

typedef struct {
    int major, minor; // compute capability
    size_t memory;    // bytes
    int shared;       // most shared memory of a block, bytes
} Gpu;
const Gpu *no_gpu(void);

struct CUstream_st {
    const void *capture; // the stream whose capture this one takes part in; NULL: none
    bool relaxed;
    struct CUstream_st *next;
};

__attribute__((noreturn, format(printf, 1, 2))) void refuse(const char *format, ...);
// Refuses a call that waits for a stream, or for all (NULL), while that is under capture.
void may_wait(const char *call, const struct CUstream_st *only);
// Whether [p, p + bytes) lies wholly in one allocation of the device or of pinned memory.
bool is_allocated(const void *p, size_t bytes);
// Refuses the call unless [p, p + bytes) lies wholly in one allocation of the device.
void need_device(const char *call, const void *p, size_t bytes);
