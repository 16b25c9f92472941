// The walks of mapped.h (recurrence/cpu/walk.h): which rows read and write the state.
//
//            X reads         Y, Z write            state [I, J]      result
//   forward  phi(q)          phi(k), v             S      [F, V]     out, den; final states
//   query    g               [v | 1], phi(k)       S^T    [V+1, F]   dphi(q)
//   key      [v | 1]         g, phi(q)             R^T    [V+1, F]   dphi(k)     backward in time
//   value    phi(k)          phi(q), g             R      [F, V]     dv          backward in time
//
// g = [dout / den | -(dout . out) / den]; [max], where the clamp is active: the last entry is that of a constant den.
// Centred: forward and value have one more feature, 1 for every key (0 for the queries; in the value walk c_i): its row of S is
// the sum of the values. den is then n_i, and out in g the mean value zv_i / n_i.
#include "core/half.h"
#include "mapped.h"
#include "mechanisms/recurrence/cpu/decode.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

template <class T>
void load_rows(const View& view, int64_t offset, int64_t step, int rows, int cols, T* dst, int64_t ld) {
  if constexpr (sizeof(T) == 4) {
    switch (view.dtype) {
      case Dtype::bf16: return load_tile<T>(static_cast<const Bf16*>(view.data) + offset, step, rows, cols, dst, ld);
      case Dtype::f16: return load_tile<T>(static_cast<const F16*>(view.data) + offset, step, rows, cols, dst, ld);
      case Dtype::f32: return load_tile<T>(static_cast<const float*>(view.data) + offset, step, rows, cols, dst, ld);
      default: break;
    }
  } else {
    if (view.dtype == Dtype::f64) {
      return load_tile<T>(static_cast<const double*>(view.data) + offset, step, rows, cols, dst, ld);
    }
    if (view.dtype == Dtype::f32) {
      const float* src = static_cast<const float*>(view.data) + offset;
      for (int r = 0; r < rows; ++r, src += step) {
        for (int c = 0; c < cols; ++c) dst[r * ld + c] = static_cast<double>(src[c]);
        for (int64_t c = cols; c < round_up<T>(cols); ++c) dst[r * ld + c] = 0;
      }
      return;
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < round_up<T>(cols); ++c) {
      dst[r * ld + c] = c < cols ? static_cast<T>(load_f64(view.data, view.dtype, offset + r * step + c)) : T(0);
    }
  }
}

template <class T>
void store_rows(const T* src, int64_t ld, int rows, int cols, const View& view, int64_t offset, int64_t step, const T* scale) {
  if constexpr (sizeof(T) == 4) {
    switch (view.dtype) {
      case Dtype::bf16: return store_tile<T>(src, ld, rows, cols, static_cast<Bf16*>(view.data) + offset, step, scale);
      case Dtype::f16: return store_tile<T>(src, ld, rows, cols, static_cast<F16*>(view.data) + offset, step, scale);
      case Dtype::f32: return store_tile<T>(src, ld, rows, cols, static_cast<float*>(view.data) + offset, step, scale);
      default: break;
    }
  } else if (view.dtype == Dtype::f64) {
    return store_tile<T>(src, ld, rows, cols, static_cast<double*>(view.data) + offset, step, scale);
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; ++c) {
      const T x = scale == nullptr ? src[r * ld + c] : src[r * ld + c] * scale[r];
      store_f64(view.data, view.dtype, offset + r * step + c, static_cast<double>(x));
    }
  }
}

namespace {

enum class Kind { forward, query, key, value };

template <class T>
LINNET_INLINE bool finite_rows(const T* src, int64_t ld, int rows, int cols) {
  using X = Vec<T>;
  typename X::V watch = X::zero();  // x * 0 is 0, or NaN
  for (int r = 0; r < rows; ++r, src += ld) {
    for (int c = 0; c < cols; c += X::W) watch = fma(X::load(src + c, cols - c), X::zero(), watch);
  }
  return !any(is_nan(watch));
}

LINNET_INLINE double given_top(const View& tops, int64_t b, int64_t h) {  // f32, also where T is double
  return load_f64(tops.data, tops.dtype, b * tops.stride[0] + h * tops.stride[1]);
}
template <class T>
LINNET_INLINE void zero_row(T* row, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] = 0;
}

template <class T>
struct Mapped {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr bool kSums = true;

  const MappedCall<T>* call;
  Kind kind;
  int64_t b, head0;
  int count;
  const T* v0;     // [B, H, ldv]
  const T* k0;     // [B, H, ldf], centred only
  T* row_inverse;  // [B, H, T] centred, backward: 1 / n_i, e_i, c_i, written by the query walk
  T* row_e;
  T* row_c;
  const double* tops;  // maps with a stabiliser: [B, H], running: [B, H, S]

  int64_t tokens() const { return call->q.size[1]; }
  int64_t key_tokens() const { return call->k.size[1]; }
  int64_t H() const { return call->q.size[2]; }
  int K() const { return call->map.K; }
  int F() const { return call->map.F; }
  int width() const { return static_cast<int>(call->v.size[3]); }
  int ones() const { return call->normalizer != Normalizer::none || call->centred ? 1 : 0; }
  int extra() const { return call->centred ? 1 : 0; }
  int64_t ldk() const { return round_up<T>(K()); }
  int64_t ldf() const { return round_up<T>(F() + 1); }
  int64_t ldv() const { return round_up<T>(width() + 1); }
  bool running() const { return call->map.tops != nullptr && call->causal && call->rule == KeyTop::running; }
  bool reversed() const { return kind == Kind::key || kind == Kind::value; }

  // ---- what recurrence/cpu/walk.h asks

