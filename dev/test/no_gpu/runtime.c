// Devices, streams, events, graphs and memory of the stand-in (no_gpu.h).
#include "dev/test/no_gpu/no_gpu.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

void refuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("no_gpu: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(REFUSED);
}

// ---- the device ------------------------------------------------------------------------------------------

// Of a block, in bytes: 1 KiB less than the multiprocessor has for it.
static int most_shared(int capability)
{
    switch (capability) {
    case 80:
    case 87:
        return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
        return 99 << 10;
    default:
        return 227 << 10;
    }
}

const Gpu *no_gpu(void)
{
    static Gpu g;
    if (g.major)
        return &g;
    const char *text = getenv("NO_GPU");
    double gib;
    if (sscanf(text ? text : "9.0 140", "%d.%d %lf", &g.major, &g.minor, &gib) != 3)
        refuse("NO_GPU=%s: compute capability and GiB are wanted: 9.0 140", text);
    g.memory = (size_t)(gib * (1 << 30));
    g.shared = most_shared(10 * g.major + g.minor);
    return &g;
}

bool is_without(const char *what)
{
    const char *without = getenv("NO_GPU_WITHOUT");
    return without && !strcmp(without, what);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "no GPU (%d.%d)", no_gpu()->major, no_gpu()->minor);
    p->major = no_gpu()->major;
    p->minor = no_gpu()->minor;
    p->multiProcessorCount = SMS;
    p->sharedMemPerBlockOptin = (size_t)no_gpu()->shared;
    p->totalGlobalMem = no_gpu()->memory;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t e) { return e ? "an error" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "an error of the stand-in" : "no error";
}

// ---- streams, events, graphs -----------------------------------------------------------------------------

struct CUevent_st {
    double seconds;
    struct CUstream_st *capture;
};
struct CUgraph_st {
    Work *first; // owned, until a graph to launch takes it
};
struct CUgraphExec_st {
    Work *first; // owned
};
static struct CUstream_st *streams;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void may_wait(const char *call, const struct CUstream_st *only)
{
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture && (only ? s == only : !s->relaxed))
            refuse("%s while a stream is under capture", call);
}

