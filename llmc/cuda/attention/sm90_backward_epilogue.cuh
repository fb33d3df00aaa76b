// Attention backward on sm90 (sm90_backward.cu): epilogue of a work item. dk and dv to global memory, or to
// the gradients of raw k and v.
#pragma once
#include "llmc/cuda/attention/sm90_backward_producer.cuh"
#include "llmc/cuda/rows/qkv_row.cuh"

namespace attention_sm90
{

struct Maps {
    CUtensorMap q, k, v, dy, dk, dv; // boxes: queries' of 64 rows, k's and v's of 128, dk's and dv's of 64
};

// What the epilogue stores: dk and dv; the gradients of raw k and v of attention.h; the gradient of raw k of
// heads.h, and dv.
enum DkvEpilogue { EPILOGUE_GRADIENTS, EPILOGUE_QKV, EPILOGUE_HEADS };

#if HOPPER

// Pipeline state of a consumer warpgroup.
struct Consumer {
    int thread, lane, group;
    Pipeline ring, slots;
    uint32_t dq_parity = 1, buffer = 0; // buffer: of ds
    int storing = 0; // bulk groups of the item before whose reads of shared memory may be in flight
};

// ---- heads' backward --------------------------------------------------------------------------------------

// Cosines and sines of the thread's pairs of a row, and the row's norm. A row of rope has QK / 4 angles; the
// thread has pair 4 g + lane % 4 of group g of eight columns.
template <int QK> struct KeyRow {
    floatX cos[QK / 16], sin[QK / 16];
    float rstd;
};

// Of row `row` of the pass: a token's, or one of the two of a token with half of its heads each, whose
// positions go by the parity of the head.
template <int QK>
static __device__ __forceinline__ KeyRow<QK> load_key_row(const Arguments &a, int row, int head)
{
    KeyRow<QK> r = {};
    if (row >= a.N)
        return r;
    int position = a.pairs == 2 ? (row & ~1) + ((head + a.H * (row & 1)) & 1) : row;
    int64_t at = (int64_t)position * (QK / 4) + threadIdx.x % 4;
    r.rstd = __ldg(a.rstd_k + (int64_t)row * a.H + head);
#pragma unroll
    for (int g = 0; g < QK / 16; g++) {
        r.cos[g] = __ldg(a.cos + at + 4 * g);
        r.sin[g] = __ldg(a.sin + at + 4 * g);
    }
    return r;
}

// dk, without the factor `scale`, becomes the gradient of raw k (llmc/ops/heads.h): with y = R x^ the keys as
// attention took them, x^ = x rstd, and cos, sin rounded: dx = rstd R'(dy - y m / (cos^2 + sin^2)), m the
// mean of dy y over the head.  HALF: the thread's row of the two, `row` the number of it in the item
template <int QK, int HALF>
static __device__ __forceinline__ void finish_key_row(float (&dk)[QK / 2], const uint8_t *keys,
                                                      const KeyRow<QK> &r, int row, float scale)
{
    uint32_t y[QK / 8];
    float dot[2] = {0, 0};
#pragma unroll
    for (int g = 0; g < QK / 8; g++) { // rows have 128 swizzled bytes
        int at = row * 128 + ((g % 8 ^ row % 8) << 4) + (int)threadIdx.x % 4 * 4;
        y[g] = *(const uint32_t *)(keys + g / 8 * KEY_PANEL_BYTES + at);
    }
#pragma unroll
    for (int g = 0; g < QK / 8; g++) {
        float *d = dk + 4 * g + 2 * HALF;
        d[0] *= scale;
        d[1] *= scale;
        dot[0] += d[0] * low(y[g]);
        dot[1] += d[1] * high(y[g]);
    }
    float mean = quad_sum(dot[0] + dot[1]) / QK;
#pragma unroll
    for (int g = 0; g < QK / 8; g++) {
        float *d = dk + 4 * g + 2 * HALF, y0 = low(y[g]), y1 = high(y[g]);
        if (g < QK / 16) {
            unrotate(d[0], d[1], y0, y1, to_float(r.cos[g]), to_float(r.sin[g]), mean, r.rstd);
        } else {
            d[0] = r.rstd * (d[0] - y0 * mean);
            d[1] = r.rstd * (d[1] - y1 * mean);
        }
    }
}

// ---- dk and dv -------------------------------------------------------------------------------------------

// Epilogue: the warp's 16 rows of accumulators (64, COLS) times `factor` to panels of 64 columns as bf16,
// under the 128-byte swizzle.  row: the lane's, in the first panel
template <int COLS>
static __device__ __forceinline__ void stage_rows(uint8_t *row, const float (&sum)[COLS / 2], float factor,
                                                  int lane)
{
    uint32_t address = shared_address(row);
#pragma unroll
    for (int g = 0; g < COLS / 8; g += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = pack2(sum[4 * g + 2 * i] * factor, sum[4 * g + 2 * i + 1] * factor);
        stmatrix_x4(address + g / 8 * KEY_PANEL_BYTES + ((g % 8 + lane / 16 ^ lane % 8) << 4), x);
    }
}

// Stores a panel of 64 rows of a head. With EPILOGUE_GRADIENTS they are not read again soon.
// With EPILOGUE_HEADS a token has `pairs` rows.
template <int QK, DkvEpilogue EPILOGUE>
static __device__ __forceinline__ void store_panel(const CUtensorMap *map, const uint8_t *from, int head,
                                                   int panel, int row, int pairs)
{
    if constexpr (EPILOGUE == EPILOGUE_HEADS)
        tma_store_4d(map, from, panel * PANEL, head, 0, pairs == 2 ? row / 2 : row);
    else if constexpr (QK == WIDTH)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, "
                     "%3}], [%1], %4;" ::"l"((uint64_t)map),
                     "r"(shared_address(from)), "r"(head * WIDTH + panel * PANEL), "r"(row), "l"(EVICT_FIRST)
                     : "memory");
    else
        tma_store(map, from, panel * PANEL, head, row);
}

