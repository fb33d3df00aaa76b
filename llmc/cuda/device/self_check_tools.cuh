// What the parts of the start-up check share: inputs, memory of a check, distances.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh" // first: it includes C headers as C
#include "llmc/cuda/device/device.h"
#include <cuda_fp8.h>
#include <vector>

namespace self_check_tools
{

const double ROUNDING_LIMIT = 0x1p-8; // of results in bf16 (self_check.cu)
enum { THREADS_FILL = 256 };

// ---- inputs ----------------------------------------------------------------------------------------------

__host__ __device__ __forceinline__ float pattern(uint32_t seed, int64_t i)
{
    uint32_t x = (uint32_t)i * 2654435761u + seed * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    return (float)(int)(x & 255) / 128 - 1;
}

static __global__ void fill_pattern_kernel(floatX *out, int64_t n, uint32_t seed)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = __float2bfloat16(pattern(seed, i));
}

inline std::vector<double> pattern_of(uint32_t seed, int64_t first, int64_t n)
{
    std::vector<double> x((size_t)n);
    for (int64_t i = 0; i < n; i++)
        x[(size_t)i] = (double)pattern(seed, first + i);
    return x;
}

// sum of x[i] y[i * step], i < n
inline double dot(const double *x, const double *y, int64_t step, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * y[i * step];
    return sum;
}

inline double code_value(uint8_t code, __nv_fp8_interpretation_t kind = __NV_E4M3)
{
    return (double)__half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}

inline double e4m3(float x) { return code_value(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)); }

inline double rounded_to_bf16(double x) { return (double)__bfloat162float(__float2bfloat16((float)x)); }

// An element of what has been read back.
inline double at(const std::vector<floatX> &a, int64_t i) { return (double)__bfloat162float(a[(size_t)i]); }

// Device memory of one check.
struct Arena {
    Stream stream;
    std::vector<void *> pieces;
    explicit Arena(Stream s) : stream(s) {}
    ~Arena()
    {
        for (void *p : pieces)
            CUDA_CHECK(cudaFree(p));
    }
    template <class T> T *take(int64_t n)
    {
        void *p = device_malloc((size_t)n * sizeof(T), "self-check: matrices");
        CUDA_CHECK(cudaMemsetAsync(p, 0, (size_t)n * sizeof(T), stream));
        pieces.push_back(p);
        return (T *)p;
    }
    floatX *filled(int64_t n, uint32_t seed)
    {
        floatX *p = take<floatX>(n);
        fill_pattern_kernel<<<(unsigned)ceil_div(n, THREADS_FILL), THREADS_FILL, 0, stream>>>(p, n, seed);
        CHECK_LAUNCH();
        return p;
    }
    template <class T> std::vector<T> read(const T *from, int64_t n)
    {
        std::vector<T> host((size_t)n);
        copy_to_host(stream, host.data(), from, (size_t)n * sizeof(T));
        stream_synchronize(stream); // under the watchdog
        return host;
    }
};

// Relative distance in the 2-norm of everything added; a NaN stays.
struct Distance {
    double difference = 0, size = 0;
    void add(double got, double want)
    {
        difference += (got - want) * (got - want);
        size += want * want;
    }
};

// Notes the kernel among those that are wrong when the distance is above the limit, or no number.
void require(const Distance &d, const char *kernel, double limit = ROUNDING_LIMIT);

void check_qkv(Stream s);  // self_check_qkv.cu
void check_head(Stream s); // self_check_head.cu
void check_sm80(Stream s); // self_check_sm80.cu

} // namespace self_check_tools