  int heads() const { return count; }
  bool causal() const { return call->causal; }
  int64_t readers() const { return kind == Kind::forward || kind == Kind::query ? tokens() : key_tokens(); }
  int64_t writers() const { return kind == Kind::forward || kind == Kind::query ? key_tokens() : tokens(); }
  StateShape<T> state() const {
    const int units = running() ? 1 : 0;
    if (kind == Kind::forward || kind == Kind::value) return {F() + extra(), width(), units};
    return {width() + ones(), F(), units};
  }
  struct Spare {
    T *x, *dx;   // [C, ldk]
    T* f;        // [C, ldf or ldv]
    T* o;        // [C, ldv]
    T* factors;  // [C]
    T* local;    // [ldf or ldv]
    T* scratch;  // of the map
    T* turned;   // [K, C], maps with a polynomial
  };
  Spare cut_spare(Arena& arena) const {
    const int64_t wide = ldf() > ldv() ? ldf() : ldv();
    Spare s;
    s.x = arena.take<T>(kChunk * ldk());
    s.dx = arena.take<T>(kChunk * ldk());
    s.f = arena.take<T>(kChunk * wide);
    s.o = arena.take<T>(kChunk * ldv());
    s.factors = arena.take<T>(kChunk);
    s.local = arena.take<T>(wide);
    s.scratch = arena.take<T>(call->map.scratch);
    s.turned = arena.take<T>(call->map.polynomial_scale != 0 ? K() * kChunk : 0);
    return s;
  }
  Spare spare(const Chunk<T>& c) const {
    Arena arena(reinterpret_cast<char*>(c.spare));
    return cut_spare(arena);
  }
  int64_t spare_elements() const {
    Arena arena;
    cut_spare(arena);
    return arena.used() / static_cast<int64_t>(sizeof(T));
  }
  // Running maxima: a chunk takes rows whose maxima differ by at most 60 (exp(60) squared is still a float), in units of the
  // largest (the smallest, backward in time), and the state is brought to these units.
  int admit(int head, int64_t at, int rows, T* state_of, const Chunk<T>&) const {
    if (!running()) return rows;
    const double* own = tops + (b * H() + head0 + head) * tokens();
    const double first = own[token(at, tokens())];
    int n = 1;
    for (; n < rows; ++n) {
      const double top = own[token(at + n, tokens())];
      if (top != first && !(__builtin_fabs(top - first) <= 60)) break;
    }
    const StateShape<T> shape = state();
    T& unit = state_of[shape.scanned()];
    const T next = static_cast<T>(own[token(at + n - 1, tokens())]);
    if (next == unit) return n;
    const double moved = static_cast<double>(next) - static_cast<double>(unit);  // infinite at first, when the state is zeros
    const T factor = static_cast<T>(__builtin_exp(moved < 0 ? moved : -moved));
    const bool across = shape.I != F() + extra() || kind == Kind::query || kind == Kind::key;
    for (int i = 0; i < shape.I; ++i) {
      if (!across && i + 1 == F()) break;
      if (!across) state_of[shape.sums() + i] *= factor;
      for (int j = 0; j < (across ? F() - 1 : shape.J); ++j) state_of[shape.at(i, j)] *= factor;
    }
    unit = next;
    return n;
  }
  void begin(int, T* state_of) const {
    for (int64_t i = 0; i < state().elements(); i += X::W) X::store(state_of + i, X::zero());
    if (running()) state_of[state().scanned()] = static_cast<T>(reversed() ? __builtin_inf() : -__builtin_inf());
  }
  void add_ahead(const View& view, int64_t length, int head, int64_t at, int rows, Ahead* ahead_of) const {
    if (rows <= 0 || !view.given()) return;
    const int64_t bytes = dtype_size(view.dtype), t = reversed() ? length - 1 - at : at;
    const int64_t offset = b * view.stride[0] + t * view.stride[1] + (head0 + head) * view.stride[2];
    ahead_of->add(static_cast<const char*>(view.data) + offset * bytes, (reversed() ? -1 : 1) * view.stride[1] * bytes,
                  view.size[3] * bytes, rows);
  }
  void ahead(int head, int64_t at, int rows, Ahead* ahead_of) const {
    if (kind != Kind::forward) add_ahead(call->dout, tokens(), head, at, rows, ahead_of);
    if (!call->centred || kind == Kind::forward) add_ahead(call->out, tokens(), head, at, rows, ahead_of);
    add_ahead(call->q, tokens(), head, at, rows, ahead_of);
    add_ahead(call->v, key_tokens(), head, at, rows, ahead_of);
    add_ahead(call->k, key_tokens(), head, at, rows, ahead_of);
  }
  void keys(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    int64_t ld = ldv();
    switch (kind) {
      case Kind::forward: key_features(head, at, rows, state_of, s.f, ld = ldf(), s); break;
      case Kind::query: value_rows(head, at, rows, true, s.f, ld); break;
      case Kind::key: incoming(head, at, rows, true, state_of, s.f, ld, s); break;
      case Kind::value: query_features(head, at, rows, state_of, s.f, ld = ldf(), s); break;
    }
    load_tile_transposed<T>(static_cast<const T*>(s.f), ld, rows, state().I, c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    switch (kind) {
      case Kind::forward: value_rows(head, at, rows, false, c.z, c.ldz); break;
      case Kind::query: key_features(head, at, rows, state_of, c.z, c.ldz, s); break;
      case Kind::key: query_features(head, at, rows, state_of, c.z, c.ldz, s); break;
      case Kind::value: incoming(head, at, rows, false, state_of, c.z, c.ldz, s); break;
    }
    return finite_rows(c.z, c.ldz, rows, state().J);
  }
  void queries(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    switch (kind) {
      case Kind::forward: return query_features(head, at, rows, state_of, c.x, c.ldx, s);
      case Kind::query: return incoming(head, at, rows, true, state_of, c.x, c.ldx, s);
      case Kind::key: return value_rows(head, at, rows, true, c.x, c.ldx);
      case Kind::value: return key_features(head, at, rows, state_of, c.x, c.ldx, s);
    }
  }

  // Weights of a chunk from s = scale q.k (forward, value). The rows that read stand in spare.x, as queries() left them.
  bool scores(int head, int64_t at, int rows, const Chunk<T>& c) const {
    const double scale = call->map.polynomial_scale;
    if (scale == 0 || (kind != Kind::forward && kind != Kind::value)) return false;
    const Spare s = spare(c);
    const bool keys_read = kind == Kind::value;
    load(keys_read ? call->q : call->k, keys_read ? tokens() : key_tokens(), head, at, rows, s.dx, ldk());
    if (!keys_read) zero_masked(at, rows, s.dx, ldk(), ldk());
    load_tile_transposed<T>(static_cast<const T*>(s.dx), ldk(), rows, K(), s.turned, kChunk);
    gemm<T>(rows, rows, K(), as_is(static_cast<const T*>(s.x), ldk()), s.turned, kChunk, c.p, kChunk, Store{}, ColumnsTo{1});
    const V factor = X::broadcast(static_cast<T>(scale)), half = X::broadcast(T(0.5)), one = X::broadcast(1);
    for (int r = 0; r < rows; ++r) {
      T* row = c.p + r * kChunk;
      for (int j = 0; j < rows; j += X::W) {
        const V x = X::load(row + j) * factor;
        X::store(row + j, fma(fma(half, x, one), x, one));
      }
      for (int j = 0; call->key_mask.given() && j < rows; ++j) row[j] = masked(at + (keys_read ? r : j)) ? T(0) : row[j];
    }
    return true;
  }

  // ---- rows along the walk

  int64_t token(int64_t at, int64_t length) const { return reversed() ? length - 1 - at : at; }
  int64_t offset(const View& view, int64_t length, int head, int64_t at) const {
    return b * view.stride[0] + token(at, length) * view.stride[1] + (head0 + head) * view.stride[2];
  }
  void load(const View& view, int64_t length, int head, int64_t at, int rows, T* dst, int64_t ld) const {
    load_rows<T>(view, offset(view, length, head, at), (reversed() ? -1 : 1) * view.stride[1], rows,
                 static_cast<int>(view.size[3]), dst, ld);
  }
  void store(const T* src, int64_t ld, int rows, const View& view, int64_t length, int head, int64_t at) const {
    if (!view.given()) return;
    store_rows<T>(src, ld, rows, static_cast<int>(view.size[3]), view, offset(view, length, head, at),
                  (reversed() ? -1 : 1) * view.stride[1], nullptr);
  }
  bool masked(int64_t at) const {
    return call->key_mask.given() && *call->key_mask.template at<const uint8_t>(b, token(at, key_tokens())) == 0;
  }
  void zero_masked(int64_t at, int rows, T* dst, int64_t ld, int64_t n) const {
    if (!call->key_mask.given()) return;
    for (int r = 0; r < rows; ++r) {
      if (masked(at + r)) zero_row(dst + r * ld, n);
    }
  }
  MapRows rows_of(bool key, int head, int64_t at, int rows, const T* state_of) const {
    MapRows r{b, head0 + head, token(at, key ? key_tokens() : tokens()), reversed() ? -1 : 1, key, rows};
    const int64_t unit = b * H() + head0 + head;
    if (running()) {
      r.tops = tops + unit * tokens();
      r.unit = static_cast<double>(state_of[state().scanned()]);
    } else if (call->map.tops != nullptr) {
      r.unit = tops[unit];
    }
    return r;
  }
  const T* mean_value(int head) const { return v0 + (b * H() + head0 + head) * ldv(); }
  const T* mean_key(int head) const { return k0 + (b * H() + head0 + head) * ldf(); }
  int64_t row_index(int head, int64_t at) const { return (b * H() + head0 + head) * tokens() + token(at, tokens()); }

  // phi(q); centred: and 0, or c_i in the value walk.
  void query_features(int head, int64_t at, int rows, const T* state_of, T* f, int64_t ld, const Spare& s) const {
    load(call->q, tokens(), head, at, rows, s.x, ldk());
    call->map.apply(call->map.self, rows_of(false, head, at, rows, state_of), s.x, ldk(), f, ld, s.scratch);
    if (!call->centred || kind == Kind::key) return;
    for (int r = 0; r < rows; ++r) f[r * ld + F()] = kind == Kind::value ? row_c[row_index(head, at + r)] : T(0);
  }
  // phi(k), 0 for masked keys; centred: phi(k) - k0 and, as a feature of forward and value walks, 1.
  void key_features(int head, int64_t at, int rows, const T* state_of, T* f, int64_t ld, const Spare& s) const {
    load(call->k, key_tokens(), head, at, rows, s.x, ldk());
    zero_masked(at, rows, s.x, ldk(), ldk());
    call->map.apply(call->map.self, rows_of(true, head, at, rows, state_of), s.x, ldk(), f, ld, s.scratch);
    const int64_t own = F() + (kind == Kind::query ? 0 : extra());
    if (call->centred) {
      const T* mean = mean_key(head);
      for (int r = 0; r < rows; ++r) {
        T* row = f + r * ld;
        for (int c = 0; c < F(); c += X::W) X::store(row + c, X::load(row + c, F() - c) - X::load(mean + c, F() - c), F() - c);
        if (kind != Kind::query) row[F()] = 1;
      }
    }
    zero_masked(at, rows, f, ld, own);
  }
  // v - v0, with 1 behind where it is wanted; 0 for masked keys.
  void value_rows(int head, int64_t at, int rows, bool one, T* dst, int64_t ld) const {
    load(call->v, key_tokens(), head, at, rows, dst, ld);
    const T* mean = mean_value(head);
    for (int r = 0; r < rows; ++r) {
      T* row = dst + r * ld;
      for (int c = 0; c < width(); c += X::W) X::store(row + c, X::load(row + c) - X::load(mean + c));
      if (one && ones()) row[width()] = 1;
    }
    zero_masked(at, rows, dst, ld, width() + (one ? ones() : 0));
  }
  T saved_den(int head, int64_t at) const {
    const View& den = call->den;
    return static_cast<T>(load_f64(den.data, den.dtype,
                                   b * den.stride[0] + token(at, tokens()) * den.stride[1] + (head0 + head) * den.stride[2]));
  }
  // g, with its last entry where it is wanted.
  void incoming(int head, int64_t at, int rows, bool last, const T* state_of, T* dst, int64_t ld, const Spare& s) const {
    const int w = width();
    if (!call->dout.given()) {
      for (int r = 0; r < rows; ++r) zero_row(dst + r * ld, w + ones());
      if (call->centred && kind == Kind::query) centred_rows(head, at, rows, state_of, dst, ld, s);
      return;
    }
    load(call->dout, tokens(), head, at, rows, dst, ld);
    if (call->centred) {
      if (kind == Kind::query) return centred_rows(head, at, rows, state_of, dst, ld, s);
      for (int r = 0; r < rows; ++r) {
        T* row = dst + r * ld;
        const int64_t i = row_index(head, at + r);
        const V inverse = X::broadcast(row_inverse[i]);
        for (int c = 0; c < w; c += X::W) X::store(row + c, X::load(row + c) * inverse);
        if (last) row[w] = -row_e[i] * row_inverse[i];
      }
      return;
    }
    if (call->normalizer == Normalizer::none) return;
    const T* mean = mean_value(head);
    const T eps = static_cast<T>(call->eps);
    if (last) load(call->out, tokens(), head, at, rows, s.o, ldv());
    for (int r = 0; r < rows; ++r) {
      T* row = dst + r * ld;
      const T den = saved_den(head, at + r);
      const V inverse = X::broadcast(den == 0 ? T(0) : 1 / den);
      const bool clamped = call->normalizer == Normalizer::max && den <= eps * static_cast<T>(1 + 0x1p-23);  // saved in f32
      V dot = X::zero();
      for (int c = 0; c < w; c += X::W) {
        const V g = X::load(row + c, w - c) * inverse;
        X::store(row + c, g);
        if (last) {
          const V less = X::load(mean + c), o = clamped ? -less : X::load(s.o + r * ldv() + c, w - c) - less;
          dot = fma(g, o, dot);
        }
      }
      if (last) row[w] = -sum(dot);
    }
  }
  // Centred, the query walk: g = [G / n | -e / n], e = G.zv / n, from the sums before the chunk and those inside it.
  void centred_rows(int head, int64_t at, int rows, const T* state_of, T* dst, int64_t ld, const Spare& s) const {
    const int w = width();
    const T* sums = state_of + state().sums();  // zv, n
    T n = sums[w];
    T* zv = s.local;
    for (int c = 0; c < w; ++c) zv[c] = 0;
    if (causal()) value_rows(head, at, rows, false, s.o, ldv());
    for (int r = 0; r < rows; ++r) {
      T* row = dst + r * ld;
      if (causal()) {
        n += masked(at + r) ? T(0) : T(1);
        for (int c = 0; c < w; c += X::W) X::store(zv + c, X::load(zv + c) + X::load(s.o + r * ldv() + c));
      }
      const T inverse = n == 0 ? T(0) : 1 / n;
      V dot = X::zero();
      for (int c = 0; c < w; c += X::W) {
        const V g = X::load(row + c, w - c);
        dot = fma(g, X::load(sums + c, w - c) + X::load(zv + c, w - c), dot);
        X::store(row + c, g * X::broadcast(inverse));
      }
      const T e = sum(dot) * inverse;
      row[w] = -e * inverse;
      row_inverse[row_index(head, at + r)] = inverse;
      row_e[row_index(head, at + r)] = e;
    }
  }

  // ---- results

  void finish(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    switch (kind) {
      case Kind::forward:
        return call->centred ? finish_centred(head, at, rows, state_of, c) : finish_forward(head, at, rows, c);
      case Kind::query:
        if (call->centred) remember_c(head, at, rows, state_of, c);
        return finish_input(false, head, at, rows, state_of, c, call->q, call->dq);
      case Kind::key: return finish_input(true, head, at, rows, state_of, c, call->k, call->dk);
      case Kind::value:
        zero_masked(at, rows, c.o, c.ldz, width());
        return store(c.o, c.ldz, rows, call->dv, key_tokens(), head, at);
    }
  }
  // o = (num' + d v0) / den
  void finish_forward(int head, int64_t at, int rows, const Chunk<T>& c) const {
    const T eps = static_cast<T>(call->eps);
    const T* mean = mean_value(head);
    const View& dens = call->den;
    for (int r = 0; r < rows; ++r) {
      T* row = c.o + r * c.ldz;
      const T d = c.n[r];
      T den = 1;
      if (call->normalizer != Normalizer::none) {
        const bool add = call->normalizer == Normalizer::add;
        den = add ? d + eps : d > eps || d != d ? d : eps;
        const T inverse = den == 0 || d == 0 ? T(0) : 1 / den, share = d * inverse;  // share: of v0, the weights' sum over den
        for (int j = 0; j < width(); j += X::W) {
          X::store(row + j, fma(X::load(row + j), X::broadcast(inverse), X::load(mean + j) * X::broadcast(share)));
        }
      }
      if (dens.given()) {
        store_f64(dens.data, dens.dtype, b * dens.stride[0] + (at + r) * dens.stride[1] + (head0 + head) * dens.stride[2],
                  static_cast<double>(den));
      }
    }
    store(c.o, c.ldz, rows, call->out, tokens(), head, at);
  }
  // o = v0 + (s q S + (1 - s q.zk / n) zv) / n
  void finish_centred(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    const StateShape<T> shape = state();
    const int w = width();
    const T* mean = mean_value(head);
    T n = state_of[shape.sums() + F()];
    T* zv = s.local;
    for (int j = 0; j < w; ++j) zv[j] = 0;
    for (int r = 0; r < rows; ++r) {
      T* row = c.o + r * c.ldz;
      if (causal()) {
        n += masked(at + r) ? T(0) : T(1);
        for (int j = 0; j < w; j += X::W) X::store(zv + j, X::load(zv + j) + X::load(c.z + r * c.ldz + j));
      }
      const T inverse = n == 0 ? T(0) : 1 / n, rest = (1 - c.n[r] * inverse) * inverse;
      for (int j = 0; j < w; j += X::W) {
        const V before = X::load(state_of + shape.at(F(), j));
        V o = fma(X::load(row + j), X::broadcast(inverse), (before + X::load(zv + j)) * X::broadcast(rest));
        X::store(row + j, n == 0 ? X::zero() : o + X::load(mean + j));
      }
    }
    store(c.o, c.ldz, rows, call->out, tokens(), head, at);
  }
  // c_i = 1 - s q.zk_i / n_i
  void remember_c(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    const StateShape<T> shape = state();
    query_features(head, at, rows, state_of, s.f, ldf(), s);
    T* zk = s.local;
    for (int j = 0; j < F(); ++j) zk[j] = 0;
    for (int r = 0; r < rows; ++r) {
      V dot = X::zero();
      for (int j = 0; j < F(); j += X::W) {
        if (causal()) X::store(zk + j, X::load(zk + j) + X::load(c.z + r * c.ldz + j, F() - j));
        const V sum_of = X::load(state_of + shape.at(width(), j), F() - j) + X::load(zk + j, F() - j);
        dot = fma(X::load(s.f + r * ldf() + j, F() - j), sum_of, dot);
      }
      const int64_t i = row_index(head, at + r);
      row_c[i] = 1 - sum(dot) * row_inverse[i];
    }
  }
  // dx from dphi, which stands in c.o.
  void finish_input(bool key, int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c, const View& x,
                    const View& dx) const {
    const Spare s = spare(c);
    T* part = nullptr;
    if (call->dparam != nullptr && call->wants_params) {
      const int64_t units = call->q.size[0] * H();
      part = call->dparam + ((key ? units : 0) + b * H() + head0 + head) * call->map.params;
    }
    if (!dx.given() && part == nullptr) return;
    load(x, key ? key_tokens() : tokens(), head, at, rows, s.x, ldk());
    if (key) {
      zero_masked(at, rows, s.x, ldk(), ldk());
      zero_masked(at, rows, c.o, c.ldz, F());
    }
    call->map.backward(call->map.self, rows_of(key, head, at, rows, state_of), s.x, ldk(), c.o, c.ldz, s.dx, part, s.scratch);
    if (key) zero_masked(at, rows, s.dx, ldk(), ldk());
    store(s.dx, ldk(), rows, dx, key ? key_tokens() : tokens(), head, at);
  }

  void end(int head, const T* state_of) const {
    if (kind != Kind::forward) return;
    const StateShape<T> shape = state();
    const int64_t h = head0 + head;
    const T* mean = mean_value(head);
    const T* z = state_of + shape.sums();
    if (call->centred) return end_centred(head, state_of, shape);
    for (int i = 0; i < F() - (running() ? 1 : 0); ++i) {
      const View &to_z = call->final_z, &to = call->final_state;  // f32 also where T is double
      if (to_z.given()) {
        store_f64(to_z.data, to_z.dtype, b * to_z.stride[0] + h * to_z.stride[1] + i * to_z.stride[2],
                  static_cast<double>(z[i]));
      }
      for (int j = 0; to.given() && j < width(); ++j) {
        store_f64(to.data, to.dtype, b * to.stride[0] + h * to.stride[1] + i * to.stride[2] + j,
                  static_cast<double>(state_of[shape.at(i, j)] + z[i] * mean[j]));
      }
    }
  }
  // The means are written where they are taken.
  void end_centred(int head, const T* state_of, const StateShape<T>& shape) const {
    const int64_t h = head0 + head;
    const T* z = state_of + shape.sums();
    const T n = z[F()], inverse = n == 0 ? T(0) : 1 / n;
    if (call->final_count.given()) *call->final_count.template at<T>(b, h) = n;
    for (int i = 0; i < F(); ++i) {
      for (int j = 0; call->final_state.given() && j < width(); ++j) {
        const T zv = state_of[shape.at(F(), j)];
        call->final_state.template at<T>(b, h, i)[j] = state_of[shape.at(i, j)] - z[i] * inverse * zv;
      }
    }
  }
};

// ---- the plan of a pass

template <class T>
struct Job {
  bool wanted = false;
  Kind kind = Kind::forward;
  int heads = 0;  // of a unit; see linear_cpu.cc: neighbouring heads walk together while their states fit
  int64_t groups = 0;
};

template <class T>
struct Plan {
  MappedCall<T> call;
  Job<T> jobs[3];
  int count = 0;
  bool ladder = false;
  int64_t worker_bytes = 0;
  T *v0 = nullptr, *k0 = nullptr, *row_inverse = nullptr, *row_e = nullptr, *row_c = nullptr;
  double *tops = nullptr, *sums = nullptr;  // sums: [B, H, ldf or ldv]
  char* workers = nullptr;
  T *states = nullptr, *window = nullptr;

