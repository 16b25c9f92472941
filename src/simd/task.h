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

// Tasks in runs of neighbours, one run for each worker, so that what a task left in a core's cache is there when the next call
// comes back to it. A worker that is done helps the others.
class NearTasks {
 public:
  NearTasks(int64_t tasks, int workers) : parts_(workers < kMost ? workers : kMost) {
    for (int part = 0; part < parts_; ++part) runs_[part] = {part * tasks / parts_, (part + 1) * tasks / parts_};
  }
  int parts() const { return parts_; }
  // Called by every worker: body(task, worker) for the tasks that are left.
  template <class Body>
  void take(int worker, const Body& body) {
    for (int part = 0; part < parts_; ++part) {
      Run& run = runs_[(worker + part) % parts_];
      for (int64_t task; (task = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED)) < run.end;) body(task, worker);
    }
  }

 private:
  static constexpr int kMost = 64;
  struct alignas(128) Run {
    int64_t next, end;
  } runs_[kMost];
  int parts_;
};

template <class Body>
void parallel_near(const Launch& launch, int64_t tasks, const Body& body) {
  NearTasks near(tasks, launch.workers);
  parallel(launch, near.parts(), [&](int64_t, int worker) { near.take(worker, body); });
}

// Whether `units` equal pieces of work, of `chunks` chunks each, leave so many workers idle that all of them on one unit (about
// 1.2 times the work, and waits) are faster.
LINNET_INLINE bool prefer_ladder(int64_t units, int64_t chunks, int workers) {
  if (workers <= 1 || units <= 0 || chunks < 4 * workers) return false;
  const int64_t rounds = (units + workers - 1) / workers;
  return static_cast<double>(units) < 0.7 * static_cast<double>(rounds * workers);
}

}  // namespace linnet::LINNET_ISA
