// Host side of sm90 kernels: tensor maps for TMA and cluster launches.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include <cuda.h>

// False when the driver has no cuTensorMapEncodeTiled.
bool tensor_maps_known(void);
// Tensor map of a (planes, rows, cols) tensor with a row pitch of `pitch` elements, boxes of 128 bytes and
// box_rows rows, 128-byte swizzle. Out-of-bounds elements load as zero and are not stored. planes 0: a
// matrix, whose boxes have two coordinates.
CUtensorMap tensor_map(CUtensorMapDataType type, const void *base, int planes, int rows, int cols, int pitch,
                       int box_rows);
// Tensor map of bf16 heads, (rows, heads, width): boxes of 64 columns of one head and box_rows rows, with
// coordinates (column, head, row). Columns behind the head's last load as zeros: they are not those of the
// next.
CUtensorMap tensor_map_of_heads(const void *base, int rows, int heads, int width, int box_rows);
// The same of (tokens, pairs, heads, width) with `pitch` elements from token to token: boxes of 64 columns of
// one head and box_rows rows, the pairs of a token one behind the other, with coordinates (column, head, 0,
// token).
CUtensorMap tensor_map_of_pairs(const void *base, int tokens, int pairs, int heads, int width, int pitch,
                                int box_rows);

typedef struct {
    int blocks, threads; // of a cluster; of a block
    size_t shared;       // bytes of a block
} ClusterShape;

// Clusters of this shape that are resident at the same time. The kernel's shared-memory limit must have been
// raised.
int clusters_that_fit(const void *kernel, ClusterShape shape);
// attributes (2): memory that the launch refers to. early: launch with the PDL attribute; the kernel calls
// pdl_wait itself.
cudaLaunchConfig_t cluster_launch(cudaLaunchAttribute *attributes, Stream s, ClusterShape shape,
                                  int64_t clusters, bool early);
