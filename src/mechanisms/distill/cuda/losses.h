// The losses of distill against its teacher on the GPU, of a call whose rows are there (features.h).
#pragma once

#include "mechanisms/distill/cuda/features.h"

namespace linnet::cuda {

enum class DistillLoss : int32_t { l2, l2rel, ce, mse };  // those that have gradients
inline constexpr int kDistillLosses = 5;                  // l2, l2rel, ce, kl, mse

struct DistillLossScratch {
  double* teacher = nullptr;                                   // [rows, V]
  double *norm = nullptr, *top = nullptr, *squares = nullptr;  // [rows]: log of the sum, largest score, squares in its units
  double* half = nullptr;                                      // [rows]: what the query's norm takes off its log features
  double* heads = nullptr;                                     // [H, 2]: the same largest score and squares, of all rows
  double* parts = nullptr;                                     // [rows, 5]: the losses of a row
  double* dlk = nullptr;                                       // [rows, M]; dlq takes the place of DistillRows::x
};
DistillLossScratch cut_distill_losses(Arena& arena, const DistillArgs& args);
void run_distill_losses(const Launch& launch, const DistillRows& rows, const DistillOut& out,
                        const DistillLossScratch& scratch);

}  // namespace linnet::cuda
