// linear on the GPU: elementwise maps; everything is a call of the recurrence engine (recurrence/cuda/engine.h).
#include "linear_cuda.h"

#include "linear_shape.h"
#include "mechanisms/recurrence/cuda/chunk/launch.h"
#include "mechanisms/recurrence/cuda/dispatch.h"
#include "mechanisms/recurrence/cuda/fitted.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"

LINNET_USES_IMAGES(linear)

namespace linnet::cuda {
namespace {

bool elementwise(FeatureMap map) { return static_cast<int32_t>(map) <= static_cast<int32_t>(FeatureMap::exp); }
Map map_of(FeatureMap map) { return static_cast<Map>(map); }
static_assert(static_cast<int>(FeatureMap::exp) == static_cast<int>(Map::exp));

template <class Args>
const char* refuses_map(const Args& args) {
  const LinearShape s = linear_shape(args, 1);
  if (args.q.dtype == Dtype::f64) return "the CUDA kernels have no f64";
  if (!elementwise(args.map))
    return "the CUDA kernels have the elementwise maps: identity, elu1, relu, relu2, silu, softplus, exp";
  if (s.shifted) return "the CUDA kernels do not normalise map exp";
  if (s.K > kMaxStepWidth) return "the CUDA kernels take keys of at most 256 channels";
  return nullptr;
}

// What all engines of one call share.
Engine engine_of(const LinearArgs& args, const LinearShape& s) {
  Engine e;
  e.N = s.N;
  e.T = s.T;
  e.H = static_cast<int32_t>(s.H);
  e.K = static_cast<int32_t>(s.K);
  e.V = static_cast<int32_t>(s.V);
  e.scale = static_cast<float>(s.scale);
  if (args.cu_seqlens.given()) {
    e.offsets = args.cu_seqlens.data;
    e.offsets_64 = args.cu_seqlens.dtype == Dtype::i64;
  }
  if (args.key_mask.given()) e.mask_stride_b = args.key_mask.stride[0];
  return e;
}
const uint8_t* mask_of(const LinearArgs& args) {
  return args.key_mask.given() ? static_cast<const uint8_t*>(args.key_mask.data) : nullptr;
}

// Not causal: all writes first, over `write_tokens` tokens, then all reads.
struct Split {
  Engine write, read;
};
Split split(const Engine& e, int64_t write_tokens, float* state, float* z) {
  Split two = {e, e};
  two.write.out = Rows();
  two.write.T = write_tokens;
  two.write.final = dense_states(state, e.H, e.K, e.V);
  two.write.out_factor = 1;
  two.read.k = Rows();
  two.read.initial = two.write.final;
  two.read.in_factor = 1;
  two.read.final = States();
  if (e.sums) {
    two.write.final_z = dense_states(z, e.H, e.K, 1);
    two.read.initial_z = two.write.final_z;
    two.read.final_z = States();
  }
  return two;
}

// Normalised: out = num / den, den = scale phi(q) . z + eps, and z is a column of the state whose value is 1. So the gradients
// are those of V + 1 columns: of dout / den, with -(out . dout) / den as the last one.
struct Wide {
  float *dout = nullptr, *v = nullptr;                               // [B, T, H, V+1], [B, S, Hv, V+1]
  float *initial = nullptr, *dfinal = nullptr, *dinitial = nullptr;  // [N, H, K, V+1]
};

struct Scratch {
  Wide wide;
  float* parts = nullptr;  // [B, T or S, H, width]: a gradient before its heads are added
  float* state = nullptr;  // not causal: [N, H, K, V]
  float* z = nullptr;
  EngineScratch engine;
};

struct Plan {
  const LinearArgs& args;
  LinearShape s;
  Wide wide = {};
  bool untiled = false;  // walks of the backward off the tiles, which would take them

