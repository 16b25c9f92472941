// zeros on the GPU (zeros_cuda.h).
#include "zeros_cuda.h"

#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(zeros)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "zeros/zeros_cuda";

MappedShape shape_of(const ZerosArgs& args, float* decays) {
  MappedShape m;
  m.B = args.q.size[0];
  m.T = m.S = args.q.size[1];
  m.H = args.q.size[2];
  m.F = 3 * args.q.size[3];
  m.V = args.v.size[3];
  m.causal = args.causal;
  m.wanted_tiles = 3;
  if (args.causal) m.decay = View::dense(decays, Dtype::f32, {m.B, m.T, 3 * m.H});
  return m;
}

struct Scratch {
  float* decays = nullptr;
  ZerosScalars x;
  MappedScratch mapped;
};
Scratch cut(Arena& arena, const ZerosArgs& args, Pass pass) {
  Scratch s;
  const int64_t rows = args.q.size[0] * args.q.size[1] * args.q.size[2];
  s.decays = arena.take<float>(3 * rows);
  ZerosScalars& x = s.x;
  for (float** to : {&x.A, &x.B, &x.C, &x.weight, &x.less, &x.E, &x.n, &x.mean}) *to = arena.take<float>(rows);
  if (pass == Pass::backward) {
    x.level = arena.take<double>(rows);
    for (float** to : {&x.X, &x.Y, &x.key}) *to = arena.take<float>(rows);
  }
  s.mapped = cut_mapped(arena, shape_of(args, s.decays), pass);
  return s;
}

ZerosRows rows_of(const ZerosArgs& args, const MappedShape& m, const Scratch& s) {
  ZerosRows r;
  r.args = args;
  r.B = m.B;
  r.T = m.T;
  r.H = static_cast<int32_t>(m.H);
  r.K = static_cast<int32_t>(args.q.size[3]);
  r.V = static_cast<int32_t>(m.V);
  r.rows = m.B * m.T * m.H;
  r.columns = static_cast<int32_t>(m.padded_columns());
  r.tiles = static_cast<int32_t>(m.feature_tiles());
  r.dparts = static_cast<int32_t>(m.value_tiles());
  r.part_stride = r.rows * m.padded_features();
  r.x = s.x;
  r.phi_q = s.mapped.phi_q;
  r.phi_k = s.mapped.phi_k;
  r.values = s.mapped.values;
  r.gradient = s.mapped.rows;
  if (args.causal) r.decays = s.decays;
  r.parts = s.mapped.parts;
  r.dphi_q = s.mapped.dphi_q;
  r.dphi_k = s.mapped.dphi_k;
  return r;
}
void run_features(const Launch& launch, const ZerosRows& r) {
  enqueue(launch, {kImage, "zeros_scalars", 32}, {r.B * r.H}, r);
  enqueue(launch, {kImage, "zeros_features", 256}, {divide_up(r.rows, 8)}, r);
}

}  // namespace

const char* zeros_refuses(const ZerosArgs& args, Pass) {
  if (const char* reason = refuses_f64(args.q.dtype)) return reason;
  return args.causal && args.q.size[3] > kMaxStepWidth ? "the CUDA kernels take keys of at most 256 channels" : nullptr;
}
int64_t zeros_workspace(const ZerosArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, args, pass);
  return arena.used();
}
void zeros_forward(const ZerosArgs& args, const ZerosOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch s = cut(arena, args, Pass::forward);
  const MappedShape m = shape_of(args, s.decays);
  ZerosRows r = rows_of(args, m, s);
  r.out = out;
  if (r.rows == 0) return;
  run_features(launch, r);
  run_walks(launch, m, false, s.mapped);
  enqueue(launch, {kImage, "zeros_finish", 256}, {divide_up(r.rows, 8)}, r, false);
}
void zeros_backward(const ZerosArgs& args, const ZerosOut&, const ZerosGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch s = cut(arena, args, Pass::backward);
  const MappedShape m = shape_of(args, s.decays);
  ZerosRows r = rows_of(args, m, s);
  r.grads = grads;
  if (r.rows == 0) return;
  run_features(launch, r);
  run_walks_backward(launch, m, true, true, grads.dv.given(), s.mapped);
  if (grads.dv.given()) enqueue(launch, {kImage, "zeros_finish", 256}, {divide_up(r.rows, 8)}, r, true);
  enqueue(launch, {kImage, "zeros_leave", 256}, {divide_up(r.rows, 8)}, r);
  if (grads.ds.given()) enqueue(launch, {kImage, "zeros_logits", 32}, {r.B * r.H}, r);
}

const char* zeros_decode_refuses(const ZerosDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t zeros_decode_workspace(const ZerosDecodeArgs& args, Pass, int) {
  return args.q.size[0] * args.q.size[1] * args.q.size[2] * 7 * static_cast<int64_t>(sizeof(float));
}
void zeros_decode_forward(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Launch& launch) {
  ZerosDecode d;
  d.args = args;
  d.out = out.out;
  d.T = args.q.size[1];
  d.H = static_cast<int32_t>(args.q.size[2]);
  d.K = static_cast<int32_t>(args.q.size[3]);
  d.V = static_cast<int32_t>(args.v.size[3]);
  d.steps = reinterpret_cast<float*>(launch.workspace);
  const int64_t heads = args.q.size[0] * d.H;
  enqueue(launch, {kImage, "zeros_decode_steps", 32}, {divide_up(heads, 32)}, d, heads);
  enqueue(launch, {kImage, "zeros_decode_states", 256}, {heads, divide_up(d.V, 32)}, d);
}

}  // namespace linnet::cuda
