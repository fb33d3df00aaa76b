// What kernels for Hopper need of the host: tensors described to the copy unit, and launches of blocks in clusters.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include <cuda.h>

// False: the driver does not know how to describe tensors.
bool tensor_maps_known(void);
// A (planes, rows, cols) tensor whose rows begin `pitch` elements apart, for boxes of 128 bytes of box_rows rows, swizzled; what
// lies outside of a plane reads as zero and is not written. planes 0: a matrix, whose boxes have two coordinates.
CUtensorMap tensor_map(CUtensorMapDataType type, const void *base, int planes, int rows, int cols, int pitch, int box_rows);

typedef struct {
    int blocks, threads; // of a cluster; of a block
    size_t shared;       // bytes of a block
} ClusterShape;

// Clusters of the kernel that the device holds at a time. The kernel must have been allowed its shared memory.
int clusters_that_fit(const void *kernel, ClusterShape shape);
// attributes (2): memory for what the launch refers to. early: the kernel may begin before the one ahead of it in the stream is
// over, and waits for that itself (wait_for_predecessors).
cudaLaunchConfig_t cluster_launch(cudaLaunchAttribute *attributes, Stream s, ClusterShape shape, int64_t clusters, bool early);
