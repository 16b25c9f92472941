// Rows of mapped.h without a walk: loaded and stored in any type, mapped, and their largest exponents.
#include "core/half.h"
#include "mapped.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

template <class T>
void load_rows(const View& view, int64_t offset, int64_t step, int rows, int cols, T* dst, int64_t ld) {
  if constexpr (sizeof(T) == 4) {
    switch (view.dtype) {
      case Dtype::bf16: return load_tile<T>(static_cast<const Bf16*>(view.data) + offset, step, rows, cols, dst, ld);
      case Dtype::f16: return load_tile<T>(static_cast<const F16*>(view.data) + offset, step, rows, cols, dst, ld);
      case Dtype::f32: return load_tile<T>(static_cast<const float*>(view.data) + offset, step, rows, cols, dst, ld);
      default: break;
    }
  } else {
    if (view.dtype == Dtype::f64) {
      return load_tile<T>(static_cast<const double*>(view.data) + offset, step, rows, cols, dst, ld);
    }
    if (view.dtype == Dtype::f32) {
      const float* src = static_cast<const float*>(view.data) + offset;
      for (int r = 0; r < rows; ++r, src += step) {
        for (int c = 0; c < cols; ++c) dst[r * ld + c] = static_cast<double>(src[c]);
        for (int64_t c = cols; c < round_up<T>(cols); ++c) dst[r * ld + c] = 0;
      }
      return;
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < round_up<T>(cols); ++c) {
      dst[r * ld + c] = c < cols ? static_cast<T>(load_f64(view.data, view.dtype, offset + r * step + c)) : T(0);
    }
  }
}

template <class T>
void store_rows(const T* src, int64_t ld, int rows, int cols, const View& view, int64_t offset, int64_t step, const T* scale) {
  if constexpr (sizeof(T) == 4) {
    switch (view.dtype) {
      case Dtype::bf16: return store_tile<T>(src, ld, rows, cols, static_cast<Bf16*>(view.data) + offset, step, scale);
      case Dtype::f16: return store_tile<T>(src, ld, rows, cols, static_cast<F16*>(view.data) + offset, step, scale);
      case Dtype::f32: return store_tile<T>(src, ld, rows, cols, static_cast<float*>(view.data) + offset, step, scale);
      default: break;
    }
  } else if (view.dtype == Dtype::f64) {
    return store_tile<T>(src, ld, rows, cols, static_cast<double*>(view.data) + offset, step, scale);
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; ++c) {
      const T x = scale == nullptr ? src[r * ld + c] : src[r * ld + c] * scale[r];
      store_f64(view.data, view.dtype, offset + r * step + c, static_cast<double>(x));
    }
  }
}

template <class T>
int64_t mapped_features_bytes(const RowMap<T>& map, int workers) {
  Arena arena;
  arena.take<T>(kChunk * round_up<T>(map.K));
  arena.take<T>(kChunk * round_up<T>(map.F));
  arena.take<T>(map.scratch);
  return workers * arena.used();
}
template <class T>
void mapped_features(const RowMap<T>& map, const View& x, bool key, const double* units, const View& out,
                     const Launch& launch) {
  const int64_t each = mapped_features_bytes(map, 1), H = x.size[2], length = x.size[1];
  const int64_t chunks = (length + kChunk - 1) / kChunk;
  parallel(launch, x.size[0] * H * chunks, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * each);
    T* rows_x = arena.take<T>(kChunk * round_up<T>(map.K));
    T* rows_f = arena.take<T>(kChunk * round_up<T>(map.F));
    T* scratch = arena.take<T>(map.scratch);
    const int64_t b = task / (H * chunks), h = task / chunks % H, at = task % chunks * kChunk;
    const int n = chunk_rows(at, length);
    load_rows<T>(x, b * x.stride[0] + at * x.stride[1] + h * x.stride[2], x.stride[1], n, map.K, rows_x, round_up<T>(map.K));
    map.apply(map.self, {b, h, at, 1, key, n, units == nullptr ? 0 : units[b * H + h]}, rows_x, round_up<T>(map.K), rows_f,
              round_up<T>(map.F), scratch);
    store_rows<T>(rows_f, round_up<T>(map.F), n, static_cast<int>(out.size[3]), out,
                  b * out.stride[0] + at * out.stride[1] + h * out.stride[2], out.stride[1], nullptr);
  });
}

template <class T>
void mapped_units(const RowMap<T>& map, const View& k, const View& key_mask, const View& key_tops, double* units,
                  const Launch& launch) {
  const int64_t each = mapped_features_bytes(map, 1), H = k.size[2], S = k.size[1];
  parallel(launch, k.size[0] * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    if (key_tops.given()) {
      units[task] = given_top(key_tops, b, h);
      return;
    }
    Arena arena(launch.workspace + worker * each);
    T* rows_x = arena.take<T>(kChunk * round_up<T>(map.K));
    arena.take<T>(kChunk * round_up<T>(map.F));
    T* scratch = arena.take<T>(map.scratch);
    double top = -__builtin_inf();
    for (int64_t at = 0; at < S; at += kChunk) {
      const int n = chunk_rows(at, S);
      double rows[kChunk];
      load_rows<T>(k, b * k.stride[0] + at * k.stride[1] + h * k.stride[2], k.stride[1], n, map.K, rows_x, round_up<T>(map.K));
      map.tops(map.self, {b, h, at, 1, true, n}, rows_x, round_up<T>(map.K), rows, scratch);
      for (int r = 0; r < n; ++r) {
        const bool masked = key_mask.given() && *key_mask.template at<const uint8_t>(b, at + r) == 0;
        if (!masked && rows[r] > top && rows[r] < __builtin_inf()) top = rows[r];
      }
    }
    units[task] = top == -__builtin_inf() ? 0 : top;
  });
}

#define LINNET_MAPPED_ROWS(T)                                                                                       \
  template void load_rows<T>(const View&, int64_t, int64_t, int, int, T*, int64_t);                                 \
  template void store_rows<T>(const T*, int64_t, int, int, const View&, int64_t, int64_t, const T*);                \
  template int64_t mapped_features_bytes<T>(const RowMap<T>&, int);                                                 \
  template void mapped_features<T>(const RowMap<T>&, const View&, bool, const double*, const View&, const Launch&); \
  template void mapped_units<T>(const RowMap<T>&, const View&, const View&, const View&, double*, const Launch&);
LINNET_MAPPED_ROWS(float)
LINNET_MAPPED_ROWS(double)

}  // namespace linnet::LINNET_ISA
