// The walks of linear attention (recurrence/cpu/walk.h): which tensors read and write the state, row by row.
//
//              X reads            Y, Z write                 state [I, J]        result
//   Forward    phi(q)             phi(k), v                  S      [F, V]       out, den; final_state, final_z
//   QueryGrad  g                  [v | 1], phi(k)            S^T    [V+1, F]     dphi(q)
//   ValueGrad  phi(k)             phi(q), g                  R      [F, V]       dv; dinitial_state      backward in time
//   KeyGrad    [v | 1]            g, phi(q)                  R^T    [V+1, F]     dphi(k); dinitial_z     backward in time
//
// g = scale [dout / den | -(dout . out) / den], without the last entry when nothing is normalised.
//
// Map exp, normalised (`shifted`): feature c of the state is in units of exp(unit_c), unit_c the largest exponent written so
// far (k_c forward, q_c - log den backward), so that nothing overflows; g then leaves out den, which stands in the exponents.
// Rows may share a chunk while no unit grows by more than 30 beyond the first row's: exp(-30) leaves every digit in place.
#pragma once

#include "core/half.h"
#include "linear_maps.h"
#include "linear_shape.h"
#include "linear_weights.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "simd/finite.h"

namespace linnet::LINNET_ISA {

template <class E>
struct Rows {  // rows of one head along a walk
  E* first = nullptr;
  int64_t stride = 0;
  LINNET_INLINE E* at(int64_t position) const { return first + position * stride; }
};

template <class T>
LINNET_INLINE T minus_infinity() {
  return static_cast<T>(-__builtin_inf());
}

// dst [rows, ld] = src; true when every element is finite.
template <class T, class E>
bool load_finite(const E* src, int64_t stride, int rows, int cols, T* dst, int64_t ld) {
  using X = Vec<T>;
  typename X::V watch = X::zero();  // x * 0 is 0, or NaN
  for (int r = 0; r < rows; ++r, src += stride, dst += ld) {
    for (int c = 0; c < cols; c += X::W) {
      const typename X::V a = X::load(src + c, cols - c);
      watch = fma(a, X::zero(), watch);
      X::store(dst + c, a);
    }
  }
  return !any(is_nan(watch));
}

// What the four walks share. T: float or double; E: the tensors' type.
template <class T, class E>
struct LinearUnit {
  using X = Vec<T>;
  using V = typename X::V;

  const LinearArgs* args;
  const LinearOut* out;
  const LinearGrads* grads;
  LinearShape s;
  LinearSequence seq;
  int64_t n;      // the sequence
  int64_t head0;  // the group: heads head0 .. head0 + count - 1
  int count;
  int share;         // of which so many in a row add up to one head of the gradient; divides count
  bool reversed;     // positions run from the last token to the first
  const T* weights;  // map t2r: per query head w [F, ldk], then its transpose [K, ldf]
  T* dw;             // map t2r: [N, Hq, F, ldk], or null

  LINNET_INLINE int heads() const { return count; }
  LINNET_INLINE bool causal() const { return args->causal; }

  LINNET_INLINE int64_t ldk() const { return round_up<T>(s.K); }
  LINNET_INLINE int64_t ldf() const { return round_up<T>(s.F); }
  LINNET_INLINE int64_t ldv() const { return round_up<T>(s.V + 1); }
  LINNET_INLINE Map<T> map(int head) const {
    Map<T> m{args->map, static_cast<int>(s.K), static_cast<int>(s.F), static_cast<int>(args->dpfp_nu)};
    if (args->map == FeatureMap::t2r) {
      m.w = weights + s.q_head(head0 + head) * weight_elements<T>(s);
      m.wt = m.w + s.F * ldk();
    }
    return m;
  }

