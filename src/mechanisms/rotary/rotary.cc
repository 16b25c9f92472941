#include "rotary.h"

#include <cmath>
#include <string>

#include "core/element.h"
#include "core/op.h"

namespace linnet {
namespace {

Cost cost_rotary(const RotaryArgs& args, const Dims&, Pass) {
  const double elements = static_cast<double>(args.x.elements()), size = static_cast<double>(dtype_size(args.x.dtype));
  return {3 * elements, 2 * size * elements};
}

Status check_rotary(const RotaryArgs& args, const Dims& dims) {
  const int64_t width = args.dims == 0 ? dims["D"] : args.dims;
  if (width % 2 != 0 || width > dims["D"]) {
    return bad_input("rotary: dims is " + std::to_string(width) + ", expected an even number of at most " +
                     std::to_string(dims["D"]) + " (the channels of x)");
  }
  if (args.scaling == RotaryScaling::llama3 && args.high_freq_factor <= args.low_freq_factor) {
    return bad_input("rotary: high_freq_factor is not above low_freq_factor, as scaling llama3 needs it");
  }
  return {};
}

}  // namespace

double rotary_frequency(const RotaryArgs& args, int64_t i) {
  if (args.frequencies.given()) return element(args.frequencies, i);
  const double width = static_cast<double>(args.dims == 0 ? args.x.size[3] : args.dims);
  const double f = std::pow(args.theta, -2 * static_cast<double>(i) / width);
  if (args.scaling == RotaryScaling::none) return f;
  if (args.scaling == RotaryScaling::linear) return f / args.factor;
  const double turns = static_cast<double>(args.original_length) * f / (2 * 3.14159265358979323846);  // in the original length
  if (turns > args.high_freq_factor) return f;
  if (turns < args.low_freq_factor) return f / args.factor;
  const double s = (turns - args.low_freq_factor) / (args.high_freq_factor - args.low_freq_factor);
  return (1 - s) * f / args.factor + s * f;
}

// clang-format off
const Op& rotary_op() {
  using A = RotaryArgs;
  using O = RotaryOut;
  using G = RotaryGrads;
  static const Op op =
      Declare<A, O, G>("rotary", "rotary", "positions as rotations of pairs of channels")
          .equation("(u, v) -> (u cos a - v sin a, u sin a + v cos a),  a = position f_i,  f_i = theta^(-2 i / dims)")
          .input("x", &A::x, "B T H D", "queries or keys").grad(&G::dx)
          .input("positions", &A::positions, "B T", "of each token; none: offset + t").element(Element::index).optional()
          .input("frequencies", &A::frequencies, "F", "f_i of each pair; none: from theta and scaling").element(Element::acc).values(Values::unit_interval).optional()
          .output("out", &O::out, "B T H D", "the turned rows").grad(&G::dout)
          .option("theta", &A::theta, 1e-300, kAnyReal, "base of the frequencies")
          .option("pairs", &A::pairs, {"half", "interleaved"}, "pair i is channels i and i + dims / 2, or 2 i and 2 i + 1")
          .option("dims", &A::dims, 0, kAnyCount, "channels that turn, the others are copied; even; 0: all")
          .option("offset", &A::offset, -kAnyCount, kAnyCount, "position of the first token").unsampled()
          .option("scaling", &A::scaling, {"none", "linear", "llama3"}, "of the frequencies, for contexts longer than trained")
          .option("factor", &A::factor, 1e-300, kAnyReal, "of the scaling")
          .option("low_freq_factor", &A::low_freq_factor, 0, kAnyReal, "llama3: fewer turns in the original length are divided by factor")
          .option("high_freq_factor", &A::high_freq_factor, 0, kAnyReal, "llama3: more turns stay as they are")
          .option("original_length", &A::original_length, 1, kAnyCount, "llama3: length of the training contexts")
          .letter("F", "(dims+D*(1//(dims+1)))//2")  // half of dims, or of D where dims is 0
          .check<check_rotary>()
          .always_causal()
          .cost<cost_rotary>()
          .bench("B=1 T=8192 H=9 D=64 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=9 D=64 pairs=interleaved dtype=f32 pass=fwd")
          .bench("B=1 T=1 H=9 D=64 offset=400 dtype=f32 pass=fwd")
          .gpu_bench("B=16 T=2048 H=16 D=128 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 D=128 pairs=interleaved dtype=bf16 pass=fwd")
          .impl<ref::rotary_forward, ref::rotary_backward, ref::rotary_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(rotary)
          .cuda<cuda::rotary_forward, cuda::rotary_backward, cuda::rotary_workspace, cuda::rotary_refuses>();
  return op;
}
// clang-format on

Status rotary(const RotaryArgs& args, const RotaryOut& out, const Context& context) {
  return run(rotary_op(), Pass::forward, &args, &out, nullptr, context);
}
Status rotary_backward(const RotaryArgs& args, const RotaryOut& out, const RotaryGrads& grads, const Context& context) {
  return run(rotary_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t rotary_workspace(const RotaryArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(rotary_op(), pass, &args, context);
}

}  // namespace linnet