  Mapped<T> source(Kind kind) const { return {&call, kind, 0, 0, 1, v0, k0, row_inverse, row_e, row_c, tops}; }
  int64_t B() const { return call.q.size[0]; }
  int64_t H() const { return call.q.size[2]; }
  int64_t units(const Job<T>& job) const { return job.wanted ? B() * job.groups : 0; }
  Mapped<T> unit(const Job<T>& job, int64_t i) const {
    Mapped<T> s = source(job.kind);
    s.b = i / job.groups;
    s.head0 = i % job.groups * job.heads;
    s.count = static_cast<int>(H() - s.head0 < job.heads ? H() - s.head0 : job.heads);
    return s;
  }
};

template <class T>
void add_job(Plan<T>& plan, Kind kind, bool wanted, int workers) {
  Job<T>& job = plan.jobs[plan.count++];
  job.wanted = wanted && plan.H() > 0 && plan.B() > 0;
  job.kind = kind;
  if (!job.wanted) return;
  const int64_t bytes = plan.source(kind).state().elements() * static_cast<int64_t>(sizeof(T));
  const int64_t per_row = (workers + plan.B() - 1) / plan.B(), spread = (plan.H() + per_row - 1) / per_row;
  const int64_t fits = (int64_t{512} << 10) / (bytes + 1);
  job.heads = static_cast<int>(spread < fits ? spread : fits > 1 ? fits : 1);
  job.groups = (plan.H() + job.heads - 1) / job.heads;
}

template <class T>
Plan<T> plan_of(Arena& arena, const MappedCall<T>& call, bool backward, int workers) {
  Plan<T> plan;
  plan.call = call;
  const bool params = call.wants_params;
  if (!backward) {
    add_job(plan, Kind::forward, true, workers);
  } else {
    add_job(plan, Kind::query, call.dq.given() || params || call.centred, workers);
    add_job(plan, Kind::key, !call.queries_only && (call.dk.given() || params), workers);
    add_job(plan, Kind::value, !call.queries_only && call.dv.given(), workers);
  }
  const int64_t heads = plan.B() * plan.H(), T0 = call.q.size[1], S = call.k.size[1];
  const Mapped<T> any_kind = plan.source(Kind::forward);
  plan.v0 = arena.take<T>(heads * any_kind.ldv());
  if (call.centred) plan.k0 = arena.take<T>(heads * any_kind.ldf());
  if (call.centred && backward) {
    for (T** row : {&plan.row_inverse, &plan.row_e, &plan.row_c}) *row = arena.take<T>(heads * T0);
  }
  plan.sums = arena.take<double>(heads * (any_kind.ldf() > any_kind.ldv() ? any_kind.ldf() : any_kind.ldv()));
  if (call.map.tops != nullptr) plan.tops = arena.take<double>(heads * (any_kind.running() ? S : 1));
  int64_t units = 0, states = 0, window = 0;
  for (int i = 0; i < plan.count; ++i) units += plan.units(plan.jobs[i]);
  // A parameter's gradient is added up along the walk, in order.
  plan.ladder = prefer_ladder(units, (T0 > S ? T0 : S) / kChunk, workers) && !params && !any_kind.running();
  for (int i = 0; i < plan.count; ++i) {
    const Job<T>& job = plan.jobs[i];
    if (!job.wanted) continue;
    const Mapped<T> source = plan.source(job.kind);
    const StateShape<T> shape = source.state();
    const int64_t elements = job.heads * shape.elements();
    Arena own;
    Chunk<T>::cut(own, shape.I, shape.J, source.spare_elements());
    if (!plan.ladder) own.take<T>(elements);
    if (own.used() > plan.worker_bytes) plan.worker_bytes = own.used();
    if (elements > states) states = elements;
    const int64_t part = plan.ladder ? ladder_window(shape, job.heads, workers) * elements : 0;
    if (part > window) window = part;
  }
  plan.workers = arena.take<char>(workers * plan.worker_bytes);
  if (plan.ladder) {
    plan.states = arena.take<T>(states);
    plan.window = arena.take<T>(window);
  }
  return plan;
}

template <class T>
Chunk<T> chunk_of(const Plan<T>& plan, int worker, const Mapped<T>& source, T** states) {
  Arena arena(plan.workers + worker * plan.worker_bytes);
  const StateShape<T> shape = source.state();
  const Chunk<T> chunk = Chunk<T>::cut(arena, shape.I, shape.J, source.spare_elements());
  if (states != nullptr) *states = arena.take<T>(source.count * shape.elements());
  return chunk;
}

constexpr double kLargestMean = 1e12;
// v0 and k0: means of the first chunk of keys that take part; of all keys for k0 and v0 of a centred call that is not causal,
// where they leave nothing to cancel. 0 where they would not be finite, and in a forward that is not centred (unless it is
// asked for): its weighted means cancel nothing. Sums in double: the means over all keys are results of a centred forward, and
// may be small beside the keys.
template <class T>
void take_means(const Plan<T>& plan, bool backward, const Launch& launch) {
  const MappedCall<T>& call = plan.call;
  const int64_t S = call.k.size[1], part = call.centred && !call.causal ? S : S < kChunk ? S : kChunk;
  parallel(launch, plan.B() * plan.H(), [&](int64_t task, int worker) {
    Mapped<T> source = plan.source(Kind::query);  // plain phi(k): the mean is taken off below
    source.b = task / plan.H();
    source.head0 = task % plan.H();
    T* v0 = plan.v0 + task * source.ldv();
    T* k0 = call.centred ? plan.k0 + task * source.ldf() : nullptr;
    for (int64_t c = 0; c < source.ldv(); ++c) v0[c] = 0;
    for (int64_t c = 0; call.centred && c < source.ldf(); ++c) k0[c] = 0;
    if (!call.centred && ((call.normalizer == Normalizer::none && !call.shares) || (!backward && !call.forward_mean))) return;
    const Mapped<T> biggest = plan.source(plan.jobs[0].wanted   ? plan.jobs[0].kind
                                          : plan.jobs[1].wanted ? Kind::key
                                                                : Kind::value);
    const Chunk<T> chunk = chunk_of<T>(plan, worker, biggest, nullptr);
    const auto s = source.spare(chunk);
    double* sums = plan.sums + task * (source.ldf() > source.ldv() ? source.ldf() : source.ldv());
    // use(c, mean) of each column, over the first `rows` keys
    const auto mean = [&](bool keys, int width, int64_t rows, const auto& use) {
      int64_t kept = 0;
      for (int c = 0; c < width; ++c) sums[c] = 0;
      for (int64_t at = 0; at < rows; at += kChunk) {
        const int n = chunk_rows(at, rows);
        const int64_t ld = keys ? source.ldf() : source.ldv();
        if (keys) {
          source.key_features(0, at, n, nullptr, s.f, ld, s);  // k0 is still 0
        } else {
          source.value_rows(0, at, n, false, s.f, ld);
        }
        for (int r = 0; r < n; ++r) {
          if (source.masked(at + r)) continue;
          ++kept;
          for (int c = 0; c < width; ++c) sums[c] += static_cast<double>(s.f[r * ld + c]);
        }
      }
      for (int c = 0; c < width; ++c) use(c, kept == 0 ? 0 : sums[c] / static_cast<double>(kept));
    };
    const auto put_final = [&](const View& to) {
      return [&, data = to.template at<T>(source.b, source.head0)](int c, double x) { data[c] = static_cast<T>(x); };
    };
    // Not the mean of a token that is infinite, or whose features ended at their bound: what is taken off every row would then
    // leave nothing of the others.
    const auto put_mean = [](T* to) {
      return [to](int c, double x) { to[c] = __builtin_fabs(x) < kLargestMean ? static_cast<T>(x) : T(0); };
    };
    if (call.final_v.given()) mean(false, source.width(), S, put_final(call.final_v));
    if (call.centred && call.final_z.given()) mean(true, source.F(), S, put_final(call.final_z));
    mean(false, source.width(), part, put_mean(v0));
    if (call.centred) mean(true, source.F(), part, put_mean(k0));
  });
}

// The largest exponent over each head's keys, or its running maximum.
template <class T>
void take_tops(const Plan<T>& plan, const Launch& launch) {
  const MappedCall<T>& call = plan.call;
  if (call.map.tops == nullptr) return;
  const int64_t S = call.k.size[1];
  parallel(launch, plan.B() * plan.H(), [&](int64_t task, int worker) {
    const Mapped<T> biggest = plan.source(plan.jobs[0].wanted   ? plan.jobs[0].kind
                                          : plan.jobs[1].wanted ? Kind::key
                                                                : Kind::value);
    const Chunk<T> chunk = chunk_of<T>(plan, worker, biggest, nullptr);
    Mapped<T> source = plan.source(Kind::query);
    source.b = task / plan.H();
    source.head0 = task % plan.H();
    const auto s = source.spare(chunk);
    if (call.rule == KeyTop::given) {
      plan.tops[task] = given_top(call.key_tops, source.b, source.head0);
      return;
    }
    double top = -__builtin_inf();
    for (int64_t at = 0; at < S; at += kChunk) {
      const int n = chunk_rows(at, S);
      double rows[kChunk];
      source.load(call.k, S, 0, at, n, s.x, source.ldk());
      source.zero_masked(at, n, s.x, source.ldk(), source.ldk());
      call.map.tops(call.map.self, {source.b, source.head0, at, 1, true, n}, s.x, source.ldk(), rows, s.scratch);
      for (int r = 0; r < n; ++r) {
        if (!source.masked(at + r) && rows[r] > top && rows[r] < __builtin_inf()) top = rows[r];
        if (source.running()) plan.tops[task * S + at + r] = top;
      }
    }
    if (!source.running()) plan.tops[task] = top;
  });
}

template <class T>
void run_jobs(const Plan<T>& plan, const Launch& launch, int first, int last) {
  if (plan.ladder) {
    for (int j = first; j < last; ++j) {
      for (int64_t i = 0; i < plan.units(plan.jobs[j]); ++i) {
        const Mapped<T> source = plan.unit(plan.jobs[j], i);
        walk_ladder<T>(source, plan.states, plan.window, launch,
                       [&](int worker) { return chunk_of<T>(plan, worker, source, nullptr); });
      }
    }
    return;
  }
  int64_t tasks = 0;
  for (int j = first; j < last; ++j) tasks += plan.units(plan.jobs[j]);
  parallel(launch, tasks, [&](int64_t task, int worker) {
    int j = first;
    for (; task >= plan.units(plan.jobs[j]); ++j) task -= plan.units(plan.jobs[j]);
    const Mapped<T> source = plan.unit(plan.jobs[j], task);
    T* states;
    const Chunk<T> chunk = chunk_of(plan, worker, source, &states);
    walk<T>(source, states, chunk);
  });
}

}  // namespace

