// cuBLAS, found when a call first needs it: the library neither links nor needs it.
#pragma once

#include "core/args.h"

namespace linnet::cuda {

inline constexpr int64_t kBlasWorkspace = int64_t{32} << 20;

bool has_blas();
// out [B, T, O] = x [B, T, I] weight [O, I]^T, plus what out holds when `add`; f32 sums. Null, or what went wrong.
const char* multiply_blas(const Launch& launch, const View& x, const View& weight, const View& out, bool add, void* workspace);

}  // namespace linnet::cuda