void stream_work(cudaStream_t s, void (*run)(const void *argument), const void *argument, size_t bytes)
{
    if (!s || !s->capture) {
        run(argument);
        return;
    }
    Work *w = calloc(1, sizeof *w), ***end = &s->capture->end;
    w->run = run;
    w->argument = malloc(bytes);
    memcpy(w->argument, argument, bytes);
    **end = w;
    *end = &w->next;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *s = calloc(1, sizeof **s);
    (*s)->next = streams;
    streams = *s;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    return cudaStreamCreateWithPriority(s, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    struct CUstream_st **link = &streams;
    while (*link && *link != s)
        link = &(*link)->next;
    if (!*link)
        refuse("cudaStreamDestroy of no stream");
    *link = s->next;
    free(s);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *bus, int size, int device)
{
    (void)device;
    snprintf(bus, (size_t)size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    may_wait("cudaDeviceSynchronize", NULL);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s) // all that was queued is done
{
    (void)s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    may_wait("cudaStreamSynchronize", s);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    *e = calloc(1, sizeof **e);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    e->seconds = now();
    e->capture = s ? s->capture : NULL;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    if (e->capture)
        refuse("cudaEventSynchronize of an event of a capture");
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = (float)(1e3 * (to->seconds - from->seconds));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    if (e->capture)
        s->capture = e->capture;
    else if (s->capture && e->seconds > 0)
        refuse("a stream under capture waits for an event from outside");
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    if (!s || s->capture)
        refuse("cudaStreamBeginCapture of %s", s ? "a stream under capture" : "the default stream");
    s->capture = s;
    s->relaxed = mode == cudaStreamCaptureModeRelaxed;
    s->first = NULL;
    s->end = &s->first;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    if (s->capture != s)
        refuse("cudaStreamEndCapture of a stream that began none");
    for (struct CUstream_st *i = streams; i; i = i->next)
        if (i->capture == s)
            i->capture = NULL;
    *graph = calloc(1, sizeof **graph);
    (*graph)->first = s->first;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    *status = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    *e = calloc(1, sizeof **e);
    (*e)->first = graph->first;
    graph->first = NULL;
    return cudaSuccess;
}

unsigned long long no_gpu_graph_launches; // for nvml.c

cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s)
{
    (void)s;
    no_gpu_graph_launches++;
    for (const Work *w = e->first; w; w = w->next)
        w->run(w->argument);
    return cudaSuccess;
}

static void free_work(Work *w)
{
    while (w) {
        Work *next = w->next;
        free(w->argument);
        free(w);
        w = next;
    }
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free_work(graph->first);
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e)
{
    free_work(e->first);
    free(e);
    return cudaSuccess;
}

// ---- memory ----------------------------------------------------------------------------------------------

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Its end, but for ALIGNMENT - 1 bytes at most, is that of a page; the pages before and behind cannot be
// accessed.
enum { ALIGNMENT = 256 };
typedef struct Allocation {
    char *p, *mapping;
    size_t bytes, mapped;
    bool on_device;
    struct Allocation *next;
} Allocation;
static Allocation *allocations;
static size_t in_use; // bytes of device memory

// Holds [p, p + bytes) wholly; NULL: none does.
static const Allocation *allocation_of(const void *p, size_t bytes)
{
    pthread_mutex_lock(&lock);
    const Allocation *a = allocations;
    while (a && !((const char *)p >= a->p && (const char *)p + bytes <= a->p + a->bytes))
        a = a->next;
    pthread_mutex_unlock(&lock);
    return a;
}

static cudaError_t allocate(void **p, size_t bytes, bool on_device)
{
    if (on_device && in_use + bytes > no_gpu()->memory)
        return cudaErrorMemoryAllocation;
    Allocation *a = malloc(sizeof *a);
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page * page;
    a->mapped = pages + 2 * page;
    a->mapping = mmap(NULL, a->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a->mapping == MAP_FAILED || mprotect(a->mapping + page, pages, PROT_READ | PROT_WRITE))
        refuse("mmap of %zu bytes", bytes);
    a->p = a->mapping + page + (pages - bytes) / ALIGNMENT * ALIGNMENT;
    a->bytes = bytes;
    a->on_device = on_device;
    pthread_mutex_lock(&lock);
    a->next = allocations;
    allocations = a;
    in_use += on_device ? bytes : 0;
    pthread_mutex_unlock(&lock);
    *p = a->p;
    return cudaSuccess;
}

static cudaError_t release(void *p)
{
    pthread_mutex_lock(&lock);
    Allocation **link = &allocations;
    while (*link && (*link)->p != p)
        link = &(*link)->next;
    Allocation *a = *link;
    if (!a && p)
        refuse("cudaFree of memory that is not allocated");
    if (a) {
        *link = a->next;
        in_use -= a->on_device ? a->bytes : 0;
        munmap(a->mapping, a->mapped);
        free(a);
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    may_wait("cudaMalloc", NULL);
    return allocate(p, bytes, true);
}

cudaError_t cudaFree(void *p)
{
    may_wait("cudaFree", NULL);
    return release(p);
}

cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void *p) { return release(p); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = no_gpu()->memory;
    *free_bytes = *total - in_use;
    return cudaSuccess;
}

bool is_allocated(const void *p, size_t bytes) { return allocation_of(p, bytes); }

void need_device(const char *call, const void *p, size_t bytes)
{
    const Allocation *a = allocation_of(p, bytes);
    if (!a || !a->on_device)
        refuse("%s: %zu bytes at %p are not inside device memory", call, bytes, p);
}

// Pages that become zero go back, so that arrays of a GPU's size take no memory.
static void fill(void *p, int value, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)p + page - 1) / page * page, end = ((uintptr_t)p + bytes) / page * page;
    if (value || end <= first) {
        memset(p, value, bytes);
        return;
    }
    memset(p, 0, first - (uintptr_t)p);
    madvise((void *)first, end - first, MADV_DONTNEED);
    memset((void *)end, 0, (uintptr_t)p + bytes - end);
}

static void check_copy(const char *call, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    if (bytes && (kind == cudaMemcpyDeviceToDevice || kind == cudaMemcpyHostToDevice))
        need_device(call, to, bytes);
    if (bytes && (kind == cudaMemcpyDeviceToDevice || kind == cudaMemcpyDeviceToHost))
        need_device(call, from, bytes);
}

// Of a stream: checked at once.
typedef struct {
    void *to;
    const void *from; // NULL: bytes of value
    size_t bytes;
    int value;
} Transfer;

static void transfer(const void *argument)
{
    const Transfer *t = argument;
    if (t->from)
        memmove(t->to, t->from, t->bytes);
    else
        fill(t->to, t->value, t->bytes);
}

static cudaError_t set(const char *call, void *p, int value, size_t bytes, cudaStream_t s)
{
    if (!bytes)
        return cudaSuccess;
    need_device(call, p, bytes);
    stream_work(s, transfer, &(Transfer){p, NULL, bytes, value}, sizeof(Transfer));
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    may_wait("cudaMemset", NULL);
    return set("cudaMemset", p, value, bytes, NULL);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    return set("cudaMemsetAsync", p, value, bytes, s);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    may_wait("cudaMemcpy", NULL);
    check_copy("cudaMemcpy", to, from, bytes, kind);
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    if (s && s->capture && kind == cudaMemcpyDeviceToHost && !allocation_of(to, bytes))
        refuse("cudaMemcpyAsync to pageable memory in a graph");
    check_copy("cudaMemcpyAsync", to, from, bytes, kind);
    if (bytes)
        stream_work(s, transfer, &(Transfer){to, from, bytes, 0}, sizeof(Transfer));
    return cudaSuccess;
}
