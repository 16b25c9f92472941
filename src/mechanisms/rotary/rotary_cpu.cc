// rotary on the vector units: cosines and sines of a token once for all heads. Within a task of 64 tokens they are carried from
// token to token by the rotation of one position, in double: the C library is asked once per task and pair, and 64 steps cost
// at most 64 roundings of 2^-53. Positions that are given cost one call per token and pair. The result may lie where x does.
#include "rotary.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kTokens = 64;

template <class T>
struct Memory {
  double* frequency;  // [half]
  double* workers;    // [workers, 4, half]: cosine, sine, those of one step
  T* tables;          // [workers, 2, ld]: what multiplies the channels of a token
  int64_t half, ld;
  static Memory cut(Arena& arena, const RotaryArgs& args, int workers) {
    Memory m;
    m.half = (args.dims == 0 ? args.x.size[3] : args.dims) / 2;
    m.ld = (2 * m.half + 15) / 16 * 16 + 16;
    m.frequency = arena.take<double>(m.half);
    m.workers = arena.take<double>(workers * 4 * m.half);
    m.tables = arena.take<T>(workers * 2 * m.ld);
    return m;
  }
};

// Lanes 1, 0, 3, 2, ...
template <class V>
LINNET_INLINE V swap_neighbours(V v) {
  V r;
#pragma GCC unroll 16
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) r[i] = v[i ^ 1];
  return r;
}

template <class T, class E>
LINNET_INLINE void turn_row(const E* x, E* y, const T* c, const T* s, int64_t half, int D, bool interleaved) {
  using X = Vec<T>;
  using V = typename X::V;
  const int n = static_cast<int>(half);
  if (interleaved) {  // c and s stand twice for each pair, s with the sign of its place
    for (int i = 0; i < 2 * n; i += X::W) {
      const V v = X::load(x + i, 2 * n - i);
      X::store(y + i, fma(v, X::load(c + i), swap_neighbours(v) * X::load(s + i)), 2 * n - i);
    }
  } else {
    for (int i = 0; i < n; i += X::W) {
      const V u = X::load(x + i, n - i), v = X::load(x + n + i, n - i), cosine = X::load(c + i), sine = X::load(s + i);
      X::store(y + i, fma(u, cosine, -(v * sine)), n - i);
      X::store(y + n + i, fma(u, sine, v * cosine), n - i);
    }
  }
  for (int i = 2 * n; i < D; i += X::W) X::store(y + i, X::load(x + i, D - i), D - i);
}

template <class T, class E>
void turn(const RotaryArgs& args, const View& x, const View& out, double sign, const Launch& launch) {
  Arena arena(launch.workspace);
  const Memory<T> m = Memory<T>::cut(arena, args, launch.workers);
  const int64_t half = m.half, tiles = (x.size[1] + kTokens - 1) / kTokens;
  const bool interleaved = args.pairs == RotaryPairs::interleaved;
  for (int64_t i = 0; i < half; ++i) m.frequency[i] = rotary_frequency(args, i);
  parallel(launch, x.size[0] * tiles, [&](int64_t task, int worker) {
    const int64_t b = task / tiles, first = task % tiles * kTokens;
    const int64_t end = first + kTokens < x.size[1] ? first + kTokens : x.size[1];
    double *cosine = m.workers + worker * 4 * half, *sine = cosine + half, *c1 = sine + half, *s1 = c1 + half;
    T *c = m.tables + worker * 2 * m.ld, *s = c + m.ld;
    const auto start = [&](double position) {
      for (int64_t i = 0; i < half; ++i) {
        cosine[i] = __builtin_cos(position * m.frequency[i]);
        sine[i] = __builtin_sin(position * m.frequency[i]);
      }
    };
    for (int64_t i = 0; i < 2 * m.ld; ++i) c[i] = 0;
    for (int64_t t = first; t < end; ++t) {
      if (args.positions.given()) {
        const int64_t at = b * args.positions.stride[0] + t * args.positions.stride[1];
        start(load_f64(args.positions.data, args.positions.dtype, at));
      } else if (t == first) {
        start(static_cast<double>(args.offset + t));
        for (int64_t i = 0; t + 1 < end && i < half; ++i) {
          c1[i] = __builtin_cos(m.frequency[i]);
          s1[i] = __builtin_sin(m.frequency[i]);
        }
      } else {
        for (int64_t i = 0; i < half; ++i) {
          const double next = cosine[i] * c1[i] - sine[i] * s1[i];
          sine[i] = cosine[i] * s1[i] + sine[i] * c1[i];
          cosine[i] = next;
        }
      }
      for (int64_t i = 0; i < half; ++i) {
        const T cos = static_cast<T>(cosine[i]), sin = static_cast<T>(sign * sine[i]);
        if (interleaved) {
          c[2 * i] = c[2 * i + 1] = cos;
          s[2 * i] = -sin;
          s[2 * i + 1] = sin;
        } else {
          c[i] = cos;
          s[i] = sin;
        }
      }
      for (int64_t h = 0; h < x.size[2]; ++h) {
        turn_row<T>(x.at<const E>(b, t, h), out.at<E>(b, t, h), c, s, half, static_cast<int>(x.size[3]), interleaved);
      }
    }
  });
}

}  // namespace

void rotary_forward(const RotaryArgs& args, const RotaryOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { turn<T, E>(args, args.x, out.out, 1, launch); });
}
void rotary_backward(const RotaryArgs& args, const RotaryOut&, const RotaryGrads& grads, const Launch& launch) {
  const View& dx = grads.dx;
  if (!dx.given()) return;
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    if (grads.dout.given()) return turn<T, E>(args, grads.dout, dx, -1, launch);
    parallel(launch, dx.size[0] * dx.size[1], [&](int64_t task, int) {
      for (int64_t h = 0; h < dx.size[2]; ++h) {
        E* row = dx.at<E>(task / dx.size[1], task % dx.size[1], h);
        for (int c = 0; c < dx.size[3]; c += Vec<T>::W) {
          Vec<T>::store(row + c, Vec<T>::zero(), static_cast<int>(dx.size[3]) - c);
        }
      }
    });
  });
}
int64_t rotary_workspace(const RotaryArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Memory<T>::cut(arena, args, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
