// SSD on the vector units: its rows for the recurrence engine (mechanisms/recurrence/cpu/engine.h): q = C, k = B, v = delta x,
// g = delta A; skip and gate where the engine hands the rows over. With dz the forward runs once more for y, which the gate's
// slope multiplies. Sums over tokens (dA, dD, ddt_bias) run in double, one sum for each sequence and head.
#include "core/sequence.h"
#include "mechanisms/recurrence/cpu/engine.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/tile.h"
#include "ssd.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T, class E>
class SsdSource final : public ChunkSource<T> {
  using X = Vec<T>;
  using V = typename X::V;

 public:
  SsdSource(const SsdArgs& args, const SsdOut& out, const SsdGrads& grads) : args_(args), out_(out), grads_(grads) {
    EngineShape& e = this->shape;
    e.sequences = sequence_count(args.cu_seqlens, args.x.size[0]);
    e.heads = args.x.size[2];
    e.longest = args.x.size[1];
    e.K = static_cast<int>(args.B.size[3]);
    e.V = static_cast<int>(args.x.size[3]);
    e.gate = Gate::scalar;
    const int64_t groups = args.B.size[2];
    group_ = groups > 0 ? e.heads / groups : 1;
    e.share = static_cast<int>(group_);
  }
  // y = S^T C + D x [B, T, H, V] instead of out, before the gate; read by load_dout.
  void keep_reads(T* y) { y_ = y; }
  void write_reads(bool write) { writes_ = write; }
  void keep_sums(double* sums) { sums_ = sums; }  // [N, H, 2 + V]: dA, ddt_bias, dD
  int64_t sum_elements() const { return 2 + this->shape.V; }

  int64_t tokens(int64_t n) const override { return sequence_of(args_.cu_seqlens, args_.x.size[1], n).length(); }
  int64_t spare_elements() const override { return 2 * kChunk; }  // delta, its slope in dt
  int64_t shared_elements() const override { return 2 * kChunk * round_up<T>(this->shape.K); }

  void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const override {
    const Sequence seq = sequence_of(args_.cu_seqlens, args_.x.size[1], n);
    const int64_t t = seq.begin + at;
    const int K = this->shape.K;
    load_tile<T>(args_.B.at<const E>(seq.b, t, h / group_), args_.B.stride[1], rows, K, c.k, c.ldk);
    if (c.q != nullptr) load_tile<T>(args_.C.at<const E>(seq.b, t, h / group_), args_.C.stride[1], rows, K, c.q, c.ldk);
    load_steps(seq.b, t, h, rows, c.spare);
    const T rate = static_cast<T>(load_f64(args_.A.data, args_.A.dtype, h * args_.A.stride[0]));
    for (int r = 0; r < rows; ++r) {
      const T delta = c.spare[r];
      c.g[r] = delta == 0 ? T(0) : delta * rate;
      load_tile<T>(args_.x.at<const E>(seq.b, t + r, h, c.first), 0, 1, c.last - c.first, c.v + r * c.ldv + c.first, c.ldv,
                   delta);
    }
  }
  void ahead(Step step, int64_t n, int64_t h, int64_t at, int rows, int first, int last, Ahead* ahead_of) const override {
    const Sequence seq = sequence_of(args_.cu_seqlens, args_.x.size[1], n);
    const auto add = [&](const View& view, int64_t head, int64_t from, int64_t to) {
      constexpr int64_t size = sizeof(E);
      if (view.given()) {
        ahead_of->add(view.at<const E>(seq.b, seq.begin + at, head, from), view.stride[1] * size, (to - from) * size, rows);
      }
    };
    if (step == Step::gradients) {
      add(grads_.dx, h, 0, this->shape.V);
      add(grads_.dB, h / group_, 0, this->shape.K);
      add(grads_.dC, h / group_, 0, this->shape.K);
    }
    if (step == Step::forward) add(out_.out, h, first, last);
    if (step == Step::dstates || step == Step::gradients) add(grads_.dout, h, first, last);
    if (step != Step::states) add(args_.C, h / group_, 0, this->shape.K);
    add(args_.x, h, first, last);
    add(args_.B, h / group_, 0, this->shape.K);
  }
  void begin(int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) const override {
    load_state(args_.initial_state, n, h, shape_of, state);
  }
  void end(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) const override {
    if (!writes_) store_state(out_.final_state, n, h, shape_of, state);
  }
  void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const override {
    const Sequence seq = sequence_of(args_.cu_seqlens, args_.x.size[1], n);
    const int width = this->shape.V;
    for (int r = 0; r < rows; ++r) {
      const int64_t t = seq.begin + at + r;
      const E* x = args_.x.at<const E>(seq.b, t, h);
      for (int j = c.first; j < c.last; j += X::W) {
        V y = X::load(o + r * c.ldv + j);
        if (args_.D.given()) y = fma(skip(h, j), X::load(x + j, width - j), y);
        if (writes_) {
          X::store(reads(seq.b, t, h) + j, y, width - j);
          continue;
        }
        if (args_.z.given()) {
          const V z = X::load(args_.z.at<const E>(seq.b, t, h, j), width - j);
          y = y * (z * sigmoid(z));
        }
        X::store(out_.out.at<E>(seq.b, t, h, j), y, width - j);
      }
    }
  }

