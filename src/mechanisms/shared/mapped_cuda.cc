#include "mechanisms/shared/mapped_cuda.h"

#include "mechanisms/shared/pieces.h"
#include "mechanisms/shared/product.h"

LINNET_USES_IMAGES(shared)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "shared/mapped_cuda";

MappedCall call_of(const MappedShape& s, const MappedTensors& t, const MappedScratch& x) {
  MappedCall c;
  c.t = t;
  c.B = s.B;
  c.T = s.T;
  c.S = s.S;
  c.H = static_cast<int32_t>(s.H);
  c.F = static_cast<int32_t>(s.F);
  c.V = static_cast<int32_t>(s.V);
  c.tiles = static_cast<int32_t>(s.feature_tiles());
  c.tile = static_cast<int32_t>(s.tile_features());
  c.columns = static_cast<int32_t>(s.columns());
  c.padded = static_cast<int32_t>(s.padded_columns());
  c.causal = s.causal;
  c.normalizer = s.normalizer;
  c.eps = s.eps;
  c.v0 = x.v0;
  c.values = x.values;
  c.rows = x.rows;
  c.parts = x.parts;
  c.states = x.state;
  return c;
}
void run_rows(const Launch& launch, const char* name, int64_t rows, const MappedCall& c) {
  enqueue(launch, {kImage, name, 256}, {divide_up(rows, 8)}, c);
}

// Rows of the features, of tile j of what is as wide as the values, and of the walks' results.
Rows feature_rows(const MappedShape& s, float* data, int64_t tokens) {
  return dense_rows(data, tokens, s.H * s.feature_tiles(), s.tile_features());
}
Rows value_rows(const MappedShape& s, float* data, int64_t tokens, int64_t j) {
  Rows rows = dense_rows(data, tokens, s.H, s.padded_columns());
  rows.data = data + j * s.tile_columns();
  rows.group = static_cast<int32_t>(s.feature_tiles());
  return rows;
}
Rows part_rows(const MappedShape& s, float* data, int64_t tokens, int64_t j) {
  Rows rows = dense_rows(data, tokens, s.H * s.feature_tiles(), s.padded_columns());
  rows.data = data + j * s.tile_columns();
  return rows;
}
Engine engine_of(const MappedShape& s, bool transposed) {
  Engine e;
  e.N = s.B;
  e.T = s.T;
  e.H = static_cast<int32_t>(s.H * s.feature_tiles());
  e.K = static_cast<int32_t>(transposed ? s.tile_columns() : s.tile_features());
  e.V = static_cast<int32_t>(transposed ? s.tile_features() : s.tile_columns());
  if (s.decay.given()) {
    e.g = scalars_of(s.decay);
    e.g.group = static_cast<int32_t>(s.H * s.feature_tiles() / (s.decay.size[2] > 0 ? s.decay.size[2] : 1));
    e.g_width = 1;
  }
  return e;
}
Engine probe(const MappedShape& s) {
  Engine e = engine_of(s, false);
  e.q = e.k = e.v = assumed_rows(s.T, e.H, e.K, Dtype::f32);
  return e;
}

Matrix features(const MappedShape& s, const float* data, int64_t tokens, bool turned) {
  const int64_t F = s.padded_features();
  return {data, Dtype::f32, tokens * s.H * F, F, turned ? 1 : s.H * F, turned ? s.H * F : 1};
}
Matrix values(const MappedShape& s, const float* data, int64_t tokens, bool turned) {
  const int64_t V = s.padded_columns();
  return {data, Dtype::f32, tokens * s.H * V, V, turned ? 1 : s.H * V, turned ? s.H * V : 1};
}
Matrix state_matrix(const MappedShape& s, const float* data, bool turned) {
  const int64_t F = s.padded_features(), V = s.padded_columns();
  return {data, Dtype::f32, s.H * F * V, F * V, turned ? 1 : V, turned ? V : 1};
}
Product product_of(const MappedShape& s, const Matrix& a, const Matrix& b, const Matrix& c, int64_t M, int64_t N, int64_t K) {
  Product p;
  p.a = a, p.b = b, p.c = c;
  p.M = M, p.N = N, p.K = K;
  p.B = static_cast<int32_t>(s.B);
  p.H = static_cast<int32_t>(s.H);
  return p;
}
// state [B, H, F, V] = features^T values over all tokens.
void run_state(const Launch& launch, const MappedShape& s, const float* phi, const float* wide, int64_t tokens,
               const MappedScratch& x) {
  const int64_t F = s.padded_features(), V = s.padded_columns();
  Product p = product_of(s, features(s, phi, tokens, true), values(s, wide, tokens, false), state_matrix(s, x.states, false), F,
                         V, tokens);
  p.slices = static_cast<int32_t>(product_slices(tokens));
  p.slice_stride = s.B * s.H * F * V;
  run_product(launch, p);
  sum_parts(launch, x.states, p.slices, View::dense(x.state, Dtype::f32, {s.B, s.H, F, V}));
}

}  // namespace

