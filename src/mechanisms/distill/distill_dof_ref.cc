// Degrees of freedom, leverage scores and allocation: docs/mechanisms/distill.md, everything in double.
#include <algorithm>
#include <cmath>

#include "core/launch.h"
#include "distill.h"
#include "distill_spectra.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet::ref {
namespace {

// The Gram matrix of a kernel, divided by exp(m), m the largest exponent (softmax: the largest eta |x|^2; gauss: 0).
double gram(const View& x, bool gauss, double* g) {
  const int64_t J = x.size[0], D = x.size[1];
  const double eta = 1 / std::sqrt(static_cast<double>(D));
  double m = gauss ? 0 : -HUGE_VAL;
  for (int64_t i = 0; i < J; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < D; ++c) {
        const double d = get(x, i, c) - get(x, j, c);
        dot += gauss ? -0.5 * d * d : get(x, i, c) * get(x, j, c);
      }
      g[i * J + j] = eta * dot;
      if (i == j && !gauss) m = std::max(m, eta * dot);
    }
  }
  for (int64_t i = 0; i < J; ++i) {
    for (int64_t j = 0; j <= i; ++j) g[i * J + j] = g[j * J + i] = std::exp(g[i * J + j] - m);
  }
  return m;
}

// Degrees of freedom of a graded Gram matrix. The softmax kernel is S C S with C the gauss kernel and S = diag exp(eta |x|^2 /
// 2), so
//
//   N = tr(G (G + lambda)^-1) = tr(C (C + E)^-1) = sum_i 1 - E_i ((C + E)^-1)_ii,   E = lambda S^-2
//
// in which one sample of huge norm costs the others no digit. C + E is scaled to a diagonal of ones and factored.
// log_unit: log of lambda in the units of g; m: the largest eta |x|^2.
double scaled_dof(const View& x, double log_unit, double m, double* g, double* root, double* ratio, double* column) {
  const int64_t J = x.size[0], D = x.size[1];
  const double eta = 1 / std::sqrt(static_cast<double>(D));
  gram(x, true, g);
  for (int64_t i = 0; i < J; ++i) {
    double norm = 0;
    for (int64_t c = 0; c < D; ++c) norm += get(x, i, c) * get(x, i, c);
    const double log_E = log_unit - (eta * norm - m);
    ratio[i] = 1 / (1 + std::exp(-log_E));
    root[i] = 1 / std::sqrt(1 + std::exp(log_E));
  }
  for (int64_t i = 0; i < J; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = i == j ? 1 : g[i * J + j] * root[i] * root[j];
      for (int64_t c = 0; c < j; ++c) sum -= g[i * J + c] * g[j * J + c];
      g[i * J + j] = i == j ? std::sqrt(std::max(sum, 1e-300)) : sum / g[j * J + j];
    }
  }
  double total = 0;
  for (int64_t i = 0; i < J; ++i) {  // column i of the factor's inverse
    double squares = 0;
    for (int64_t r = i; r < J; ++r) {
      double sum = r == i ? 1 : 0;
      for (int64_t c = i; c < r; ++c) sum -= g[r * J + c] * column[c];
      column[r] = sum / g[r * J + r];
      squares += column[r] * column[r];
    }
    total += 1 - ratio[i] * squares;
  }
  return total;
}

constexpr double kGraded = 3;        // spread of eta |x|^2 from which a Gram matrix counts as graded
constexpr double kResolved = 1e-12;  // of N: what the eigenvalues' rounding may cost

void put_row(const View& view, int64_t i, double x) {
  if (view.given()) put(view, x, i);
}

}  // namespace

