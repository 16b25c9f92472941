// fem_read with the priors linear, gated, aft and ssm, for one instruction set: heads over threads, one walk over the tokens of
// each (fem_scan_linear.h, fem_scan_aft.h, fem_scan_ssm.h), and the gradients that several heads add to.
#include "fem_scan_aft.h"
#include "fem_scan_linear.h"
#include "fem_scan_ssm.h"

namespace linnet::LINNET_ISA {
namespace {

// Calls use.operator()<Walk>() with the walk of the call's prior.
template <class Use>
auto with_walk(const FemReadArgs& args, const Use& use) {
  if (args.prior == FemPrior::aft) return use.template operator()<FemAft>();
  if (args.prior == FemPrior::ssm) return use.template operator()<FemSsm>();
  return use.template operator()<FemLinear>();
}

template <class Walk>
int64_t worker_bytes(const FemSizes& s, Pass pass) {
  Arena arena;
  const FemChannels channels(arena, s);
  const typename Walk::Rows rows(arena, s, pass);
  return arena.used();
}

// Gradients that several units add to, per unit: added up in order at the end.
struct Partial {
  double *dbeta, *dA, *dD, *dB, *dC;  // [B, H, V], [B, H, V, R], [B, H, V], [B, H, T, R] twice
  char* workers;
  int64_t each, bytes;  // of a worker, of all
  Partial(char* base, const FemReadArgs& args, const FemSizes& s, Pass pass, int worker_count) {
    Arena arena(base);
    const int64_t heads = pass == Pass::backward ? s.B * s.H : 0, ssm = args.prior == FemPrior::ssm ? heads : 0;
    dbeta = arena.take<double>(heads * s.V);
    dA = arena.take<double>(ssm * s.V * s.R);
    dD = arena.take<double>(ssm * s.V);
    dB = arena.take<double>(ssm * s.T * s.R);
    dC = arena.take<double>(ssm * s.T * s.R);
    each = with_walk(args, [&]<class Walk>() { return worker_bytes<Walk>(s, pass); });
    workers = arena.take<char>(each * worker_count);
    bytes = arena.used();
  }
};

// Runs f(walk, its number) for every head.
template <class Walk, class F>
void for_heads(const FemReadArgs& args, const FemSizes& s, Pass pass, const Partial& partial, const Launch& launch,
               const F& f) {
  const double work = static_cast<double>(s.B * s.T * s.H) * static_cast<double>(Walk::state_size(s) + 40 * s.V);
  run_tasks(launch, s.T > 0 ? s.B * s.H : 0, 4 * work, [&](int64_t task, int worker) {
    Arena arena(partial.workers + worker * partial.each);
    const FemChannels channels(arena, s);
    const typename Walk::Rows rows(arena, s, pass);
    const Walk walk{{args, s, channels, task / s.H, task % s.H}, rows};
    walk.channels();
    f(walk, task);
  });
}

template <class Walk>
void walk_back(const Walk& walk, const FemReadGrads& grads, const Partial&, int64_t) {
  walk.backward(grads);
}
void walk_back(const FemSsm& walk, const FemReadGrads& grads, const Partial& partial, int64_t task) {
  const int64_t channels = task * walk.s.V, tokens = task * walk.s.T * walk.s.R;
  walk.backward(grads, partial.dA + channels * walk.s.R, partial.dD + channels, partial.dB + tokens, partial.dC + tokens);
}

// x [outer, rest] = the sum over batch rows (or heads) of parts [outer, count, rest].
void add_up(const View& x, int64_t outer, int64_t count, int64_t rest, const double* parts) {
  for (int64_t i = 0; x.given() && i < outer * rest; ++i) {
    double sum_of = 0;
    for (int64_t n = 0; n < count; ++n) sum_of += parts[(i / rest * count + n) * rest + i % rest];
    int64_t left = i, offset = 0;
    for (int d = x.rank - 1; d >= 0; --d) {
      offset += left % x.size[d] * x.stride[d];
      left /= x.size[d];
    }
    store_f64(x.data, x.dtype, offset, sum_of);
  }
}

}  // namespace

int64_t fem_scan_workspace(const FemReadArgs& args, Pass pass, int workers) {
  return Partial(nullptr, args, FemSizes(args), pass, workers).bytes;
}

void fem_scan_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  const FemSizes s(args);
  const Partial partial(launch.workspace, args, s, Pass::forward, launch.workers);
  with_walk(args, [&]<class Walk>() {
    for_heads<Walk>(args, s, Pass::forward, partial, launch, [&](const Walk& walk, int64_t) { walk.forward(out); });
  });
}

void fem_scan_backward(const FemReadArgs& args, const FemReadGrads& grads, const Launch& launch) {
  const FemSizes s(args);
  const Partial partial(launch.workspace, args, s, Pass::backward, launch.workers);
  with_walk(args, [&]<class Walk>() {
    for_heads<Walk>(args, s, Pass::backward, partial, launch, [&](const Walk& walk, int64_t task) {
      walk_back(walk, grads, partial, task);
      for (int64_t j = 0; j < s.V; ++j) partial.dbeta[task * s.V + j] = walk.m.dbeta[j];
    });
  });
  const int64_t batch = s.T > 0 ? s.B : 0;
  add_up(grads.dbeta, 1, batch, s.H * s.V, partial.dbeta);
  if (args.prior != FemPrior::ssm) return;
  add_up(grads.dA, 1, batch, s.H * s.V * s.R, partial.dA);
  add_up(grads.dD, 1, batch, s.H * s.V, partial.dD);
  add_up(grads.dBm, s.B, s.H, s.T * s.R, partial.dB);
  add_up(grads.dCm, s.B, s.H, s.T * s.R, partial.dC);
}

}  // namespace linnet::LINNET_ISA
