// Mapped<T>: one walk of mapped.h, as recurrence/cpu/walk.h asks for it: which rows read and write the state.
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
#pragma once

#include "core/half.h"
#include "mapped.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "simd/finite.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

enum class MappedWalk { forward, query, key, value };

template <class T>
struct Mapped {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr bool kSums = true;

  const MappedCall<T>* call;
  MappedWalk kind;
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
  bool reversed() const { return kind == MappedWalk::key || kind == MappedWalk::value; }

  // ---- what recurrence/cpu/walk.h asks

  int heads() const { return count; }
  bool causal() const { return call->causal; }
  int64_t readers() const { return kind == MappedWalk::forward || kind == MappedWalk::query ? tokens() : key_tokens(); }
  int64_t writers() const { return kind == MappedWalk::forward || kind == MappedWalk::query ? key_tokens() : tokens(); }
  StateShape<T> state() const {
    const int units = running() ? 1 : 0;
    if (kind == MappedWalk::forward || kind == MappedWalk::value) return {F() + extra(), width(), units};
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
    const bool across = shape.I != F() + extra() || kind == MappedWalk::query || kind == MappedWalk::key;
    for (int i = 0; i < shape.I; ++i) {
      if (!across && i + 1 == F()) break;
      if (!across) state_of[shape.sums() + i] *= factor;
      for (int j = 0; j < (across ? F() - 1 : shape.J); ++j) state_of[shape.at(i, j)] *= factor;
    }
    unit = next;
    return n;
  }
  void begin(int head, T* state_of) const {
    for (int64_t i = 0; i < state().elements(); i += X::W) X::store(state_of + i, X::zero());
    if (running()) state_of[state().scanned()] = static_cast<T>(reversed() ? __builtin_inf() : -__builtin_inf());
    if (call->state.given()) resume(head, state_of);
  }
  int64_t memory_at(const View& x, int64_t h, int64_t i = 0) const {
    return b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
  }
  // The memory of a decode call as the state of this walk: values less their mean, and under running maxima what every feature
  // has in no unit (`floor`) through the extra feature instead.
  void resume(int head, T* state_of) const {
    const StateShape<T> shape = state();
    const int64_t h = head0 + head;
    const T* const mean = mean_value(head);
    const auto at = [&](const View& x, int64_t i, int64_t j = 0) {
      return static_cast<T>(load_f64(x.data, x.dtype, memory_at(x, h, i) + j));
    };
    const T floor = static_cast<T>(call->floor);
    const bool units = running(), floored = call->sums.given();
    const T tokens_seen = floored ? at(call->sums, width()) : T(0);
    bool seen = true;
    if (units) {
      T& unit = state_of[shape.scanned()];
      unit = static_cast<T>(load_f64(call->top.data, call->top.dtype, memory_at(call->top, h)));
      seen = unit != static_cast<T>(-__builtin_inf());
    }
    for (int i = 0; seen && i < F() - (units ? 1 : 0); ++i) {
      const T z = at(call->z, i) - floor * tokens_seen;
      state_of[shape.sums() + i] = z;
      for (int j = 0; j < width(); ++j) {
        const T share = floored ? floor * at(call->sums, j) : T(0);
        state_of[shape.at(i, j)] = at(call->state, i, j) - share - z * mean[j];
      }
    }
    if (!units || !floored) return;
    state_of[shape.sums() + F() - 1] = tokens_seen;
    for (int j = 0; j < width(); ++j) state_of[shape.at(F() - 1, j)] = at(call->sums, j) - tokens_seen * mean[j];
  }
  // The state back into that memory.
  void keep(int head, const T* state_of) const {
    const StateShape<T> shape = state();
    const int64_t h = head0 + head;
    const T *const mean = mean_value(head), *const z = state_of + shape.sums();
    const auto put = [&](const View& x, T value, int64_t i, int64_t j = 0) {
      store_f64(x.data, x.dtype, memory_at(x, h, i) + j, static_cast<double>(value));
    };
    const T floor = static_cast<T>(call->floor);
    const bool units = running(), floored = call->sums.given();
    const int last = F() - 1;  // the extra feature
    const auto value_sum = [&](int j) { return floored ? state_of[shape.at(last, j)] + z[last] * mean[j] : T(0); };
    for (int i = 0; i < F() - (units ? 1 : 0); ++i) {
      put(call->z, floored ? z[i] + floor * z[last] : z[i], i);
      for (int j = 0; j < width(); ++j)
        put(call->state, state_of[shape.at(i, j)] + z[i] * mean[j] + floor * value_sum(j), i, j);
    }
    if (units) put(call->top, state_of[shape.scanned()], 0);
    for (int j = 0; floored && j <= width(); ++j) put(call->sums, j < width() ? value_sum(j) : z[last], j);
  }
  void add_ahead(const View& view, int64_t length, int head, int64_t at, int rows, Ahead* ahead_of) const {
    if (rows <= 0 || !view.given()) return;
    const int64_t bytes = dtype_size(view.dtype), t = reversed() ? length - 1 - at : at;
    const int64_t offset = b * view.stride[0] + t * view.stride[1] + (head0 + head) * view.stride[2];
    ahead_of->add(static_cast<const char*>(view.data) + offset * bytes, (reversed() ? -1 : 1) * view.stride[1] * bytes,
                  view.size[3] * bytes, rows);
  }
  void ahead(int head, int64_t at, int rows, Ahead* ahead_of) const {
    if (kind != MappedWalk::forward) add_ahead(call->dout, tokens(), head, at, rows, ahead_of);
    if (!call->centred || kind == MappedWalk::forward) add_ahead(call->out, tokens(), head, at, rows, ahead_of);
    add_ahead(call->q, tokens(), head, at, rows, ahead_of);
    add_ahead(call->v, key_tokens(), head, at, rows, ahead_of);
    add_ahead(call->k, key_tokens(), head, at, rows, ahead_of);
  }
  void keys(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    int64_t ld = ldv();
    switch (kind) {
      case MappedWalk::forward: key_features(head, at, rows, state_of, s.f, ld = ldf(), s); break;
      case MappedWalk::query: value_rows(head, at, rows, true, s.f, ld); break;
      case MappedWalk::key: incoming(head, at, rows, true, state_of, s.f, ld, s); break;
      case MappedWalk::value: query_features(head, at, rows, state_of, s.f, ld = ldf(), s); break;
    }
    load_tile_transposed<T>(static_cast<const T*>(s.f), ld, rows, state().I, c.yt, kChunk);
  }
  bool values(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    switch (kind) {
      case MappedWalk::forward: value_rows(head, at, rows, false, c.z, c.ldz); break;
      case MappedWalk::query: key_features(head, at, rows, state_of, c.z, c.ldz, s); break;
      case MappedWalk::key: query_features(head, at, rows, state_of, c.z, c.ldz, s); break;
      case MappedWalk::value: incoming(head, at, rows, false, state_of, c.z, c.ldz, s); break;
    }
    return rows_are_finite(c.z, c.ldz, rows, state().J);
  }
  void queries(int head, int64_t at, int rows, const T* state_of, const Chunk<T>& c) const {
    const Spare s = spare(c);
    switch (kind) {
      case MappedWalk::forward: return query_features(head, at, rows, state_of, c.x, c.ldx, s);
      case MappedWalk::query: return incoming(head, at, rows, true, state_of, c.x, c.ldx, s);
      case MappedWalk::key: return value_rows(head, at, rows, true, c.x, c.ldx);
      case MappedWalk::value: return key_features(head, at, rows, state_of, c.x, c.ldx, s);
    }
  }

