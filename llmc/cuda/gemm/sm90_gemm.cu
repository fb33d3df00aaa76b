// sm90 GEMM of bf16 operands: instances and launch of sm90_gemm_kernel.cuh.
#include "llmc/cuda/gemm/sm90_gemm_kernel.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/rows/qkv.cuh"

// ---- launch ----------------------------------------------------------------------------------------------

typedef void (*GemmKernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const CUtensorMap,
                           const GemmWork);
static const struct {
    GemmLayout form;
    GemmEpilogue epilogue;
    GemmKernel kernel;
} kernels[] = {
    {LAYOUT_NN, EPILOGUE_STORE, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_STORE>},
    {LAYOUT_NT, EPILOGUE_STORE, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_STORE>},
    {LAYOUT_NT, EPILOGUE_RESIDUAL, sm90_gemm_kernel<Bf16, LAYOUT_NT, EPILOGUE_RESIDUAL>},
    {LAYOUT_NN, EPILOGUE_RELU2, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_RELU2>},
    {LAYOUT_NN, EPILOGUE_DRELU2, sm90_gemm_kernel<Bf16, LAYOUT_NN, EPILOGUE_DRELU2>},
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

bool sm90_gemm(const ProductContext *c, GemmLayout form, GemmEpilogue epilogue, floatX *out, const floatX *x,
               const floatX *w, const floatX *source, int N, int depth, int cols)
{
    // in twelfths of the k steps; first row without C, second with C
    static const int when[2][EVENTS] = {{3, 3, 3, 8, 8, 8}, {1, 2, 5, 6, 7, 10}};
    GemmWork work = {};
    unsigned blocks;
    const void *operands[] = {out, x, w, source};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)operands[i] % 16)
            return false;
    if (!sm90_tile_schedule(&work.tiles, &blocks, N, cols, depth, c->shared))
        return false;
    for (int i = 0; i < EVENTS; i++)
        work.at[i] = work.tiles.steps * when[source != NULL][i] / 12;
    bool by_depth = form == LAYOUT_NN;
    CUtensorMap map_x = tile_map_bf16(x, 1, N, depth, TILE_M),
                map_w = by_depth ? tile_map_bf16(w, 1, depth, cols, TILE_K)
                                 : tile_map_bf16(w, 1, cols, depth, PANEL),
                map_out = tile_map_bf16(out, 1, N, cols, WARPGROUP_M),
                map_source = source ? tile_map_bf16(source, 1, N, cols, WARPGROUP_M) : map_out;
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i].form != form || kernels[i].epilogue != epilogue)
            continue;
        kernels[i].kernel<<<blocks, TILE_THREADS, SHARED_BYTES, c->stream>>>(map_x, map_w, map_out,
                                                                             map_source, work);
        CHECK_LAUNCH();
        return true;
    }
    return false;
}
