// The plain double-precision loop of the selective scan: the specification of `mamba_selective_scan` and its decode step.
// One sequence and channel at a time, one token at a time.
#include <cmath>

#include "core/element.h"
#include "core/sequence.h"
#include "selective_scan.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }

// Channel e of batch row b.
template <class Args>
struct Channel {
  const Args& args;
  View B, C;
  int64_t b, e, K, group;

  Channel(const Args& a, int64_t row, int64_t channel)
      : args(a), B(grouped(a.B)), C(grouped(a.C)), b(row), e(channel), K(a.A.size[1]), group(e / (a.x.size[2] / B.size[2])) {}

  double x(int64_t t) const { return element(args.x, b, t, e); }
  double step(int64_t t) const {  // dt + dt_bias
    return element(args.dt, b, t, e) + (args.dt_bias.given() ? element(args.dt_bias, e) : 0);
  }
  double D() const { return args.D.given() ? element(args.D, e) : 0; }
  double gate(int64_t t) const {
    if (!args.z.given()) return 1;
    const double z = element(args.z, b, t, e);
    return z * sigmoid(z);
  }
  double decay(int64_t t, int64_t n) const { return std::exp(softplus(step(t)) * element(args.A, e, n)); }
  double in(int64_t t, int64_t n) const { return element(B, b, t, group, n); }
  double out(int64_t t, int64_t n) const { return element(C, b, t, group, n); }

  // h_{t-1} -> h_t; returns y before the gate
  double move(int64_t t, const double* before, double* h) const {
    const double delta = softplus(step(t));
    double y = D() * x(t);
    for (int64_t n = 0; n < K; ++n) {
      h[n] = decay(t, n) * before[n] + delta * in(t, n) * x(t);
      y += out(t, n) * h[n];
    }
    return y;
  }
};

}  // namespace

void mamba_selective_scan_forward(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Launch& launch) {
  const int64_t E = args.x.size[2], K = args.A.size[1];
  Arena arena(launch.workspace);
  double* h = arena.take<double>(K);
  for (int64_t s = 0; s < sequence_count(args.cu_seqlens, args.x.size[0]); ++s) {
    const Sequence at = sequence_of(args.cu_seqlens, args.x.size[1], s);
    for (int64_t e = 0; e < E; ++e) {
      const Channel channel(args, at.b, e);
      for (int64_t n = 0; n < K; ++n) h[n] = args.initial_state.given() ? element(args.initial_state, s, e, n) : 0;
      for (int64_t t = at.begin; t < at.end; ++t) {
        const double y = channel.move(t, h, h);
        set_element(out.out, y * channel.gate(t), at.b, t, e);
      }
      for (int64_t n = 0; out.final_state.given() && n < K; ++n) set_element(out.final_state, h[n], s, e, n);
    }
  }
}

namespace {

struct Sums {
  double *h, *R;         // [T + 1, K], [K]
  double *dB, *dC;       // [B, T, G, K]
  double *dA, *dD, *db;  // [E, K], [E], [E]
  int64_t maps, rates, channels;

  static Sums cut(Arena& arena, const SelectiveScanArgs& args) {
    Sums r;
    r.maps = args.B.elements();
    r.rates = args.A.elements();
    r.channels = args.x.size[2];
    r.h = arena.take<double>((args.x.size[1] + 1) * args.A.size[1]);
    r.R = arena.take<double>(args.A.size[1]);
    r.dB = arena.take<double>(r.maps);
    r.dC = arena.take<double>(r.maps);
    r.dA = arena.take<double>(r.rates);
    r.dD = arena.take<double>(r.channels);
    r.db = arena.take<double>(r.channels);
    return r;
  }
  void clear() const {
    for (int64_t i = 0; i < maps; ++i) dB[i] = dC[i] = 0;
    for (int64_t i = 0; i < rates; ++i) dA[i] = 0;
    for (int64_t i = 0; i < channels; ++i) dD[i] = db[i] = 0;
  }
};

void store_dense(const View& view, const double* values) {
  if (!view.given()) return;
  const View four = view.rank == 4 ? view : grouped(view);
  for (int64_t b = 0; b < four.size[0]; ++b) {
    for (int64_t t = 0; t < four.size[1]; ++t) {
      for (int64_t g = 0; g < four.size[2]; ++g) {
        for (int64_t n = 0; n < four.size[3]; ++n) set_element(four, *values++, b, t, g, n);
      }
    }
  }
}

}  // namespace

void mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut&, const SelectiveScanGrads& grads,
                                   const Launch& launch) {
  const int64_t T = args.x.size[1], E = args.x.size[2], K = args.A.size[1];
  Arena arena(launch.workspace);
  const Sums r = Sums::cut(arena, args);
  r.clear();
  for (int64_t s = 0; s < sequence_count(args.cu_seqlens, args.x.size[0]); ++s) {
    const Sequence at = sequence_of(args.cu_seqlens, T, s);
    for (int64_t e = 0; e < E; ++e) {
      const Channel channel(args, at.b, e);
      const int64_t G = channel.B.size[2];
      for (int64_t n = 0; n < K; ++n) r.h[n] = args.initial_state.given() ? element(args.initial_state, s, e, n) : 0;
      for (int64_t t = at.begin; t < at.end; ++t) {
        double* before = r.h + (t - at.begin) * K;
        const double y = channel.move(t, before, before + K);
        if (!grads.dz.given()) continue;
        const double z = element(args.z, at.b, t, e), slope = sigmoid(z) * (1 + z * (1 - sigmoid(z)));
        set_element(grads.dz, grads.dout.given() ? element(grads.dout, at.b, t, e) * y * slope : 0, at.b, t, e);
      }
      for (int64_t n = 0; n < K; ++n) r.R[n] = grads.dfinal_state.given() ? element(grads.dfinal_state, s, e, n) : 0;
      for (int64_t t = at.end; t-- > at.begin;) {
        const double* before = r.h + (t - at.begin) * K;
        const double* h = before + K;
        const double dy = grads.dout.given() ? element(grads.dout, at.b, t, e) * channel.gate(t) : 0;
        const double delta = softplus(channel.step(t)), x = channel.x(t);
        double dx = channel.D() * dy, ddelta = 0;
        for (int64_t n = 0; n < K; ++n) {
          const int64_t map = ((at.b * T + t) * G + channel.group) * K + n;
          const double rate = element(args.A, e, n), decay = channel.decay(t, n), in = channel.in(t, n);
          r.R[n] += channel.out(t, n) * dy;
          r.dC[map] += dy * h[n];
          r.dB[map] += delta * x * r.R[n];
          dx += delta * in * r.R[n];
          ddelta += r.R[n] * (rate * decay * before[n] + in * x);
          r.dA[e * K + n] += r.R[n] * delta * decay * before[n];
          r.R[n] *= decay;
        }
        const double ddt = ddelta * sigmoid(channel.step(t));
        r.dD[e] += dy * x;
        r.db[e] += ddt;
        if (grads.dx.given()) set_element(grads.dx, dx, at.b, t, e);
        if (grads.ddt.given()) set_element(grads.ddt, ddt, at.b, t, e);
      }
      for (int64_t n = 0; grads.dinitial_state.given() && n < K; ++n) set_element(grads.dinitial_state, r.R[n], s, e, n);
    }
  }
  store_dense(grads.dB, r.dB);
  store_dense(grads.dC, r.dC);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t n = 0; grads.dA.given() && n < K; ++n) set_element(grads.dA, r.dA[e * K + n], e, n);
    if (grads.dD.given()) set_element(grads.dD, r.dD[e], e);
    if (grads.ddt_bias.given()) set_element(grads.ddt_bias, r.db[e], e);
  }
}

int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward) {
    Sums::cut(arena, args);
  } else {
    arena.take<double>(args.A.size[1]);
  }
  return arena.used();
}

void mamba_selective_scan_decode_forward(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                         const Launch& launch) {
  const int64_t E = args.x.size[2], K = args.A.size[1];
  Arena arena(launch.workspace);
  double* h = arena.take<double>(K);
  for (int64_t b = 0; b < args.x.size[0]; ++b) {
    for (int64_t e = 0; e < E; ++e) {
      const Channel channel(args, b, e);
      for (int64_t n = 0; n < K; ++n) h[n] = element(args.state, b, e, n);
      for (int64_t t = 0; t < args.x.size[1]; ++t) {
        const double y = channel.move(t, h, h);
        set_element(out.out, y * channel.gate(t), b, t, e);
      }
      for (int64_t n = 0; n < K; ++n) set_element(args.state, h[n], b, e, n);
    }
  }
}

int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, Pass, int) {
  Arena arena;
  arena.take<double>(args.A.size[1]);
  return arena.used();
}

}  // namespace linnet::ref
