// inline on the GPU (inline_cuda.h).
#include "inline_cuda.h"

#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(inline)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "inline/inline_cuda";

MappedShape shape_of(const InlineArgs& args) {
  MappedShape m;
  m.B = args.q.size[0];
  m.T = args.q.size[1];
  m.S = args.k.size[1];
  m.H = args.q.size[2];
  m.F = args.q.size[3];
  m.V = args.v.size[3];
  m.causal = args.causal;
  return m;
}

struct Scratch {
  MappedScratch mapped;
  float *k0 = nullptr, *sums = nullptr, *back = nullptr;
};
Scratch cut(Arena& arena, const MappedShape& m, Pass pass) {
  Scratch x;
  x.mapped = cut_mapped(arena, m, pass);
  x.k0 = arena.take<float>(m.B * m.H * m.F);
  x.sums = arena.take<float>(m.B * (m.causal ? m.T : 1) * m.H * (m.V + 1));
  if (pass == Pass::backward) x.back = arena.take<float>(m.B * m.T * m.H * m.V);
  return x;
}
InlineRows rows_of(const InlineArgs& args, const MappedShape& m, const Scratch& x) {
  InlineRows r;
  r.args = args;
  r.B = m.B;
  r.T = m.T;
  r.S = m.S;
  r.H = static_cast<int32_t>(m.H);
  r.K = static_cast<int32_t>(m.F);
  r.V = static_cast<int32_t>(m.V);
  r.padded = static_cast<int32_t>(m.padded_features());
  r.columns = static_cast<int32_t>(m.padded_columns());
  r.tiles = static_cast<int32_t>(m.feature_tiles());
  r.tile = static_cast<int32_t>(m.tile_features());
  r.dparts = static_cast<int32_t>(m.value_tiles());
  r.scale = static_cast<float>(inline_scale(args.scale, m.F));
  r.k0 = x.k0;
  r.v0 = x.mapped.v0;
  r.phi_q = x.mapped.phi_q;
  r.phi_k = x.mapped.phi_k;
  r.values = x.mapped.values;
  r.sums = x.sums;
  r.gradient = x.mapped.rows;
  r.back = x.back;
  r.parts = x.mapped.parts;
  r.state = x.mapped.state;
  r.dphi_q = x.mapped.dphi_q;
  r.dphi_k = x.mapped.dphi_k;
  r.q_stride = m.B * m.T * m.H * m.padded_features();
  r.k_stride = m.B * m.S * m.H * m.padded_features();
  return r;
}
template <class... More>
void run_rows(const Launch& launch, const char* name, int64_t rows, const InlineRows& r, More... more) {
  enqueue(launch, {kImage, name, 256}, {divide_up(rows, 8)}, r, more...);
}
// Everything before the outputs.
void run_sums(const Launch& launch, const MappedShape& m, const InlineRows& r, bool states, const Scratch& x) {
  enqueue(launch, {kImage, "inline_means", 128}, {m.B * m.H}, r);
  run_rows(launch, "inline_queries", m.B * m.T * m.H, r);
  run_rows(launch, "inline_keys", m.B * m.S * m.H, r);
  enqueue(launch, {kImage, "inline_sums", 128}, {divide_up(m.B * m.H * (m.V + 1), 128)}, r, false);
  run_walks(launch, m, states, x.mapped);
}

}  // namespace

const char* inline_refuses(const InlineArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t inline_workspace(const InlineArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, shape_of(args), pass);
  return arena.used();
}
void inline_forward(const InlineArgs& args, const InlineOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedShape m = shape_of(args);
  const Scratch x = cut(arena, m, Pass::forward);
  InlineRows r = rows_of(args, m, x);
  r.out = out;
  if (m.B * m.H == 0) return;
  const bool states = out.final_moment.given() || out.final_key.given() || out.final_value.given() || out.final_count.given();
  run_sums(launch, m, r, states, x);
  run_rows(launch, "inline_finish", m.B * m.T * m.H, r);
  if (states) run_rows(launch, "inline_states", m.B * m.H * m.F, r);
}
void inline_backward(const InlineArgs& args, const InlineOut&, const InlineGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedShape m = shape_of(args);
  const Scratch x = cut(arena, m, Pass::backward);
  InlineRows r = rows_of(args, m, x);
  r.grads = grads;
  if (m.B * m.H == 0) return;
  run_sums(launch, m, r, false, x);
  run_rows(launch, "inline_gradient", m.B * m.T * m.H, r);
  enqueue(launch, {kImage, "inline_sums", 128}, {divide_up(m.B * m.H * m.V, 128)}, r, true);
  run_walks_backward(launch, m, grads.dq.given(), grads.dk.given(), grads.dv.given(), x.mapped);
  if (grads.dq.given()) run_rows(launch, "inline_leave", m.B * m.T * m.H, r, false);
  if (grads.dk.given() || grads.dv.given()) run_rows(launch, "inline_leave", m.B * m.S * m.H, r, true);
}

namespace {

InlineDecode decode_of(Arena& arena, const InlineDecodeArgs& args) {
  InlineDecode d;
  d.args = args;
  d.T = args.q.size[1];
  d.H = static_cast<int32_t>(args.q.size[2]);
  d.K = static_cast<int32_t>(args.q.size[3]);
  d.V = static_cast<int32_t>(args.v.size[3]);
  d.scale = static_cast<float>(inline_scale(args.scale, d.K));
  const int64_t rows = args.q.size[0] * d.T * d.H;
  d.keys = arena.take<float>(rows * d.K);
  d.queries = arena.take<float>(rows * d.K);
  d.counts = arena.take<float>(rows);
  return d;
}

}  // namespace

const char* inline_decode_refuses(const InlineDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t inline_decode_workspace(const InlineDecodeArgs& args, Pass, int) {
  Arena arena;
  decode_of(arena, args);
  return arena.used();
}
void inline_decode_forward(const InlineDecodeArgs& args, const InlineDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  InlineDecode d = decode_of(arena, args);
  d.out = out.out;
  const int64_t heads = args.q.size[0] * d.H;
  enqueue(launch, {kImage, "inline_decode_keys", 128}, {heads}, d);
  enqueue(launch, {kImage, "inline_decode_moments", 256}, {heads, divide_up(d.V, 32)}, d);
}

}  // namespace linnet::cuda
