// The forward of a Problem: cuts it into tasks by shape, runs the tile engine or, for few rows, the row kernel, and joins the
// parts of long key sequences.
//
// Tasks: rows of one key head in blocks of query tiles, the last block first (under a causal mask it is the longest). When all
// rows of a key head fit one tile, the keys are cut instead (split_keys), and a second run joins the parts in order.
#pragma once

#include "softmax_rows.h"
#include "softmax_tile.h"

namespace linnet::LINNET_ISA {

// Keys of a part: 512; for the row kernel fewer where that leaves less than 8 parts. Its tasks walk over all heads of their
// tokens, which reads memory from end to end: with few keys that is twice as fast as a task for each head (SmolLM2's decode
// after 200 tokens, 3 heads of 64, one core). Parts depend on shapes alone.
LINNET_INLINE int64_t split_keys(int64_t rows, int64_t n) {
  if (rows > kFewRows) return 512;
  return n <= 2 * kKeys ? 2 * kKeys : smaller(512, divide_up(n, 8 * kKeys) * kKeys);
}
LINNET_INLINE int64_t parts_of(int64_t rows, int64_t n) {
  return rows <= kLanes ? larger(1, divide_up(n, split_keys(rows, n))) : 1;
}
template <class P>
LINNET_INLINE int64_t splits_of(const P& problem, const Sequence& seq) {
  return parts_of(seq.tq * problem.group(), seq.n);
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
    few_heads = heads_per_task(problem, problem.sequences() * parts_of(1, problem.longest_keys()), workers);
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
    if (problem.cu_q.given()) {
      rows += part_rows_of(problem, problem.sequence(s));
      continue;
    }
    const int64_t own = problem.q.size[1] * problem.group(), parts = parts_of(own, problem.longest_keys());
    if (own <= kFewRows) {  // of fewer keys than there may be, up to 8
      rows += larger(8, parts) * problem.key_heads() * own;
    } else if (parts > 1) {
      rows += parts * problem.key_heads() * own;
    }
  }
  return rows;
}

template <class A, class P>
int64_t forward_workspace(const P& problem, int workers) {
  Arena arena;
  ForwardMemory<A, P>(arena, problem, tiles_per_task<typename A::T>(problem, workers), workers, part_rows(problem));
  return arena.used();
}

// One forward: its tasks, and where their results go. A task takes one of three ways.
template <class A, class P>
struct Forward {
  using T = typename A::T;
  using Scratch = typename A::Scratch;
  using RowScratch = typename A::Rows::Scratch;
  const P& problem;
  const ForwardMemory<A, P>& memory;
  int tiles;
  int64_t sequences, heads, G, K, V, ldo;

  Forward(const P& p, const ForwardMemory<A, P>& m, int tiles_of_task)
      : problem(p),
        memory(m),
        tiles(tiles_of_task),
        sequences(p.sequences()),
        heads(p.key_heads()),
        G(p.group()),
        K(p.key_width()),
        V(p.value_width()),
        ldo(round_up<T>(p.value_width())) {}

