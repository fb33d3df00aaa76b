// sm90 GEMM of bf16 operands: instances and launch of sm90_gemm_kernel.cuh.
#include "llmc/cuda/gemm/sm90_gemm_kernel.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_qkv.cuh"

// ---- launch ----------------------------------------------------------------------------------------------

typedef void (*GemmKernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const CUtensorMap,
                           const GemmWork);
static const struct {
    GemmLayout layout;
    GemmEpilogue epilogue;
    bool scaled;
    GemmKernel kernel;
} kernels[] = {
    {LAYOUT_NN, EPILOGUE_STORE, false, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_STORE, false>},
    {LAYOUT_NT, EPILOGUE_STORE, false, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_STORE, false>},
    {LAYOUT_NT, EPILOGUE_RESIDUAL, false, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_RESIDUAL, false>},
    {LAYOUT_NN, EPILOGUE_RELU2, false, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_RELU2, false>},
    {LAYOUT_NN, EPILOGUE_DRELU2, false, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_DRELU2, false>},
    {LAYOUT_NT, EPILOGUE_STORE, true, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_STORE, true>},
    {LAYOUT_NT, EPILOGUE_RESIDUAL, true, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_RESIDUAL, true>},
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

void sm90_gemm_reserve(void)
{
    for (int i = 0; device_has_wgmma() && i < KERNELS; i++)
        CUDA_CHECK(cudaFuncSetAttribute(kernels[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        SHARED_BYTES));
    if (device_has_wgmma())
        sm90_qkv_reserve();
    sm90_tile_reserve((const void *)kernels[0].kernel);
}

bool sm90_gemm(const ProductContext *c, const Sm90Product *p)
{
    // in twelfths of the k steps; first row without C, second with C
    static const int when[2][EVENTS] = {{3, 3, 3, 8, 8, 8}, {1, 2, 5, 6, 7, 10}},
                     apply[DRELU2_EVENTS] = {0, 1, 3, 4, 6, 7, 9, 10};
    GemmWork work = {.alpha = p->alpha, .plane_cols = p->cols / p->planes};
    unsigned blocks;
    int N = p->N, depth = p->depth, cols = p->cols;
    if (!on_16_bytes({p->out, p->x, p->w, p->source}))
        return false;
    if (p->planes > 1 && (work.plane_cols % TILE_N || p->epilogue != EPILOGUE_STORE))
        return false;
    if (!sm90_tile_schedule(&work.tiles, &blocks, N, cols, depth, c->shared))
        return false;
    for (int i = 0; i < EVENTS; i++)
        work.at[i] = work.tiles.steps * when[p->source != NULL][i] / 12;
    for (int i = 0; i < DRELU2_EVENTS; i++)
        work.apply_at[i] = work.tiles.steps * apply[i] / 12;
    int box_rows = p->epilogue == EPILOGUE_DRELU2 ? (int)WARP_ROWS : (int)WARPGROUP_M;
    bool by_depth = p->layout == LAYOUT_NN;
    CUtensorMap map_x = tile_map_bf16(p->x, 1, N, depth, TILE_M),
                map_w = by_depth ? tile_map_bf16(p->w, 1, depth, cols, TILE_K)
                                 : tile_map_bf16(p->w, 1, cols, depth, PANEL),
                map_out = tile_map_bf16(p->out, p->planes, N, work.plane_cols, box_rows),
                map_source = p->source ? tile_map_bf16(p->source, 1, N, cols, box_rows) : map_out;
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i].layout != p->layout || kernels[i].epilogue != p->epilogue ||
            kernels[i].scaled != (p->alpha != NULL))
            continue;
        kernels[i].kernel<<<blocks, TILE_THREADS, SHARED_BYTES, c->stream>>>(map_x, map_w, map_out,
                                                                             map_source, work);
        CHECK_LAUNCH();
        return true;
    }
    assert(!"a kernel for this product");
    return false;
}
