// distill_window on the GPU: features of a call, its hybrids (window.cu), and statistics of its heads (statistics.cu).
#pragma once

#include "mechanisms/distill/cuda/sums.h"
#include "mechanisms/distill/distill.h"

namespace linnet::cuda {

// Rows are those of [B, T, H]; all in double.
struct DistillWindowRows {
  DistillWindowArgs args;               // no window longer than the sequence
  double *fq = nullptr, *fk = nullptr;  // [rows, 2 F]
  double *w = nullptr, *o = nullptr;    // [rows, V + 1]: values and 1; the output and its denominator
  DistillSums keys;                     // of the keys' features, for the queries
};
struct DistillWindowRowGrads {
  double* w = nullptr;                                 // [rows, V + 1]: dout and -dout.out, over the denominator
  double *top = nullptr, *total = nullptr;             // [rows]: the largest score; what all near scores get
  int64_t* largest = nullptr;                          // [rows]: its key
  double* factors = nullptr;                           // [rows]: total of both forms
  double *dq = nullptr, *dk = nullptr, *dv = nullptr;  // [rows, K], [rows, K], [rows, V]
  double *dfq = nullptr, *dfk = nullptr;               // [rows, 2 F]
  DistillSums queries;                                 // of the queries' features, for the keys
};

// Statistics of a row: entropy, that of a uniform one, distance, weight of the sinks and of each window.
inline constexpr int kDistillStatistics = 4 + Sizes::kMax;
inline constexpr int64_t kDistillRankTasks = 32;  // blocks of ranks at a time, whose matrices are in memory
struct DistillStatistics {
  double* rows = nullptr;                          // [rows, kDistillStatistics]
  double *entropy = nullptr, *distance = nullptr;  // [H]
  double* ranks = nullptr;                         // [B, H, blocks, 2]: stable, effective
  double* matrices = nullptr;                      // [tasks at a time, distill_rank_doubles(N)], N = min(T, 512)
  int64_t blocks = 0, N = 0, tasks = 0;
};
constexpr int64_t distill_rank_doubles(int64_t N) { return 2 * N * N + 3 * N; }
DistillStatistics cut_distill_statistics(Arena& arena, const DistillWindowArgs& args);
void run_distill_statistics(const Launch& launch, const DistillWindowArgs& args, const DistillWindowOut& out,
                            const DistillStatistics& scratch);

}  // namespace linnet::cuda
