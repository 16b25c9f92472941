#include "mechanisms/recurrence/cuda/fitted.h"

#include "mechanisms/recurrence/cuda/general/rows.h"
#include "mechanisms/recurrence/shape.h"
#include "mechanisms/shared/norm_rows.h"

namespace linnet::cuda {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 27;  // of 16 threads

struct Widths {
  int64_t K, V;
};
Widths widths_of(Row row, const RecurrenceShape& s) {
  Widths w = {tile_width(s.K), tile_width(s.V)};
  if (row == Row::delta || row == Row::kda) w.K = w.V = w.K > w.V ? w.K : w.V;
  return w;
}

}  // namespace

int64_t tile_width(int64_t channels) { return channels <= 64 ? 64 : 128; }
bool is_aligned(const View& view) { return is_aligned(rows_of(view, view.size[2]), view.dtype); }

View dense_view(Arena& arena, const View& like, Dtype dtype, int64_t last, int64_t before_last) {
  View view = like;
  view.dtype = dtype;
  view.size[view.rank - 1] = last;
  if (before_last >= 0) view.size[view.rank - 2] = before_last;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[i] = stride;
    stride *= view.size[i];
  }
  view.data = arena.take<char>(stride * dtype_size(dtype));
  return view;
}

void fit(const Launch& launch, const View& to, const View& from, const Fit& how) {
  FitRows f;
  f.heads = static_cast<int32_t>(to.size[2]);
  const bool back = how.source.given();
  f.from = rows_of(from, f.heads, back ? Map::identity : how.map);
  f.to = rows_of(to, f.heads);
  if (back) f.source = rows_of(how.source, f.heads, how.map);
  if (how.mask.given()) {
    f.mask = static_cast<const uint8_t*>(how.mask.data);
    f.mask_stride_b = how.mask.stride[0];
  }
  f.B = to.size[0];
  f.T = to.size[1];
  f.width = static_cast<int32_t>(to.size[3]);
  f.channels = static_cast<int32_t>(from.size[3] < to.size[3] ? from.size[3] : to.size[3]);
  f.l2_norm = how.l2_norm;
  const bool to_16 = f.to.dtype == f.from.dtype && is_16_bit(f.to.dtype);
  const char* name = to_16 ? (f.to.dtype == Dtype::bf16 ? "fit_rows_bf16" : "fit_rows_f16")
                     : f.from.dtype == Dtype::f32 && f.to.dtype == Dtype::bf16 ? "fit_rows_f32_bf16"
                                                                               : "fit_rows_f32";
  if (!to_16 && (f.from.dtype != Dtype::f32 || f.to.dtype == Dtype::f16)) {
    *launch.error = "rows of these types are not copied";
    return;
  }
  enqueue(launch, {"recurrence/cuda/general/rows", name, 256}, {(f.B * f.T * f.heads + 31) / 32}, f);
}
void fit_state(const Launch& launch, const View& to, const View& from) {
  const int64_t N = to.size[0], H = to.size[1];
  const auto least = [&](int i) { return from.size[i] < to.size[i] ? from.size[i] : to.size[i]; };
  if (least(2) < to.size[2] || least(3) < to.size[3])
    copy_states(launch, states_of(to), States(), N, H, to.size[2], to.size[3]);
  copy_states(launch, states_of(to), states_of(from), N, H, least(2), least(3));
}
void fit_vector(const Launch& launch, const View& to, const View& from) {
  const int64_t N = to.size[0], H = to.size[1], least = from.size[2] < to.size[2] ? from.size[2] : to.size[2];
  if (least < to.size[2]) copy_states(launch, vectors_of(to), States(), N, H, to.size[2], 1);
  copy_states(launch, vectors_of(to), vectors_of(from), N, H, least, 1);
}

bool is_fitted(Row row, const RecurrenceArgs& args) {
  if (row != Row::delta && row != Row::kda && row != Row::tile && row != Row::channel) return false;
  const RecurrenceShape s = recurrence_shape(args);
  if (!is_16_bit(args.q.dtype) || args.k.dtype != args.q.dtype || args.v.dtype != args.q.dtype) return false;
  if (s.K < 1 || s.V < 1 || s.K > 128 || s.V > 128 || s.B * s.T * s.H > kMostRows || s.B * s.T * s.H == 0) return false;
  // Copies of one channel 64 wide are 64 times the traffic, and gigabytes where heads are many (the memories of a free energy
  // mixer).
  if (row == Row::tile && s.K * s.V < 256) return false;
  // Keys of few channels are almost parallel, and then the delta rules need more digits than these kernels have.
  if (args.beta.given() && (args.q.dtype != Dtype::bf16 || s.K < 64)) return false;
  if (args.l2_norm && args.q.dtype != Dtype::bf16) return false;
  const Widths w = widths_of(row, s);
  return args.l2_norm || w.K != s.K || w.V != s.V || !is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v) ||
         (args.g.given() && s.per_channel && !is_aligned(args.g));
}

