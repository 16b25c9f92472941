#include "distill_spectra.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace linnet {

void symmetric_eigenvalues(int64_t n, double* a, double* d, double* e) {
  // Householder reduction to tridiagonal form: diagonal d, below it e. The lower triangle of a is used, row by row.
  for (int64_t i = n - 1; i > 0; --i) {
    double* row = a + i * n;
    double scale = 0, h = 0;
    for (int64_t k = 0; k < i; ++k) scale += std::fabs(row[k]);
    if (i == 1 || scale == 0) {
      e[i] = row[i - 1];
      d[i] = row[i];
      continue;
    }
    for (int64_t k = 0; k < i; ++k) {
      row[k] /= scale;
      h += row[k] * row[k];
    }
    const double f = row[i - 1], g = f >= 0 ? -std::sqrt(h) : std::sqrt(h);
    e[i] = scale * g;
    h -= f * g;
    row[i - 1] = f - g;
    // p = A u / h with the lower triangle alone: rows are read once, in order.
    for (int64_t k = 0; k < i; ++k) e[k] = 0;
    for (int64_t k = 0; k < i; ++k) {
      const double* from = a + k * n;
      double sum = 0;
      const double u = row[k];
      for (int64_t j = 0; j < k; ++j) {
        sum += from[j] * row[j];
        e[j] += from[j] * u;
      }
      e[k] += sum + from[k] * u;
    }
    double dot = 0;
    for (int64_t k = 0; k < i; ++k) {
      e[k] /= h;
      dot += e[k] * row[k];
    }
    const double half = dot / (h + h);
    for (int64_t k = 0; k < i; ++k) e[k] -= half * row[k];
    for (int64_t k = 0; k < i; ++k) {
      double* to = a + k * n;
      const double u = row[k], q = e[k];
      for (int64_t j = 0; j <= k; ++j) to[j] -= u * e[j] + q * row[j];
    }
    d[i] = row[i];
    // e[i] was set above; the scratch part of e below i is free again.
  }
  if (n > 0) d[0] = a[0];
  for (int64_t i = 1; i < n; ++i) e[i - 1] = e[i];
  if (n > 0) e[n - 1] = 0;
  // Implicit QL.
  for (int64_t l = 0; l < n; ++l) {
    for (int round = 0; round < 200; ++round) {
      int64_t m = l;
      for (; m + 1 < n; ++m) {
        const double size = std::fabs(d[m]) + std::fabs(d[m + 1]);
        if (std::fabs(e[m]) + size == size) break;
      }
      if (m == l) break;
      double g = (d[l + 1] - d[l]) / (2 * e[l]), r = std::hypot(g, 1.0);
      g = d[m] - d[l] + e[l] / (g + std::copysign(r, g));
      double s = 1, c = 1, p = 0;
      int64_t i = m - 1;
      for (; i >= l; --i) {
        double f = s * e[i];
        const double b = c * e[i];
        r = std::hypot(f, g);
        e[i + 1] = r;
        if (r == 0) {
          d[i + 1] -= p;
          e[m] = 0;
          break;
        }
        s = f / r;
        c = g / r;
        g = d[i + 1] - p;
        r = (d[i] - g) * s + 2 * c * b;
        p = s * r;
        d[i + 1] = g + p;
        g = c * r - b;
        (void)f;
      }
      if (r == 0 && i >= l) continue;
      d[l] -= p;
      e[l] = g;
      e[m] = 0;
    }
  }
  std::sort(d, d + n, std::greater<double>());
}

void symmetric_eigenvectors(int64_t n, double* a, double* values, double* vectors) {
  for (int64_t i = 0; i < n * n; ++i) vectors[i] = i / n == i % n ? 1 : 0;
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) (i == j ? all : off) += a[i * n + j] * a[i * n + j];
    }
    if (off <= 1e-34 * all) break;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = std::fabs(a[p * n + q]);
        if (apq == 0 || apq <= 1e-20 * std::sqrt(std::fabs(a[p * n + p] * a[q * n + q]))) continue;  // beyond the last digit
        const double theta = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
        const double t = std::copysign(1 / (std::fabs(theta) + std::hypot(theta, 1.0)), theta);
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        const double app = a[p * n + p], aqq = a[q * n + q], own = a[p * n + q];
        for (int64_t k = 0; k < n; ++k) {
          const double x = a[p * n + k], y = a[q * n + k];
          a[p * n + k] = c * x - s * y;
          a[q * n + k] = s * x + c * y;
        }
        a[p * n + p] = app - t * own;
        a[q * n + q] = aqq + t * own;
        a[p * n + q] = a[q * n + p] = 0;
        for (int64_t k = 0; k < n; ++k) a[k * n + p] = a[p * n + k], a[k * n + q] = a[q * n + k];  // the matrix stays symmetric
        for (int64_t k = 0; k < n; ++k) {
          const double x = vectors[p * n + k], y = vectors[q * n + k];
          vectors[p * n + k] = c * x - s * y;
          vectors[q * n + k] = s * x + c * y;
        }
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) values[i] = a[i * n + i];
}

void orthogonal_rows(int64_t n, double* g) {
  for (int sweep = 0; sweep < 60; ++sweep) {
    bool turned = false;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i + 1; j < n; ++j) {
        double *a = g + i * n, *b = g + j * n, aa = 0, bb = 0, ab = 0;
        for (int64_t c = 0; c < n; ++c) aa += a[c] * a[c], bb += b[c] * b[c], ab += a[c] * b[c];
        if (!(std::fabs(ab) > 1e-15 * static_cast<double>(n) * std::sqrt(aa) * std::sqrt(bb))) continue;
        turned = true;
        const double zeta = (bb - aa) / (2 * ab);
        const double t = std::copysign(1 / (std::fabs(zeta) + std::hypot(zeta, 1.0)), zeta);
        const double cosine = 1 / std::hypot(t, 1.0), sine = t * cosine;
        for (int64_t c = 0; c < n; ++c) {
          const double x = a[c], y = b[c];
          a[c] = cosine * x - sine * y;
          b[c] = sine * x + cosine * y;
        }
      }
    }
    if (!turned) break;
  }
}

}  // namespace linnet
