#include "mechanisms/recurrence/cuda/tile/gradients.h"

#include <utility>

#include "mechanisms/recurrence/cuda/tile/launch.h"

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "recurrence/cuda/tile/gradients";

int64_t batch_of(const Engine& e) { return e.offsets == nullptr ? e.N : 1; }

// What the kernels of dg and of whole chunks are told; tiled: with descriptions for the copy engine.
bool pairs_of(const Launch& launch, const Engine& base, const Rows& dout, const Rows& dg, const GradientScratch& scratch,
              bool tiled, Pairs* pairs) {
  pairs->e = base;
  pairs->e.out = dout;
  pairs->dg = dg;
  for (int i = 0; i < 2; ++i) {
    pairs->saved[i] = scratch.saved[i];
    pairs->units[i] = scratch.units[i];
  }
  if (!tiled || (encode_rows(&pairs->q, base, base.q, base.K) && encode_rows(&pairs->k, base, base.k, base.K) &&
                 encode_rows(&pairs->v, base, base.v, base.V) && encode_rows(&pairs->dout, base, dout, base.V))) {
    return true;
  }
  *launch.error = "a tensor has no description for the copy engine";
  return false;
}

void run_pairs(const Launch& launch, const Engine& base, const Rows& dout, const Rows& dg, const GradientScratch& scratch,
               bool tiled) {
  Pairs pairs;
  if (!pairs_of(launch, base, dout, dg, scratch, tiled, &pairs)) return;
  const Grid grid = {base.N * base.H, (base.T + 63) / 64};
  if (!tiled) return enqueue(launch, {"recurrence/cuda/any_pairs", "pairs_any", 256}, grid, pairs);
  static constexpr const char* kNames[2][2][2] = {
      {{"pairs_f16_64_64", "pairs_f16_64_128"}, {"pairs_f16_128_64", "pairs_f16_128_128"}},
      {{"pairs_bf16_64_64", "pairs_bf16_64_128"}, {"pairs_bf16_128_64", "pairs_bf16_128_128"}}};
  const char* name = kNames[base.q.dtype == Dtype::bf16][base.K == 128][base.V == 128];
  enqueue(launch, {kImage, name, 2 * base.K, pairs_shared_bytes(base.K, base.V)}, grid, pairs);
}

}  // namespace

GradientScratch cut_gradients(Arena& arena, const Engine& base, bool grouped) {
  GradientScratch scratch;
  const int64_t rows = batch_of(base) * base.T * base.H, width = base.K > base.V ? base.K : base.V;
  const bool decays = base.g_width != 0;
  if (grouped || decays) scratch.parts = arena.take<char>(rows * width * dtype_size(base.q.dtype));
  if (decays) {
    const int64_t states = saved_slots(base) * base.H;
    for (int i = 0; i < 2; ++i) {
      scratch.saved[i] = arena.take<char>(states * base.K * base.V * dtype_size(saved_dtype(base.q.dtype, base.K, base.V)));
      scratch.units[i] = arena.take<float>(states * base.K);
    }
    scratch.dg = arena.take<float>(rows);
  }
  scratch.engine = cut_engine(arena, base);
  return scratch;
}

namespace {

// The walks of the gradients. The results' rows: their own, or parts whose heads are added (one, where the tiled kernels could
// not store to the view), or, where only the walk's states are wanted, the same place.
struct Walks {
  Engine dq, dk, dv;
};
Walks walks_of(const Gradients& g, const GradientScratch& scratch) {
  const Engine& base = g.base;
  const auto engine = [&](const Rows& q, const Rows& k, const Rows& v, bool swapped, const View& result, StepRole role) {
    Engine e = base;
    e.q = q;
    e.k = k;
    e.v = v;
    if (swapped) std::swap(e.K, e.V);
    const bool wide = base.q.dtype == Dtype::f32, fits = wide || is_aligned(rows_of(result, base.H), base.q.dtype);
    const bool own = result.given() && result.size[2] == base.H && (fits || scratch.parts == nullptr);
    e.out = own ? rows_of(result, base.H) : dense_rows(scratch.parts, base.T, base.H, e.V, base.q.dtype);
    e.steps.role = role;
    return e;
  };
  const auto reversed = [](Engine e) {
    e.reverse = true;
    e.in_factor = 1 / e.scale;
    e.out_factor = e.scale;
    return e;
  };
  Walks w;
  w.dq = engine(g.dout, base.v, base.k, true, g.dq, StepRole::writes);
  w.dq.initial = transposed(g.initial);
  w.dk = reversed(engine(base.v, g.dout, base.q, true, g.dk, StepRole::results));
  w.dk.initial = transposed(g.dfinal);
  w.dv = reversed(engine(base.k, base.q, g.dout, false, g.dv, StepRole::decays));
  if (!g.dv.given()) w.dv.out = {};
  w.dv.initial = g.dfinal;
  w.dv.final = g.dinitial;
  w.dv.finish = g.skip;
  w.dv.back = g.back;
  return w;
}

}  // namespace

