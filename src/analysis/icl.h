// icl: what one layer of linear attention or of H3 reaches on linear regression in context, in closed form (Li, Rawat, Oymak,
// NeurIPS 2024, arXiv 2407.10005; docs/understand.md). Loss: E (y - prediction)^2 with label noise included.
//
//   Prompts p = {.Sx = identity(5), .Sb = identity(5), .noise = 0.25};
//   double loss = optimal_loss(p, 20);                      // one preconditioned gradient step on 20 examples
//
// M = Sx^1/2 Sb Sx^1/2 with eigenvalues l, tau = tr M. K_ij = E beta_i beta_j / Sb: how the task drifts along the prompt.
#pragma once

#include <cstdint>
#include <vector>

#include "analysis/linalg.h"

namespace linnet::analysis {

struct Prompts {
  Matrix Sx, Sb;     // covariances of features and of tasks, d x d
  double noise = 0;  // variance of the labels' noise
};
// Square, symmetric, positive (Sb may be singular), of one size.
Status check_prompts(const Prompts& prompts);

// A drifting task: K [n + 1, n + 1], the last index the query. drift_matrix: K_ij = rho^|i - j|; 1: the same task everywhere.
Matrix drift_matrix(double rho, int64_t n);

// The loss of the step g = x^T W X^T (omega * y) for any W [d, d] and omega [n].
double step_loss(const Prompts& prompts, const Matrix& K, const Matrix& W, const std::vector<double>& omega);
// 1. The best W for this omega, and its loss.
double best_step(const Prompts& prompts, const Matrix& K, const std::vector<double>& omega, Matrix* W);
// 2. Ordinary prompts: attention, and H3 too.
double optimal_loss(const Prompts& prompts, int64_t n, Matrix* W = nullptr);
double isotropic_loss(int64_t d, int64_t n, double noise);
// 3. W of rank at most r.
double rank_loss(const Prompts& prompts, int64_t n, int64_t rank, Matrix* W = nullptr);
// 4. The model that is optimal for prompts.Sb, adapted to Sb_new by an update of rank at most r.
double adapted_loss(const Prompts& prompts, const Matrix& Sb_new, int64_t n, int64_t rank, Matrix* update = nullptr);
// 5. Isotropic and drifting: attention weighs all examples alike, H3 chooses omega.
double drift_uniform_loss(int64_t d, int64_t n, double noise, double rho);
double drift_weighted_loss(int64_t d, int64_t n, double noise, double rho, std::vector<double>* omega = nullptr);
// 6. Retrieved examples: x_i = alpha x + sqrt(1 - alpha^2) g_i. w: the best W is w I.
double retrieval_loss(int64_t d, int64_t n, double noise, double alpha, double* w = nullptr);
double retrieval_limit(int64_t d, int64_t n, double noise, double alpha);  // large d, alpha^2 d fixed
// 7. Features aligned with the task: x = alpha beta + g, y = gamma x.beta + noise.
double aligned_loss(int64_t d, int64_t n, double noise, double alpha, double gamma, double* w = nullptr);
double aligned_limit(int64_t d, int64_t n, double noise, double alpha);
double aligned_gamma(int64_t d, double alpha);  // (alpha^2 d + 1)^-1/2: labels of the same size for every alpha

// The predictors on a prompt Z [n + 1, d + 1]: rows (x_i, y_i), last row (x, 0).
double predict_attention(const Matrix& Z, const Matrix& wq, const Matrix& wk, const Matrix& wv,
                         const std::vector<double>& head);
double predict_h3(const Matrix& Z, const Matrix& wq, const Matrix& wk, const Matrix& wv, const std::vector<double>& head,
                  const std::vector<double>& taps);
double predict_step(const Matrix& Z, const Matrix& W, const std::vector<double>& omega);

}  // namespace linnet::analysis
