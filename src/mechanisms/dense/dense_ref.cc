// The plain double-precision loops of dense and dense_quantised: their specification.
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
void round_to_int8(std::vector<double>* row) {
  for (size_t first = 0; first < row->size(); first += kGroup) {
    float largest = 0;
    for (size_t i = first; i < first + kGroup; ++i) largest = std::fmax(largest, std::fabs(static_cast<float>((*row)[i])));
    const float scale = largest * (1.0f / 127), inverse = largest == 0 ? 0 : 127 / largest;
    for (size_t i = first; i < first + kGroup; ++i) {
      (*row)[i] = static_cast<double>(scale) * std::nearbyint(static_cast<float>((*row)[i]) * inverse);
    }
  }
}

template <class Weight>
void multiply(const View& x, const View& out, const View& bias, bool to_bf16, bool to_int8, const Weight& weight) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      std::vector<double> row = row_of(x, b, t);
      if (to_bf16) {
        for (double& value : row) value = to_f64(round_to<Bf16>(value));
      }
      if (to_int8) round_to_int8(&row);
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
  multiply(args.x, out.out, args.bias, args.rounding == DenseRounding::bf16, false,
           [&](int64_t o, int64_t i) { return element(args.weight, o, i); });
}
int64_t dense_workspace(const DenseArgs&, Pass, int) { return 0; }

void dense_quantised_forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch&) {
  multiply(args.x, out.out, args.bias, false, args.rounding == QuantisedRounding::int8,
           [&](int64_t o, int64_t i) { return dense_weight(args.bits, args.codes, args.scale, args.offset, o, i); });
}
int64_t dense_quantised_workspace(const DenseQuantisedArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