bool is_tiled(const Gradients& g, const GradientScratch& scratch) {
  const Walks w = walks_of(g, scratch);
  return is_tiled(w.dq) && is_tiled(w.dk) && is_tiled(w.dv);
}

namespace {

int64_t whole_chunks(const Engine& base) { return base.N * ((base.T + 63) / 64) * (base.H / base.q.group); }
// Whether one kernel has dq, dk and dg of whole chunks (whole.cu): queries and keys have the same heads, and
// their gradients can be stored.
bool is_whole(const Gradients& g, const Walks& walk) {
  const Engine& base = g.base;
  const auto fits = [&](const View& view) {
    return !view.given() || (view.size[2] * base.q.group == base.H && is_aligned(rows_of(view, base.H), base.q.dtype));
  };
  return base.q.dtype == Dtype::bf16 && base.H > 0 && base.q.group == base.k.group && fits(g.dq) && fits(g.dk) &&
         is_tiled(walk.dq) && is_tiled(walk.dk) && is_aligned(g.dout, base.q.dtype) && whole_chunks(base) < int64_t{1} << 30;
}
void run_whole(const Launch& launch, const Gradients& g, const Rows& dg, const GradientScratch& scratch) {
  const Engine& base = g.base;
  Pairs pairs;
  if (!pairs_of(launch, base, g.dout, dg, scratch, true, &pairs)) return;
  pairs.dq = rows_of(g.dq, base.H);
  pairs.dk = rows_of(g.dk, base.H);
  pairs.chunks = static_cast<int32_t>(whole_chunks(base));
  static constexpr const char* kNames[2][2] = {{"whole_64_64", "whole_64_128"}, {"whole_128_64", "whole_128_128"}};
  const int64_t most = multiprocessor_count(), blocks = pairs.chunks < most ? pairs.chunks : most;
  enqueue(launch,
          {"recurrence/cuda/tile/whole", kNames[base.K == 128][base.V == 128], 128 * (2 + base.K / 64),
           whole_shared_bytes(base.K, base.V)},
          {blocks}, pairs);
}

}  // namespace

void run_gradients(const Launch& launch, const Gradients& g, const GradientScratch& scratch) {
  const Engine& base = g.base;
  const int64_t B = batch_of(base);
  const bool wants_dg = g.dg.data != nullptr || g.dg_head.given();
  const auto run = [&](const Engine& e, const View& result) {
    run_engine(launch, e, scratch.engine);
    if (!result.given() || e.out.data != scratch.parts || base.H == 0) return;
    const int64_t heads = result.size[2];
    sum_groups(launch, rows_of(result, heads), e.out, B, base.T, heads, base.H / heads, e.V);
  };
  Walks walk = walks_of(g, scratch);
  Engine &dq = walk.dq, &dk = walk.dk;
  const Rows all = dense_rows(scratch.dg, base.T, base.H, 1), dg = g.dg.data != nullptr ? g.dg : all;
  const auto sum_dg = [&] {
    if (!g.dg_head.given()) return;
    const int64_t rows = B * base.T, stride = g.dg_head.stride[0];
    const int32_t type = static_cast<int32_t>(g.dg_head.dtype);
    enqueue(launch, {"recurrence/cuda/any_pairs", "sum_tokens", 256}, {base.H}, scratch.dg, rows, base.H, g.dg_head.data, type,
            stride);
  };
  if (wants_dg && is_whole(g, walk)) {
    Engine states = base;
    states.initial = g.initial;
    states.saved = scratch.saved[0];
    walk.dv.saved = scratch.saved[1];
    states.saved_transposed = walk.dv.saved_transposed = true;
    run_engine(launch, states, scratch.engine);
    run(walk.dv, g.dv);
    run_whole(launch, g, dg, scratch);
    sum_dg();
    return;
  }
  if (wants_dg) {
    const bool tiled = is_tiled(dq) && is_tiled(dk);
    Engine* const walks[2] = {&dq, &dk};
    for (int i = 0; i < 2; ++i) {
      walks[i]->saved = scratch.saved[i];
      walks[i]->saved_units = scratch.units[i];
      walks[i]->untiled = !tiled;
    }
    run(dq, g.dq);
    run(dk, g.dk);
    run_pairs(launch, base, g.dout, dg, scratch, tiled);
    sum_dg();
  } else {
    if (g.dq.given()) run(dq, g.dq);
    if (g.dk.given()) run(dk, g.dk);
  }
  if (g.dv.given() || g.dinitial.data != nullptr) run(walk.dv, g.dv);
}

}  // namespace linnet::cuda
