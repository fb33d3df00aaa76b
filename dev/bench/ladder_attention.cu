// Kernel ladder: attention forward over packed documents, causal, window of 896 tokens, with its gate:
// yg = sig(gate_w . h[0:12]) softmax(scale q k^T + mask) v. 50 GFLOP at our size: bound by arithmetic, if not
// done badly.
#include "dev/bench/ladder.cuh"
#include "llmc/cuda/attention/sm90_attention.cuh"
#include "llmc/cuda/attention/gates.cuh"

enum { N = 32768, H = 6, E = 128, D = H * E, DOCUMENTS = 47, LONGEST = 2048, WINDOW = 896 };
#define SCALE 0.1f
static struct {
    floatX *q, *k, *v, *h, *yg;
} set[LADDER_SETS];                // (N, D)
static floatX *gate_w;             // (H, 12)
static float *lse;                 // (N, H)
static int32_t *table, *first_key; // of the program's kernels; (N) first key that a query sees
static int cu[DOCUMENTS + 1], slots, first_key_host[N];
static AttentionPlan *plan;
enum { GATE_WIDTH = 12 }; // channels that a gate reads

static __device__ __forceinline__ float gate_of(const floatX *h, const floatX *gate_w, int query, int head)
{
    return sigmoid(gate_input(h + (int64_t)query * D, gate_w + head * GATE_WIDTH, GATE_WIDTH));
}

// ---- 1: one warp a query, one key after the other ---------------------------------------------------------

__global__ __launch_bounds__(ROW_THREADS) void warp_a_query(floatX *yg, const floatX *q, const floatX *k,
                                                            const floatX *v, const floatX *h,
                                                            const floatX *gate_w, const int32_t *first_key)
{
    int query = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, head = blockIdx.y, lane = threadIdx.x % WARP;
    int64_t at = (int64_t)query * D + head * E + lane * 4;
    float sum = 0, y[4] = {}, max = -INFINITY;
    for (int key = first_key[query]; key <= query; key++) {
        int64_t from = (int64_t)key * D + head * E + lane * 4;
        float score = 0;
        for (int i = 0; i < 4; i++)
            score += to_float(q[at + i]) * to_float(k[from + i]);
        score = warp_sum(score) * SCALE;
        float top = fmaxf(max, score), shrink = expf(max - top), weight = expf(score - top);
        sum = sum * shrink + weight;
        for (int i = 0; i < 4; i++)
            y[i] = y[i] * shrink + weight * to_float(v[from + i]);
        max = top;
    }
    float factor = gate_of(h, gate_w, query, head) / sum;
    for (int i = 0; i < 4; i++)
        yg[at + i] = __float2bfloat16(y[i] * factor);
}

static void run1(Stream s, int i)
{
    warp_a_query<<<dim3(N / ROW_WARPS, H), ROW_THREADS, 0, s>>>(set[i].yg, set[i].q, set[i].k, set[i].v,
                                                                set[i].h, gate_w, first_key);
}

// ---- 2: tiles of 32 keys in shared memory, each read by 32 queries; softmax a tile at a time --------------

enum { MINE = 4, TILE = ROW_WARPS * MINE }; // queries of a warp, of a block

__global__ __launch_bounds__(ROW_THREADS) void key_tiles(floatX *yg, const floatX *q, const floatX *k,
                                                         const floatX *v, const floatX *h,
                                                         const floatX *gate_w, const int32_t *first_key)
{
    __shared__ __align__(16) floatX qs[TILE][E], ks[WARP][E + 2],
        vs[WARP][E]; // a lane reads a row of keys: 65 words of 4 bytes
    int query0 = blockIdx.x * TILE, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP,
        first[MINE];
    float sum[MINE] = {}, y[MINE][4] = {}, max[MINE];
    for (int m = 0; m < MINE; m++) {
        first[m] = first_key[query0 + warp * MINE + m];
        max[m] = -INFINITY;
    }
    for (int i = threadIdx.x; i < TILE * E; i += ROW_THREADS)
        qs[i / E][i % E] = q[(int64_t)(query0 + i / E) * D + head * E + i % E];
    for (int key0 = first_key[query0]; key0 < query0 + TILE; key0 += WARP) {
        __syncthreads();
        for (int i = threadIdx.x; i < WARP * E; i += ROW_THREADS) {
            int64_t from = (int64_t)min(key0 + i / E, N - 1) * D + head * E + i % E;
            ks[i / E][i % E] = k[from];
            vs[i / E][i % E] = v[from];
        }
        __syncthreads();
        for (int m = 0; m < MINE; m++) {
            int query = query0 + warp * MINE + m;
            float score = 0;
            for (int c = 0; c < E; c++)
                score += to_float(qs[warp * MINE + m][c]) * to_float(ks[lane][c]);
            score = key0 + lane >= first[m] && key0 + lane <= query ? score * SCALE : -INFINITY;
            float top = score;
            for (int step = 16; step; step >>= 1)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            top = fmaxf(max[m], top);
            if (top == -INFINITY)
                continue; // the query sees none of these
            float shrink = expf(max[m] - top), weight = expf(score - top);
            sum[m] = sum[m] * shrink + weight;
            max[m] = top;
            for (int i = 0; i < 4; i++)
                y[m][i] *= shrink;
            for (int n = 0; n < WARP; n++) {
                float w = __shfl_sync(0xffffffffu, weight, n);
                for (int i = 0; i < 4; i++)
                    y[m][i] += w * to_float(vs[n][lane * 4 + i]);
            }
        }
    }
    for (int m = 0; m < MINE; m++) {
        int query = query0 + warp * MINE + m;
        float factor = gate_of(h, gate_w, query, head) / warp_sum(sum[m]);
        for (int i = 0; i < 4; i++)
            yg[(int64_t)query * D + head * E + lane * 4 + i] = __float2bfloat16(y[m][i] * factor);
    }
}

