// metala_mixer and metala_core on the vector units: their rows for the recurrence engine (mechanisms/recurrence/cpu/engine.h)
// with a decay per channel and k = -expm1(g); the augmentation where the engine hands the rows over. Backward: the tie adds
// -exp(g) dk to dg. dw_aug runs in double, one sum for each sequence and head.
#include "core/sequence.h"
#include "mechanisms/recurrence/cpu/engine.h"
#include "metala.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T, class E, class Args, class Out, class Grads>
class MetalaSource final : public ChunkSource<T> {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr bool kMixer = requires(Args a) { a.tau; };

 public:
  MetalaSource(const Args& args, const Out& out, const Grads& grads) : args_(args), out_(out), grads_(grads) {
    EngineShape& e = this->shape;
    e.sequences = sequence_count(args.cu_seqlens, args.q.size[0]);
    e.heads = args.q.size[2];
    e.longest = args.q.size[1];
    e.K = static_cast<int>(args.q.size[3]);
    e.V = static_cast<int>(args.v.size[3]);
    e.gate = Gate::channel;
    scale_ = static_cast<T>(args.scale.value_or(e.K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(e.K))));
  }
  void keep_sums(double* sums) { sums_ = sums; }  // [N, H, K]: dw_aug

  int64_t tokens(int64_t n) const override { return sequence(n).length(); }

  void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const override {
    const Sequence seq = sequence(n);
    const int K = this->shape.K;
    if (c.q != nullptr)
      load_tile<T>(args_.q.template at<const E>(seq.b, seq.begin + at, h), args_.q.stride[1], rows, K, c.q, c.ldk);
    load_tile<T>(args_.v.template at<const E>(seq.b, seq.begin + at, h, c.first), args_.v.stride[1], rows, c.last - c.first,
                 c.v + c.first, c.ldv);
    for (int r = 0; r < rows; ++r) {
      const int64_t t = seq.begin + at + r;
      for (int64_t j = 0; metala_masked(args_, seq.b, t) && j < c.ldv; j += X::W) X::store(c.v + r * c.ldv + j, X::zero());
      for (int64_t i = 0; i < c.ldk; i += X::W) {
        const int lanes = K - static_cast<int>(i);
        const V g = select(X::prefix(lanes), log_decay(seq.b, t, h, static_cast<int>(i), lanes), X::zero());
        X::store(c.g + r * c.ldk + i, g);
        X::store(c.k + r * c.ldk + i, -expm1(g));
      }
    }
  }
  void begin(int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) const override {
    load_state(args_.state, n, h, shape_of, state);
  }
  void end(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) const override {
    store_state(out_.final_state, n, h, shape_of, state);
  }
  void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const override {
    const Sequence seq = sequence(n);
    const int width = this->shape.V;
    for (int r = 0; r < rows; ++r) {
      const int64_t t = seq.begin + at + r;
      const V u = X::broadcast(strength(h, c, r));
      for (int j = c.first; j < c.last; j += X::W) {
        V y = X::load(o + r * c.ldv + j) * X::broadcast(scale_);
        if constexpr (kMixer) {
          const V x = u * value(seq.b, t, h, j);
          if (args_.aug == MetalaAug::sigmoid) y = y + sigmoid(x);
          if (args_.aug == MetalaAug::linear) y = y + x;
        }
        X::store(out_.out.template at<E>(seq.b, t, h, j), y, width - j);
      }
    }
  }

  void load_dout(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, T* dout) const override {
    const Sequence seq = sequence(n);
    if (!grads_.dout.given()) {
      for (int64_t j = 0; j < rows * c.ldv; j += X::W) X::store(dout + j, X::zero());
      return;
    }
    load_tile<T>(grads_.dout.template at<const E>(seq.b, seq.begin + at, h), grads_.dout.stride[1], rows, this->shape.V, dout,
                 c.ldv, scale_);
  }
  void gradients(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const ChunkGrads<T>& d) const override {
    const Sequence seq = sequence(n);
    const int K = this->shape.K, width = this->shape.V;
    const V one = X::broadcast(1);
    for (int r = 0; r < rows; ++r) {
      const int64_t t = seq.begin + at + r;
      const T u = strength(h, c, r);
      const bool masked = metala_masked(args_, seq.b, t), skipped = metala_skipped(args_, seq.b, t);
      V dots = X::zero();
      for (int j = 0; j < width; j += X::W) {
        V dv = X::load(d.dv + r * c.ldv + j);
        if constexpr (kMixer) {
          if (args_.aug != MetalaAug::none && grads_.dout.given()) {
            const V v = value(seq.b, t, h, j);
            V slope = X::load(grads_.dout.template at<const E>(seq.b, t, h, j), width - j);
            if (args_.aug == MetalaAug::sigmoid) {
              const V s = sigmoid(X::broadcast(u) * v);
              slope = slope * (s * (one - s));
            }
            dots = fma(slope, v, dots);
            dv = fma(X::broadcast(u), slope, dv);
          }
        }
        if (masked) dv = X::zero();
        if (grads_.dv.given()) X::store(grads_.dv.template at<E>(seq.b, t, h, j), dv, width - j);
      }
      const V du = X::broadcast(sum(dots));
      for (int i = 0; i < K; i += X::W) {
        V dq = X::load(d.dq + r * c.ldk + i), dk = X::load(d.dk + r * c.ldk + i);
        const V q = X::load(c.q + r * c.ldk + i), k = X::load(c.k + r * c.ldk + i);
        if constexpr (kMixer) {
          if (args_.w_aug.given()) {
            const V w = weight(h, i);
            dq = fma(du, w * k, dq);
            dk = fma(du, w * q, dk);
            if (sums_ != nullptr) {
              const V part = du * q * k;
              double* to = sums_ + (n * this->shape.heads + h) * K + i;
              for (int lane = 0; lane < X::W && i + lane < K; ++lane) to[lane] += static_cast<double>(part[lane]);
            }
          }
        }
        if (grads_.dq.given()) X::store(grads_.dq.template at<E>(seq.b, t, h, i), dq, K - i);
        const V g = log_decay(seq.b, t, h, i, K - i);
        V dg = fma(-exp(g), dk, X::load(d.dg + r * c.ldk + i));
        if constexpr (kMixer) {
          if (!grads_.da.given()) continue;
          const V a = X::load(args_.a.template at<const E>(seq.b, t, h, i), K - i);
          dg = dg * sigmoid(-a) * X::broadcast(static_cast<T>(1 / args_.tau));
          dg = skipped ? X::zero() : select(gt(g, X::broadcast(static_cast<T>(args_.floor))), dg, X::zero());
          X::store(grads_.da.template at<E>(seq.b, t, h, i), dg, K - i);
        } else {
          if (!grads_.dg.given()) continue;
          const V raw = X::load(args_.g.template at<const T>(seq.b, t, h, i), K - i);
          dg = select(lt(raw, X::broadcast(static_cast<T>(args_.floor))), X::zero(), dg);
          X::store(grads_.dg.template at<T>(seq.b, t, h, i), dg, K - i);
        }
      }
    }
  }
  void begin_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, T* dstate) const override {
    load_state(grads_.dfinal_state, n, h, shape_of, dstate);
    for (int i = 0; sums_ != nullptr && i < this->shape.K; ++i) sums_[(n * this->shape.heads + h) * this->shape.K + i] = 0;
  }
  void end_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* dstate) const override {
    store_state(grads_.dstate, n, h, shape_of, dstate);
  }
  // Sequences in order.
  void add_sums(const View& dw) const {
    const int64_t H = this->shape.heads, K = this->shape.K;
    for (int64_t i = 0; i < H * K; ++i) {
      double all = 0;
      for (int64_t n = 0; n < this->shape.sequences; ++n) all += sums_[n * H * K + i];
      store_f64(dw.data, dw.dtype, i / K * dw.stride[0] + i % K, all);
    }
  }

 private:
  Sequence sequence(int64_t n) const { return sequence_of(args_.cu_seqlens, args_.q.size[1], n); }
  LINNET_INLINE V log_decay(int64_t b, int64_t t, int64_t h, int i, int lanes) const {
    const V floor = X::broadcast(static_cast<T>(args_.floor));
    if (metala_skipped(args_, b, t)) return X::zero();
    if constexpr (kMixer) {
      const V a = X::load(args_.a.template at<const E>(b, t, h, i), lanes);
      return max(floor, -softplus(-a) * X::broadcast(static_cast<T>(1 / args_.tau)));  // -softplus(-a) = logsigmoid(a)
    } else {
      return max(floor, X::load(args_.g.template at<const T>(b, t, h, i), lanes));
    }
  }
  LINNET_INLINE V weight(int64_t h, int i) const {
    if (args_.w_aug.dtype == args_.q.dtype) return X::load(args_.w_aug.template at<const E>(h, i), this->shape.K - i);
    return X::load(args_.w_aug.template at<const T>(h, i), this->shape.K - i);
  }
  LINNET_INLINE V value(int64_t b, int64_t t, int64_t h, int j) const {
    if (metala_masked(args_, b, t)) return X::zero();
    return X::load(args_.v.template at<const E>(b, t, h, j), this->shape.V - j);
  }
  // u = sum_d q_d w_aug_d k_d
  LINNET_INLINE T strength(int64_t h, const ChunkTiles<T>& c, int r) const {
    if constexpr (kMixer) {
      if (!args_.w_aug.given() || args_.aug == MetalaAug::none) return 0;
      V total = X::zero();
      for (int i = 0; i < this->shape.K; i += X::W) {
        total = fma(X::load(c.q + r * c.ldk + i) * weight(h, i), X::load(c.k + r * c.ldk + i), total);
      }
      return sum(total);
    }
    return 0;
  }
  static void load_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) {
    load_panels<T>(shape_of, view.given() ? view.at<const T>(n, h) : nullptr, view.given() ? view.stride[2] : 0, state);
  }
  static void store_state(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) {
    if (view.given()) store_panels<T>(shape_of, state, view.at<T>(n, h), view.stride[2]);
  }

  const Args& args_;
  const Out& out_;
  const Grads& grads_;
  T scale_;
  double* sums_ = nullptr;
};