  // Weights of a chunk from s = scale q.k (forward, value). The rows that read stand in spare.x, as queries() left them.
  bool scores(int head, int64_t at, int rows, const Chunk<T>& c) const {
    const double scale = call->map.polynomial_scale;
    if (scale == 0 || (kind != MappedWalk::forward && kind != MappedWalk::value)) return false;
    const Spare s = spare(c);
    const bool keys_read = kind == MappedWalk::value;
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
    if (!call->centred || kind == MappedWalk::key) return;
    for (int r = 0; r < rows; ++r) f[r * ld + F()] = kind == MappedWalk::value ? row_c[row_index(head, at + r)] : T(0);
  }
  // phi(k), 0 for masked keys; centred: phi(k) - k0 and, as a feature of forward and value walks, 1.
  void key_features(int head, int64_t at, int rows, const T* state_of, T* f, int64_t ld, const Spare& s) const {
    load(call->k, key_tokens(), head, at, rows, s.x, ldk());
    zero_masked(at, rows, s.x, ldk(), ldk());
    call->map.apply(call->map.self, rows_of(true, head, at, rows, state_of), s.x, ldk(), f, ld, s.scratch);
    const int64_t own = F() + (kind == MappedWalk::query ? 0 : extra());
    if (call->centred) {
      const T* mean = mean_key(head);
      for (int r = 0; r < rows; ++r) {
        T* row = f + r * ld;
        for (int c = 0; c < F(); c += X::W) X::store(row + c, X::load(row + c, F() - c) - X::load(mean + c, F() - c), F() - c);
        if (kind != MappedWalk::query) row[F()] = 1;
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
      if (call->centred && kind == MappedWalk::query) centred_rows(head, at, rows, state_of, dst, ld, s);
      return;
    }
    load(call->dout, tokens(), head, at, rows, dst, ld);
    if (call->centred) {
      if (kind == MappedWalk::query) return centred_rows(head, at, rows, state_of, dst, ld, s);
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
      case MappedWalk::forward:
        return call->centred ? finish_centred(head, at, rows, state_of, c) : finish_forward(head, at, rows, c);
      case MappedWalk::query:
        if (call->centred) remember_c(head, at, rows, state_of, c);
        return finish_input(false, head, at, rows, state_of, c, call->q, call->dq);
      case MappedWalk::key: return finish_input(true, head, at, rows, state_of, c, call->k, call->dk);
      case MappedWalk::value:
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
    if (kind != MappedWalk::forward) return;
    const StateShape<T> shape = state();
    const int64_t h = head0 + head;
    const T* mean = mean_value(head);
    const T* z = state_of + shape.sums();
    if (call->centred) return end_centred(head, state_of, shape);
    if (call->state.given()) keep(head, state_of);
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

}  // namespace linnet::LINNET_ISA
