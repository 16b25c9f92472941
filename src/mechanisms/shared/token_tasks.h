// Tasks of 64 tokens, for operators whose rows x [B, T, H, .] are independent of each other: the norms.
#pragma once

#include "core/view.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {

constexpr int64_t kTaskTokens = 64;

// Of one batch row; task number = batch row * token_tasks + its place.
LINNET_INLINE int64_t token_tasks(const View& x) { return (x.size[1] + kTaskTokens - 1) / kTaskTokens; }
// Whether a row is the first of its task: sums of a task begin there.
LINNET_INLINE bool begins_task(int64_t t, int64_t h) { return t % kTaskTokens == 0 && h == 0; }

// body(b, t, h, task, worker) for each row.
template <class Body>
void each_row(const View& x, const Launch& launch, const Body& body) {
  const int64_t tasks = token_tasks(x);
  parallel(launch, x.size[0] * tasks, [&](int64_t task, int worker) {
    const int64_t first = task % tasks * kTaskTokens, end = first + kTaskTokens < x.size[1] ? first + kTaskTokens : x.size[1];
    for (int64_t t = first; t < end; ++t) {
      for (int64_t h = 0; h < x.size[2]; ++h) body(task / tasks, t, h, task, worker);
    }
  });
}

}  // namespace linnet::LINNET_ISA