  // Where the gradients take dout, v and the states from.
  int64_t columns() const { return args.normalize ? s.V + 1 : s.V; }
  Rows dout_rows(const LinearGrads& grads) const {
    return args.normalize ? dense_rows(wide.dout, s.T, s.H, s.V + 1) : rows_of(grads.dout, s.H);
  }
  Rows v_rows() const {
    if (!args.normalize) return rows_of(args.v, s.H);
    Rows rows = dense_rows(wide.v, s.S, s.Hv, s.V + 1);
    rows.group = static_cast<int32_t>(s.H / (s.Hv > 0 ? s.Hv : 1));
    return rows;
  }
  States state_of(float* widened, const View& view) const {
    return args.normalize ? dense_states(widened, s.H, s.K, s.V + 1) : states_of(view);
  }

  Engine forward(const LinearOut& out) const {
    Engine e = engine_of(args, s);
    e.q = rows_of(args.q, s.H, map_of(args.map));
    e.k = rows_of(args.k, s.H, map_of(args.map));
    e.v = rows_of(args.v, s.H);
    e.out = rows_of(out.out, s.H);
    e.write_mask = mask_of(args);
    e.normalize = args.normalize;
    e.eps = static_cast<float>(args.eps);
    e.initial = states_of(args.initial_state);
    e.final = states_of(out.final_state);
    e.initial_z = vectors_of(args.initial_z);
    e.final_z = vectors_of(out.final_z);
    e.sums = args.normalize || out.final_z.given();
    if (args.normalize) e.den = scalars_of(out.den);
    return e;
  }
  // dq_i = scale sum_{j <= i} (dout_i . v_j) phi(k_j): the forward with (q, k, v) := (dout, v, k).
  Engine dq(const LinearGrads& grads) const {
    Engine e = transposed_engine();
    e.q = dout_rows(grads);
    e.k = v_rows();
    e.v = rows_of(args.k, s.H, map_of(args.map));
    e.write_mask = mask_of(args);
    e.out_source = rows_of(args.q, s.H, map_of(args.map));
    e.initial = transposed(state_of(wide.initial, args.initial_state));
    return e;
  }
  // dk_j = R_j v_j with R_j = dfinal_state + scale sum_{i >= j} phi(q_i) dout_i^T: (v, dout, q) in reverse.
  Engine dk(const LinearGrads& grads) const {
    Engine e = transposed_engine();
    e.q = v_rows();
    e.k = dout_rows(grads);
    e.v = rows_of(args.q, s.H, map_of(args.map));
    e.reverse = true;
    e.out_source = rows_of(args.k, s.H, map_of(args.map));
    e.out_mask = mask_of(args);
    if (!args.normalize) e.out_bias = transposed(vectors_of(grads.dfinal_z));
    e.initial = transposed(state_of(wide.dfinal, grads.dfinal_state));
    if (args.normalize || grads.dinitial_state.given()) {
      e.final = transposed(state_of(wide.dinitial, grads.dinitial_state));
    }
    scale_state(&e);
    return e;
  }
  // dv_j = R_j^T phi(k_j): (k, q, dout) in reverse.
  Engine dv(const LinearGrads& grads) const {
    Engine e = engine_of(args, s);
    e.q = rows_of(args.k, s.H, map_of(args.map));
    e.k = rows_of(args.q, s.H, map_of(args.map));
    e.v = dout_rows(grads);  // without the last column
    e.reverse = true;
    e.out_mask = mask_of(args);
    e.initial = states_of(grads.dfinal_state);
    e.final = states_of(grads.dinitial_state);
    scale_state(&e);
    return e;
  }
  Engine transposed_engine() const {
    Engine e = engine_of(args, s);
    e.K = static_cast<int32_t>(columns());
    e.V = static_cast<int32_t>(s.K);
    return e;
  }
  // The engine keeps R / scale.
  static void scale_state(Engine* e) {
    e->in_factor = 1 / e->scale;
    e->out_factor = e->scale;
  }

