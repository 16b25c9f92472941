#include "mechanisms/recurrence/cuda/general/launch.h"

#include "core/cuda/device.h"
#include "mechanisms/recurrence/cuda/general/rows.h"

namespace linnet::cuda {
namespace {

constexpr const char* kRows = "recurrence/cuda/general/rows";
constexpr int kMostChannels = 256;

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
int64_t batch_of(const Engine& e) { return e.offsets == nullptr ? e.N : 1; }
// Gradients of the normaliser are differences of terms that almost cancel, and keys with slow decays of their own in them are
// rounded twice under the delta rule: one plane would not do.
int planes_of(const Engine& e, bool gradients) {
  if (e.v.dtype == Dtype::f32) return 3;
  const bool rounds_keys = e.beta.data != nullptr && e.g_width > 1, few = gradients && e.g_width > 1 && e.K < 16;
  return e.v.dtype == Dtype::f16 || (gradients && e.normalize) || rounds_keys || few ? 2 : 1;
}
int64_t columns_of(const Engine& e) { return e.V + (e.normalize ? 1 : 0); }

bool has_pieces(const Rows& rows, int64_t width) {
  const int64_t piece = rows.dtype == Dtype::f32 ? 4 : 8;
  return rows.map == Map::identity && width % 8 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
         rows.stride_b % piece == 0 && rows.stride_t % piece == 0 && rows.stride_h % piece == 0;
}

struct Names {  // of a kernel's variants: [planes - 1][beta], or with channels [planes - 1][channel][beta]
  const char* name[3][2][2];
};
#define LINNET_NAMES(stem)                                                              \
  {                                                                                     \
    {                                                                                   \
      {{stem "_1", stem "_1_beta"}, {stem "_1_channel", stem "_1_channel_beta"}},       \
          {{stem "_2", stem "_2_beta"}, {stem "_2_channel", stem "_2_channel_beta"}}, { \
        {stem "_3", stem "_3_beta"}, { stem "_3_channel", stem "_3_channel_beta" }      \
      }                                                                                 \
    }                                                                                   \
  }
constexpr Names kPrepare = LINNET_NAMES("general_prepare"), kGradients = LINNET_NAMES("general_gradients");
constexpr Names kOutput = LINNET_NAMES("general_output");
#undef LINNET_NAMES
#define LINNET_NAMES(stem)                                                        \
  {                                                                               \
    {                                                                             \
      {{stem "_1", stem "_1_beta"}, {stem "_1_wide", stem "_1_wide_beta"}},       \
          {{stem "_2", stem "_2_beta"}, {stem "_2_wide", stem "_2_wide_beta"}}, { \
        {stem "_3", stem "_3_beta"}, { stem "_3_wide", stem "_3_wide_beta" }      \
      }                                                                           \
    }                                                                             \
  }
constexpr Names kWalk = LINNET_NAMES("general_walk"), kReverse = LINNET_NAMES("general_reverse");  // [planes - 1][wide][beta]
#undef LINNET_NAMES
constexpr const char* kForward[3] = {"recurrence/cuda/general/forward_bf16", "recurrence/cuda/general/forward_f16",
                                     "recurrence/cuda/general/forward_f32"};
constexpr const char* kBackward[3] = {"recurrence/cuda/general/backward_bf16", "recurrence/cuda/general/backward_f16",
                                      "recurrence/cuda/general/backward_f32"};

// One call: what its kernels are, and their grids.
struct Call {
  General g;
  int planes;
  bool beta, channel;

