#include "mechanisms/fem/cuda/softmax.h"

#include <cmath>

#include "core/cuda/driver.h"

LINNET_USES_IMAGES(fem)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "fem/cuda/softmax";
constexpr double kMostCap = 40;

const char* refuses_prior(FemPrior prior, Maybe cap, Dtype dtype) {
  if (prior != FemPrior::softmax) return "the CUDA kernels have the softmax prior alone";
  if (dtype == Dtype::f64) return "the CUDA kernels have no f64";
  return fem_cap(cap) <= kMostCap ? nullptr
                                  : "the CUDA kernels take a cap of at most 40, within which f32 holds every exponential";
}

// Rows [B, T, H, width] cut from a workspace.
AttendRows cut(Arena& arena, int64_t B, int64_t T, int64_t H, int64_t width, Dtype dtype) {
  AttendRows rows = {arena.take<char>(B * T * H * width * dtype_size(dtype)), T * H * width, H * width, width, dtype, false};
  rows.aligned = width % (16 / dtype_size(dtype)) == 0;
  return rows;
}
AttendRows cut_numbers(Arena& arena, int64_t B, int64_t T, int64_t H) {
  return {arena.take<float>(B * T * H), T * H, H, 1, Dtype::f32, false};
}
Dtype wide_dtype(AttendRow row) { return row == AttendRow::tile ? Dtype::bf16 : Dtype::f32; }

// Everything of a call that both passes share, and its memory.
void set_call(FemCall* p, Arena& arena, AttendRow row, const View& v, const View& beta, Maybe cap, int64_t T) {
  p->v = attend_rows(v);
  p->beta = attend_numbers(beta);
  p->B = v.size[0];
  p->S = v.size[1];
  p->T = T;
  p->H = static_cast<int32_t>(v.size[2]);
  p->V = static_cast<int32_t>(v.size[3]);
  p->cap = static_cast<float>(fem_cap(cap));
  p->channels = arena.take<FemForm>(p->B * p->H * p->V);
  p->wide = cut(arena, p->B, p->S, p->H, 2 * p->V, wide_dtype(row));
  p->small = row == AttendRow::tile ? -1 : -4;
}
void set_mask(FemCall* p, Arena& arena, const View& mask) {
  if (!mask.given()) return;
  p->mask = static_cast<const uint8_t*>(mask.data);
  p->mask_stride[0] = mask.stride[0];
  p->mask_stride[1] = mask.stride[1];
  p->bias = arena.take<float>(p->B * p->S);
}
// The attention to the widened values.
Attend attend_of(const FemCall& f, const View& q, const View& k, bool causal) {
  Attend p;
  View values = View::dense(f.wide.data, f.wide.dtype, {f.B, f.S, f.H, 2 * int64_t{f.V}});
  set_tensors(&p, q, k, values);
  if (f.clean_k.data != nullptr) p.k = f.clean_k;
  if (f.bias != nullptr) p.bias = {f.bias, {f.S, 0, 0, 1}, Dtype::f32};
  p.lengths = f.lengths;
  p.mask = attend_mask(causal, {}, 0, 0);
  set_logits(&p, 1 / std::sqrt(static_cast<double>(q.size[3])), 0);
  return p;
}
void widen(const Launch& launch, const FemCall& p) {
  const int64_t channels = (p.V + 31) / 32, numbers = p.B * p.S * p.H * p.V;
  enqueue(launch, {kImage, "fem_channels", 256}, {p.B * p.H, channels}, p);
  enqueue(launch, {kImage, "fem_widen", 256}, {((numbers > p.B * p.S ? numbers : p.B * p.S) + 255) / 256}, p);
}
void finish(const Launch& launch, const FemCall& p) {
  enqueue(launch, {kImage, "fem_finish", 256}, {(p.B * p.T * p.H * p.V + 255) / 256}, p);
}

FemCall cut_forward(Arena& arena, AttendRow row, const FemReadArgs& args, const FemReadOut* out) {
  FemCall p;
  set_call(&p, arena, row, args.v, args.beta, args.cap, args.q.size[1]);
  set_mask(&p, arena, args.key_mask);
  p.read = cut(arena, p.B, p.T, p.H, 2 * p.V, Dtype::f32);
  p.lse = cut_numbers(arena, p.B, p.T, p.H);
  if (out != nullptr && out->norm.given()) p.lse = attend_rows(out->norm);
  return p;
}
FemCall cut_backward(Arena& arena, AttendRow row, const FemReadArgs& args) {
  FemCall p;
  set_call(&p, arena, row, args.v, args.beta, args.cap, args.q.size[1]);
  set_mask(&p, arena, args.key_mask);
  p.dread = cut(arena, p.B, p.T, p.H, 2 * p.V, wide_dtype(row));
  p.dwide = cut(arena, p.B, p.S, p.H, 2 * p.V, Dtype::f32);
  p.delta = cut_numbers(arena, p.B, p.T, p.H);
  p.dbeta_parts = arena.take<double>(p.B * p.H * p.V);
  p.K = static_cast<int32_t>(args.k.size[3]);
  if (args.key_mask.given()) p.clean_k = cut(arena, p.B, p.S, p.H, p.K, args.k.dtype);
  return p;
}