  // Runs an engine whose result is the gradient `result` of a tensor with `tokens` tokens and `heads` heads; the writes come
  // from `write_tokens` tokens.
  void run(const Launch& launch, Engine e, const View& result, int64_t tokens, int64_t write_tokens,
           const Scratch& scratch) const {
    const int64_t heads = result.given() ? result.size[2] : s.H, group = s.H / (heads == 0 ? 1 : heads);
    const bool grouped = result.given() && group > 1;
    e.untiled = untiled;
    if (result.given()) e.out = grouped ? dense_rows(scratch.parts, tokens, s.H, e.V) : rows_of(result, s.H);
    e.T = tokens;
    if (args.causal) {
      run_engine(launch, e, scratch.engine);
    } else {
      const Split two = split(e, write_tokens, scratch.state, scratch.z);
      run_engine(launch, two.write, scratch.engine);
      if (e.final.data != nullptr) {
        Engine store = two.read;  // no tokens: its final state is its initial one
        store.out = Rows();
        store.T = 0;
        store.offsets = nullptr;
        store.final = e.final;
        store.out_factor = e.out_factor;
        run_engine(launch, store, scratch.engine);
      }
      if (e.out.data != nullptr) run_engine(launch, two.read, scratch.engine);
    }
    if (grouped)
      sum_groups(launch, rows_of(result, heads), dense_rows(scratch.parts, tokens, s.H, e.V), s.B, tokens, heads, group, e.V);
  }
};

// What the walks of a backward look like to the choice of kernels, whatever their rows.
Engine walk_of(const Plan& plan) {
  Engine e = engine_of(plan.args, plan.s);
  e.V = static_cast<int32_t>(plan.columns());
  if (plan.args.causal) e.q = rows_of(plan.args.q, plan.s.H, map_of(plan.args.map));
  return e;
}

Scratch cut(Arena& arena, Row row, const Plan& plan, Pass pass) {
  const LinearShape& s = plan.s;
  Scratch scratch;
  if (!plan.args.causal) {
    scratch.state = arena.take<float>(s.N * s.H * s.K * plan.columns());
    scratch.z = arena.take<float>(s.N * s.H * s.K);
  }
  if (pass == Pass::backward) {
    const int64_t tokens = s.T > s.S ? s.T : s.S, width = s.K > s.V ? s.K : s.V;
    if (plan.args.normalize) {
      const int64_t states = s.N * s.H * s.K * (s.V + 1);
      scratch.wide.dout = arena.take<float>(s.B * s.T * s.H * (s.V + 1));
      scratch.wide.v = arena.take<float>(s.B * s.S * s.Hv * (s.V + 1));
      for (float** state : {&scratch.wide.initial, &scratch.wide.dfinal, &scratch.wide.dinitial}) {
        *state = arena.take<float>(states);
      }
    }
    if (s.Hq != s.H || s.Hk != s.H || s.Hv != s.H) scratch.parts = arena.take<float>(s.B * tokens * s.H * width);
  }
  scratch.engine = pass == Pass::backward ? cut_engine(arena, walk_of(plan)) : cut_engine(arena, row, plan.forward({}));
  return scratch;
}

}  // namespace

namespace {

// The call as the general engine has it, without its results.
Engine general_engine(const LinearArgs& args) {
  Engine e = Plan{args, linear_shape(args)}.forward(LinearOut());
  e.sums = true;  // dfinal_z may come
  return e;
}
bool has_general(const LinearArgs& args, Pass pass) {
  const LinearShape s = linear_shape(args);
  return s.S > 0 && is_general(general_engine(args), pass == Pass::backward);
}
void cut_call(Arena& arena, const LinearArgs& args, Pass pass) {
  const Engine e = general_engine(args);
  if (args.causal) {
    cut_general(arena, e, pass == Pass::backward);
  } else {
    cut_full(arena, e, linear_shape(args).S, pass == Pass::backward);
  }
}
void general_forward(const LinearArgs& args, const LinearOut& out, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  Arena arena(launch.workspace);
  const Engine e = Plan{args, s}.forward(out);
  if (args.causal) {
    run_general(launch, e, cut_general(arena, general_engine(args), false));
  } else {
    run_full(launch, e, s.S, cut_full(arena, general_engine(args), s.S, false));
  }
  if (!args.normalize && e.final_z.data != nullptr) {
    Engine keys = e;
    keys.T = s.S;
    sum_keys(launch, keys);
  }
}
void general_backward(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  Arena arena(launch.workspace);
  GeneralGradients g;
  g.base = general_engine(args);
  if (args.normalize) {
    g.base.den = scalars_of(out.den);
    g.out = rows_of(out.out, s.H);
  }
  g.dout = rows_of(grads.dout, s.H);
  g.dq = grads.dq;
  g.dk = grads.dk;
  g.dv = grads.dv;
  g.dfinal = states_of(grads.dfinal_state);
  g.dinitial = states_of(grads.dinitial_state);
  g.dfinal_z = vectors_of(grads.dfinal_z);
  g.dinitial_z = vectors_of(grads.dinitial_z);
  if (args.causal) {
    run_general_gradients(launch, g, cut_general(arena, g.base, true));
  } else {
    run_full_gradients(launch, g, s.S, cut_full(arena, g.base, s.S, true));
  }
  if (!args.normalize) copy_states(launch, g.dinitial_z, g.dfinal_z, s.N, s.H, s.K, 1);
}

// A call as the tiles take it, which have no maps and masks, 64 or 128 channels and aligned rows: copies of what does not fit.
struct LinearFitted {
  LinearArgs args;
  LinearOut out;      // where results lie that are copies
  LinearGrads grads;  // the same
};
constexpr int64_t kMostRows = int64_t{1} << 27;
bool is_fitted(Row row, const LinearArgs& args) {
  const LinearShape s = linear_shape(args);
  const Dtype dtype = args.q.dtype;
  if (row != Row::tile || !args.causal || args.normalize || !elementwise(args.map) || !is_16_bit(dtype)) return false;
  if (args.k.dtype != dtype || args.v.dtype != dtype || s.K < 1 || s.V < 1 || s.K > 128 || s.V > 128) return false;
  if (s.B * s.T * s.H == 0 || s.B * s.T * s.H > kMostRows) return false;
  return args.map != FeatureMap::identity || args.key_mask.given() || tile_width(s.K) != s.K || tile_width(s.V) != s.V ||
         !is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v);
}
LinearFitted cut_fitted(Arena& arena, const LinearArgs& args, Pass pass) {
  LinearFitted f{args};
  const LinearShape s = linear_shape(args);
  const int64_t wide_k = tile_width(s.K), wide_v = tile_width(s.V);
  const Dtype dtype = args.q.dtype;
  const bool K = wide_k != s.K, V = wide_v != s.V, mapped = args.map != FeatureMap::identity, masked = args.key_mask.given();
  f.args.scale = Maybe(s.scale);
  f.args.map = FeatureMap::identity;
  f.args.key_mask = View();
  if (K || mapped || !is_aligned(args.q)) f.args.q = dense_view(arena, args.q, dtype, wide_k);
  if (K || mapped || masked || !is_aligned(args.k)) f.args.k = dense_view(arena, args.k, dtype, wide_k);
  if (V || masked || !is_aligned(args.v)) f.args.v = dense_view(arena, args.v, dtype, wide_v);
  View out = args.v, state, z;
  out.size[2] = s.H;
  state.device = z.device = args.q.device;
  state.rank = 4;
  z.rank = 3;
  state.size[0] = z.size[0] = s.N;
  state.size[1] = z.size[1] = s.H;
  const auto cut_state = [&] { return dense_view(arena, state, Dtype::f32, wide_v, wide_k); };
  const auto cut_vector = [&] { return dense_view(arena, z, Dtype::f32, wide_k); };
  if ((K || V) && args.initial_state.given()) f.args.initial_state = cut_state();
  if (K && args.initial_z.given()) f.args.initial_z = cut_vector();
  if (pass == Pass::forward) {
    f.out.out = dense_view(arena, out, dtype, wide_v);  // the result's own rows are not known yet
    if (K || V) f.out.final_state = cut_state();
    if (K) f.out.final_z = cut_vector();
    return f;
  }
  if (V) f.grads.dout = dense_view(arena, out, dtype, wide_v);
  if (K || mapped) f.grads.dq = dense_view(arena, args.q, dtype, wide_k);
  if (K || mapped || masked) f.grads.dk = dense_view(arena, args.k, dtype, wide_k);
  if (V || masked) f.grads.dv = dense_view(arena, args.v, dtype, wide_v);
  if (K || V) f.grads.dfinal_state = cut_state(), f.grads.dinitial_state = cut_state();
  if (K) f.grads.dfinal_z = cut_vector(), f.grads.dinitial_z = cut_vector();
  return f;
}
void fit_inputs(const Launch& launch, const LinearFitted& f, const LinearArgs& call) {
  const Map map = map_of(call.map);
  const auto changed = [](const View& a, const View& b) { return b.given() && a.data != b.data; };
  if (changed(f.args.q, call.q)) fit(launch, f.args.q, call.q, {.map = map});
  if (changed(f.args.k, call.k)) fit(launch, f.args.k, call.k, {.map = map, .mask = call.key_mask});
  if (changed(f.args.v, call.v)) fit(launch, f.args.v, call.v, {.mask = call.key_mask});
  if (changed(f.args.initial_state, call.initial_state)) fit_state(launch, f.args.initial_state, call.initial_state);
  if (changed(f.args.initial_z, call.initial_z)) fit_vector(launch, f.args.initial_z, call.initial_z);
}
bool copies_out(const LinearFitted& f, const LinearOut& out) {
  return out.out.given() && (out.out.size[3] != f.out.out.size[3] || !is_aligned(out.out));
}
void replace(View& view, const View& copy) {
  if (view.given() && copy.given()) view = copy;
}
bool both(const View& a, const View& b) { return a.given() && b.given(); }

const char* row_reason(Row row, const LinearArgs& args, const LinearOut* out, Pass pass) {
  if (const char* reason = refuses_map(args)) return reason;
  if (is_fitted(row, args)) {
    Arena arena = assumed_arena();
    const LinearFitted fitted = cut_fitted(arena, args, pass);
    LinearOut inner;
    if (out != nullptr) inner = *out;
    if (pass == Pass::forward && copies_out(fitted, inner)) inner.out = fitted.out.out;
    return row_reason(row, fitted.args, out == nullptr ? nullptr : &inner, pass);
  }
  const LinearShape s = linear_shape(args);
  const Plan plan = {args, s};
  if (row == Row::general) {
    if (args.causal && out != nullptr && args.initial_state.given() && args.initial_state.data == out->final_state.data) {
      return "it keeps the state before the call";
    }
    if (s.T + s.S < 32) return "it takes 16 tokens or more: fewer go one by one";
    return has_general(args, pass) ? nullptr : "it takes calls with tokens, heads, keys and values";
  }
  if (row != Row::step && !args.causal) return "it is causal alone";
  Engine e = plan.forward(out == nullptr ? LinearOut() : *out);
  if (out == nullptr || pass == Pass::backward) e.out = assumed_rows(s.T, s.H, s.V, args.q.dtype);
  if (pass == Pass::forward) return s.H == 0 ? nullptr : row_refuses(row, e);
  if (args.normalize && s.V >= kMaxStepWidth) {
    return "the CUDA backward of the normaliser takes values of at most 255 channels";
  }
  if (s.V > kMaxStepWidth) return "the CUDA backward takes values of at most 256 channels";
  if (s.scale == 0) return "the CUDA backward needs a scale other than 0";
  // dq, dk and dv are walks, each on the best kernel that takes it; the row is that of the largest part.
  if (row == Row::tile) return tile_refuses(e);
  if (row == Row::chunk && !has_chunks(walk_of(plan))) {
    return "its walks run on the chunks of 1 to 128 channels, and not where the matrix units do";
  }
  return nullptr;
}

}  // namespace

