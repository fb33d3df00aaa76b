#include "llmc/cuda/tensor_map.cuh"
#include "llmc/cuda/cuda_common.cuh"

// Asked of the runtime, so that the program is not linked with the driver's library, which machines without a GPU lack.
EncodeTiled tensor_map_encoder(void)
{
    void *address = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found));
    return found == cudaDriverEntryPointSuccess ? (EncodeTiled)address : NULL;
}
