// Kernels, their launches and tensor maps of the stand-in (no_gpu.h).
#include "dev/test/no_gpu/no_gpu.h"
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_KERNELS = 4096, MAX_ARGUMENTS = 64, NAME = 1024 };
// SHARED_PLAIN: what a block has without asking, less 1 KB for arrays of the kernel's own, which count, too.
enum { MAX_THREADS = 1024, SHARED_PLAIN = 47 << 10, MAX_CLUSTER = 8 };

// ---- kernels ---------------------------------------------------------------------------------------------

typedef struct {
    const void *function; // as the host names it
    char name[NAME];      // demangled
    bool pointer[MAX_ARGUMENTS];
    int arguments;
    int shared; // most dynamic shared memory that was asked for, bytes
    long launches;
} Kernel;
static Kernel kernels[MAX_KERNELS];
static int num_kernels;

char *__cxa_demangle(const char *, char *, size_t *, int *);

// The types of the arguments stand in the name, between its last outer parentheses.
static void read_arguments(Kernel *k)
{
    char *end = strrchr(k->name, ')'), *begin = end;
    int depth = 0;
    if (!end)
        return;
    do {
        depth += *begin == ')' ? 1 : *begin == '(' ? -1 : 0;
    } while (depth && begin-- > k->name);
    depth = 0;
    for (char *p = begin + 1; p <= end && k->arguments < MAX_ARGUMENTS; p++) {
        depth += *p == '<' || *p == '(' ? 1 : *p == '>' || (*p == ')' && p < end) ? -1 : 0;
        if (depth || (*p != ',' && p < end) || end == begin + 1)
            continue;
        k->pointer[k->arguments++] = p[-1] == '*';
    }
}

void **__cudaRegisterFatBinary(void *binary)
{
    (void)binary;
    return malloc(sizeof(void *));
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name,
                            int thread_limit, void *tid, void *bid, void *block, void *grid, int *size)
{
    (void)handle, (void)device_function, (void)thread_limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)size;
    if (num_kernels == MAX_KERNELS)
        refuse("more than %d kernels", MAX_KERNELS);
    Kernel *k = &kernels[num_kernels++];
    char *text = __cxa_demangle(name, NULL, NULL, NULL);
    k->function = function;
    snprintf(k->name, sizeof k->name, "%s", text ? text : name);
    free(text);
    read_arguments(k);
}

static Kernel *kernel_of(const void *function)
{
    for (int i = 0; i < num_kernels; i++)
        if (kernels[i].function == function)
            return &kernels[i];
    refuse("%p is no kernel", function);
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    Kernel *k = kernel_of(function);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value > no_gpu()->shared)
        return cudaErrorInvalidValue;
    k->shared = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function)
{
    kernel_of(function);
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = MAX_THREADS;
    a->binaryVersion = a->ptxVersion = 10 * no_gpu()->major + no_gpu()->minor;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const cudaLaunchConfig_t *c)
{
    kernel_of(function);
    unsigned blocks = 1;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            blocks = c->attrs[i].val.clusterDim.x;
    *clusters = is_without("clusters") ? 0 : SMS / (int)blocks;
    return cudaSuccess;
}

static void check_launch(Kernel *k, dim3 grid, dim3 block, size_t shared, void **arguments)
{
    size_t threads = (size_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
        refuse("%s: a grid of %u x %u x %u", k->name, grid.x, grid.y, grid.z);
    if (!threads || threads > MAX_THREADS || block.z > 64)
        refuse("%s: a block of %u x %u x %u", k->name, block.x, block.y, block.z);
    if (shared > (size_t)(k->shared > SHARED_PLAIN ? k->shared : SHARED_PLAIN))
        refuse("%s: %zu bytes of shared memory, %d were asked for", k->name, shared, k->shared);
    for (int i = 0; i < k->arguments; i++) {
        if (!k->pointer[i])
            continue;
        const void *p = *(const void *const *)arguments[i];
        if (p && !is_allocated(p, 0))
            refuse("%s: argument %d points to %p, where nothing is allocated", k->name, i + 1, p);
    }
}

// The one kernel whose result matters to the host: it tells for which architecture it was compiled.
static void probe(int *code)
{
    code[0] = 100 * no_gpu()->major + 10 * no_gpu()->minor;
    code[1] = code[0] == 900;
}

static cudaError_t launch(const void *function, dim3 grid, dim3 block, size_t shared, void **arguments)
{
    Kernel *k = kernel_of(function);
    check_launch(k, grid, block, shared, arguments);
    k->launches++;
    if (strstr(k->name, "device_probe_kernel"))
        probe(*(int *const *)arguments[0]);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **arguments)
{
    for (unsigned i = 0; i < c->numAttrs; i++) {
        unsigned blocks = c->attrs[i].val.clusterDim.x;
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension &&
            (!blocks || blocks > MAX_CLUSTER || c->gridDim.x % blocks))
            refuse("%s: clusters of %u in a grid of %u", kernel_of(function)->name, blocks, c->gridDim.x);
    }
    return launch(function, c->gridDim, c->blockDim, c->dynamicSmemBytes, arguments);
}

// What nvcc makes of <<<>>>.
static struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s)
{
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = s;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(cudaStream_t *)s = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t s)
{
    (void)s;
    return launch((const void *)kernel, grid, block, shared, arguments);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t s)
{
    (void)s;
    return launch(function, grid, block, shared, arguments);
}

static __attribute__((destructor)) void write_launches(void)
{
    const char *path = getenv("NO_GPU_LAUNCHES");
    FILE *f = path && num_kernels ? fopen(path, "w") : NULL;
    for (int i = 0; f && i < num_kernels; i++)
        fprintf(f, "%ld %s\n", kernels[i].launches, kernels[i].name);
    if (f)
        fclose(f);
}

// ---- tensor maps -----------------------------------------------------------------------------------------

static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                             const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *steps, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                             CUtensorMapFloatOOBfill fill)
{
    size_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                     : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                               : 2;
    size_t bytes = (size_t)sizes[0] * element;
    (void)steps, (void)interleave, (void)promotion, (void)fill;
    memset(map, 0, sizeof *map);
    if ((uintptr_t)base % 16)
        refuse("a tensor map of %p, which is no multiple of 16", base);
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256)
            refuse("a tensor map of size %llu, box %u in dimension %u", (unsigned long long)sizes[i], box[i],
                   i);
        if (i && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40))
            refuse("a tensor map with a stride of %llu bytes", (unsigned long long)strides[i - 1]);
        if (i)
            bytes += (size_t)(sizes[i] - 1) * strides[i - 1];
    }
    if (box[0] * element > (swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 1024) || box[0] * element % 16)
        refuse("a tensor map's box of %zu bytes", box[0] * element);
    need_device("cuTensorMapEncodeTiled", base, bytes);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **address, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    (void)version, (void)flags;
    bool known = !strcmp(name, "cuTensorMapEncodeTiled") && !is_without("tensor maps");
    *address = known ? (void *)encode_tiled : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
