// sm90 GEMM of e4m3 operands: instances and launch of sm90_gemm_kernel.cuh.
//
// Sums are the tensor cores' own, which keep 14 bits below the largest term of a step of 32: the depth of an
// MLP needs no more than that.
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_gemm_kernel.cuh"

typedef void (*Fp8Kernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const CUtensorMap,
                          const GemmWork);
static const Fp8Kernel residual_kernel = sm90_gemm_kernel<E4m3, LAYOUT_NT, EPILOGUE_RESIDUAL, false>,
                       store_kernel = sm90_gemm_kernel<E4m3, LAYOUT_NT, EPILOGUE_STORE, false>;

void sm90_fp8_gemm_reserve(void)
{
    const Fp8Kernel kernels[] = {residual_kernel, store_kernel};
    for (int i = 0; device_has_wgmma() && i < 2; i++)
        CUDA_CHECK(
            cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
}

// K steps of the events in twelfths of all; pairs of codes count as elements.
static bool launch(const ProductContext *c, Fp8Kernel kernel, const int (&when)[EVENTS], floatX *out,
                   const floatX *source, const Fp8Product *p, const Fp8Work *fp8)
{
    GemmWork work = {.fp8 = *fp8, .plane_cols = p->out};
    unsigned blocks;
    if (!on_16_bytes({out, p->x8, p->w8, source}))
        return false;
    int pairs = p->in / 2;
    if (p->in % 16 || !sm90_tile_schedule(&work.tiles, &blocks, p->N, p->out, pairs, c->shared))
        return false; // of p->out eights are enough, as for bf16
    for (int i = 0; i < EVENTS; i++)
        work.at[i] = work.tiles.steps * when[i] / 12;
    CUtensorMap map_x = tile_map_bf16(p->x8, 1, p->N, pairs, TILE_M),
                map_w = tile_map_bf16(p->w8, 1, p->out, pairs, PANEL),
                map_out = tile_map_bf16(out, 1, p->N, p->out, WARPGROUP_M),
                map_source = source ? tile_map_bf16(source, 1, p->N, p->out, WARPGROUP_M) : map_out;
    kernel<<<blocks, TILE_THREADS, SHARED_BYTES, c->stream>>>(map_x, map_w, map_out, map_source, work);
    CHECK_LAUNCH();
    return true;
}

bool sm90_fp8_gemm(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual)
{
    static const int with_c[EVENTS] = {1, 2, 5, 6, 7, 10}, without[EVENTS] = {3, 3, 3, 8, 8, 8};
    Fp8Work work = {.scale_x = p->scale_x, .scale_w = p->scale_w, .alpha = p->alpha};
    if (residual)
        return launch(c, residual_kernel, with_c, out, residual, p, &work);
    return launch(c, store_kernel, without, out, NULL, p, &work);
}
