// Forward and backward of mapped.h: the means and largest exponents that the walks start from, then the walks of the plan.
#include "mapped_plan.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr double kLargestMean = 1e12;
// v0 and k0: means of the first chunk of keys that take part; of all keys for k0 and v0 of a centred call that is not causal,
// where they leave nothing to cancel. 0 where they would not be finite, and in a forward that is not centred (unless it is
// asked for): its weighted means cancel nothing. Sums in double: the means over all keys are results of a centred forward, and
// may be small beside the keys.
template <class T>
void take_means(const MappedPlan<T>& plan, bool backward, const Launch& launch) {
  const MappedCall<T>& call = plan.call;
  const int64_t S = call.k.size[1], part = call.centred && !call.causal ? S : S < kChunk ? S : kChunk;
  parallel(launch, plan.B() * plan.H(), [&](int64_t task, int worker) {
    Mapped<T> source = plan.source(MappedWalk::query);  // plain phi(k): the mean is taken off below
    source.b = task / plan.H();
    source.head0 = task % plan.H();
    T* v0 = plan.v0 + task * source.ldv();
    T* k0 = call.centred ? plan.k0 + task * source.ldf() : nullptr;
    for (int64_t c = 0; c < source.ldv(); ++c) v0[c] = 0;
    for (int64_t c = 0; call.centred && c < source.ldf(); ++c) k0[c] = 0;
    if (!call.centred && ((call.normalizer == Normalizer::none && !call.shares) || (!backward && !call.forward_mean))) return;
    const Mapped<T> biggest = plan.source(plan.jobs[0].wanted   ? plan.jobs[0].kind
                                          : plan.jobs[1].wanted ? MappedWalk::key
                                                                : MappedWalk::value);
    const Chunk<T> chunk = mapped_chunk<T>(plan, worker, biggest, nullptr);
    const auto s = source.spare(chunk);
    double* sums = plan.sums + task * (source.ldf() > source.ldv() ? source.ldf() : source.ldv());
    // use(c, mean) of each column, over the first `rows` keys
    const auto mean = [&](bool keys, int width, int64_t rows, const auto& use) {
      int64_t kept = 0;
      for (int c = 0; c < width; ++c) sums[c] = 0;
      for (int64_t at = 0; at < rows; at += kChunk) {
        const int n = chunk_rows(at, rows);
        const int64_t ld = keys ? source.ldf() : source.ldv();
        if (keys) {
          source.key_features(0, at, n, nullptr, s.f, ld, s);  // k0 is still 0
        } else {
          source.value_rows(0, at, n, false, s.f, ld);
        }
        for (int r = 0; r < n; ++r) {
          if (source.masked(at + r)) continue;
          ++kept;
          for (int c = 0; c < width; ++c) sums[c] += static_cast<double>(s.f[r * ld + c]);
        }
      }
      for (int c = 0; c < width; ++c) use(c, kept == 0 ? 0 : sums[c] / static_cast<double>(kept));
    };
    const auto put_final = [&](const View& to) {
      return [&, data = to.template at<T>(source.b, source.head0)](int c, double x) { data[c] = static_cast<T>(x); };
    };
    // Not the mean of a token that is infinite, or whose features ended at their bound: what is taken off every row would then
    // leave nothing of the others.
    const auto put_mean = [](T* to) {
      return [to](int c, double x) { to[c] = __builtin_fabs(x) < kLargestMean ? static_cast<T>(x) : T(0); };
    };
    if (call.final_v.given()) mean(false, source.width(), S, put_final(call.final_v));
    if (call.centred && call.final_z.given()) mean(true, source.F(), S, put_final(call.final_z));
    mean(false, source.width(), part, put_mean(v0));
    if (call.centred) mean(true, source.F(), part, put_mean(k0));
  });
}

