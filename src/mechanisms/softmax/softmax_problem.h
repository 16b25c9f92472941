// Problem: one call of softmax attention as the tile engine sees it (softmax, softmax_decode, softmax_paged), and how its tiles
// come from and go to the caller's memory.
//
// The query heads of one key/value head share a tile: row r = i * G + g of (sequence, key head) is token i, query head
// key_head * G + g, so that keys and values are read once for all of them and few queries still fill the lanes.
//
// A mechanism that changes the keys or values it reads, or what happens to the result, derives from Problem and hides
// load_keys, load_values, value_width or finish; the engine (softmax_tile.h) is compiled for it.
#pragma once

#include "core/half.h"
#include "simd/ftz.h"
#include "simd/math.h"
#include "simd/tile.h"
#include "softmax.h"
#include "softmax_gate.h"
#include "softmax_mask.h"

namespace linnet::LINNET_ISA {

inline constexpr int kLanes = 64;  // rows of a tile: queries (forward) or keys (backward) in the lanes
inline constexpr int kKeys = 64;   // keys of a tile

template <class T>
inline constexpr T kLog2e = static_cast<T>(1.442695040888963407359924681001892137L);
template <class T>
inline constexpr T kLn2 = static_cast<T>(0.693147180559945309417232121458176568L);
template <class T>
inline constexpr T kInfinity = static_cast<T>(__builtin_inf());
template <class T>
inline constexpr T kLowest = static_cast<T>(sizeof(T) == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023);

LINNET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
LINNET_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
LINNET_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

LINNET_INLINE int64_t index_at(const View& view, int64_t i, int64_t j = 0) {
  const int64_t offset = i * view.stride[0] + j * view.stride[1];
  return view.dtype == Dtype::i32 ? static_cast<const int32_t*>(view.data)[offset]
                                  : static_cast<const int64_t*>(view.data)[offset];
}

// Runs f(task, worker) for every task, on the executor's threads; below `flops` of about 10 us in this thread alone.
template <class F>
void run_tasks(const Launch& launch, int64_t tasks, double flops, const F& f) {
  struct Call {
    static void task(void* context, int64_t task, int worker) {
      const FlushSubnormals flush;
      (*static_cast<const F*>(context))(task, worker);
    }
  };
  void* const context = const_cast<void*>(static_cast<const void*>(&f));
  if (flops < 1e6) {
    for (int64_t task = 0; task < tasks; ++task) Call::task(context, task, 0);
  } else {
    launch.executor->run(tasks, Call::task, context);
  }
}

struct Sequence {  // queries q0 .. q0+tq-1 and keys k0 .. k0+n-1 of batch row b
  int64_t b, q0, tq, k0, n;
  LINNET_INLINE int64_t shift() const { return n - tq; }  // query i stands at key position i + shift
};

struct Problem {
  View q, k, v, bias, sinks, out, lse;
  View page_table;      // given: k and v are pages [P, page, Hkv, D]
  View cu_q, cu_k;      // given: packed
  View lengths, start;  // keys of each item (key_len, lengths of a cache), first key
  Mask mask;
  double scale = 1, softcap = 0;
  Gate gate;                                   // g given: out = y gated
  View read, kept;                             // given: y itself, before the gate
  static constexpr bool kReadsInPlace = true;  // keys and values may be read where they lie instead of through load_keys

  LINNET_INLINE int64_t group() const { return k.size[2] == 0 ? 1 : q.size[2] / k.size[2]; }
  LINNET_INLINE int64_t key_heads() const { return k.size[2]; }
  LINNET_INLINE int64_t key_width() const { return q.size[3]; }
  LINNET_INLINE int64_t value_width() const { return v.size[3]; }
  LINNET_INLINE int64_t longest_keys() const { return page_table.given() ? page_table.size[1] * k.size[1] : k.size[1]; }

  LINNET_INLINE int64_t sequences() const { return cu_q.given() ? cu_q.size[0] - 1 : q.size[0]; }
  LINNET_INLINE Sequence sequence(int64_t s) const {
    if (cu_q.given()) {
      const int64_t q0 = index_at(cu_q, s), k0 = index_at(cu_k, s);
      return {0, q0, index_at(cu_q, s + 1) - q0, k0, index_at(cu_k, s + 1) - k0};
    }
    const int64_t end = lengths.given() ? index_at(lengths, s) : k.size[1], begin = start.given() ? index_at(start, s) : 0;
    return {s, 0, q.size[1], begin, end - begin};
  }

  // The factor folded into the queries: logits come out in base 2, or divided by the soft cap.
  template <class T>
  LINNET_INLINE T query_factor() const {
    return static_cast<T>(softcap > 0 ? scale / softcap : scale * kLog2e<double>);
  }

