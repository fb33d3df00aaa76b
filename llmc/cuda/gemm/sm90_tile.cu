// The host's part of products in tiles of 128 x 256.
#include "llmc/cuda/gemm/sm90_tile.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/sm90/sm90_launch.cuh"

static int clusters; // that run at the same time; 0: no such products on this path

void wide_tile_reserve(const void *kernel)
{
    clusters = 0;
    if (!device_has_wgmma()) return;
    if (!tensor_maps_known()) {
        note("the driver describes no tiles: matrix products take a slower path");
        return;
    }
    clusters = clusters_that_fit(kernel, {CLUSTER, TILE_THREADS, TILE_SHARED_BYTES});
    if (clusters < 1) note("the device runs no clusters of %d blocks: matrix products take a slower path", (int)CLUSTER);
}

bool wide_product_pays(int N, int depth, int cols)
{
    const int least_depth = 24 * STAGE_DEPTH; // measured: 5% faster than cuBLASLt at 2304, 10% slower at 768
    int64_t groups = ceil_div(N, CLUSTER * TILE_ROWS) * ceil_div(cols, TILE_COLS);
    return clusters && depth >= least_depth && groups >= clusters;
}

int wide_tile_clusters(void) { return clusters; }
int wide_tile_clusters_now(void) { return (int)max_i64(1, clusters - device_take_share() / CLUSTER); }

bool wide_tiles(WideTiles *t, unsigned *blocks, int64_t rows, int64_t cols, int64_t depth)
{
    int64_t columns = ceil_div(cols, TILE_COLS), all = ceil_div(rows, CLUSTER * TILE_ROWS) * columns;
    if (!clusters || depth % 8 || cols % 8 || all > INT32_MAX) return false;
    int now = wide_tile_clusters_now(), last = (int)(all % now), cut = all > now && 2 * last <= now ? last : 0;
    *t = {.columns = (int)columns, .whole = (int)all - cut, .halves = 2 * cut, .steps = (int)ceil_div(depth, STAGE_DEPTH)};
    *blocks = CLUSTER * (unsigned)min_i64(all, now);
    return true;
}

CUtensorMap wide_tile_map(const void *base, int planes, int rows, int cols, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, planes, rows, cols, cols, box_rows);
}

CUtensorMap wide_sum_map(const float *base, int rows, int cols)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base, 1, rows, cols, cols, GROUP_ROWS);
}