const char* LinearRows::refuses(Row row, const LinearArgs& args, const LinearOut* out, Pass pass) {
  const char* reason = row_reason(row, args, out, pass);
  if (reason == nullptr && row == Row::chunk && args.q.dtype != Dtype::f32 &&  // as for the recurrence
      row_reason(Row::general, args, out, pass) == nullptr) {
    return "cuda.general takes this call in 16 bits";
  }
  return reason;
}

namespace {

// A call that is one of the recurrence without decays: its gradients of grouped heads stay on the tiles.
RecurrenceArgs as_recurrence(const LinearArgs& args) {
  RecurrenceArgs r;
  r.q = args.q;
  r.k = args.k;
  r.v = args.v;
  r.cu_seqlens = args.cu_seqlens;
  r.initial_state = args.initial_state;
  r.scale = Maybe(linear_shape(args).scale);
  return r;
}
bool has_groups_on_tiles(Row row, const LinearArgs& args) {
  const LinearShape s = linear_shape(args);
  if (row != Row::tile || !args.causal || args.normalize || args.map != FeatureMap::identity || args.key_mask.given()) {
    return false;
  }
  const bool grouped = s.Hq != s.H || s.Hk != s.H || s.Hv != s.H;
  return grouped && RecurrenceRows::refuses(Row::tile, as_recurrence(args), nullptr, Pass::backward) == nullptr;
}

}  // namespace

