// CRC-32C (Castagnoli's polynomial, as in iSCSI and ext4): finds every change of up to 32 bits in a row, and
// any other with a chance of 2^-32 to miss it.
#pragma once
#include "llmc/base/common.h"

// crc: 0 for the first piece, then the result for the pieces before. bytes (count) uint8 in
uint32_t crc32c(uint32_t crc, const void *bytes, size_t count);
