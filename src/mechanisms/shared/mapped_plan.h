// The plan of a pass of mapped.h: which walks run, how many heads of a batch row one unit takes, and the memory of all that.
#pragma once

#include "mapped_source.h"

namespace linnet::LINNET_ISA {

template <class T>
struct MappedJob {
  bool wanted = false;
  MappedWalk kind = MappedWalk::forward;
  int heads = 0;  // of a unit; see linear_cpu.cc: neighbouring heads walk together while their states fit
  int64_t groups = 0;
};

template <class T>
struct MappedPlan {
  MappedCall<T> call;
  MappedJob<T> jobs[3];
  int count = 0;
  bool ladder = false;
  int64_t worker_bytes = 0;
  T *v0 = nullptr, *k0 = nullptr, *row_inverse = nullptr, *row_e = nullptr, *row_c = nullptr;
  double *tops = nullptr, *sums = nullptr;  // sums: [B, H, ldf or ldv]
  char* workers = nullptr;
  T *states = nullptr, *window = nullptr;

  Mapped<T> source(MappedWalk kind) const { return {&call, kind, 0, 0, 1, v0, k0, row_inverse, row_e, row_c, tops}; }
  int64_t B() const { return call.q.size[0]; }
  int64_t H() const { return call.q.size[2]; }
  int64_t units(const MappedJob<T>& job) const { return job.wanted ? B() * job.groups : 0; }
  Mapped<T> unit(const MappedJob<T>& job, int64_t i) const {
    Mapped<T> s = source(job.kind);
    s.b = i / job.groups;
    s.head0 = i % job.groups * job.heads;
    s.count = static_cast<int>(H() - s.head0 < job.heads ? H() - s.head0 : job.heads);
    return s;
  }
};

template <class T>
void add_mapped_job(MappedPlan<T>& plan, MappedWalk kind, bool wanted, int workers) {
  MappedJob<T>& job = plan.jobs[plan.count++];
  job.wanted = wanted && plan.H() > 0 && plan.B() > 0;
  job.kind = kind;
  if (!job.wanted) return;
  const int64_t bytes = plan.source(kind).state().elements() * static_cast<int64_t>(sizeof(T));
  const int64_t per_row = (workers + plan.B() - 1) / plan.B(), spread = (plan.H() + per_row - 1) / per_row;
  const int64_t fits = (int64_t{512} << 10) / (bytes + 1);
  job.heads = static_cast<int>(spread < fits ? spread : fits > 1 ? fits : 1);
  job.groups = (plan.H() + job.heads - 1) / job.heads;
}

template <class T>
MappedPlan<T> mapped_plan(Arena& arena, const MappedCall<T>& call, bool backward, int workers) {
  MappedPlan<T> plan;
  plan.call = call;
  const bool params = call.wants_params;
  if (!backward) {
    add_mapped_job(plan, MappedWalk::forward, true, workers);
  } else {
    add_mapped_job(plan, MappedWalk::query, call.dq.given() || params || call.centred, workers);
    add_mapped_job(plan, MappedWalk::key, !call.queries_only && (call.dk.given() || params), workers);
    add_mapped_job(plan, MappedWalk::value, !call.queries_only && call.dv.given(), workers);
  }
  const int64_t heads = plan.B() * plan.H(), T0 = call.q.size[1], S = call.k.size[1];
  const Mapped<T> any_kind = plan.source(MappedWalk::forward);
  plan.v0 = arena.take<T>(heads * any_kind.ldv());
  if (call.centred) plan.k0 = arena.take<T>(heads * any_kind.ldf());
  if (call.centred && backward) {
    for (T** row : {&plan.row_inverse, &plan.row_e, &plan.row_c}) *row = arena.take<T>(heads * T0);
  }
  plan.sums = arena.take<double>(heads * (any_kind.ldf() > any_kind.ldv() ? any_kind.ldf() : any_kind.ldv()));
  if (call.map.tops != nullptr) plan.tops = arena.take<double>(heads * (any_kind.running() ? S : 1));
  int64_t units = 0, states = 0, window = 0;
  for (int i = 0; i < plan.count; ++i) units += plan.units(plan.jobs[i]);
  // A parameter's gradient is added up along the walk, in order.
  plan.ladder = prefer_ladder(units, (T0 > S ? T0 : S) / kChunk, workers) && !params && !any_kind.running();
  for (int i = 0; i < plan.count; ++i) {
    const MappedJob<T>& job = plan.jobs[i];
    if (!job.wanted) continue;
    const Mapped<T> source = plan.source(job.kind);
    const StateShape<T> shape = source.state();
    const int64_t elements = job.heads * shape.elements();
    Arena own;
    Chunk<T>::cut(own, shape.I, shape.J, source.spare_elements());
    if (!plan.ladder) own.take<T>(elements);
    if (own.used() > plan.worker_bytes) plan.worker_bytes = own.used();
    if (elements > states) states = elements;
    const int64_t part = plan.ladder ? ladder_window(shape, job.heads, workers) * elements : 0;
    if (part > window) window = part;
  }
  plan.workers = arena.take<char>(workers * plan.worker_bytes);
  if (plan.ladder) {
    plan.states = arena.take<T>(states);
    plan.window = arena.take<T>(window);
  }
  return plan;
}

template <class T>
Chunk<T> mapped_chunk(const MappedPlan<T>& plan, int worker, const Mapped<T>& source, T** states) {
  Arena arena(plan.workers + worker * plan.worker_bytes);
  const StateShape<T> shape = source.state();
  const Chunk<T> chunk = Chunk<T>::cut(arena, shape.I, shape.J, source.spare_elements());
  if (states != nullptr) *states = arena.take<T>(source.count * shape.elements());
  return chunk;
}

}  // namespace linnet::LINNET_ISA