template <class T>
int64_t mapped_forward_bytes(const MappedCall<T>& call, int workers) {
  Arena arena;
  plan_of(arena, call, false, workers);
  return arena.used();
}
template <class T>
void mapped_forward(const MappedCall<T>& call, const Launch& launch) {
  Arena arena(launch.workspace);
  const Plan<T> plan = plan_of(arena, call, false, launch.workers);
  if (!plan.jobs[0].wanted) return;
  take_means(plan, false, launch);
  take_tops(plan, launch);
  run_jobs(plan, launch, 0, plan.count);
}

template <class T>
int64_t mapped_backward_bytes(const MappedCall<T>& call, int workers) {
  // The gradients that will be asked for are not known here, and fewer of them may need more (the ladder): take the most.
  int64_t most = 0;
  for (int wanted = 0; wanted < 16; ++wanted) {
    MappedCall<T> some = call;
    some.dq = wanted & 1 ? call.q : View();
    some.dk = wanted & 2 ? call.k : View();
    some.dv = wanted & 4 ? call.v : View();
    some.wants_params = (wanted & 8) != 0 && call.map.params > 0;
    Arena arena;
    plan_of(arena, some, true, workers);
    if (arena.used() > most) most = arena.used();
  }
  return most;
}
template <class T>
void mapped_backward(const MappedCall<T>& call, const Launch& launch) {
  Arena arena(launch.workspace);
  const Plan<T> plan = plan_of(arena, call, true, launch.workers);
  if (call.wants_params) {
    for (int64_t i = 0; i < 2 * plan.B() * plan.H() * call.map.params; ++i) call.dparam[i] = 0;
  }
  if (!plan.jobs[0].wanted && !plan.jobs[1].wanted && !plan.jobs[2].wanted) return;
  take_means(plan, true, launch);
  take_tops(plan, launch);
  if (call.centred) {  // the others read what the query walk remembers of its rows
    run_jobs(plan, launch, 0, 1);
    return run_jobs(plan, launch, 1, plan.count);
  }
  run_jobs(plan, launch, 0, plan.count);
}

