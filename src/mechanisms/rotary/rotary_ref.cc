// The plain double-precision loop of rotary: its specification.
#include <cmath>

#include "core/element.h"
#include "rotary.h"

namespace linnet::ref {
namespace {

// sign -1 turns back.
void turn(const RotaryArgs& args, const View& x, const View& out, double sign) {
  const int64_t D = x.size[3], half = (args.dims == 0 ? D : args.dims) / 2;
  const bool interleaved = args.pairs == RotaryPairs::interleaved;
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      const double position = args.positions.given() ? element(args.positions, b, t) : static_cast<double>(args.offset + t);
      for (int64_t h = 0; h < x.size[2]; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const double angle = position * rotary_frequency(args, i), c = std::cos(angle), s = sign * std::sin(angle);
          const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
          const double u = element(x, b, t, h, first), v = element(x, b, t, h, second);
          set_element(out, u * c - v * s, b, t, h, first);
          set_element(out, u * s + v * c, b, t, h, second);
        }
        for (int64_t i = 2 * half; i < D; ++i) set_element(out, element(x, b, t, h, i), b, t, h, i);
      }
    }
  }
}

}  // namespace

void rotary_forward(const RotaryArgs& args, const RotaryOut& out, const Launch&) { turn(args, args.x, out.out, 1); }

// A rotation's gradient is the rotation back.
void rotary_backward(const RotaryArgs& args, const RotaryOut&, const RotaryGrads& grads, const Launch&) {
  const View& dx = grads.dx;
  if (!dx.given()) return;
  if (grads.dout.given()) return turn(args, grads.dout, dx, -1);
  for (int64_t b = 0; b < dx.size[0]; ++b) {
    for (int64_t t = 0; t < dx.size[1]; ++t) {
      for (int64_t h = 0; h < dx.size[2]; ++h) {
        for (int64_t c = 0; c < dx.size[3]; ++c) set_element(dx, 0, b, t, h, c);
      }
    }
  }
}

int64_t rotary_workspace(const RotaryArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
