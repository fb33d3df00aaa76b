// Rows of a table that travel between ranks: packed side by side, and put back. Bound by memory; a warp moves
// a row in vectors of 16 bytes.
#include "llmc/cuda/device/cuda_common.cuh"

typedef enum { LOAD, STORE, TAKE, ADD } Move;

// packed (count, vectors), table (any, vectors)
template <Move MOVE>
__global__ __launch_bounds__(ROW_THREADS) void move_rows_kernel(float4 *packed, float4 *table,
                                                                const int32_t *rows, int count, int vectors)
{
    int lane = threadIdx.x % WARP, k = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (k >= count || rows[k] < 0)
        return;
    float4 *out = packed + (int64_t)k * vectors, *row = table + (int64_t)rows[k] * vectors;
    for (int i = lane; i < vectors; i += WARP) {
        if (MOVE == LOAD || MOVE == TAKE)
            out[i] = row[i];
        if (MOVE == TAKE)
            row[i] = make_float4(0, 0, 0, 0);
        if (MOVE == STORE)
            row[i] = out[i];
        if (MOVE == ADD) {
            float4 a = row[i], b = out[i];
            row[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
        }
    }
}

template <Move MOVE>
static void move_rows(Stream s, void *packed, void *table, const int32_t *rows, int count, int bytes)
{
    assert(bytes % 16 == 0);
    if (count <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(count, ROW_WARPS);
    move_rows_kernel<MOVE>
        <<<blocks, ROW_THREADS, 0, s>>>((float4 *)packed, (float4 *)table, rows, count, bytes / 16);
    CHECK_LAUNCH();
}

void rows_load(Stream s, void *out, const void *table, const int32_t *rows, int count, int bytes)
{
    OP_SCOPE(rows_load, count, bytes);
    move_rows<LOAD>(s, out, (void *)table, rows, count, bytes);
}

void rows_store(Stream s, void *table, const void *in, const int32_t *rows, int count, int bytes)
{
    OP_SCOPE(rows_store, count, bytes);
    move_rows<STORE>(s, (void *)in, table, rows, count, bytes);
}

void rows_take(Stream s, float *out, float *table, const int32_t *rows, int count, int width)
{
    OP_SCOPE(rows_take, count, width);
    move_rows<TAKE>(s, out, table, rows, count, width * (int)sizeof(float));
}

void rows_add(Stream s, float *table, const float *in, const int32_t *rows, int count, int width)
{
    OP_SCOPE(rows_add, count, width);
    move_rows<ADD>(s, (void *)in, table, rows, count, width * (int)sizeof(float));
}