// Once more in f32, for dbeta: the read, its gradient, and P^T times that.
FemCall cut_exact(Arena& arena, const FemReadArgs& args) {
  FemCall p;
  set_call(&p, arena, AttendRow::plain, args.v, args.beta, args.cap, args.q.size[1]);
  p.read = cut(arena, p.B, p.T, p.H, 2 * p.V, Dtype::f32);
  p.mu = cut(arena, p.B, p.T, p.H, p.V, Dtype::f32);
  p.free = cut(arena, p.B, p.T, p.H, p.V, Dtype::f32);
  p.dwide = cut(arena, p.B, p.S, p.H, 2 * p.V, Dtype::f32);
  p.delta = cut_numbers(arena, p.B, p.T, p.H);
  p.dread = p.read;  // which has been taken by then
  return p;
}
void exact_beta(const Launch& launch, const FemReadArgs& args, const FemCall& f, FemCall e, char* workspace) {
  e.lam = f.lam;
  e.g = f.g;
  e.dout = f.dout;
  e.lse = f.lse;
  e.mask = f.mask;
  e.mask_stride[0] = f.mask_stride[0];
  e.mask_stride[1] = f.mask_stride[1];
  e.bias = f.bias;
  e.clean_k = f.clean_k;
  e.dbeta_parts = f.dbeta_parts;
  widen(launch, e);
  Attend p = attend_of(e, args.q, args.k, args.causal);
  p.out = e.read;
  run_attend(launch, AttendRow::plain, p, workspace);
  finish(launch, e);
  enqueue(launch, {kImage, "fem_row_gradients", 256}, {(e.B * e.T * e.H + 7) / 8}, e);
  p.out = {};
  p.lse = e.lse;
  p.delta = e.delta;
  p.dout = e.dread;
  p.dv = e.dwide;
  run_attend_gradients(launch, AttendRow::plain, p, View(), View(), workspace);
  enqueue(launch, {kImage, "fem_value_gradients", 256}, {e.B * e.H, (e.V + 31) / 32}, e);
}

const char* refuses_shape(AttendRow row, Dtype dtype, const View& q, int64_t V, Pass pass) {
  const int64_t K = q.size[3];
  if (row == AttendRow::plain) return nullptr;
  if (dtype != Dtype::bf16) return "it takes bf16: f16 does not hold the exponentials of the values";
  if (K > 256 || 2 * V > 256) return "it takes keys of at most 256 and values of at most 128 channels";
  Attend p;  // as far as the tiles' memory asks
  p.q.dtype = p.k.dtype = p.v.dtype = dtype;
  p.K = static_cast<int32_t>(K), p.V = static_cast<int32_t>(2 * V), p.Tq = static_cast<int32_t>(q.size[1]), p.G = 1;
  return attend_refuses(AttendRow::tile, p, pass);
}

}  // namespace

