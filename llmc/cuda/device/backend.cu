// Device, memory, streams, graphs.
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/muon/ns_gpu.h"
#include "llmc/cuda/gemm/sm90_gemm.cuh"
#include "llmc/cuda/device/self_check.cuh"
#include "llmc/cuda/device/watchdog.h"
#include "llmc/base/memory.h"
#include <stdlib.h>
#include <string.h>
#include <cublasLt.h>

DeviceState device_state;

// ---- opening and closing ----------------------------------------------------------------------------------

int backend_device_count(void)
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void backend_open(int index) { device_open(&device_state, index); }

static void plan_floats(ScratchOp op, size_t floats) { scratch_plan(op, floats * sizeof(float)); }

// What reductions need, and the frequencies of rope.
static void plan_scratch(const OpSizes *z)
{
    size_t tokens = (size_t)max_i64(z->tokens, 1), d = (size_t)z->dim, F = (size_t)z->mlp_dim;
    size_t ctas = (size_t)device_state.sms * 16; // of the reductions with a persistent grid, at most
    plan_floats(SCRATCH_ROPE, 4 * d / (size_t)z->heads);
    plan_floats(SCRATCH_MIX, WARP * ctas);
    plan_floats(SCRATCH_EMBED, (MAX_GATE_INPUTS + 1) * ((tokens + 127) / 128));
    plan_floats(SCRATCH_TABLE_GRAD, (tokens + 31) / 32 * (2 * d + 2));
    plan_floats(SCRATCH_GENERATOR,
                (size_t)(2 * device_state.sms + 1) * GENERATOR_MOST * (GENERATOR_MOST + 1));
    plan_floats(SCRATCH_WEIGHT_SCALE, ctas);
    plan_floats(SCRATCH_QKV, 2 * ctas);
    plan_floats(SCRATCH_HEADS, 8 * (size_t)device_state.sms * (size_t)z->heads * MAX_GATE_INPUTS);
    // Sums of the columns of the largest matrix in chunks of its rows, which are fewer; at least 8 MiB.
    plan_floats(SCRATCH_NORMUON,
                (size_t)max_i64(2 << 20, (int64_t)((d > F ? d : F) * ((d < F ? d : F) / 32 + 2))));
}

void backend_reserve(const OpSizes *sizes)
{
    DeviceState *s = &device_state;
    if (!s->open)
        fatal(EXIT_BAD_INPUT, "backend_reserve before backend_open");
    if (sizes->dim % 8 || sizes->dim < 16 || sizes->dim > MAX_DIM)
        fatal(EXIT_BAD_INPUT, "model width %d: the CUDA program takes multiples of 8 from 16 to %d",
              sizes->dim, MAX_DIM);
    if (sizes->heads < 1 || sizes->dim % sizes->heads || sizes->dim / sizes->heads % 8)
        fatal(EXIT_BAD_INPUT,
              "%d heads of width %d: the head width must be a multiple of 8 that divides the model width",
              sizes->heads, sizes->dim / (sizes->heads ? sizes->heads : 1));
    if (sizes->mlp_dim % 8 || sizes->vocab_padded % 8)
        fatal(EXIT_BAD_INPUT, "MLP width %d, vocabulary %d: both must be multiples of 8", sizes->mlp_dim,
              sizes->vocab_padded);
    s->sizes = *sizes;
    if (sizes->wait_limit > 0)
        watchdog_start(sizes->wait_limit);
    device_set_portable(sizes->portable);
    plan_scratch(sizes);
    sm90_gemm_reserve();
    matmul_reserve(sizes); // leaves to the above what that can do
    mlp_fp8_reserve(sizes);
    head_reserve(sizes);
    attention_reserve(sizes);
    ns_reserve();
    scratch_reserve();
    timeline_mark("products and plans");
    if (sizes->self_check != SELF_CHECK_NEVER)
        self_check();
}

void backend_close(void)
{
    if (!device_state.open)
        return;
    CUDA_CHECK(cudaDeviceSynchronize());
    watchdog_stop();
    ns_release();
    attention_close();
    matmul_close();
    scratch_close();
    memset(&device_state, 0, sizeof device_state);
}

void backend_prepare_process(char **) {}
bool backend_is_asynchronous(void) { return true; }
const char *backend_device_name(void) { return device_state.name; }

const char *backend_description(void)
{
    static char text[1024];
    const DeviceState *s = &device_state;
    snprintf(text, sizeof text,
             "%s (device %d, compute capability %d.%d, %d multiprocessors), bf16 storage, %s, %s, %s, %s; %s",
             s->name, s->index, s->compute / 10, s->compute % 10, s->sms, device_path(), head_description(),
             mlp_description(), matmul_description(), attention_description());
    return text;
}

const char *backend_version_line(int index)
{
    static char text[128];
    int version = 0;
    switch (index) {
    case 0:
        CUDA_CHECK(cudaDriverGetVersion(&version));
        break;
    case 1:
        CUDA_CHECK(cudaRuntimeGetVersion(&version));
        break;
    case 2:
        snprintf(text, sizeof text, "cuBLASLt %zu.%zu.%zu", cublasLtGetVersion() / 10000,
                 cublasLtGetVersion() / 100 % 100, cublasLtGetVersion() % 100);
        return text;
    case 3:
        return attention_library();
    case 4:
        snprintf(text, sizeof text, "compiler " __VERSION__ ", nvcc %d.%d.%d", __CUDACC_VER_MAJOR__,
                 __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__);
        return text;
    default:
        return NULL;
    }
    snprintf(text, sizeof text, "CUDA %s %d.%d", index ? "runtime" : "driver", version / 1000,
             version % 1000 / 10);
    return text;
}

