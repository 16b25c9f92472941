// features on the GPU: the maps write rows of features (features_cuda.cu), shared/mapped_cuda.h does the rest.
#include "features_cuda.h"

#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.h"
#include "mechanisms/shared/product.h"

LINNET_USES_IMAGES(features)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "features/features_cuda";
constexpr int64_t kSharedBytes = 200 << 10;

MappedShape shape_of(const FeaturesArgs& args, const FeaturesShape& s) {
  MappedShape m;
  m.B = s.B;
  m.T = args.q.size[1];
  m.S = args.k.size[1];
  m.H = s.H;
  m.F = s.F;
  m.V = args.v.size[3];
  m.causal = args.causal;
  m.normalizer = s.normalizer;
  m.eps = static_cast<float>(s.eps);
  return m;
}

int64_t wide_of(const FeaturesShape& s) {
  int64_t wide = 2 * s.K + 1;
  for (const int64_t n : {2 * s.R, 2 * s.M}) wide = n > wide ? n : wide;
  return wide;
}
int shared_bytes(const FeaturesShape& s) {
  return static_cast<int>(kFeatureWarps * (s.K + 2 * wide_of(s)) * static_cast<int64_t>(sizeof(float)));
}

template <class Args>
FeatureRows rows_of(const Args& args, const FeaturesShape& s, const View& x, bool key, int64_t padded) {
  FeatureRows r;
  r.s = s;
  r.x = x;
  r.w = args.w;
  r.b = args.b;
  r.scale = args.scale;
  r.proj = args.proj;
  r.gamma = args.gamma;
  r.beta = args.beta;
  r.key = key;
  r.tokens = x.size[1];
  r.padded = static_cast<int32_t>(padded);
  r.wide = static_cast<int32_t>(wide_of(s));
  if (key) r.key_tops = args.key_tops;
  return r;
}

// The gradients of parameters: rows of both walks, n each, and the parts of their sums.
struct ParameterScratch {
  int64_t n = 0;
  float *rows_q = nullptr, *rows_k = nullptr, *more_q = nullptr, *more_k = nullptr, *parts = nullptr;
};
struct Scratch {
  MappedScratch mapped;
  ParameterScratch parameters;
  float *tops = nullptr, *top_parts = nullptr, *levels = nullptr, *dlevels = nullptr;
};
bool has_matrix(FeaturesMap map) {
  return map == FeaturesMap::hedgehog || map == FeaturesMap::hedgehog_exp || map == FeaturesMap::hedgehog_joint ||
         map == FeaturesMap::t2r;
}
int64_t row_width(const FeaturesShape& s) {
  if (has_matrix(s.map)) return s.map == FeaturesMap::hedgehog_joint ? s.K : s.R;
  return s.map == FeaturesMap::rebased || s.map == FeaturesMap::focused ? s.K : 0;
}
Scratch cut(Arena& arena, const FeaturesShape& s, const MappedShape& m, Pass pass) {
  Scratch x;
  x.mapped = cut_mapped(arena, m, pass);
  if (s.has_top()) {
    x.tops = arena.take<float>(s.B * s.H);
    x.top_parts = arena.take<float>(s.B * s.H * kTopSlices);
  }
  if (s.over_tokens) {
    x.levels = arena.take<float>(s.B * s.H * s.K);
    x.dlevels = arena.take<float>(s.B * s.H * s.K);
  }
  ParameterScratch& p = x.parameters;
  p.n = row_width(s);
  if (pass == Pass::forward || p.n == 0) return x;
  p.rows_q = arena.take<float>(s.B * m.T * s.H * p.n);
  p.rows_k = arena.take<float>(s.B * m.S * s.H * p.n);
  if (s.map == FeaturesMap::rebased) {
    p.more_q = arena.take<float>(s.B * m.T * s.H * p.n);
    p.more_k = arena.take<float>(s.B * m.S * s.H * p.n);
  }
  const int64_t products = (product_slices(m.T) + product_slices(m.S)) * s.B * s.H * s.K * p.n;
  const int64_t sums = (product_slices(s.B * m.T) + product_slices(s.B * m.S)) * s.H * p.n;
  p.parts = arena.take<float>(products > sums ? products : sums);
  return x;
}

