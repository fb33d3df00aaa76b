// Logits of the rows' targets in FP8, with the bits that they have in the tiles of sm90_head_logits.cu.
//
// The tensor cores add 32 products at a time, each cut 13 bits behind the leading one of the largest
// (dev/notes/2026-11-21_how_tensor_cores_add.md): a dot product in fp32 gives another number, by which the
// row's loss and its target's gradient would be off (dev/notes/2026-11-28_targets_logits.md). An element of a
// WGMMA depends on its row of a and its row of b alone, so the same instructions over the same steps of K
// give the tile's bits, whatever the tile's width.
//
//   CTA     one warpgroup: 64 rows of x and, term by term, the rows of w of their targets, gathered
//   tile    64 x 64 of m64n64k32, of which the diagonal is kept: 64 times the products that are needed, and a
//           term 0.13% of those of the logits
//   smem    x and w in slabs of 64 rows x 128 bytes, as TMA would lay them out: 96 KB at d 768, so that two
//           CTAs hide each other's loads
#include "llmc/cuda/head/fp8_transpose.cuh"
#include "llmc/cuda/head/sm90_head_logits.cuh"
#include "llmc/cuda/sm80/sm80.cuh"
#include "llmc/cuda/sm90/sm90.cuh"

enum {
    ROWS = 64,       // of a CTA
    THREADS = 128,   // a warpgroup
    SLAB_COLS = 128, // bytes of a row in a slab, the width of the swizzle
    SLAB_BYTES = ROWS * SLAB_COLS,
    CHUNKS = SLAB_COLS / 16 // 16 bytes each
};

#if HOPPER

// Loads rows row_of[0 ... ROWS - 1] of a matrix (any, d), d a multiple of 16, into slabs under the 128-byte
// swizzle; columns behind the last become zeros.
static __device__ __forceinline__ void load_slabs(uint8_t *slabs, const uint8_t *from, const int *row_of,
                                                  int count, int d)
{
    for (int i = threadIdx.x; i < ROWS * count * CHUNKS; i += THREADS) {
        int row = i / (count * CHUNKS), chunk = i % (count * CHUNKS), bytes = 16 * chunk < d ? 16 : 0;
        uint8_t *to =
            slabs + chunk / CHUNKS * SLAB_BYTES + row * SLAB_COLS + ((chunk % CHUNKS ^ row % CHUNKS) << 4);
        const uint8_t *source = from + (int64_t)row_of[row] * d + (bytes ? 16 * chunk : 0);
        sm80::copy_async(to, source, bytes);
    }
}

static __device__ __forceinline__ void wait_for_slabs()
{
    sm80::wait_all_loads();
    fence_proxy_async_shared(); // for WGMMA
    __syncthreads();
}

// sum = x w^T, in the steps of mma_tile in sm90_head_logits.cu.
static __device__ __forceinline__ void mma_slabs(float (&sum)[ROWS / 2], const uint8_t *x, const uint8_t *w,
                                                 int count)
{
    uint64_t a = smem_descriptor(x, 0), b = smem_descriptor(w, 0);
    for (int slab = 0; slab < count; slab++) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SLAB_COLS / 32; i++)
            wgmma_e4m3<ROWS>(sum, descriptor_advance(a, 32 * i), descriptor_advance(b, 32 * i), slab + i > 0);
        wgmma_commit();
        a = descriptor_advance(a, SLAB_BYTES);
        b = descriptor_advance(b, SLAB_BYTES);
    }
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
}

// Element (row, row) for the rows of the thread, if it holds them: thread t has rows 16 (t / 32) + t % 32 / 4
// and that + 8, and columns 8 g + 2 (t % 4) and the next, in sum[4 g ...]; so rows 16 w + i and 16 w + 8 + i
// of warp w are in lanes 4 i + i / 2, groups 2 w and 2 w + 1.
static __device__ __forceinline__ void store_diagonal(float *logits, const float (&sum)[ROWS / 2], int rows)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, i = lane / 4;
    if (lane % 4 != i / 2)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float found = 0;
#pragma unroll
        for (int w = 0; w < ROWS / 16; w++) { // registers cannot be indexed
            const float *group = sum + 4 * (2 * w + h) + 2 * h;
            found = w == warp ? (i % 2 ? group[1] : group[0]) : found;
        }
        int row = 16 * warp + 8 * h + i;
        if (row < rows)
            logits[row] = found;
    }
}

#endif

template <int TERMS>
__global__ void __launch_bounds__(THREADS)
    target_logits_kernel(const __grid_constant__ TargetLogits a, int count)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t *x = shared, *w = x + count * SLAB_BYTES;
    int *row_of = (int *)(w + count * SLAB_BYTES);
    if (shared_address(shared) % 1024)
        __trap(); // the swizzle counts from multiples of 1024 bytes
    int first = blockIdx.x * ROWS, rows = min(ROWS, a.rows - first);
    if (threadIdx.x < ROWS)
        row_of[threadIdx.x] = first + min((int)threadIdx.x, rows - 1);
    __syncthreads();
    load_slabs(x, a.x, row_of, count, a.d);
    __syncthreads(); // row_of has been read
    for (int k = 0; k < TERMS; k++) {
        bool prefix = TERMS > 1 && k == TERMS - 1;
        if (prefix ? !a.targets.prefix : k >= a.targets.count)
            continue;
        if (threadIdx.x < ROWS)
            row_of[threadIdx.x] =
                product_row(max(term_token<TERMS>(a.targets, first + min((int)threadIdx.x, rows - 1), k), 0));
        __syncthreads();
        load_slabs(w, a.w, row_of, count, a.d);
        wait_for_slabs();
        float sum[ROWS / 2];
        mma_slabs(sum, x, w, count);
        store_diagonal(a.logits + (int64_t)k * a.pitch + first, sum, rows);
        __syncthreads(); // all have read w
    }
#endif
}

static size_t shared_bytes(int d)
{
    return 2 * (size_t)ceil_div(d, SLAB_COLS) * SLAB_BYTES + ROWS * sizeof(int);
}

void sm90_target_logits_open(void)
{
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDA_CHECK(cudaFuncSetAttribute(target_logits_kernel<1>, most, (int)shared_bytes(HEAD_LOGITS_WIDTH)));
    CUDA_CHECK(
        cudaFuncSetAttribute(target_logits_kernel<MAX_TERMS>, most, (int)shared_bytes(HEAD_LOGITS_WIDTH)));
}

void sm90_target_logits(Stream s, const TargetLogits *a)
{
    assert(a->d % 16 == 0 && a->d <= HEAD_LOGITS_WIDTH);
    if (a->rows <= 0)
        return;
    unsigned ctas = (unsigned)ceil_div(a->rows, ROWS);
    int count = (int)ceil_div(a->d, SLAB_COLS);
    if (one_term(&a->targets))
        target_logits_kernel<1><<<ctas, THREADS, shared_bytes(a->d), s>>>(*a, count);
    else
        target_logits_kernel<MAX_TERMS><<<ctas, THREADS, shared_bytes(a->d), s>>>(*a, count);
    CHECK_LAUNCH();
}