// ---- rows alone

template <class T>
int64_t mapped_features_bytes(const RowMap<T>& map, int workers) {
  Arena arena;
  arena.take<T>(kChunk * round_up<T>(map.K));
  arena.take<T>(kChunk * round_up<T>(map.F));
  arena.take<T>(map.scratch);
  return workers * arena.used();
}
template <class T>
void mapped_features(const RowMap<T>& map, const View& x, bool key, const double* units, const View& out,
                     const Launch& launch) {
  const int64_t each = mapped_features_bytes(map, 1), H = x.size[2], length = x.size[1];
  const int64_t chunks = (length + kChunk - 1) / kChunk;
  parallel(launch, x.size[0] * H * chunks, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * each);
    T* rows_x = arena.take<T>(kChunk * round_up<T>(map.K));
    T* rows_f = arena.take<T>(kChunk * round_up<T>(map.F));
    T* scratch = arena.take<T>(map.scratch);
    const int64_t b = task / (H * chunks), h = task / chunks % H, at = task % chunks * kChunk;
    const int n = chunk_rows(at, length);
    load_rows<T>(x, b * x.stride[0] + at * x.stride[1] + h * x.stride[2], x.stride[1], n, map.K, rows_x, round_up<T>(map.K));
    map.apply(map.self, {b, h, at, 1, key, n, units == nullptr ? 0 : units[b * H + h]}, rows_x, round_up<T>(map.K), rows_f,
              round_up<T>(map.F), scratch);
    store_rows<T>(rows_f, round_up<T>(map.F), n, static_cast<int>(out.size[3]), out,
                  b * out.stride[0] + at * out.stride[1] + h * out.stride[2], out.stride[1], nullptr);
  });
}

