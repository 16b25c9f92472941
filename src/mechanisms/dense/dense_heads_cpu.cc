// dense_heads on the vector units: tasks are runs of 32 tokens of one head; four rows share each row of the matrix.
#include "core/half.h"
#include "dense.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kTokens = 32, kRows = 4;

template <class T>
struct Scratch {
  T *weight, *bias, *x;  // [K, ldf], [ldf], [4, K]
};
template <class T>
Scratch<T> cut(Arena& arena, const DenseHeadsArgs& args) {
  const int64_t K = args.x.size[3], ldf = (args.weight.size[2] + Vec<T>::W - 1) / Vec<T>::W * Vec<T>::W;
  return {arena.take<T>(K * ldf), arena.take<T>(ldf), arena.take<T>(kRows * K)};
}

template <class T, class E>
void map_heads(const DenseHeadsArgs& args, const DenseOut& out, const Launch& launch) {
  using X = Vec<T>;
  const int64_t length = args.x.size[1], H = args.x.size[2], K = args.x.size[3], F = args.weight.size[2];
  const int64_t ldf = (F + X::W - 1) / X::W * X::W, tiles = (length + kTokens - 1) / kTokens;
  Arena sizes;
  cut<T>(sizes, args);
  const int64_t each = sizes.used();
  parallel(launch, args.x.size[0] * H * tiles, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * each);
    const Scratch<T> s = cut<T>(arena, args);
    const int64_t b = task / (H * tiles), h = task / tiles % H, first = task % tiles * kTokens;
    const int64_t end = first + kTokens < length ? first + kTokens : length;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t row = h * args.weight.stride[0] + k * args.weight.stride[1];
      for (int64_t f = 0; f < ldf; ++f) {
        s.weight[k * ldf + f] =
            f < F ? static_cast<T>(load_f64(args.weight.data, args.weight.dtype, row + f * args.weight.stride[2])) : T(0);
      }
    }
    for (int64_t f = 0; f < ldf; ++f) {
      s.bias[f] =
          args.bias.given() && f < F
              ? static_cast<T>(load_f64(args.bias.data, args.bias.dtype, h * args.bias.stride[0] + f * args.bias.stride[1]))
              : T(0);
    }
    for (int64_t t = first; t < end; t += kRows) {
      const int64_t rows = t + kRows < end ? kRows : end - t;
      for (int64_t r = 0; r < kRows; ++r) {  // rows beyond the end repeat the last one
        const E* from = args.x.at<const E>(b, t + (r < rows ? r : rows - 1), h);
        for (int64_t k = 0; k < K; ++k) s.x[r * K + k] = static_cast<T>(to_f64(from[k]));
      }
      for (int64_t f = 0; f < F; f += X::W) {
        typename X::V sums[kRows];
        for (int64_t r = 0; r < kRows; ++r) sums[r] = X::load(s.bias + f);
        for (int64_t k = 0; k < K; ++k) {
          const typename X::V w = X::load(s.weight + k * ldf + f);
          for (int64_t r = 0; r < kRows; ++r) sums[r] += X::broadcast(s.x[r * K + k]) * w;
        }
        for (int64_t r = 0; r < rows; ++r)
          X::store(out.out.at<E>(b, t + r, h) + f, sums[r], static_cast<int>(F - f < X::W ? F - f : X::W));
      }
    }
  });
}

}  // namespace

void dense_heads_forward(const DenseHeadsArgs& args, const DenseOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { map_heads<T, E>(args, out, launch); });
}
int64_t dense_heads_workspace(const DenseHeadsArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    cut<T>(arena, args);
    return workers * arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
