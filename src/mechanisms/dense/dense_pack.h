// dense_pack: weights of 8 and 4 bits in the order that dense_quantised and embedding_quantised read, and back.
//
// A panel is 16 outputs. Its group g (32 inputs) is one block of bytes, its scales and offsets are 16 numbers side by side:
//   8 bits   512 bytes: byte (k / 4) 64 + 4 r + k % 4 is the code of output r and input k, the signed code plus 128
//   4 bits   256 bytes: byte (m / 4) 64 + 4 r + m % 4 holds input m in its low half, input m + 16 in its high half, m < 16
// so that four neighbouring inputs of 16 outputs fill a 64-byte vector: an integer dot product makes 16 sums of it. The last
// panel is filled up with zeros. GGUF's Q8_0, Q4_0 and Q4_1 convert exactly: their codes are permuted, nothing is computed.
#pragma once

#include "dense.h"

namespace linnet {

inline constexpr int64_t kPanel = 16, kGroup = 32;

inline int64_t dense_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
inline int64_t dense_block_bytes(QuantisedBits bits) {
  return bits == QuantisedBits::eight ? kPanel * kGroup : kPanel * kGroup / 2;
}

// Codes of [outputs, groups] blocks, row and block strides in bytes. A block is 32 signed bytes (8 bits), or 16 bytes with
// input m in the low and m + 16 in the high half (4 bits). codes: [panels, groups, dense_block_bytes].
void dense_pack_codes(QuantisedBits bits, const void* blocks, int64_t row_stride, int64_t block_stride, int64_t outputs,
                      int64_t groups, uint8_t* codes);
// Scales or offsets of `dtype` at blocks' places: packed [panels, groups, 16] of the same type; 16-bit values need no
// alignment.
void dense_pack_scales(Dtype dtype, const void* first, int64_t row_stride, int64_t block_stride, int64_t outputs,
                       int64_t groups, void* packed);

// Rounds weight [O, I] to codes. Where an offset is wanted it is the smallest weight, and scale = (max - min) / 255 or / 15:
// 4-bit blocks with an offset then keep their values in 8 bits. Else 8 bits have scale max |w| / 127, 4 bits scale = (the value
// of largest magnitude) / -8. Scales and offsets are rounded to their own type first. codes [panels, groups, bytes], scale and
// offset [panels, groups, 16], dense.
Status dense_quantise(const View& weight, QuantisedBits bits, const View& codes, const View& scale, const View& offset);

// One weight as a number.
double dense_weight(QuantisedBits bits, const View& codes, const View& scale, const View& offset, int64_t output,
                    int64_t input);

}  // namespace linnet