template <class T>
void mapped_units(const RowMap<T>& map, const View& k, const View& key_mask, const View& key_tops, double* units,
                  const Launch& launch) {
  const int64_t each = mapped_features_bytes(map, 1), H = k.size[2], S = k.size[1];
  parallel(launch, k.size[0] * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    if (key_tops.given()) {
      units[task] = given_top(key_tops, b, h);
      return;
    }
    Arena arena(launch.workspace + worker * each);
    T* rows_x = arena.take<T>(kChunk * round_up<T>(map.K));
    arena.take<T>(kChunk * round_up<T>(map.F));
    T* scratch = arena.take<T>(map.scratch);
    double top = -__builtin_inf();
    for (int64_t at = 0; at < S; at += kChunk) {
      const int n = chunk_rows(at, S);
      double rows[kChunk];
      load_rows<T>(k, b * k.stride[0] + at * k.stride[1] + h * k.stride[2], k.stride[1], n, map.K, rows_x, round_up<T>(map.K));
      map.tops(map.self, {b, h, at, 1, true, n}, rows_x, round_up<T>(map.K), rows, scratch);
      for (int r = 0; r < n; ++r) {
        const bool masked = key_mask.given() && *key_mask.template at<const uint8_t>(b, at + r) == 0;
        if (!masked && rows[r] > top && rows[r] < __builtin_inf()) top = rows[r];
      }
    }
    units[task] = top == -__builtin_inf() ? 0 : top;
  });
}

