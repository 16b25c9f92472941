// Linear attention on the vector units: the walks of linear_sources.h run by the recurrence engine (mechanisms/recurrence).
//
// Forward: one walk. Backward: three walks, for dq forward in time and for dv and dk backward in time, each with its own state
// rebuilt on the way, so that memory does not grow with T.
#include "linear.h"
#include "linear_shape.h"
#include "linear_sources.h"
#include "linear_weights.h"

namespace linnet::LINNET_ISA {
namespace {

// How the heads of a sequence are cut into units: runs of `heads` (the last may be shorter), of which `share` in a row add up
// to one head of a gradient.
struct Groups {
  int64_t total;
  int share, heads;
  int64_t count() const { return heads == 0 ? 0 : (total + heads - 1) / heads; }
};

// Neighbouring heads lie side by side in memory: walking them together chunk by chunk uses whole lines and pages while they are
// near (T 8192, 8 heads of 64: 335 ns per token and head instead of 415 head by head). As many as leave every worker a unit,
// while their states take half of a 1 MB L2. Heads are independent, so this cut changes no bit.
LINNET_INLINE Groups groups_of(const LinearShape& s, int64_t own, int64_t state_bytes, int workers) {
  if (own == 0 || s.N == 0) return {0, 0, 0};
  const int64_t share = s.H / own, per_sequence = (workers + s.N - 1) / s.N;
  const int64_t spread = (own + per_sequence - 1) / per_sequence, fits = (int64_t{512} << 10) / (share * state_bytes + 1);
  const int64_t runs = spread < fits ? spread : fits > 1 ? fits : 1;
  return {s.H, static_cast<int>(share), static_cast<int>(share * runs)};
}

// One kind of walk over all sequences and heads.
template <class T, class Source>
struct Job {
  bool wanted = false;
  Groups groups{0, 0, 0};
  Source prototype;  // everything but the sequence and the heads

