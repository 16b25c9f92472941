// icl files: the closed forms of in-context linear estimation, and the predictors.
#include "analysis/icl.h"

#include "check/files/file_kind.h"

namespace linnet::check {
namespace {

using namespace analysis;

Status read_matrix(Stored& stored, const std::string& name, int64_t rows, int64_t cols, Matrix* m) {
  std::vector<int64_t> shape;
  LINNET_TRY(stored.numbers(name, &m->values, &shape));
  if (shape.size() != 2 || (rows >= 0 && shape[0] != rows) || (cols >= 0 && shape[1] != cols)) {
    return stored.error(name + " has the wrong shape, expected a matrix" +
                        (rows >= 0 ? " of " + std::to_string(rows) + " rows" : ""));
  }
  m->rows = shape[0];
  m->cols = shape[1];
  return {};
}

Status read_counts(Stored& stored, std::vector<int64_t>* n) {
  LINNET_TRY(stored.integers("n", n));
  for (const int64_t each : *n) {
    if (each < 0 || each > 100'000) return stored.error("n has the entry " + std::to_string(each) + ", expected 0 to 100000");
  }
  return n->empty() ? stored.error("n is empty") : Status();
}

Status run_losses(Stored& stored, double gate) {
  Prompts p;
  Matrix Sb_new;
  double drift = 1;
  LINNET_TRY(stored.real("noise", &p.noise));
  LINNET_TRY(stored.real("drift", &drift));
  LINNET_TRY(read_matrix(stored, "Sx", -1, -1, &p.Sx));
  const int64_t d = p.Sx.rows;
  int64_t rank = d;
  LINNET_TRY(stored.integer("rank", 0, 1'000'000, &rank));
  LINNET_TRY(read_matrix(stored, "Sb", d, d, &p.Sb));
  if (const Status status = check_prompts(p); !status.ok()) return stored.error(status.message());
  if (stored.has("Sb_new")) LINNET_TRY(read_matrix(stored, "Sb_new", d, d, &Sb_new));
  std::vector<int64_t> grid;
  LINNET_TRY(read_counts(stored, &grid));
  std::vector<double> full, limited, adapted, isotropic, uniform, weighted, omega;
  Matrix W_full, W_rank;
  for (const int64_t n : grid) {
    full.push_back(optimal_loss(p, n, &W_full));
    limited.push_back(rank_loss(p, n, rank, &W_rank));
    if (Sb_new.rows > 0) adapted.push_back(adapted_loss(p, Sb_new, n, rank));
    isotropic.push_back(isotropic_loss(d, n, p.noise));
    uniform.push_back(drift_uniform_loss(d, n, p.noise, drift));
    weighted.push_back(drift_weighted_loss(d, n, p.noise, drift, &omega));
  }
  const auto count = static_cast<int64_t>(grid.size());
  LINNET_TRY(stored.expect("loss_full", full, {count}, gate));
  LINNET_TRY(stored.expect("loss_rank", limited, {count}, gate));
  if (Sb_new.rows > 0) LINNET_TRY(stored.expect("loss_lora", adapted, {count}, gate));
  LINNET_TRY(stored.expect("loss_isotropic", isotropic, {count}, gate));
  LINNET_TRY(stored.expect("loss_drift_uniform", uniform, {count}, gate));
  LINNET_TRY(stored.expect("loss_drift_weighted", weighted, {count}, gate));
  LINNET_TRY(stored.expect("W_full", W_full.values, {d, d}, gate));
  LINNET_TRY(stored.expect("W_rank", W_rank.values, {d, d}, gate));
  LINNET_TRY(stored.expect("omega_drift", omega, {static_cast<int64_t>(omega.size())}, gate));
  if (!stored.has("loss_probe")) return {};
  Matrix W;
  LINNET_TRY(read_matrix(stored, "W_probe", d, d, &W));
  LINNET_TRY(stored.numbers("omega_probe", &omega));
  const Matrix K = drift_matrix(drift, static_cast<int64_t>(omega.size()));
  return stored.expect("loss_probe", {step_loss(p, K, W, omega)}, {}, gate);
}

Status run_designs(Stored& stored, double gate) {
  double noise = 0;
  int64_t d = 1;
  LINNET_TRY(stored.real("noise", &noise));
  LINNET_TRY(stored.integer("d", 1, 1'000'000, &d));
  std::vector<int64_t> grid;
  std::vector<double> alpha, gamma, rag, w_rag, aligned, w_aligned;
  LINNET_TRY(read_counts(stored, &grid));
  LINNET_TRY(stored.numbers("alpha", &alpha));
  if (stored.has("gamma")) {
    LINNET_TRY(stored.numbers("gamma", &gamma));
    if (gamma.size() != alpha.size()) return stored.error("gamma and alpha differ in length");
  } else {
    for (const double a : alpha) gamma.push_back(aligned_gamma(d, a));
  }
  for (size_t i = 0; i < alpha.size(); ++i) {
    for (const int64_t n : grid) {
      double w = 0;
      rag.push_back(retrieval_loss(d, n, noise, alpha[i], &w));
      w_rag.push_back(w);
      aligned.push_back(aligned_loss(d, n, noise, alpha[i], gamma[i], &w));
      w_aligned.push_back(w);
    }
  }
  const std::vector<int64_t> shape = {static_cast<int64_t>(alpha.size()), static_cast<int64_t>(grid.size())};
  LINNET_TRY(stored.expect("loss_rag", rag, shape, gate));
  LINNET_TRY(stored.expect("w_rag", w_rag, shape, gate));
  LINNET_TRY(stored.expect("loss_aligned", aligned, shape, gate));
  return stored.expect("w_aligned", w_aligned, shape, gate);
}

Status run_predict(Stored& stored, double gate) {
  std::vector<double> Z, head, taps, omega, attention, h3, step;
  std::vector<int64_t> shape;
  LINNET_TRY(stored.numbers("Z", &Z, &shape));
  if (shape.size() != 3 || shape[1] < 1 || shape[2] < 1)
    return stored.error("Z has the wrong shape, expected [batch, n + 1, d + 1]");
  const int64_t batch = shape[0], rows = shape[1], width = shape[2];
  Matrix wq, wk, wv, W;
  LINNET_TRY(read_matrix(stored, "wq", width, width, &wq));
  LINNET_TRY(read_matrix(stored, "wk", width, width, &wk));
  LINNET_TRY(read_matrix(stored, "wv", width, width, &wv));
  LINNET_TRY(read_matrix(stored, "W", width - 1, width - 1, &W));
  LINNET_TRY(stored.numbers("head", &head));
  LINNET_TRY(stored.numbers("taps", &taps));
  LINNET_TRY(stored.numbers("omega", &omega));
  if (static_cast<int64_t>(head.size()) != width || static_cast<int64_t>(taps.size()) != rows ||
      static_cast<int64_t>(omega.size()) != rows - 1) {
    return stored.error("head, taps and omega have " + std::to_string(head.size()) + ", " + std::to_string(taps.size()) +
                        " and " + std::to_string(omega.size()) + " entries, expected d + 1, n + 1 and n");
  }
  for (int64_t b = 0; b < batch; ++b) {
    const auto begin = Z.begin() + b * rows * width;
    const Matrix prompt(rows, width, {begin, begin + rows * width});
    attention.push_back(predict_attention(prompt, wq, wk, wv, head));
    h3.push_back(predict_h3(prompt, wq, wk, wv, head, taps));
    step.push_back(predict_step(prompt, W, omega));
  }
  LINNET_TRY(stored.expect("attention", attention, {batch}, gate));
  LINNET_TRY(stored.expect("h3", h3, {batch}, gate));
  return stored.expect("step", step, {batch}, gate);
}

Status run(const SafetensorsFile& file, Dtype dtype, const Setting&, Result* result) {
  Stored stored(file, result);
  const double gate = rms_gate(dtype, Pass::forward, Against::vectors, false, 0);
  // losses, spectrum, ...: what the file holds decides.
  LINNET_TRY(stored.has("Z")       ? run_predict(stored, gate)
             : stored.has("alpha") ? run_designs(stored, gate)
                                   : run_losses(stored, gate));
  return stored.finish();
}

}  // namespace

const FileKind& icl_files() {
  static const FileKind kind = {
      .name = "icl",
      .takes = [](std::string_view mechanism, std::string_view) { return mechanism == "icl"; },
      .exact_only = true,
      .run = run,
  };
  return kind;
}

}  // namespace linnet::check