void distill_dof_forward(const DistillDofArgs& args, const DistillDofOut& out, const Launch& launch) {
  const int64_t J = args.x.size[0], D = args.x.size[1], N = args.lambda.size[0];
  const double count = static_cast<double>(J);
  Arena arena(launch.workspace);
  double* g = arena.take<double>(J * J);
  double* e = arena.take<double>(J);
  double* spare = arena.take<double>(J);
  double* third = arena.take<double>(J);
  const View results[2][3] = {{out.dof_softmax_mean, out.dof_softmax_gram, out.dof_softmax_trace},
                              {out.dof_gauss_mean, out.dof_gauss_gram, out.dof_gauss_trace}};
  for (const bool gauss : {false, true}) {
    const View& eig = gauss ? out.eig_gauss_mean : out.eig_softmax_mean;
    const View* wanted = results[gauss ? 1 : 0];
    if (!eig.given() && !wanted[0].given() && !wanted[1].given() && !wanted[2].given() && !out.unresolved.given()) continue;
    const double m = gram(args.x, gauss, g);
    double trace = 0;
    double least = 1;
    for (int64_t i = 0; i < J; ++i) {
      trace += g[i * J + i];
      least = std::min(least, g[i * J + i]);
    }
    const bool graded = !gauss && !(std::log(least) > -kGraded);
    symmetric_eigenvalues(J, g, e, spare);
    for (int64_t i = 0; i < J; ++i) e[i] = std::max(e[i], 0.0);
    for (int64_t i = 0; i < J; ++i) put_row(eig, i, e[i] / count * std::exp(m));
    for (int norm = 0; norm < 3; ++norm) {
      for (int64_t n = 0; n < N; ++n) {
        const double lambda = get(args.lambda, n);  // in the units of g
        const double unit = norm == 2 ? lambda * trace : lambda * std::exp(-m) * (norm == 0 ? count : 1);
        double sum = 0;
        for (int64_t i = 0; i < J; ++i) sum += e[i] == 0 ? 0 : e[i] / (e[i] + unit);
        put_row(wanted[norm], n, sum);
        if (out.unresolved.given()) put(out.unresolved, unit < 0x1p-52 * count * e[0] ? 1 : 0, (gauss ? 3 : 0) + norm, n);
      }
    }
    const double first = e[0];
    for (int norm = 0; norm < 3 && graded; ++norm) {
      for (int64_t n = 0; n < N && wanted[norm].given(); ++n) {
        const double lambda = std::log(get(args.lambda, n));
        const double log_unit = norm == 2 ? lambda + std::log(trace) : lambda - m + (norm == 0 ? std::log(count) : 0);
        if (0x1p-52 * count * first <= kResolved * std::exp(log_unit)) continue;
        put(wanted[norm], scaled_dof(args.x, log_unit, m, g, e, spare, third), n);
      }
    }
  }
  if (!out.leverage.given()) return;
  // h(z) = (1/J) f^T (G/J + lambda)^-1 f by a Cholesky factor; f and G in the units of exp(m/2) and exp(m).
  const double m = gram(args.x, false, g), lambda = args.leverage_lambda * std::exp(-m) * count;
  for (int64_t i = 0; i < J; ++i) g[i * J + i] += lambda;
  for (int64_t i = 0; i < J; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = g[i * J + j];
      for (int64_t c = 0; c < j; ++c) sum -= g[i * J + c] * g[j * J + c];
      g[i * J + j] = i == j ? std::sqrt(std::max(sum, 0.0)) : g[j * J + j] == 0 ? 0 : sum / g[j * J + j];
    }
  }
  const double root = std::sqrt(std::sqrt(static_cast<double>(D)));
  for (int64_t p = 0; p < out.leverage.size[0]; ++p) {
    double h = 0;
    for (int64_t i = 0; i < J; ++i) {
      double dot = 0, norm = 0;
      for (int64_t c = 0; c < D; ++c) {
        dot += get(args.z, p, c) * get(args.x, i, c);
        norm += get(args.x, i, c) * get(args.x, i, c);
      }
      double sum = std::exp(dot / root - norm / (2 * root * root) - m / 2);
      for (int64_t c = 0; c < i; ++c) sum -= g[i * J + c] * e[c];
      e[i] = g[i * J + i] == 0 ? 0 : sum / g[i * J + i];
      h += e[i] * e[i];
    }
    put(out.leverage, h, p);
  }
}
int64_t distill_dof_workspace(const DistillDofArgs& args, Pass, int) {
  Arena arena;
  arena.take<double>(args.x.size[0] * args.x.size[0]);
  for (int i = 0; i < 3; ++i) arena.take<double>(args.x.size[0]);
  return arena.used();
}

// ---- allocation

