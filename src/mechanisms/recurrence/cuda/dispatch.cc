// The recurrence family on the GPU: every call is one engine; gradients are several (tile/gradients.h), or the kernels of
// the delta rules and of decays per channel, or, for whatever these do not take, go token by token (plain/plain.h).
#include "mechanisms/recurrence/cuda/dispatch.h"

#include "mechanisms/recurrence/cuda/channel/launch.h"
#include "mechanisms/recurrence/cuda/chunk/gradients.h"
#include "mechanisms/recurrence/cuda/chunk/launch.h"
#include "mechanisms/recurrence/cuda/fitted.h"
#include "mechanisms/recurrence/cuda/plain/plain.h"
#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"
#include "mechanisms/recurrence/shape.h"
#include "mechanisms/shared/copy_rows.h"

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

// Without beta, one decay for all channels: dq, dk and dv are walks of the engine, on whichever row takes each.
const char* walks_refuse(const Engine& e) {
  if (e.beta.data != nullptr) return "its gradients have no delta rule (beta)";
  if (e.g_width > 1) return "its gradients have one decay for all channels of a head";
  if (e.l2_norm) return "its gradients do not normalise q and k (l2_norm)";
  if (e.scale == 0) return "its gradients are in units of the scale, which is 0";
  return e.V <= kMaxStepWidth ? nullptr : "its gradients take values of at most 256 channels";
}

// The forward's engine with results that the tiles can write to: those of a backward have copies where they cannot.
const char* tiles_refuse_walks(const Engine& base) {
  Engine e = base;
  e.out = assumed_rows(e.T, e.H, e.V, e.q.dtype);
  const char* reason = walks_refuse(e);
  return reason != nullptr ? reason : tile_refuses(e);
}

const char* gradients_refuse(Row row, const Engine& e) {
  switch (row) {
    case Row::step: return nullptr;
    case Row::chunk:
      if (e.beta.data != nullptr) {
        if (e.g_width > 1) return "its decays are one for all channels of a head";
        return e.l2_norm ? "it does not normalise q and k (l2_norm)" : nullptr;
      }
      if (const char* reason = walks_refuse(e)) return reason;
      return has_chunks(e) ? nullptr : "its walks run on the chunks of 1 to 128 channels, and not where the matrix units do";
    case Row::general: return general_refuses(e, true);
    case Row::tile: return tiles_refuse_walks(e);
    case Row::channel:
      return e.scale == 0 ? "its gradients are in units of the scale, which is 0" : channel_gradients_refuse(e);
    case Row::kda: return kda_gradients_refuse(e);
    case Row::delta: return e.q.dtype == Dtype::f16 ? "its gradients are in bf16" : delta_shape_refuses(e);
    case Row::decode: break;
  }
  return "it has no gradients";
}

// How a row has the gradients of a call.
enum class Way { walks, delta, chunks, channels, kda, general, plain };
Way way_of(Row row, const Engine& e) {
  switch (row) {
    case Row::delta: return Way::delta;
    case Row::kda: return Way::kda;
    case Row::channel: return Way::channels;
    case Row::chunk: return e.beta.data != nullptr ? Way::chunks : Way::walks;
    case Row::tile: return Way::walks;
    case Row::general: return Way::general;
    case Row::step:
    case Row::decode: break;
  }
  return walks_refuse(e) == nullptr ? Way::walks : Way::plain;
}

// The gradients with beta: operands where the copy engine can read them (those of chunks need not), results where they can be
// summed over groups of heads.
struct DeltaCall {
  Engine e;
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;  // copies, where needed
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;                   // of every head
  DeltaScratch scratch;
  DeltaChunkScratch chunks;
};
DeltaCall cut_call(Arena& arena, const RecurrenceArgs& args, bool chunks) {
  const RecurrenceShape s = recurrence_shape(args);
  DeltaCall call;
  call.e = forward_engine(args);
  const int64_t tokens = s.B * s.T;
  if (s.Hq != s.H) call.dq = arena.take<float>(tokens * s.H * s.K);
  if (s.Hk != s.H) call.dk = arena.take<float>(tokens * s.H * s.K);
  if (s.Hv != s.H) call.dv = arena.take<float>(tokens * s.H * s.V);
  if (chunks) {
    call.chunks = cut_delta_chunks(arena, call.e);
    return call;
  }
  const auto copy = [&](const Rows& rows, int64_t heads, int64_t width) {
    return is_aligned(rows, rows.dtype) ? nullptr : arena.take<uint16_t>(tokens * heads * width);
  };
  call.q = copy(call.e.q, s.Hq, s.K);
  call.k = copy(call.e.k, s.Hk, s.K);
  call.v = copy(call.e.v, s.Hv, s.V);
  call.dout = arena.take<uint16_t>(tokens * s.H * s.V);  // whose view is not known yet
  call.scratch = cut_delta(arena, call.e, true);
  return call;
}