// ---- decode

namespace {
template <class T>
struct DecodeScratch {
  T *x, *q, *k, *v, *o, *scratch;
};
template <class T>
DecodeScratch<T> cut_decode(Arena& arena, const MappedDecode<T>& call) {
  DecodeScratch<T> s;
  s.x = arena.take<T>(round_up<T>(call.map.K));
  s.q = arena.take<T>(round_up<T>(call.map.F));
  s.k = arena.take<T>(round_up<T>(call.map.F));
  s.v = arena.take<T>(round_up<T>(call.v.size[3]));
  s.o = arena.take<T>(round_up<T>(call.v.size[3]));
  s.scratch = arena.take<T>(call.map.scratch);
  return s;
}
}  // namespace

template <class T>
int64_t mapped_decode_bytes(const MappedDecode<T>& call, int workers) {
  Arena arena;
  cut_decode(arena, call);
  return workers * arena.used();
}
template <class T>
void mapped_decode(const MappedDecode<T>& call, const Launch& launch) {
  using X = Vec<T>;
  const int64_t each = mapped_decode_bytes(call, 1), H = call.q.size[2];
  const int K = call.map.K, F = call.map.F, width = static_cast<int>(call.v.size[3]);
  const T eps = static_cast<T>(call.eps);
  parallel(launch, call.q.size[0] * H, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * each);
    const DecodeScratch<T> s = cut_decode(arena, call);
    const int64_t b = task / H, h = task % H;
    const auto rows = [&](const View& view, int64_t t, int cols, T* to) {
      load_rows<T>(view, b * view.stride[0] + t * view.stride[1] + h * view.stride[2], 0, 1, cols, to, round_up<T>(cols));
    };
    T* z = call.z.template at<T>(b, h);
    const double unit = call.key_tops.given() ? given_top(call.key_tops, b, h) : 0;
    for (int64_t t = 0; t < call.q.size[1]; ++t) {
      rows(call.k, t, K, s.x);
      call.map.apply(call.map.self, {b, h, call.first + t, 1, true, 1, unit}, s.x, round_up<T>(K), s.k, round_up<T>(F),
                     s.scratch);
      rows(call.q, t, K, s.x);
      call.map.apply(call.map.self, {b, h, call.first + t, 1, false, 1}, s.x, round_up<T>(K), s.q, round_up<T>(F), s.scratch);
      rows(call.v, t, width, s.v);
      typename X::V dot = X::zero();
      for (int c = 0; c < F; c += X::W) {
        const typename X::V sum_of = X::load(z + c, F - c) + X::load(s.k + c, F - c);
        X::store(z + c, sum_of, F - c);
        dot = fma(X::load(s.q + c, F - c), sum_of, dot);
      }
      const T d = sum(dot), den = call.normalizer == Normalizer::none  ? T(1)
                                  : call.normalizer == Normalizer::add ? d + eps
                                  : d > eps || d != d                  ? d
                                                                       : eps;
      const T factor = den == 0 ? T(0) : 1 / den;
      decode_step<false>(F, width, call.state.template at<T>(b, h), call.state.stride[2], static_cast<T*>(nullptr), 0, s.k, s.q,
                         s.v, s.o);
      store_rows<T>(s.o, round_up<T>(width), 1, width, call.out,
                    b * call.out.stride[0] + t * call.out.stride[1] + h * call.out.stride[2], 0, &factor);
    }
  });
}

#define LINNET_MAPPED(T)                                                                                            \
  template void load_rows<T>(const View&, int64_t, int64_t, int, int, T*, int64_t);                                 \
  template void store_rows<T>(const T*, int64_t, int, int, const View&, int64_t, int64_t, const T*);                \
  template int64_t mapped_forward_bytes<T>(const MappedCall<T>&, int);                                              \
  template void mapped_forward<T>(const MappedCall<T>&, const Launch&);                                             \
  template int64_t mapped_backward_bytes<T>(const MappedCall<T>&, int);                                             \
  template void mapped_backward<T>(const MappedCall<T>&, const Launch&);                                            \
  template int64_t mapped_decode_bytes<T>(const MappedDecode<T>&, int);                                             \
  template void mapped_decode<T>(const MappedDecode<T>&, const Launch&);                                            \
  template int64_t mapped_features_bytes<T>(const RowMap<T>&, int);                                                 \
  template void mapped_features<T>(const RowMap<T>&, const View&, bool, const double*, const View&, const Launch&); \
  template void mapped_units<T>(const RowMap<T>&, const View&, const View&, const View&, double*, const Launch&);
LINNET_MAPPED(float)
LINNET_MAPPED(double)

}  // namespace linnet::LINNET_ISA