// Before the ds of an item's first and second tile is written: waits until the TMA stores of the item before
// have read that buffer, with the second all of theirs, and releases the slot of k.
static __device__ __forceinline__ void wait_stores(Consumer &c, const Shared &m)
{
    if (c.storing == 0)
        return;
    if (c.thread % WARPGROUP == 0) {
        if (c.storing == 2)
            tma_store_wait_read<1>();
        else
            tma_store_wait_read();
    }
    named_barrier_sync(BARRIER_WARPGROUP + c.group, WARPGROUP);
    if (--c.storing == 0)
        mbarrier_arrive(m.keys_empty(c.slots.stage ^ 1));
}

// Epilogue: the warpgroup's rows of scale dk, or with EPILOGUE_HEADS of the gradient of raw k, and of dv by
// TMA from the item's slot of k and from ds, which no WGMMA reads any more. The warpgroup's first thread
// stores, in two bulk groups: the panel of dv that lies in the ds buffer of the next tile, then the rest.
// wait_stores waits for their reads.
template <int QK, DkvEpilogue EPILOGUE>
static __device__ __forceinline__ void store_item(Consumer &c, const Shared &m, const Maps &maps,
                                                  const Arguments &a, float (&dk)[QK / 2],
                                                  const float (&dv)[64])
{
    const Item *item = m.item(c.slots.stage);
    int row = (c.thread / WARP * 16 + c.lane % 16) * 128, at = c.group * WARPGROUP_KEYS * 128,
        first = (int)c.buffer, second = first ^ 1, my_row = c.thread / WARP * 16 + c.lane / 4;
    uint8_t *k = m.k(c.slots.stage);
    KeyRow<QK> rows[2];
    if constexpr (EPILOGUE == EPILOGUE_HEADS)
        for (int r = 0; r < 2; r++) // here: the barrier hides some of the latency
            rows[r] = load_key_row<QK>(a, item->key0 + my_row + 8 * r, item->head);
    wait_stores(c, m); // an item of one tile has waited for the first bulk group alone
    named_barrier_sync(BARRIER_CONSUMERS, 2 * WARPGROUP); // both have read k and ds
    stage_rows<WIDTH>(m.ds(0) + row, dv, 1, c.lane);
    if constexpr (EPILOGUE == EPILOGUE_HEADS) {
        finish_key_row<QK, 0>(dk, k, rows[0], my_row, a.scale);
        finish_key_row<QK, 1>(dk, k, rows[1], my_row + 8, a.scale);
        __syncwarp(); // the warp has read its rows of k
        stage_rows<QK>(k + row, dk, 1, c.lane);
    } else
        stage_rows<QK>(k + row, dk, a.scale, c.lane);
    fence_proxy_async_shared(); // for TMA
    named_barrier_sync(BARRIER_WARPGROUP + c.group, WARPGROUP);
    c.storing = 2;
    if (c.thread % WARPGROUP)
        return;
    int key = item->key0 + c.group * WARPGROUP_KEYS;
    store_panel<WIDTH, EPILOGUE>(&maps.dv, m.ds(first) + at, item->head, first, key, a.pairs);
    tma_store_commit();
    store_panel<WIDTH, EPILOGUE>(&maps.dv, m.ds(second) + at, item->head, second, key, a.pairs);
    for (int p = 0; p < 2; p++)
        store_panel<QK, EPILOGUE>(&maps.dk, k + p * KEY_PANEL_BYTES + at, item->head, p, key, a.pairs);
    tma_store_commit();
}

