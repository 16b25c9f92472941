// Elements of a view of any type, one at a time, as doubles: what references and checks read and write.
#pragma once

#include "core/half.h"
#include "core/view.h"

namespace linnet {

template <class... I>
LINNET_INLINE double element(const View& view, I... index) {
  const int64_t indices[] = {static_cast<int64_t>(index)...};
  int64_t offset = 0;
  for (unsigned i = 0; i < sizeof...(index); ++i) offset += indices[i] * view.stride[i];
  return load_f64(view.data, view.dtype, offset);
}

template <class... I>
LINNET_INLINE void set_element(const View& view, double x, I... index) {
  const int64_t indices[] = {static_cast<int64_t>(index)...};
  int64_t offset = 0;
  for (unsigned i = 0; i < sizeof...(index); ++i) offset += indices[i] * view.stride[i];
  store_f64(view.data, view.dtype, offset, x);
}

}  // namespace linnet
