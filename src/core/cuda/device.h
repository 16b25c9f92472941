// What this machine's GPU is, beyond whether there is one (cuda.h).
#pragma once

#include <string>

namespace linnet::cuda {

// cuda::missing() is empty for GPUs of compute capability 8.0 or newer. The same for kernels that only Hopper runs (9.0): those
// that LINNET_CUDA_HOPPER of cmake/cuda.cmake names.
std::string missing_on_hopper();
bool is_hopper();  // the device; without one, an H200 is assumed
inline constexpr const char* kNeedsHopper = "its kernels are for Hopper (compute capability 9.0)";
int shared_bytes_of_block();  // the most that a block of threads may ask for; without a device, that of an H200

}  // namespace linnet::cuda
