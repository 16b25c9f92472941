// Strided: a tensor of at most four dimensions without its sizes. The parameters of a kernel are at most 4096 bytes.
#pragma once

#include "core/view.h"

namespace linnet::cuda {

struct Strided {
  void* data = nullptr;
  Dtype dtype = Dtype::none;
  int64_t stride[4] = {};
};
inline Strided strided(const View& view) {
  return {view.data, view.dtype, {view.stride[0], view.stride[1], view.stride[2], view.stride[3]}};
}

}  // namespace linnet::cuda