MappedScratch cut_mapped(Arena& arena, const MappedShape& s, Pass pass) {
  MappedScratch x;
  const int64_t F = s.padded_features(), V = s.padded_columns(), tokens = s.T > s.S ? s.T : s.S;
  x.phi_q = arena.take<float>(s.B * s.T * s.H * F);
  x.phi_k = arena.take<float>(s.B * s.S * s.H * F);
  x.v0 = arena.take<float>(s.B * s.H * s.V);
  x.first = arena.take<int32_t>(s.B * s.H);
  x.values = arena.take<float>(s.B * s.S * s.H * V);
  x.parts = arena.take<float>(s.B * tokens * s.H * s.feature_tiles() * V);
  x.state = arena.take<float>(s.B * s.H * F * V);
  if (!s.causal) x.states = arena.take<float>(product_slices(tokens) * s.B * s.H * F * V);
  if (s.causal) x.engine = cut_engine(arena, probe(s));  // the states of all walks are as large, turned or not
  if (pass == Pass::backward) {
    x.rows = arena.take<float>(s.B * s.T * s.H * V);
    x.dphi_q = arena.take<float>(s.value_tiles() * s.B * s.T * s.H * F);
    x.dphi_k = arena.take<float>(s.value_tiles() * s.B * s.S * s.H * F);
  }
  return x;
}

void run_walks(const Launch& launch, const MappedShape& s, bool states, const MappedScratch& x) {
  if (!s.causal) {
    run_state(launch, s, x.phi_k, x.values, s.S, x);
    run_product(launch, product_of(s, features(s, x.phi_q, s.T, false), state_matrix(s, x.state, false),
                                   values(s, x.parts, s.T, false), s.T, s.padded_columns(), s.padded_features()));
  }
  const int64_t rows = s.B * s.T * s.H;
  const auto H = static_cast<int32_t>(s.H);
  if (s.causal && rows > 0) {
    const auto F = static_cast<int32_t>(s.padded_features()), V = static_cast<int32_t>(s.padded_columns());
    enqueue(launch, {kImage, "mapped_begin", 256}, {divide_up(s.B * s.H, 256)}, x.first, s.B * s.H);
    enqueue(launch, {kImage, "mapped_clean", 256}, {divide_up(rows, 8)}, x.phi_k, F, x.values, V, s.T, H, rows, x.first);
  }
  for (int64_t j = 0; s.causal && j < s.value_tiles(); ++j) {
    Engine e = engine_of(s, false);
    e.q = feature_rows(s, x.phi_q, s.T);
    e.k = feature_rows(s, x.phi_k, s.T);
    e.v = value_rows(s, x.values, s.T, j);
    e.out = part_rows(s, x.parts, s.T, j);
    const int64_t V = s.padded_columns();
    if (states) {
      e.final = {x.state + j * s.tile_columns(), s.H * s.padded_features() * V, s.tile_features() * V, V, 1};
    }
    run_engine(launch, e, x.engine);
  }
  if (!s.causal || rows == 0) return;
  const auto width = static_cast<int32_t>(s.feature_tiles() * s.padded_columns());
  enqueue(launch, {kImage, "mapped_poison", 256}, {divide_up(rows, 8)}, x.parts, width, s.T, H, rows,
          static_cast<const int32_t*>(x.first));
}

