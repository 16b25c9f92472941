// walk: runs the chunk steps of chunk.h over sequences and heads, on one thread or many, always with the same bits.
//
// A unit of work is one sequence and one group of heads whose results are added up (a group of one in most walks). A mechanism
// gives a Source, copied or shared freely between workers, with
//
//   static constexpr bool kSums;                   whether the sums of weights n, z are wanted
//   int heads() const                              heads in the group
//   int64_t readers() const, writers() const       positions; equal when causal
//   bool causal() const
//   StateShape<T> state() const
//   void begin(int head, T* state) const           the state before the first position: panels, sums, units
//   void end(int head, const T* state) const       the state after the last
//   int admit(int head, int64_t at, int rows, T* state, const Chunk<T>&) const
//                                                  how many of the next rows may share a chunk; may rescale the state for them;
//                                                  the calls below follow with that number of rows and the same chunk
//   void keys(int head, int64_t at, int rows, const T* state, const Chunk<T>&) const            fills yt [I, C]
//   bool values(int head, int64_t at, int rows, const T* state, const Chunk<T>&) const          fills z; false: not all finite
//   void queries(int head, int64_t at, int rows, const T* state, const Chunk<T>&) const         fills x
//   void ahead(int head, int64_t at, int rows, Ahead*) const                                    tells the rows that come next
//   bool scores(int head, int64_t at, int rows, const Chunk<T>&) const                          optional: fills p by itself
//   void finish(int head, int64_t at, int rows, const T* state, const Chunk<T>&) const          takes o (and n) away
//
// Positions count along the walk; a source that walks backward in time turns them round. These callbacks are where types are
// converted, feature maps and gates applied, and results scaled and stored: everything between is dense scratch of T.
//
// Few units, many threads: causal, where results are separable by columns (walk_columns), each task walks all chunks with a
// slice of the state's columns; a chunk's scores are computed once, by the task that comes to it first. Otherwise a ladder
// (walk_ladder): all chunks of a window compute their increments Y^T Z in parallel; a scan adds them up element by element, in
// order, leaving in each chunk's place the state before it; then all chunks read in parallel. The scan's addition is the one
// that the fused walk's last step does: about 1.2 times the work. Both give the bits of the fused walk, and their memory does
// not grow with T.
#pragma once

#include <sched.h>

#include "chunk.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {

LINNET_INLINE int chunk_rows(int64_t at, int64_t end) { return end - at < kChunk ? static_cast<int>(end - at) : kChunk; }

template <class T>
LINNET_INLINE void zero_row(T* row, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] = 0;
}

template <class T, class Source>
void walk_write(const Source& source, const StateShape<T>& shape, int head, int64_t at, int rows, T* state, const Chunk<T>& c) {
  for (int done = 0; done < rows;) {
    const int n = source.admit(head, at + done, rows - done, state, c);
    source.keys(head, at + done, n, state, c);
    source.values(head, at + done, n, state, c);
    chunk_write<T, true, Source::kSums>(n, shape, state, c);
    done += n;
  }
}

// The rows of one chunk read `state`, which stays as it is. Causal: keys and values of the chunk must stand in c.
template <class T, class Source>
void walk_read(const Source& source, const StateShape<T>& shape, int head, int64_t at, int rows, const T* state,
               const Chunk<T>& c, bool finite) {
  source.queries(head, at, rows, state, c);
  if constexpr (Source::kSums) read_sums(rows, shape.I, c.x, c.ldx, state + shape.sums(), c.n);
  if (source.causal()) {
    bool direct = false;
    if constexpr (requires { source.scores(head, at, rows, c); }) direct = source.scores(head, at, rows, c);
    if (direct) {
      keep_lower<T, Source::kSums>(rows, c.p, c.n);
    } else {
      chunk_scores<T, Source::kSums>(rows, shape.I, c);
    }
  }
  chunk_read(rows, shape, state, c, source.causal(), finite, 0, shape.J);
  source.finish(head, at, rows, state, c);
}

