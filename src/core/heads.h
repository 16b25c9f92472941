// with_heads: a tensor [B, T, D] as [B, T, 1, D], one of four dimensions as it is. For operators that take both.
#pragma once

#include "core/view.h"

namespace linnet {

LINNET_INLINE View with_heads(const View& view) {
  View v = view;
  if (!v.given() || v.rank != 3) return v;
  v.rank = 4;
  v.size[3] = v.size[2];
  v.stride[3] = v.stride[2];
  v.size[2] = 1;
  v.stride[2] = 0;
  return v;
}

}  // namespace linnet