  // Numbers the tasks and parts of all sequences; returns the flops.
  double plan() const {
    double pairs = 0;
    memory.first_task[0] = memory.first_part[0] = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      const Sequence seq = problem.sequence(s);
      memory.first_task[s + 1] = memory.first_task[s] + tasks_of(problem, seq, tiles, memory.few_heads);
      memory.first_part[s + 1] = memory.first_part[s] + part_rows_of(problem, seq);
      pairs += static_cast<double>(seq.tq) * static_cast<double>(seq.n);
    }
    return 2 * pairs * static_cast<double>((K + V) * problem.q.size[2]);
  }
  int64_t sequence_of(int64_t task) const {
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (memory.first_task[middle] <= task ? low : high) = middle;
    }
    return low;
  }
  // Parts stand in the order sequence, key head, split; a part is [rows, ldo] sums, then [rows] maxima, then [rows] totals.
  T* part(int64_t s, const Sequence& seq, int64_t head, int64_t split) const {
    const int64_t rows = memory.first_part[s] + (head * splits_of(problem, seq) + split) * seq.tq * G;
    return memory.parts + rows * (ldo + 2);
  }

  void run(int64_t task, int worker) const {
    Arena own(memory.worker + worker * memory.worker_bytes);
    const Scratch scratch(own, K, V, problem.bias.given(), tiles);
    const RowScratch row_scratch(own, K, V, memory.few_heads);
    const int64_t s = sequence_of(task);
    const Sequence seq = problem.sequence(s);
    const int64_t rows = seq.tq * G, local = task - memory.first_task[s];
    if (rows > kLanes) return run_blocks(seq, local, scratch);
    if (P::kReadsInPlace && rows <= kFewRows) return run_rows(s, seq, local, scratch, row_scratch);
    run_tile(s, seq, local, scratch);
  }
  // Many rows: a block of query tiles of one key head, against all its keys.
  void run_blocks(const Sequence& seq, int64_t local, const Scratch& scratch) const {
    typename A::Tile tile[kMaxTiles];
    const int64_t blocks = divide_up(seq.tq * G, kLanes * tiles), head = local % heads, block = blocks - 1 - local / heads;
    const int count = forward_block<A>(problem, seq, head, block * kLanes * tiles, tiles, 0, seq.n, scratch, tile);
    for (int i = 0; i < count; ++i) {
      problem.finish(seq, head, tile[i].r0, tile[i].rows, tile[i].ot, false, tile[i].maximum, tile[i].sum, scratch.staging());
    }
  }
  // Few rows: the row kernel reads the keys of some heads in place.
  void run_rows(int64_t s, const Sequence& seq, int64_t local, const Scratch& scratch, const RowScratch& row_scratch) const {
    const int64_t rows = seq.tq * G, splits = splits_of(problem, seq);
    const int64_t split = local % splits, each = split_keys(rows, seq.n), begin = split * each,
                  end = smaller(begin + each, seq.n);
    const int few = static_cast<int>(rows), chunk = memory.few_heads;
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
      T* const to = part(s, seq, first + h, split);
      for (int64_t i = 0; i < rows * ldo; ++i) to[i] = o[i];
      for (int r = 0; r < few; ++r) {
        to[rows * ldo + r] = maximum[r];
        to[rows * ldo + rows + r] = total[r];
      }
    }
  }
  // One tile of rows, against one part of the keys.
  void run_tile(int64_t s, const Sequence& seq, int64_t local, const Scratch& scratch) const {
    typename A::Tile tile[kMaxTiles];
    const int64_t rows = seq.tq * G, splits = splits_of(problem, seq);
    const int64_t split = local % splits, each = split_keys(rows, seq.n), head = local / splits;
    const int64_t begin = split * each, end = smaller(begin + each, seq.n);
    const int few = static_cast<int>(rows);
    forward_block<A>(problem, seq, head, 0, 1, begin, end, scratch, tile);
    if (splits == 1) {
      return problem.finish(seq, head, 0, few, tile[0].ot, false, tile[0].maximum, tile[0].sum, scratch.staging());
    }
    T* const to = part(s, seq, head, split);
    store_tile_transposed(tile[0].ot, kLanes, few, static_cast<int>(V), to, ldo);
    for (int r = 0; r < few; ++r) {
      for (int64_t c = V; c < ldo; ++c) to[r * ldo + c] = 0;
      to[rows * ldo + r] = tile[0].maximum[r];
      to[rows * ldo + rows + r] = tile[0].sum[r];
    }
  }

  // Joins the parts of a head: M = max m_p, out = sum 2^(m_p - M) o_p, in order.
  void join(int64_t task, int worker) const {
    using X = Vec<T>;
    const int64_t s = task / heads, head = task % heads;
    const Sequence seq = problem.sequence(s);
    const int64_t splits = splits_of(problem, seq), rows = seq.tq * G;
    if (splits == 1 || rows == 0) return;
    Arena own(memory.worker + worker * memory.worker_bytes);
    const Scratch scratch(own, K, V, problem.bias.given(), tiles);
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
  }
};

template <class A, class P>
void forward(const P& problem, const Launch& launch) {
  const int tiles = tiles_per_task<typename A::T>(problem, launch.workers);
  Arena arena(launch.workspace);
  const ForwardMemory<A, P> memory(arena, problem, tiles, launch.workers, part_rows(problem));
  const Forward<A, P> pass(problem, memory, tiles);
  const double flops = pass.plan();
  run_tasks(launch, memory.first_task[pass.sequences], flops, [&](int64_t task, int worker) { pass.run(task, worker); });
  if (memory.first_part[pass.sequences] == 0) return;
  run_tasks(launch, pass.sequences * pass.heads, flops, [&](int64_t task, int worker) { pass.join(task, worker); });
}

}  // namespace linnet::LINNET_ISA