void run_maps(const Launch& launch, const FeatureRows& r, const char* name, const char* exact) {
  const bool f32 = r.x.dtype == Dtype::f32;
  enqueue(launch, {kImage, f32 ? exact : name, 32 * kFeatureWarps, shared_bytes(r.s)},
          {divide_up(r.s.B * r.tokens * r.s.H, kFeatureWarps)}, r);
}
void run_focused(const Launch& launch, const FeatureRows& r, bool back) {
  enqueue(launch, {kImage, "feature_focused", 256}, {r.s.B * r.tokens}, r, back);
}
void run_levels(const Launch& launch, const FeatureRows& r, bool back) {
  enqueue(launch, {kImage, "feature_levels", 256}, {r.s.B * r.s.H, divide_up(r.s.K, 32)}, r, back);
}
// What the keys of a head have in common, then phi of both.
void run_features(const Launch& launch, FeatureRows q, FeatureRows k, const Scratch& x) {
  k.levels = x.levels;
  k.top_parts = x.top_parts;
  if (k.s.has_top()) {
    if (!k.key_tops.given()) {
      enqueue(launch, {kImage, "feature_tops", 32 * kFeatureWarps, shared_bytes(k.s)}, {k.s.B * k.s.H, kTopSlices}, k);
    }
    enqueue(launch, {kImage, "feature_highest", 256}, {divide_up(k.s.B * k.s.H, 256)}, k, x.tops);
  }
  k.tops = x.tops;
  if (k.s.over_tokens) run_levels(launch, k, false);
  for (const FeatureRows& r : {q, k}) {
    if (r.s.map == FeaturesMap::focused) {
      run_focused(launch, r, false);
    } else {
      run_maps(launch, r, "feature_map", "feature_map_exact");
    }
  }
}

struct Both {
  FeatureRows q, k;
};
Both both_of(const FeaturesArgs& args, const FeaturesShape& s, const MappedShape& m, const Scratch& x) {
  Both r = {rows_of(args, s, args.q, false, m.padded_features()), rows_of(args, s, args.k, true, m.padded_features())};
  r.k.key_mask = args.key_mask;
  if (args.key_top != KeyTop::given) r.k.key_tops = View();
  r.q.phi = x.mapped.phi_q;
  r.k.phi = x.mapped.phi_k;
  return r;
}
MappedTensors tensors_of(const FeaturesArgs& args, const FeaturesOut& out) {
  MappedTensors t;
  t.v = args.v;
  t.key_mask = args.key_mask;
  t.out = out.out;
  t.den = out.den;
  t.final_state = out.final_state;
  t.final_z = out.final_z;
  return t;
}

// dw and db, dgamma and dbeta, dscale: sums over rows of both walks.
void sum_parameters(const Launch& launch, const FeaturesArgs& args, const FeaturesShape& s, const MappedShape& m,
                    const FeaturesGrads& grads, const ParameterScratch& p) {
  const auto column_sums = [&](const float* q, const float* k, bool heads, const View& to) {
    if (!to.given()) return;
    const int64_t width = s.H * p.n, parts = product_slices(s.B * m.T);
    run_column_sums(launch, q, s.B * m.T, width, p.parts);
    run_column_sums(launch, k, s.B * m.S, width, p.parts + parts * width);
    sum_parts(launch, p.parts, (parts + product_slices(s.B * m.S)) * (heads ? 1 : s.H), to);
  };
  if (s.map == FeaturesMap::focused) return column_sums(p.rows_q, p.rows_k, true, grads.dscale);
  if (s.map == FeaturesMap::rebased) {
    column_sums(p.rows_q, p.rows_k, false, grads.dgamma);
    return column_sums(p.more_q, p.more_k, false, grads.dbeta);
  }
  const bool joint = s.map == FeaturesMap::hedgehog_joint;
  column_sums(p.rows_q, p.rows_k, !joint, grads.db);
  if (!grads.dw.given()) return;
  const auto run = [&](const View& x, const float* dy, const View& mask, int64_t tokens, float* parts) {
    const Matrix in = {x.data, x.dtype, x.stride[0], x.stride[2], 1, x.stride[1]};       // x^T [K, tokens]
    const Matrix out = {dy, Dtype::f32, tokens * s.H * p.n, p.n, s.H * p.n, 1};          // dy [tokens, n]
    const Matrix in_rows = {x.data, x.dtype, x.stride[0], x.stride[2], x.stride[1], 1};  // x [tokens, K]
    const Matrix out_turned = {dy, Dtype::f32, tokens * s.H * p.n, p.n, 1, s.H * p.n};   // dy^T [n, tokens]
    const int64_t columns = joint ? s.K : p.n, size = s.K * p.n;
    Product product;
    product.a = joint ? out_turned : in;
    product.b = joint ? in_rows : out;
    product.c = {parts, Dtype::f32, s.H * size, size, columns, 1};
    product.M = joint ? p.n : s.K;
    product.N = columns;
    product.K = tokens;
    product.B = static_cast<int32_t>(s.B);
    product.H = static_cast<int32_t>(s.H);
    product.slices = static_cast<int32_t>(product_slices(tokens));
    product.slice_stride = s.B * s.H * size;
    if (mask.given()) {
      product.mask = static_cast<const uint8_t*>(mask.data);
      product.mask_stride = mask.stride[0];
    }
    run_product(launch, product);
    return product.slices * s.B;
  };
  const int64_t size = s.H * s.K * p.n;
  const int64_t from_q = run(args.q, p.rows_q, View(), m.T, p.parts);
  const int64_t from_k = run(args.k, p.rows_k, args.key_mask, m.S, p.parts + from_q * size);
  sum_parts(launch, p.parts, (from_q + from_k) * (joint ? s.H : 1), grads.dw);
}

const char* refuses_shape(Dtype dtype, const FeaturesShape& s) {
  if (const char* reason = refuses_f64(dtype)) return reason;
  return shared_bytes(s) > kSharedBytes ? "the CUDA kernels keep rows of at most 4000 features in shared memory" : nullptr;
}

}  // namespace

