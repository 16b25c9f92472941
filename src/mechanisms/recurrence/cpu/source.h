// recurrence_source: the rows of recurrence, decay, gla, delta and gated_delta, for the engine (engine.h).
#pragma once

#include "core/half.h"
#include "engine.h"
#include "mechanisms/recurrence/shape.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

// Tensors of the call's type E or of the type of sums (gates, write strengths).
template <class T, class E>
void load_gate_rows(const View& view, const void* from, int64_t stride, int rows, int cols, T* to, int64_t ld) {
  if (dtype_size(view.dtype) == static_cast<int64_t>(sizeof(T))) {
    load_tile<T>(static_cast<const T*>(from), stride, rows, cols, to, ld);
  } else {
    load_tile<T>(static_cast<const E*>(from), stride, rows, cols, to, ld);
  }
}
template <class T, class E>
void store_gate_rows(const View& view, const T* from, int64_t ld, int rows, int cols, void* to, int64_t stride) {
  if (dtype_size(view.dtype) == static_cast<int64_t>(sizeof(T))) {
    store_tile<T>(from, ld, rows, cols, static_cast<T*>(to), stride);
  } else {
    store_tile<T>(from, ld, rows, cols, static_cast<E*>(to), stride);
  }
}
LINNET_INLINE char* element_address(const View& view, int64_t b, int64_t t, int64_t h) {
  return static_cast<char*>(view.data) +
         (b * view.stride[0] + t * view.stride[1] + h * view.stride[2]) * static_cast<int64_t>(dtype_size(view.dtype));
}

template <class T>
LINNET_INLINE T scalar_element(const View& view, int64_t b, int64_t t, int64_t h) {
  return static_cast<T>(load_f64(view.data, view.dtype, b * view.stride[0] + t * view.stride[1] + h * view.stride[2]));
}

// x = x / sqrt(sum x^2 + eps), row by row; the factor is kept.
template <class T>
void normalize_rows(int rows, int64_t ld, T* x, T* factor) {
  using X = Vec<T>;
  for (int r = 0; r < rows; ++r, x += ld) {
    typename X::V squares = X::zero();
    for (int64_t c = 0; c < ld; c += X::W) squares = fma(X::load(x + c), X::load(x + c), squares);
    const T root = sqrt(X::broadcast(sum(squares) + static_cast<T>(kL2NormEpsilon)))[0];
    factor[r] = 1 / root;
    for (int64_t c = 0; c < ld; c += X::W) X::store(x + c, X::load(x + c) * X::broadcast(factor[r]));
  }
}
// to (+)= the gradient before the norm: r (dy - y (y . dy)), r = factor; without norm to (+)= dy. With 1 = |y|^2 + eps r^2 it
// is r (eps r^2 dy + (|y|^2 dy - y (y . dy))): the bracket, where a dy along y cancels, in double; with one channel it is 0.
template <class T>
void add_rows(int rows, int width, int64_t ld, const T* dy, const T* y, const T* factor, bool norm, bool add, T* to) {
  for (int r = 0; r < rows; ++r) {
    double dot = 0, squares = 0, scale = 1, small = 1;
    if (norm) {
      for (int64_t c = r * ld; c < r * ld + width; ++c) {
        dot += static_cast<double>(y[c]) * static_cast<double>(dy[c]);
        squares += static_cast<double>(y[c]) * static_cast<double>(y[c]);
      }
      scale = static_cast<double>(factor[r]);
      small = kL2NormEpsilon * scale * scale;
    }
    for (int64_t c = r * ld; c < r * ld + width; ++c) {
      const double d = static_cast<double>(dy[c]), along = norm ? static_cast<double>(y[c]) : 0;
      const T result = static_cast<T>(scale * (small * d + (width == 1 ? 0 : squares * d - along * dot)));
      to[c] = add ? to[c] + result : result;
    }
  }
}

