// dequantize: blocks of a GGUF tensor as floats, bit for bit what the `gguf` Python package gives.
//
// A block holds 32 or 256 elements q with scales in f16:
//   Q8_0   d q                    q signed, 8 bits
//   Q4_0   d (q - 8)              4 bits; element i of 32 is the low half of byte i, i + 16 the high half
//   Q4_1   d q + m                4 bits
//   Q5_0   d (q - 16)             4 bits and a fifth in a word of 32
//   Q4_K   (d s_j) q - (e m_j)    256 elements in 8 groups j with 6-bit s_j, m_j
//   Q5_K   the same with a fifth bit
//   Q6_K   (d s_j) (q - 32)       16 groups with 8-bit s_j
// Every product is exact in a float (11 + 6 + 5 bits), so that a fused multiply-add changes nothing.
#pragma once

#include <cstdint>

#include "runtime/files/gguf.h"

namespace linnet {

// `elements` is a whole number of blocks; `data` may be unaligned.
void dequantize(GgufType type, const void* data, int64_t elements, float* out);

}  // namespace linnet
