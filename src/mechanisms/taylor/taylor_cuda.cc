// Taylor attention on the GPU: the maps write rows of features (taylor_cuda.cu), shared/mapped_cuda.h does the rest.
#include "taylor_cuda.h"

#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.h"
#include "mechanisms/shared/product.h"

LINNET_USES_IMAGES(taylor)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "taylor/taylor_cuda";

TaylorMap map_of(const TaylorExactArgs& args) {
  return taylor_map(TaylorMode::exact, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
}
TaylorMap map_of(const TaylorCompactArgs& args) {
  return taylor_map(TaylorMode::compact, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
}
TaylorMap map_of(const TaylorCompactL2Args& args) {
  TaylorMap m = taylor_map(TaylorMode::compact_l2, args.q.size[3], 1);
  m.eps = args.eps;
  return m;
}
void set_scalars(TaylorRows*, const TaylorExactArgs&) {}
void set_scalars(TaylorRows* r, const TaylorCompactArgs& args) {
  r->alpha = args.alpha;
  r->beta = args.beta;
  r->gamma = args.gamma;
}
void set_scalars(TaylorRows* r, const TaylorCompactL2Args& args) { r->constant = args.constant; }

TaylorRows rows_of(const TaylorMap& map, const View& x, int64_t padded, float* phi) {
  TaylorRows r;
  r.map = map;
  r.x = x;
  r.T = x.size[1];
  r.H = static_cast<int32_t>(x.size[2]);
  r.rows = x.size[0] * r.T * r.H;
  r.padded = static_cast<int32_t>(padded);
  r.phi = phi;
  return r;
}
void run_rows(const Launch& launch, const char* name, const TaylorRows& r) {
  const auto bytes = static_cast<int>(kTaylorWarps * 3 * r.map.K * static_cast<int64_t>(sizeof(float)));
  enqueue(launch, {kImage, name, 32 * kTaylorWarps, bytes}, {divide_up(r.rows, kTaylorWarps)}, r);
}

template <class Args>
MappedShape shape_of(const Args& args) {
  MappedShape m;
  m.B = args.q.size[0];
  m.T = args.q.size[1];
  m.S = args.k.size[1];
  m.H = args.q.size[2];
  m.F = map_of(args).F;
  m.V = args.v.size[3];
  m.causal = args.causal;
  m.eps = static_cast<float>(args.eps);
  return m;
}

struct Scratch {
  MappedScratch mapped;
  float *scalars = nullptr, *parts = nullptr, *sums = nullptr;  // [rows of q, then of k, 3]
};
Scratch cut(Arena& arena, const MappedShape& m, Pass pass) {
  Scratch x;
  x.mapped = cut_mapped(arena, m, pass);
  if (pass == Pass::forward) return x;
  const int64_t rows = m.B * (m.T + m.S) * m.H;
  x.scalars = arena.take<float>(3 * rows);
  x.parts = arena.take<float>(3 * product_slices(rows));
  x.sums = arena.take<float>(3);
  return x;
}

template <class Args>
struct Both {
  TaylorRows q, k;
  Both(const Args& args, const MappedShape& m, const MappedScratch& x)
      : q(rows_of(map_of(args), args.q, m.padded_features(), x.phi_q)),
        k(rows_of(map_of(args), args.k, m.padded_features(), x.phi_k)) {
    set_scalars(&q, args);
    set_scalars(&k, args);
    k.key_mask = args.key_mask;
  }
};

template <class Args>
int64_t workspace_of(const Args& args, Pass pass) {
  Arena arena;
  cut(arena, shape_of(args), pass);
  return arena.used();
}
template <class Args>
void run_forward(const Args& args, const TaylorOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedShape m = shape_of(args);
  const Scratch x = cut(arena, m, Pass::forward);
  Both<Args> both(args, m, x.mapped);
  both.q.phi_out = out.phi_q;
  run_rows(launch, "taylor_map", both.q);
  run_rows(launch, "taylor_map", both.k);
  MappedTensors t;
  t.v = args.v;
  t.key_mask = args.key_mask;
  t.out = out.out;
  t.den = out.den;
  t.final_state = out.final_state;
  t.final_z = out.final_z;
  run_mapped(launch, m, t, x.mapped);
}
// Leaves the sums of the scalars in x.sums where they are wanted.
template <class Args, class Grads>
Scratch run_backward(const Args& args, const TaylorOut& out, const Grads& grads, bool scalars, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedShape m = shape_of(args);
  const Scratch x = cut(arena, m, Pass::backward);
  Both<Args> both(args, m, x.mapped);
  run_rows(launch, "taylor_map", both.q);
  run_rows(launch, "taylor_map", both.k);
  MappedTensors t;
  t.v = args.v;
  t.key_mask = args.key_mask;
  t.out = out.out;
  t.den = out.den;
  t.dout = grads.dout;
  t.dv = grads.dv;
  t.wants_dq = grads.dq.given() || scalars;
  t.wants_dk = grads.dk.given() || scalars;
  run_mapped_backward(launch, m, t, x.mapped);
  both.q.dx = grads.dq;
  both.k.dx = grads.dk;
  both.q.dphi = x.mapped.dphi_q;
  both.k.dphi = x.mapped.dphi_k;
  both.q.part_stride = both.q.rows * both.q.padded;
  both.k.part_stride = both.k.rows * both.k.padded;
  both.q.parts = both.k.parts = static_cast<int32_t>(m.value_tiles());
  if (scalars) {
    both.q.scalars = x.scalars;
    both.k.scalars = x.scalars + 3 * both.q.rows;
  }
  if (t.wants_dq) run_rows(launch, "taylor_back", both.q);
  if (t.wants_dk) run_rows(launch, "taylor_back", both.k);
  if (!scalars) return x;
  const int64_t rows = both.q.rows + both.k.rows;
  run_column_sums(launch, x.scalars, rows, 3, x.parts);
  sum_parts(launch, x.parts, product_slices(rows), View::dense(x.sums, Dtype::f32, {3}));
  return x;
}
void put_scalar(const Launch& launch, const float* sum, const View& to) { sum_parts(launch, sum, 1, to); }

template <class Args>
const char* refuses_map(const Args& args) {
  if (const char* reason = refuses_f64(args.q.dtype)) return reason;
  return args.q.size[3] > 4096 ? "the CUDA kernels take at most 4096 channels" : nullptr;
}

}  // namespace

#define LINNET_TAYLOR(stem, Args, Grads)                                                          \
  const char* stem##_refuses(const Args& args, Pass) { return refuses_map(args); }                \
  int64_t stem##_workspace(const Args& args, Pass pass, int) { return workspace_of(args, pass); } \
  void stem##_forward(const Args& args, const TaylorOut& out, const Launch& launch) { run_forward(args, out, launch); }
LINNET_TAYLOR(taylor_exact, TaylorExactArgs, TaylorExactGrads)
LINNET_TAYLOR(taylor_compact, TaylorCompactArgs, TaylorCompactGrads)
LINNET_TAYLOR(taylor_compact_l2, TaylorCompactL2Args, TaylorCompactL2Grads)

void taylor_exact_backward(const TaylorExactArgs& args, const TaylorOut& out, const TaylorExactGrads& grads,
                           const Launch& launch) {
  run_backward(args, out, grads, false, launch);
}
void taylor_compact_backward(const TaylorCompactArgs& args, const TaylorOut& out, const TaylorCompactGrads& grads,
                             const Launch& launch) {
  const bool scalars = grads.dalpha.given() || grads.dbeta.given() || grads.dgamma.given();
  const Scratch x = run_backward(args, out, grads, scalars, launch);
  put_scalar(launch, x.sums, grads.dalpha);
  put_scalar(launch, x.sums + 1, grads.dbeta);
  put_scalar(launch, x.sums + 2, grads.dgamma);
}
void taylor_compact_l2_backward(const TaylorCompactL2Args& args, const TaylorOut& out, const TaylorCompactL2Grads& grads,
                                const Launch& launch) {
  const Scratch x = run_backward(args, out, grads, grads.dconstant.given(), launch);
  put_scalar(launch, x.sums, grads.dconstant);
}

namespace {

struct DecodeScratch {
  float *phi_q, *phi_k, *den;
};
TaylorMap map_of(const TaylorDecodeArgs& args) {
  TaylorMap m = taylor_map(args.mode, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
  m.eps = args.eps.value_or(args.mode == TaylorMode::compact_l2 ? 1e-15 : 1e-12);
  return m;
}
DecodeScratch cut_decode(Arena& arena, const TaylorDecodeArgs& args) {
  const int64_t rows = args.q.size[0] * args.q.size[1] * args.q.size[2], F = map_of(args).F;
  DecodeScratch d;
  d.phi_q = arena.take<float>(rows * F);
  d.phi_k = arena.take<float>(rows * F);
  d.den = arena.take<float>(rows);
  return d;
}

}  // namespace

const char* taylor_decode_refuses(const TaylorDecodeArgs& args, Pass) { return refuses_map(args); }
int64_t taylor_decode_workspace(const TaylorDecodeArgs& args, Pass, int) {
  Arena arena;
  cut_decode(arena, args);
  return arena.used();
}
void taylor_decode_forward(const TaylorDecodeArgs& args, const TaylorDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const DecodeScratch d = cut_decode(arena, args);
  const TaylorMap map = map_of(args);
  for (const bool key : {false, true}) {
    TaylorRows r = rows_of(map, key ? args.k : args.q, map.F, key ? d.phi_k : d.phi_q);
    r.alpha = args.alpha;
    r.beta = args.beta;
    r.gamma = args.gamma;
    r.constant = args.constant;
    run_rows(launch, "taylor_map", r);
  }
  MappedShape m;
  m.B = args.q.size[0];
  m.T = m.S = args.q.size[1];
  m.H = args.q.size[2];
  m.F = map.F;
  m.V = args.v.size[3];
  m.eps = static_cast<float>(map.eps);
  run_mapped_decode(launch, m, d.phi_q, d.phi_k, args.v, args.state, args.z, out.out, d.den);
}

}  // namespace linnet::cuda