  void turned(const Launch& launch) const {
    static constexpr const char* kNames[3] = {"general_turned_1", "general_turned_2", "general_turned_3"};
    enqueue(launch, {kBackward[planes - 1], kNames[planes - 1], 128, general_turned_bytes(planes)}, chunks(blocks()), g);
  }
  Grid chunks(int64_t z = 1) const { return {g.e.N * g.e.H, (g.e.T + 63) / 64, z}; }
  Grid walks() const { return {g.e.N * g.e.H, (g.Vp + kGeneralColumns - 1) / kGeneralColumns}; }
  void prepare(const Launch& launch) const {
    enqueue(launch,
            {kForward[planes - 1], kPrepare.name[planes - 1][channel][beta], beta || channel ? 256 : 128,
             general_prepare_bytes(planes, channel, beta)},
            chunks(), g);
  }
  void walk(const Launch& launch) const {
    enqueue(launch,
            {kForward[planes - 1], kWalk.name[planes - 1][g.Kp > 128][beta], 256, general_walk_bytes(planes, beta, g.Kp)},
            walks(), g);
  }
  void output(const Launch& launch) const {
    enqueue(launch, {kForward[planes - 1], kOutput.name[planes - 1][0][beta], 128, general_output_bytes(planes, beta)},
            chunks((g.V + 63) / 64), g);
  }
  void reverse(const Launch& launch) const {
    enqueue(
        launch,
        {kBackward[planes - 1], kReverse.name[planes - 1][g.Kp > 128][beta], 256, general_reverse_bytes(planes, beta, g.Kp)},
        walks(), g);
  }
  int64_t blocks() const { return (g.Kp + 63) / 64; }
  void gradients(const Launch& launch) const {
    enqueue(launch,
            {kBackward[planes - 1], kGradients.name[planes - 1][channel][beta], 256,
             general_gradients_bytes(planes, channel, beta)},
            chunks(blocks()), g);
  }
};

Rows rows_at(const void* data, const Engine& e, int32_t group, int64_t tokens, int64_t width, bool wide) {
  const int64_t heads = e.H / group;
  return {data, tokens * heads * width, heads * width, width, group, wide ? Dtype::f32 : Dtype::bf16, Map::identity};
}

// Rows copied to `to`, of `tokens` tokens: mapped, masked, `width` channels wide, with a 1 behind the channels; where there is
// no such place, the rows themselves.
struct Copy {
  int64_t tokens, channels, width;
  const uint8_t* mask = nullptr;
  bool ones = false;
  Rows out = {}, den = {};
};
Rows copied(const Launch& launch, const Engine& e, const Rows& from, void* to, bool wide, const Copy& how) {
  if (to == nullptr) return from;
  CopyRows c;
  c.from = from;
  c.from.group = 1;
  const Rows rows = rows_at(to, e, from.group, how.tokens, how.width, wide);
  c.to = rows;
  c.to.group = 1;
  c.B = batch_of(e);
  c.T = how.tokens;
  c.heads = e.H / from.group;
  c.channels = static_cast<int32_t>(how.channels);
  c.width = static_cast<int32_t>(how.width);
  c.ones = how.ones;
  c.mask = how.mask;
  c.mask_stride_b = e.mask_stride_b;
  c.out = how.out;
  c.den = how.den;
  enqueue(launch, {kRows, "general_copy", 256}, {(c.B * c.T * c.heads + 7) / 8}, c);
  return rows;
}

// Makes the copies of rows, and says where everything is.
Call begin(const Launch& launch, const Engine& e, const GeneralScratch& scratch, bool gradients) {
  Call call = {scratch.g, planes_of(e, gradients), e.beta.data != nullptr, e.g_width > 1};
  General& g = call.g;
  g.e = e;
  g.V = e.V;
  const bool wide = call.planes > 1;
  const int64_t B = batch_of(e);
  const auto norms = [&](const Rows& from, float* to) {
    if (to == nullptr) return;
    NormOfRows n = {from, to, B, e.T, e.H / from.group, e.K};
    n.from.group = 1;
    enqueue(launch, {kRows, "general_norms", 256}, {(B * e.T * n.heads + 7) / 8}, n);
  };
  norms(e.q, scratch.q_norms);
  norms(e.k, scratch.k_norms);
  g.q_norms = scratch.q_norms;
  g.k_norms = scratch.k_norms;
  g.e.q = copied(launch, e, e.q, scratch.q, wide, {e.T, e.K, g.Kr});
  g.e.k = copied(launch, e, e.k, scratch.k, wide, {e.T, e.K, g.Kr, e.write_mask});
  g.e.v = copied(launch, e, e.v, scratch.v, wide, {e.T, e.V, g.Vr, e.write_mask, e.normalize});
  if (!e.normalize) g.e.initial_z = g.e.final_z = States();  // are no column of the state
  return call;
}

// The gradient of q or k from that of its mapped or normed rows, [B, tokens, H, K].
void finish(const Launch& launch, const Engine& e, const View& view, const float* parts, const Rows& source, const float* norms,
            int64_t tokens, const uint8_t* mask = nullptr, const States& bias = {}) {
  if (!view.given() || parts == nullptr) return;
  FinishRows f;
  f.parts = parts;
  f.heads = static_cast<int32_t>(view.size[2]);
  f.group = e.H / f.heads;
  f.result = rows_of(view, f.heads);
  f.source = source;
  f.source.group = 1;
  f.norms = norms;
  f.B = batch_of(e);
  f.T = tokens;
  f.channels = e.K;
  f.mask = mask;
  f.mask_stride_b = e.mask_stride_b;
  f.bias = bias;
  f.offsets = e.offsets;
  f.offsets_64 = e.offsets_64;
  f.N = e.N;
  enqueue(launch, {kRows, "general_finish", 256}, {(f.B * tokens * f.heads + 7) / 8}, f);
}

}  // namespace

bool is_general(const Engine& e, bool gradients) {
  const bool plain = !e.reverse && e.steps.A == nullptr && e.finish.D == nullptr && e.finish.z.data == nullptr &&
                     e.back.dots == nullptr && e.saved == nullptr && e.out_source.map == Map::identity &&
                     e.out_bias.data == nullptr && e.out_mask == nullptr && e.in_factor == 1 && e.out_factor == 1;
  if (!plain || e.q.data == nullptr || e.k.data == nullptr || e.v.data == nullptr || e.N <= 0 || e.T <= 0 || e.H <= 0 ||
      e.K <= 0 || e.V <= 0 || e.K > kMostChannels || e.q.dtype == Dtype::f64 || e.v.map != Map::identity ||
      (e.T + 63) / 64 > 65535) {
    return false;
  }
  const int planes = planes_of(e, gradients), Kp = static_cast<int>(round_up(e.K, 16));
  const bool beta = e.beta.data != nullptr, channel = e.g_width > 1;
  int most = general_prepare_bytes(planes, channel, beta);
  const auto take = [&](int bytes) { most = bytes > most ? bytes : most; };
  take(general_walk_bytes(planes, beta, Kp));
  take(general_output_bytes(planes, beta));
  if (gradients) {
    take(general_reverse_bytes(planes, beta, Kp));
    take(general_gradients_bytes(planes, channel, beta));
  }
  return most <= shared_bytes_of_block();
}

const char* general_refuses(const Engine& e, bool gradients) {
  constexpr int64_t kFewTokens = 16;
  if (!gradients && e.T < kFewTokens) return "it takes 16 tokens or more: fewer go one by one";
  if (e.beta.data != nullptr && e.K < 16)
    return "keys of fewer than 16 channels are almost parallel: its delta rule rounds too much";
  if (e.initial.data != nullptr && e.initial.data == e.final.data) return "it keeps the state before the call";
  if (!is_general(e, gradients)) return "it takes engines forwards in time with tokens, and keys that fit its shared memory";
  return nullptr;
}

GeneralScratch cut_general(Arena& arena, const Engine& e, bool gradients) {
  GeneralScratch scratch;
  if (!is_general(e, gradients)) return scratch;
  General& g = scratch.g;
  const int planes = planes_of(e, gradients);
  const bool wide = planes > 1, beta = e.beta.data != nullptr, channel = e.g_width > 1;
  const int64_t size = wide ? 4 : 2, tokens = batch_of(e) * e.T, columns = columns_of(e);
  const int64_t plane = 2 * planes, middle = 2 * general_middle(planes, beta);  // bytes
  g.Kr = static_cast<int32_t>(round_up(e.K, 8));
  g.Kp = static_cast<int32_t>(round_up(e.K, 16));
  g.Vr = static_cast<int32_t>(round_up(columns, 8));
  g.Vp = static_cast<int32_t>(round_up(columns, 16));
  g.tiles = saved_slots(e) * e.H;
  const auto copy = [&](const Rows& rows, int64_t width) -> void* {
    return arena.take<char>(tokens * (e.H / rows.group) * width * size);
  };
  if (!has_pieces(e.q, e.K)) scratch.q = copy(e.q, g.Kr);
  if (!has_pieces(e.k, e.K) || e.write_mask != nullptr) scratch.k = copy(e.k, g.Kr);
  if (!has_pieces(e.v, e.V) || e.normalize || e.write_mask != nullptr) scratch.v = copy(e.v, g.Vr);
  if (e.l2_norm) {
    scratch.q_norms = arena.take<float>(tokens * (e.H / e.q.group));
    scratch.k_norms = arena.take<float>(tokens * (e.H / e.k.group));
  }
  const int64_t square = g.tiles * 64 * 64, states = g.tiles * g.Kp * g.Vp, rows = g.tiles * 64;
  g.scores = arena.take<char>(square * middle);
  if (beta) g.system = arena.take<char>(square * middle);
  if (channel) {
    g.q_read = arena.take<char>(rows * g.Kp * plane);
    if (beta) g.k_read = arena.take<char>(rows * g.Kp * plane);
    g.k_write = arena.take<char>(rows * g.Kp * plane);
  } else if (e.g_width > 0 || e.l2_norm) {
    g.factors = arena.take<float>(3 * rows);
  }
  g.totals = arena.take<float>(g.tiles * (channel ? g.Kp : 1));
  g.states = arena.take<char>(states * plane);
  if (beta) g.residuals = arena.take<char>(rows * g.Vp * middle);
  g.keeps_writes = !gradients;
  if (!gradients) return scratch;
  g.dstates = arena.take<char>(states * plane);
  if (beta) g.adjoints = arena.take<char>(rows * g.Vp * middle);
  scratch.dout = arena.take<char>(tokens * e.H * g.Vr * size);  // whose view is not known yet
  const auto parts = [&](int64_t width, bool wanted) -> float* {
    return wanted ? arena.take<float>(tokens * e.H * width) : nullptr;
  };
  const auto is_plain = [&](const Rows& of) { return of.group == 1 && of.map == Map::identity && !e.l2_norm; };
  scratch.dq = parts(e.K, !is_plain(e.q));
  scratch.dk = parts(e.K, !is_plain(e.k) || e.write_mask != nullptr || e.sums);  // also where the sums of keys have a gradient
  scratch.dv = parts(e.V, e.v.group > 1);
  if (e.g_width == 1) {
    g.sums = arena.take<float>(3 * ((g.Kp + 63) / 64) * rows);
    scratch.dg = arena.take<float>(tokens * e.H);
  }
  return scratch;
}

void run_general(const Launch& launch, const Engine& e, const GeneralScratch& scratch) {
  Call call = begin(launch, e, scratch, false);
  call.prepare(launch);
  call.walk(launch);
  if (e.out.data != nullptr) call.output(launch);
}

void run_general_gradients(const Launch& launch, const GeneralGradients& d, const GeneralScratch& scratch) {
  Engine e = d.base;
  e.final = e.final_z = States();
  const int64_t B = batch_of(e), tokens = B * e.T;
  Call call = begin(launch, e, scratch, true);
  General& g = call.g;
  // dout where its rows can be read, and with the gradient of the denominator.
  g.dout = d.dout;
  if (d.dout.data != nullptr && (e.normalize || !has_pieces(d.dout, e.V))) {
    const Copy how = {e.T, e.V, g.Vr, nullptr, e.normalize, d.out, e.normalize ? e.den : Rows()};
    g.dout = copied(launch, e, d.dout, scratch.dout, call.planes > 1, how);
  }
  const auto result = [&](const View& view, float* parts, int32_t width) {
    if (!view.given()) return Rows();
    return parts == nullptr ? rows_of(view, e.H) : dense_rows(parts, e.T, e.H, width);
  };
  const bool bias = !e.normalize && d.dfinal_z.data != nullptr;
  float* const dk_parts =
      e.k.group == 1 && e.k.map == Map::identity && !e.l2_norm && e.write_mask == nullptr && !bias ? nullptr : scratch.dk;
  g.dq = result(d.dq, scratch.dq, e.K);
  g.dk = result(d.dk, dk_parts, e.K);
  g.dv = result(d.dv, scratch.dv, e.V);
  g.dbeta = d.dbeta;
  g.dg = d.dg;
  if (d.dg_head.given()) g.dg = dense_rows(scratch.dg, e.T, e.H, 1);
  g.dfinal = d.dfinal;
  g.dinitial = d.dinitial;
  if (e.normalize) {
    g.dfinal_z = d.dfinal_z;
    g.dinitial_z = d.dinitial_z;
  }
  call.prepare(launch);
  call.walk(launch);
  call.reverse(launch);
  const bool gates = g.dg.data != nullptr;
  if (g.dq.data != nullptr || g.dk.data != nullptr || g.dbeta.data != nullptr || gates) call.gradients(launch);
  if (gates && e.g_width == 1) {
    const int parts = static_cast<int>(call.blocks());
    enqueue(launch, {kRows, "general_gates", 64}, call.chunks(), g, parts);
  }
  if (d.dg_head.given()) {
    const int H = e.H, dtype = static_cast<int>(d.dg_head.dtype);
    const int64_t stride = d.dg_head.stride[0];
    const float* const from = scratch.dg;
    void* const to = d.dg_head.data;
    enqueue(launch, {kRows, "general_sum_tokens", 256}, {e.H}, from, tokens, H, to, dtype, stride);
  }
  finish(launch, e, d.dq, scratch.dq, e.q, scratch.q_norms, e.T);
  finish(launch, e, d.dk, dk_parts, e.k, scratch.k_norms, e.T, e.write_mask, bias ? d.dfinal_z : States());
  if (d.dv.given() && scratch.dv != nullptr) {
    const int64_t heads = d.dv.size[2];
    sum_groups(launch, rows_of(d.dv, heads), dense_rows(scratch.dv, e.T, e.H, e.V), B, e.T, heads, e.H / heads, e.V);
  }
}

// Not causal: the state of all keys, then reads of it. The walks need neither scores nor decays.

FullScratch cut_full(Arena& arena, const Engine& e, int64_t keys, bool gradients) {
  FullScratch scratch;
  if (!is_general(e, gradients)) return scratch;
  General& g = scratch.g;
  const int planes = planes_of(e, gradients);
  const int64_t size = planes > 1 ? 4 : 2, B = batch_of(e), columns = columns_of(e);
  g.Kr = static_cast<int32_t>(round_up(e.K, 8));
  g.Kp = static_cast<int32_t>(round_up(e.K, 16));
  g.Vr = static_cast<int32_t>(round_up(columns, 8));
  g.Vp = static_cast<int32_t>(round_up(columns, 16));
  const auto copy = [&](const Rows& rows, int64_t tokens, int64_t width) -> void* {
    return arena.take<char>(B * tokens * (e.H / rows.group) * width * size);
  };
  if (!has_pieces(e.q, e.K)) scratch.q = copy(e.q, e.T, g.Kr);
  if (!has_pieces(e.k, e.K) || e.write_mask != nullptr) scratch.k = copy(e.k, keys, g.Kr);
  if (!has_pieces(e.v, e.V) || e.normalize || e.write_mask != nullptr) scratch.v = copy(e.v, keys, g.Vr);
  scratch.states = arena.take<char>(e.N * e.H * g.Kp * g.Vp * 2 * planes);
  if (!gradients) return scratch;
  scratch.later = arena.take<char>(e.N * e.H * g.Kp * g.Vp * 2 * planes);
  scratch.dout = arena.take<char>(B * e.T * e.H * g.Vr * size);
  scratch.dq = arena.take<float>(B * e.T * e.H * e.K);
  scratch.dk = arena.take<float>(B * keys * e.H * e.K);
  if (e.v.group > 1) scratch.dv = arena.take<float>(B * keys * e.H * e.V);
  return scratch;
}

namespace {

Call begin_full(const Launch& launch, const Engine& e, int64_t keys, const FullScratch& scratch, bool gradients) {
  Call call = {scratch.g, planes_of(e, gradients), false, false};
  General& g = call.g;
  g.e = e;
  g.V = e.V;
  g.kept_once = true;
  const bool wide = call.planes > 1;
  g.e.q = copied(launch, e, e.q, scratch.q, wide, {e.T, e.K, g.Kr});
  g.e.k = copied(launch, e, e.k, scratch.k, wide, {keys, e.K, g.Kr, e.write_mask});
  g.e.v = copied(launch, e, e.v, scratch.v, wide, {keys, e.V, g.Vr, e.write_mask, e.normalize});
  if (!e.normalize) g.e.initial_z = g.e.final_z = States();
  g.states = scratch.states;
  return call;
}

}  // namespace

void run_full(const Launch& launch, const Engine& e, int64_t keys, const FullScratch& scratch) {
  const Call call = begin_full(launch, e, keys, scratch, false);
  Call writes = call;
  writes.g.e.T = keys;
  writes.walk(launch);
  if (e.out.data != nullptr) call.output(launch);
}

void run_full_gradients(const Launch& launch, const GeneralGradients& d, int64_t keys, const FullScratch& scratch) {
  Engine e = d.base;
  e.final = e.final_z = States();
  const Call call = begin_full(launch, e, keys, scratch, true);
  Rows dout = d.dout;
  if (d.dout.data != nullptr && (e.normalize || !has_pieces(d.dout, e.V))) {
    const Copy how = {e.T, e.V, call.g.Vr, nullptr, e.normalize, d.out, e.normalize ? e.den : Rows()};
    dout = copied(launch, e, d.dout, scratch.dout, call.planes > 1, how);
  }
  // S of all keys, and R = dfinal + scale Q^T dO of all queries.
  Call writes = call;
  writes.g.e.T = keys;
  writes.walk(launch);
  Call later = call;
  later.g.e.k = call.g.e.q;
  later.g.e.v = dout;
  if (dout.data == nullptr) later.g.e.T = 0;
  later.g.e.initial = d.dfinal;
  later.g.e.final = d.dinitial;
  later.g.e.initial_z = e.normalize ? d.dfinal_z : States();
  later.g.e.final_z = e.normalize ? d.dinitial_z : States();
  later.g.write_scale = e.scale;
  later.g.states = scratch.later;
  later.walk(launch);
  const int64_t B = batch_of(e);
  if (d.dq.given()) {  // dq = scale dO S^T
    Call read = call;
    read.g.e.v = dout;
    read.g.e.out = dense_rows(scratch.dq, e.T, e.H, e.K);
    read.turned(launch);
    finish(launch, e, d.dq, scratch.dq, e.q, nullptr, e.T);
  }
  if (d.dk.given()) {  // dk = V R^T
    Call read = call;
    read.g.e.T = keys;
    read.g.e.scale = 1;
    read.g.states = scratch.later;
    read.g.e.out = dense_rows(scratch.dk, keys, e.H, e.K);
    read.turned(launch);
    const bool bias = !e.normalize && d.dfinal_z.data != nullptr;
    finish(launch, e, d.dk, scratch.dk, e.k, nullptr, keys, e.write_mask, bias ? d.dfinal_z : States());
  }
  if (d.dv.given()) {  // dv = K R
    Call read = call;
    read.g.e.q = call.g.e.k;
    read.g.e.T = keys;
    read.g.e.scale = 1;
    read.g.e.normalize = false;
    read.g.states = scratch.later;
    read.g.e.out = scratch.dv == nullptr ? rows_of(d.dv, e.H) : dense_rows(scratch.dv, keys, e.H, e.V);
    read.output(launch);
    if (scratch.dv != nullptr) {
      const int64_t heads = d.dv.size[2];
      sum_groups(launch, rows_of(d.dv, heads), dense_rows(scratch.dv, keys, e.H, e.V), B, keys, heads, e.H / heads, e.V);
    }
  }
}

}  // namespace linnet::cuda