  // Rows r0 .. r0+rows-1 of a [B, T, H, D] tensor in row-major scratch [rows, ld].
  template <class T>
  void load_rows(const View& x, const Sequence& seq, int64_t head, int64_t r0, int rows, T* dst, int64_t ld, T factor) const {
    const int64_t G = group(), width = x.size[3];
    for (int r = 0; r < rows;) {  // runs of the heads of one token, or of all tokens when a group has one head
      const int64_t i = (r0 + r) / G, g = (r0 + r) % G;
      const int run = static_cast<int>(G == 1 ? rows - r : smaller(G - g, rows - r));
      const int64_t offset = seq.b * x.stride[0] + (seq.q0 + i) * x.stride[1] + (head * G + g) * x.stride[2];
      with_type<T>(x, offset, [&](auto* p) {
        load_tile<T>(p, G == 1 ? x.stride[1] : x.stride[2], run, static_cast<int>(width), dst + r * ld, ld, factor);
      });
      r += run;
    }
  }
  template <class T>
  void store_rows(const View& x, const Sequence& seq, int64_t head, int64_t r0, int rows, const T* src, int64_t ld,
                  const T* factors) const {
    const int64_t G = group(), width = x.size[3];
    for (int r = 0; r < rows;) {
      const int64_t i = (r0 + r) / G, g = (r0 + r) % G;
      const int run = static_cast<int>(G == 1 ? rows - r : smaller(G - g, rows - r));
      const int64_t offset = seq.b * x.stride[0] + (seq.q0 + i) * x.stride[1] + (head * G + g) * x.stride[2];
      with_type<T>(x, offset, [&](auto* p) {
        store_tile(src + r * ld, ld, run, static_cast<int>(width), p, G == 1 ? x.stride[1] : x.stride[2],
                   factors == nullptr ? nullptr : factors + r);
      });
      r += run;
    }
  }
  // The offset of row r in a [B, T, H] or [B, T, H, D] tensor.
  LINNET_INLINE int64_t row_offset(const View& x, const Sequence& seq, int64_t head, int64_t r) const {
    const int64_t G = group();
    return seq.b * x.stride[0] + (seq.q0 + r / G) * x.stride[1] + (head * G + r % G) * x.stride[2];
  }

  // Queries transposed: qt[c * kLanes + lane]. temp: [kLanes, round_up(K)].
  template <class T>
  void load_queries(const Sequence& seq, int64_t head, int64_t r0, int rows, T* qt, T* temp) const {
    const int K = static_cast<int>(key_width());
    if (group() == 1) {
      with_type<T>(q, row_offset(q, seq, head, r0),
                   [&](auto* p) { load_tile_transposed<T>(p, q.stride[1], rows, K, qt, kLanes, query_factor<T>()); });
      return;
    }
    load_rows<T>(q, seq, head, r0, rows, temp, round_up<T>(K), T(1));
    load_tile_transposed<T>(temp, round_up<T>(K), rows, K, qt, kLanes, query_factor<T>());
  }

  // The offset of key j of the sequence.
  LINNET_INLINE int64_t key_offset(const View& x, const Sequence& seq, int64_t head, int64_t j) const {
    const int64_t token = seq.k0 + j;
    if (!page_table.given()) return seq.b * x.stride[0] + token * x.stride[1] + head * x.stride[2];
    const int64_t page = x.size[1];
    return index_at(page_table, seq.b, token / page) * x.stride[0] + token % page * x.stride[1] + head * x.stride[2];
  }
  // Keys j0 .. j0+count-1 in runs of equally spaced rows: f(view offset, first key of the run, keys in the run).
  template <class F>
  LINNET_INLINE void key_runs(const View& x, const Sequence& seq, int64_t head, int64_t j0, int count, const F& f) const {
    if (!page_table.given()) {
      return f(seq.b * x.stride[0] + (seq.k0 + j0) * x.stride[1] + head * x.stride[2], 0, count);
    }
    const int64_t page = x.size[1];
    for (int r = 0; r < count;) {
      const int64_t token = seq.k0 + j0 + r, row = token % page;
      const int run = static_cast<int>(smaller(page - row, count - r));
      f(index_at(page_table, seq.b, token / page) * x.stride[0] + row * x.stride[1] + head * x.stride[2], r, run);
      r += run;
    }
  }
  template <class T>
  LINNET_INLINE void load_cache(const View& x, const Sequence& seq, int64_t head, int64_t j0, int count, T* dst,
                                int64_t ld) const {
    key_runs(x, seq, head, j0, count, [&](int64_t offset, int r, int run) {
      with_type<T>(x, offset,
                   [&](auto* p) { load_tile<T>(p, x.stride[1], run, static_cast<int>(x.size[3]), dst + r * ld, ld); });
    });
  }
  template <class T>
  void load_keys(const Sequence& seq, int64_t head, int64_t j0, int count, T* dst, int64_t ld) const {
    load_cache(k, seq, head, j0, count, dst, ld);
  }
  template <class T>
  void load_values(const Sequence& seq, int64_t head, int64_t j0, int count, T* dst, int64_t ld) const {
    load_cache(v, seq, head, j0, count, dst, ld);
  }

