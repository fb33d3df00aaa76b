// Kernels with a fault each, by name, for emulated.t: what the emulation finds. "fine" has none; "race"
// prints what a missing barrier leaves to chance.
#include "llmc/cuda/device/cuda_common.cuh" // first: it includes C headers as C
#include "llmc/cuda/sm80/sm80.cuh"
#include <stdlib.h>
#include <string.h>

enum { THREADS = 64 };

// Sums of all threads' numbers and of what a copy brings: 2016 + 4 x 100, and the barrier makes it visible.
__global__ void fine_kernel(int *out, const int *in)
{
    __shared__ __align__(16) int copied[4];
    __shared__ int sums[THREADS / WARP];
    if (threadIdx.x < 4)
        copied[threadIdx.x] = -1;
    __syncthreads();
    if (threadIdx.x == 0) {
        sm80::copy_async(copied, in, 16);
        sm80::commit_loads();
        if (copied[0] != -1) // it may come now, but nobody may rely on it
            __trap();
        sm80::wait_loads<0>();
    }
    int sum = threadIdx.x;
    for (int step = 16; step; step >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    out[threadIdx.x] = sums[0] + sums[1] + copied[0] + copied[1] + copied[2] + copied[3];
}

__global__ void race_kernel(int *out, const int *)
{
    __shared__ int value[THREADS];
    value[threadIdx.x] = 0;
    __syncthreads();
    value[threadIdx.x] = 1;
    out[threadIdx.x] = value[threadIdx.x ^ WARP];
}

__global__ void lane_that_ended_kernel(int *out, const int *)
{
    if (threadIdx.x == 5)
        return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
}

__global__ void barrier_of_some_kernel(int *out, const int *)
{
    if (threadIdx.x < WARP)
        __syncthreads();
    else
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x == 40 ? (__syncthreads(), 1) : 2, 1);
}

__global__ void different_instructions_kernel(int *out, const int *)
{
    out[threadIdx.x] =
        threadIdx.x % 2 ? (int)__ballot_sync(0xffffffffu, 1) : __shfl_xor_sync(0xffffffffu, 1, 1);
}

__global__ void outside_of_mask_kernel(int *out, const int *)
{
    if (threadIdx.x < 8)
        out[threadIdx.x] = __shfl_xor_sync(0xffu, 1, 8);
}

__global__ void misaligned_kernel(int *out, const int *)
{
    __shared__ __align__(16) char tile[1024];
    uint32_t r[4];
    sm80::ldmatrix(r, tile + threadIdx.x % WARP * 16 + 4);
    out[threadIdx.x] = (int)r[0];
}

__global__ void copy_past_the_end_kernel(int *out, const int *in)
{
    __shared__ __align__(16) int copied[THREADS * 4];
    sm80::copy_async(copied + threadIdx.x * 4, in + threadIdx.x * 4, 16);
    sm80::wait_all_loads();
    out[threadIdx.x] = copied[threadIdx.x];
}

__global__ void past_shared_memory_kernel(int *out, const int *)
{
    extern __shared__ __align__(16) int shared[]; // 64 asked for
    out[threadIdx.x] = shared[threadIdx.x + 1];
}

__global__ void store_past_the_end_kernel(int *out, const int *) { out[threadIdx.x + THREADS - 5] = 1; }

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*kernel)(int *, const int *);
    } kernels[] = {{"fine", fine_kernel},
                   {"race", race_kernel},
                   {"lane_that_ended", lane_that_ended_kernel},
                   {"barrier_of_some", barrier_of_some_kernel},
                   {"different_instructions", different_instructions_kernel},
                   {"outside_of_mask", outside_of_mask_kernel},
                   {"misaligned", misaligned_kernel},
                   {"copy_past_the_end", copy_past_the_end_kernel},
                   {"past_shared_memory", past_shared_memory_kernel},
                   {"store_past_the_end", store_past_the_end_kernel}};
    int *out, *in, four[4] = {100, 100, 100, 100};
    for (auto &k : kernels) {
        if (argc != 2 || strcmp(argv[1], k.name))
            continue;
        CUDA_CHECK(cudaMalloc((void **)&out, THREADS * sizeof *out));
        CUDA_CHECK(cudaMalloc((void **)&in, sizeof four));
        CUDA_CHECK(cudaMemcpy(in, four, sizeof four, cudaMemcpyHostToDevice));
        k.kernel<<<1, THREADS, THREADS * sizeof *out>>>(out, in);
        printf("%d %d\n", out[0], out[THREADS - 1]);
        return 0;
    }
    fprintf(stderr, "usage: faults NAME\n");
    return 2;
}
