// The experiments beside the formulas of icl.h: one layer of linear attention or of H3, trained from random weights on prompts
// that are drawn anew for every step, and its loss on prompts it has not seen.
//
//   IclMeasured m;
//   LINNET_TRY(icl_experiment("drift_h3", setting, 20, {}, &m));
//   m.loss;                                   // beside m.theory; m.deviation is the standard error of the sample
//
// Attention: f(Z) = (z wq) (Z0 wk)^T (Z0 wv) h / n with wq, wk [d + 1, d + 1 or rank], wv [d + 1, d + 1], h [d + 1].
// H3:        f(Z) = ((z wq) * sum_i f_{n+1-i} (z_i wk) * (z_i wv)) h / n, one filter for all channels.
// adapted:   the best step W for the old tasks stays as it is; an update A B^T of the rank is trained on the new ones.
// Adam, the rate falls along a cosine. The same numbers for every number of threads.
#pragma once

#include "analysis/icl_curves.h"

namespace linnet::analysis {

// Where the theory claims equality, a trained layer that is further off has not been trained to its end.
inline constexpr double kIclAgreement = 0.02;

struct IclTraining {
  int64_t steps = 3000, batch = 256, tests = 1 << 20;
  int64_t tries = 5;  // random starts, the best of which is kept: others are made while the loss is more than 1 % above theory
  double rate = 1e-2;
  uint64_t seed = 1;
};

struct IclMeasured {
  std::string name, layer;  // the formula; attention or h3
  int64_t d = 0, n = 0;
  double theory = 0, loss = 0, deviation = 0;
  double alignment = 0;  // cosine of the learned step W and of the closed form's
  int64_t tries = 0;     // starts that were made
  double filter = 0;     // H3: cosine of the learned omega and of the best; attention: 0
  double off() const { return theory == 0 ? 0 : loss / theory - 1; }
};

// The formulas that a layer is trained for, with the layers: ("full", "attention"), ("full", "h3"), ...
const std::vector<std::pair<std::string, std::string>>& icl_experiments();
Status check_training(const IclTraining& training);
Status icl_experiment(const std::string& name, const std::string& layer, const IclSetting& setting, int64_t n,
                      const IclTraining& training, IclMeasured* measured);

// Theory as lines, trained layers as points (there may be none).
std::string icl_page(const std::vector<IclCurve>& curves, const std::vector<IclMeasured>& measured, const std::string& title,
                     const std::string& setting);

}  // namespace linnet::analysis