Fitted cut_fitted(Arena& arena, Row row, const RecurrenceArgs& args, Pass pass) {
  Fitted f{args};
  const RecurrenceShape s = recurrence_shape(args);
  const Widths w = widths_of(row, s);
  const Dtype dtype = args.q.dtype;
  const bool wider = w.K != s.K || w.V != s.V, K = w.K != s.K, V = w.V != s.V, norm = args.l2_norm;
  f.args.scale = Maybe(s.scale);
  f.args.l2_norm = false;
  if (K || norm || !is_aligned(args.q)) f.args.q = dense_view(arena, args.q, dtype, w.K);
  if (K || norm || !is_aligned(args.k)) f.args.k = dense_view(arena, args.k, dtype, w.K);
  if (V || !is_aligned(args.v)) f.args.v = dense_view(arena, args.v, dtype, w.V);
  const bool channels = args.g.given() && s.per_channel;
  if (channels && (K || !is_aligned(args.g))) f.args.g = dense_view(arena, args.g, args.g.dtype, w.K);
  View out = args.v, state;  // [B, T, H, V], [N, H, K, V]
  out.size[2] = s.H;
  state.rank = 4;
  state.device = args.q.device;
  state.size[0] = s.N;
  state.size[1] = s.H;
  const auto cut_state = [&] { return dense_view(arena, state, Dtype::f32, w.V, w.K); };
  if (wider && args.initial_state.given()) f.args.initial_state = cut_state();
  if (pass == Pass::forward) {
    f.out = dense_view(arena, out, dtype, w.V);  // the result's own rows are not known yet
    if (wider) f.final_state = cut_state();
    return f;
  }
  if (V) f.dout = dense_view(arena, out, dtype, w.V);
  // Gradients of normed rows stay as they are: the way back takes differences of them.
  if (K || norm) f.dq = dense_view(arena, args.q, norm ? Dtype::f32 : dtype, w.K);
  if (K || norm) f.dk = dense_view(arena, args.k, norm ? Dtype::f32 : dtype, w.K);
  if (V) f.dv = dense_view(arena, args.v, dtype, w.V);
  if (K && channels) f.dg = dense_view(arena, args.g, args.g.dtype, w.K);
  if (wider) {
    f.dfinal_state = cut_state();
    f.dinitial = cut_state();
  }
  return f;
}

namespace {

void fit_inputs(const Launch& launch, const Fitted& f, const RecurrenceArgs& call) {
  const auto changed = [](const View& a, const View& b) { return a.data != b.data; };
  const auto fit_normed = [&](const View& to, const View& from) {
    if (!changed(to, from)) return;
    if (!call.l2_norm || to.size[3] != from.size[3]) return fit(launch, to, from, {.l2_norm = call.l2_norm});
    NormRows rows = norm_rows(from, kL2NormEpsilon);
    rows.out = norm_tensor(to);
    run_norm(launch, rows, from.dtype);
  };
  fit_normed(f.args.q, call.q);
  fit_normed(f.args.k, call.k);
  if (changed(f.args.v, call.v)) fit(launch, f.args.v, call.v);
  if (call.g.given() && changed(f.args.g, call.g)) fit(launch, f.args.g, call.g);
  if (call.initial_state.given() && changed(f.args.initial_state, call.initial_state))
    fit_state(launch, f.args.initial_state, call.initial_state);
}

}  // namespace

bool Fitted::copies_out(const RecurrenceOut& results) const {
  return results.out.given() && (results.out.size[3] != out.size[3] || !is_aligned(results.out));
}
RecurrenceOut Fitted::begin(const Launch& launch, const RecurrenceArgs& call, const RecurrenceOut& results) const {
  fit_inputs(launch, *this, call);
  RecurrenceOut inner = results;
  if (copies_out(results)) inner.out = out;
  if (final_state.given() && results.final_state.given()) inner.final_state = final_state;
  return inner;
}
void Fitted::end(const Launch& launch, const RecurrenceOut& results) const {
  if (copies_out(results)) fit(launch, results.out, out);
  if (final_state.given() && results.final_state.given()) fit_state(launch, results.final_state, final_state);
}

RecurrenceGrads Fitted::begin(const Launch& launch, const RecurrenceArgs& call, const RecurrenceGrads& results) const {
  fit_inputs(launch, *this, call);
  RecurrenceGrads inner = results;
  const auto replace = [](View& view, const View& copy) {
    if (view.given() && copy.given()) view = copy;
  };
  replace(inner.dout, dout);
  replace(inner.dfinal_state, dfinal_state);
  replace(inner.dq, dq);
  replace(inner.dk, dk);
  replace(inner.dv, dv);
  replace(inner.dg, dg);
  replace(inner.dinitial_state, dinitial);
  if (dout.given() && results.dout.given()) fit(launch, dout, results.dout);
  if (dfinal_state.given() && results.dfinal_state.given()) fit_state(launch, dfinal_state, results.dfinal_state);
  return inner;
}
void Fitted::end(const Launch& launch, const RecurrenceArgs& call, const RecurrenceGrads& results) const {
  const auto back = [&](const View& to, const View& from, const View& source) {
    if (to.given() && from.given()) fit(launch, to, from, {.l2_norm = source.given(), .source = source});
  };
  const View none;
  back(results.dq, dq, call.l2_norm ? call.q : none);
  back(results.dk, dk, call.l2_norm ? call.k : none);
  back(results.dv, dv, none);
  back(results.dg, dg, none);
  if (dinitial.given() && results.dinitial_state.given()) fit_state(launch, results.dinitial_state, dinitial);
}

}  // namespace linnet::cuda