// The fused walk: one worker, all chunks in order. states: heads x state().elements().
template <class T, class Source>
void walk(const Source& source, T* states, const Chunk<T>& c) {
  const StateShape<T> shape = source.state();
  const int heads = source.heads();
  const int64_t readers = source.readers(), writers = source.writers();
  c.ahead->clear();
  for (int head = 0; head < heads; ++head) source.begin(head, states + head * shape.elements());
  if (!source.causal()) {
    for (int64_t at = 0; at < writers; at += kChunk) {
      for (int head = 0; head < heads; ++head) {
        walk_write(source, shape, head, at, chunk_rows(at, writers), states + head * shape.elements(), c);
      }
    }
  }
  for (int64_t at = 0; at < readers; at += kChunk) {
    const int rows = chunk_rows(at, readers);
    for (int head = 0; head < heads; ++head) {
      T* state = states + head * shape.elements();
      if (!source.causal()) {
        walk_read<T>(source, shape, head, at, rows, state, c, true);
        continue;
      }
      for (int done = 0; done < rows;) {
        const int n = source.admit(head, at + done, rows - done, state, c);
        source.keys(head, at + done, n, state, c);
        const bool finite = source.values(head, at + done, n, state, c);
        if (done == 0) {
          c.ahead->clear();
          source.ahead(head, at + rows, chunk_rows(at + rows, readers), c.ahead);
        }
        walk_read<T>(source, shape, head, at + done, n, state, c, finite);
        chunk_write<T, true, Source::kSums>(n, shape, state, c);
        done += n;
      }
    }
  }
  for (int head = 0; head < heads; ++head) source.end(head, states + head * shape.elements());
}

// Chunks in a window of the ladder: enough for every worker, at most 64, as many as fit in 2 MB beyond that minimum.
template <class T>
int64_t ladder_window(const StateShape<T>& shape, int heads, int workers) {
  const int64_t bytes = heads * shape.elements() * static_cast<int64_t>(sizeof(T)), fits = (int64_t{2} << 20) / (bytes + 1);
  const int64_t least = 2 * workers, most = 64 > least ? 64 : least;
  return fits < least ? least : fits > most ? most : fits;
}

// The same walk with all workers; every call of admit() must return all rows and leave the state alone.
// states: heads x elements; window: ladder_window x heads x elements; chunk_of(worker): the worker's Chunk<T>.
template <class T, class Source, class ChunkOf>
void walk_ladder(const Source& source, T* states, T* window, const Launch& launch, const ChunkOf& chunk_of) {
  const FlushSubnormals flush;  // begin and end as in a task
  const StateShape<T> shape = source.state();
  const int heads = source.heads();
  const int64_t elements = shape.elements(), step = heads * elements;
  const int64_t readers = source.readers(), writers = source.writers();
  const int64_t width = ladder_window(shape, heads, launch.workers);
  for (int head = 0; head < heads; ++head) source.begin(head, states + head * elements);
  for (int64_t first = 0; first < writers; first += width * kChunk) {
    const int64_t left = (writers - first + kChunk - 1) / kChunk, count = left < width ? left : width;
    parallel(launch, count * heads, [&](int64_t task, int worker) {
      const int64_t slot = task / heads, at = first + slot * kChunk;
      const int head = static_cast<int>(task % heads), rows = chunk_rows(at, writers);
      const Chunk<T> c = chunk_of(worker);
      c.ahead->clear();
      source.keys(head, at, rows, states + head * elements, c);
      source.values(head, at, rows, states + head * elements, c);
      chunk_write<T, false, Source::kSums>(rows, shape, window + slot * step + head * elements, c);
    });
    constexpr int64_t kSlice = 2048;
    const int64_t scanned = Source::kSums ? shape.scanned() : shape.sums();
    const int64_t slices = (scanned + kSlice - 1) / kSlice;
    parallel(launch, slices * heads, [&](int64_t task, int) {
      using X = Vec<T>;
      const int64_t head = task / slices, begin = task % slices * kSlice;
      const int64_t end = begin + kSlice < scanned ? begin + kSlice : scanned;
      for (int64_t slot = 0; slot < count; ++slot) {
        T* place = window + slot * step + head * elements;
        T* state = states + head * elements;
        for (int64_t i = begin; i < end; i += X::W) {
          const typename X::V before = X::load(state + i), increment = X::load(place + i);
          X::store(place + i, before);
          X::store(state + i, before + increment);
        }
      }
    });
    if (!source.causal()) continue;
    parallel(launch, count, [&](int64_t slot, int worker) {
      const int64_t at = first + slot * kChunk;
      const int rows = chunk_rows(at, writers);
      const Chunk<T> c = chunk_of(worker);
      c.ahead->clear();
      for (int head = 0; head < heads; ++head) {
        const T* state = window + slot * step + head * elements;
        source.keys(head, at, rows, state, c);
        const bool finite = source.values(head, at, rows, state, c);
        walk_read(source, shape, head, at, rows, state, c, finite);
      }
    });
  }
  if (!source.causal()) {
    parallel(launch, (readers + kChunk - 1) / kChunk, [&](int64_t chunk, int worker) {
      const int64_t at = chunk * kChunk;
      const Chunk<T> c = chunk_of(worker);
      c.ahead->clear();
      for (int head = 0; head < heads; ++head) {
        walk_read<T>(source, shape, head, at, chunk_rows(at, readers), states + head * elements, c, true);
      }
    });
  }
  for (int head = 0; head < heads; ++head) source.end(head, states + head * elements);
}

