// The host's part of products in tiles of 128 x 256.
#include "llmc/cuda/wide_tile.cuh"
#include "llmc/cuda/device.h"
#include "llmc/cuda/tensor_map.cuh"

static EncodeTiled encode_tiled; // NULL: no such products on this path
static int clusters;             // that run at the same time

void wide_tile_reserve(const void *kernel)
{
    encode_tiled = NULL;
    if (!device_has_wgmma()) return;
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeClusterDimension};
    attribute.val.clusterDim.x = CLUSTER, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {.gridDim = dim3((unsigned)device_state.sms / CLUSTER * CLUSTER), .blockDim = dim3(TILE_THREADS),
                                 .dynamicSmemBytes = TILE_SHARED_BYTES, .stream = NULL, .attrs = &attribute, .numAttrs = 1};
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    if (clusters < 1) {
        note("the device runs no clusters of %d blocks: matrix products take a slower path", (int)CLUSTER);
        return;
    }
    encode_tiled = tensor_map_encoder();
    if (!encode_tiled) note("the driver describes no tiles: matrix products take a slower path");
}

bool wide_product_pays(int N, int depth, int cols)
{
    const int least_depth = 24 * STAGE_DEPTH; // measured: 5% faster than cuBLASLt at 2304, 10% slower at 768
    int64_t groups = ceil_div(N, CLUSTER * TILE_ROWS) * ceil_div(cols, TILE_COLS);
    return encode_tiled && depth >= least_depth && groups >= clusters;
}

int wide_tile_clusters(void) { return encode_tiled ? clusters : 0; }
int wide_tile_clusters_now(void) { return (int)max_i64(1, clusters - device_take_share() / CLUSTER); }

bool wide_tiles(WideTiles *t, unsigned *blocks, int64_t rows, int64_t cols, int64_t depth)
{
    int64_t columns = ceil_div(cols, TILE_COLS), all = ceil_div(rows, CLUSTER * TILE_ROWS) * columns;
    if (!encode_tiled || depth % 8 || cols % 8 || all > INT32_MAX) return false;
    int now = wide_tile_clusters_now(), last = (int)(all % now), cut = all > now && 2 * last <= now ? last : 0;
    *t = {.columns = (int)columns, .whole = (int)all - cut, .halves = 2 * cut, .steps = (int)ceil_div(depth, STAGE_DEPTH)};
    *blocks = CLUSTER * (unsigned)min_i64(all, now);
    return true;
}


// Boxes of 128 bytes and box_rows rows.
static CUtensorMap tile_map(CUtensorMapDataType type, int element, const void *base, int planes, int rows, int cols, int box_rows)
{
    CUtensorMap map;
    cuuint64_t pitch = (cuuint64_t)cols * (cuuint64_t)element;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)planes}, strides[2] = {pitch, pitch * (cuuint64_t)rows};
    cuuint32_t box[3] = {(cuuint32_t)(128 / element), (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    CUresult r = encode_tiled(&map, type, 3, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d x %d x %d (error %d)", planes, rows, cols, (int)r);
    return map;
}

CUtensorMap wide_tile_map(const void *base, int planes, int rows, int cols, int box_rows)
{
    return tile_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, planes, rows, cols, box_rows);
}

CUtensorMap wide_sum_map(const float *base, int rows, int cols)
{
    return tile_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, base, 1, rows, cols, GROUP_ROWS);
}
