// A batch as it travels to the device: one block of int32 with the arrays of Batch, the numbers of their rows
// and the attention tables. Batches of one size and one set of tables have one layout.
#pragma once
#include "llmc/data/batch.h"
#include "llmc/model/model.h"

int64_t block_ints(int N, const BatchTables *tables);
// Fills a host block; returns the document slots it needs, of either table.
int block_pack(int32_t *block, const Batch *b);
// The parts of a block, on the host or on a device.
//   b  gives size and tables
DeviceBatch block_batch(const int32_t *block, const Batch *b, int slots);
