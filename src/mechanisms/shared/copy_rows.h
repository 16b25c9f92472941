// Copies rows of 16-bit numbers on the GPU: into the layout that a kernel wants, and results out of it.
#pragma once

#include "core/launch.h"
#include "mechanisms/shared/rows.h"

namespace linnet::cuda {

// `to` [B, T, heads, width] of 16-bit numbers := from, or zeros where `from` is absent.
void copy_rows(const Launch& launch, const Rows& to, const Rows& from, int64_t B, int64_t T, int64_t heads, int64_t width);

}  // namespace linnet::cuda
