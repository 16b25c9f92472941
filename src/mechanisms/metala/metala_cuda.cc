// MetaLA on the GPU: `recurrence` with a decay per channel on decays and keys that a small kernel makes first; the augmentation
// is added behind it.
#include "metala_cuda.h"

#include "core/cuda/driver.h"
#include "mechanisms/recurrence/cuda/dispatch.h"
#include "metala_rows.h"

LINNET_USES_IMAGES(metala)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "metala/metala_rows_cuda";
constexpr int64_t kParts = 64;  // of the sums of dw_aug

View dense(Arena& arena, Dtype dtype, const View& like) {
  const int64_t count = View::dense(nullptr, dtype, like.size, 4).elements();
  return View::dense(arena.take<char>(count * dtype_size(dtype)), dtype, like.size, 4);
}

template <class Args>
const View& gates_of(const Args& args) {
  if constexpr (requires { args.a; }) {
    return args.a;
  } else {
    return args.g;
  }
}

template <class Args>
bool is_masked(const Args& args) {
  if constexpr (requires { args.mask; }) {
    return args.mask.given();
  } else {
    return false;
  }
}

// Keys are rounded for the tiles alone. A few tokens would not repay that: their result is one product q.k, with all that
// rounding leaves of it.
Dtype key_dtype(const View& q, const View& v) {
  constexpr int64_t kFewTokens = 32;
  const auto fits = [](int64_t width) { return width == 64 || width == 128; };
  return q.dtype == Dtype::bf16 && fits(q.size[3]) && fits(v.size[3]) && q.size[1] >= kFewTokens ? Dtype::bf16 : Dtype::f32;
}

// The call of the recurrence, its g and k in the arena.
template <class Target, class Args>
Target inner(Arena& arena, const Args& args) {
  Target r;
  r.q = args.q;
  r.v = args.v;
  r.g = dense(arena, Dtype::f32, args.q);
  r.k = dense(arena, key_dtype(args.q, args.v), args.q);
  if (is_masked(args)) r.v = dense(arena, args.v.dtype, args.v);
  r.scale = args.scale;
  if constexpr (requires { r.state; }) {
    r.state = args.state;
  } else {
    r.initial_state = args.state;
    r.cu_seqlens = args.cu_seqlens;
  }
  return r;
}

template <class Args, class Target>
Metala rows_for(const Args& args, const Target& r) {
  Metala m;
  m.B = args.q.size[0];
  m.T = args.q.size[1];
  m.H = static_cast<int32_t>(args.q.size[2]);
  m.K = static_cast<int32_t>(args.q.size[3]);
  m.V = static_cast<int32_t>(args.v.size[3]);
  m.q = rows_of(args.q, m.H);
  m.v = rows_of(r.v, m.H);
  m.gates = rows_of(gates_of(args), m.H);
  m.floor = static_cast<float>(args.floor);
  if constexpr (requires { args.tau; }) {
    m.mixer = true;
    m.tau = static_cast<float>(args.tau);
    m.aug = static_cast<int32_t>(args.aug);
    if (args.w_aug.given()) m.w = {args.w_aug.data, 0, 0, args.w_aug.stride[0], 1, args.w_aug.dtype, Map::identity};
  }
  if constexpr (requires { args.mask; }) {
    if (args.mask.given()) {
      m.mask = static_cast<const uint8_t*>(args.mask.data);
      m.mask_stride_b = args.mask.stride[0];
      m.mask_stride_t = args.mask.stride[1];
      m.skip_masked = args.skip_masked;
      m.source_v = rows_of(args.v, m.H);
    }
  }
  m.dtype = r.k.dtype;
  m.g = static_cast<float*>(r.g.data);
  m.k = r.k.data;
  return m;
}

int64_t blocks_for(const Metala& m) {
  const int64_t blocks = (m.B * m.T * m.H + 7) / 8;
  return blocks < 16384 ? blocks : 16384;
}
void make_gates(const Launch& launch, const Metala& m) {
  if (m.B * m.T * m.H > 0) enqueue(launch, {kImage, "metala_gates", 256}, {blocks_for(m)}, m);
}
void finish(const Launch& launch, Metala m, const View& out) {
  m.out = rows_of(out, m.H);
  if (m.aug != 2 && m.B * m.T * m.H > 0) enqueue(launch, {kImage, "metala_finish", 256}, {blocks_for(m)}, m);
}
Launch behind(const Launch& launch, const Arena& arena) {
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  return rest;
}

template <class Args, class Out>
void forward(Row row, const Args& args, const Out& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceArgs>(arena, args);
  const Metala m = rows_for(args, r);
  make_gates(launch, m);
  RecurrenceRows::forward(row, r, {out.out, out.final_state}, behind(launch, arena));
  finish(launch, m, out.out);
}