  // Scratch beside the chunk's own.
  struct Spare {
    T* rows;     // [C, ldf or ldv]
    T* factors;  // [C]
    T* sum;      // [C, ldk or ldv]  over the heads of a group
    T* dx;       // [C, ldk]
    T* unit;     // [ldk]
    T* scratch;  // of the maps
  };
  LINNET_INLINE Spare spare(T* p) const {
    Arena arena(reinterpret_cast<char*>(p));
    return cut_spare(arena);
  }
  LINNET_INLINE int64_t spare_elements() const {
    Arena arena;
    cut_spare(arena);
    return arena.used() / static_cast<int64_t>(sizeof(T));
  }
  LINNET_INLINE Spare cut_spare(Arena& arena) const {
    const int64_t wide = ldf() > ldv() ? ldf() : ldv(), narrow = ldk() > ldv() ? ldk() : ldv();
    Spare r;
    r.rows = arena.take<T>(kChunk * wide);
    r.factors = arena.take<T>(kChunk);
    r.sum = arena.take<T>(kChunk * narrow);
    r.dx = arena.take<T>(kChunk * ldk());
    r.unit = arena.take<T>(ldk());
    r.scratch = arena.take<T>(map(0).scratch(kChunk));
    return r;
  }

  // ---- tensors along the walk

  LINNET_INLINE Rows<E> along(const View& view, int64_t begin, int64_t end, int64_t head) const {
    if (begin == end) return {};
    return reversed ? Rows<E>{view.template at<E>(seq.b, end - 1, head), -view.stride[1]}
                    : Rows<E>{view.template at<E>(seq.b, begin, head), view.stride[1]};
  }
  LINNET_INLINE Rows<E> q(int head) const { return along(args->q, seq.q0, seq.q1, s.q_head(head0 + head)); }
  LINNET_INLINE Rows<E> k(int head) const { return along(args->k, seq.k0, seq.k1, s.k_head(head0 + head)); }
  LINNET_INLINE Rows<E> v(int head) const { return along(args->v, seq.k0, seq.k1, s.v_head(head0 + head)); }
  // columns [first, last) of `width`
  LINNET_INLINE void add_ahead(const Rows<E>& from, int64_t at, int64_t width, int rows, Ahead* ahead_of, int first = 0,
                               int last = kUnbounded) const {
    constexpr int64_t size = sizeof(E);
    if (rows > 0) ahead_of->add(from.at(at) + first, from.stride * size, ((last < width ? last : width) - first) * size, rows);
  }
  LINNET_INLINE T* den(int head, int64_t position) const {
    return out->den.template at<T>(seq.b, reversed ? seq.q1 - 1 - position : seq.q0 + position, head0 + head);
  }
  LINNET_INLINE bool masked(int64_t position) const {
    return args->key_mask.given() &&
           *args->key_mask.template at<const uint8_t>(seq.b, reversed ? seq.k1 - 1 - position : seq.k0 + position) == 0;
  }
  LINNET_INLINE void zero_masked(int64_t at, int rows, T* dst, int64_t ld) const {
    if (!args->key_mask.given()) return;
    for (int r = 0; r < rows; ++r) {
      if (masked(at + r)) zero_row(dst + r * ld, ld);
    }
  }

  void query_features(int head, int64_t at, int rows, T* f, int64_t ld, T* scratch) const {
    map_rows<T>(map(head), q(head).at(at), q(head).stride, rows, f, ld, scratch);
  }
  void key_features(int head, int64_t at, int rows, T* f, int64_t ld, T* scratch) const {
    map_rows<T>(map(head), k(head).at(at), k(head).stride, rows, f, ld, scratch);
    zero_masked(at, rows, f, ld);
  }
  // [v | 1], or v alone; rows of masked keys 0. True when all are finite.
  bool value_rows(int head, int64_t at, int rows, bool ones, T* dst, int64_t ld) const {
    const Rows<E> from = v(head);
    bool finite = load_finite<T>(from.at(at), from.stride, rows, static_cast<int>(s.V), dst, ld);
    if (ones) {
      for (int r = 0; r < rows; ++r) dst[r * ld + s.V] = 1;
    }
    if (!args->key_mask.given()) return finite;
    zero_masked(at, rows, dst, ld);
    return rows_are_finite(dst, ld, rows, static_cast<int>(s.V));
  }
  // g; with its last entry when `sums`.
  bool incoming(int head, int64_t at, int rows, bool sums, T* dst, int64_t ld) const {
    const int width = static_cast<int>(s.V);
    const View& dout = grads->dout;
    if (!dout.given()) {
      for (int r = 0; r < rows; ++r) zero_row(dst + r * ld, ld);
      return true;
    }
    const Rows<E> from = along(dout, seq.q0, seq.q1, head0 + head), of = along(out->out, seq.q0, seq.q1, head0 + head);
    V watch = X::zero();
    for (int r = 0; r < rows; ++r, dst += ld) {
      T factor = static_cast<T>(s.scale);
      if (args->normalize) {
        const T saved = *den(head, at + r);
        if (s.shifted) {
          if (saved == minus_infinity<T>()) factor = 0;
        } else {
          factor = saved == 0 ? T(0) : factor / saved;
        }
      }
      const V factors = X::broadcast(factor);
      const E* d = from.at(at + r);
      V dot = X::zero();
      for (int c = 0; c < width; c += X::W) {
        const V a = X::load(d + c, width - c) * factors;
        watch = fma(a, X::zero(), watch);
        X::store(dst + c, a);
        if (sums && args->normalize) dot = fma(a, X::load(of.at(at + r) + c, width - c), dot);
      }
      if (sums) dst[width] = args->normalize ? -sum(dot) : T(0);
    }
    return !any(is_nan(watch));
  }

