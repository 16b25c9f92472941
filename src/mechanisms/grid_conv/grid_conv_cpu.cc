// grid_conv on the vector units: channels in the lanes, a task has one row of the grid. Four neighbouring tokens share each
// tap, so that a multiply-add reads one operand from L1. The taps lie transposed, [W, W, E], in the type of the sums. dx is the
// same convolution with the taps turned round. dweight is summed over one row of the grid in the type of the sums, over rows
// and the batch in double; a task has a row of taps and kChannels channels, and one row more for dbias.
#include "core/element.h"
#include "grid_conv.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kChannels = 64;
constexpr int kTokens = 4;

template <class T>
struct Memory {
  T *taps, *bias;  // [W, W, ld], [ld]
  double* parts;   // [workers, W, kChannels]
  int64_t ld, W;
  static Memory cut(Arena& arena, const GridConvArgs& args, Pass pass, int workers) {
    Memory m;
    m.ld = (args.x.size[2] + 15) / 16 * 16;
    m.W = args.weight.size[1];
    m.taps = arena.take<T>(m.W * m.W * m.ld);
    m.bias = arena.take<T>(m.ld);
    m.parts = pass == Pass::backward ? arena.take<double>(workers * m.W * kChannels) : nullptr;
    return m;
  }
  // The taps, turned round for the gradient of x, and the bias, which that has not.
  void fill(const GridConvArgs& args, bool turned) const {
    const int64_t C = args.x.size[2], last = W * W - 1;
    for (int64_t k = 0; k <= last; ++k) {
      const int64_t from = turned ? last - k : k;
      for (int64_t c = 0; c < ld; ++c) {
        taps[k * ld + c] = c < C ? static_cast<T>(element(args.weight, c, from / W, from % W)) : T(0);
      }
    }
    for (int64_t c = 0; c < ld; ++c) {
      bias[c] = c < C && args.bias.given() && !turned ? static_cast<T>(element(args.bias, c)) : T(0);
    }
  }
};

