// The forward of a Problem: cuts it into tasks by shape, runs the tile engine or, for few rows, the row kernel, and joins the
// parts of long key sequences.
//
// Tasks: rows of one key head in blocks of query tiles, the last block first (under a causal mask it is the longest). When all
// rows of a key head fit one tile, the keys are cut every kSplit instead, and a second run joins the parts in order.
#pragma once

#include "softmax_rows.h"
#include "softmax_tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int64_t kSplit = 512;

template <class P>
LINNET_INLINE int64_t splits_of(const P& problem, const Sequence& seq) {
  return seq.tq * problem.group() <= kLanes ? larger(1, divide_up(seq.n, kSplit)) : 1;
}
template <class P>
LINNET_INLINE int64_t tasks_of(const P& problem, const Sequence& seq, int tiles, int few_heads) {
  const int64_t rows = seq.tq * problem.group();
  if (rows == 0) return 0;
  if (P::kReadsInPlace && rows <= kFewRows) {
    return divide_up(problem.key_heads(), few_heads) * splits_of(problem, seq);
  }
  if (rows <= kLanes) return problem.key_heads() * splits_of(problem, seq);
  return problem.key_heads() * divide_up(rows, kLanes * tiles);
}

// More tiles share a copy of the keys; fewer give more tasks. Queries and sums of a task stay within 256 KB, a quarter of L2.
template <class T, class P>
LINNET_INLINE int tiles_per_task(const P& problem, int workers) {
  const int64_t bytes = static_cast<int64_t>(sizeof(T)) * kLanes * (problem.key_width() + problem.value_width() + 2);
  int64_t tiles = larger(1, smaller(4, 262144 / larger(1, bytes)));
  const int64_t all = divide_up(problem.q.size[0] * problem.q.size[1] * problem.group(), kLanes) * problem.key_heads();
  while (tiles > 1 && all / tiles < 8 * workers) tiles /= 2;
  return static_cast<int>(tiles);
}

template <class A, class P>
struct ForwardMemory {
  using T = typename A::T;
  int64_t *first_task, *first_part;  // [sequences + 1]: of each sequence; parts counted in rows
  T* parts;                          // sums, then maximum and total of each row
  char* worker;
  int64_t worker_bytes;
  int few_heads;  // of a task of the row kernel; like `tiles` it changes no bit

  LINNET_INLINE ForwardMemory(Arena& arena, const P& problem, int tiles, int workers, int64_t part_rows) {
    first_task = arena.take<int64_t>(problem.sequences() + 1);
    first_part = arena.take<int64_t>(problem.sequences() + 1);
    parts = arena.take<T>(part_rows * (round_up<T>(problem.value_width()) + 2));
    few_heads = heads_per_task(problem, problem.sequences() * divide_up(problem.longest_keys(), kSplit), workers);
    Arena one;
    typename A::Scratch(one, problem.key_width(), problem.value_width(), problem.bias.given(), tiles);
    typename A::Rows::Scratch(one, problem.key_width(), problem.value_width(), few_heads);
    worker_bytes = one.used();
    worker = arena.take<char>(worker_bytes * workers);
  }
};

template <class P>
LINNET_INLINE int64_t part_rows_of(const P& problem, const Sequence& seq) {
  const int64_t splits = splits_of(problem, seq);
  return splits > 1 ? splits * problem.key_heads() * seq.tq * problem.group() : 0;
}
// Rows of the parts of all sequences; where lengths are given, at most.
template <class P>
LINNET_INLINE int64_t part_rows(const P& problem) {
  int64_t rows = 0;
  for (int64_t s = 0; s < problem.sequences(); ++s) {
    const Sequence longest{s, 0, problem.q.size[1], 0, problem.longest_keys()};
    rows += part_rows_of(problem, problem.cu_q.given() ? problem.sequence(s) : longest);
  }
  return rows;
}

template <class A, class P>
int64_t forward_workspace(const P& problem, int workers) {
  Arena arena;
  ForwardMemory<A, P>(arena, problem, tiles_per_task<typename A::T>(problem, workers), workers, part_rows(problem));
  return arena.used();
}

