// Stands in for NCCL where several ranks share one GPU, which NCCL refuses: so that a machine with one GPU
// can test everything that several ranks do, captured steps included. Slow: the GPU changes from process to
// process for every collective. A program finds it as libnccl.so.2 through LD_LIBRARY_PATH.
//
// Every rank has staging memory that the others map. A collective, piece by piece: wait until all have read
// the last piece; copy the own part to the staging memory; say so and wait for the others; read theirs. Sums
// are in the order of the ranks.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 8 };
static const size_t PIECE = 4 << 20; // floats of a piece, for each rank

typedef struct {
    volatile unsigned published, read; // pieces
    unsigned now;                      // pieces that this rank has begun and ended
} Flags;

typedef struct {
    volatile int ready[RANKS];
    cudaIpcMemHandle_t staging[RANKS], flags[RANKS];
} Board;

struct ncclComm {
    int rank, size;
    char *staging[RANKS];
    Flags *flags[RANKS], **all; // all: the same pointers in device memory
    char **parts;               // staging, in device memory
};

#define CHECK(call) \
    do { \
        cudaError_t status_ = (call); \
        if (status_ != cudaSuccess) { \
            fprintf(stderr, "one_gpu_nccl: %s: %s\n", #call, cudaGetErrorString(status_)); \
            return ncclUnhandledCudaError; \
        } \
    } while (0)

// ---- kernels ----------------------------------------------------------------------------------------------

__global__ void wait_until_read(Flags **all, int rank, int size)
{
    for (int r = 0; r < size; r++)
        while ((int)(all[r]->read - all[rank]->now) < 0) {
        }
    __threadfence_system();
}

__global__ void publish(Flags **all, int rank, int size)
{
    unsigned now = all[rank]->now + 1;
    __threadfence_system();
    all[rank]->published = now;
    for (int r = 0; r < size; r++)
        while ((int)(all[r]->published - now) < 0) {
        }
    __threadfence_system();
}

__global__ void end_reading(Flags **all, int rank)
{
    all[rank]->now++;
    __threadfence_system();
    all[rank]->read = all[rank]->now;
}

// out (n) = sum over ranks of the floats at `offset` of their staging memory, which other processes write: no
// cached reads.
__global__ void sum_parts(float *out, char **parts, size_t offset, size_t n, int size)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        float sum = 0;
        for (int r = 0; r < size; r++)
            sum += __ldcg((const float *)parts[r] + offset + i);
        out[i] = sum;
    }
}

// ---- collectives ------------------------------------------------------------------------------------------

static ncclResult_t begin_piece(ncclComm_t c, cudaStream_t s)
{
    wait_until_read<<<1, 1, 0, s>>>(c->all, c->rank, c->size);
    CHECK(cudaGetLastError());
    return ncclSuccess;
}

static ncclResult_t publish_piece(ncclComm_t c, cudaStream_t s)
{
    publish<<<1, 1, 0, s>>>(c->all, c->rank, c->size);
    CHECK(cudaGetLastError());
    return ncclSuccess;
}

static ncclResult_t end_piece(ncclComm_t c, cudaStream_t s)
{
    end_reading<<<1, 1, 0, s>>>(c->all, c->rank);
    CHECK(cudaGetLastError());
    return ncclSuccess;
}