// Tokens [x, x + N) of row y, all channels.
template <class T, class E, int N>
LINNET_INLINE void tokens(const Memory<T>& m, const GridConvArgs& args, const View& from, const View& to, int64_t b, int64_t y,
                          int64_t x) {
  using X = Vec<T>;
  const int64_t half = m.W / 2;
  const int C = static_cast<int>(from.size[2]);
  for (int c = 0; c < C; c += X::W) {
    typename X::V sum[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[n] = X::load(m.bias + c);
    for (int64_t i = 0; i < m.W; ++i) {
      const int64_t v = y + i - half;
      if (v < 0 || v >= args.height) continue;
      for (int64_t j = 0; j < m.W; ++j) {
        const int64_t u = x + j - half;
        const typename X::V tap = X::load(m.taps + (i * m.W + j) * m.ld + c);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          if (u + n < 0 || u + n >= args.width) continue;
          sum[n] = fma(tap, X::load(from.at<const E>(b, v * args.width + u + n, c), C - c), sum[n]);
        }
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) X::store(to.at<E>(b, y * args.width + x + n, c), sum[n], C - c);
  }
}

template <class T, class E>
void convolve(const Memory<T>& m, const GridConvArgs& args, const View& from, const View& to, const Launch& launch) {
  parallel(launch, from.size[0] * args.height, [&](int64_t task, int) {
    const int64_t b = task / args.height, y = task % args.height;
    int64_t x = 0;
    for (; x + kTokens <= args.width; x += kTokens) tokens<T, E, kTokens>(m, args, from, to, b, y, x);
    for (; x < args.width; ++x) tokens<T, E, 1>(m, args, from, to, b, y, x);
  });
}

// sum_x dout[y, x] x[y + i - W/2, x + j - W/2] of one row y and channels [c, c + lanes); j = -1: sum_x dout[y, x].
template <class T, class E>
LINNET_INLINE typename Vec<T>::V row_sum(const GridConvArgs& args, const View& dout, int64_t b, int64_t y, int64_t v, int64_t u,
                                         bool bias, int64_t c) {
  using X = Vec<T>;
  const int left = static_cast<int>(args.x.size[2] - c);
  typename X::V sum = X::zero();
  const int64_t first = bias || u > 0 ? 0 : -u, end = bias || u < 0 ? args.width : args.width - u;
  for (int64_t x = first; x < end; ++x) {
    const typename X::V d = X::load(dout.at<const E>(b, y * args.width + x, c), left);
    sum = bias ? sum + d : fma(d, X::load(args.x.at<const E>(b, v * args.width + x + u, c), left), sum);
  }
  return sum;
}

template <class T, class E>
void parameters(const Memory<T>& m, const GridConvArgs& args, const GridConvGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  const int64_t C = args.x.size[2], columns = (C + kChannels - 1) / kChannels;
  parallel(launch, columns * (m.W + 1), [&](int64_t task, int worker) {
    const int64_t c0 = task / (m.W + 1) * kChannels, i = task % (m.W + 1), end = c0 + kChannels < C ? c0 + kChannels : C;
    const bool bias = i == m.W;
    if (!(bias ? grads.dbias : grads.dweight).given()) return;
    const int64_t taps = bias ? 1 : m.W;
    double* parts = m.parts + worker * m.W * kChannels;
    for (int64_t k = 0; k < taps * kChannels; ++k) parts[k] = 0;
    for (int64_t b = 0; grads.dout.given() && b < args.x.size[0]; ++b) {
      for (int64_t y = 0; y < args.height; ++y) {
        const int64_t v = y + i - m.W / 2;
        if (!bias && (v < 0 || v >= args.height)) continue;
        for (int64_t j = 0; j < taps; ++j) {
          for (int64_t c = c0; c < end; c += X::W) {
            const typename X::V sum = row_sum<T, E>(args, grads.dout, b, y, v, j - m.W / 2, bias, c);
            for (int64_t l = 0; l < X::W && c + l < end; ++l) {
              parts[j * kChannels + c - c0 + l] += static_cast<double>(sum[l]);
            }
          }
        }
      }
    }
    for (int64_t c = c0; c < end; ++c) {
      if (bias) {
        set_element(grads.dbias, parts[c - c0], c);
        continue;
      }
      for (int64_t j = 0; j < m.W; ++j) set_element(grads.dweight, parts[j * kChannels + c - c0], c, i, j);
    }
  });
}

// dx where nothing comes in.
template <class T, class E>
void clear(const View& dx, const Launch& launch) {
  parallel(launch, dx.size[0] * dx.size[1], [&](int64_t task, int) {
    const int C = static_cast<int>(dx.size[2]);
    E* row = dx.at<E>(task / dx.size[1], task % dx.size[1], 0);
    for (int c = 0; c < C; c += Vec<T>::W) Vec<T>::store(row + c, Vec<T>::zero(), C - c);
  });
}

}  // namespace

void grid_conv_forward(const GridConvArgs& args, const GridConvOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena(launch.workspace);
    const Memory<T> m = Memory<T>::cut(arena, args, Pass::forward, launch.workers);
    m.fill(args, false);
    convolve<T, E>(m, args, args.x, out.out, launch);
  });
}
void grid_conv_backward(const GridConvArgs& args, const GridConvOut&, const GridConvGrads& grads, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena(launch.workspace);
    const Memory<T> m = Memory<T>::cut(arena, args, Pass::backward, launch.workers);
    if (grads.dx.given() && !grads.dout.given()) clear<T, E>(grads.dx, launch);
    if (grads.dx.given() && grads.dout.given()) {
      m.fill(args, true);
      convolve<T, E>(m, args, grads.dout, grads.dx, launch);
    }
    parameters<T, E>(m, args, grads, launch);
  });
}
int64_t grid_conv_workspace(const GridConvArgs& args, Pass pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Memory<T>::cut(arena, args, pass, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