template <class A, class P>
void forward(const P& problem, const Launch& launch) {
  using T = typename A::T;
  const int tiles = tiles_per_task<T>(problem, launch.workers);
  Arena arena(launch.workspace);
  const ForwardMemory<A, P> memory(arena, problem, tiles, launch.workers, part_rows(problem));
  const int64_t sequences = problem.sequences(), heads = problem.key_heads(), G = problem.group();
  const int64_t K = problem.key_width(), V = problem.value_width(), ldo = round_up<T>(V);
  double pairs = 0;
  memory.first_task[0] = memory.first_part[0] = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const Sequence seq = problem.sequence(s);
    memory.first_task[s + 1] = memory.first_task[s] + tasks_of(problem, seq, tiles, memory.few_heads);
    memory.first_part[s + 1] = memory.first_part[s] + part_rows_of(problem, seq);
    pairs += static_cast<double>(seq.tq) * static_cast<double>(seq.n);
  }
  const double flops = 2 * pairs * static_cast<double>((K + V) * problem.q.size[2]);

  // Parts stand in the order sequence, key head, split; a part is [rows, ldo] sums, then [rows] maxima, then [rows] totals.
  const auto part = [&](int64_t s, const Sequence& seq, int64_t head, int64_t split) {
    const int64_t rows = memory.first_part[s] + (head * splits_of(problem, seq) + split) * seq.tq * G;
    return memory.parts + rows * (ldo + 2);
  };

  run_tasks(launch, memory.first_task[sequences], flops, [&](int64_t task, int worker) {
    Arena own(memory.worker + worker * memory.worker_bytes);
    const typename A::Scratch scratch(own, K, V, problem.bias.given(), tiles);
    const typename A::Rows::Scratch row_scratch(own, K, V, memory.few_heads);
    int64_t low = 0, high = sequences;  // the sequence of this task
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (memory.first_task[middle] <= task ? low : high) = middle;
    }
    const Sequence seq = problem.sequence(low);
    const int64_t rows = seq.tq * G, splits = splits_of(problem, seq), local = task - memory.first_task[low];
    typename A::Tile tile[kMaxTiles];
    if (rows > kLanes) {
      const int64_t blocks = divide_up(rows, kLanes * tiles), head = local % heads, block = blocks - 1 - local / heads;
      const int count = forward_block<A>(problem, seq, head, block * kLanes * tiles, tiles, 0, seq.n, scratch, tile);
      for (int i = 0; i < count; ++i) {
        problem.finish(seq, head, tile[i].r0, tile[i].rows, tile[i].ot, false, tile[i].maximum, tile[i].sum, scratch.staging());
      }
      return;
    }
    const int64_t split = local % splits, begin = split * kSplit, end = smaller(begin + kSplit, seq.n);
    const int few = static_cast<int>(rows);
    if (P::kReadsInPlace && rows <= kFewRows) {
      const int chunk = memory.few_heads;
      const int64_t first = local / splits * chunk;
      const int count = static_cast<int>(smaller(chunk, heads - first));
      few_rows<typename A::Rows>(problem, seq, first, count, few, begin, end, row_scratch);
      for (int h = 0; h < count; ++h) {
        const T *const o = row_scratch.result(h, few, static_cast<int>(V)), *const maximum = row_scratch.maximum + h * kLanes;
        const T* const total = row_scratch.total + h * kLanes;
        if (splits == 1) {
          problem.finish(seq, first + h, 0, few, o, true, maximum, total, scratch.staging());
          continue;
        }
        T* const to = part(low, seq, first + h, split);
        for (int64_t i = 0; i < rows * ldo; ++i) to[i] = o[i];
        for (int r = 0; r < few; ++r) {
          to[rows * ldo + r] = maximum[r];
          to[rows * ldo + rows + r] = total[r];
        }
      }
      return;
    }
    const int64_t head = local / splits;
    forward_block<A>(problem, seq, head, 0, 1, begin, end, scratch, tile);
    if (splits == 1) {
      return problem.finish(seq, head, 0, few, tile[0].ot, false, tile[0].maximum, tile[0].sum, scratch.staging());
    }
    T* const to = part(low, seq, head, split);
    store_tile_transposed(tile[0].ot, kLanes, few, static_cast<int>(V), to, ldo);
    for (int r = 0; r < few; ++r) {
      for (int64_t c = V; c < ldo; ++c) to[r * ldo + c] = 0;
      to[rows * ldo + r] = tile[0].maximum[r];
      to[rows * ldo + rows + r] = tile[0].sum[r];
    }
  });

  // Joins the parts: M = max m_p, out = sum 2^(m_p - M) o_p, in order.
  if (memory.first_part[sequences] == 0) return;
  run_tasks(launch, sequences * heads, flops, [&](int64_t task, int worker) {
    using X = Vec<T>;
    const int64_t s = task / heads, head = task % heads;
    const Sequence seq = problem.sequence(s);
    const int64_t splits = splits_of(problem, seq), rows = seq.tq * G;
    if (splits == 1 || rows == 0) return;
    Arena own(memory.worker + worker * memory.worker_bytes);
    const typename A::Scratch scratch(own, K, V, problem.bias.given(), tiles);
    T* const o = scratch.staging();  // [kLanes, ldo]
    T maximum[kLanes], total[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      maximum[r] = kLowest<T>;
      total[r] = 0;
    }
    for (int64_t p = 0; p < splits; ++p) {
      const T* m = part(s, seq, head, p) + rows * ldo;
      for (int64_t r = 0; r < rows; ++r) maximum[r] = m[r] > maximum[r] ? m[r] : maximum[r];
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < ldo; c += X::W) X::store(o + r * ldo + c, X::zero());
      for (int64_t p = 0; p < splits; ++p) {
        const T* const from = part(s, seq, head, p);
        const T weight = exp2_nonpositive(X::broadcast(from[rows * ldo + r] - maximum[r]))[0];
        total[r] += weight * from[rows * ldo + rows + r];
        if (from[rows * ldo + rows + r] == 0) continue;
        for (int64_t c = 0; c < ldo; c += X::W) {
          X::store(o + r * ldo + c, fma(X::broadcast(weight), X::load(from + r * ldo + c), X::load(o + r * ldo + c)));
        }
      }
    }
    problem.finish(seq, head, 0, static_cast<int>(rows), o, true, maximum, total, scratch.staging());
  });
}

}  // namespace linnet::LINNET_ISA
