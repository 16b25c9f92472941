// What launches of kernels over rows share: whether rows can be read 16 bytes at a time, names by type, sums of parts.
#pragma once

#include "core/cuda/driver.h"
#include "core/view.h"

namespace linnet::cuda {

inline constexpr int64_t kVectorBytes = 16;

// Rows (the last dimension) that begin at and span multiples of 16 bytes; an absent tensor does not matter.
inline bool has_whole_rows(const View& view) {
  if (!view.given()) return true;
  const int64_t vector = kVectorBytes / dtype_size(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % kVectorBytes != 0 || view.size[view.rank - 1] % vector != 0) return false;
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.size[i] > 1 && view.stride[i] % vector != 0) return false;
  }
  return true;
}
// One run of elements without gaps.
inline bool is_dense(const View& view) {
  if (!view.given()) return true;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.size[i] > 1 && view.stride[i] != stride) return false;
    stride *= view.size[i];
  }
  return true;
}
template <class... Views>
bool all_whole(const Views&... views) {
  return (has_whole_rows(views) && ...);
}
template <class... Views>
bool all_dense(const Views&... views) {
  return (is_dense(views) && ...);
}

// The kernel stem_f32, stem_bf16 or stem_f16.
#define LINNET_BY_TYPE(stem, dtype) \
  static_cast<const char*>((dtype) == Dtype::f32 ? #stem "_f32" : (dtype) == Dtype::bf16 ? #stem "_bf16" : #stem "_f16")

inline const char* refuses_f64(Dtype dtype) { return dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr; }
constexpr int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// out = the sum over parts [parts, out.elements()] of f32, in one order; out has up to four dimensions.
void sum_parts(const Launch& launch, const float* parts, int64_t count, const View& out);

}  // namespace linnet::cuda