extern "C" ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t,
                                          ncclRedOp_t, ncclComm_t c, cudaStream_t s)
{
    for (size_t at = 0; at < count; at += PIECE) {
        size_t n = count - at < PIECE ? count - at : PIECE;
        if (begin_piece(c, s))
            return ncclUnhandledCudaError;
        for (int r = 0; r < c->size; r++)
            CHECK(cudaMemcpyAsync(c->staging[c->rank] + r * sizeof(float) * PIECE,
                                  (const float *)in + r * count + at, n * sizeof(float),
                                  cudaMemcpyDeviceToDevice, s));
        if (publish_piece(c, s))
            return ncclUnhandledCudaError;
        sum_parts<<<264, 256, 0, s>>>((float *)out + at, c->parts, (size_t)c->rank * PIECE, n, c->size);
        if (end_piece(c, s))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

extern "C" ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t, ncclRedOp_t,
                                      ncclComm_t c, cudaStream_t s)
{
    for (size_t at = 0; at < count; at += PIECE) {
        size_t n = count - at < PIECE ? count - at : PIECE;
        if (begin_piece(c, s))
            return ncclUnhandledCudaError;
        CHECK(cudaMemcpyAsync(c->staging[c->rank], (const float *)in + at, n * sizeof(float),
                              cudaMemcpyDeviceToDevice, s));
        if (publish_piece(c, s))
            return ncclUnhandledCudaError;
        sum_parts<<<264, 256, 0, s>>>((float *)out + at, c->parts, 0, n, c->size);
        if (end_piece(c, s))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

extern "C" ncclResult_t ncclAllGather(const void *in, void *out, size_t bytes, ncclDataType_t, ncclComm_t c,
                                      cudaStream_t s)
{
    for (size_t at = 0, most = PIECE * sizeof(float); at < bytes; at += most) {
        size_t n = bytes - at < most ? bytes - at : most;
        if (begin_piece(c, s))
            return ncclUnhandledCudaError;
        CHECK(cudaMemcpyAsync(c->staging[c->rank], (const char *)in + at, n, cudaMemcpyDeviceToDevice, s));
        if (publish_piece(c, s))
            return ncclUnhandledCudaError;
        for (int r = 0; r < c->size; r++)
            CHECK(
                cudaMemcpyAsync((char *)out + r * bytes + at, c->staging[r], n, cudaMemcpyDeviceToDevice, s));
        if (end_piece(c, s))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

// Sends and receives: of one group to and from every rank, all of one size.
static struct {
    const char *out[RANKS];
    char *in[RANKS];
    size_t bytes;
    int sends, receives;
    ncclComm_t comm;
    cudaStream_t stream;
} group;

extern "C" ncclResult_t ncclGroupStart()
{
    memset(&group, 0, sizeof group);
    return ncclSuccess;
}

static ncclResult_t join_group(size_t bytes, ncclDataType_t type, ncclComm_t c, cudaStream_t s)
{
    bool first = group.sends + group.receives == 0;
    if (type != ncclChar || (!first && bytes != group.bytes))
        return ncclInvalidArgument;
    group.bytes = bytes;
    group.comm = c;
    group.stream = s;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclSend(const void *out, size_t bytes, ncclDataType_t type, int to, ncclComm_t c,
                                 cudaStream_t s)
{
    ncclResult_t status = join_group(bytes, type, c, s);
    group.out[to] = (const char *)out;
    group.sends++;
    return status;
}

extern "C" ncclResult_t ncclRecv(void *in, size_t bytes, ncclDataType_t type, int from, ncclComm_t c,
                                 cudaStream_t s)
{
    ncclResult_t status = join_group(bytes, type, c, s);
    group.in[from] = (char *)in;
    group.receives++;
    return status;
}

extern "C" ncclResult_t ncclGroupEnd()
{
    ncclComm_t c = group.comm;
    cudaStream_t s = group.stream;
    if (!c || group.sends != c->size || group.receives != c->size)
        return ncclInvalidUsage;
    for (size_t at = 0, most = PIECE * sizeof(float); at < group.bytes; at += most) {
        size_t n = group.bytes - at < most ? group.bytes - at : most;
        if (begin_piece(c, s))
            return ncclUnhandledCudaError;
        for (int r = 0; r < c->size; r++)
            CHECK(cudaMemcpyAsync(c->staging[c->rank] + r * most, group.out[r] + at, n,
                                  cudaMemcpyDeviceToDevice, s));
        if (publish_piece(c, s))
            return ncclUnhandledCudaError;
        for (int r = 0; r < c->size; r++)
            CHECK(cudaMemcpyAsync(group.in[r] + at, c->staging[r] + c->rank * most, n,
                                  cudaMemcpyDeviceToDevice, s));
        if (end_piece(c, s))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

// ---- communicators ----------------------------------------------------------------------------------------

extern "C" ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    snprintf(id->internal, sizeof id->internal, "/one_gpu_nccl.%d", getpid());
    shm_unlink(id->internal);
    return ncclSuccess;
}

static Board *open_board(const char *name)
{
    int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Board)))
        return NULL;
    void *p = mmap(NULL, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : (Board *)p;
}

extern "C" ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                               ncclConfig_t *)
{
    ncclComm_t c = (ncclComm_t)calloc(1, sizeof *c);
    Board *board = open_board(id.internal);
    if (!board || size > RANKS)
        return ncclSystemError;
    c->rank = rank;
    c->size = size;
    CHECK(cudaMalloc(&c->staging[rank], (size_t)size * PIECE * sizeof(float)));
    CHECK(cudaMalloc(&c->flags[rank], sizeof(Flags)));
    CHECK(cudaMemset(c->flags[rank], 0, sizeof(Flags)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcGetMemHandle(&board->staging[rank], c->staging[rank]));
    CHECK(cudaIpcGetMemHandle(&board->flags[rank], c->flags[rank]));
    __sync_synchronize();
    board->ready[rank] = 1;
    for (int r = 0; r < size; r++) {
        while (!board->ready[r])
            usleep(1000);
        if (r == rank)
            continue;
        CHECK(
            cudaIpcOpenMemHandle((void **)&c->staging[r], board->staging[r], cudaIpcMemLazyEnablePeerAccess));
        CHECK(cudaIpcOpenMemHandle((void **)&c->flags[r], board->flags[r], cudaIpcMemLazyEnablePeerAccess));
    }
    CHECK(cudaMalloc(&c->all, sizeof c->flags));
    CHECK(cudaMalloc(&c->parts, sizeof c->staging));
    CHECK(cudaMemcpy(c->all, c->flags, sizeof c->flags, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(c->parts, c->staging, sizeof c->staging, cudaMemcpyHostToDevice));
    *out = c;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    CHECK(cudaDeviceSynchronize());
    free(c);
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state)
{
    *state = ncclSuccess;
    return ncclSuccess;
}
extern "C" const char *ncclGetErrorString(ncclResult_t) { return "one_gpu_nccl"; }
extern "C" const char *ncclGetLastError(ncclComm_t) { return "see above"; }
extern "C" ncclResult_t ncclGetVersion(int *version)
{
    const char *pretended = getenv("ONE_GPU_NCCL_VERSION"); // for the test that the program compares versions
    *version = pretended ? atoi(pretended) : NCCL_VERSION_CODE;
    return ncclSuccess;
}
