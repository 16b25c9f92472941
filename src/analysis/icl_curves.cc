#include "analysis/icl_curves.h"

#include <cmath>

namespace linnet::analysis {

const std::vector<std::pair<std::string, std::string>>& icl_formulas() {
  static const std::vector<std::pair<std::string, std::string>> list = {
      {"full", "attention and H3 on ordinary prompts"},
      {"rank", "attention whose queries and keys have `rank` coordinates"},
      {"adapted", "a model of other tasks, adapted by an update of rank `rank`"},
      {"drift_attention", "tasks that drift along the prompt: attention, all examples alike"},
      {"drift_h3", "the same: H3, which weighs recent examples more"},
      {"retrieval", "examples that were retrieved near the query, correlation `alpha`"},
      {"retrieval_limit", "the same in the limit of many dimensions"},
      {"aligned", "features aligned with the task by `alpha`"},
      {"aligned_limit", "the same in the limit of many dimensions"}};
  return list;
}

namespace {

// diag(ratio^i), scaled to a trace.
Matrix falling(int64_t d, double ratio, double total) {
  Matrix a(d, d);
  double sum = 0;
  for (int64_t i = 0; i < d; ++i) sum += a(i, i) = std::pow(ratio, static_cast<double>(i));
  return (total / sum) * a;
}

}  // namespace

IclCase icl_case(const IclSetting& o) {
  IclCase c{o.prompts, o.Sb_new};
  c.prompts.noise = o.noise;
  if (c.prompts.Sx.rows == 0) c.prompts.Sx = identity(o.d);
  const int64_t d = c.prompts.Sx.rows;
  if (c.prompts.Sb.rows == 0) c.prompts.Sb = falling(d, o.spectrum, static_cast<double>(d));
  if (c.Sb_new.rows == 0) c.Sb_new = falling(d, 0.5, trace(c.prompts.Sb));
  return c;
}

Status icl_curve(const std::string& name, const IclSetting& o, IclCurve* curve) {
  const IclCase c = icl_case(o);
  const Prompts& p = c.prompts;
  const Matrix& Sb_new = c.Sb_new;
  const int64_t d = p.Sx.rows;
  if (d < 1) return bad_input("icl: d is 0, expected at least 1");
  LINNET_TRY(check_prompts(p));
  if (!(o.noise >= 0)) return bad_input("icl: noise is " + std::to_string(o.noise) + ", expected a variance");
  if (!(o.alpha >= 0 && o.alpha <= 1)) return bad_input("icl: alpha is " + std::to_string(o.alpha) + ", expected 0 to 1");
  if (!(o.drift >= 0 && o.drift <= 1)) return bad_input("icl: drift is " + std::to_string(o.drift) + ", expected 0 to 1");
  if (o.rank < 0 || o.rank > d)
    return bad_input("icl: rank is " + std::to_string(o.rank) + ", expected 0 to d (" + std::to_string(d) + ")");
  if (!(o.spectrum > 0 && o.spectrum <= 1))
    return bad_input("icl: spectrum is " + std::to_string(o.spectrum) + ", expected above 0, at most 1");
  if (Sb_new.rows != d || Sb_new.cols != d)
    return bad_input("icl: Sb_new has " + std::to_string(Sb_new.rows) + " rows, expected " + std::to_string(d));
  *curve = {name, "", d, o.n, {}};
  bool known = false;
  for (const auto& [each, what] : icl_formulas()) {
    if (each != name) continue;
    known = true;
    curve->formula = what;
  }
  if (!known) {
    std::string names;
    for (const auto& each : icl_formulas()) names += (names.empty() ? "" : ", ") + each.first;
    return bad_input("icl: there is no formula '" + name + "'; there are " + names);
  }
  for (const int64_t n : o.n) {
    if (n < 0 || n > 20'000) return bad_input("icl: n is " + std::to_string(n) + ", expected 0 to 20000");
    if (n > 2000 && name.rfind("drift", 0) == 0)
      return bad_input("icl: n is " + std::to_string(n) + ", expected at most 2000 for drifting tasks");
    double loss = 0;
    if (name == "full") loss = optimal_loss(p, n);
    if (name == "rank") loss = rank_loss(p, n, o.rank);
    if (name == "adapted") loss = adapted_loss(p, Sb_new, n, o.rank);
    if (name == "drift_attention") loss = drift_uniform_loss(d, n, o.noise, o.drift);
    if (name == "drift_h3") loss = drift_weighted_loss(d, n, o.noise, o.drift);
    if (name == "retrieval") loss = retrieval_loss(d, n, o.noise, o.alpha);
    if (name == "retrieval_limit") loss = retrieval_limit(d, n, o.noise, o.alpha);
    if (name == "aligned") loss = aligned_loss(d, n, o.noise, o.alpha, aligned_gamma(d, o.alpha));
    if (name == "aligned_limit") loss = aligned_limit(d, n, o.noise, o.alpha);
    curve->loss.push_back(loss);
  }
  return {};
}

}  // namespace linnet::analysis
