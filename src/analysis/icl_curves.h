// The curves of the in-context theory over the number of examples, by name: for the command, its page and the experiments.
#pragma once

#include <string>
#include <vector>

#include "analysis/icl.h"

namespace linnet::analysis {

struct IclSetting {
  int64_t d = 5, rank = 2;
  double noise = 0, drift = 0.9, alpha = 0.5;
  double spectrum = 1;  // Sb = diag(spectrum^i), scaled to the trace d, where prompts.Sb is empty
  std::vector<int64_t> n = {1, 2, 5, 10, 15, 20, 30, 40, 60, 80, 100};
  Prompts prompts;  // Sx, Sb: empty for the identity
  Matrix Sb_new;    // of `adapted`: empty for a decaying spectrum against prompts.Sb
};

struct IclCurve {
  std::string name, formula;
  int64_t d = 0;
  std::vector<int64_t> n;
  std::vector<double> loss;
};

// The covariances that a setting stands for.
struct IclCase {
  Prompts prompts;
  Matrix Sb_new;
};
IclCase icl_case(const IclSetting& setting);

// full, rank, adapted, drift_attention, drift_h3, retrieval, retrieval_limit, aligned, aligned_limit.
const std::vector<std::pair<std::string, std::string>>& icl_formulas();  // name, what it is
Status icl_curve(const std::string& name, const IclSetting& setting, IclCurve* curve);

}  // namespace linnet::analysis