template <class T, class E>
using Mixer = MetalaSource<T, E, MetalaMixerArgs, MetalaMixerOut, MetalaMixerGrads>;
template <class T, class E>
using Core = MetalaSource<T, E, MetalaCoreArgs, MetalaCoreOut, MetalaCoreGrads>;

}  // namespace

void metala_mixer_forward(const MetalaMixerArgs& args, const MetalaMixerOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const MetalaMixerGrads grads;
    engine_forward(Mixer<T, E>(args, out, grads), launch);
  });
}
void metala_mixer_backward(const MetalaMixerArgs& args, const MetalaMixerOut& out, const MetalaMixerGrads& grads,
                           const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    Mixer<T, E> source(args, out, grads);
    Arena arena(launch.workspace);
    double* sums = arena.take<double>(source.shape.sequences * source.shape.heads * source.shape.K);
    Launch rest = launch;
    rest.workspace += arena.used();
    if (grads.dw_aug.given()) source.keep_sums(sums);
    engine_backward(source, rest);
    if (grads.dw_aug.given()) source.add_sums(grads.dw_aug);
  });
}
int64_t metala_mixer_workspace(const MetalaMixerArgs& args, Pass pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    const MetalaMixerOut out;
    const MetalaMixerGrads grads;
    const Mixer<T, E> source(args, out, grads);
    Arena arena;
    if (pass == Pass::backward) arena.take<double>(source.shape.sequences * source.shape.heads * source.shape.K);
    return arena.used() + engine_workspace(source, pass, workers);
  });
}

void metala_core_forward(const MetalaCoreArgs& args, const MetalaCoreOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const MetalaCoreGrads grads;
    engine_forward(Core<T, E>(args, out, grads), launch);
  });
}
void metala_core_backward(const MetalaCoreArgs& args, const MetalaCoreOut& out, const MetalaCoreGrads& grads,
                          const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { engine_backward(Core<T, E>(args, out, grads), launch); });
}
int64_t metala_core_workspace(const MetalaCoreArgs& args, Pass pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    const MetalaCoreOut out;
    const MetalaCoreGrads grads;
    return engine_workspace(Core<T, E>(args, out, grads), pass, workers);
  });
}

}  // namespace linnet::LINNET_ISA
