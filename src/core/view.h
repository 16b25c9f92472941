// View: a strided tensor that somebody else owns. Everything in Linnet takes and fills views.
//
//   float q[2 * 128 * 8 * 64];
//   View v = View::dense(q, Dtype::f32, {2, 128, 8, 64});        // [B, T, H, K]
//
// This header is included by sources compiled for several instruction sets, so it holds plain data and functions that are
// always inlined: the linker must never pick another instruction set's copy of a function.
#pragma once

#include <cstdint>
#include <initializer_list>

#define LINNET_INLINE [[gnu::always_inline]] inline

namespace linnet {

enum class Dtype : int32_t { none = 0, f64, f32, bf16, f16, i64, i32, u8 };
enum class Device : int32_t { cpu = 0, cuda = 1 };

LINNET_INLINE constexpr int64_t dtype_size(Dtype d) {
  switch (d) {
    case Dtype::f64:
    case Dtype::i64: return 8;
    case Dtype::f32:
    case Dtype::i32: return 4;
    case Dtype::bf16:
    case Dtype::f16: return 2;
    case Dtype::u8: return 1;
    case Dtype::none: break;
  }
  return 0;
}
LINNET_INLINE constexpr bool is_float(Dtype d) {
  return d == Dtype::f64 || d == Dtype::f32 || d == Dtype::bf16 || d == Dtype::f16;
}

inline constexpr int kMaxRank = 8;

struct View {
  void* data = nullptr;
  Dtype dtype = Dtype::none;  // none: this optional tensor was not given (data may be null for an empty tensor that was)
  Device device = Device::cpu;
  int32_t rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};  // in elements

  LINNET_INLINE bool given() const { return dtype != Dtype::none; }
  LINNET_INLINE int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= size[i];
    return n;
  }
  // The address of element (i0, i1, ...) of a tensor of T. No loop: a compiler would make vectors of it, whose halves are
  // stored one by one and loaded as one, which waits until all stores before it have left the core.
  template <class T, class... I>
  LINNET_INLINE T* at(I... index) const {
    int64_t offset = 0;
    int i = 0;
    ((offset += static_cast<int64_t>(index) * stride[i++]), ...);
    return static_cast<T*>(data) + offset;
  }

  static View dense(const void* data, Dtype dtype, std::initializer_list<int64_t> sizes) {
    return dense(data, dtype, sizes.begin(), static_cast<int>(sizes.size()));
  }
  LINNET_INLINE static View dense(const void* data, Dtype dtype, const int64_t* sizes, int rank) {
    View v;
    v.data = const_cast<void*>(data);
    v.dtype = dtype;
    v.rank = rank;
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      v.size[i] = sizes[i];
      v.stride[i] = stride;
      stride *= sizes[i];
    }
    return v;
  }
};

}  // namespace linnet
