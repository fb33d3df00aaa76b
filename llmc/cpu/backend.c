// The CPU as a device: memory is host memory, streams run at once, there are no graphs.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/gemm.h"
#include "llmc/base/memory.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    int threads;
    size_t scratch_floats, shared_floats;
    float **scratch; // one for each thread
    float *shared;
    char description[512], threads_line[128], blas_line[320];
} backend;

static int thread_limit(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// OpenMP's threads wait for the next region by spinning, by default for so long that on a machine with other
// work the spinning takes more time than the ops (measured: 17 times slower steps with one busy neighbour).
// libgomp reads the limit before main.
void backend_prepare_process(char **argv)
{
    const char *self = "/proc/self/exe";
    char path[PATH_MAX] = "";
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY"))
        return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    if (readlink(self, path, sizeof path - 1) > 0)
        execv(path, argv); // ps shows its name; that of the link is "exe"
    execv(self, argv);     // on failure: go on, only slower
}

int backend_device_count(void) { return 1; }

void backend_open(int index)
{
    (void)index;
    backend.threads = thread_limit();
#ifdef _OPENMP
    snprintf(backend.threads_line, sizeof backend.threads_line, "OpenMP %d, %d thread%s on %d processor%s",
             _OPENMP, backend.threads, backend.threads == 1 ? "" : "s", omp_get_num_procs(),
             omp_get_num_procs() == 1 ? "" : "s");
#else
    snprintf(backend.threads_line, sizeof backend.threads_line, "OpenMP absent, 1 thread");
#endif
    snprintf(backend.blas_line, sizeof backend.blas_line, "BLAS %s", blas_description());
    snprintf(backend.description, sizeof backend.description, "CPU, " FLOATX_NAME " storage, %s, %s",
             backend.threads_line, backend.blas_line);
}

bool backend_takes_heads(int qk, int e) { return qk <= e; }

void backend_reserve(const OpSizes *sizes)
{
    assert(backend.threads > 0 && !backend.scratch);
    size_t wanted[] = {matmul_scratch(), attention_scratch(sizes), head_thread_scratch(sizes),
                       rows_scratch(sizes)};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (wanted[i] > backend.scratch_floats)
            backend.scratch_floats = wanted[i];
    backend.shared_floats = rows_shared(sizes);
    backend.scratch = xcalloc((size_t)backend.threads, sizeof *backend.scratch);
    for (int t = 0; t < backend.threads; t++)
        backend.scratch[t] = device_alloc(backend.scratch_floats * sizeof(float), "scratch: of a thread");
    backend.shared = device_alloc(backend.shared_floats * sizeof(float), "scratch: of the ops");
}

void backend_close(void)
{
    for (int t = 0; backend.scratch && t < backend.threads; t++)
        device_free(backend.scratch[t]);
    device_free(backend.shared);
    free(backend.scratch);
    backend.scratch = NULL;
    backend.shared = NULL;
    backend.scratch_floats = backend.shared_floats = 0;
}

const char *backend_device_name(void) { return NULL; }
double backend_energy(void) { return NAN; }
bool backend_is_asynchronous(void) { return false; }
const char *backend_description(void) { return backend.description; }

const char *backend_version_line(int index)
{
    const char *lines[] = {"compiler " __VERSION__, backend.threads_line, backend.blas_line};
    return index >= 0 && index < (int)(sizeof lines / sizeof *lines) ? lines[index] : NULL;
}

float *cpu_scratch(size_t floats)
{
    assert(backend.scratch && floats <= backend.scratch_floats && cpu_thread() < backend.threads);
    return backend.scratch[cpu_thread()];
}

float *cpu_shared(size_t floats)
{
    assert(backend.shared && floats <= backend.shared_floats);
    return backend.shared;
}

// ---- memory -----------------------------------------------------------------------------------------------

// What device_alloc keeps in the 64 bytes in front of the memory it returns.
typedef struct {
    void *start; // what calloc gave
    size_t bytes;
    int memory_class;
} AllocHeader;

void *device_alloc(size_t bytes, const char *what)
{
    enum { ALIGN = 64 };
    char *start = bytes <= SIZE_MAX - 2 * ALIGN ? calloc(1, bytes + 2 * ALIGN) : NULL;
    if (!start)
        fatal(EXIT_BAD_INPUT, "no memory for %s: %.1f MiB; use smaller sizes or a larger machine", what,
              bytes / 1048576.0);
    char *p = start + ALIGN + (ALIGN - (uintptr_t)start % ALIGN) % ALIGN;
    int number = memory_class(what);
    memcpy(p - ALIGN, &(AllocHeader){start, bytes, number}, sizeof(AllocHeader));
    memory_change(number, (int64_t)bytes);
    return p;
}

void device_free(void *p)
{
    if (!p)
        return;
    AllocHeader header;
    memcpy(&header, (char *)p - 64, sizeof header);
    memory_change(header.memory_class, -(int64_t)header.bytes);
    free(header.start);
}

size_t device_bytes_allocated(void) { return memory_now(); }
size_t device_bytes_peak(void) { return memory_peak(); }
size_t device_bytes_in_use(void) { return memory_peak(); }
size_t device_bytes_free(void) { return SIZE_MAX; }
void *host_alloc(size_t bytes) { return xcalloc(bytes ? bytes : 1, 1); }
void host_free(void *p) { free(p); }

// ---- streams and graphs -----------------------------------------------------------------------------------

Stream stream_create(void) { return NULL; }
Stream stream_create_urgent(void) { return NULL; }
void stream_destroy(Stream s) {}
void stream_synchronize(Stream s) {}

static void copy(void *dst, const void *src, size_t bytes)
{
    if (bytes)
        memcpy(dst, src, bytes);
}

void copy_to_device(Stream s, void *dst, const void *host_src, size_t bytes)
{
    OP_SCOPE(copy_to_device, bytes);
    copy(dst, host_src, bytes);
}

void copy_to_host(Stream s, void *host_dst, const void *src, size_t bytes)
{
    OP_SCOPE(copy_to_host, bytes);
    copy(host_dst, src, bytes);
}

void copy_on_device(Stream s, void *dst, const void *src, size_t bytes)
{
    OP_SCOPE(copy_on_device, bytes);
    copy(dst, src, bytes);
}

void device_zero(Stream s, void *p, size_t bytes)
{
    OP_SCOPE(device_zero, bytes);
    if (bytes)
        memset(p, 0, bytes);
}

bool graph_begin(Stream s) { return false; }

Graph *graph_end(Stream s) { return NULL; }

void graph_launch(Graph *g, Stream s)
{
    assert(!g && "graph_begin returned false: there is no graph to launch");
}

void graph_destroy(Graph *g) { (void)g; }

// ---- events: work is done when it was queued --------------------------------------------------------------

struct Event {
    char unused;
};

Event *event_create(void) { return xcalloc(1, sizeof(Event)); }
void event_record(Event *e, Stream s) { (void)e; }
void event_synchronize(Event *e) { (void)e; }
void stream_wait(Stream s, Event *e) { (void)e; }
void event_destroy(Event *e) { free(e); }
