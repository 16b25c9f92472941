// task: how every kernel runs its tasks.
//
//   parallel(launch, tasks, [&](int64_t task, int worker) { ... });     // subnormals flushed on every thread alike
#pragma once

#include "core/launch.h"
#include "simd/ftz.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

// Bytes that no cache is likely to hold from call to call: kernels that work here and there in more of them ask ahead.
inline constexpr int64_t kBeyondCaches = 24 << 20;

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

// Tasks in runs of neighbours, one run for each worker, so that what a task left in a core's cache is there when the next call
// comes back to it. A worker that is done helps the others. Most of what is left of a run is taken at once, at most kAtOnce: an
// atomic addition waits until all stores before it have left the core, 0.1 us where each of them goes to L3.
class NearTasks {
 public:
  NearTasks(int64_t tasks, int parts) {
    for (int part = 0; part < parts; ++part) runs_[part] = {part * tasks / parts, (part + 1) * tasks / parts};
  }
  static int parts(int64_t tasks, int workers) {
    const int most = workers < kMost ? workers : kMost;
    return static_cast<int>(tasks < most ? tasks : most);
  }
  // Called by every worker: body(task, worker) or body(task, worker, more) for the tasks that are left; more: the task behind
  // this one is likely to follow on this core.
  template <class Body>
  void take(int parts, int worker, const Body& body) {
    for (int part = 0; part < parts; ++part) {
      Run& run = runs_[(worker + part) % parts];
      for (;;) {
        const int64_t left = run.end - __atomic_load_n(&run.next, __ATOMIC_RELAXED);
        if (left <= 0) break;
        const int64_t most = left - left / 4, count = most < kAtOnce ? most : kAtOnce;
        const int64_t first = __atomic_fetch_add(&run.next, count, __ATOMIC_RELAXED);
        for (int64_t task = first; task < first + count && task < run.end; ++task) {
          if constexpr (requires { body(task, worker, true); }) {
            body(task, worker, task + 1 < run.end);
          } else {
            body(task, worker);
          }
        }
      }
    }
  }

 private:
  static constexpr int kMost = 64;
  static constexpr int64_t kAtOnce = 16;
  struct alignas(128) Run {
    int64_t next, end;
  } runs_[kMost];
};

// What the workers need lies side by side in the closure: each line of the caller's stack that another core reads takes it
// 0.05 us, one after the other where one tells of the next.
template <class Body>
void parallel_near(const Launch& launch, int64_t tasks, const Body& body) {
  if (tasks <= 0) return;
  const int parts = NearTasks::parts(tasks, launch.workers);
  NearTasks near(tasks, parts);
  parallel(launch, parts, [&near, parts, body](int64_t, int worker) { near.take(parts, worker, body); });
}

// Whether `units` equal pieces of work, of `chunks` chunks each, leave so many workers idle that all of them on one unit (about
// 1.2 times the work, and waits) are faster.
LINNET_INLINE bool prefer_ladder(int64_t units, int64_t chunks, int workers) {
  if (workers <= 1 || units <= 0 || chunks < 4 * workers) return false;
  const int64_t rounds = (units + workers - 1) / workers;
  return static_cast<double>(units) < 0.7 * static_cast<double>(rounds * workers);
}

}  // namespace linnet::LINNET_ISA