  void load_dout(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, T* dout) const override {
    const Sequence seq = sequence_of(args_.cu_seqlens, args_.x.size[1], n);
    const int width = this->shape.V;
    const V one = X::broadcast(1);
    for (int r = 0; r < rows; ++r) {
      const int64_t t = seq.begin + at + r;
      for (int j = c.first; j < c.last; j += X::W) {
        const int lanes = width - j;
        V d = grads_.dout.given() ? X::load(grads_.dout.at<const E>(seq.b, t, h, j), lanes) : X::zero();
        if (args_.z.given()) {
          const V z = X::load(args_.z.at<const E>(seq.b, t, h, j), lanes), s = sigmoid(z);
          if (grads_.dz.given()) {
            const V y = X::load(reads(seq.b, t, h) + j, lanes);
            X::store(grads_.dz.at<E>(seq.b, t, h, j), d * y * (s * fma(z, one - s, one)), lanes);
          }
          d = d * (z * s);
        }
        X::store(dout + r * c.ldv + j, d);
      }
    }
  }
  void gradients(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const ChunkGrads<T>& d) const override {
    const Sequence seq = sequence_of(args_.cu_seqlens, args_.x.size[1], n);
    const int64_t t = seq.begin + at;
    const int width = this->shape.V;
    add_up(grads_.dC, seq.b, t, h, rows, c.ldk, d.dq, c.shared);
    add_up(grads_.dB, seq.b, t, h, rows, c.ldk, d.dk, c.shared + kChunk * c.ldk);
    double* sums = sums_ + (n * this->shape.heads + h) * sum_elements();
    const T rate = static_cast<T>(load_f64(args_.A.data, args_.A.dtype, h * args_.A.stride[0]));
    for (int r = 0; r < rows; ++r) {
      const E* x = args_.x.at<const E>(seq.b, t + r, h);
      const T* dv = d.dv + r * c.ldv;
      const T* dy = d.dout + r * c.ldv;
      const T delta = c.spare[r];
      V dot = X::zero();
      for (int j = 0; j < width; j += X::W) {
        const V row = X::load(x + j, width - j);
        dot = fma(X::load(dv + j), row, dot);
        if (grads_.dx.given()) {
          V dx = X::broadcast(delta) * X::load(dv + j);
          if (args_.D.given()) dx = fma(skip(h, j), X::load(dy + j), dx);
          X::store(grads_.dx.at<E>(seq.b, t + r, h, j), dx, width - j);
        }
      }
      const T ddt = (rate * d.dg[r] + sum(dot)) * c.spare[kChunk + r];
      sums[0] += static_cast<double>(delta) * static_cast<double>(d.dg[r]);
      sums[1] += static_cast<double>(ddt);
      if (grads_.ddt.given()) set(grads_.ddt, offset(grads_.ddt, seq.b, t + r, h), static_cast<double>(ddt));
      if (grads_.dD.given()) {
        for (int j = 0; j < width; ++j) sums[2 + j] += static_cast<double>(dy[j]) * to_f64(x[j]);
      }
    }
  }
  void begin_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, T* dstate) const override {
    load_state(grads_.dfinal_state, n, h, shape_of, dstate);
    for (int64_t i = 0; i < sum_elements(); ++i) sums_[(n * this->shape.heads + h) * sum_elements() + i] = 0;
  }
  void end_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* dstate) const override {
    store_state(grads_.dinitial_state, n, h, shape_of, dstate);
  }
  // Sequences in order.
  void add_sums() const {
    const int64_t H = this->shape.heads, width = this->shape.V, each = sum_elements();
    for (int64_t h = 0; h < H; ++h) {
      const auto total = [&](int64_t i) {
        double all = 0;
        for (int64_t n = 0; n < this->shape.sequences; ++n) all += sums_[(n * H + h) * each + i];
        return all;
      };
      if (grads_.dA.given()) set(grads_.dA, h * grads_.dA.stride[0], total(0));
      if (grads_.ddt_bias.given()) set(grads_.ddt_bias, h * grads_.ddt_bias.stride[0], total(1));
      double row = 0;
      for (int64_t j = 0; grads_.dD.given() && j < width; ++j) {
        const double x = total(2 + j);
        row += x;
        if (grads_.dD.rank == 2) set(grads_.dD, h * grads_.dD.stride[0] + j, x);
      }
      if (grads_.dD.given() && grads_.dD.rank == 1) set(grads_.dD, h * grads_.dD.stride[0], row);
    }
  }

 private:
  LINNET_INLINE static int64_t offset(const View& view, int64_t b, int64_t t, int64_t h) {
    return b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  }
  LINNET_INLINE static void set(const View& view, int64_t at, double x) { store_f64(view.data, view.dtype, at, x); }
  T* reads(int64_t b, int64_t t, int64_t h) const {
    return y_ + ((b * args_.x.size[1] + t) * this->shape.heads + h) * this->shape.V;
  }
  LINNET_INLINE V skip(int64_t h, int j) const {
    if (args_.D.rank == 1) return X::broadcast(static_cast<T>(load_f64(args_.D.data, args_.D.dtype, h * args_.D.stride[0])));
    if (args_.D.dtype == args_.x.dtype) return X::load(args_.D.at<const E>(h, j), this->shape.V - j);
    return X::load(args_.D.at<const T>(h, j), this->shape.V - j);
  }
  // delta and its slope in dt: 0 where a limit holds.
  void load_steps(int64_t b, int64_t t, int64_t h, int rows, T* spare) const {
    T bias = 0;
    if (args_.dt_bias.given()) {
      bias = static_cast<T>(load_f64(args_.dt_bias.data, args_.dt_bias.dtype, h * args_.dt_bias.stride[0]));
    }
    for (int r = 0; r < kChunk; ++r) {
      spare[r] =
          r < rows ? bias + static_cast<T>(load_f64(args_.dt.data, args_.dt.dtype, offset(args_.dt, b, t + r, h))) : T(0);
    }
    const V low = X::broadcast(static_cast<T>(args_.dt_min));
    const V high = X::broadcast(static_cast<T>(args_.dt_max.value_or(__builtin_inf())));
    for (int r = 0; r < kChunk; r += X::W) {
      const V raw = X::load(spare + r), delta = softplus(raw);
      const auto clamped = lt(delta, low) | gt(delta, high);
      X::store(spare + r, min(high, max(low, delta)));
      X::store(spare + kChunk + r, select(clamped, X::zero(), sigmoid(raw)));
    }
  }
  static void load_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) {
    load_panels<T>(shape_of, view.given() ? view.at<const T>(n, h) : nullptr, view.given() ? view.stride[2] : 0, state);
  }
  static void store_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) {
    if (view.given()) store_panels<T>(shape_of, state, view.at<T>(n, h), view.stride[2]);
  }
  // The heads of a group add up; the last stores.
  void add_up(const View& to, int64_t b, int64_t t, int64_t h, int rows, int64_t ld, const T* d, T* sums) const {
    if (!to.given()) return;
    const T* from = d;
    if (group_ > 1) {
      for (int64_t i = 0; i < rows * ld; i += X::W) {
        X::store(sums + i, h % group_ == 0 ? X::load(d + i) : X::load(sums + i) + X::load(d + i));
      }
      from = sums;
    }
    if ((h + 1) % group_ != 0) return;
    store_tile<T>(from, ld, rows, this->shape.K, to.at<E>(b, t, h / group_), to.stride[1]);
  }

  const SsdArgs& args_;
  const SsdOut& out_;
  const SsdGrads& grads_;
  int64_t group_;
  T* y_ = nullptr;
  bool writes_ = false;
  double* sums_ = nullptr;
};