  // The bias of keys j0 .. and rows r0 .., keys in rows: dst[j * kLanes + lane].
  template <class T>
  void load_bias(const Sequence& seq, int64_t head, int64_t j0, int count, int64_t r0, int rows, T* dst) const {
    const int64_t G = group();
    if (G == 1 && bias.stride[3] == 1) {
      const int64_t offset = seq.b * bias.stride[0] + head * bias.stride[1] + (seq.q0 + r0) * bias.stride[2] + seq.k0 + j0;
      with_type<T>(bias, offset, [&](auto* p) { load_tile_transposed<T>(p, bias.stride[2], rows, count, dst, kLanes); });
      return;
    }
    for (int lane = 0; lane < rows; ++lane) {
      const int64_t i = (r0 + lane) / G, h = head * G + (r0 + lane) % G;
      const int64_t offset = seq.b * bias.stride[0] + h * bias.stride[1] + (seq.q0 + i) * bias.stride[2];
      for (int j = 0; j < count; ++j) {
        dst[j * kLanes + lane] = element_at<T>(bias, offset + (seq.k0 + j0 + j) * bias.stride[3]);
      }
    }
    for (int lane = rows; lane < round_up<T>(rows); ++lane) {
      for (int j = 0; j < count; ++j) dst[j * kLanes + lane] = 0;
    }
  }

  // Results of rows r0 .. r0+rows-1 from their sums of weighted values: o [V, kLanes], or o [rows, round_up(V)] when in_rows;
  // maximum and sum (base 2, before the sink, padded to whole vectors) of each row. temp: [kLanes, round_up(V)].
  template <class T>
  void finish(const Sequence& seq, int64_t head, int64_t r0, int rows, const T* o, bool in_rows, const T* maximum, const T* sum,
              T* temp) const {
    using X = Vec<T>;
    using V = typename X::V;
    const int width = static_cast<int>(value_width());
    T inverse[kLanes], natural[kLanes], sink[kLanes];
    for (int r = 0; r < round_up<T>(rows); ++r) {
      const bool given = sinks.given() && r < rows;
      sink[r] = given ? element_at<T>(sinks, (head * group() + (r0 + r) % group()) * sinks.stride[0]) : -kInfinity<T>;
    }
    for (int r = 0; r < rows; r += X::W) {
      // The sink is one more column; without one, z = -inf and nothing changes.
      const V z = X::load(sink + r) * kLog2e<T>, m = X::load(maximum + r), top = max(z, m);
      const V factor = exp2_nonpositive(m - top), l = fma(X::load(sum + r), factor, exp2_nonpositive(z - top));
      X::store(inverse + r, select(eq(l, X::zero()), X::zero(), factor / l));
      X::store(natural + r, fma(top, X::broadcast(kLn2<T>), log(l)));
    }
    if (gate.g.given() || read.given() || kept.given()) {  // the gate acts on rows in T; one rounding at the end
      if (!in_rows) store_tile_transposed(o, kLanes, rows, width, temp, round_up<T>(width), inverse);
      if (in_rows && o != temp) {
        for (int64_t i = 0; i < rows * round_up<T>(width); ++i) temp[i] = o[i];
      }
      finish_gated(seq, head, r0, rows, temp, in_rows ? inverse : nullptr);
    } else if (in_rows) {
      store_rows<T>(out, seq, head, r0, rows, o, round_up<T>(width), inverse);
    } else if (group() == 1) {
      with_type<T>(out, row_offset(out, seq, head, r0),
                   [&](auto* p) { store_tile_transposed(o, kLanes, rows, width, p, out.stride[1], inverse); });
    } else {
      store_tile_transposed(o, kLanes, rows, width, temp, round_up<T>(width), inverse);
      store_rows<T>(out, seq, head, r0, rows, temp, round_up<T>(width), nullptr);
    }
    if (!lse.given()) return;
    for (int r = 0; r < rows; ++r) *(static_cast<T*>(lse.data) + row_offset(lse, seq, head, r0 + r)) = natural[r];
  }

