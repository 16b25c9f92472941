#include "embedding.h"

#include "core/op.h"

namespace linnet {
namespace {

Cost cost_rows(double rows, double width, const View& table) {
  return {rows * width, 2 * rows * width * static_cast<double>(dtype_size(table.dtype))};
}
Cost cost_embedding(const EmbeddingArgs& args, const Dims&, Pass) {
  return cost_rows(static_cast<double>(args.ids.elements()), static_cast<double>(args.table.size[1]), args.table);
}
Cost cost_quantised(const EmbeddingQuantisedArgs& args, const Dims&, Pass) {
  return cost_rows(static_cast<double>(args.ids.elements()), 32 * static_cast<double>(args.codes.size[1]), args.scales);
}

}  // namespace

// clang-format off
const Op& embedding_op() {
  using A = EmbeddingArgs;
  using O = EmbeddingOut;
  static const Op op =
      Declare<A, O, EmbeddingNoGrads>("embedding", "embedding", "rows of a table, one for each token")
          .equation("out_t = scale table[ids_t]")
          .input("table", &A::table, "rows D", "one row for each id")
          .input("ids", &A::ids, "B T", "tokens").element(Element::index).values(Values::below, "rows")
          .output("out", &O::out, "B T D", "the rows; of the table's type or f32, as the caller allocates them").element(Element::param)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies every row").sampled_to(100)
          .cost<cost_embedding>()
          .bench("B=1 T=512 rows=49152 D=576 dtype=f32|bf16 pass=fwd")
          .gpu_bench("B=16 T=2048 rows=49152 D=2048 dtype=bf16 pass=fwd")
          .impl<ref::embedding_forward, nullptr, ref::embedding_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(embedding)
          .cuda<cuda::embedding_forward, nullptr, cuda::embedding_workspace, cuda::embedding_refuses>();
  return op;
}

const Op& embedding_quantised_op() {
  using A = EmbeddingQuantisedArgs;
  using O = EmbeddingOut;
  static const Op op =
      Declare<A, O, EmbeddingNoGrads>("embedding_quantised", "embedding", "rows of a table of 8 or 4 bits in the panels of dense_quantised")
          .equation("out_t = scale row[ids_t],  row = scales (code - zero), or scales code + offset")
          .input("scales", &A::scales, "panels groups W", "of each group of 32 columns")
          .input("codes", &A::codes, "panels groups C", "codes in panels of 16 rows (dense_pack)").element(Element::code)
          .input("offset", &A::offset, "panels groups W", "of each group; none: codes count from 128 (8 bits) or 8 (4 bits)").optional()
          .input("ids", &A::ids, "B T", "tokens").element(Element::index).values(Values::below, "16*panels")
          .output("out", &O::out, "B T 32*groups", "the rows; of the scales' type or f32, as the caller allocates them").element(Element::param)
          .option("bits", &A::bits, {"8", "4"}, "of a code")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies every row").sampled_to(100)
          .letter("W", "16")
          .letter_by("C", "bits", {{"8", "512"}, {"4", "256"}})
          .cost<cost_quantised>()
          .bench("B=1 T=512 panels=3072 groups=18 bits=8|4 dtype=f32 pass=fwd")
          .impl<ref::embedding_quantised_forward, nullptr, ref::embedding_quantised_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(embedding_quantised)
          .cuda<cuda::embedding_quantised_forward, nullptr, cuda::embedding_quantised_workspace, cuda::embedding_quantised_refuses>();
  return op;
}
// clang-format on

Status embedding(const EmbeddingArgs& args, const EmbeddingOut& out, const Context& context) {
  return run(embedding_op(), Pass::forward, &args, &out, nullptr, context);
}
Status embedding_quantised(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Context& context) {
  return run(embedding_quantised_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t embedding_workspace(const EmbeddingArgs& args, const Context& context) {
  return workspace_bytes(embedding_op(), Pass::forward, &args, context);
}
int64_t embedding_quantised_workspace(const EmbeddingQuantisedArgs& args, const Context& context) {
  return workspace_bytes(embedding_quantised_op(), Pass::forward, &args, context);
}

}  // namespace linnet