  // What the walk that makes the gradient of one input reads and writes. An input meets its own gradient only in the map.
  enum class Input { q, k, v };
  LINNET_INLINE void gradient_ahead(Input of, int head, int64_t at, int rows, Ahead* ahead_of, int first, int last) const {
    const bool mapped = args->map != FeatureMap::identity;
    const int64_t h = head0 + head;
    const auto result = [&](const View& view, int64_t begin, int64_t end, int64_t own, int64_t width) {
      if (view.given()) add_ahead(along(view, begin, end, own), at, width, rows, ahead_of, first, last);
    };
    if (of == Input::q) result(grads->dq, seq.q0, seq.q1, s.q_head(h), s.K);
    if (of == Input::k) result(grads->dk, seq.k0, seq.k1, s.k_head(h), s.K);
    if (of == Input::v) result(grads->dv, seq.k0, seq.k1, s.v_head(h), s.V);
    if (of != Input::q || mapped) add_ahead(q(head), at, s.K, rows, ahead_of);
    if (of != Input::k || mapped) add_ahead(k(head), at, s.K, rows, ahead_of);
    if (of != Input::v) add_ahead(v(head), at, s.V, rows, ahead_of);
    if (grads->dout.given()) add_ahead(along(grads->dout, seq.q0, seq.q1, h), at, s.V, rows, ahead_of);
    if (args->normalize) add_ahead(along(out->out, seq.q0, seq.q1, h), at, s.V, rows, ahead_of);
  }

  // ---- results

  // Columns [first, last) of `width` of the rows of one head; the last head of those that share a gradient stores their sum.
  void store_group(const T* rows_of, int64_t ld, int head, int64_t at, int rows, int width, Rows<E> to, T* sum, int first,
                   int last) const {
    if (share > 1) {
      T* place = sum + at % kChunk * ld;
      const bool starts = head % share == 0;
      for (int64_t i = 0; i < rows * ld; i += X::W) {
        X::store(place + i, starts ? X::load(rows_of + i) : X::load(place + i) + X::load(rows_of + i));
      }
      if (head % share < share - 1) return;
      rows_of = place;
    }
    store_tile<T>(rows_of + first, ld, rows, (last < width ? last : width) - first, to.at(at) + first, to.stride);
  }

  // ---- states in the caller's memory. matrix [N, H, F, V], vector [N, H, F]; absent: zeros, or not wanted.

