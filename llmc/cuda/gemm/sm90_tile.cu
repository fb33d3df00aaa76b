// Host side of the 128 x 256 tile: occupancy, tile schedule, tensor maps.
#include "llmc/cuda/gemm/sm90_tile.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/sm90/sm90_launch.cuh"

static int clusters; // resident at the same time; 0: this tile does not run on this path

void sm90_tile_reserve(const void *kernel)
{
    clusters = 0;
    if (!device_has_wgmma())
        return;
    if (!tensor_maps_known()) {
        device_leave_wgmma("the driver has no tensor maps");
        return;
    }
    clusters = clusters_that_fit(kernel, {CLUSTER, TILE_THREADS, TILE_SHARED_BYTES});
    if (clusters < 1)
        device_leave_wgmma("the device has no room for a cluster");
}

bool sm90_gemm_pays(int N, int depth, int cols, int planes)
{
    // Measured: 5% faster than cuBLASLt at 2304, 10% slower at 768. cuBLASLt's batches of planes are slower.
    const int least_depth = 24 * TILE_K;
    int64_t groups = ceil_div(N, CLUSTER * TILE_M) * ceil_div(cols, TILE_N);
    return clusters && (depth >= least_depth || planes > 1) && groups >= clusters;
}

int sm90_tile_clusters(void) { return clusters; }

int sm90_tile_clusters_beside(SharedSms *shared)
{
    if (!shared || shared->products == 0)
        return clusters;
    shared->products--;
    return (int)max_i64(1, clusters - shared->sms / CLUSTER);
}

bool sm90_tile_schedule(TileSchedule *t, unsigned *blocks, int64_t rows, int64_t cols, int64_t depth,
                        SharedSms *shared)
{
    int64_t columns = ceil_div(cols, TILE_N), all = ceil_div(rows, CLUSTER * TILE_M) * columns;
    if (!clusters || depth % 8 || cols % 8 || all > INT32_MAX)
        return false;
    int now = sm90_tile_clusters_beside(shared), last = (int)(all % now),
        cut = all > now && 2 * last <= now ? last : 0;
    *t = {.columns = (int)columns,
          .whole = (int)all - cut,
          .halves = 2 * cut,
          .steps = (int)ceil_div(depth, TILE_K)};
    *blocks = CLUSTER * (unsigned)min_i64(all, now);
    return true;
}

bool on_16_bytes(std::initializer_list<const void *> pointers)
{
    for (const void *p : pointers)
        if ((uintptr_t)p % 16)
            return false;
    return true;
}

CUtensorMap tile_map_bf16(const void *base, int planes, int rows, int cols, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, planes, rows, cols, cols, box_rows);
}

CUtensorMap tile_map_fp32(const float *base, int rows, int cols)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base, 1, rows, cols, cols, WARPGROUP_M);
}
