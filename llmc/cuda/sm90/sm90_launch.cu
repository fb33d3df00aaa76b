#include "llmc/cuda/sm90/sm90_launch.cuh"

// ---- tensors ---------------------------------------------------------------------------------------------

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill);
static EncodeTiled encode_tiled; // NULL: not asked yet, or the driver has none

// From the runtime, so that the program does not link the driver's library, which machines without a GPU
// lack.
bool tensor_maps_known(void)
{
    void *address = NULL;
    cudaDriverEntryPointQueryResult found;
    if (encode_tiled)
        return true;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault,
                                                &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &address, cudaEnableDefault, &found));
#endif
    if (found == cudaDriverEntryPointSuccess)
        encode_tiled = (EncodeTiled)address;
    return encode_tiled;
}

// A tensor of `rank` dimensions, the innermost first; strides (rank - 1) in bytes, of all but that.
static CUtensorMap encode(CUtensorMapDataType type, unsigned rank, const void *base, const cuuint64_t *sizes,
                          const cuuint64_t *strides, const cuuint32_t *box)
{
    CUtensorMap map;
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    if (!tensor_maps_known())
        fatal(EXIT_BAD_INPUT,
              "the driver has no cuTensorMapEncodeTiled: update it to one for CUDA 12.0 or later");
    CUresult r = encode_tiled(&map, type, rank, (void *)base, sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT,
              "CUDA: no tensor map for %lld x %lld x %lld x %lld, pitch %lld bytes (error %d)",
              rank > 3 ? (long long)sizes[3] : 1, rank > 2 ? (long long)sizes[2] : 1, (long long)sizes[1],
              (long long)sizes[0], (long long)strides[0], (int)r);
    return map;
}

CUtensorMap tensor_map(CUtensorMapDataType type, const void *base, int planes, int rows, int cols, int pitch,
                       int box_rows)
{
    unsigned element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                       : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                 : 2;
    cuuint64_t row = (cuuint64_t)pitch * element,
               sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)planes};
    cuuint64_t strides[2] = {row, row * (cuuint64_t)rows};
    cuuint32_t box[3] = {128 / element, (cuuint32_t)box_rows, 1};
    return encode(type, planes ? 3 : 2, base, sizes, strides, box);
}

CUtensorMap tensor_map_of_heads(const void *base, int rows, int heads, int width, int box_rows)
{
    cuuint64_t head = (cuuint64_t)width * 2,
               sizes[3] = {(cuuint64_t)width, (cuuint64_t)heads, (cuuint64_t)rows},
               strides[2] = {head, head * (cuuint64_t)heads};
    cuuint32_t box[3] = {64, 1, (cuuint32_t)box_rows};
    return encode(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, base, sizes, strides, box);
}

CUtensorMap tensor_map_of_pairs(const void *base, int tokens, int pairs, int heads, int width, int pitch,
                                int box_rows)
{
    cuuint64_t head = (cuuint64_t)width * 2,
               sizes[4] = {(cuuint64_t)width, (cuuint64_t)heads, (cuuint64_t)pairs, (cuuint64_t)tokens},
               strides[3] = {head, head * (cuuint64_t)heads, (cuuint64_t)pitch * 2};
    cuuint32_t box[4] = {64, 1, (cuuint32_t)pairs, (cuuint32_t)(box_rows / pairs)};
    return encode(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, base, sizes, strides, box);
}

// ---- clusters --------------------------------------------------------------------------------------------

int clusters_that_fit(const void *kernel, ClusterShape shape)
{
    int clusters = 0;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, NULL, shape, 1, false);
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    return clusters;
}

cudaLaunchConfig_t cluster_launch(cudaLaunchAttribute *attributes, Stream s, ClusterShape shape,
                                  int64_t clusters, bool early)
{
    memset(attributes, 0, 2 * sizeof *attributes);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)shape.blocks;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(shape.blocks * clusters));
    config.blockDim = dim3((unsigned)shape.threads);
    config.dynamicSmemBytes = shape.shared;
    config.stream = s;
    config.attrs = attributes;
    config.numAttrs = early ? 2 : 1;
    return config;
}
