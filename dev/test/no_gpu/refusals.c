// What the stand-in (no_gpu.h) refuses, one case a run, named by the argument; case "fine" is what it takes.
// A GPU would end with an error, or write past an array.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 20, SIDE = 512, SHARED = 64 << 10 };

void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *,
                            int *);

static const char kernel[] = "a kernel";
static char *memory; // device, BYTES

static void launch(unsigned grid, unsigned threads, size_t shared, void *pointer)
{
    void *arguments[] = {&pointer};
    cudaLaunchKernel(kernel, (dim3){grid, 1, 1}, (dim3){threads, 1, 1}, arguments, shared, NULL);
}

static void tensor_map(size_t offset, cuuint64_t cols, cuuint64_t rows, cuuint64_t pitch, cuuint32_t box)
{
    typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    CUtensorMap map;
    void *address;
    enum cudaDriverEntryPointQueryResult found;
    const cuuint64_t sizes[] = {cols, rows}, strides[] = {pitch};
    const cuuint32_t boxes[] = {64, box}, steps[] = {1, 1};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, 0, &found);
    ((EncodeTiled)address)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory + offset, sizes, strides, boxes,
                           steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// SIDE x inner by inner x SIDE in bf16; B has `rows` rows.
static void product(uint64_t inner, uint64_t rows)
{
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, SIDE, inner, SIDE);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, rows, SIDE, (int64_t)rows);
    cublasLtMatrixLayoutCreate(&c, CUDA_R_16BF, SIDE, SIDE, SIDE);
    cublasLtMatmul(handle, description, NULL, memory, a, memory, b, NULL, NULL, c, memory, c, NULL, NULL, 0,
                   NULL);
}

static void captured(bool wait)
{
    cudaStream_t s;
    void *p;
    cudaStreamCreateWithFlags(&s, 0);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    if (wait)
        cudaStreamSynchronize(s);
    else
        cudaMalloc(&p, BYTES);
}

static void fine(void)
{
    launch(1, 1024, SHARED, memory);
    launch(1, 32, 0, NULL);
    tensor_map(0, SIDE, SIDE, 2 * SIDE, 256);
    product(SIDE, SIDE);
    cudaMemset(memory, 0, BYTES);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    __cudaRegisterFunction(NULL, kernel, NULL, "_Z6kernelPf", 0, NULL, NULL, NULL, NULL,
                           NULL); // kernel(float *)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    cudaMalloc((void **)&memory, BYTES);
    if (!strcmp(name, "fine"))
        fine();
    else if (!strcmp(name, "an empty grid"))
        launch(0, 32, 0, memory);
    else if (!strcmp(name, "too many threads"))
        launch(1, 1025, 0, memory);
    else if (!strcmp(name, "shared memory that was not asked for"))
        launch(1, 32, SHARED + 1, memory);
    else if (!strcmp(name, "a pointer to the host"))
        launch(1, 32, 0, &memory);
    else if (!strcmp(name, "more shared memory than there is")) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10); // an error
        launch(1, 32, 228 << 10, memory);
    } else if (!strcmp(name, "set past the end"))
        cudaMemset(memory + 1, 0, BYTES);
    else if (!strcmp(name, "copy past the end"))
        cudaMemcpy(memory, memory + 1, BYTES, cudaMemcpyDeviceToDevice);
    else if (!strcmp(name, "a map that is not aligned"))
        tensor_map(2, SIDE, SIDE, 2 * SIDE, 64);
    else if (!strcmp(name, "a map past the end"))
        tensor_map(16, SIDE, BYTES / (2 * SIDE), 2 * SIDE, 64);
    else if (!strcmp(name, "a stride that is no multiple of 16"))
        tensor_map(0, SIDE, SIDE, 2 * SIDE + 8, 64);
    else if (!strcmp(name, "a box of 257 rows"))
        tensor_map(0, SIDE, SIDE, 2 * SIDE, 257);
    else if (!strcmp(name, "a product of shapes that do not fit"))
        product(SIDE, SIDE / 2);
    else if (!strcmp(name, "a product past the end"))
        product(2 * SIDE + 1, 2 * SIDE + 1);
    else if (!strcmp(name, "a wait under capture"))
        captured(true);
    else if (!strcmp(name, "an allocation under capture"))
        captured(false);
    else
        return 2;
    return 0;
}