  void load_state(const StateShape<T>& shape, bool across, int head, const View& matrix, const View& vector, T* state) const {
    for (int64_t i = 0; i < shape.scanned(); i += X::W) X::store(state + i, X::zero());
    const int64_t h = head0 + head;
    for (int c = 0; matrix.given() && c < s.F; ++c) {
      const T* row = matrix.template at<const T>(n, h, c);
      for (int j = 0; j < s.V; ++j) state[across ? shape.at(j, c) : shape.at(c, j)] = row[j];
    }
    for (int c = 0; vector.given() && c < s.F; ++c) {
      const T z = *vector.template at<const T>(n, h, c);
      if (!across) state[shape.sums() + c] = z;
      if (across && shape.I > s.V) state[shape.at(static_cast<int>(s.V), c)] = z;
    }
    // A feature whose sums are zeros has no unit yet; the padding has 0.
    for (int64_t c = shape.scanned(); c < shape.elements(); ++c) state[c] = 0;
    for (int c = 0; c < shape.units; ++c) {
      bool zeros = !vector.given() || *vector.template at<const T>(n, h, c) == 0;
      for (int j = 0; matrix.given() && j < s.V; ++j) zeros = zeros && matrix.template at<const T>(n, h, c)[j] == 0;
      state[shape.scanned() + c] = zeros ? minus_infinity<T>() : T(0);
    }
  }
  void store_state(const StateShape<T>& shape, bool across, int head, const View& matrix, const View& vector,
                   const T* state) const {
    const int64_t h = head0 + head;
    for (int c = 0; c < s.F; ++c) {
      const T factor = shape.units ? exp(X::broadcast(state[shape.scanned() + c]))[0] : T(1);
      const auto whole = [&](T x) { return x == 0 ? T(0) : x * factor; };  // no 0 * inf
      if (matrix.given()) {
        T* row = matrix.template at<T>(n, h, c);
        for (int j = 0; j < s.V; ++j) row[j] = whole(state[across ? shape.at(j, c) : shape.at(c, j)]);
      }
      if (vector.given()) {
        T z = 0;
        if (!across) z = state[shape.sums() + c];
        if (across && shape.I > s.V) z = state[shape.at(static_cast<int>(s.V), c)];
        *vector.template at<T>(n, h, c) = whole(z);
      }
    }
  }

  // ---- map exp, normalised: exponents and units. e: [rows, ldk] in Spare::rows from admit() on.

  void key_exponents(int head, int64_t at, int rows, T* e) const {
    load_tile<T>(k(head).at(at), k(head).stride, rows, static_cast<int>(s.K), e, ldk());
    for (int r = 0; r < rows; ++r) {
      for (int64_t c = 0; masked(at + r) && c < ldk(); ++c) e[r * ldk() + c] = minus_infinity<T>();
    }
  }
  void query_exponents(int head, int64_t at, int rows, T* e) const {
    load_tile<T>(q(head).at(at), q(head).stride, rows, static_cast<int>(s.K), e, ldk());
    for (int r = 0; r < rows; ++r) {
      const T log_den = *den(head, at + r);
      for (int64_t c = 0; c < ldk(); ++c) {
        T& x = e[r * ldk() + c];
        x = log_den == minus_infinity<T>() ? log_den : x - log_den;
      }
    }
  }
  // How many of the rows may share a chunk. Their units are stored with the state, which is rescaled; `across`: features are
  // the columns of the state.
  int admit_exponents(const StateShape<T>& shape, bool across, int rows, const T* e, T* unit_before, T* state) const {
    T* unit = state + shape.scanned();
    const V limit = X::broadcast(30);
    for (int64_t c = 0; c < ldk(); c += X::W) {
      const V first = max(X::load(e + c), X::load(unit + c));
      V top = first;
      for (int r = 1; r < rows; ++r) top = max(X::load(e + r * ldk() + c), top);
      const typename X::M small = eq(top, first) | le(top - first, limit);
      if (!all(small)) rows = 1;
    }
    bool grown = false;
    for (int64_t c = 0; c < ldk(); c += X::W) {
      const V before = X::load(unit + c);
      V top = before;
      for (int r = 0; r < rows; ++r) top = max(X::load(e + r * ldk() + c), top);
      X::store(unit_before + c, select(eq(before, top), X::broadcast(1), exp(before - top)));
      X::store(unit + c, top);
      grown = grown || !all(eq(before, top));
    }
    if (!grown) return rows;
    const T* factor = unit_before;
    if (!across) {
      for (int i = 0; i < shape.I; ++i) {
        if (factor[i] == 1) continue;
        state[shape.sums() + i] *= factor[i];
        for (int j = 0; j < shape.J; ++j) state[shape.at(i, j)] *= factor[i];
      }
    } else {
      for (int i = 0; i < shape.I; ++i) {
        for (int j = 0; j < shape.J; ++j) state[shape.at(i, j)] *= factor[j];
      }
    }
    return rows;
  }
  // f = exp(e - unit); a feature without a unit is 0.
  void exponentials(int rows, const T* e, const T* unit, T* f, int64_t ld) const {
    const V none = X::broadcast(minus_infinity<T>());
    for (int r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < ldk(); c += X::W) {
        const V u = X::load(unit + c);
        X::store(f + r * ld + c, select(eq(u, none), X::zero(), exp(X::load(e + r * ldk() + c) - u)));
      }
    }
  }
};

