// The plain double-precision loops of dense, dense_heads and dense_quantised: their specification.
#include <cmath>
#include <vector>

#include "core/element.h"
#include "dense.h"
#include "dense_pack.h"

namespace linnet::ref {
namespace {

// A row of x as `rounding` leaves it; the rounding to 8 bits is defined in float, so that every precision makes the same codes.
std::vector<double> row_of(const View& x, int64_t b, int64_t t) {
  std::vector<double> row(static_cast<size_t>(x.size[2]));
  for (int64_t i = 0; i < x.size[2]; ++i) row[static_cast<size_t>(i)] = element(x, b, t, i);
  return row;
}
// `digits` times: the group of what is left in 8 bits, by its largest magnitude.
void round_to_bytes(std::vector<double>* row, int digits) {
  for (size_t first = 0; first < row->size(); first += kGroup) {
    float left[kGroup];
    for (size_t i = 0; i < kGroup; ++i) {
      left[i] = static_cast<float>((*row)[first + i]);
      (*row)[first + i] = 0;
    }
    for (int digit = 0; digit < digits; ++digit) {
      float largest = 0;
      for (const float x : left) largest = std::fmax(largest, std::fabs(x));
      const float scale = largest * (1.0f / 127), inverse = largest == 0 ? 0 : 127 / largest;
      for (size_t i = 0; i < kGroup; ++i) {
        const float code = std::nearbyint(left[i] * inverse);
        (*row)[first + i] += static_cast<double>(scale) * static_cast<double>(code);
        left[i] = std::fma(-scale, code, left[i]);
      }
    }
  }
}
int digits_of(QuantisedRounding rounding) {
  return rounding == QuantisedRounding::int16 ? 2 : rounding == QuantisedRounding::int8 ? 1 : 0;
}

template <class Weight>
void multiply(const View& x, const View& out, const View& bias, bool to_bf16, int digits, const Weight& weight) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      std::vector<double> row = row_of(x, b, t);
      if (to_bf16) {
        for (double& value : row) value = to_f64(round_to<Bf16>(value));
      }
      if (digits > 0) round_to_bytes(&row, digits);
      for (int64_t o = 0; o < out.size[2]; ++o) {
        double total = bias.given() ? element(bias, o) : 0;
        for (int64_t i = 0; i < x.size[2]; ++i) total += row[static_cast<size_t>(i)] * weight(o, i);
        set_element(out, total, b, t, o);
      }
    }
  }
}

}  // namespace

void dense_forward(const DenseArgs& args, const DenseOut& out, const Launch&) {
  multiply(args.x, out.out, args.bias, args.rounding == DenseRounding::bf16, 0,
           [&](int64_t o, int64_t i) { return element(args.weight, o, i); });
}
int64_t dense_workspace(const DenseArgs&, Pass, int) { return 0; }

void dense_quantised_forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch&) {
  multiply(args.x, out.out, args.bias, false, digits_of(args.rounding),
           [&](int64_t o, int64_t i) { return dense_weight(args.bits, args.codes, args.scale, args.offset, o, i); });
}
int64_t dense_quantised_workspace(const DenseQuantisedArgs&, Pass, int) { return 0; }

void dense_heads_forward(const DenseHeadsArgs& args, const DenseOut& out, const Launch&) {
  const int64_t B = args.x.size[0], T = args.x.size[1], H = args.x.size[2], K = args.x.size[3], F = args.weight.size[2];
  for (int64_t row = 0; row < B * T * H; ++row) {
    const int64_t b = row / (T * H), t = row / H % T, h = row % H;
    for (int64_t f = 0; f < F; ++f) {
      double total = args.bias.given() ? element(args.bias, h, f) : 0;
      for (int64_t k = 0; k < K; ++k) total += element(args.x, b, t, h, k) * element(args.weight, h, k, f);
      set_element(out.out, total, b, t, h, f);
    }
  }
}
int64_t dense_heads_workspace(const DenseHeadsArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
