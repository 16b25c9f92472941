// One step of the selective scan: the state elements of a channel in the lanes, as the state [E, K] lies in memory, read and
// written once. K = W (16 in f32) is the common size: a channel is one vector, 16 multiply-adds and sums of which 11 are the
// exponential's, and the reads C.h of W channels are folded together, W - 1 sums of two vectors for W sums over lanes.
#include "selective_scan_step.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Scratch {
  T *bias, *skip, *rate, *v, *y;  // [64]; rate: delta log2(e)
  T *in, *out;                    // [ldk]
  LINNET_INLINE static Scratch cut(Arena& arena, int64_t K) {
    Scratch r;
    for (T** row : {&r.bias, &r.skip, &r.rate, &r.v, &r.y}) *row = arena.take<T>(kScanBlock);
    r.in = arena.take<T>(round_up<T>(K));
    r.out = arena.take<T>(round_up<T>(K));
    return r;
  }
};

// Lane l of the result: the sum of row(first + l % kRows) over the lanes that agree with l beyond kRows. Two such vectors of
// kHalf rows each: lanes with bit kHalf take from the second, and each lane is joined by the one whose bit kHalf differs.
template <class T, int kRows, class Row>
LINNET_INLINE typename Vec<T>::V fold_rows(int first, const Row& row) {
  using X = Vec<T>;
  if constexpr (kRows == 1) {
    return row(first);
  } else {
    constexpr int kHalf = kRows / 2;
    const typename X::V a = fold_rows<T, kHalf>(first, row), b = fold_rows<T, kHalf>(first + kHalf, row);
    typename X::I own, other;
#pragma GCC unroll 16
    for (int l = 0; l < X::W; ++l) {
      const int from = (l & kHalf) != 0 ? X::W : 0;
      own[l] = l + from;
      other[l] = (l ^ kHalf) + from;
    }
    return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
  }
}

template <class T, class E>
void decode(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t tokens = args.x.size[1];
  const int K = static_cast<int>(args.A.size[1]);
  const ScanBlocks blocks(args.x.size[2], scan_groups(args.B));
  const View maps_in = grouped(args.B), maps_out = grouped(args.C);
  Arena need;
  Scratch<T>::cut(need, K);
  parallel_near(launch, args.x.size[0] * blocks.count, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * need.used());
    const Scratch<T> r = Scratch<T>::cut(arena, K);
    const int64_t b = task / blocks.count, block = task % blocks.count, first = blocks.first(block);
    const int width = blocks.width(block);
    load_channels<T, E>(args.dt_bias, args.x.dtype, first, width, r.bias);
    load_channels<T, E>(args.D, args.x.dtype, first, width, r.skip);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int c = 0; c < width; c += X::W) {
        const V arg = X::load(args.dt.at<const E>(b, t, first + c), width - c) + X::load(r.bias + c), delta = softplus(arg);
        X::store(r.rate + c, exponents(delta));
        X::store(r.v + c, delta * X::load(args.x.at<const E>(b, t, first + c), width - c));
      }
      load_tile<T>(maps_in.at<const E>(b, t, blocks.group(block)), 0, 1, K, r.in, round_up<T>(K));
      load_tile<T>(maps_out.at<const E>(b, t, blocks.group(block)), 0, 1, K, r.out, round_up<T>(K));
      int c = 0;
      if (K == X::W) {  // the maps stay in registers, no masks
        const V in = X::load(r.in), read = X::load(r.out);
        const T* rates = args.A.at<const T>(first, 0);
        T* states = args.state.at<T>(b, first, 0);
        const int64_t ldA = args.A.stride[0], lds = args.state.stride[1];
        for (; c + X::W <= width; c += X::W) {
          const V y = fold_rows<T, X::W>(c, [&](int e) {
            const Factor<V> f = factor_of(X::broadcast(r.rate[e]) * X::load(rates + e * ldA));
            const V h = advance(f, X::load(states + e * lds), in * X::broadcast(r.v[e]));
            X::store(states + e * lds, h);
            return read * h;
          });
          X::store(r.y + c, y);
        }
      }
      for (; c < width; ++c) {
        const T* A = args.A.at<const T>(first + c, 0);
        T* state = args.state.at<T>(b, first + c, 0);
        const V rate = X::broadcast(r.rate[c]), v = X::broadcast(r.v[c]);
        V y = X::zero();
        for (int n = 0; n < K; n += X::W) {
          const Factor<V> f = factor_of(rate * X::load(A + n, K - n));
          const V h = advance(f, X::load(state + n, K - n), X::load(r.in + n) * v);
          X::store(state + n, h, K - n);
          y = fma(X::load(r.out + n), h, y);
        }
        r.y[c] = sum(y);
      }
      store_output<T, E>(args, out.out, b, t, first, width, r.y, r.skip);
    }
  });
}

}  // namespace

void mamba_selective_scan_decode_forward(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                         const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { decode<T, E>(args, out, launch); });
}
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Scratch<T>::cut(arena, args.A.size[1]);
    return workers * arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