const char* FemSoftmaxTable::refuses(AttendRow row, const FemReadArgs& args, const FemReadOut*, Pass pass) {
  if (const char* reason = refuses_prior(args.prior, args.cap, args.v.dtype)) return reason;
  return refuses_shape(row, args.v.dtype, args.q, args.v.size[3], pass);
}
int64_t FemSoftmaxTable::workspace(AttendRow row, const FemReadArgs& args, Pass pass) {
  Arena arena;
  const FemCall f = pass == Pass::forward ? cut_forward(arena, row, args, nullptr) : cut_backward(arena, row, args);
  const Attend p = attend_of(f, args.q, args.k, args.causal);
  if (pass == Pass::backward && row == AttendRow::tile) {
    const Attend exact = attend_of(cut_exact(arena, args), args.q, args.k, args.causal);
    const int64_t read = attend_workspace(AttendRow::plain, exact), gradients = attend_gradients_workspace(p);
    return arena.used() + (read > gradients ? read : gradients);
  }
  return arena.used() + (pass == Pass::forward ? attend_workspace(row, p) : attend_gradients_workspace(p));
}
void FemSoftmaxTable::forward(AttendRow row, const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  FemCall f = cut_forward(arena, row, args, &out);
  f.lam = attend_rows(args.lam);
  f.g = attend_rows(args.g);
  f.out = attend_rows(out.out);
  f.mu = attend_rows(out.mu);
  f.free = attend_rows(out.free);
  widen(launch, f);
  Attend p = attend_of(f, args.q, args.k, args.causal);
  p.out = f.read;
  p.lse = f.lse;
  run_attend(launch, row, p, launch.workspace + arena.used());
  finish(launch, f);
}
void FemSoftmaxTable::backward(AttendRow row, const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads,
                               const Launch& launch) {
  Arena arena(launch.workspace);
  FemCall f = cut_backward(arena, row, args), e = row == AttendRow::tile ? cut_exact(arena, args) : FemCall();
  f.lam = attend_rows(args.lam);
  f.g = attend_rows(args.g);
  f.dout = attend_rows(grads.dout);
  f.mu = attend_rows(out.mu);
  f.free = attend_rows(out.free);
  f.lse = attend_rows(out.norm);
  f.dv = attend_rows(grads.dv);
  f.dlam = attend_rows(grads.dlam);
  f.dg = attend_rows(grads.dg);
  f.dbeta = attend_numbers(grads.dbeta);
  widen(launch, f);
  if (f.clean_k.data != nullptr) {
    f.k = attend_rows(args.k);
    enqueue(launch, {kImage, "fem_clean_keys", 256}, {(f.B * f.S * f.H * f.K + 255) / 256}, f);
  }
  enqueue(launch, {kImage, "fem_row_gradients", 256}, {(f.B * f.T * f.H + 7) / 8}, f);
  Attend p = attend_of(f, args.q, args.k, args.causal);
  p.lse = f.lse;
  p.dout = f.dread;
  p.delta = f.delta;
  p.dq = attend_rows(grads.dq);
  p.dk = attend_rows(grads.dk);
  p.dv = f.dwide;
  run_attend_gradients(launch, row, p, View(), View(), launch.workspace + arena.used());
  enqueue(launch, {kImage, "fem_value_gradients", 256}, {f.B * f.H, (f.V + 31) / 32}, f);
  if (!grads.dbeta.given()) return;
  if (row == AttendRow::tile) exact_beta(launch, args, f, e, launch.workspace + arena.used());
  enqueue(launch, {kImage, "fem_beta_gradient", 256}, {(int64_t{f.H} * f.V + 255) / 256}, f);
}

namespace {

FemCall cut_decode(Arena& arena, AttendRow row, const FemReadDecodeArgs& args) {
  FemCall p;
  set_call(&p, arena, row, args.v_cache, args.beta, args.cap, args.q.size[1]);
  p.read = cut(arena, p.B, p.T, p.H, 2 * p.V, Dtype::f32);
  p.lse = cut_numbers(arena, p.B, p.T, p.H);
  p.lengths = attend_indices(args.lengths);
  return p;
}

}  // namespace

const char* FemSoftmaxDecodeTable::refuses(AttendRow row, const FemReadDecodeArgs& args, const FemReadDecodeOut*, Pass pass) {
  if (const char* reason = refuses_prior(args.prior, args.cap, args.v.dtype)) return reason;
  return refuses_shape(row, args.v.dtype, args.q, args.v.size[3], pass);
}
int64_t FemSoftmaxDecodeTable::workspace(AttendRow row, const FemReadDecodeArgs& args, Pass) {
  Arena arena;
  const FemCall f = cut_decode(arena, row, args);
  return arena.used() + attend_workspace(row, attend_of(f, args.q, args.k_cache, true));
}
void FemSoftmaxDecodeTable::forward(AttendRow row, const FemReadDecodeArgs& args, const FemReadDecodeOut& out,
                                    const Launch& launch) {
  SoftmaxDecodeArgs cache;
  cache.q = args.q;
  cache.k = args.k;
  cache.v = args.v;
  cache.k_cache = args.k_cache;
  cache.v_cache = args.v_cache;
  cache.lengths = args.lengths;
  append_tokens(launch, cache);
  Arena arena(launch.workspace);
  FemCall f = cut_decode(arena, row, args);
  f.lam = attend_rows(args.lam);
  f.g = attend_rows(args.g);
  f.out = attend_rows(out.out);
  widen(launch, f);
  Attend p = attend_of(f, args.q, args.k_cache, true);
  p.out = f.read;
  p.lse = f.lse;
  run_attend(launch, row, p, launch.workspace + arena.used());
  finish(launch, f);
}

}  // namespace linnet::cuda