void delta_backward(const RecurrenceArgs& args, const RecurrenceGrads& grads, const Launch& launch, bool chunks) {
  const RecurrenceShape s = recurrence_shape(args);
  if (s.N == 0 || s.T == 0) {
    copy_states(launch, states_of(grads.dinitial_state), states_of(grads.dfinal_state), s.N, s.H, s.K, s.V);
    return;
  }
  Arena arena(launch.workspace);
  DeltaCall call = cut_call(arena, args, chunks);
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
  if (!chunks && !is_aligned(d.dout, args.q.dtype)) d.dout = copied(d.dout, call.dout, s.H, s.V);
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
  if (chunks) {
    run_delta_chunks(launch, call.e, d, call.chunks);
  } else {
    run_delta_gradients(launch, call.e, d, call.scratch);
  }
  const auto add = [&](const View& view, float* parts, int64_t heads, int64_t width) {
    if (view.given() && parts != nullptr)
      sum_groups(launch, rows_of(view, heads), dense_rows(parts, s.T, s.H, width), s.B, s.T, heads, s.H / heads, width);
  };
  add(grads.dq, call.dq, s.Hq, s.K);
  add(grads.dk, call.dk, s.Hk, s.K);
  add(grads.dv, call.dv, s.Hv, s.V);
}

const char* row_reason(Row row, const RecurrenceArgs& args, const RecurrenceOut* out, Pass pass) {
  if (const char* reason = cuda::refuses(args)) return reason;
  if (is_fitted(row, args)) {
    Arena arena = assumed_arena();
    const Fitted fitted = cut_fitted(arena, row, args, pass);
    RecurrenceOut inner;
    if (out != nullptr) inner = *out;
    if (pass == Pass::forward && fitted.copies_out(inner)) inner.out = fitted.out;
    return is_fitted(row, fitted.args) ? "its tensors lie elsewhere"
                                       : row_reason(row, fitted.args, out == nullptr ? nullptr : &inner, pass);
  }
  Engine e = forward_engine(args);
  if (e.H == 0) return nullptr;  // every result is empty
  if (pass == Pass::backward) return gradients_refuse(row, e);
  e.out = out == nullptr ? assumed_rows(e.T, e.H, e.V, args.q.dtype) : rows_of(out->out, e.H);
  e.initial = states_of(args.initial_state);
  if (out != nullptr) e.final = states_of(out->final_state);
  return row_refuses(row, e);
}

}  // namespace

const char* RecurrenceRows::refuses(Row row, const RecurrenceArgs& args, const RecurrenceOut* out, Pass pass) {
  const char* reason = row_reason(row, args, out, pass);
  // The multiply-add units are as fast in f32 as three planes, and as two where decays are of channels; else planes are faster.
  const bool planes = args.q.dtype != Dtype::f32 && !(pass == Pass::forward && args.g.given() && args.g.rank == 4);
  if (reason == nullptr && row == Row::chunk && planes && row_reason(Row::general, args, out, pass) == nullptr) {
    return "cuda.general takes this call in 16 bits";
  }
  return reason;
}

int64_t RecurrenceRows::workspace(Row row, const RecurrenceArgs& args, Pass pass) {
  if (is_fitted(row, args)) {
    Arena copies = assumed_arena();
    const RecurrenceArgs inner = cut_fitted(copies, row, args, pass).args;
    return copies.used() + workspace(row, inner, pass);
  }
  const Engine e = forward_engine(args);
  Arena arena;
  if (pass == Pass::forward) {
    cut_engine(arena, row, e);
  } else {
    switch (way_of(row, e)) {
      case Way::walks: cut_gradients(arena, e, is_grouped(args)); break;
      case Way::delta: cut_call(arena, args, false); break;
      case Way::chunks: cut_call(arena, args, true); break;
      case Way::channels: cut_channel_gradients(arena, e); break;
      case Way::kda: cut_kda_gradients(arena, e); break;
      case Way::general: cut_general(arena, e, true); break;
      case Way::plain: cut_plain(arena, e); break;
    }
  }
  return arena.used();
}

