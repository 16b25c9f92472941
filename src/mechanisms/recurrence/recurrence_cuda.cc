// The recurrence family on the GPU: every call is one engine; gradients are several (recurrence_gradients.h), or the kernels of
// the delta rules.
#include "mechanisms/recurrence/recurrence_channel_launch.h"
#include "mechanisms/recurrence/recurrence_delta_launch.h"
#include "mechanisms/recurrence/recurrence_gradients.h"
#include "recurrence.h"
#include "recurrence_shape.h"

namespace linnet::cuda {
namespace {

// What all engines of one call share.
template <class Args>
Engine engine_of(const Args& args, const RecurrenceShape& s) {
  Engine e;
  e.N = s.N;
  e.T = s.T;
  e.H = static_cast<int32_t>(s.H);
  e.K = static_cast<int32_t>(s.K);
  e.V = static_cast<int32_t>(s.V);
  e.scale = static_cast<float>(s.scale);
  if (args.g.given()) {
    e.g = scalars_of(args.g);
    e.g_width = s.per_channel ? e.K : 1;
  } else if (args.g_head.given()) {
    e.g = {args.g_head.data, 0, 0, args.g_head.stride[0], 1, args.g_head.dtype, Map::identity};
    e.g_width = 1;
  }
  if (args.beta.given()) {
    e.beta = scalars_of(args.beta);
    e.beta_factor = args.double_beta ? 2 : 1;
  }
  e.l2_norm = args.l2_norm;
  e.q = rows_of(args.q, s.H);
  e.k = rows_of(args.k, s.H);
  e.v = rows_of(args.v, s.H);
  return e;
}

Engine forward_engine(const RecurrenceArgs& args) {
  Engine e = engine_of(args, recurrence_shape(args));
  if (args.cu_seqlens.given()) {
    e.offsets = args.cu_seqlens.data;
    e.offsets_64 = args.cu_seqlens.dtype == Dtype::i64;
  }
  return e;
}

bool is_grouped(const RecurrenceArgs& args) {
  const RecurrenceShape s = recurrence_shape(args);
  return s.Hq != s.H || s.Hk != s.H || s.Hv != s.H;
}

template <class Args>
const char* refuses(const Args& args) {
  if (args.q.dtype == Dtype::f64) return "the CUDA kernels have no f64";
  if (args.q.size[3] > kMaxStepWidth) return "the CUDA kernels take keys of at most 256 channels";
  return nullptr;
}

}  // namespace

const char* recurrence_refuses(const RecurrenceArgs& args, Pass pass) {
  if (const char* reason = refuses(args)) return reason;
  if (pass == Pass::forward) return nullptr;
  const RecurrenceShape s = recurrence_shape(args);
  if (s.scale == 0) return "the CUDA backward needs a scale other than 0";
  if (args.beta.given()) {
    const Engine e = forward_engine(args);
    return (is_delta(e) && e.q.dtype == Dtype::bf16) || (!e.l2_norm && (e.N == 0 || e.T == 0))
               ? nullptr
               : "the CUDA backward with beta takes bf16, keys and values of "
                 "64 or 128 channels, one decay per head, no l2_norm";
  }
  if (s.per_channel) {
    if (has_channel_gradients(forward_engine(args)) || s.N == 0 || s.T == 0) return nullptr;
    return "the CUDA backward with a decay per channel takes bf16, keys and values of 64 or 128 channels";
  }
  if (args.l2_norm) {
    return "the CUDA kernels have no backward with l2_norm";
  }
  if (s.V > kMaxStepWidth) return "the CUDA backward takes values of at most 256 channels";
  return nullptr;
}

namespace {

// The gradients with beta: operands where the copy engine can read them, results where they can be summed over groups of heads.
struct DeltaCall {
  Engine e;
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;  // copies, where needed
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;                   // of every head
  DeltaScratch scratch;
};
DeltaCall cut_call(Arena& arena, const RecurrenceArgs& args) {
  const RecurrenceShape s = recurrence_shape(args);
  DeltaCall call;
  call.e = forward_engine(args);
  const int64_t tokens = s.B * s.T;
  const auto copy = [&](const Rows& rows, int64_t heads, int64_t width) {
    return is_aligned(rows, rows.dtype) ? nullptr : arena.take<uint16_t>(tokens * heads * width);
  };
  call.q = copy(call.e.q, s.Hq, s.K);
  call.k = copy(call.e.k, s.Hk, s.K);
  call.v = copy(call.e.v, s.Hv, s.V);
  call.dout = arena.take<uint16_t>(tokens * s.H * s.V);  // whose view is not known yet
  if (s.Hq != s.H) call.dq = arena.take<float>(tokens * s.H * s.K);
  if (s.Hk != s.H) call.dk = arena.take<float>(tokens * s.H * s.K);
  if (s.Hv != s.H) call.dv = arena.take<float>(tokens * s.H * s.V);
  call.scratch = cut_delta(arena, call.e, true);
  return call;
}

void delta_backward(const RecurrenceArgs& args, const RecurrenceGrads& grads, const Launch& launch) {
  const RecurrenceShape s = recurrence_shape(args);
  if (s.N == 0 || s.T == 0) {
    copy_states(launch, states_of(grads.dinitial_state), states_of(grads.dfinal_state), s.N, s.H, s.K, s.V);
    return;
  }
  Arena arena(launch.workspace);
  DeltaCall call = cut_call(arena, args);
  const auto copied = [&](const Rows& from, uint16_t* to, int64_t heads, int64_t width) {
    Rows rows = {to, s.T * heads * width, heads * width, width, static_cast<int32_t>(s.H / heads), args.q.dtype, Map::identity};
    copy_rows(launch, rows, from, s.B, s.T, heads, width);
    return rows;
  };
  if (call.q != nullptr) call.e.q = copied(call.e.q, call.q, s.Hq, s.K);
  if (call.k != nullptr) call.e.k = copied(call.e.k, call.k, s.Hk, s.K);
  if (call.v != nullptr) call.e.v = copied(call.e.v, call.v, s.Hv, s.V);
  call.e.initial = states_of(args.initial_state);
  DeltaGradients d;
  d.dout = rows_of(grads.dout, s.H);
  if (!is_aligned(d.dout, args.q.dtype)) d.dout = copied(d.dout, call.dout, s.H, s.V);
  const auto result = [&](const View& view, float* parts, int64_t width) {
    return view.given() && parts != nullptr ? dense_rows(parts, s.T, s.H, width) : rows_of(view, s.H);
  };
  d.dq = result(grads.dq, call.dq, s.K);
  d.dk = result(grads.dk, call.dk, s.K);
  d.dv = result(grads.dv, call.dv, s.V);
  d.dg = scalars_of(grads.dg);
  d.dbeta = scalars_of(grads.dbeta);
  d.dfinal = states_of(grads.dfinal_state);
  d.dinitial = states_of(grads.dinitial_state);
  run_delta_gradients(launch, call.e, d, call.scratch);
  const auto add = [&](const View& view, float* parts, int64_t heads, int64_t width) {
    if (view.given() && parts != nullptr)
      sum_groups(launch, rows_of(view, heads), dense_rows(parts, s.T, s.H, width), s.B, s.T, heads, s.H / heads, width);
  };
  add(grads.dq, call.dq, s.Hq, s.K);
  add(grads.dk, call.dk, s.Hk, s.K);
  add(grads.dv, call.dv, s.Hv, s.V);
}

}  // namespace

int64_t recurrence_workspace(const RecurrenceArgs& args, Pass pass, int) {
  const Engine e = forward_engine(args);
  Arena arena;
  if (pass == Pass::forward) {
    cut_engine(arena, e);
  } else if (args.beta.given()) {
    cut_call(arena, args);
  } else if (e.g_width > 1) {
    cut_channel_gradients(arena, e);
  } else {
    cut_gradients(arena, e, is_grouped(args));
  }
  return arena.used();
}

void recurrence_forward(const RecurrenceArgs& args, const RecurrenceOut& out, const Launch& launch) {
  Engine e = forward_engine(args);
  e.out = rows_of(out.out, e.H);
  e.initial = states_of(args.initial_state);
  e.final = states_of(out.final_state);
  Arena arena(launch.workspace);
  run_engine(launch, e, cut_engine(arena, e));
}

void recurrence_backward(const RecurrenceArgs& args, const RecurrenceOut&, const RecurrenceGrads& grads, const Launch& launch) {
  if (args.beta.given()) return delta_backward(args, grads, launch);
  Gradients g;
  g.base = forward_engine(args);
  if (g.base.g_width > 1) {
    Arena arena(launch.workspace);
    const ChannelGradients gradients = {g.base,
                                        rows_of(grads.dout, g.base.H),
                                        grads.dq,
                                        grads.dk,
                                        grads.dv,
                                        grads.dg,
                                        states_of(args.initial_state),
                                        states_of(grads.dfinal_state),
                                        states_of(grads.dinitial_state)};
    return run_channel_gradients(launch, gradients, cut_channel_gradients(arena, g.base));
  }
  g.dout = rows_of(grads.dout, g.base.H);
  g.dq = grads.dq;
  g.dk = grads.dk;
  g.dv = grads.dv;
  g.dg = scalars_of(grads.dg);
  g.dg_head = grads.dg_head;
  g.initial = states_of(args.initial_state);
  g.dfinal = states_of(grads.dfinal_state);
  g.dinitial = states_of(grads.dinitial_state);
  Arena arena(launch.workspace);
  run_gradients(launch, g, cut_gradients(arena, g.base, is_grouped(args)));
}

const char* recurrence_decode_refuses(const RecurrenceDecodeArgs& args, Pass) { return refuses(args); }
int64_t recurrence_decode_workspace(const RecurrenceDecodeArgs&, Pass, int) { return 0; }
void recurrence_decode_forward(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Launch& launch) {
  Engine e = engine_of(args, recurrence_shape(args));
  e.out = rows_of(out.out, e.H);
  e.initial = e.final = states_of(args.state);
  run_engine(launch, e, {});
}

}  // namespace linnet::cuda
