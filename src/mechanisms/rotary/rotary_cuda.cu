// rotary: a thread has one pair of channels (or one channel that is copied) of a token, and walks over its heads. The angle is
// formed in double, since positions are many turns.
#include "mechanisms/shared/pieces.cuh"
#include "rotary_cuda.h"

namespace linnet::cuda {
namespace {

__device__ double frequency(const RotaryArgs& args, int D, int i) {
  if (is_given(args.frequencies)) return get(args.frequencies, i);
  const double width = args.dims == 0 ? D : static_cast<double>(args.dims);
  const double f = exp2(-2.0 * i / width * log2(args.theta));
  if (args.scaling == RotaryScaling::none) return f;
  if (args.scaling == RotaryScaling::linear) return f / args.factor;
  const double turns = static_cast<double>(args.original_length) * f / (2 * 3.14159265358979323846);
  if (turns > args.high_freq_factor) return f;
  if (turns < args.low_freq_factor) return f / args.factor;
  const double s = (turns - args.low_freq_factor) / (args.high_freq_factor - args.low_freq_factor);
  return (1 - s) * f / args.factor + s * f;
}

template <class T>
__device__ void turn(const Turn& r) {
  const int64_t index = blockIdx.x * 256ll + threadIdx.x, token = index / r.lanes;
  const int i = static_cast<int>(index % r.lanes);
  if (token >= r.tokens) return;
  const int64_t T_ = r.out.size[1], b = token / T_, t = token % T_;
  const bool copies = i >= r.half, interleaved = r.args.pairs == RotaryPairs::interleaved, given = is_given(r.x);
  float c = 1, s = 0;
  if (!copies) {
    const double position = is_given(r.args.positions)
                                ? static_cast<double>(get_index(r.args.positions, place(r.args.positions, b, t)))
                                : static_cast<double>(r.args.offset + t);
    constexpr double kTurn = 6.283185307179586476925;
    double angle = position * frequency(r.args, r.D, i);
    angle -= kTurn * rint(angle / kTurn);
    sincosf(static_cast<float>(angle), &s, &c);
    s *= r.sign;
  }
  const int first = copies ? i + r.half : interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + r.half;
  const T* x = static_cast<const T*>(r.x.data) + (given ? place(r.x, b, t) : 0);
  T* out = static_cast<T*>(r.out.data) + place(r.out, b, t);
  for (int h = 0; h < r.H; ++h, x += r.x.stride[2], out += r.out.stride[2]) {
    const float u = given ? static_cast<float>(x[first]) : 0, v = given && !copies ? static_cast<float>(x[second]) : 0;
    out[first] = static_cast<T>(fmaf(u, c, -v * s));
    if (!copies) out[second] = static_cast<T>(fmaf(u, s, v * c));
  }
}

}  // namespace

#define LINNET_TURN(suffix, T) \
  extern "C" __global__ void __launch_bounds__(256) turn_##suffix(const __grid_constant__ Turn r) { turn<T>(r); }
LINNET_TURN(f32, float)
LINNET_TURN(bf16, __nv_bfloat16)
LINNET_TURN(f16, __half)

}  // namespace linnet::cuda