template <class T, class E, bool kSumsWanted>
struct LinearForward : LinearUnit<T, E> {
  using U = LinearUnit<T, E>;
  using typename U::V;
  using typename U::X;
  static constexpr bool kSums = kSumsWanted;

  int64_t readers() const { return this->seq.q1 - this->seq.q0; }
  int64_t writers() const { return this->seq.k1 - this->seq.k0; }
  StateShape<T> state() const {
    return {static_cast<int>(this->s.F), static_cast<int>(this->s.V), this->s.shifted ? static_cast<int>(this->s.F) : 0};
  }
  bool by_columns() const { return true; }
  void ahead(int head, int64_t at, int rows, Ahead* ahead_of, int first = 0, int last = kUnbounded) const {
    const Rows<E> to = this->along(this->out->out, this->seq.q0, this->seq.q1, this->head0 + head);
    this->add_ahead(to, at, this->s.V, rows, ahead_of, first, last);
    this->add_ahead(this->q(head), at, this->s.K, rows, ahead_of);
    this->add_ahead(this->v(head), at, this->s.V, rows, ahead_of);
    this->add_ahead(this->k(head), at, this->s.K, rows, ahead_of);
  }
  void begin(int head, T* state_of) const {
    this->load_state(state(), false, head, this->args->initial_state, this->args->initial_z, state_of);
  }
  void end(int head, const T* state_of) const {
    this->store_state(state(), false, head, this->out->final_state, this->out->final_z, state_of);
  }
  int admit(int head, int64_t at, int rows, T* state_of, const Chunk<T>& c) const {
    if (!this->s.shifted) return rows;
    const auto spare = this->spare(c.spare);
    this->key_exponents(head, at, rows, spare.rows);
    return this->admit_exponents(state(), false, rows, spare.rows, spare.unit, state_of);
  }
  void keys(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    if (this->args->map == FeatureMap::identity && !this->args->key_mask.given()) {
      const Rows<E> from = this->k(head);
      return load_tile_transposed<T>(from.at(at), from.stride, rows, static_cast<int>(this->s.K), c.yt, kChunk);
    }
    int64_t ld = this->ldf();
    if (this->s.shifted) {
      this->exponentials(rows, spare.rows, state_of + state().scanned(), spare.rows, ld);
    } else {
      this->key_features(head, at, rows, spare.rows, ld, spare.scratch);
    }
    load_tile_transposed<T>(static_cast<const T*>(spare.rows), ld, rows, static_cast<int>(this->s.F), c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    return this->value_rows(head, at, rows, false, c.z, c.ldz);
  }
  void queries(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    if (!this->s.shifted) return this->query_features(head, at, rows, c.x, c.ldx, spare.scratch);
    // exp(q + unit - the row's largest); the row's unit goes to factors.
    const int K = static_cast<int>(this->s.K);
    const T* unit = state_of + state().scanned();
    const V none = X::broadcast(minus_infinity<T>());
    load_tile<T>(this->q(head).at(at), this->q(head).stride, rows, K, c.x, c.ldx);
    for (int r = 0; r < rows; ++r) {
      T* x = c.x + r * c.ldx;
      V top = none;
      for (int j = 0; j < K; j += X::W) {
        const V e = select(X::prefix(K - j), X::load(x + j) + X::load(unit + j), none);
        X::store(x + j, e);
        top = max(e, top);
      }
      const T largest = highest(top);
      spare.factors[r] = largest;
      const V shift = X::broadcast(largest == minus_infinity<T>() ? T(0) : largest);
      for (int j = 0; j < K; j += X::W) X::store(x + j, exp(X::load(x + j) - shift));
    }
  }
  void finish(int head, int64_t at, int rows, const T*, const Chunk<T>& c, int first = 0, int last = kUnbounded) const {
    const auto spare = this->spare(c.spare);
    const T scale = static_cast<T>(this->s.scale), eps = static_cast<T>(this->args->eps);
    const bool wanted = this->args->normalize && this->out->den.given() && first == 0;
    for (int r = 0; r < rows; ++r) {
      T factor = scale;
      if (this->args->normalize && !this->s.shifted) {
        const T den = scale * c.n[r] + eps;
        factor = den == 0 ? T(0) : scale / den;
        if (wanted) *this->den(head, at + r) = den;
      } else if (this->args->normalize) {
        // c.n is in units of exp(unit): den = exp(unit) (scale n + eps exp(-unit)). The logarithm is taken on the side where
        // the exponential is at most 1.
        const T unit = spare.factors[r], weight = scale * c.n[r];
        const bool none = unit == minus_infinity<T>();
        const T den = none ? eps : weight + (eps == 0 ? T(0) : eps * exp(X::broadcast(-unit))[0]);
        factor = den == 0 ? T(0) : scale / den;
        T log_den;
        if (none || (unit <= 0 && eps > 0)) {
          log_den = log(X::broadcast((none ? T(0) : weight * exp(X::broadcast(unit))[0]) + eps))[0];
        } else {
          log_den = unit + log(X::broadcast(den))[0];
        }
        if (wanted) *this->den(head, at + r) = log_den;
      }
      spare.factors[r] = factor;
    }
    const Rows<E> to = this->along(this->out->out, this->seq.q0, this->seq.q1, this->head0 + head);
    if (last > this->s.V) last = static_cast<int>(this->s.V);
    store_tile<T>(c.o + first, c.ldz, rows, last - first, to.at(at) + first, to.stride, spare.factors);
  }
};

// The gradient of a mapped input from that of its features, in c.o: through the map, added up over the group, stored.
template <class T, class E>
struct LinearInputGrad : LinearUnit<T, E> {
  using U = LinearUnit<T, E>;
  using typename U::V;
  using typename U::X;
  static constexpr bool kSums = false;