template <class T, class E>
struct Ssd {
  static void forward(const SsdArgs& args, const SsdOut& out, const Launch& launch) {
    const SsdGrads grads;
    engine_forward(SsdSource<T, E>(args, out, grads), launch);
  }
  static void cut(Arena& arena, const SsdArgs& args, SsdSource<T, E>& source) {
    source.keep_sums(arena.take<double>(source.shape.sequences * source.shape.heads * source.sum_elements()));
    source.keep_reads(arena.take<T>(args.z.given() ? args.x.elements() : 0));
  }
  static void backward(const SsdArgs& args, const SsdGrads& grads, const Launch& launch) {
    const SsdOut out;
    SsdSource<T, E> source(args, out, grads);
    Arena arena(launch.workspace);
    cut(arena, args, source);
    Launch rest = launch;
    rest.workspace += arena.used();
    if (grads.dz.given()) {
      source.write_reads(true);
      engine_forward(source, rest);
      source.write_reads(false);
    }
    engine_backward(source, rest);
    source.add_sums();
  }
  static int64_t workspace(const SsdArgs& args, Pass pass, int workers) {
    const SsdOut out;
    const SsdGrads grads;
    SsdSource<T, E> source(args, out, grads);
    if (pass == Pass::forward) return engine_workspace(source, Pass::forward, workers);
    Arena arena;
    cut(arena, args, source);
    const int64_t up = args.z.given() ? engine_workspace(source, Pass::forward, workers) : 0;
    const int64_t down = engine_workspace(source, Pass::backward, workers);
    return arena.used() + (up > down ? up : down);
  }
};

}  // namespace

void mamba_ssd_forward(const SsdArgs& args, const SsdOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Ssd<T, E>::forward(args, out, launch); });
}
void mamba_ssd_backward(const SsdArgs& args, const SsdOut&, const SsdGrads& grads, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Ssd<T, E>::backward(args, grads, launch); });
}
int64_t mamba_ssd_workspace(const SsdArgs& args, Pass pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() { return Ssd<T, E>::workspace(args, pass, workers); });
}

}  // namespace linnet::LINNET_ISA