namespace {

struct Alloc {
  int64_t S, low, high, multiple;
  double budget;   // S C
  double* n;       // [S]: max over heads
  double* ideal;   // [S]
  int64_t* units;  // [S]
  bool* taken;     // [S]
};

int64_t aligned(double raw, const Alloc& a) {
  const double multiple = static_cast<double>(a.multiple);
  const auto dims = static_cast<int64_t>(multiple * std::max(1.0, std::floor(raw / multiple + 0.5)));
  return std::min(std::max(dims, a.low), a.high);
}
double share(const Alloc& a, double tau, int64_t s) {
  return std::min(std::max(tau * a.n[s], static_cast<double>(a.low)), static_cast<double>(a.high));
}

void put_dim(const View& view, int64_t s, int64_t dim) {
  if (view.given()) *view.at<int64_t>(s) = dim;
}

void exact(const Alloc& a, const View& out) {
  const double multiple = static_cast<double>(a.multiple);
  const double budget =
      std::min(std::max(a.budget, static_cast<double>(a.S * a.low)), static_cast<double>(a.S) * static_cast<double>(a.high));
  double below = 0, above = 1;
  const auto total = [&](double tau) {
    double sum = 0;
    for (int64_t s = 0; s < a.S; ++s) sum += share(a, tau, s);
    return sum;
  };
  while (total(above) < budget && above < 1e300) above *= 2;
  for (int i = 0; i < 200; ++i) {
    const double middle = 0.5 * (below + above);
    (total(middle) < budget ? below : above) = middle;
  }
  int64_t left = static_cast<int64_t>(std::floor(budget / multiple));
  for (int64_t s = 0; s < a.S; ++s) {
    a.ideal[s] = share(a, above, s) / multiple;
    a.units[s] = std::max(static_cast<int64_t>(std::floor(a.ideal[s] + 1e-9)), (a.low + a.multiple - 1) / a.multiple);
    left -= a.units[s];
  }
  // One unit each in the order of what rounding took, again and again; layers at `high` are passed over.
  while (left > 0) {
    int64_t given = 0;
    for (int64_t s = 0; s < a.S; ++s) a.taken[s] = false;
    for (int64_t round = 0; round < a.S && left > 0; ++round) {
      int64_t best = -1;
      for (int64_t s = 0; s < a.S; ++s) {
        if (a.taken[s]) continue;
        if (best < 0 || a.ideal[s] - static_cast<double>(a.units[s]) > a.ideal[best] - static_cast<double>(a.units[best]))
          best = s;
      }
      a.taken[best] = true;
      if ((a.units[best] + 1) * a.multiple > a.high) continue;
      ++a.units[best];
      ++given;
      --left;
    }
    if (given == 0) break;
  }
  for (int64_t s = 0; s < a.S; ++s) put_dim(out, s, a.units[s] * a.multiple);
}

void greedy(const Alloc& a, const DistillAllocArgs& args, const View& out) {
  const int64_t R = args.spectra.given() ? args.spectra.size[1] : 0;
  const int64_t high = std::min(a.high, R);
  int64_t left = args.greedy_total > 0 ? args.greedy_total : static_cast<int64_t>(a.budget);
  for (int64_t s = 0; s < a.S; ++s) {
    a.units[s] = std::min(a.low, high);
    left -= a.units[s];
  }
  while (left >= a.multiple) {
    int64_t best = -1;
    double gain = -1;
    for (int64_t s = 0; s < a.S; ++s) {
      if (a.units[s] + a.multiple > high) continue;
      double sum = 0;
      for (int64_t i = 0; i < a.multiple; ++i) {
        const double mu = get(args.spectra, s, a.units[s] + i);
        sum += mu * mu;
      }
      sum *= args.weights.given() ? get(args.weights, s) : 1;
      if (sum > gain) {
        gain = sum;
        best = s;
      }
    }
    if (best < 0) break;
    a.units[best] += a.multiple;
    left -= a.multiple;
  }
  for (int64_t s = 0; s < a.S; ++s) put_dim(out, s, a.units[s]);
}

Alloc cut_alloc(Arena& arena, const DistillAllocArgs& args) {
  Alloc a{};
  a.S = args.dof.size[0];
  a.low = args.low;
  a.high = args.high > 0 ? args.high : (int64_t{1} << 40) / args.multiple * args.multiple;
  a.multiple = args.multiple;
  a.budget = args.cost * static_cast<double>(a.S);
  a.n = arena.take<double>(a.S);
  a.ideal = arena.take<double>(a.S);
  a.units = arena.take<int64_t>(a.S);
  a.taken = arena.take<bool>(a.S);
  return a;
}

}  // namespace

void distill_alloc_forward(const DistillAllocArgs& args, const DistillAllocOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Alloc a = cut_alloc(arena, args);
  double total = 0;
  for (int64_t s = 0; s < a.S; ++s) {
    a.n[s] = 0;
    for (int64_t h = 0; h < args.dof.size[1]; ++h) a.n[s] = std::max(a.n[s], get(args.dof, s, h));
    total += a.n[s];
  }
  for (int64_t s = 0; s < a.S; ++s) {
    const double raw = total == 0 ? args.cost : a.budget * a.n[s] / total;
    const auto plain = static_cast<int64_t>(std::floor(raw + 0.5));
    put_dim(out.dims, s, plain);
    put_dim(out.dims_clip, s, std::min(plain, a.high));
    put_dim(out.dims_aligned, s, aligned(raw, a));
  }
  if (out.dims_exact.given()) exact(a, out.dims_exact);
  if (out.dims_greedy.given()) greedy(a, args, out.dims_greedy);
}
int64_t distill_alloc_workspace(const DistillAllocArgs& args, Pass, int) {
  Arena arena;
  cut_alloc(arena, args);
  return arena.used();
}

}  // namespace linnet::ref
