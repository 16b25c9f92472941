// h3 and h3_decode on the GPU (h3_cuda.cu).
#include "h3_cuda.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(h3)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "h3/h3_cuda";

template <class Args>
H3Rows rows_of(const Args& args, int64_t sequences) {
  H3Rows r;
  r.q = args.q;
  r.k = args.k;
  r.v = args.v;
  r.sb = args.sb;
  r.sc = args.sc;
  r.sd = args.sd;
  r.log_dt = args.log_dt;
  r.log_neg_re = args.log_neg_re;
  r.imag = args.imag;
  r.b = args.b;
  r.c = args.c;
  r.d = args.d;
  r.disc = args.disc;
  r.N = sequences;
  return r;
}
void cut(Arena& arena, H3Rows* r) {
  const int64_t C = r->q.size[2], H = r->log_dt.size[0], P = H == 0 ? 0 : C / H;
  r->ring = arena.take<float>(r->N * C * r->sb.size[1]);
  r->kbar = arena.take<float>(r->q.elements());
  r->states = arena.take<double>(r->N * H * P * P * r->imag.size[1] * 2);
}
void run_h3(const Launch& launch, const H3Rows& r) {
  const int64_t C = r.q.size[2];
  enqueue(launch, {kImage, "h3_shift", 128}, {divide_up(r.N * C, 128)}, r);
  enqueue(launch, {kImage, "h3_diagonal", 128}, {r.N * C}, r);  // a head and slot is a channel
}
template <class Args>
int64_t workspace(const Args& args, int64_t sequences) {
  Arena arena;
  H3Rows r = rows_of(args, sequences);
  cut(arena, &r);
  return arena.used();
}
int64_t sequences_of(const H3Args& args) { return args.cu_seqlens.given() ? args.cu_seqlens.size[0] - 1 : args.q.size[0]; }
H3Back cut_back(Arena& arena, const H3Args& args) {
  H3Back g;
  H3Rows& r = g.r;
  r = rows_of(args, sequences_of(args));
  const int64_t C = r.q.size[2], H = r.log_dt.size[0], P = H == 0 ? 0 : C / H, M = r.imag.size[1], R = r.sb.size[1];
  r.ring = arena.take<float>(r.N * C * R);
  r.kbar = arena.take<float>(r.q.elements());
  g.walk = arena.take<double>(r.N * H * P * P * M * 12);
  g.skip = arena.take<double>(r.N * H * P * P);
  g.sums = arena.take<double>(H * M * 6 + H);
  g.dkbar = arena.take<double>(r.q.elements());
  g.shifts = arena.take<double>(r.N * C * R);
  g.dsb = arena.take<float>(r.N * C * R);
  g.dsc = arena.take<float>(r.N * C * R);
  g.dsd = arena.take<float>(r.N * C);
  return g;
}

}  // namespace

const char* h3_refuses(const H3Args& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t h3_workspace(const H3Args& args, Pass pass, int) {
  if (pass == Pass::forward) return workspace(args, sequences_of(args));
  Arena arena;
  cut_back(arena, args);
  return arena.used();
}
void h3_forward(const H3Args& args, const H3Out& out, const Launch& launch) {
  Arena arena(launch.workspace);
  H3Rows r = rows_of(args, sequences_of(args));
  cut(arena, &r);
  r.cu_seqlens = args.cu_seqlens;
  r.shift_before = args.initial_state_shift;
  r.diag_before = args.initial_state_diag;
  r.shift_after = out.state_shift;
  r.diag_after = out.state_diag;
  r.out = out.out;
  r.taps_shift = out.taps_shift;
  r.taps_diag = out.taps_diag;
  run_h3(launch, r);
  if (!out.taps_shift.given() && !out.taps_diag.given()) return;
  enqueue(launch, {kImage, "h3_taps", 128}, {divide_up((r.q.size[2] + r.log_dt.size[0]) * r.q.size[1], 128)}, r);
}

void h3_backward(const H3Args& args, const H3Out&, const H3Grads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  H3Back g = cut_back(arena, args);
  H3Rows& r = g.r;
  r.cu_seqlens = args.cu_seqlens;
  r.shift_before = args.initial_state_shift;
  r.diag_before = args.initial_state_diag;
  g.dout = strided(grads.dout);
  g.dshift_after = strided(grads.dstate_shift);
  g.ddiag_after = strided(grads.dstate_diag);
  g.dq = strided(grads.dq), g.dk = strided(grads.dk), g.dv = strided(grads.dv);
  g.dshift_before = strided(grads.dinitial_state_shift);
  g.ddiag_before = strided(grads.dinitial_state_diag);
  for (int i = 0; i < 2; ++i) {
    g.state_strides[0][i] = grads.dstate_diag.stride[4 + i];
    g.state_strides[1][i] = grads.dinitial_state_diag.stride[4 + i];
  }
  g.dlog_dt = strided(grads.dlog_dt), g.dlog_neg_re = strided(grads.dlog_neg_re), g.dimag = strided(grads.dimag);
  g.db = strided(grads.db), g.dc = strided(grads.dc), g.dd = strided(grads.dd);
  const int64_t C = r.q.size[2], H = r.log_dt.size[0], M = r.imag.size[1];
  enqueue(launch, {kImage, "h3_shift", 128}, {divide_up(r.N * C, 128)}, r);
  enqueue(launch, {kImage, "h3_walk", 128}, {r.N * C}, g);
  enqueue(launch, {kImage, "h3_sums", 128}, {H * M + H}, g);
  enqueue(launch, {kImage, "h3_parameters", 128}, {divide_up(H, 128)}, g);
  if (grads.dv.given()) enqueue(launch, {kImage, "h3_walk_back", 128}, {r.N * C}, g, true);
  enqueue(launch, {kImage, "h3_walk_back", 128}, {r.N * C}, g, false);
  enqueue(launch, {kImage, "h3_shift_back", 128}, {divide_up(r.N * C, 128)}, g);
  sum_parts(launch, g.dsb, r.N, grads.dsb);
  sum_parts(launch, g.dsc, r.N, grads.dsc);
  sum_parts(launch, g.dsd, r.N, grads.dsd);
}

const char* h3_decode_refuses(const H3DecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t h3_decode_workspace(const H3DecodeArgs& args, Pass, int) { return workspace(args, args.q.size[0]); }
void h3_decode_forward(const H3DecodeArgs& args, const H3DecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  H3Rows r = rows_of(args, args.q.size[0]);
  cut(arena, &r);
  r.shift_before = r.shift_after = args.state_shift;
  r.diag_before = r.diag_after = args.state_diag;
  r.out = out.out;
  run_h3(launch, r);
}

}  // namespace linnet::cuda