int64_t LinearRows::workspace(Row row, const LinearArgs& args, Pass pass) {
  if (is_fitted(row, args)) {
    Arena copies = assumed_arena();
    const LinearArgs inner = cut_fitted(copies, args, pass).args;
    return copies.used() + workspace(row, inner, pass);
  }
  Arena arena;
  if (row == Row::general) {
    cut_call(arena, args, pass);
  } else {
    cut(arena, row, {args, linear_shape(args)}, pass);
  }
  if (pass == Pass::backward && has_groups_on_tiles(row, args)) {
    const int64_t bytes = RecurrenceRows::workspace(Row::tile, as_recurrence(args), pass);
    return bytes > arena.used() ? bytes : arena.used();
  }
  return arena.used();
}

void LinearRows::forward(Row row, const LinearArgs& args, const LinearOut& out, const Launch& launch) {
  if (is_fitted(row, args)) {
    Arena copies(launch.workspace);
    const LinearFitted fitted = cut_fitted(copies, args, Pass::forward);
    fit_inputs(launch, fitted, args);
    LinearOut inner_out = out;
    const bool is_copied = copies_out(fitted, out);
    if (is_copied) inner_out.out = fitted.out.out;
    replace(inner_out.final_state, fitted.out.final_state);
    replace(inner_out.final_z, fitted.out.final_z);
    Launch inner = launch;
    inner.workspace += copies.used();
    forward(row, fitted.args, inner_out, inner);
    if (is_copied) fit(launch, out.out, fitted.out.out);
    if (both(out.final_state, fitted.out.final_state)) fit_state(launch, out.final_state, fitted.out.final_state);
    if (both(out.final_z, fitted.out.final_z)) fit_vector(launch, out.final_z, fitted.out.final_z);
    return;
  }
  if (row == Row::general) return general_forward(args, out, launch);
  const Plan plan = {args, linear_shape(args)};
  Arena arena(launch.workspace);
  const Scratch scratch = cut(arena, row, plan, Pass::forward);
  const Engine e = plan.forward(out);
  if (args.causal) return run_engine(launch, row, e, scratch.engine);
  const Split two = split(e, plan.s.S, scratch.state, scratch.z);
  run_engine(launch, Row::step, two.write, scratch.engine);
  copy_states(launch, e.final, two.write.final, e.N, e.H, e.K, e.V);
  copy_states(launch, e.final_z, two.write.final_z, e.N, e.H, e.K, 1);
  run_engine(launch, Row::step, two.read, scratch.engine);
}

