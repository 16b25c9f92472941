// pipeline: one walk over the chunks of a long sequence, on many threads.
//
// Most of a chunk's work does not need the state that comes before it, or only reads it. A walk is cut in
//
//   scan(first, end)                  what must see all chunks in order and is cheap: running scalars; chunks first .. end - 1
//   prepare(chunk, slot, worker)      what the step needs of a chunk, left in its slot
//   step(chunk, slot, slice, worker)  leaves slice `slice` of the state before the chunk in the slot, then takes the chunk in
//   read(chunk, slot, worker)         all results that need the state of the slot
//
// and tasks are handed out window by window: scan of the next window, steps of this one (a task per slice), prepare of the
// next, read of this one. A task waits only for tasks handed out before it, so any number of threads gets through, one
// included, and between a task and what it waits for lies the work of half a window. Slices of a state must be independent of
// each other; then nothing depends on how many there are.
#pragma once

#include <sched.h>

#include "simd/task.h"

namespace linnet::LINNET_ISA {

// Chunks of a window; a walk has slots for two windows.
LINNET_INLINE int64_t pipeline_window(int workers) { return workers < 2 ? 4 : 2 * static_cast<int64_t>(workers); }
LINNET_INLINE int64_t pipeline_slots(int workers) { return 2 * pipeline_window(workers); }

namespace pipeline_detail {
struct alignas(128) Counter {
  int64_t done = 0;
  void add() { __atomic_fetch_add(&done, 1, __ATOMIC_RELEASE); }
  void wait(int64_t wanted) const {
    for (int spin = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < wanted; ++spin) {
      if (spin > 2000) sched_yield();  // the thread that is waited for may have no core
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
};
}  // namespace pipeline_detail

template <class Walk>
void pipeline(const Launch& launch, int64_t chunks, int64_t slices, const Walk& walk) {
  const int64_t width = pipeline_window(launch.workers), slots = 2 * width, windows = (chunks + width - 1) / width;
  const int64_t block = 1 + slices + 2 * width,
                tasks = (windows + 1) * block;  // block b: scan, prepare of b; step, read of b - 1
  pipeline_detail::Counter next, scanned, prepared[2], stepped[2], finished[2];
  const auto run = [&](int64_t task, int worker) {
    const int64_t ahead = task / block, now = ahead - 1;
    int64_t place = task % block;
    if (place == 0) {
      if (ahead == windows) return;
      scanned.wait(ahead);
      walk.scan(ahead * width, ahead * width + width < chunks ? ahead * width + width : chunks);
      return scanned.add();
    }
    if (place -= 1; place < slices) {
      if (now < 0) return;
      const int64_t first = now * width, end = first + width < chunks ? first + width : chunks;
      prepared[now & 1].wait(now / 2 * width + end - first);
      if (now > 0) stepped[(now - 1) & 1].wait(((now - 1) / 2 + 1) * slices);
      for (int64_t chunk = first; chunk < end; ++chunk) walk.step(chunk, chunk % slots, place, worker);
      return stepped[now & 1].add();
    }
    if (place -= slices; place < width) {
      const int64_t chunk = ahead * width + place;
      if (chunk >= chunks) return;
      scanned.wait(ahead + 1);
      if (ahead > 1) finished[ahead & 1].wait(ahead / 2 * width);
      walk.prepare(chunk, chunk % slots, worker);
      return prepared[ahead & 1].add();
    }
    const int64_t chunk = now * width + place - width;
    if (now < 0 || chunk >= chunks) return;
    stepped[now & 1].wait((now / 2 + 1) * slices);
    walk.read(chunk, chunk % slots, worker);
    finished[now & 1].add();
  };
  parallel(launch, launch.workers, [&](int64_t, int worker) {  // tasks in order, whoever runs them
    for (int64_t task; (task = __atomic_fetch_add(&next.done, 1, __ATOMIC_RELAXED)) < tasks;) run(task, worker);
  });
}

}  // namespace linnet::LINNET_ISA
