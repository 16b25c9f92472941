// embedding on the vector units: a copy of rows with conversion; tasks are runs of 16 tokens.
#include "embedding.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kTokens = 16;

LINNET_INLINE int64_t id_of(const View& ids, int64_t b, int64_t t) {
  const int64_t at = b * ids.stride[0] + t * ids.stride[1];
  return ids.dtype == Dtype::i32 ? static_cast<const int32_t*>(ids.data)[at] : static_cast<const int64_t*>(ids.data)[at];
}

// row(id, out) for each token
template <class Row>
void each_token(const View& ids, const Launch& launch, const Row& row) {
  const int64_t T = ids.size[1], tiles = (T + kTokens - 1) / kTokens;
  parallel(launch, ids.size[0] * tiles, [&](int64_t task, int) {
    const int64_t b = task / tiles, first = task % tiles * kTokens, end = first + kTokens < T ? first + kTokens : T;
    for (int64_t t = first; t < end; ++t) row(id_of(ids, b, t), b, t);
  });
}

template <class T, class E, class R>
void copy_rows(const EmbeddingArgs& args, const EmbeddingOut& out, const Launch& launch) {
  using X = Vec<T>;
  const int width = static_cast<int>(args.table.size[1]);
  const typename X::V factor = X::broadcast(static_cast<T>(args.scale));
  each_token(args.ids, launch, [&](int64_t id, int64_t b, int64_t t) {
    const E* from = args.table.at<const E>(id);
    R* to = out.out.at<R>(b, t);
    for (int c = 0; c < width; c += X::W) X::store(to + c, X::load(from + c, width - c) * factor, width - c);
  });
}

template <class T, class E, class R>
void unpack_rows(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Launch& launch) {
  const int64_t groups = args.codes.size[1];
  const bool eight = args.bits == QuantisedBits::eight, offset = args.offset.given();
  const T zero = offset ? T(0) : eight ? T(128) : T(8), factor = static_cast<T>(args.scale);
  each_token(args.ids, launch, [&](int64_t id, int64_t b, int64_t t) {
    const int64_t p = id / 16, r = id % 16;
    R* to = out.out.at<R>(b, t);
    for (int64_t g = 0; g < groups; ++g, to += 32) {
      const uint8_t* block = args.codes.at<const uint8_t>(p, g) + 4 * r;
      const T scale = static_cast<T>(to_f64(*args.scales.at<const E>(p, g, r)));
      const T base = offset ? static_cast<T>(to_f64(*args.offset.at<const E>(p, g, r))) : T(0);
      T row[32];
      for (int k = 0; k < 32; ++k) {
        const int code = eight ? block[k / 4 * 64 + k % 4] : block[k % 16 / 4 * 64 + k % 4] >> (k / 16 * 4) & 15;
        row[k] = (scale * (static_cast<T>(code) - zero) + base) * factor;
      }
      for (int c = 0; c < 32; c += Vec<T>::W) Vec<T>::store(to + c, Vec<T>::load(row + c));
    }
  });
}

}  // namespace

void embedding_forward(const EmbeddingArgs& args, const EmbeddingOut& out, const Launch& launch) {
  by_dtype(args.table.dtype, [&]<class T, class E>() {
    if (out.out.dtype == args.table.dtype) return copy_rows<T, E, E>(args, out, launch);
    copy_rows<T, E, T>(args, out, launch);
  });
}
int64_t embedding_workspace(const EmbeddingArgs&, Pass, int) { return 0; }

void embedding_quantised_forward(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Launch& launch) {
  by_dtype(args.scales.dtype, [&]<class T, class E>() {
    if (out.out.dtype == args.scales.dtype) return unpack_rows<T, E, E>(args, out, launch);
    unpack_rows<T, E, T>(args, out, launch);
  });
}
int64_t embedding_quantised_workspace(const EmbeddingQuantisedArgs&, Pass, int) { return 0; }

}  // namespace linnet::LINNET_ISA
