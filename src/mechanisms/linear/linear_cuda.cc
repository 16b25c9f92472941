// linear on the GPU: elementwise maps; everything is a call of the recurrence engine (recurrence/cuda/engine.h).
#include "linear_cuda.h"

#include "linear_shape.h"
#include "mechanisms/recurrence/cuda/chunk/launch.h"
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

const char* LinearRows::refuses(Row row, const LinearArgs& args, const LinearOut* out, Pass pass) {
  if (const char* reason = refuses_map(args)) return reason;
  const LinearShape s = linear_shape(args);
  const Plan plan = {args, s};
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

int64_t LinearRows::workspace(Row row, const LinearArgs& args, Pass pass) {
  Arena arena;
  cut(arena, row, {args, linear_shape(args)}, pass);
  return arena.used();
}

void LinearRows::forward(Row row, const LinearArgs& args, const LinearOut& out, const Launch& launch) {
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