void LinearRows::backward(Row row, const LinearArgs& args, const LinearOut& out, const LinearGrads& grads,
                          const Launch& launch) {
  if (row == Row::general) return general_backward(args, out, grads, launch);
  if (is_fitted(row, args)) {
    Arena copies(launch.workspace);
    const LinearFitted fitted = cut_fitted(copies, args, Pass::backward);
    const LinearGrads& g = fitted.grads;
    fit_inputs(launch, fitted, args);
    if (both(grads.dout, g.dout)) fit(launch, g.dout, grads.dout);
    if (both(grads.dfinal_state, g.dfinal_state)) fit_state(launch, g.dfinal_state, grads.dfinal_state);
    if (both(grads.dfinal_z, g.dfinal_z)) fit_vector(launch, g.dfinal_z, grads.dfinal_z);
    LinearGrads inner_grads = grads;
    replace(inner_grads.dout, g.dout);
    replace(inner_grads.dfinal_state, g.dfinal_state);
    replace(inner_grads.dfinal_z, g.dfinal_z);
    replace(inner_grads.dq, g.dq);
    replace(inner_grads.dk, g.dk);
    replace(inner_grads.dv, g.dv);
    replace(inner_grads.dinitial_state, g.dinitial_state);
    replace(inner_grads.dinitial_z, g.dinitial_z);
    Launch inner = launch;
    inner.workspace += copies.used();
    backward(row, fitted.args, out, inner_grads, inner);
    const Map map = map_of(args.map);
    if (both(grads.dq, g.dq)) fit(launch, grads.dq, g.dq, {.map = map, .source = args.q});
    if (both(grads.dk, g.dk)) fit(launch, grads.dk, g.dk, {.map = map, .source = args.k, .mask = args.key_mask});
    if (both(grads.dv, g.dv)) fit(launch, grads.dv, g.dv, {.mask = args.key_mask});
    if (both(grads.dinitial_state, g.dinitial_state)) fit_state(launch, grads.dinitial_state, g.dinitial_state);
    if (both(grads.dinitial_z, g.dinitial_z)) fit_vector(launch, grads.dinitial_z, g.dinitial_z);
    return;
  }
  if (!grads.dfinal_z.given() && has_groups_on_tiles(row, args)) {
    RecurrenceGrads g;
    g.dout = grads.dout;
    g.dfinal_state = grads.dfinal_state;
    g.dq = grads.dq;
    g.dk = grads.dk;
    g.dv = grads.dv;
    g.dinitial_state = grads.dinitial_state;
    RecurrenceRows::backward(Row::tile, as_recurrence(args), {}, g, launch);
    const LinearShape s = linear_shape(args);
    return copy_states(launch, vectors_of(grads.dinitial_z), States(), s.N, s.H, s.K, 1);
  }
  Plan plan = {args, linear_shape(args)};
  const LinearShape& s = plan.s;
  Arena arena(launch.workspace);
  const Scratch scratch = cut(arena, row, plan, Pass::backward);
  plan.wide = scratch.wide;
  plan.untiled = row == Row::step && refuses(Row::tile, args, nullptr, Pass::backward) == nullptr;  // asked for by name
  // The state [K, V] and the sums [K] in the columns of one.
  const auto state_part = [&](float* wide) { return States{wide, s.H * s.K * (s.V + 1), s.K * (s.V + 1), s.V + 1, 1}; };
  const auto z_part = [&](float* wide) { return States{wide + s.V, s.H * s.K * (s.V + 1), s.K * (s.V + 1), s.V + 1, 1}; };
  if (args.normalize) {
    const int64_t rows = s.B * s.T * s.H, values = s.B * s.S * s.Hv;
    const int32_t H = static_cast<int32_t>(s.H), Hv = static_cast<int32_t>(s.Hv), V = static_cast<int32_t>(s.V);
    enqueue(launch, {"linear/linear_rows_cuda", "widen_gradient", 256}, {(rows + 7) / 8}, rows_of(grads.dout, s.H),
            rows_of(out.out, s.H), scalars_of(out.den), rows, s.T, H, V, plan.wide.dout);
    enqueue(launch, {"linear/linear_rows_cuda", "widen_values", 256}, {(values + 7) / 8}, rows_of(args.v, s.Hv), values, s.S,
            Hv, V, plan.wide.v);
    copy_states(launch, state_part(plan.wide.initial), states_of(args.initial_state), s.N, s.H, s.K, s.V);
    copy_states(launch, z_part(plan.wide.initial), vectors_of(args.initial_z), s.N, s.H, s.K, 1);
    copy_states(launch, state_part(plan.wide.dfinal), states_of(grads.dfinal_state), s.N, s.H, s.K, s.V);
    copy_states(launch, z_part(plan.wide.dfinal), vectors_of(grads.dfinal_z), s.N, s.H, s.K, 1);
  }
  if (grads.dq.given()) plan.run(launch, plan.dq(grads), grads.dq, s.T, s.S, scratch);
  const bool states = grads.dinitial_state.given() || (args.normalize && grads.dinitial_z.given());
  const bool by_dk = states && (args.normalize || !grads.dv.given());  // which walk leaves the gradient of the state
  if (grads.dk.given() || by_dk) {
    Engine e = plan.dk(grads);
    if (!by_dk) e.final = States();  // once is enough
    plan.run(launch, e, grads.dk, s.S, s.T, scratch);
  }
  if (grads.dv.given()) {
    Engine e = plan.dv(grads);
    if (by_dk) e.final = States();
    plan.run(launch, e, grads.dv, s.S, s.T, scratch);
  }
  if (args.normalize) {
    copy_states(launch, states_of(grads.dinitial_state), state_part(plan.wide.dinitial), s.N, s.H, s.K, s.V);
    copy_states(launch, vectors_of(grads.dinitial_z), z_part(plan.wide.dinitial), s.N, s.H, s.K, 1);
  } else if (grads.dinitial_z.given()) {
    copy_states(launch, vectors_of(grads.dinitial_z), vectors_of(grads.dfinal_z), s.N, s.H, s.K, 1);
  }
}

