#include "llmc/cpu/blas.h"
#include "llmc/base/common.h"
#ifdef HAVE_OPENBLAS
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static Blas loaded;

static int threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void *find(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol)
        fatal(EXIT_BAD_INPUT, "libopenblas.so.0 has no %s: install OpenBLAS, or build with USE_OPENBLAS=0",
              name);
    return symbol;
}

enum { SLACK = 1 << 20, LIBRARY_BYTES = 64 << 20 };
static const size_t buffer_bytes =
    ((size_t)32 << 22) + SLACK; // its BUFFER_SIZE on x86-64 and arm64, 128 MiB, and what it adds

// How many of `count` buffers fit beside `other` bytes. Each is mapped on its own, as the library does.
static int buffers_that_fit(int count, size_t other)
{
    void **map = xcalloc((size_t)count + 1, sizeof *map);
    int n = 0; // maps: the other bytes, then buffers
    while (n <= count) {
        map[n] =
            mmap(NULL, n ? buffer_bytes : other, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map[n] == MAP_FAILED)
            break;
        n++;
    }
    for (int i = 0; i < n; i++)
        munmap(map[i], i ? buffer_bytes : other);
    free(map);
    return n ? n - 1 : 0;
}

// Every thread that computes a product takes a buffer, which OpenBLAS then keeps; some versions take the
// first one while they are loaded. Where it cannot map one it tries again without end: so see first whether
// they fit.
static void require_room(int count)
{
    int fit = buffers_that_fit(count, LIBRARY_BYTES);
    if (fit < count)
        fatal(EXIT_BAD_INPUT,
              "OpenBLAS needs 129 MiB of address space for each of %d threads, and there is room for %d: "
              "raise the limit (ulimit -v)%s",
              count, fit, fit ? " or lower --threads" : "");
}

// Takes the buffers before the program takes the room.
static void reserve_buffers(void *library, int count)
{
    void *(*allocate)(int) = (void *(*)(int))dlsym(library, "blas_memory_alloc");
    void (*release)(void *) = (void (*)(void *))dlsym(library, "blas_memory_free");
    if (!allocate || !release)
        return;
    void **buffer = xcalloc((size_t)count, sizeof *buffer);
    for (int i = 0; i < count; i++)
        buffer[i] = allocate(0);
    for (int i = 0; i < count; i++)
        release(buffer[i]);
    free(buffer);
}

static void *open_library(void)
{
    // The name is that of its ABI, on all distributions.
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fatal(EXIT_BAD_INPUT, "cannot load OpenBLAS, with which this program was built: %s", dlerror());
    return library;
}

// Kernels for a processor that is newer than the library; NULL: its own choice is good. A library that does
// not know the model takes its oldest kernels, SSE3, which are three times slower (Debian 12's 0.3.21 on
// Emerald Rapids).
static const char *better_kernels(void *library)
{
    const char *chosen = ((__typeof__(openblas_get_corename) *)find(library, "openblas_get_corename"))();
    const char *better = NULL;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        better = "Haswell";
    if (better && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        better = "SkylakeX";
#endif
    return !strcmp(chosen, "Prescott") ? better : NULL;
}

static void load(void)
{
    require_room(threads());
    setenv("OPENBLAS_NUM_THREADS", "1", 1); // read at load: no threads and no buffers for them
    void *library = open_library();
    const char *better = getenv("OPENBLAS_CORETYPE") ? NULL : better_kernels(library);
    if (better) { // the choice, too, is made at load only
        setenv("OPENBLAS_CORETYPE", better, 1);
        dlclose(library);
        library = open_library();
    }
    loaded.sgemm = (__typeof__(loaded.sgemm))find(library, "cblas_sgemm");
    loaded.dgemm = (__typeof__(loaded.dgemm))find(library, "cblas_dgemm");
    loaded.config = (__typeof__(loaded.config))find(library, "openblas_get_config");
    loaded.corename = (__typeof__(loaded.corename))find(library, "openblas_get_corename");
    ((__typeof__(openblas_set_num_threads) *)find(library, "openblas_set_num_threads"))(1);
    reserve_buffers(library, threads());
}

const Blas *blas(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return &loaded;
}
#endif
