#include "runtime/files/dequantize.h"

#include <cstring>

#include "core/half.h"

namespace linnet {

namespace {

using Bytes = const unsigned char*;

float half_at(Bytes at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return to_f32(F16{bits});
}

void q8_0(Bytes in, float* out) {
  const float d = half_at(in);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[2 + i])) * d;
}

void q4_0(Bytes in, float* out) {
  const float d = half_at(in);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((in[2 + i] & 15) - 8);
    out[i + 16] = d * static_cast<float>((in[2 + i] >> 4) - 8);
  }
}

void q4_1(Bytes in, float* out) {
  const float d = half_at(in), m = half_at(in + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(in[4 + i] & 15) + m;
    out[i + 16] = d * static_cast<float>(in[4 + i] >> 4) + m;
  }
}

void q5_0(Bytes in, float* out) {
  const float d = half_at(in);
  uint32_t high;
  std::memcpy(&high, in + 2, sizeof high);
  for (int i = 0; i < 16; ++i) {
    const int low = (in[6 + i] & 15) | static_cast<int>((high >> i & 1) << 4);
    const int upper = (in[6 + i] >> 4) | static_cast<int>((high >> (i + 16) & 1) << 4);
    out[i] = d * static_cast<float>(low - 16);
    out[i + 16] = d * static_cast<float>(upper - 16);
  }
}

// The 6-bit scale and offset of group j among 8, from 12 bytes: groups 0..3 in the low bits of bytes 0..7, groups 4..7 in bytes
// 8..11 (4 bits each) with their upper 2 bits on top of bytes 0..7.
void scale_and_offset(Bytes s, int j, int& scale, int& offset) {
  if (j < 4) {
    scale = s[j] & 63;
    offset = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | (s[j - 4] >> 2 & 0x30);
    offset = (s[j + 4] >> 4) | (s[j] >> 2 & 0x30);
  }
}

void q4_k(Bytes in, float* out) {
  const float d = half_at(in), e = half_at(in + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, offset;
    scale_and_offset(in + 4, j, scale, offset);
    const float a = d * static_cast<float>(scale), b = e * static_cast<float>(offset);
    Bytes q = in + 16 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) out[j * 32 + i] = a * static_cast<float>(q[i] >> (j % 2 * 4) & 15) - b;
  }
}

void q5_k(Bytes in, float* out) {
  const float d = half_at(in), e = half_at(in + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, offset;
    scale_and_offset(in + 4, j, scale, offset);
    const float a = d * static_cast<float>(scale), b = e * static_cast<float>(offset);
    Bytes high = in + 16, q = in + 48 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      out[j * 32 + i] = a * static_cast<float>((q[i] >> (j % 2 * 4) & 15) | (high[i] >> j & 1) << 4) - b;
    }
  }
}

void q6_k(Bytes in, float* out) {
  Bytes low = in, high = in + 128, scales = in + 192;
  const float d = half_at(in + 208);
  for (int j = 0; j < 8; ++j) {  // 32 elements, two scales each
    Bytes l = low + j / 4 * 64 + j % 2 * 32, h = high + j / 4 * 32;
    for (int i = 0; i < 32; ++i) {
      const int q = (l[i] >> (j % 4 / 2 * 4) & 15) | (h[i] >> (j % 4 * 2) & 3) << 4;
      const float a = d * static_cast<float>(static_cast<int8_t>(scales[2 * j + i / 16]));
      out[j * 32 + i] = a * static_cast<float>(q - 32);
    }
  }
}

void bf16(Bytes in, float* out) {
  uint16_t bits;
  std::memcpy(&bits, in, sizeof bits);
  *out = to_f32(Bf16{bits});
}

void f16(Bytes in, float* out) { *out = half_at(in); }
void f32(Bytes in, float* out) { std::memcpy(out, in, sizeof *out); }

}  // namespace

void dequantize(GgufType type, const void* data, int64_t elements, float* out) {
  void (*block)(Bytes, float*) = nullptr;
  switch (type) {
    case GgufType::f32: block = f32; break;
    case GgufType::f16: block = f16; break;
    case GgufType::bf16: block = bf16; break;
    case GgufType::q4_0: block = q4_0; break;
    case GgufType::q4_1: block = q4_1; break;
    case GgufType::q5_0: block = q5_0; break;
    case GgufType::q8_0: block = q8_0; break;
    case GgufType::q4_k: block = q4_k; break;
    case GgufType::q5_k: block = q5_k; break;
    case GgufType::q6_k: block = q6_k; break;
  }
  if (block == nullptr) return;
  const GgufTypeInfo& info = *gguf_type_info(static_cast<uint32_t>(type));
  const unsigned char* in = static_cast<const unsigned char*>(data);
  for (int64_t i = 0; i < elements; i += info.block, in += info.block_bytes) block(in, out + i);
}

}  // namespace linnet