// The largest exponent over each head's keys, or its running maximum.
template <class T>
void take_tops(const MappedPlan<T>& plan, const Launch& launch) {
  const MappedCall<T>& call = plan.call;
  if (call.map.tops == nullptr) return;
  const int64_t S = call.k.size[1];
  parallel(launch, plan.B() * plan.H(), [&](int64_t task, int worker) {
    const Mapped<T> biggest = plan.source(plan.jobs[0].wanted   ? plan.jobs[0].kind
                                          : plan.jobs[1].wanted ? MappedWalk::key
                                                                : MappedWalk::value);
    const Chunk<T> chunk = mapped_chunk<T>(plan, worker, biggest, nullptr);
    Mapped<T> source = plan.source(MappedWalk::query);
    source.b = task / plan.H();
    source.head0 = task % plan.H();
    const auto s = source.spare(chunk);
    if (call.rule == KeyTop::given) {
      plan.tops[task] = given_top(call.key_tops, source.b, source.head0);
      return;
    }
    double top = -__builtin_inf();
    if (call.top.given()) top = static_cast<double>(*call.top.template at<T>(source.b, source.head0));
    for (int64_t at = 0; at < S; at += kChunk) {
      const int n = chunk_rows(at, S);
      double rows[kChunk];
      source.load(call.k, S, 0, at, n, s.x, source.ldk());
      source.zero_masked(at, n, s.x, source.ldk(), source.ldk());
      call.map.tops(call.map.self, {source.b, source.head0, at, 1, true, n}, s.x, source.ldk(), rows, s.scratch);
      for (int r = 0; r < n; ++r) {
        if (!source.masked(at + r) && rows[r] > top && rows[r] < __builtin_inf()) top = rows[r];
        if (source.running()) plan.tops[task * S + at + r] = top;
      }
    }
    if (!source.running()) plan.tops[task] = top;
  });
}

template <class T>
void run_jobs(const MappedPlan<T>& plan, const Launch& launch, int first, int last) {
  if (plan.ladder) {
    for (int j = first; j < last; ++j) {
      for (int64_t i = 0; i < plan.units(plan.jobs[j]); ++i) {
        const Mapped<T> source = plan.unit(plan.jobs[j], i);
        walk_ladder<T>(source, plan.states, plan.window, launch,
                       [&](int worker) { return mapped_chunk<T>(plan, worker, source, nullptr); });
      }
    }
    return;
  }
  int64_t tasks = 0;
  for (int j = first; j < last; ++j) tasks += plan.units(plan.jobs[j]);
  parallel(launch, tasks, [&](int64_t task, int worker) {
    int j = first;
    for (; task >= plan.units(plan.jobs[j]); ++j) task -= plan.units(plan.jobs[j]);
    const Mapped<T> source = plan.unit(plan.jobs[j], task);
    T* states;
    const Chunk<T> chunk = mapped_chunk(plan, worker, source, &states);
    walk<T>(source, states, chunk);
  });
}

}  // namespace

template <class T>
int64_t mapped_forward_bytes(const MappedCall<T>& call, int workers) {
  Arena arena;
  mapped_plan(arena, call, false, workers);
  return arena.used();
}
template <class T>
void mapped_forward(const MappedCall<T>& call, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedPlan<T> plan = mapped_plan(arena, call, false, launch.workers);
  if (!plan.jobs[0].wanted) return;
  take_means(plan, false, launch);
  take_tops(plan, launch);
  run_jobs(plan, launch, 0, plan.count);
}

template <class T>
int64_t mapped_backward_bytes(const MappedCall<T>& call, int workers) {
  // The gradients that will be asked for are not known here, and fewer of them may need more (the ladder): take the most.
  int64_t most = 0;
  for (int wanted = 0; wanted < 16; ++wanted) {
    MappedCall<T> some = call;
    some.dq = wanted & 1 ? call.q : View();
    some.dk = wanted & 2 ? call.k : View();
    some.dv = wanted & 4 ? call.v : View();
    some.wants_params = (wanted & 8) != 0 && call.map.params > 0;
    Arena arena;
    mapped_plan(arena, some, true, workers);
    if (arena.used() > most) most = arena.used();
  }
  return most;
}
template <class T>
void mapped_backward(const MappedCall<T>& call, const Launch& launch) {
  Arena arena(launch.workspace);
  const MappedPlan<T> plan = mapped_plan(arena, call, true, launch.workers);
  if (call.wants_params) {
    for (int64_t i = 0; i < 2 * plan.B() * plan.H() * call.map.params; ++i) call.dparam[i] = 0;
  }
  if (!plan.jobs[0].wanted && !plan.jobs[1].wanted && !plan.jobs[2].wanted) return;
  take_means(plan, true, launch);
  take_tops(plan, launch);
  if (call.centred) {  // the others read what the query walk remembers of its rows
    run_jobs(plan, launch, 0, 1);
    return run_jobs(plan, launch, 1, plan.count);
  }
  run_jobs(plan, launch, 0, plan.count);
}

#define LINNET_MAPPED(T)                                                \
  template int64_t mapped_forward_bytes<T>(const MappedCall<T>&, int);  \
  template void mapped_forward<T>(const MappedCall<T>&, const Launch&); \
  template int64_t mapped_backward_bytes<T>(const MappedCall<T>&, int); \
  template void mapped_backward<T>(const MappedCall<T>&, const Launch&);
LINNET_MAPPED(float)
LINNET_MAPPED(double)

}  // namespace linnet::LINNET_ISA