static void run2(Stream s, int i)
{
    key_tiles<<<dim3(N / TILE, H), ROW_THREADS, 0, s>>>(set[i].yg, set[i].q, set[i].k, set[i].v, set[i].h,
                                                        gate_w, first_key);
}

// ---- 3: the tensor cores by mma.sync: the program's kernel for any GPU ------------------------------------

static AttentionCall call_of(int i)
{
    int64_t part = attention_table_part(N, 0);
    AttentionCall c = {};
    c.q = set[i].q;
    c.k = set[i].k;
    c.v = set[i].v;
    c.h = set[i].h;
    c.gate_w = gate_w;
    c.gate_inputs = GATE_WIDTH;
    c.y = set[i].yg;
    c.lse = lse;
    c.length = table;
    c.start = table + part;
    c.lse_start = table + 2 * part;
    c.cu = table + 3 * part;
    c.scale = SCALE;
    c.window = WINDOW;
    c.slots = slots;
    c.N = N;
    c.H = H;
    c.e = E;
    return c;
}

static void run3(Stream s, int i)
{
    AttentionCall c = call_of(i);
    attention_sm80_forward(&c, s);
}

// ---- 4: WGMMA 64 x 64 and TMA, one step after the other ------------------------------------------

enum { ROWS = 64, PANEL_BYTES = ROWS * 128, TILE_BYTES = 2 * PANEL_BYTES, THREADS = 128 };

#if HOPPER

constexpr float LOG2E = 1.4426950408889634f;

static __device__ __forceinline__ float quad(float x, bool sum)
{
    for (int step = 1; step <= 2; step *= 2) {
        float other = __shfl_xor_sync(0xffffffffu, x, step);
        x = sum ? x + other : fmaxf(x, other);
    }
    return x;
}

static __device__ __forceinline__ void copy_tile(uint8_t *to, const CUtensorMap *map, uint64_t *full,
                                                 int column, int row)
{
    for (int p = 0; p < 2; p++)
        tma_load_2d(to + p * PANEL_BYTES, map, full, column + p * 64, row);
}

// Scores to packed weights.  key: of the thread's first column
static __device__ __forceinline__ void soften(float (&s)[32], uint32_t (&p)[16], float (&y)[64],
                                              float (&max)[2], float (&sum)[2], int query, int key,
                                              const int (&first)[2])
{
    float top[2] = {max[0], max[1]};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int row = i / 2 % 2, column = key + i / 4 * 8 + i % 2;
        if (column > query + 8 * row || column < first[row])
            s[i] = -INFINITY;
        top[row] = fmaxf(top[row], s[i]);
    }
    float shrink[2];
    for (int r = 0; r < 2; r++) {
        top[r] = quad(top[r], false);
        float base = top[r] == -INFINITY ? 0 : top[r];
        shrink[r] = exp2f((max[r] - base) * (SCALE * LOG2E));
        max[r] = top[r];
        top[r] = base;
        sum[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i / 2 % 2] += s[i] = exp2f((s[i] - top[i / 2 % 2]) * (SCALE * LOG2E));
#pragma unroll
    for (int i = 0; i < 16; i++)
        p[i] = pack2(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 64; i++)
        y[i] *= shrink[i / 2 % 2];
}