template <class T, class E>
class RecurrenceSource final : public ChunkSource<T> {
 public:
  RecurrenceSource(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads)
      : args_(args), out_(out), grads_(grads), s_(recurrence_shape(args)) {
    EngineShape& e = this->shape;
    e.sequences = s_.N;
    e.heads = s_.H;
    e.longest = s_.T;
    e.K = static_cast<int>(s_.K);
    e.V = static_cast<int>(s_.V);
    e.gate = s_.per_channel ? Gate::channel : args.g.given() || args.g_head.given() ? Gate::scalar : Gate::none;
    e.beta = args.beta.given();
    // The triangular system of more rows than channels corrects the same directions over and over, by subtraction. Of one
    // channel, 8 tokens may leave a ten-thousandth of the state, and of its digits three.
    if (e.beta && e.K < 8) e.chunk = e.K == 1 ? 2 : 8;
    if (args.chunk > 0 && args.chunk < e.chunk) e.chunk = static_cast<int>(args.chunk);
    // The least common multiple of the heads that share a query, key or value head.
    if (s_.H > 0) {
      int64_t share = s_.H / s_.Hq;
      while (share % (s_.H / s_.Hk) != 0) share += s_.H / s_.Hq;
      const int64_t both = share;
      while (share % (s_.H / s_.Hv) != 0) share += both;
      e.share = static_cast<int>(share);
    }
  }
  void keep_head_gradients(T* partial) { partial_ = partial; }  // [N, H]

  int64_t tokens(int64_t n) const override {
    const RecurrenceSequence at = recurrence_sequence(args_, n);
    return at.end - at.begin;
  }
  int64_t spare_elements() const override { return 2 * kChunk; }  // factors of the norms
  int64_t shared_elements() const override { return kChunk * (2 * round_up<T>(s_.K) + round_up<T>(s_.V)); }

  void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const override {
    const RecurrenceSequence seq = recurrence_sequence(args_, n);
    const int64_t t = seq.begin + at;
    const int K = static_cast<int>(s_.K);
    load_tile<T>(args_.k.at<const E>(seq.b, t, s_.k_head(h)), args_.k.stride[1], rows, K, c.k, c.ldk);
    if (args_.l2_norm) normalize_rows(rows, c.ldk, c.k, c.spare);
    if (c.q != nullptr) {
      load_tile<T>(args_.q.at<const E>(seq.b, t, s_.q_head(h)), args_.q.stride[1], rows, K, c.q, c.ldk);
      if (args_.l2_norm) normalize_rows(rows, c.ldk, c.q, c.spare + kChunk);
    }
    load_tile<T>(args_.v.at<const E>(seq.b, t, s_.v_head(h), c.first), args_.v.stride[1], rows, c.last - c.first, c.v + c.first,
                 c.ldv);
    if (s_.per_channel) {
      load_gate_rows<T, E>(args_.g, element_address(args_.g, seq.b, t, h), args_.g.stride[1], rows, K, c.g, c.ldk);
    } else if (args_.g.given()) {
      for (int r = 0; r < rows; ++r) c.g[r] = scalar_element<T>(args_.g, seq.b, t + r, h);
    } else if (args_.g_head.given()) {
      const T g = static_cast<T>(load_f64(args_.g_head.data, args_.g_head.dtype, h * args_.g_head.stride[0]));
      for (int r = 0; r < rows; ++r) c.g[r] = g;
    }
    if (args_.beta.given()) {
      const T factor = args_.double_beta ? 2 : 1;
      for (int r = 0; r < rows; ++r) c.beta[r] = factor * scalar_element<T>(args_.beta, seq.b, t + r, h);
    }
  }
  void ahead(Step step, int64_t n, int64_t h, int64_t at, int rows, int first, int last, Ahead* ahead_of) const override {
    const RecurrenceSequence seq = recurrence_sequence(args_, n);
    const int64_t t = seq.begin + at;
    const auto add = [&](const View& view, int64_t head, int64_t from, int64_t to) {
      const int64_t size = dtype_size(view.dtype);
      if (!view.given()) return;
      ahead_of->add(element_address(view, seq.b, t, head) + from * size, view.stride[1] * size, (to - from) * size, rows);
    };
    if (step == Step::gradients) {
      if (s_.per_channel) add(grads_.dg, h, 0, s_.K);
      add(grads_.dv, s_.v_head(h), 0, s_.V);
      add(grads_.dk, s_.k_head(h), 0, s_.K);
      add(grads_.dq, s_.q_head(h), 0, s_.K);
    }
    if (step == Step::forward) add(out_.out, h, first, last);
    if (step == Step::dstates || step == Step::gradients) add(grads_.dout, h, first, last);
    if (step != Step::states) add(args_.q, s_.q_head(h), 0, s_.K);
    if (s_.per_channel) add(args_.g, h, 0, s_.K);
    add(args_.v, s_.v_head(h), first, last);
    add(args_.k, s_.k_head(h), 0, s_.K);
  }
  void begin(int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) const override {
    load_state(args_.initial_state, n, h, shape_of, state);
  }
  void end(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) const override {
    store_state(out_.final_state, n, h, shape_of, state);
  }
  void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const override {
    const RecurrenceSequence seq = recurrence_sequence(args_, n);
    T scale[kChunk];
    for (int r = 0; r < rows; ++r) scale[r] = static_cast<T>(s_.scale);
    store_tile<T>(o + c.first, c.ldv, rows, c.last - c.first, out_.out.at<E>(seq.b, seq.begin + at, h, c.first),
                  out_.out.stride[1], scale);
  }

