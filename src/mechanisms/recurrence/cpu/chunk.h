// chunk: one step of the chunked recurrence on dense scratch (docs/notes/recurrence.md).
//
// A walk reads a state S [I, J] with rows X, and writes it with keys Y and values Z. For C tokens at once, S_0 the state
// before:
//
//   P = tril(X Y^T)              row i sees the writes of rows 0 .. i
//   O = X S_0 + P Z
//   S = S_0 + Y^T Z
//
// and, where a sum of weights is asked for (the normaliser: a column of ones beside Z, kept as a vector z [I] beside S):
//
//   n = X z_0 + P 1,   z = z_0 + Y^T 1
//
// Which tensors play X, Y, Z is the mechanism's affair (walk.h): the forward pass and each gradient of an ungated recurrence
// are such walks. Y is held transposed, [I, C]: so it is the row-major right operand of the scores and the left operand of the
// update.
//
// One accumulator per element, terms in order (simd/gemm.h): slices of columns, partial chunks and the ladder of walk.h give
// the same bits.
#pragma once

#include "core/launch.h"
#include "simd/gemm.h"

namespace linnet::LINNET_ISA {

// More tokens per chunk compute more of the triangle, fewer read and write the state more often and round it more often.
// ns per token and head, forward, T 4096, 8 heads, avx512 on Zen 4, and the f32 state's error after 32,768 random / equal
// tokens:
//   C     width 64   width 128    error
//   16         242         837    8e-7 / 1.5e-5
//   32         268         882    6e-7 / 7.5e-6
//   64         310         970    4e-7 / 3.8e-6
// 32 keeps the gate of 2e-6 at T 4096 for equal tokens; 16 does not.
inline constexpr int kChunk = 32;
inline constexpr int kPanel = 64;  // columns of a state panel: [I, 64] floats of I = 64 are 16 KB, half of a small L1

// The state of one head, cut in panels of 64 columns, each [I, 64] dense; the last has the columns that are left, rounded up to
// whole vectors. `sums` [I] and `units` follow the panels in the same allocation.
template <class T>
struct StateShape {
  int I, J;
  int units;  // elements beside panels and sums that a mechanism keeps with the state

  LINNET_INLINE int panels() const { return (J + kPanel - 1) / kPanel; }
  LINNET_INLINE int columns(int p) const { return J - p * kPanel < kPanel ? J - p * kPanel : kPanel; }
  LINNET_INLINE int64_t pitch(int p) const { return round_up<T>(columns(p)); }
  LINNET_INLINE int64_t panel(int p) const { return static_cast<int64_t>(p) * kPanel * I; }
  LINNET_INLINE int64_t sums() const { return panel(panels() - 1) + pitch(panels() - 1) * I; }
  LINNET_INLINE int64_t scanned() const { return sums() + round_up<T>(I); }  // what a write adds to: panels and sums
  LINNET_INLINE int64_t elements() const { return scanned() + round_up<T>(units); }
  LINNET_INLINE int64_t at(int i, int j) const { return panel(j / kPanel) + i * pitch(j / kPanel) + j % kPanel; }
};

// Rows that the next chunk will read or write, fetched into L2 while the products of this one run: kLines lines per register
// tile. Bursts of prefetches stall, and a head's rows in [T, H, D] are too short for the hardware to follow (T 4096, 8 heads of
// 64: 275 ns per token instead of 335; 1 to 4 % at width 128). The last rows added are fetched first.
class Ahead {
 public:
  static constexpr int kLines = 20, kManyLines = 40;  // the latter where a task has half of the tiles
  // rows of `bytes`, `stride` bytes apart
  LINNET_INLINE void add(const void* first, int64_t stride, int64_t bytes, int rows) {
    if (rows > 0 && bytes > 0 && parts_ < kParts) {
      part_[parts_++] = {static_cast<const char*>(first), stride, static_cast<int>((bytes + 63) / 64), rows};
    }
  }
  LINNET_INLINE void next() {
    if (lines_ == 0) {
      if (parts_ == 0) return;
      Part& part = part_[parts_ - 1];
      at_ = part.first;
      lines_ = part.lines;
      part.first += part.stride;
      if (--part.rows == 0) --parts_;
    }
    __builtin_prefetch(at_, 0, 2);
    at_ += 64;
    --lines_;
  }
  LINNET_INLINE void clear(int per_tile = kLines) {
    parts_ = lines_ = 0;
    per_tile_ = per_tile;
  }
  LINNET_INLINE int per_tile() const { return per_tile_; }