void RecurrenceRows::forward(Row row, const RecurrenceArgs& args, const RecurrenceOut& out, const Launch& launch) {
  if (is_fitted(row, args)) {
    Arena copies(launch.workspace);
    const Fitted fitted = cut_fitted(copies, row, args, Pass::forward);
    Launch inner = launch;
    inner.workspace += copies.used();
    forward(row, fitted.args, fitted.begin(launch, args, out), inner);
    return fitted.end(launch, out);
  }
  Engine e = forward_engine(args);
  if (e.H == 0) return;  // every result is empty
  e.out = rows_of(out.out, e.H);
  e.initial = states_of(args.initial_state);
  e.final = states_of(out.final_state);
  Arena arena(launch.workspace);
  run_engine(launch, row, e, cut_engine(arena, row, e));
}

void RecurrenceRows::backward(Row row, const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                              const Launch& launch) {
  if (is_fitted(row, args)) {
    Arena copies(launch.workspace);
    const Fitted fitted = cut_fitted(copies, row, args, Pass::backward);
    Launch inner = launch;
    inner.workspace += copies.used();
    backward(row, fitted.args, out, fitted.begin(launch, args, grads), inner);
    return fitted.end(launch, args, grads);
  }
  Engine base = forward_engine(args);
  if (base.H == 0) return;  // every gradient is empty
  const States initial = states_of(args.initial_state), dfinal = states_of(grads.dfinal_state);
  const States dinitial = states_of(grads.dinitial_state);
  const Rows dout = rows_of(grads.dout, base.H);
  Arena arena(launch.workspace);
  switch (way_of(row, base)) {
    case Way::delta: return delta_backward(args, grads, launch, false);
    case Way::chunks: return delta_backward(args, grads, launch, true);
    case Way::channels: {
      const ChannelGradients g = {base, dout, grads.dq, grads.dk, grads.dv, grads.dg, initial, dfinal, dinitial};
      return run_channel_gradients(launch, g, cut_channel_gradients(arena, base));
    }
    case Way::kda: {
      const KdaGradients g = {base,    dout,   grads.dq, grads.dk, grads.dv, grads.dg, scalars_of(grads.dbeta),
                              initial, dfinal, dinitial};
      return run_kda_gradients(launch, g, cut_kda_gradients(arena, base));
    }
    case Way::general: {
      GeneralGradients g;
      g.base = base;
      g.base.initial = initial;
      g.dout = dout;
      g.dq = grads.dq;
      g.dk = grads.dk;
      g.dv = grads.dv;
      g.dg = scalars_of(grads.dg);
      g.dbeta = scalars_of(grads.dbeta);
      g.dg_head = grads.dg_head;
      g.dfinal = dfinal;
      g.dinitial = dinitial;
      return run_general_gradients(launch, g, cut_general(arena, base, true));
    }
    case Way::plain: {
      const PlainGradients g = {
          base,          dout,    grads.dq, grads.dk, grads.dv, scalars_of(grads.dg), scalars_of(grads.dbeta),
          grads.dg_head, initial, dfinal,   dinitial};
      return run_plain(launch, g, cut_plain(arena, base));
    }
    case Way::walks: break;
  }
  // Asked for by name where the tiles would do.
  if (row == Row::step && tiles_refuse_walks(base) == nullptr) base.untiled = true;
  const Gradients g = {base,          dout,    grads.dq, grads.dk, grads.dv, scalars_of(grads.dg),
                       grads.dg_head, initial, dfinal,   dinitial};
  run_gradients(launch, g, cut_gradients(arena, base, is_grouped(args)));
}

namespace {

Engine decode_engine(const RecurrenceDecodeArgs& args, const Rows& out) {
  Engine e = engine_of(args, recurrence_shape(args));
  e.out = out;
  e.initial = e.final = states_of(args.state);
  return e;
}

}  // namespace

const char* RecurrenceDecodeRows::refuses(Row row, const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut* out, Pass) {
  if (const char* reason = cuda::refuses(args)) return reason;
  const RecurrenceShape s = recurrence_shape(args);
  if (s.H == 0) return nullptr;  // every result is empty
  return row_refuses(row,
                     decode_engine(args, out == nullptr ? assumed_rows(s.T, s.H, s.V, args.q.dtype) : rows_of(out->out, s.H)));
}

void RecurrenceDecodeRows::forward(Row row, const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out,
                                   const Launch& launch) {
  const Engine e = decode_engine(args, rows_of(out.out, recurrence_shape(args).H));
  if (e.H > 0) run_engine(launch, row, e, {});
}

}  // namespace linnet::cuda