// ---- memory -----------------------------------------------------------------------------------------------

typedef struct Allocation {
    void *p;
    size_t bytes;
    int memory_class;
    struct Allocation *next;
} Allocation;
static Allocation *allocations;
static size_t most_in_use;

void *device_malloc(size_t size, const char *what)
{
    void *p = NULL;
    cudaError_t status = cudaMalloc(&p, size);
    if (status != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        fatal(
            EXIT_BAD_INPUT,
            "no device memory for %s: %.1f MiB wanted, %.1f of %.1f MiB free (%s); use smaller micro-batches",
            what, (double)size / 1048576, (double)free_bytes / 1048576, (double)total / 1048576,
            cudaGetErrorString(status));
    }
    return p;
}

void *device_alloc(size_t bytes, const char *what)
{
    size_t size = bytes ? bytes : 1;
    void *p = device_malloc(size, what);
    CUDA_CHECK(cudaMemset(p, 0, size));
    CUDA_CHECK(cudaDeviceSynchronize()); // the zeros are there for every stream
    Allocation *a = (Allocation *)xcalloc(1, sizeof *a);
    a->p = p;
    a->bytes = size;
    a->memory_class = memory_class(what);
    a->next = allocations;
    allocations = a;
    memory_change(a->memory_class, (int64_t)size);
    return p;
}

void device_free(void *p)
{
    if (!p)
        return;
    Allocation **link = &allocations;
    while (*link && (*link)->p != p)
        link = &(*link)->next;
    assert(*link && "device_free of memory that device_alloc did not give");
    Allocation *a = *link;
    *link = a->next;
    memory_change(a->memory_class, -(int64_t)a->bytes);
    free(a);
    CUDA_CHECK(cudaFree(p));
}

size_t device_bytes_allocated(void) { return memory_now(); }
size_t device_bytes_peak(void) { return memory_peak(); }

size_t device_bytes_in_use(void)
{
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    if (total - free_bytes > most_in_use)
        most_in_use = total - free_bytes;
    return most_in_use;
}

size_t device_bytes_free(void)
{
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

void *host_alloc(size_t bytes)
{
    void *p = NULL;
    CUDA_CHECK(cudaMallocHost(&p, bytes ? bytes : 1));
    memset(p, 0, bytes);
    return p;
}

void host_free(void *p)
{
    if (p)
        CUDA_CHECK(cudaFreeHost(p));
}

// ---- streams and graphs -----------------------------------------------------------------------------------

Stream stream_create(void)
{
    cudaStream_t s;
    CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

Stream stream_create_urgent(void)
{
    int least, most;
    cudaStream_t s;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &most));
    CUDA_CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, most));
    return s;
}

void stream_destroy(Stream s)
{
    scratch_give_back(s);
    CUDA_CHECK(cudaStreamDestroy(s));
}

void stream_synchronize(Stream s)
{
    watchdog_wait_begin();
    CUDA_CHECK(cudaStreamSynchronize(s));
    watchdog_wait_end();
}

void copy_to_device(Stream s, void *dst, const void *host_src, size_t bytes)
{
    OP_SCOPE(copy_to_device, bytes);
    CUDA_CHECK(cudaMemcpyAsync(dst, host_src, bytes, cudaMemcpyHostToDevice, s));
}

void copy_to_host(Stream s, void *host_dst, const void *src, size_t bytes)
{
    OP_SCOPE(copy_to_host, bytes);
    CUDA_CHECK(cudaMemcpyAsync(host_dst, src, bytes, cudaMemcpyDeviceToHost, s));
}

void copy_on_device(Stream s, void *dst, const void *src, size_t bytes)
{
    OP_SCOPE(copy_on_device, bytes);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s));
}

void device_zero(Stream s, void *p, size_t bytes)
{
    OP_SCOPE(device_zero, bytes);
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, s));
}

struct Event {
    cudaEvent_t event;
};

Event *event_create(void)
{
    Event *e = (Event *)xcalloc(1, sizeof *e);
    CUDA_CHECK(cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming));
    return e;
}

void event_record(Event *e, Stream s) { CUDA_CHECK(cudaEventRecord(e->event, s)); }
void event_synchronize(Event *e)
{
    watchdog_wait_begin();
    CUDA_CHECK(cudaEventSynchronize(e->event));
    watchdog_wait_end();
}

void stream_wait(Stream s, Event *e) { CUDA_CHECK(cudaStreamWaitEvent(s, e->event, 0)); }

void event_destroy(Event *e)
{
    if (!e)
        return;
    CUDA_CHECK(cudaEventDestroy(e->event));
    free(e);
}

struct Graph {
    cudaGraphExec_t exec;
};

bool stream_is_capturing(Stream s)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(s, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

bool graph_begin(Stream s)
{
    scratch_ready(s);
    CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    return true;
}

Graph *graph_end(Stream s)
{
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(s, &graph));
    Graph *g = (Graph *)xcalloc(1, sizeof *g);
    CUDA_CHECK(cudaGraphInstantiate(&g->exec, graph,
                                    cudaGraphInstantiateFlagUseNodePriority)); // as the streams have it
    CUDA_CHECK(cudaGraphDestroy(graph));
    return g;
}

void graph_launch(Graph *g, Stream s) { CUDA_CHECK(cudaGraphLaunch(g->exec, s)); }

void graph_destroy(Graph *g)
{
    if (!g)
        return;
    CUDA_CHECK(cudaGraphExecDestroy(g->exec));
    free(g);
}