 private:
  static constexpr int kParts = 10;
  struct Part {
    const char* first;
    int64_t stride;
    int lines, rows;
  };
  Part part_[kParts];
  int parts_ = 0, lines_ = 0, per_tile_ = kLines;
  const char* at_ = nullptr;
};
template <class Epilogue>
struct Fetching {
  Epilogue epilogue;
  Ahead* ahead;  // what to fetch meanwhile
  template <class T, class V, int R, int N>
  LINNET_INLINE void tile(V (&acc)[R][N], T* c, int64_t ldc, int i, int j) const {
    using X = Vec<T>;
    for (int line = ahead->per_tile(); line > 0; --line) ahead->next();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, c += ldc) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        V old = X::zero();
        if constexpr (Epilogue::kReadsC) old = X::load(c + v * X::W);
        X::store(c + v * X::W, epilogue(acc[r][v], old, i + r, j + v * X::W));
      }
    }
  }
};

// Scratch of one worker.
template <class T>
struct Chunk {
  int64_t ldx, ldz;
  T* x;          // [C, ldx]  rows that read, I wide
  T* yt;         // [I, C]    keys, transposed
  T* z;          // [C, ldz]  values, J wide
  T* p;          // [C, C]    scores
  T* o;          // [C, ldz]  results
  T* n;          // [C]       sums of weights
  T* spare;      // what the mechanism asked for
  Ahead* ahead;  // what to fetch meanwhile

  LINNET_INLINE static Chunk cut(Arena& arena, int I, int J, int64_t spare) {
    Chunk c;
    c.ldx = round_up<T>(I);
    c.ldz = round_up<T>(J);
    c.x = arena.take<T>(kChunk * c.ldx);
    c.yt = arena.take<T>(static_cast<int64_t>(I) * kChunk);
    c.z = arena.take<T>(kChunk * c.ldz);
    c.p = arena.take<T>(kChunk * kChunk);
    c.o = arena.take<T>(kChunk * c.ldz);
    c.n = arena.take<T>(kChunk);
    c.spare = arena.take<T>(spare);
    c.ahead = arena.take<Ahead>(1);
    return c;
  }
};

// n += the sum of each row's scores up to the diagonal; what lies beyond it becomes zero: a selection, so that a NaN there is
// gone.
template <class T, bool kSums>
void keep_lower(int rows, T* p, T* n) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i, p += kChunk) {
    typename X::V sums = X::zero();
#pragma GCC unroll 8
    for (int j = 0; j < kChunk; j += X::W) {
      const typename X::V kept = select(X::prefix(i + 1 - j), X::load(p + j), X::zero());
      X::store(p + j, kept);
      if constexpr (kSums) sums += kept;
    }
    if constexpr (kSums) n[i] += sum(sums);
  }
}

// n = X z
template <class T>
void read_sums(int rows, int I, const T* x, int64_t ldx, const T* z, T* n) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i, x += ldx) {
    typename X::V total = X::zero();
    for (int c = 0; c < I; c += X::W) total = fma(X::load(x + c, I - c), X::load(z + c, I - c), total);
    n[i] = sum(total);
  }
}

// z (+)= Y^T 1
template <class T, bool kAdd>
void write_sums(int rows, int I, const T* yt, T* z) {
  using X = Vec<T>;
  for (int c = 0; c < I; ++c, yt += kChunk) {
    typename X::V total = X::load(yt, rows);
    for (int j = X::W; j < rows; j += X::W) total += X::load(yt + j, rows - j);
    z[c] = kAdd ? z[c] + sum(total) : sum(total);
  }
}

