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
// Few units, many threads: a ladder. Causal, where a source's results need no state but the chunk's own (walk_columns): the
// scores of a window of chunks are computed in parallel, while slices of the state's columns walk the window before it and the
// results of the one before that are taken away; rows that another worker prepared are loaded again. Otherwise (walk_ladder):
// all chunks of a window compute their increments Y^T Z in parallel; a scan adds them up element by element, in order, leaving
// in each chunk's place the state before it; then all chunks read in parallel. The scan's addition is the one that the fused
// walk's last step does: about 1.2 times the work. Both give the bits of the fused walk, and their memory does not grow with T.
#pragma once

#include "chunk.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {

LINNET_INLINE int chunk_rows(int64_t at, int64_t end) { return end - at < kChunk ? static_cast<int>(end - at) : kChunk; }

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

// The ladder by columns: chunks of a window, one wait each, and columns of a slice, a task for each worker if there are enough.
inline constexpr int kColumnWindow = 16;
inline constexpr int kColumnSlots = 2 * kColumnWindow;
template <class T>
LINNET_INLINE int column_slice(int J, int workers) {
  int slice = kPanel;
  while (slice > Vec<T>::W && (J + slice - 1) / slice < workers) slice /= 2;
  return slice;
}

template <class T>
int64_t kept_bytes(const StateShape<T>& shape) {
  Arena arena;
  Chunk<T>{}.kept(arena, shape.I, shape.J);
  return arena.used();
}

// The same walk with all workers, for a causal source whose admit() returns all rows and leaves the state alone, and whose
// finish() reads of the state nothing and of the chunk all but spare.
// states: heads x elements; window: kColumnSlots x heads x kept_bytes; chunk_of(worker): the worker's Chunk<T>.
template <class T, class Source, class ChunkOf>
void walk_columns(const Source& source, T* states, char* window, const Launch& launch, const ChunkOf& chunk_of) {
  const StateShape<T> shape = source.state();
  const int heads = source.heads(), slice = column_slice<T>(shape.J, launch.workers);
  const int64_t tokens = source.readers(), chunks = (tokens + kChunk - 1) / kChunk, bytes = kept_bytes(shape);
  const int64_t slices = (shape.J + slice - 1) / slice, per_head = slices + (Source::kSums ? 1 : 0);
  const auto chunk_at = [&](int64_t chunk, int head, int worker) {
    Arena arena(window + (chunk % kColumnSlots * heads + head) * bytes);
    return chunk_of(worker).kept(arena, shape.I, shape.J);
  };
  const auto rows_of = [&](int64_t chunk) { return chunk_rows(chunk * kChunk, tokens); };
  const auto finish = [&](int64_t chunk, int worker) {
    for (int head = 0; head < heads; ++head) {
      source.finish(head, chunk * kChunk, rows_of(chunk), states + head * shape.elements(), chunk_at(chunk, head, worker));
    }
  };
  int prepared_by[kColumnSlots];
  const auto load = [&](int64_t chunk, int head, const Chunk<T>& c) {
    const T* state = states + head * shape.elements();
    source.keys(head, chunk * kChunk, rows_of(chunk), state, c);
    source.queries(head, chunk * kChunk, rows_of(chunk), state, c);
    return source.values(head, chunk * kChunk, rows_of(chunk), state, c);
  };
  const auto prepare = [&](int64_t chunk, int worker) {
    const int rows = rows_of(chunk);
    prepared_by[chunk % kColumnSlots] = worker;
    for (int head = 0; head < heads; ++head) {
      const Chunk<T> c = chunk_at(chunk, head, worker);
      *c.finite = load(chunk, head, c);
      c.ahead->clear();
      if (chunk + 1 < chunks) source.ahead(head, (chunk + 1) * kChunk, rows_of(chunk + 1), c.ahead);
      for (int r = 0; Source::kSums && r < rows; ++r) c.n[r] = 0;
      chunk_scores<T, Source::kSums>(rows, shape.I, c);
    }
  };
  const auto walk_slice = [&](int64_t first, int64_t end, int head, int left, int right, int worker) {
    T* state = states + head * shape.elements();
    for (int64_t chunk = first; chunk < end; ++chunk) {
      Chunk<T> c = chunk_at(chunk, head, worker);
      if (prepared_by[chunk % kColumnSlots] != worker) {
        const Chunk<T> mine = chunk_of(worker);
        c.x = mine.x;
        c.yt = mine.yt;
        c.z = mine.z;
        load(chunk, head, c);
      }
      c.ahead->clear(Ahead::kManyLines);
      if (chunk + 1 < end && prepared_by[(chunk + 1) % kColumnSlots] != worker) {
        source.ahead(head, (chunk + 1) * kChunk, rows_of(chunk + 1), c.ahead);
      }
      chunk_read(rows_of(chunk), shape, state, c, true, *c.finite, left, right);
      chunk_write<T, true>(rows_of(chunk), shape, state, c, left, right);
    }
  };
  const auto walk_sums = [&](int64_t first, int64_t end, int head, int worker) {
    T* z = states + head * shape.elements() + shape.sums();
    for (int64_t chunk = first; chunk < end; ++chunk) {
      const Chunk<T> c = chunk_at(chunk, head, worker);
      const int rows = rows_of(chunk);
      T read[kChunk];
      read_sums(rows, shape.I, c.x, c.ldx, z, read);
      for (int r = 0; r < rows; ++r) c.n[r] = read[r] + c.n[r];
      write_sums<T, true>(rows, shape.I, c.yt, z);
    }
  };
  for (int head = 0; head < heads; ++head) source.begin(head, states + head * shape.elements());
  for (int64_t first = -kColumnWindow; first < chunks + kColumnWindow; first += kColumnWindow) {
    const int64_t next = first + kColumnWindow, end = next < chunks ? next : chunks;
    NearTasks walks(first < 0 || first >= chunks ? 0 : per_head * heads, launch.workers), rest(kColumnWindow, launch.workers);
    parallel(launch, rest.parts(), [&](int64_t, int worker) {
      walks.take(worker, [&](int64_t task, int) {
        const int head = static_cast<int>(task % heads), left = static_cast<int>(task / heads) * slice;
        if (left >= shape.J) return walk_sums(first, end, head, worker);
        walk_slice(first, end, head, left, left + slice < shape.J ? left + slice : shape.J, worker);
      });
      rest.take(worker, [&](int64_t slot, int) {
        const int64_t done = first - kColumnWindow + slot;
        if (done >= 0 && done < chunks) finish(done, worker);
        if (next + slot < chunks) prepare(next + slot, worker);
      });
    });
  }
  for (int head = 0; head < heads; ++head) source.end(head, states + head * shape.elements());
}

}  // namespace linnet::LINNET_ISA
