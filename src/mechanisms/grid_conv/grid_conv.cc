#include "grid_conv.h"

#include "core/op.h"

namespace linnet {
namespace {

Status check_grid(const GridConvArgs& args, const Dims& dims) {
  const int64_t T = dims["T"];
  // The declaration has compared T with the product, which overflows where the two numbers are huge.
  const bool fits = args.width == 0 ? T == 0 : T % args.width == 0 && T / args.width == args.height;
  if (!fits) {
    return bad_input("grid_conv: x has " + std::to_string(T) +
                     " tokens, expected height * width = " + std::to_string(args.height) + " * " + std::to_string(args.width));
  }
  if (dims["side"] % 2 == 1) return {};
  return bad_input("grid_conv: weight has " + std::to_string(dims["side"]) + " taps in each direction, expected an odd number");
}

// Forward: W^2 multiply-adds per element. Backward: the same for dx and for dweight.
Cost cost_grid(const GridConvArgs& args, const Dims& dims, Pass pass) {
  const double elements = static_cast<double>(args.x.elements()), taps = static_cast<double>(dims["side"] * dims["side"]);
  const double bytes = elements * static_cast<double>(dtype_size(args.x.dtype));
  if (pass == Pass::forward) return {2 * taps * elements, 2 * bytes};
  return {4 * taps * elements, 3 * bytes};
}

}  // namespace

// clang-format off
const Op& grid_conv_op() {
  using A = GridConvArgs;
  using O = GridConvOut;
  using G = GridConvGrads;
  static const Op op =
      Declare<A, O, G>("grid_conv", "grid_conv", "depthwise convolution on a grid of tokens")
          .equation("out[y, x] = bias + sum_ij weight_ij x[y + i - W/2, x + j - W/2], channel by channel")
          .input("x", &A::x, "B T E", "tokens of the grid, row by row").grad(&G::dx)
          .input("weight", &A::weight, "E side side", "the taps of each channel, rows then columns; odd").element(Element::param).grad(&G::dweight)
          .input("bias", &A::bias, "E", "added to the sum").element(Element::param).optional().grad(&G::dbias)
          .output("out", &O::out, "B T E", "the convolved tokens").grad(&G::dout)
          .option("height", &A::height, 0, kAnyCount, "rows of the grid")
          .option("width", &A::width, 0, kAnyCount, "columns of the grid")
          .letter("T", "height*width")
          .check<check_grid>()
          .earlier_rows(EarlierRows::nothing)  // a token sees those below it
          .cost<cost_grid>()
          .bench("B=1|8 E=384 side=3|5 height=14 width=14 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 E=384 side=5 height=56 width=56 dtype=f32 pass=fwd|fwd+bwd")
          .impl<ref::grid_conv_forward, ref::grid_conv_backward, ref::grid_conv_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(grid_conv)
          .cuda<cuda::grid_conv_forward, cuda::grid_conv_backward, cuda::grid_conv_workspace, cuda::grid_conv_refuses>();
  return op;
}
// clang-format on

Status grid_conv(const GridConvArgs& args, const GridConvOut& out, const Context& context) {
  return run(grid_conv_op(), Pass::forward, &args, &out, nullptr, context);
}
Status grid_conv_backward(const GridConvArgs& args, const GridConvOut& out, const GridConvGrads& grads,
                          const Context& context) {
  return run(grid_conv_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t grid_conv_workspace(const GridConvArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(grid_conv_op(), pass, &args, context);
}

}  // namespace linnet
