// The sm90 layer: thin wrappers of Hopper's instructions, one of each, and the pipeline over them.
#pragma once
#include "llmc/cuda/sm90/arch.cuh"
#include "llmc/cuda/sm90/barrier.cuh"
#include "llmc/cuda/sm90/cluster.cuh"
#include "llmc/cuda/sm90/matrix.cuh"
#include "llmc/cuda/sm90/tma.cuh"
#include "llmc/cuda/sm90/wgmma.cuh"
