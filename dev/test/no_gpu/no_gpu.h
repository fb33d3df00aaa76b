// Stands in for CUDA where there is no GPU: so that a machine without one can run all that the host does in
// a step. A program finds it through LD_PRELOAD. Memory is the host's, kernels and products do nothing, and
// what results from them is zero (dev/test/emulate has kernels and products that do all). What is checked,
// and ends the program with one line and status 99, is what a GPU would refuse or what would go past an
// array:
//   launches           grid, block and shared memory within the limits; pointers of the arguments in memory
//   tensor maps        alignment, strides and box within the limits; the tensor inside one allocation
//   products           shapes that fit together; matrices inside one allocation; FP8's transposition
//   capture            no call that a stream under capture refuses
//
// NO_GPU: compute capability and memory in GiB, "9.0 140" if absent. NO_GPU_LAUNCHES: a file to which every
// kernel is written at the end, with its launches. NO_GPU_WITHOUT_FP8: cuBLASLt has no algorithm in FP8;
// gradients: none for those of weights in FP8. NO_GPU_WITHOUT: "clusters" or "tensor maps", which there are
// not.
//
// Limits: CUDA Programming Guide, "Compute Capabilities", and cuTensorMapEncodeTiled's page of the driver's
// reference.
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { REFUSED = 99, SMS = 132 };

typedef struct {
    int major, minor; // compute capability
    size_t memory;    // bytes
    int shared;       // most shared memory of a block, bytes
} Gpu;
const Gpu *no_gpu(void);
bool is_without(const char *what); // NO_GPU_WITHOUT is that

// What a stream has to do: a call, and a copy of its argument.
typedef struct Work {
    void (*run)(const void *argument);
    void *argument; // owned
    struct Work *next;
} Work;

struct CUstream_st {
    struct CUstream_st *capture; // the stream whose capture this one takes part in; NULL: none
    bool relaxed;
    Work *first, **end; // of the capture that this stream began
    struct CUstream_st *next;
};
// Does the work, or keeps it for the graph under capture.
void stream_work(cudaStream_t s, void (*run)(const void *argument), const void *argument, size_t bytes);

__attribute__((noreturn, format(printf, 1, 2))) void refuse(const char *format, ...);
// Refuses a call that waits for a stream, or for all (NULL), while that is under capture.
void may_wait(const char *call, const struct CUstream_st *only);
// Whether [p, p + bytes) lies wholly in one allocation of the device or of pinned memory.
bool is_allocated(const void *p, size_t bytes);
// Refuses the call unless [p, p + bytes) lies wholly in one allocation of the device.
void need_device(const char *call, const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif
