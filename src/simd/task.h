// task: how every kernel runs its tasks.
//
//   parallel(launch, tasks, [&](int64_t task, int worker) { ... });     // subnormals flushed on every thread alike
#pragma once

#include "core/launch.h"
#include "simd/ftz.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

// Calls body(task, worker) for each task; subnormals flushed.
template <class Body>
void parallel(const Launch& launch, int64_t tasks, const Body& body) {
  launch.executor->run(
      tasks,
      [](void* context, int64_t task, int worker) {
        FlushSubnormals flush;
        (*static_cast<const Body*>(context))(task, worker);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// The same for states that the next call updates again: each worker has a run of neighbouring tasks of its own, so that a state
// stays in that core's cache, and helps the others when it is done.
template <class Body>
void parallel_near(const Launch& launch, int64_t tasks, const Body& body) {
  constexpr int kMost = 64;
  struct alignas(128) Run {
    int64_t next, end;
  } runs[kMost];
  const int parts = launch.workers < kMost ? launch.workers : kMost;
  for (int part = 0; part < parts; ++part) runs[part] = {part * tasks / parts, (part + 1) * tasks / parts};
  parallel(launch, parts, [&](int64_t, int worker) {
    for (int part = 0; part < parts; ++part) {
      Run& run = runs[(worker + part) % parts];
      for (int64_t task; (task = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED)) < run.end;) body(task, worker);
    }
  });
}

// Whether `units` equal pieces of work, of `chunks` chunks each, leave so many workers idle that all of them on one unit (about
// 1.2 times the work, and waits) are faster.
LINNET_INLINE bool prefer_ladder(int64_t units, int64_t chunks, int workers) {
  if (workers <= 1 || units <= 0 || chunks < 4 * workers) return false;
  const int64_t rounds = (units + workers - 1) / workers;
  return static_cast<double>(units) < 0.7 * static_cast<double>(rounds * workers);
}

}  // namespace linnet::LINNET_ISA