  // Rows y [rows, round_up(V)] in temp, times `factors` where given: stored as the read, gated, stored as the output.
  template <class T>
  [[gnu::noinline]] void finish_gated(const Sequence& seq, int64_t head, int64_t r0, int rows, T* temp,
                                      const T* factors) const {
    using X = Vec<T>;
    const int width = static_cast<int>(value_width());
    const int64_t ld = round_up<T>(width);
    for (int r = 0; r < rows && factors != nullptr; ++r) {
      for (int c = 0; c < width; c += X::W) X::store(temp + r * ld + c, X::load(temp + r * ld + c) * factors[r]);
    }
    if (read.given()) store_rows<T>(read, seq, head, r0, rows, temp, ld, nullptr);
    if (kept.given()) store_rows<T>(kept, seq, head, r0, rows, temp, ld, nullptr);
    for (int r = 0; r < rows && gate.g.given(); ++r) {
      gate_row<T>(gate, row_offset(gate.g, seq, head, r0 + r), width, temp + r * ld, temp + r * ld);
    }
    store_rows<T>(out, seq, head, r0, rows, temp, ld, nullptr);
  }
};

// What the backward of a Problem reads and writes. `out` not given: delta is -dlse alone.
struct Gradients {
  View dout, dlse, dq, dk, dv, dbias, dsinks, out, lse;
};

// The kernels on a Problem, compiled once per instruction set, for the mechanisms that are softmax with something around it.
void attend(const Problem& problem, const Launch& launch);
int64_t attend_workspace(const Problem& problem, int workers);
void attend_backward(const Problem& problem, const Gradients& gradients, const Launch& launch);
int64_t attend_backward_workspace(const Problem& problem, int workers);

LINNET_INLINE double default_scale(Maybe scale, int64_t K) {
  return scale.given ? scale.value : 1 / __builtin_sqrt(static_cast<double>(K));
}

LINNET_INLINE Problem problem_of(const SoftmaxArgs& args) {
  Problem p;
  p.q = args.q;
  p.k = args.k;
  p.v = args.v;
  p.bias = args.bias;
  p.sinks = args.sinks;
  p.cu_q = args.cu_seqlens_q;
  p.cu_k = args.cu_seqlens_k;
  p.lengths = args.key_len;
  p.mask = make_mask(args.causal, args.window, args.prefix, args.chunk);
  p.scale = default_scale(args.scale, args.q.size[3]);
  p.softcap = args.softcap;
  return p;
}

LINNET_INLINE Problem problem_of(const SoftmaxDecodeArgs& args) {
  Problem p;
  p.q = args.q;
  p.k = args.k_cache;
  p.v = args.v_cache;
  p.sinks = args.sinks;
  p.lengths = args.lengths;
  p.start = args.cache_start;
  p.mask = make_mask(true, args.window, args.prefix, 0);
  p.scale = default_scale(args.scale, args.q.size[3]);
  p.softcap = args.softcap;
  return p;
}
LINNET_INLINE Problem problem_of(const SoftmaxPagedArgs& args) {
  Problem p;
  p.q = args.q;
  p.k = args.k_pages;
  p.v = args.v_pages;
  p.page_table = args.page_table;
  p.sinks = args.sinks;
  p.lengths = args.lengths;
  p.mask = make_mask(args.causal, args.window, args.prefix, 0);
  p.scale = default_scale(args.scale, args.q.size[3]);
  p.softcap = args.softcap;
  return p;
}

// Rows of the new tokens into a cache, byte by byte.
LINNET_INLINE void append_rows(const View& rows, const View& cache, int64_t b, int64_t at) {
  const int64_t bytes = dtype_size(rows.dtype);
  for (int64_t t = 0; t < rows.size[1]; ++t) {
    for (int64_t h = 0; h < rows.size[2]; ++h) {
      const int64_t from = b * rows.stride[0] + t * rows.stride[1] + h * rows.stride[2];
      const int64_t to = b * cache.stride[0] + (at + t) * cache.stride[1] + h * cache.stride[2];
      __builtin_memcpy(static_cast<char*>(cache.data) + to * bytes, static_cast<const char*>(rows.data) + from * bytes,
                       static_cast<size_t>(rows.size[3] * bytes));
    }
  }
}

// The new tokens of every item into its cache; lengths += T.
LINNET_INLINE void append(const SoftmaxDecodeArgs& args) {
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const int64_t length = index_at(args.lengths, b), tokens = args.q.size[1];
    append_rows(args.k, args.k_cache, b, length);
    append_rows(args.v, args.v_cache, b, length);
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] = static_cast<int32_t>(length + tokens);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] = length + tokens;
    }
  }
}

}  // namespace linnet::LINNET_ISA
