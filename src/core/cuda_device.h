// What this machine's GPU is, beyond whether there is one (cuda.h).
#pragma once

#include <string>

namespace linnet::cuda {

// cuda::missing() is empty for GPUs of compute capability 8.0 or newer. The same for kernels that only Hopper runs (9.0), which
// are most.
std::string missing_on_hopper();
int shared_bytes_of_block();  // the most that a block of threads may ask for; without a device, that of an H200

}  // namespace linnet::cuda