namespace {

Engine decode_engine(const LinearDecodeArgs& args, const LinearShape& s, const Rows& out) {
  Engine e;
  e.N = s.N;
  e.T = s.T;
  e.H = static_cast<int32_t>(s.H);
  e.K = static_cast<int32_t>(s.K);
  e.V = static_cast<int32_t>(s.V);
  e.scale = static_cast<float>(s.scale);
  e.eps = static_cast<float>(args.eps);
  e.normalize = args.normalize;
  e.sums = args.z.given();
  e.q = rows_of(args.q, s.H, map_of(args.map));
  e.k = rows_of(args.k, s.H, map_of(args.map));
  e.v = rows_of(args.v, s.H);
  e.out = out;
  e.initial = e.final = states_of(args.state);
  e.initial_z = e.final_z = vectors_of(args.z);
  return e;
}

}  // namespace

const char* LinearDecodeRows::refuses(Row row, const LinearDecodeArgs& args, const LinearDecodeOut* out, Pass) {
  if (args.compensation.given()) return "the CUDA kernels have no compensated sums";
  if (const char* reason = refuses_map(args)) return reason;
  const LinearShape s = linear_shape(args);
  if (s.H == 0) return nullptr;
  return row_refuses(
      row, decode_engine(args, s, out == nullptr ? assumed_rows(s.T, s.H, s.V, args.q.dtype) : rows_of(out->out, s.H)));
}
void LinearDecodeRows::forward(Row row, const LinearDecodeArgs& args, const LinearDecodeOut& out, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  run_engine(launch, row, decode_engine(args, s, rows_of(out.out, s.H)), {});
}

}  // namespace linnet::cuda
