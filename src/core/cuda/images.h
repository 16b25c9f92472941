// The compiled CUDA kernels that this library carries; defined by the build (cmake/cuda.cmake).
#pragma once

namespace linnet::cuda {

int image_count();
const char* find_image(const char* name);  // the cubin of <name>.cu, null when this program has none

}  // namespace linnet::cuda