  void load_dout(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, T* dout) const override {
    const RecurrenceSequence seq = recurrence_sequence(args_, n);
    if (!grads_.dout.given()) {
      for (int64_t j = 0; j < rows * c.ldv; j += Vec<T>::W) Vec<T>::store(dout + j, Vec<T>::zero());
      return;
    }
    load_tile<T>(grads_.dout.at<const E>(seq.b, seq.begin + at, h), grads_.dout.stride[1], rows, static_cast<int>(s_.V), dout,
                 c.ldv, static_cast<T>(s_.scale));
  }
  void gradients(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const ChunkGrads<T>& d) const override {
    const RecurrenceSequence seq = recurrence_sequence(args_, n);
    const int64_t t = seq.begin + at;
    T* sums = c.shared;
    add_up(grads_.dq, seq.b, t, h, s_.H / s_.Hq, rows, c.ldk, d.dq, c.q, c.spare + kChunk, args_.l2_norm, sums);
    sums += kChunk * c.ldk;
    add_up(grads_.dk, seq.b, t, h, s_.H / s_.Hk, rows, c.ldk, d.dk, c.k, c.spare, args_.l2_norm, sums);
    sums += kChunk * c.ldk;
    add_up(grads_.dv, seq.b, t, h, s_.H / s_.Hv, rows, c.ldv, d.dv, nullptr, nullptr, false, sums);
    if (s_.per_channel && grads_.dg.given()) {
      store_gate_rows<T, E>(grads_.dg, d.dg, c.ldk, rows, static_cast<int>(s_.K), element_address(grads_.dg, seq.b, t, h),
                            grads_.dg.stride[1]);
    } else if (grads_.dg.given()) {
      for (int r = 0; r < rows; ++r) set_scalar(grads_.dg, seq.b, t + r, h, d.dg[r]);
    }
    if (partial_ != nullptr) {
      T& total = partial_[n * s_.H + h];
      for (int r = rows - 1; r >= 0; --r) total += d.dg[r];
    }
    if (grads_.dbeta.given()) {
      const T factor = args_.double_beta ? 2 : 1;
      for (int r = 0; r < rows; ++r) set_scalar(grads_.dbeta, seq.b, t + r, h, factor * d.dbeta[r]);
    }
  }
  void begin_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, T* dstate) const override {
    load_state(grads_.dfinal_state, n, h, shape_of, dstate);
    if (partial_ != nullptr) partial_[n * s_.H + h] = 0;
  }
  void end_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* dstate) const override {
    store_state(grads_.dinitial_state, n, h, shape_of, dstate);
  }

 private:
  LINNET_INLINE static void set_scalar(const View& view, int64_t b, int64_t t, int64_t h, T x) {
    store_f64(view.data, view.dtype, b * view.stride[0] + t * view.stride[1] + h * view.stride[2], static_cast<double>(x));
  }
  static void load_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) {
    load_panels<T>(shape_of, view.given() ? view.at<const T>(n, h) : nullptr, view.given() ? view.stride[2] : 0, state);
  }
  static void store_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) {
    if (view.given()) store_panels<T>(shape_of, state, view.at<T>(n, h), view.stride[2]);
  }
  // `group` heads in a row add up; the last stores.
  void add_up(const View& to, int64_t b, int64_t t, int64_t h, int64_t group, int rows, int64_t ld, const T* d, const T* y,
              const T* factor, bool norm, T* sums) const {
    if (!to.given()) return;
    const T* from = d;
    if (group > 1 || norm) {
      add_rows(rows, static_cast<int>(to.size[3]), ld, d, y, factor, norm, h % group != 0, sums);
      from = sums;
    }
    if ((h + 1) % group != 0) return;
    store_tile<T>(from, ld, rows, static_cast<int>(to.size[3]), to.at<E>(b, t, h / group), to.stride[1]);
  }

  const RecurrenceArgs& args_;
  const RecurrenceOut& out_;
  const RecurrenceGrads& grads_;
  RecurrenceShape s_;
  T* partial_ = nullptr;
};

}  // namespace linnet::LINNET_ISA
