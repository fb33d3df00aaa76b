// The contract of every operation. Two backends implement this file: llmc/cpu/ (the reference) and
// llmc/cuda/.
//
// Conventions
//   N tokens of one packed sequence, d = H*e model width, H heads of width e, F hidden width, Vp padded
//   vocabulary. All tensors are row-major and packed unless a stride is named; all pointers are device memory
//   except where "host" stands. floatX is bf16 (fp32 in the exact build). Inside an op everything is fp32; it
//   is rounded once, where it is stored. Gradients of parameters are fp32 and accumulated ("+=") over
//   micro-batches, unscaled; the optimizer applies the factor. Ops queue their work on the stream and return;
//   scalars that change from step to step live in device memory, so that a captured graph of ops stays valid.
//   Host values (window, scale, sizes) are frozen at capture. No op allocates: what it needs beyond its
//   arguments belongs to its stream, so that two streams may run the same op at once, and is reserved by
//   backend_reserve(), for further streams at their first op or capture. Reductions have a fixed order: the
//   same input gives the same bits. Only q's part of attention_backward's and sdpa_heads_backward's dqkv and
//   sdpa_backward's dq may differ in their last bits from run to run, unless `deterministic` is asked for,
//   which costs these ops up to 6% of their time on Hopper.
// Formulas: the network of the NanoGPT speedrun (track 1); each op states its own.
#pragma once
#include "llmc/ops/backend.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/tables.h"
#include "llmc/ops/residual.h"
#include "llmc/ops/streams.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/mlp.h"
#include "llmc/ops/fp8.h"
#include "llmc/ops/generator.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/heads.h"
#include "llmc/ops/dc.h"
#include "llmc/ops/head.h"
#include "llmc/ops/optimizer.h"
#include "llmc/ops/ns_ops.h"
