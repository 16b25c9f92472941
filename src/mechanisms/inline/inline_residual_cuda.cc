// inline_residual on the GPU: the attention of inline_cuda.cc in f32, then the residual (inline_residual_cuda.cu).
#include "inline_residual_cuda.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(inline)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "inline/inline_residual_cuda";

InlineArgs attention_of(const InlineResidualArgs& args) {
  InlineArgs inner;
  inner.q = args.q;
  inner.k = args.k;
  inner.v = args.v;
  inner.mask = args.mask;
  inner.kernel = args.kernel;
  inner.causal = args.causal;
  inner.scale = args.scale;
  return inner;
}
InlineResidualRows cut(Arena& arena, const InlineResidualArgs& args, Pass pass, Launch* inner) {
  InlineResidualRows rows;
  rows.args = args;
  const int64_t units = args.q.size[0] * args.q.size[2], D = args.q.size[3];
  rows.attention = arena.take<float>(args.q.elements());
  rows.pre = arena.take<float>(units * D);
  rows.r = arena.take<float>(units * 9 * D);
  if (pass == Pass::backward) {
    rows.dr = arena.take<float>(units * 9 * D);
    rows.dpre = arena.take<float>(units * D);
  }
  inner->workspace = arena.take<char>(inline_workspace(attention_of(args), pass, 1));
  return rows;
}
View rows_view(const InlineResidualRows& rows) { return View::dense(rows.attention, Dtype::f32, rows.args.q.size, 4); }

}  // namespace

const char* inline_residual_refuses(const InlineResidualArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t inline_residual_workspace(const InlineResidualArgs& args, Pass pass, int) {
  Arena arena;
  Launch inner;
  cut(arena, args, pass, &inner);
  return arena.used();
}
void inline_residual_forward(const InlineResidualArgs& args, const InlineResidualOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Launch inner = launch;
  InlineResidualRows rows = cut(arena, args, Pass::forward, &inner);
  rows.out = out;
  InlineOut attention;
  attention.out = rows_view(rows);
  inline_forward(attention_of(args), attention, inner);
  enqueue(launch, {kImage, "residual_coefficients", 128}, {args.q.size[0] * args.q.size[2]}, rows);
  enqueue(launch, {kImage, "residual_add", 256}, {divide_up(args.q.elements(), 256)}, rows, false);
}
void inline_residual_backward(const InlineResidualArgs& args, const InlineResidualOut&, const InlineResidualGrads& grads,
                              const Launch& launch) {
  Arena arena(launch.workspace);
  Launch inner = launch;
  InlineResidualRows rows = cut(arena, args, Pass::backward, &inner);
  rows.grads = grads;
  InlineGrads attention;
  attention.dout = grads.dout;
  attention.dq = grads.dq;
  attention.dk = grads.dk;
  if (grads.dv.given()) attention.dv = rows_view(rows);
  inline_backward(attention_of(args), {}, attention, inner);
  const int64_t H = args.q.size[2], D = args.q.size[3], units = args.q.size[0] * H;
  enqueue(launch, {kImage, "residual_coefficients", 128}, {units}, rows);
  if (grads.dv.given()) enqueue(launch, {kImage, "residual_add", 256}, {divide_up(args.q.elements(), 256)}, rows, true);
  enqueue(launch, {kImage, "residual_gradients", 128}, {units}, rows);
  enqueue(launch, {kImage, "residual_parameters", 256}, {divide_up(H * 10 * D * (D + 1), 256)}, rows);
}

}  // namespace linnet::cuda