// P = tril(X Y^T) for `rows` rows; n += P 1. (keep_lower)
template <class T, bool kSums>
void chunk_scores(int rows, int I, const Chunk<T>& c) {
  gemm<T>(rows, rows, I, as_is(c.x, c.ldx), c.yt, kChunk, c.p, kChunk, Fetching<Store>{{}, c.ahead}, ColumnsTo{1});
  keep_lower<T, kSums>(rows, c.p, c.n);
}

// Terms of O = X S that are added up in one chain: thousands (the packed squares of taylor) lose digits with the chain's
// length.
inline constexpr int kDepth = 256;

// Columns [first, last) of O = X S, then O += P Z when causal. `finite`: Z is; otherwise rows are multiplied one by one with
// exactly the values that they see, so that a NaN or infinity in a value reaches no earlier row as 0 * NaN. The bits are the
// same for finite values, and for any cut of the columns (at whole vectors). ready(): is called before P is read.
struct Ready {
  LINNET_INLINE void operator()() const {}
};
template <class T, class ScoresReady = Ready>
void chunk_read(int rows, const StateShape<T>& shape, const T* state, const Chunk<T>& c, bool causal, bool finite, int first,
                int last, const ScoresReady& ready = {}) {
  for (int j = first, end; j < last; j = end) {
    const int p = j / kPanel;
    end = (p + 1) * kPanel < last ? (p + 1) * kPanel : last;
    const int width = end - j;
    const int64_t pitch = shape.pitch(p);
    const T* panel = state + shape.panel(p) + j % kPanel;
    gemm<T>(rows, width, shape.I < kDepth ? shape.I : kDepth, as_is(c.x, c.ldx), panel, pitch, c.o + j, c.ldz,
            Fetching<Store>{{}, c.ahead});
    for (int i = kDepth; i < shape.I; i += kDepth) {
      gemm<T>(rows, width, shape.I - i < kDepth ? shape.I - i : kDepth, as_is(c.x + i, c.ldx), panel + i * pitch, pitch,
              c.o + j, c.ldz, Fetching<Add>{{}, c.ahead});
    }
    if (!causal) continue;
    ready();
    if (finite) {
      gemm<T>(rows, width, rows, as_is(c.p, kChunk), c.z + j, c.ldz, c.o + j, c.ldz, Fetching<Add>{{}, c.ahead}, DepthTo{1});
    } else {
      for (int i = 0; i < rows; ++i) {
        gemm<T>(1, width, i + 1, as_is(c.p + i * kChunk, kChunk), c.z + j, c.ldz, c.o + i * c.ldz + j, c.ldz, Add{});
      }
    }
  }
}

// Columns [first, last) of S += Y^T Z (kAdd), or of the increment alone.
template <class T, bool kAdd>
void chunk_write(int rows, const StateShape<T>& shape, T* state, const Chunk<T>& c, int first, int last) {
  for (int j = first, end; j < last; j = end) {
    const int p = j / kPanel;
    end = (p + 1) * kPanel < last ? (p + 1) * kPanel : last;
    T* panel = state + shape.panel(p) + j % kPanel;
    if constexpr (kAdd) {
      gemm<T>(shape.I, end - j, rows, as_is(c.yt, kChunk), c.z + j, c.ldz, panel, shape.pitch(p), Fetching<Add>{{}, c.ahead});
    } else {
      gemm<T>(shape.I, end - j, rows, as_is(c.yt, kChunk), c.z + j, c.ldz, panel, shape.pitch(p), Store{});
    }
  }
}
// All of S, and z += Y^T 1.
template <class T, bool kAdd, bool kSums>
void chunk_write(int rows, const StateShape<T>& shape, T* state, const Chunk<T>& c) {
  chunk_write<T, kAdd>(rows, shape, state, c, 0, shape.J);
  if constexpr (kSums) write_sums<T, kAdd>(rows, shape.I, c.yt, state + shape.sums());
}

}  // namespace linnet::LINNET_ISA