  bool by_columns() const { return this->args->map == FeatureMap::identity; }
  bool sums_wanted() const { return this->args->normalize || this->grads->dfinal_z.given(); }
  StateShape<T> state() const {
    return {static_cast<int>(this->s.V) + (sums_wanted() ? 1 : 0), static_cast<int>(this->s.F),
            this->s.shifted ? static_cast<int>(this->s.F) : 0};
  }
  // rows of the input x; shifted: log_den(r) is subtracted from the exponents. A masked key may hold anything: its row is 0 at
  // last.
  template <bool kKeys, class LogDen>
  void finish_rows(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c, Rows<E> x, const View& dx, Rows<E> to,
                   const LogDen& log_den, int first, int last) const {
    const auto spare = this->spare(c.spare);
    const int K = static_cast<int>(this->s.K);
    T* result = c.o;
    int64_t ld = c.ldz;
    if (this->s.shifted) {
      const T* unit = state_of + state().scanned();
      for (int r = 0; r < rows; ++r) {
        const T less = log_den(r);
        for (int j = 0; j < K; j += X::W) {
          const V e = X::load(x.at(at + r) + j, K - j) + X::load(unit + j) - X::broadcast(less);
          const V product = exp(e) * X::load(c.o + r * c.ldz + j);
          X::store(spare.dx + r * this->ldk() + j, less == minus_infinity<T>() ? X::zero() : product);
        }
      }
    } else if (this->args->map != FeatureMap::identity) {
      T* part = this->dw;
      if (part != nullptr) part += (this->n * this->s.Hq + this->s.q_head(this->head0 + head)) * this->s.F * this->ldk();
      for (int run = 0, end; run < rows; run = end) {  // runs of rows without a masked key, whose x must not reach dw
        for (end = run; end < rows && !(kKeys && this->masked(at + end)); ++end) {
        }
        map_rows_backward<T>(this->map(head), x.at(at + run), x.stride, end - run, c.o + run * c.ldz, c.ldz,
                             spare.dx + run * this->ldk(), part, spare.scratch);
        for (; end < rows && kKeys && this->masked(at + end); ++end) zero_row(spare.dx + end * this->ldk(), this->ldk());
      }
    }
    if (this->s.shifted || this->args->map != FeatureMap::identity) {
      result = spare.dx;
      ld = this->ldk();
    }
    if constexpr (kKeys) this->zero_masked(at, rows, result, ld);
    if (dx.given()) this->store_group(result, ld, head, at, rows, K, to, spare.sum, first, last);
  }
};

template <class T, class E>
struct LinearQueryGrad : LinearInputGrad<T, E> {
  using U = LinearUnit<T, E>;
  void ahead(int head, int64_t at, int rows, Ahead* next, int first = 0, int last = kUnbounded) const {
    this->gradient_ahead(U::Input::q, head, at, rows, next, first, last);
  }
  int64_t readers() const { return this->seq.q1 - this->seq.q0; }
  int64_t writers() const { return this->seq.k1 - this->seq.k0; }
  void begin(int head, T* state_of) const {
    this->load_state(this->state(), true, head, this->args->initial_state, this->args->initial_z, state_of);
  }
  void end(int, const T*) const {}
  int admit(int head, int64_t at, int rows, T* state_of, const Chunk<T>& c) const {
    if (!this->s.shifted) return rows;
    const auto spare = this->spare(c.spare);
    this->key_exponents(head, at, rows, spare.rows);
    rows = this->admit_exponents(this->state(), true, rows, spare.rows, spare.unit, state_of);
    this->exponentials(rows, spare.rows, state_of + this->state().scanned(), c.z, c.ldz);
    return rows;
  }
  void keys(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    this->value_rows(head, at, rows, this->sums_wanted(), spare.rows, this->ldv());
    load_tile_transposed<T>(static_cast<const T*>(spare.rows), this->ldv(), rows, this->state().I, c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    if (!this->s.shifted) this->key_features(head, at, rows, c.z, c.ldz, this->spare(c.spare).scratch);
    return rows_are_finite(c.z, c.ldz, rows, static_cast<int>(this->s.F));
  }
  void queries(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    this->incoming(head, at, rows, this->sums_wanted(), c.x, c.ldx);
  }
  void finish(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c, int first = 0,
              int last = kUnbounded) const {
    const View& dq = this->grads->dq;
    const Rows<E> to = dq.given() ? this->along(dq, this->seq.q0, this->seq.q1, this->s.q_head(this->head0 + head)) : Rows<E>{};
    this->template finish_rows<false>(
        head, at, rows, state_of, c, this->q(head), dq, to, [&](int r) { return *this->den(head, at + r); }, first, last);
  }
};

template <class T, class E>
struct LinearKeyGrad : LinearInputGrad<T, E> {
  using U = LinearUnit<T, E>;
  void ahead(int head, int64_t at, int rows, Ahead* next, int first = 0, int last = kUnbounded) const {
    this->gradient_ahead(U::Input::k, head, at, rows, next, first, last);
  }
  int64_t readers() const { return this->seq.k1 - this->seq.k0; }
  int64_t writers() const { return this->seq.q1 - this->seq.q0; }
  void begin(int head, T* state_of) const {
    this->load_state(this->state(), true, head, this->grads->dfinal_state, this->grads->dfinal_z, state_of);
  }
  void end(int head, const T* state_of) const {
    this->store_state(this->state(), true, head, View(), this->grads->dinitial_z, state_of);
  }
  int admit(int head, int64_t at, int rows, T* state_of, const Chunk<T>& c) const {
    if (!this->s.shifted) return rows;
    const auto spare = this->spare(c.spare);
    this->query_exponents(head, at, rows, spare.rows);
    rows = this->admit_exponents(this->state(), true, rows, spare.rows, spare.unit, state_of);
    this->exponentials(rows, spare.rows, state_of + this->state().scanned(), c.z, c.ldz);
    return rows;
  }
  void keys(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    this->incoming(head, at, rows, this->sums_wanted(), spare.rows, this->ldv());
    load_tile_transposed<T>(static_cast<const T*>(spare.rows), this->ldv(), rows, this->state().I, c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    if (!this->s.shifted) this->query_features(head, at, rows, c.z, c.ldz, this->spare(c.spare).scratch);
    return rows_are_finite(c.z, c.ldz, rows, static_cast<int>(this->s.F));
  }
  void queries(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    this->value_rows(head, at, rows, this->sums_wanted(), c.x, c.ldx);
  }
  void finish(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c, int first = 0,
              int last = kUnbounded) const {
    const View& dk = this->grads->dk;
    const Rows<E> to = dk.given() ? this->along(dk, this->seq.k0, this->seq.k1, this->s.k_head(this->head0 + head)) : Rows<E>{};
    this->zero_masked(at, rows, c.o, c.ldz);
    this->template finish_rows<true>(
        head, at, rows, state_of, c, this->k(head), dk, to, [](int) { return T(0); }, first, last);
  }
};

template <class T, class E>
struct LinearValueGrad : LinearUnit<T, E> {
  using U = LinearUnit<T, E>;
  using typename U::V;
  using typename U::X;
  static constexpr bool kSums = false;

