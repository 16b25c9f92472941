#include "dense_pack.h"

#include <cmath>
#include <cstring>
#include <string>

#include "core/element.h"
#include "core/op.h"

namespace linnet {
namespace {

// Where the byte of output r and input k (8 bits) or input pair m (4 bits) lies in a block.
int64_t place(int64_t r, int64_t k) { return k / 4 * 64 + r * 4 + k % 4; }

}  // namespace

void dense_pack_codes(QuantisedBits bits, const void* blocks, int64_t row_stride, int64_t block_stride, int64_t outputs,
                      int64_t groups, uint8_t* codes) {
  const int64_t bytes = dense_block_bytes(bits), each = bytes / kPanel;
  const uint8_t flip = bits == QuantisedBits::eight ? 0x80 : 0;  // signed codes plus 128
  for (int64_t o = 0; o < dense_panels(outputs) * kPanel; ++o) {
    const int64_t r = o % kPanel;
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* to = codes + (o / kPanel * groups + g) * bytes + 4 * r;
      if (o >= outputs) {
        for (int64_t k = 0; k < each; ++k) to[k / 4 * 64 + k % 4] = 0;
        continue;
      }
      const uint8_t* from = static_cast<const uint8_t*>(blocks) + o * row_stride + g * block_stride;
      for (int64_t k = 0; k < each; k += 4) {
        uint32_t four;
        std::memcpy(&four, from + k, 4);
        four ^= flip * 0x01010101u;
        std::memcpy(to + k / 4 * 64, &four, 4);
      }
    }
  }
}

void dense_pack_scales(Dtype dtype, const void* first, int64_t row_stride, int64_t block_stride, int64_t outputs,
                       int64_t groups, void* packed) {
  const size_t size = static_cast<size_t>(dtype_size(dtype));
  for (int64_t o = 0; o < dense_panels(outputs) * kPanel; ++o) {
    for (int64_t g = 0; g < groups; ++g) {
      char* to = static_cast<char*>(packed) + static_cast<size_t>((o / kPanel * groups + g) * kPanel + o % kPanel) * size;
      if (o < outputs) {
        std::memcpy(to, static_cast<const char*>(first) + o * row_stride + g * block_stride, size);
      } else {
        std::memset(to, 0, size);
      }
    }
  }
}

Status dense_quantise(const View& weight, QuantisedBits bits, const View& codes, const View& scale, const View& offset) {
  if (weight.rank != 2 || !is_float(weight.dtype))
    return bad_input("dense_quantise: weight is no matrix of floats, expected [O, I]");
  const int64_t O = weight.size[0], I = weight.size[1], panels = dense_panels(O), groups = I / kGroup;
  if (I % kGroup != 0) {
    return bad_input("dense_quantise: weight has " + std::to_string(I) + " columns, expected a multiple of 32");
  }
  const bool eight = bits == QuantisedBits::eight;
  const auto fits = [&](const View& view, int64_t last) {
    return view.rank == 3 && view.size[0] == panels && view.size[1] == groups && view.size[2] == last && view.stride[2] == 1 &&
           view.stride[1] == last && view.stride[0] == groups * last;
  };
  if (codes.dtype != Dtype::u8 || !fits(codes, dense_block_bytes(bits))) {
    return bad_input("dense_quantise: codes has another shape than [" + std::to_string(panels) + ", " + std::to_string(groups) +
                     ", " + std::to_string(dense_block_bytes(bits)) + "] of u8");
  }
  for (const View* view : {&scale, &offset}) {
    if (view == &offset && !offset.given()) continue;
    if (is_float(view->dtype) && view->dtype != Dtype::f64 && fits(*view, kPanel)) continue;
    return bad_input(std::string("dense_quantise: ") + (view == &scale ? "scale" : "offset") + " has another shape than [" +
                     std::to_string(panels) + ", " + std::to_string(groups) + ", 16] of f32, bf16 or f16");
  }
  for (int64_t o = 0; o < panels * kPanel; ++o) {
    const int64_t p = o / kPanel, r = o % kPanel;
    for (int64_t g = 0; g < groups; ++g) {
      double w[kGroup], low = HUGE_VAL, high = -HUGE_VAL, extreme = 0;
      for (int64_t k = 0; k < kGroup; ++k) {
        w[k] = o < O ? element(weight, o, g * kGroup + k) : 0;
        low = std::fmin(low, w[k]);
        high = std::fmax(high, w[k]);
        if (std::fabs(w[k]) > std::fabs(extreme)) extreme = w[k];
      }
      const double step = offset.given() ? (high - low) / (eight ? 255 : 15) : eight ? std::fabs(extreme) / 127 : extreme / -8;
      set_element(scale, step, p, g, r);
      if (offset.given()) set_element(offset, low, p, g, r);
      const double s = element(scale, p, g, r), base = offset.given() ? element(offset, p, g, r) : 0;
      const double zero = offset.given() ? 0 : eight ? 128 : 8, most = eight ? 255 : 15;
      uint8_t* block = codes.at<uint8_t>(p, g);
      uint8_t code[kGroup];
      for (int64_t k = 0; k < kGroup; ++k) {
        const double x = s == 0 ? zero : std::nearbyint((w[k] - base) / s) + zero;
        code[k] = static_cast<uint8_t>(std::fmin(most, std::fmax(0, x)));
      }
      for (int64_t k = 0; eight && k < kGroup; ++k) block[place(r, k)] = code[k];
      for (int64_t m = 0; !eight && m < kGroup / 2; ++m) {
        block[place(r, m)] = static_cast<uint8_t>(code[m] | code[m + kGroup / 2] << 4);
      }
    }
  }
  return {};
}

double dense_weight(QuantisedBits bits, const View& codes, const View& scale, const View& offset, int64_t output,
                    int64_t input) {
  const int64_t p = output / kPanel, r = output % kPanel, g = input / kGroup, k = input % kGroup;
  const uint8_t* block = codes.at<const uint8_t>(p, g);
  const bool eight = bits == QuantisedBits::eight;
  const int code = eight ? block[place(r, k)] : block[place(r, k % 16)] >> (k / 16 * 4) & 15;
  const double s = element(scale, p, g, r);
  return offset.given() ? s * code + element(offset, p, g, r) : s * (code - (eight ? 128 : 8));
}

}  // namespace linnet
