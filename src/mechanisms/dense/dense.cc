#include "dense.h"

#include <string>

#include "core/op.h"
#include "dense_cuda.h"
#include "dense_dots.h"

namespace linnet {
namespace {

double bytes_of(const View& view) {
  return view.given() ? static_cast<double>(view.elements()) * static_cast<double>(dtype_size(view.dtype)) : 0;
}
Cost cost_of(const View& x, double outputs, double weights) {
  const double rows = static_cast<double>(x.size[0] * x.size[1]), inputs = static_cast<double>(x.size[2]);
  return {2 * rows * inputs * outputs, weights + bytes_of(x) + rows * outputs * static_cast<double>(dtype_size(x.dtype))};
}
Cost cost_dense(const DenseArgs& args, const Dims&, Pass) {
  return cost_of(args.x, static_cast<double>(args.weight.size[0]), bytes_of(args.weight) + bytes_of(args.bias));
}
Cost cost_quantised(const DenseQuantisedArgs& args, const Dims& dims, Pass) {
  return cost_of(args.x, static_cast<double>(dims["O"]),
                 bytes_of(args.codes) + bytes_of(args.scale) + bytes_of(args.offset) + bytes_of(args.bias));
}

Cost cost_heads(const DenseHeadsArgs& args, const Dims& dims, Pass) {
  const double rows = static_cast<double>(dims["B"] * dims["T"] * dims["H"]), K = static_cast<double>(dims["K"]);
  const double F = static_cast<double>(dims["F"]), size = static_cast<double>(dtype_size(args.x.dtype));
  return {2 * rows * K * F, bytes_of(args.weight) + bytes_of(args.bias) + rows * (K + F) * size};
}

Status check_quantised(const DenseQuantisedArgs& args, const Dims& dims) {
  if (dims["I"] % 32 != 0) {
    return bad_input("dense_quantised: x has " + std::to_string(dims["I"]) + " channels, expected a multiple of 32");
  }
  const int64_t panels = args.codes.size[0], least = panels == 0 ? 0 : 16 * (panels - 1) + 1;
  if (args.outputs != 0 && (args.outputs < least || args.outputs > 16 * panels)) {
    return bad_input("dense_quantised: outputs is " + std::to_string(args.outputs) + ", expected " + std::to_string(least) +
                     " to " + std::to_string(16 * panels) + " (codes has " + std::to_string(panels) + " panels of 16)");
  }
  return {};
}

}  // namespace

// clang-format off
const Op& dense_op() {
  using A = DenseArgs;
  using O = DenseOut;
  static const Op op =
      Declare<A, O, DenseNoGrads>("dense", "dense", "a linear map with weights as checkpoints store them")
          .equation("out = x weight^T + bias")
          .input("x", &A::x, "B T I", "rows")
          .input("weight", &A::weight, "O I", "one row for each output").element(Element::weight)
          .input("bias", &A::bias, "O", "added to each row").element(Element::weight).optional()
          .output("out", &O::out, "B T O", "the mapped rows")
          .option("rounding", &A::rounding, {"none", "bf16"}, "what x is rounded to first; bf16 runs on bf16 dot products where the weights are bf16")
          .always_causal()
          .cost<cost_dense>()
          .bench("B=1 T=512 I=576 O=1536 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=512 I=1536 O=576 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1024 I=2048 O=2048 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1|4 I=2048 O=16384 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1 I=576 O=576 dtype=f32 pass=fwd")
          .gpu_bench("B=1 T=4096 I=4096 O=4096 dtype=bf16 pass=fwd")
          .gpu_bench("B=1|8 T=1 I=4096 O=16384 dtype=bf16 pass=fwd")
          .impl<ref::dense_forward, nullptr, ref::dense_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(dense) LINNET_DENSE_BF16(dense)
          .cuda_rows<cuda::DenseRows, cuda::DenseRow::tile, cuda::DenseRow::blas, cuda::DenseRow::row>();
  return op;
}

const Op& dense_heads_op() {
  using A = DenseHeadsArgs;
  using O = DenseOut;
  static const Op op =
      Declare<A, O, DenseNoGrads>("dense_heads", "dense", "a linear map of its own for each head")
          .equation("out_h = x_h weight_h + bias_h")
          .input("x", &A::x, "B T H K", "rows")
          .input("weight", &A::weight, "H K F", "a matrix for each head").element(Element::param)
          .input("bias", &A::bias, "H F", "added to each row").element(Element::param).optional()
          .output("out", &O::out, "B T H F", "the mapped rows")
          .always_causal()
          .cost<cost_heads>()
          .bench("B=1 T=512 H=9 K=64 F=32|64 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1 H=32 K=128 F=64 dtype=f32 pass=fwd")
          .impl<ref::dense_heads_forward, nullptr, ref::dense_heads_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(dense_heads)
          .cuda<cuda::dense_heads_forward, nullptr, cuda::dense_heads_workspace, cuda::dense_heads_refuses>();
  return op;
}

const Op& dense_quantised_op() {
  using A = DenseQuantisedArgs;
  using O = DenseOut;
  static const Op op =
      Declare<A, O, DenseNoGrads>("dense_quantised", "dense", "a linear map with weights of 8 or 4 bits in groups of 32")
          .equation("out = x weight^T + bias,  weight = scale (code - zero), or scale code + offset")
          .input("x", &A::x, "B T I", "rows; I a multiple of 32")
          .input("codes", &A::codes, "panels groups C", "codes in panels of 16 outputs, groups of 32 inputs (dense_pack)").element(Element::code)
          .input("scale", &A::scale, "panels groups W", "of each group").element(Element::weight)
          .input("offset", &A::offset, "panels groups W", "of each group; none: codes count from 128 (8 bits) or 8 (4 bits)").element(Element::weight).optional()
          .input("bias", &A::bias, "O", "added to each row").element(Element::weight).optional()
          .output("out", &O::out, "B T O", "the mapped rows")
          .option("outputs", &A::outputs, 0, kAnyCount, "how many outputs; the last panel may hold fewer than 16; 0: 16 for each panel")
          .option("bits", &A::bits, {"8", "4"}, "of a code")
          .option("rounding", &A::rounding, {"none", "int8", "int16"}, "what each group of x is rounded to first: 8 bits, or 8 bits and 8 more of what is left; both run on integer dot products")
          .letter("groups", "I//32")
          .letter("W", "16")
          .letter("O", "outputs+16*panels*(1//(outputs+1))")  // outputs, or 16 panels where outputs is 0
          .letter_by("C", "bits", {{"8", "512"}, {"4", "256"}})
          .check<check_quantised>()
          .always_causal()
          .cost<cost_quantised>()
          .bench("B=1 T=1 I=2048 panels=1024 bits=8|4 rounding=none|int8|int16 dtype=f32 pass=fwd")
          .bench("B=1 T=512 I=576 panels=96 bits=8|4 rounding=none|int8|int16 dtype=f32 pass=fwd")
          .impl<ref::dense_quantised_forward, nullptr, ref::dense_quantised_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(dense_quantised) LINNET_DENSE_VNNI(dense_quantised)
          .cuda<cuda::dense_quantised_forward, nullptr, cuda::dense_quantised_workspace, cuda::dense_quantised_refuses>();
  return op;
}
// clang-format on

Status dense(const DenseArgs& args, const DenseOut& out, const Context& context) {
  return run(dense_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t dense_workspace(const DenseArgs& args, const Context& context) {
  return workspace_bytes(dense_op(), Pass::forward, &args, context);
}
Status dense_heads(const DenseHeadsArgs& args, const DenseOut& out, const Context& context) {
  return run(dense_heads_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t dense_heads_workspace(const DenseHeadsArgs& args, const Context& context) {
  return workspace_bytes(dense_heads_op(), Pass::forward, &args, context);
}
Status dense_quantised(const DenseQuantisedArgs& args, const DenseOut& out, const Context& context) {
  return run(dense_quantised_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t dense_quantised_workspace(const DenseQuantisedArgs& args, const Context& context) {
  return workspace_bytes(dense_quantised_op(), Pass::forward, &args, context);
}

}  // namespace linnet
