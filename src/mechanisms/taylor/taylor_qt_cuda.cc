// taylor_qt_layer on the GPU: the attention of taylor_cuda.cc on k + ape in f32, then the shortcut (taylor_qt_cuda.cu).
#include "taylor_qt_cuda.h"

#include "mechanisms/shared/pieces.h"
#include "mechanisms/shared/product.h"

LINNET_USES_IMAGES(taylor)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "taylor/taylor_qt_cuda";

struct Scratch {
  TaylorQtRows rows;
  float *out = nullptr, *den = nullptr, *parts = nullptr;  // backward: the attention again, [B, T, H, K], [B, T, H]
  View dkeys;                                              // of a call that wants dk or dape
  char* inner = nullptr;
};
View like(const float* data, const View& x) { return View::dense(data, Dtype::f32, x.size, 4); }
TaylorCompactL2Args attention_of(const TaylorQtArgs& args, const float* keys) {
  TaylorCompactL2Args inner;
  inner.q = args.q;
  inner.k = like(keys, args.k);
  inner.v = args.v;
  inner.constant = args.constant;
  inner.causal = args.causal;
  inner.eps = args.eps;
  return inner;
}
Scratch cut(Arena& arena, const TaylorQtArgs& args, Pass pass) {
  Scratch s;
  const int64_t elements = args.k.elements(), rows = args.k.size[3] == 0 ? 0 : elements / args.k.size[3];
  s.rows.args = args;
  s.rows.keys = arena.take<float>(elements);
  s.rows.rows = arena.take<float>(elements);
  const TaylorCompactL2Args inner = attention_of(args, s.rows.keys);
  int64_t bytes = taylor_compact_l2_workspace(inner, Pass::forward, 1);
  if (pass == Pass::backward) {
    s.out = arena.take<float>(elements);
    s.den = arena.take<float>(rows);
    s.dkeys = like(arena.take<float>(elements), args.k);
    s.rows.weight_terms = arena.take<float>(elements);
    s.rows.bias_terms = arena.take<float>(elements);
    s.parts = arena.take<float>(product_slices(rows) * args.k.size[3]);
    const int64_t back = taylor_compact_l2_workspace(inner, Pass::backward, 1);
    bytes = back > bytes ? back : bytes;
  }
  s.inner = arena.take<char>(bytes);
  return s;
}
void run(const Launch& launch, const char* kernel, const TaylorQtRows& rows) {
  enqueue(launch, {kImage, kernel, 256}, {divide_up(rows.args.k.elements(), 256)}, rows);
}
// to = sums of terms [rows, K] over all rows
void sum_rows(const Launch& launch, const Scratch& s, const float* terms, const View& to) {
  const View& k = s.rows.args.k;
  const int64_t rows = k.size[0] * k.size[1] * k.size[2];
  if (!to.given()) return;
  run_column_sums(launch, terms, rows, k.size[3], s.parts);
  sum_parts(launch, s.parts, product_slices(rows), to);
}

}  // namespace

const char* taylor_qt_layer_refuses(const TaylorQtArgs& args, Pass pass) {
  return taylor_compact_l2_refuses(attention_of(args, nullptr), pass);
}
int64_t taylor_qt_layer_workspace(const TaylorQtArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, args, pass);
  return arena.used();
}
void taylor_qt_layer_forward(const TaylorQtArgs& args, const TaylorQtOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Scratch s = cut(arena, args, Pass::forward);
  s.rows.out = out;
  Launch inner = launch;
  inner.workspace = s.inner;
  run(launch, "qt_keys", s.rows);
  TaylorOut attention;
  attention.out = like(s.rows.rows, args.v);
  taylor_compact_l2_forward(attention_of(args, s.rows.keys), attention, inner);
  run(launch, "qt_shortcut", s.rows);
}
void taylor_qt_layer_backward(const TaylorQtArgs& args, const TaylorQtOut&, const TaylorQtGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  Scratch s = cut(arena, args, Pass::backward);
  s.rows.grads = grads;
  Launch inner = launch;
  inner.workspace = s.inner;
  run(launch, "qt_keys", s.rows);
  const TaylorCompactL2Args attention = attention_of(args, s.rows.keys);
  TaylorOut out;
  out.out = like(s.out, args.v);
  out.den = View::dense(s.den, Dtype::f32, args.q.size, 3);
  taylor_compact_l2_forward(attention, out, inner);
  TaylorCompactL2Grads back;
  back.dout = grads.dout;
  back.dq = grads.dq;
  if (grads.dk.given() || grads.dape.given()) back.dk = s.dkeys;
  if (grads.dv.given()) back.dv = like(s.rows.rows, args.v);
  back.dconstant = grads.dconstant;
  taylor_compact_l2_backward(attention, out, back, inner);
  s.rows.keys = static_cast<float*>(s.dkeys.data);
  run(launch, "qt_gradients", s.rows);
  sum_parts(launch, s.rows.keys, args.k.size[0], grads.dape);
  sum_rows(launch, s, s.rows.weight_terms, grads.dbn_weight);
  sum_rows(launch, s, s.rows.bias_terms, grads.dbn_bias);
}

}  // namespace linnet::cuda