// ---- q, k, v's backward ----------------------------------------------------------------------------------

// Epilogue: gradient of v_raw from dv (64, 128), and dv itself if wanted.  row: first row of the thread
static __device__ __forceinline__ void finish_values(const float (&sum)[64], const Item *item, int row,
                                                     int warp, const Arguments &a)
{
    int quad = threadIdx.x % 4, d = a.H * WIDTH, column = item->head * WIDTH;
    uint4 raw[2][4] = {}, embed[2][4] = {};
    float lambda = a.lambda[0], sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t n = row + 8 * i;
        if (n >= a.N)
            continue;
#pragma unroll
        for (int k = 0; k < 4; k++)
            raw[i][k] = load_vec(a.v_raw + n * d + column, 4 * k + quad);
        if (!a.value_embed)
            continue;
        const floatX *from = a.value_embed + (int64_t)a.tokens[n] * d + column;
#pragma unroll
        for (int k = 0; k < 4; k++)
            embed[i][k] = load_vec(from, 4 * k + quad);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t n = row + 8 * i;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t x[4];
#pragma unroll
            for (int g = 0; g < 4; g++)
                x[g] = pack2(sum[4 * (4 * k + g) + 2 * i], sum[4 * (4 * k + g) + 2 * i + 1]);
            transpose_quad(x);
            uint4 dv = make_uint4(x[0], x[1], x[2], x[3]);
            if (n >= a.N)
                continue;
            if (a.dv)
                store_vec(a.dv + n * d + column, 4 * k + quad, dv);
            store_vec(a.dqkv + (3 * n + 2) * d + column, 4 * k + quad,
                      value_gradient(dv, raw[i][k], embed[i][k], true, lambda, sums));
        }
    }
    sums[0] = warp_sum(sums[0]);
    sums[1] = warp_sum(sums[1]);
    if (threadIdx.x % WARP == 0)
        ((float2 *)a.value_sums)[(item->key0 / KEYS * a.H + item->head) * CONSUMER_WARPS + warp] =
            make_float2(sums[0], sums[1]);
}

// Epilogue: gradient of the raw k from dk (64, 128); releases the item's k.  row: first row of the thread,
// my_row: the same in the item
static __device__ __forceinline__ void finish_keys(const Shared &m, int slot, const float (&sum)[64],
                                                   int head, int row, int my_row, const Angles (&angles)[2],
                                                   const float (&rstd)[2], const Arguments &a)
{
    RowPairs k[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = (my_row + 8 * r) * 128 + threadIdx.x % 4 * 4;
#pragma unroll
        for (int i = 0; i < 16; i++) // groups of columns; rows have 128 swizzled bytes
            k[r].x[i / 8][i % 8 / 4][i % 4] =
                *(const uint32_t *)(m.k(slot) + i / 8 * KEY_PANEL_BYTES + (at ^ (i % 8 ^ my_row % 8) << 4));
    }
    mbarrier_arrive(m.keys_empty(slot));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float d[2][8][2];
        int n = row + 8 * r;
#pragma unroll
        for (int i = 0; i < 32; i++)
            d[i / 16][i / 2 % 8][i % 2] = a.scale * sum[i / 2 * 4 + 2 * r + i % 2];
        finish_row(a.dqkv + (3 * (int64_t)n + 1) * a.H * WIDTH + head * WIDTH, d, k[r], angles[r], rstd[r],
                   n < a.N);
    }
}

#endif

} // namespace attention_sm90