static __device__ __forceinline__ void multiply_tiles(float (&s)[32], const uint8_t *q, const uint8_t *k)
{
    uint64_t a = smem_descriptor(q, 0), b = smem_descriptor(k, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < E / 16; i++) {
        int at = i / 4 * PANEL_BYTES + i % 4 * 32;
        wgmma<floatX, 64, false, false>(s, descriptor_advance(a, at), descriptor_advance(b, at), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

static __device__ __forceinline__ void multiply_values(float (&y)[64], const uint32_t (&p)[16],
                                                       const uint8_t *v)
{
    uint64_t b = smem_descriptor(v, PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        wgmma_rs<floatX, true>(y, p + 4 * i, descriptor_advance(b, i * 16 * 128), true);
    wgmma_commit();
    wgmma_wait<0>();
}

#endif

__global__ void __launch_bounds__(THREADS)
    warpgroup_tiles(floatX *yg, const floatX *h, const floatX *gate_w, const int32_t *first_key,
                    const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                    const __grid_constant__ CUtensorMap v)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t full;
    uint8_t *qs = shared, *ks = qs + TILE_BYTES, *vs = ks + TILE_BYTES;
    int query0 = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y, lane = threadIdx.x % WARP,
        parity = 0;
    int row = query0 + threadIdx.x / WARP * 16 + lane / 4, first[2] = {first_key[row], first_key[row + 8]};
    float s[32], y[64] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    uint32_t p[16];
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_mbarrier_init();
    }
    for (int key0 = first_key[query0] / ROWS * ROWS; key0 <= query0; key0 += ROWS, parity ^= 1) {
        __syncthreads(); // all are done with the last tile
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(&full, 3 * TILE_BYTES);
            copy_tile(qs, &q, &full, head * E, query0);
            copy_tile(ks, &k, &full, head * E, key0);
            copy_tile(vs, &v, &full, head * E, key0);
        }
        mbarrier_wait(&full, parity);
        multiply_tiles(s, qs, ks);
        soften(s, p, y, max, sum, row, key0 + 2 * (lane % 4), first);
        multiply_values(y, p, vs);
    }
    for (int r = 0; r < 2; r++) {
        float factor = gate_of(h, gate_w, row + 8 * r, head) / quad(sum[r], true);
        floatX *to = yg + (int64_t)(row + 8 * r) * D + head * E + 2 * (lane % 4);
#pragma unroll
        for (int g = 0; g < 16; g++)
            *(uint32_t *)(to + 8 * g) = pack2(y[4 * g + 2 * r] * factor, y[4 * g + 2 * r + 1] * factor);
    }
#endif
}

static void run4(Stream s, int i)
{
    AttentionCall c = call_of(i);
    int bytes = 3 * TILE_BYTES;
    CUDA_CHECK(cudaFuncSetAttribute(warpgroup_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    warpgroup_tiles<<<dim3(N / ROWS, H), THREADS, (unsigned)bytes, s>>>(
        set[i].yg, set[i].h, gate_w, first_key, attention_sm90::rows_map(c.q, &c, ROWS),
        attention_sm90::rows_map(c.k, &c, ROWS), attention_sm90::rows_map(c.v, &c, ROWS));
}

// ---- 5: cuDNN, and a pass of its own for the gate ---------------------------------------------------------

static void run5(Stream s, int i)
{
    AttentionCall c = call_of(i);
    attention_plan_run(plan, &c, s);
    attention_gate_forward(s, &c);
}

// ---- 6: the program's op ----------------------------------------------------------------------------------

static void run6(Stream s, int i)
{
    AttentionForward a = {set[i].yg, lse,   set[i].q, set[i].k, set[i].v, set[i].h,
                          gate_w,    table, slots,    WINDOW,   SCALE,    GATE_WIDTH};
    attention_forward(s, &a, N, H, E);
}

// ---- check ------------------------------------------------------------------------------------------------

static void poison(Stream s)
{
    CUDA_CHECK(cudaMemsetAsync(set[0].yg, 0xff, (size_t)N * D * sizeof(floatX), s));
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

// The worst element of a row of a head. Limit: weights rounded to bf16, 2^-9 of each term; the result
// rounded, with the gate in a pass of its own twice; fp32 scores of some 20 with errors of 2^-20 of that.
static double row_error(int query, int head)
{
    int first = first_key_host[query], keys = query + 1 - first;
    int64_t at = (int64_t)query * D + head * E, from = (int64_t)first * D + head * E,
            span = (int64_t)(keys - 1) * D + E;
    double *q = ladder_read(set[0].q + at, E), *yg = ladder_read(set[0].yg + at, E),
           *k = ladder_read(set[0].k + from, span), *v = ladder_read(set[0].v + from, span),
           *h = ladder_read(set[0].h + (int64_t)query * D, GATE_WIDTH),
           *w = ladder_read(gate_w + head * GATE_WIDTH, GATE_WIDTH),
           *weight = (double *)malloc((size_t)keys * sizeof(double));
    double sum = 0, most = 0, gate = 1 / (1 + exp(-dot(h, w, GATE_WIDTH)));
    for (int i = 0; i < keys; i++)
        sum += weight[i] = exp((double)SCALE * dot(q, k + (int64_t)i * D, E));
    for (int c = 0; c < E; c++) {
        double want = 0, size = 0;
        for (int i = 0; i < keys; i++) {
            double term = weight[i] / sum * gate * v[(int64_t)i * D + c];
            want += term;
            size += fabs(term);
        }
        double e = fabs(yg[c] - want) / ((0x1p-9 + 20 * 0x1p-20) * size + 2 * 0x1p-9 * fabs(want));
        if (!(e <= most))
            most = isnan(e) ? INFINITY : e;
    }
    free(q);
    free(yg);
    free(k);
    free(v);
    free(h);
    free(w);
    free(weight);
    return most;
}

static double error(void)
{
    double most = 0;
    for (int i = 0; i < 61; i++) {
        double e = row_error((int)((int64_t)i * (N - 1) / 60), i % H);
        if (!(e <= most))
            most = isnan(e) ? INFINITY : e;
    }
    return most;
}

// ---- inputs -----------------------------------------------------------------------------------------------

// Lengths as in text: lognormal, median 500.
static void make_documents(void)
{
    srand(1);
    for (int i = 0, end = 0; i < DOCUMENTS; i++) {
        double normal = sqrt(-2 * log((rand() + 1.0) / (RAND_MAX + 1.0))) * cos(2 * M_PI * rand() / RAND_MAX);
        int rest = DOCUMENTS - 1 - i, length = (int)fmin(LONGEST, 1 + 500 * exp(normal));
        if (length > N - end - rest || rest == 0)
            length = N - end - rest;
        cu[i] = end;
        end += length;
    }
    cu[DOCUMENTS] = N;
    for (int d = 0; d < DOCUMENTS; d++)
        for (int t = cu[d]; t < cu[d + 1]; t++)
            first_key_host[t] = t - cu[d] > WINDOW ? t - WINDOW : cu[d];
}

static void upload_table(Stream s)
{
    size_t ints = (size_t)attention_table_ints(N, 0);
    int32_t *host = (int32_t *)host_alloc(ints * sizeof(int32_t));
    table = (int32_t *)device_alloc(ints * sizeof(int32_t), "ladder");
    first_key = (int32_t *)device_alloc(sizeof first_key_host, "ladder");
    slots = attention_table_build(host, cu, DOCUMENTS, N, 0);
    copy_to_device(s, table, host, ints * sizeof(int32_t));
    copy_to_device(s, first_key, first_key_host, sizeof first_key_host);
    stream_synchronize(s);
    host_free(host);
}

static double pairs(void) // of a query and a key that it sees
{
    double sum = 0;
    for (int t = 0; t < N; t++)
        sum += t - first_key_host[t] + 1;
    return sum;
}

int main(int argc, char **argv)
{
    Error e;
    set_program_name("ladder_attention", -1);
    figures_open(&argc, argv);
    backend_open(0);
    OpSizes sizes = {.tokens = N, .dim = D, .heads = H, .mlp_dim = 16, .vocab_padded = 128};
    backend_reserve(&sizes);
    Stream s = stream_create();
    ladder_measure_ceilings(s);
    make_documents();
    upload_table(s);
    if (!attention_sm80_prepare(E, E, &e) || !attention_sm90_prepare(E, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    AttentionShape shape = {slots, N, H, E, false};
    if (!(plan = attention_plan_create(&shape, &e)))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    gate_w = ladder_tensor(H * GATE_WIDTH, 0.5f, 99);
    lse = (float *)device_alloc((size_t)N * H * sizeof(float), "ladder");
    for (uint32_t i = 0; i < LADDER_SETS; i++) {
        set[i].q = ladder_tensor((int64_t)N * D, 1.7f, 5 * i + 1);
        set[i].k = ladder_tensor((int64_t)N * D, 1.7f, 5 * i + 2);
        set[i].v = ladder_tensor((int64_t)N * D, 1, 5 * i + 3);
        set[i].h = ladder_tensor((int64_t)N * D, 1, 5 * i + 4);
        set[i].yg = ladder_tensor((int64_t)N * D, 1, 5 * i + 5);
    }
    printf("%s\n", attention_description());
    const Rung rungs[] = {{"one warp a query, one key after the other", run1},
                          {"tiles of 32 keys in shared memory for 32 queries", run2},
                          {"tensor cores (mma.sync), 128 queries a block (any GPU's kernel)", run3},
                          {"warpgroup products, TMA, 64 queries a block, nothing at a time", run4},
                          {"cuDNN, and a second pass for the gate", run5},
                          {"192 queries, keys fetched ahead, all at a time (the program's op)", run6}};
    Ladder ladder = {.title = "gated attention forward, 32768 tokens in 47 documents, 6 x 128, window 896",
                     .rungs = rungs,
                     .count = 6,
                     .operations = 4.0 * D * pairs(),
                     .poison = poison,
                     .error = error};
    return ladder_climb(&ladder, s) > 0;
}