  bool by_columns() const { return true; }
  int64_t readers() const { return this->seq.k1 - this->seq.k0; }
  int64_t writers() const { return this->seq.q1 - this->seq.q0; }
  StateShape<T> state() const {
    return {static_cast<int>(this->s.F), static_cast<int>(this->s.V), this->s.shifted ? static_cast<int>(this->s.F) : 0};
  }
  void ahead(int head, int64_t at, int rows, Ahead* next, int first = 0, int last = kUnbounded) const {
    this->gradient_ahead(U::Input::v, head, at, rows, next, first, last);
  }
  void begin(int head, T* state_of) const {
    this->load_state(state(), false, head, this->grads->dfinal_state, View(), state_of);
  }
  void end(int head, const T* state_of) const {
    this->store_state(state(), false, head, this->grads->dinitial_state, View(), state_of);
  }
  int admit(int head, int64_t at, int rows, T* state_of, const Chunk<T>& c) const {
    if (!this->s.shifted) return rows;
    const auto spare = this->spare(c.spare);
    this->query_exponents(head, at, rows, spare.rows);
    return this->admit_exponents(state(), false, rows, spare.rows, spare.unit, state_of);
  }
  void keys(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    if (this->args->map == FeatureMap::identity) {
      const Rows<E> from = this->q(head);
      return load_tile_transposed<T>(from.at(at), from.stride, rows, static_cast<int>(this->s.K), c.yt, kChunk);
    }
    if (this->s.shifted) {
      this->exponentials(rows, spare.rows, state_of + state().scanned(), spare.rows, this->ldf());
    } else {
      this->query_features(head, at, rows, spare.rows, this->ldf(), spare.scratch);
    }
    load_tile_transposed<T>(static_cast<const T*>(spare.rows), this->ldf(), rows, static_cast<int>(this->s.F), c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T*, const Chunk<T>& c) const {
    return this->incoming(head, at, rows, false, c.z, c.ldz);
  }
  void queries(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const auto spare = this->spare(c.spare);
    if (!this->s.shifted) return this->key_features(head, at, rows, c.x, c.ldx, spare.scratch);
    const int K = static_cast<int>(this->s.K);
    const T* unit = state_of + state().scanned();
    for (int r = 0; r < rows; ++r) {
      const E* from = this->k(head).at(at + r);
      for (int j = 0; j < K; j += X::W) X::store(c.x + r * c.ldx + j, exp(X::load(from + j, K - j) + X::load(unit + j)));
    }
    this->zero_masked(at, rows, c.x, c.ldx);
  }
  void finish(int head, int64_t at, int rows, const T*, const Chunk<T>& c, int first = 0, int last = kUnbounded) const {
    const View& dv = this->grads->dv;
    if (!dv.given()) return;
    const Rows<E> to = this->along(dv, this->seq.k0, this->seq.k1, this->s.v_head(this->head0 + head));
    this->store_group(c.o, c.ldz, head, at, rows, static_cast<int>(this->s.V), to, this->spare(c.spare).sum, first, last);
  }
};

}  // namespace linnet::LINNET_ISA