void run_mapped(const Launch& launch, const MappedShape& s, const MappedTensors& t, const MappedScratch& x) {
  if (s.B * s.H == 0) return;
  const MappedCall c = call_of(s, t, x);
  const bool states = t.final_state.given() || t.final_z.given();
  enqueue(launch, {kImage, "mapped_means", 128}, {s.B * s.H}, c);
  run_rows(launch, "mapped_values", s.B * s.S * s.H, c);
  run_walks(launch, s, states, x);
  run_rows(launch, "mapped_finish", s.B * s.T * s.H, c);
  if (states) run_rows(launch, "mapped_states", s.B * s.H * s.F, c);
}

void run_walks_backward(const Launch& launch, const MappedShape& s, bool dq, bool dk, bool dv, const MappedScratch& x) {
  const int64_t F = s.padded_features(), V = s.padded_columns();
  if (!s.causal) {
    if (dq) {
      run_state(launch, s, x.phi_k, x.values, s.S, x);
      run_product(launch, product_of(s, values(s, x.rows, s.T, false), state_matrix(s, x.state, true),
                                     features(s, x.dphi_q, s.T, false), s.T, F, V));
    }
    run_state(launch, s, x.phi_q, x.rows, s.T, x);
    if (dk) {
      run_product(launch, product_of(s, values(s, x.values, s.S, false), state_matrix(s, x.state, true),
                                     features(s, x.dphi_k, s.S, false), s.S, F, V));
    }
    if (dv) {
      run_product(launch, product_of(s, features(s, x.phi_k, s.S, false), state_matrix(s, x.state, false),
                                     values(s, x.parts, s.S, false), s.S, V, F));
    }
  }
  for (int64_t j = 0; s.causal && j < s.value_tiles(); ++j) {
    const int64_t part = j * s.B * s.T * s.H * F;
    if (dq) {
      Engine e = engine_of(s, true);
      e.q = value_rows(s, x.rows, s.T, j);
      e.k = value_rows(s, x.values, s.T, j);
      e.v = feature_rows(s, x.phi_k, s.T);
      e.out = feature_rows(s, x.dphi_q + part, s.T);
      run_engine(launch, e, x.engine);
    }
    if (dk) {
      Engine e = engine_of(s, true);
      e.q = value_rows(s, x.values, s.T, j);
      e.k = value_rows(s, x.rows, s.T, j);
      e.v = feature_rows(s, x.phi_q, s.T);
      e.out = feature_rows(s, x.dphi_k + part, s.T);
      e.reverse = true;
      run_engine(launch, e, x.engine);
    }
    if (dv) {
      Engine e = engine_of(s, false);
      e.q = feature_rows(s, x.phi_k, s.T);
      e.k = feature_rows(s, x.phi_q, s.T);
      e.v = value_rows(s, x.rows, s.T, j);
      e.out = part_rows(s, x.parts, s.T, j);
      e.reverse = true;
      run_engine(launch, e, x.engine);
    }
  }
}

void run_mapped_backward(const Launch& launch, const MappedShape& s, const MappedTensors& t, const MappedScratch& x) {
  if (s.B * s.H == 0) return;
  const MappedCall c = call_of(s, t, x);
  enqueue(launch, {kImage, "mapped_means", 128}, {s.B * s.H}, c);
  run_rows(launch, "mapped_values", s.B * s.S * s.H, c);
  run_rows(launch, "mapped_gradient", s.B * s.T * s.H, c);
  run_walks_backward(launch, s, t.wants_dq, t.wants_dk, t.dv.given(), x);
  if (t.dv.given()) run_rows(launch, "mapped_dv", s.B * s.S * s.H, c);
}

void run_mapped_decode(const Launch& launch, const MappedShape& s, const float* phi_q, const float* phi_k, const View& v,
                       const View& state, const View& z, const View& out, float* den) {
  MappedTensors t;
  t.v = v;
  t.out = out;
  const MappedCall c = call_of(s, t, {});
  enqueue(launch, {kImage, "mapped_decode_sums", 256}, {s.B * s.H}, c, phi_q, phi_k, z, den);
  enqueue(launch, {kImage, "mapped_decode_states", 256}, {s.B * s.H, divide_up(s.V, 32)}, c, phi_q, phi_k, state,
          static_cast<const float*>(den));
}

}  // namespace linnet::cuda
