// distill on the GPU: the log features of a call, and the sums over their keys. The losses use them too.
#pragma once

#include "mechanisms/distill/cuda/sums.h"
#include "mechanisms/distill/distill.h"

namespace linnet::cuda {

// Rows are those of [B, T, H]; all in double.
struct DistillRows {
  DistillArgs args;
  double factor = 1;                       // what multiplies q
  double *lq = nullptr, *lk = nullptr;     // [rows, M]: log features, the query's without its norm; masked keys: -inf
  double *x = nullptr, *w = nullptr;       // [rows, M]: scratch; [rows, V + 1]: values and 1, or 0 for masked keys
  double *o = nullptr, *logden = nullptr;  // [rows, V + 1]: the output (and its denominator); [rows]: its logarithm
  DistillSums keys;                        // of keys, for the queries
};
// dlq and dlk [rows, M]: the gradients of the log features.
struct DistillRowGrads {
  double *l = nullptr, *w = nullptr;  // [rows, M], [rows, V + 1]: lq - logden; dout and dout.out
  double *dlq = nullptr, *dlk = nullptr;
  DistillSums queries;  // of queries, for the keys
};

DistillRows cut_distill_rows(Arena& arena, const DistillArgs& args);
inline int64_t distill_rows(const DistillArgs& args) { return args.q.size[0] * args.q.size[1] * args.q.size[2]; }
// dz and dalpha, either of which may be absent, from dlq and dlk.
void sum_distill_features(const Launch& launch, const DistillRows& rows, const double* dlq, const double* dlk, const View& dz,
                          const View& dalpha);

}  // namespace linnet::cuda