  int64_t units() const { return wanted ? prototype.s.N * groups.count() : 0; }
  Source unit(int64_t i) const {
    Source source = prototype;
    source.n = i / groups.count();
    source.head0 = i % groups.count() * groups.heads;
    source.count = static_cast<int>(groups.total - source.head0 < groups.heads ? groups.total - source.head0 : groups.heads);
    source.share = groups.share;
    source.seq = linear_sequence(*source.args, source.n);
    return source;
  }
};

template <class T, class Source>
Job<T, Source> job_of(bool wanted, Source prototype, int64_t own, int workers) {
  const int64_t bytes = prototype.state().elements() * static_cast<int64_t>(sizeof(T));
  return {wanted, groups_of(prototype.s, own, bytes, workers), prototype};
}

// What one worker needs for a job: its chunk and, without the ladder, the states of a group.
template <class T>
struct Need {
  int64_t states = 0;  // elements of the states of one unit
  int64_t window = 0;  // elements of the ladder's window
  int I = 0, J = 0;
  int64_t spare = 0;
};
template <class T, class Source>
Need<T> need_of(const Job<T, Source>& job, bool ladder, int workers) {
  if (!job.wanted) return {};
  Source source = job.prototype;
  source.head0 = 0;
  source.count = job.groups.heads;
  const StateShape<T> shape = source.state();
  Need<T> need{job.groups.heads * shape.elements(), 0, shape.I, shape.J, source.spare_elements()};
  if (ladder && has_columns<T>(source)) {
    need.window = columns_window<T>(source, workers);
  } else if (ladder) {
    need.window = ladder_window(shape, job.groups.heads, workers) * need.states;
  }
  return need;
}

// Workspace of a pass: per worker the largest chunk and states of its jobs, the ladder's window, the weights of t2r in T and
// their gradients per unit.
template <class T>
struct Plan {
  bool ladder = false;
  int64_t worker_bytes = 0;
  char* workers = nullptr;
  T* states = nullptr;  // ladder
  T* window = nullptr;
  T* weights = nullptr;
  T* dw = nullptr;
};

template <class T>
LINNET_INLINE int64_t worker_bytes(const Need<T>& need, bool ladder) {
  Arena arena;
  Chunk<T>::cut(arena, need.I, need.J, need.spare);
  if (!ladder) arena.take<T>(need.states);
  return arena.used();
}

template <class T, class... Jobs>
Plan<T> plan_of(Arena& arena, const LinearArgs& args, const LinearShape& s, bool wants_dw, int workers, const Jobs&... jobs) {
  Plan<T> plan;
  const int64_t units = (jobs.units() + ...);
  const int64_t tokens = s.B * (s.T > s.S ? s.T : s.S), chunks = s.N == 0 ? 0 : tokens / s.N / kChunk;
  // Shifted states are rescaled in order, and dw is added up in order: those walk their chunks one after the other.
  plan.ladder = prefer_ladder(units, chunks, workers) && !s.shifted && !wants_dw;
  int64_t states = 0, window = 0;
  const auto grow = [&](const Need<T>& need) {
    const int64_t bytes = worker_bytes(need, plan.ladder);
    if (bytes > plan.worker_bytes) plan.worker_bytes = bytes;
    if (need.states > states) states = need.states;
    if (need.window > window) window = need.window;
  };
  (grow(need_of<T>(jobs, plan.ladder, workers)), ...);
  plan.workers = arena.take<char>(workers * plan.worker_bytes);
  if (plan.ladder) {
    plan.states = arena.take<T>(states);
    plan.window = arena.take<T>(window);
  }
  if (args.map == FeatureMap::t2r) plan.weights = arena.take<T>(s.Hq * weight_elements<T>(s));
  if (wants_dw) plan.dw = arena.take<T>(2 * s.N * s.Hq * s.F * round_up<T>(s.K));
  return plan;
}

// Chunk and states of a worker for a unit.
template <class T, class Source>
LINNET_INLINE Chunk<T> worker_chunk(const Plan<T>& plan, int worker, const Source& source, T** states) {
  Arena arena(plan.workers + worker * plan.worker_bytes);
  const StateShape<T> shape = source.state();
  const Chunk<T> chunk = Chunk<T>::cut(arena, shape.I, shape.J, source.spare_elements());
  if (states != nullptr) *states = arena.take<T>(source.heads() * shape.elements());
  return chunk;
}

template <class T, class Source>
void run_unit(const Plan<T>& plan, const Source& source, int worker) {
  T* states;
  const Chunk<T> chunk = worker_chunk(plan, worker, source, &states);
  walk<T>(source, states, chunk);
}

template <class T, class Source>
void run_ladder(const Plan<T>& plan, const Job<T, Source>& job, const Launch& launch) {
  for (int64_t i = 0; i < job.units(); ++i) {
    const Source source = job.unit(i);
    const auto chunk_of = [&](int worker) { return worker_chunk<T>(plan, worker, source, nullptr); };
    if (has_columns<T>(source)) {
      walk_columns<T>(source, plan.states, plan.window, launch, chunk_of);
    } else {
      walk_ladder<T>(source, plan.states, plan.window, launch, chunk_of);
    }
  }
}

// Tasks of all jobs in one list, so that the last of one runs beside the first of the next.
template <class T, class A, class B, class C>
void run_jobs(const Plan<T>& plan, const Launch& launch, const Job<T, A>& a, const Job<T, B>& b, const Job<T, C>& c) {
  if (plan.ladder) {
    run_ladder(plan, a, launch);
    run_ladder(plan, b, launch);
    run_ladder(plan, c, launch);
    return;
  }
  parallel(launch, a.units() + b.units() + c.units(), [&](int64_t task, int worker) {
    if (task < a.units()) return run_unit<T>(plan, a.unit(task), worker);
    task -= a.units();
    if (task < b.units()) return run_unit<T>(plan, b.unit(task), worker);
    run_unit<T>(plan, c.unit(task - b.units()), worker);
  });
}

template <class Source>
Source prototype(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const LinearShape& s, bool reversed) {
  Source source{};
  source.args = &args;
  source.out = &out;
  source.grads = &grads;
  source.s = s;
  source.reversed = reversed;
  return source;
}

// ---- forward

template <class T, class E, bool kSums>
struct ForwardPass {
  using Source = LinearForward<T, E, kSums>;
  using Jobs = Job<T, Source>;
  LINNET_INLINE static Jobs job(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, int workers) {
    const LinearShape s = linear_shape(args);
    return job_of<T>(true, prototype<Source>(args, out, grads, s, false), s.H, workers);
  }
  static int64_t workspace(const LinearArgs& args, int workers) {
    const LinearOut out;
    const LinearGrads grads;
    Arena arena;
    plan_of<T>(arena, args, linear_shape(args), false, workers, job(args, out, grads, workers));
    return arena.used();
  }
  static void run(const LinearArgs& args, const LinearOut& out, const Launch& launch) {
    const LinearGrads grads;
    Jobs forward = job(args, out, grads, launch.workers);
    Arena arena(launch.workspace);
    const Plan<T> plan = plan_of<T>(arena, args, forward.prototype.s, false, launch.workers, forward);
    load_weights_of<T, E>(args, forward.prototype.s, plan.weights);
    forward.prototype.weights = plan.weights;
    if (plan.ladder) return run_ladder(plan, forward, launch);
    parallel(launch, forward.units(), [&](int64_t task, int worker) { run_unit<T>(plan, forward.unit(task), worker); });
  }
};

// ---- backward

template <class T, class E>
struct BackwardPass {
  Job<T, LinearQueryGrad<T, E>> query;
  Job<T, LinearKeyGrad<T, E>> key;
  Job<T, LinearValueGrad<T, E>> value;
  bool wants_dw;

  BackwardPass(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, int workers) {
    const LinearShape s = linear_shape(args);
    wants_dw = grads.dw.given();
    query =
        job_of<T>(grads.dq.given() || wants_dw, prototype<LinearQueryGrad<T, E>>(args, out, grads, s, false), s.Hq, workers);
    key = job_of<T>(grads.dk.given() || wants_dw || grads.dinitial_z.given(),
                    prototype<LinearKeyGrad<T, E>>(args, out, grads, s, true), s.Hk, workers);
    value = job_of<T>(grads.dv.given() || grads.dinitial_state.given(),
                      prototype<LinearValueGrad<T, E>>(args, out, grads, s, true), s.Hv, workers);
  }
  Plan<T> plan(Arena& arena, const LinearArgs& args, int workers) const {
    return plan_of<T>(arena, args, query.prototype.s, wants_dw, workers, query, key, value);
  }
  static int64_t workspace(const LinearArgs& args, int workers) {
    // The gradients that will be asked for are not known here, and fewer of them may need more (the ladder): take the most.
    int64_t most = 0;
    for (int wanted = 0; wanted < 16; ++wanted) {
      LinearGrads some;
      if (wanted & 1) some.dq = args.q;
      if (wanted & 2) some.dk = some.dinitial_z = some.dfinal_z = args.k;
      if (wanted & 4) some.dv = some.dinitial_state = args.v;
      if (wanted & 8) some.dw = args.w;
      Arena arena;
      const LinearOut out;
      BackwardPass(args, out, some, workers).plan(arena, args, workers);
      if (arena.used() > most) most = arena.used();
    }
    return most;
  }
  static void run(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Launch& launch) {
    BackwardPass pass(args, out, grads, launch.workers);
    const LinearShape& s = pass.query.prototype.s;
    Arena arena(launch.workspace);
    const Plan<T> plan = pass.plan(arena, args, launch.workers);
    load_weights_of<T, E>(args, s, plan.weights);
    pass.query.prototype.weights = pass.key.prototype.weights = pass.value.prototype.weights = plan.weights;
    const int64_t each = s.F * round_up<T>(s.K), half = s.N * s.Hq * each;
    if (pass.wants_dw) {
      for (int64_t i = 0; i < 2 * half; ++i) plan.dw[i] = 0;
      pass.query.prototype.dw = plan.dw;
      pass.key.prototype.dw = plan.dw + half;
    }
    run_jobs(plan, launch, pass.query, pass.key, pass.value);
    if (pass.wants_dw) add_dw(grads.dw, s, plan.dw, half);
  }
  // dw = the parts of all sequences in order, queries before keys.
  static void add_dw(const View& dw, const LinearShape& s, const T* parts, int64_t half) {
    const int64_t ld = round_up<T>(s.K), each = s.F * ld;
    for (int64_t h = 0; h < s.Hq; ++h) {
      for (int64_t i = 0; i < s.F; ++i) {
        for (int64_t c = 0; c < s.K; ++c) {
          T sum = 0;
          for (int64_t n = 0; n < s.N; ++n) {
            const int64_t at = (n * s.Hq + h) * each + i * ld + c;
            sum += parts[at] + parts[half + at];
          }
          store_f64(dw.data, dw.dtype, h * dw.stride[0] + i * dw.stride[1] + c, static_cast<double>(sum));
        }
      }
    }
  }
};

}  // namespace

void linear_forward(const LinearArgs& args, const LinearOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    if (args.normalize || out.final_z.given()) return ForwardPass<T, E, true>::run(args, out, launch);
    ForwardPass<T, E, false>::run(args, out, launch);
  });
}

void linear_backward(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { BackwardPass<T, E>::run(args, out, grads, launch); });
}

int64_t linear_workspace(const LinearArgs& args, Pass pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    return pass == Pass::forward ? ForwardPass<T, E, true>::workspace(args, workers)
                                 : BackwardPass<T, E>::workspace(args, workers);
  });
}

}  // namespace linnet::LINNET_ISA
