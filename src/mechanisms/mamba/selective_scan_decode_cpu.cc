// One step of the selective scan: the state elements of a channel in the lanes, as the state [E, K] lies in memory, read and
// written once. With K = 16 the exponential (0.2 ns an element) is half of the time once the state comes from memory.
#include "selective_scan_step.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Scratch {
  T *bias, *skip, *delta, *v, *y;  // [64]
  T *in, *out;                     // [ldk]
  T* reads;                        // [64, W]: products of K = W channels
  LINNET_INLINE static Scratch cut(Arena& arena, int64_t K) {
    Scratch r;
    for (T** row : {&r.bias, &r.skip, &r.delta, &r.v, &r.y}) *row = arena.take<T>(kScanBlock);
    r.in = arena.take<T>(round_up<T>(K));
    r.out = arena.take<T>(round_up<T>(K));
    r.reads = arena.take<T>(kScanBlock * Vec<T>::W);
    return r;
  }
};

// y[c] = the sum of row c [W]: a block of W rows is transposed, then added row by row.
template <class T>
LINNET_INLINE void sum_rows(const T* rows, int count, T* y) {
  using X = Vec<T>;
  T turned[X::W * X::W];
  for (int c = 0; c < count; c += X::W) {
    load_tile_transposed<T>(rows + c * X::W, X::W, count - c < X::W ? count - c : X::W, X::W, turned, X::W);
    typename X::V total[2] = {X::load(turned), X::load(turned + X::W)};
    for (int i = 2; i < X::W; i += 2) {
      total[0] += X::load(turned + i * X::W);
      total[1] += X::load(turned + (i + 1) * X::W);
    }
    X::store(y + c, total[0] + total[1]);
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
    load_channels(args.dt_bias, first, width, r.bias);
    load_channels(args.D, first, width, r.skip);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int c = 0; c < width; c += X::W) {
        const V arg = X::load(args.dt.at<const E>(b, t, first + c), width - c) + X::load(r.bias + c), delta = softplus(arg);
        X::store(r.delta + c, delta);
        X::store(r.v + c, delta * X::load(args.x.at<const E>(b, t, first + c), width - c));
      }
      load_tile<T>(maps_in.at<const E>(b, t, blocks.group(block)), 0, 1, K, r.in, round_up<T>(K));
      load_tile<T>(maps_out.at<const E>(b, t, blocks.group(block)), 0, 1, K, r.out, round_up<T>(K));
      int c = 0;
      if (K == X::W) {  // one vector each: the maps stay in registers, no masks
        const V in = X::load(r.in), read = X::load(r.out);
        for (; c < width; ++c) {
          T* state = args.state.at<T>(b, first + c, 0);
          const Factor<V> f = factor_of(X::broadcast(r.delta[c]) * X::load(args.A.at<const T>(first + c, 0)));
          const V h = advance(f.value, f.near, X::load(state), in * X::broadcast(r.v[c]));
          X::store(state, h);
          X::store(r.reads + c * X::W, read * h);
        }
        sum_rows<T>(r.reads, width, r.y);
      }
      for (; c < width; ++c) {
        const T* A = args.A.at<const T>(first + c, 0);
        T* state = args.state.at<T>(b, first + c, 0);
        const V delta = X::broadcast(r.delta[c]), v = X::broadcast(r.v[c]);
        V y = X::zero();
        for (int n = 0; n < K; n += X::W) {
          const Factor<V> f = factor_of(delta * X::load(A + n, K - n));
          const V h = advance(f.value, f.near, X::load(state + n, K - n), X::load(r.in + n) * v);
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