// The gradients of the recurrence, in f32.
RecurrenceGrads inner_gradients(Arena& arena, const RecurrenceArgs& r) {
  RecurrenceGrads d;
  d.dq = dense(arena, Dtype::f32, r.q);
  d.dk = dense(arena, Dtype::f32, r.q);
  d.dv = dense(arena, Dtype::f32, r.v);
  d.dg = dense(arena, Dtype::f32, r.q);
  return d;
}
template <class Args, class Grads>
void backward(Row row, const Args& args, const Grads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceArgs>(arena, args);
  RecurrenceGrads d = inner_gradients(arena, r);
  Metala m = rows_for(args, r);
  m.dq = static_cast<float*>(d.dq.data);
  m.dk = static_cast<float*>(d.dk.data);
  m.dv = static_cast<float*>(d.dv.data);
  m.dg = static_cast<float*>(d.dg.data);
  float* parts = arena.take<float>(kParts * m.H * m.K);
  make_gates(launch, m);
  d.dout = grads.dout;
  d.dfinal_state = grads.dfinal_state;
  d.dinitial_state = grads.dstate;
  RecurrenceRows::backward(row, r, {}, d, behind(launch, arena));
  m.dout = rows_of(grads.dout, m.H);
  m.to_q = rows_of(grads.dq, m.H);
  m.to_v = rows_of(grads.dv, m.H);
  if constexpr (requires { grads.da; }) {
    m.to_gates = rows_of(grads.da, m.H);
    const View& w = grads.dw_aug;
    if (w.given()) {
      m.to_w = {w.data, 0, 0, w.stride[0], 1, w.dtype, Map::identity};
      m.parts = parts;
    }
  } else {
    m.to_gates = rows_of(grads.dg, m.H);
  }
  if (m.H == 0 || m.K > kMaxStepWidth) return;
  enqueue(launch, {kImage, "metala_back", 256}, {m.H, kParts}, m);
  const int count = static_cast<int>(kParts);
  if (m.parts != nullptr && m.K > 0) enqueue(launch, {kImage, "metala_fold", 256}, {(m.H * m.K + 255) / 256}, m, count);
}

template <class Args>
int64_t workspace(Row row, const Args& args, Pass pass) {
  Arena arena;
  const auto r = inner<RecurrenceArgs>(arena, args);
  if (pass == Pass::backward) {
    inner_gradients(arena, r);
    arena.take<float>(kParts * args.q.size[2] * args.q.size[3]);
  }
  return arena.used() + RecurrenceRows::workspace(row, r, pass);
}
// Addresses, which nobody reads, as they will be aligned.
Arena assumed_arena() { return Arena(reinterpret_cast<char*>(uintptr_t{1} << 20)); }

template <class Args, class Out>
const char* refuses(Row row, const Args& args, const Out* out, Pass pass) {
  Arena arena = assumed_arena();
  const auto r = inner<RecurrenceArgs>(arena, args);
  if (out == nullptr) return RecurrenceRows::refuses(row, r, nullptr, pass);
  const RecurrenceOut results = {out->out, out->final_state};
  return RecurrenceRows::refuses(row, r, &results, pass);
}

}  // namespace

const char* MetalaMixerTable::refuses(Row row, const MetalaMixerArgs& args, const MetalaMixerOut* out, Pass pass) {
  return cuda::refuses(row, args, out, pass);
}
int64_t MetalaMixerTable::workspace(Row row, const MetalaMixerArgs& args, Pass pass) {
  return cuda::workspace(row, args, pass);
}
void MetalaMixerTable::forward(Row row, const MetalaMixerArgs& args, const MetalaMixerOut& out, const Launch& launch) {
  cuda::forward(row, args, out, launch);
}
void MetalaMixerTable::backward(Row row, const MetalaMixerArgs& args, const MetalaMixerOut&, const MetalaMixerGrads& grads,
                                const Launch& launch) {
  cuda::backward(row, args, grads, launch);
}

const char* MetalaCoreTable::refuses(Row row, const MetalaCoreArgs& args, const MetalaCoreOut* out, Pass pass) {
  return cuda::refuses(row, args, out, pass);
}
int64_t MetalaCoreTable::workspace(Row row, const MetalaCoreArgs& args, Pass pass) { return cuda::workspace(row, args, pass); }
void MetalaCoreTable::forward(Row row, const MetalaCoreArgs& args, const MetalaCoreOut& out, const Launch& launch) {
  cuda::forward(row, args, out, launch);
}
void MetalaCoreTable::backward(Row row, const MetalaCoreArgs& args, const MetalaCoreOut&, const MetalaCoreGrads& grads,
                               const Launch& launch) {
  cuda::backward(row, args, grads, launch);
}

const char* MetalaDecodeTable::refuses(Row row, const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut* out, Pass pass) {
  Arena arena = assumed_arena();
  const auto r = inner<RecurrenceDecodeArgs>(arena, args);
  if (out == nullptr) return RecurrenceDecodeRows::refuses(row, r, nullptr, pass);
  const RecurrenceDecodeOut results = {out->out};
  return RecurrenceDecodeRows::refuses(row, r, &results, pass);
}
int64_t MetalaDecodeTable::workspace(Row row, const MetalaMixerDecodeArgs& args, Pass pass) {
  Arena arena;
  const auto r = inner<RecurrenceDecodeArgs>(arena, args);
  return arena.used() + RecurrenceDecodeRows::workspace(row, r, pass);
}
void MetalaDecodeTable::forward(Row row, const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out,
                                const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceDecodeArgs>(arena, args);
  const Metala m = rows_for(args, r);
  make_gates(launch, m);
  RecurrenceDecodeRows::forward(row, r, {out.out}, behind(launch, arena));
  finish(launch, m, out.out);
}

}  // namespace linnet::cuda