template <class Busy>
LINNET_INLINE void pause_while(const Busy& busy) {
  for (int spin = 0; busy(); ++spin) {
    if (spin > 1000) sched_yield();
  }
}

// Who computes the scores of a chunk, and when they can be read. A task that is kPlaces chunks ahead of another waits for it,
// so that what it computes can be taken; but never for one that may not have started: then it computes for itself.
class Turns {
 public:
  static constexpr int kPlaces = 32;  // so many chunks a task may be ahead: 0.4 ms, for a worker that had to be woken
  static constexpr int kTasks = 64;
  enum class Part { compute, take, alone };

  explicit Turns(int tasks) : tasks_(tasks) {
    for (Count& place : places_) place.value = -1;
    for (int task = 0; task < tasks; ++task) passed_[task].value = -1;
  }
  void start(int64_t task) { pass(task, -1); }
  Part arrive(int64_t chunk) {
    int64_t& place = places_[chunk % kPlaces].value;
    for (int64_t seen = __atomic_load_n(&place, __ATOMIC_ACQUIRE); seen < 2 * chunk;) {
      for (int task = 0; task < tasks_; ++task) {
        const auto behind = [&] { return __atomic_load_n(&passed_[task].value, __ATOMIC_ACQUIRE) <= chunk - kPlaces; };
        if (behind() && __atomic_load_n(&passed_[task].value, __ATOMIC_ACQUIRE) < 0) return Part::alone;
        pause_while(behind);
      }
      if (__atomic_compare_exchange_n(&place, &seen, 2 * chunk, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return Part::compute;
    }
    return Part::take;
  }
  void publish(int64_t chunk) { __atomic_store_n(&places_[chunk % kPlaces].value, 2 * chunk + 1, __ATOMIC_RELEASE); }
  void wait(int64_t chunk) {  // for a task that is computing
    pause_while([&] { return __atomic_load_n(&places_[chunk % kPlaces].value, __ATOMIC_ACQUIRE) == 2 * chunk; });
  }
  void pass(int64_t task, int64_t chunk) { __atomic_store_n(&passed_[task].value, chunk + 1, __ATOMIC_RELEASE); }

 private:
  struct alignas(128) Count {
    int64_t value;
  };
  Count places_[kPlaces];  // 2 chunk: being computed; 2 chunk + 1: there
  Count passed_[kTasks];   // chunks whose scores the task needs no more; -1: it has not started
  int tasks_;
};

// Columns of a task: one task for each worker, if there are enough lines.
template <class T>
LINNET_INLINE int column_slice(int J, int workers) {
  constexpr int line = 64 / sizeof(T);
  const int most = workers < Turns::kTasks ? workers : Turns::kTasks;
  return ((J + most - 1) / most + line - 1) / line * line;
}

// Whether walk_columns can run the source.
template <class T, class Source>
LINNET_INLINE bool has_columns(const Source& source) {
  return source.causal() && source.by_columns() && source.state().J > int{64 / sizeof(T)};
}

// Elements of the window of walk_columns: P and its sums, and for every task sums of its own.
template <class T, class Source>
int64_t columns_window(const Source& source, int workers) {
  const StateShape<T> shape = source.state();
  return Turns::kPlaces * (kChunk + 1) * kChunk + (Source::kSums ? workers * source.heads() * round_up<T>(shape.I) : 0);
}

// The same walk with all workers, for a causal source whose admit() returns all rows and leaves the state alone, and whose
// by_columns() is true: ahead() and finish() take columns, and need nothing of the others.
// states: heads x elements; window: columns_window; chunk_of(worker): the worker's Chunk<T>.
template <class T, class Source, class ChunkOf>
void walk_columns(const Source& source, T* states, T* window, const Launch& launch, const ChunkOf& chunk_of) {
  const FlushSubnormals flush;  // begin and end as in a task
  const StateShape<T> shape = source.state();
  const int heads = source.heads(), slice = column_slice<T>(shape.J, launch.workers), tasks = (shape.J + slice - 1) / slice;
  const int64_t tokens = source.readers(), steps = (tokens + kChunk - 1) / kChunk * heads, ldi = round_up<T>(shape.I);
  T* sums = window + Turns::kPlaces * (kChunk + 1) * kChunk;  // [tasks, heads, ldi]
  const auto copy = [&](T* to, const T* from) { __builtin_memcpy(to, from, static_cast<size_t>(shape.I) * sizeof(T)); };
  for (int head = 0; head < heads; ++head) {
    T* state = states + head * shape.elements();
    source.begin(head, state);
    for (int task = 0; Source::kSums && task < tasks; ++task) copy(sums + (task * heads + head) * ldi, state + shape.sums());
  }
  Turns turns(tasks);
  parallel(launch, tasks, [&](int64_t task, int worker) {
    const Chunk<T> mine = chunk_of(worker);
    const int left = static_cast<int>(task) * slice, right = left + slice < shape.J ? left + slice : shape.J;
    turns.start(task);
    mine.ahead->clear();
    for (int64_t step = 0; step < steps; ++step) {
      const int head = static_cast<int>(step % heads);
      const int64_t at = step / heads * kChunk, next = at + kChunk;
      const int rows = chunk_rows(at, tokens);
      T* state = states + head * shape.elements();
      source.keys(head, at, rows, state, mine);
      source.queries(head, at, rows, state, mine);
      const bool finite = source.values(head, at, rows, state, mine);
      mine.ahead->clear(Ahead::kManyLines);
      if (next < tokens) source.ahead(head, next, chunk_rows(next, tokens), mine.ahead, left, right);
      const Turns::Part part = turns.arrive(step);
      Chunk<T> c = mine;
      if (part != Turns::Part::alone) {
        c.p = window + step % Turns::kPlaces * (kChunk + 1) * kChunk;
        c.n = c.p + kChunk * kChunk;
      }
      if (part != Turns::Part::take) {
        for (int r = 0; Source::kSums && r < rows; ++r) c.n[r] = 0;
        chunk_scores<T, Source::kSums>(rows, shape.I, c);
      }
      if (part == Turns::Part::compute) turns.publish(step);
      chunk_read(rows, shape, state, c, true, finite, left, right, [&] {
        if (part == Turns::Part::take) turns.wait(step);
      });
      if constexpr (Source::kSums) {
        T* z = sums + (task * heads + head) * ldi;
        T read[kChunk];
        read_sums(rows, shape.I, c.x, c.ldx, z, read);
        for (int r = 0; r < rows; ++r) mine.n[r] = read[r] + c.n[r];
        write_sums<T, true>(rows, shape.I, c.yt, z);
      }
      turns.pass(task, step);
      chunk_write<T, true>(rows, shape, state, c, left, right);
      source.finish(head, at, rows, state, mine, left, right);
    }
  });
  for (int head = 0; head < heads; ++head) {
    T* state = states + head * shape.elements();
    if constexpr (Source::kSums) copy(state + shape.sums(), sums + head * ldi);
    source.end(head, state);
  }
}

}  // namespace linnet::LINNET_ISA