const char* features_refuses(const FeaturesArgs& args, Pass) {
  if (features_running(args)) return "the CUDA kernels take key_top global and given, not running";
  return refuses_shape(args.q.dtype, features_shape(args));
}
int64_t features_workspace(const FeaturesArgs& args, Pass pass, int) {
  Arena arena;
  const FeaturesShape s = features_shape(args);
  cut(arena, s, shape_of(args, s), pass);
  return arena.used();
}
void features_forward(const FeaturesArgs& args, const FeaturesOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const FeaturesShape s = features_shape(args);
  const MappedShape m = shape_of(args, s);
  const Scratch x = cut(arena, s, m, Pass::forward);
  Both both = both_of(args, s, m, x);
  both.q.phi_out = out.phi_q;
  both.k.phi_out = out.phi_k;
  run_features(launch, both.q, both.k, x);
  run_mapped(launch, m, tensors_of(args, out), x.mapped);
}
void features_backward(const FeaturesArgs& args, const FeaturesOut& out, const FeaturesGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const FeaturesShape s = features_shape(args);
  const MappedShape m = shape_of(args, s);
  const Scratch x = cut(arena, s, m, Pass::backward);
  Both both = both_of(args, s, m, x);
  run_features(launch, both.q, both.k, x);
  MappedTensors t = tensors_of(args, out);
  t.final_state = t.final_z = View();
  t.dout = grads.dout;
  t.dv = grads.dv;
  const bool parameters =
      grads.dw.given() || grads.db.given() || grads.dscale.given() || grads.dgamma.given() || grads.dbeta.given();
  t.wants_dq = grads.dq.given() || parameters;
  t.wants_dk = grads.dk.given() || parameters;
  run_mapped_backward(launch, m, t, x.mapped);
  both.q.dphi = x.mapped.dphi_q;
  both.k.dphi = x.mapped.dphi_k;
  both.q.part_stride = s.B * m.T * s.H * m.padded_features();
  both.k.part_stride = s.B * m.S * s.H * m.padded_features();
  both.q.parts = both.k.parts = static_cast<int32_t>(m.value_tiles());
  both.q.dx = grads.dq;
  both.k.dx = grads.dk;
  both.k.tops = x.tops;
  both.k.levels = x.levels;
  both.k.dlevels = x.dlevels;
  if (parameters) {
    both.q.rows = x.parameters.rows_q;
    both.k.rows = x.parameters.rows_k;
    both.q.more = x.parameters.more_q;
    both.k.more = x.parameters.more_k;
  }
  if (s.over_tokens && t.wants_dk) run_levels(launch, both.k, true);
  for (const FeatureRows& r : {both.q, both.k}) {
    if (!(r.key ? t.wants_dk : t.wants_dq)) continue;
    if (s.map == FeaturesMap::focused) {
      run_focused(launch, r, true);
    } else {
      run_maps(launch, r, "feature_back", "feature_back_exact");
    }
  }
  if (parameters && s.B * s.H > 0) sum_parameters(launch, args, s, m, grads, x.parameters);
}

namespace {

struct DecodeScratch {
  Scratch x;
  float *phi_q, *phi_k, *den;
};
DecodeScratch cut_decode(Arena& arena, const FeaturesDecodeArgs& args, const FeaturesShape& s) {
  DecodeScratch d;
  const int64_t rows = s.B * args.q.size[1] * s.H;
  d.phi_q = arena.take<float>(rows * s.F);
  d.phi_k = arena.take<float>(rows * s.F);
  d.den = arena.take<float>(rows);
  d.x.tops = arena.take<float>(s.B * s.H);
  return d;
}

}  // namespace

const char* features_decode_refuses(const FeaturesDecodeArgs& args, Pass) {
  if (features_shape(args).has_top() && !args.key_tops.given()) return "a running top of the keys has no CUDA kernel";
  return refuses_shape(args.q.dtype, features_shape(args));
}
int64_t features_decode_workspace(const FeaturesDecodeArgs& args, Pass, int) {
  Arena arena;
  cut_decode(arena, args, features_shape(args));
  return arena.used();
}
void features_decode_forward(const FeaturesDecodeArgs& args, const FeaturesDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const FeaturesShape s = features_shape(args);
  const DecodeScratch d = cut_decode(arena, args, s);
  FeatureRows q = rows_of(args, s, args.q, false, s.F), k = rows_of(args, s, args.k, true, s.F);
  q.first = k.first = args.position;
  q.phi = d.phi_q;
  k.phi = d.phi_k;
  run_features(launch, q, k, d.x);
  MappedShape m;
  m.B = s.B;
  m.T = m.S = args.q.size[1];
  m.H = s.H;
  m.F = s.F;
  m.V = args.v.size[3];
  m.normalizer = s.normalizer;
  m.eps = static_cast<float>(s.eps);
  run_mapped_decode(launch, m, d.phi_q, d.phi_k, args.v, args.state, args.z, out.out, d.den);
}

}  // namespace linnet::cuda
