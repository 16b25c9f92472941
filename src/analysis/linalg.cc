#include "analysis/linalg.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace linnet::analysis {

Matrix identity(int64_t n) {
  Matrix a(n, n);
  for (int64_t i = 0; i < n; ++i) a(i, i) = 1;
  return a;
}

Matrix transposed(const Matrix& a) {
  Matrix t(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) t(j, i) = a(i, j);
  }
  return t;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      const double s = a(i, k);
      if (s == 0) continue;
      const double* const from = b.row(k);
      double* const to = c.row(i);
      for (int64_t j = 0; j < b.cols; ++j) to[j] += s * from[j];
    }
  }
  return c;
}

Matrix operator+(const Matrix& a, const Matrix& b) {
  Matrix c = a;
  for (size_t i = 0; i < c.values.size(); ++i) c.values[i] += b.values[i];
  return c;
}

Matrix operator-(const Matrix& a, const Matrix& b) {
  Matrix c = a;
  for (size_t i = 0; i < c.values.size(); ++i) c.values[i] -= b.values[i];
  return c;
}

Matrix operator*(double s, const Matrix& a) {
  Matrix c = a;
  for (double& x : c.values) x *= s;
  return c;
}

double trace(const Matrix& a) {
  double sum = 0;
  for (int64_t i = 0; i < a.rows; ++i) sum += a(i, i);
  return sum;
}

double frobenius(const Matrix& a) {
  double sum = 0;
  for (const double x : a.values) sum += x * x;
  return std::sqrt(sum);
}

bool solve(Matrix a, std::vector<double> b, std::vector<double>* x) {
  const int64_t n = a.rows;
  double largest = 0;
  for (const double v : a.values) largest = std::max(largest, std::abs(v));
  for (int64_t k = 0; k < n; ++k) {
    int64_t pivot = k;
    for (int64_t i = k + 1; i < n; ++i) {
      if (std::abs(a(i, k)) > std::abs(a(pivot, k))) pivot = i;
    }
    if (!(std::abs(a(pivot, k)) > 1e-15 * largest)) return false;
    std::swap_ranges(a.row(k), a.row(k) + n, a.row(pivot));
    std::swap(b[static_cast<size_t>(k)], b[static_cast<size_t>(pivot)]);
    for (int64_t i = k + 1; i < n; ++i) {
      const double s = a(i, k) / a(k, k);
      if (s == 0) continue;
      for (int64_t j = k; j < n; ++j) a(i, j) -= s * a(k, j);
      b[static_cast<size_t>(i)] -= s * b[static_cast<size_t>(k)];
    }
  }
  for (int64_t i = n; i-- > 0;) {
    for (int64_t j = i + 1; j < n; ++j) b[static_cast<size_t>(i)] -= a(i, j) * b[static_cast<size_t>(j)];
    b[static_cast<size_t>(i)] /= a(i, i);
  }
  *x = std::move(b);
  return true;
}

Eigen symmetric_eigen(const Matrix& given) {
  const int64_t n = given.rows;
  Matrix a = given, v = identity(n);  // vectors in rows while rotating: both parts of a rotation are rows
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) a(i, j) = a(j, i) = 0.5 * (given(i, j) + given(j, i));
  }
  for (int sweep = 0; sweep < 60; ++sweep) {
    bool rotated = false;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = a(p, q);
        if (std::abs(apq) <= 1e-17 * std::sqrt(std::abs(a(p, p) * a(q, q))) || apq == 0) continue;
        rotated = true;
        const double theta = (a(q, q) - a(p, p)) / (2 * apq);
        const double t = std::copysign(1 / (std::abs(theta) + std::hypot(theta, 1.0)), theta);
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double x = a(k, p), y = a(k, q);
          a(k, p) = c * x - s * y;
          a(k, q) = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = a(p, k), y = a(q, k), u = v(p, k), w = v(q, k);
          a(p, k) = c * x - s * y;
          a(q, k) = s * x + c * y;
          v(p, k) = c * u - s * w;
          v(q, k) = s * u + c * w;
        }
        a(p, q) = a(q, p) = 0;
      }
    }
    if (!rotated) break;
  }
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return a(i, i) > a(j, j); });
  Eigen e{std::vector<double>(static_cast<size_t>(n)), Matrix(n, n)};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = order[static_cast<size_t>(i)];
    e.values[static_cast<size_t>(i)] = a(from, from);
    for (int64_t k = 0; k < n; ++k) e.vectors(k, i) = v(from, k);
  }
  return e;
}

Matrix symmetric_function(const Eigen& e, double (*f)(double)) {
  Matrix scaled = e.vectors;
  for (int64_t i = 0; i < scaled.rows; ++i) {
    for (int64_t j = 0; j < scaled.cols; ++j) scaled(i, j) *= f(e.values[static_cast<size_t>(j)]);
  }
  return scaled * transposed(e.vectors);
}

namespace {

double dot(const double* a, const double* b, int64_t n) {
  // Eight sums: they fit one vector register, and the compiler may not reorder a single one.
  double sum[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sum[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sum[i % 8] += a[i] * b[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

void rotate(double* x, double* y, double c, double s, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double u = x[i], w = y[i];
    x[i] = c * u - s * w;
    y[i] = s * u + c * w;
  }
}

// Rows of `a` (the columns of a factor) are made orthogonal by rotations of pairs; `v`, if given, is rotated along. Rows come
// out sorted by norm, the largest first.
void orthogonalise(Matrix* a, Matrix* v) {
  const int64_t n = a->rows, m = a->cols;
  std::vector<double> norm(static_cast<size_t>(n));
  for (int sweep = 0; sweep < 60; ++sweep) {
    bool rotated = false;
    for (int64_t i = 0; i < n; ++i) norm[static_cast<size_t>(i)] = dot(a->row(i), a->row(i), m);
    for (int64_t p = 0; p < n; ++p) {
      int64_t largest = p;  // de Rijk's order: the largest row first
      for (int64_t i = p + 1; i < n; ++i) {
        if (norm[static_cast<size_t>(i)] > norm[static_cast<size_t>(largest)]) largest = i;
      }
      if (largest != p) {
        std::swap_ranges(a->row(p), a->row(p) + m, a->row(largest));
        if (v != nullptr) std::swap_ranges(v->row(p), v->row(p) + v->cols, v->row(largest));
        std::swap(norm[static_cast<size_t>(p)], norm[static_cast<size_t>(largest)]);
      }
      for (int64_t q = p + 1; q < n; ++q) {
        const double x = norm[static_cast<size_t>(p)], y = norm[static_cast<size_t>(q)];
        if (x == 0 || y == 0) continue;
        const double xy = dot(a->row(p), a->row(q), m);
        if (std::abs(xy) <= 1e-15 * std::sqrt(x) * std::sqrt(y)) continue;
        rotated = true;
        const double zeta = (y - x) / (2 * xy);
        const double t = std::copysign(1 / (std::abs(zeta) + std::hypot(zeta, 1.0)), zeta);
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        rotate(a->row(p), a->row(q), c, s, m);
        if (v != nullptr) rotate(v->row(p), v->row(q), c, s, v->cols);
        norm[static_cast<size_t>(p)] = std::max(0.0, x - t * xy);
        norm[static_cast<size_t>(q)] = dot(a->row(q), a->row(q), m);
      }
    }
    if (!rotated) return;
  }
}

// R [k, columns] of a = Q R P^T with column exchanges, k = min(rows, columns). The columns of a stand in the rows of `c`.
Matrix pivoted_factor(Matrix c, int64_t rows) {
  const int64_t n = c.rows, k = std::min(rows, n);
  std::vector<double> norm(static_cast<size_t>(n));
  Matrix r(k, n);
  for (int64_t step = 0; step < k; ++step) {
    int64_t best = step;
    for (int64_t j = step; j < n; ++j) {
      norm[static_cast<size_t>(j)] = dot(c.row(j) + step, c.row(j) + step, rows - step);
      if (norm[static_cast<size_t>(j)] > norm[static_cast<size_t>(best)]) best = j;
    }
    std::swap_ranges(c.row(step), c.row(step) + rows, c.row(best));
    double* const x = c.row(step);
    const double size = std::sqrt(dot(x + step, x + step, rows - step));
    if (size == 0) break;
    const double alpha = x[step] > 0 ? -size : size;
    std::vector<double> u(x + step, x + rows);
    u[0] -= alpha;
    const double h = dot(u.data(), u.data(), rows - step);
    for (int64_t j = step; j < n; ++j) {
      double* const y = c.row(j) + step;
      const double f = 2 * dot(u.data(), y, rows - step) / h;
      for (int64_t i = 0; i < rows - step; ++i) y[i] -= f * u[static_cast<size_t>(i)];
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = i; j < n; ++j) r(i, j) = c(j, i);
  }
  return r;
}

}  // namespace

std::vector<double> singular_values(const Matrix& a) {
  if (a.rows == 0 || a.cols == 0) return {};
  // The rows of R are the columns of R^T: their rotation converges in few sweeps, since R is graded by the exchanges.
  Matrix r = pivoted_factor(a.rows >= a.cols ? transposed(a) : a, std::max(a.rows, a.cols));
  orthogonalise(&r, nullptr);
  std::vector<double> values;
  for (int64_t i = 0; i < r.rows; ++i) values.push_back(std::sqrt(dot(r.row(i), r.row(i), r.cols)));
  std::sort(values.begin(), values.end(), std::greater<>());
  return values;
}

Svd singular_value_decomposition(const Matrix& a) {
  const int64_t m = a.rows, n = a.cols;
  if (m < n) {
    Svd turned = singular_value_decomposition(transposed(a));
    std::swap(turned.u, turned.v);
    return turned;
  }
  Matrix c = transposed(a), v = identity(n);  // rows: columns of a, and of the right vectors
  orthogonalise(&c, &v);
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> size(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) size[static_cast<size_t>(i)] = std::sqrt(dot(c.row(i), c.row(i), m));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return size[static_cast<size_t>(i)] > size[static_cast<size_t>(j)]; });
  Svd svd{Matrix(m, n), Matrix(n, n), {}};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = order[static_cast<size_t>(i)];
    const double s = size[static_cast<size_t>(from)];
    svd.values.push_back(s);
    for (int64_t k = 0; k < m; ++k) svd.u(k, i) = s == 0 ? 0 : c(from, k) / s;
    for (int64_t k = 0; k < n; ++k) svd.v(k, i) = v(from, k);
  }
  return svd;
}

int64_t count_above(const std::vector<double>& values, double threshold) {
  return std::count_if(values.begin(), values.end(), [&](double x) { return x > threshold; });
}

namespace {

// Rows and columns scaled by powers of two until their norms are near: eigenvalues keep digits.
void balance(Matrix* a) {
  const int64_t n = a->rows;
  for (bool changed = true; changed;) {
    changed = false;
    for (int64_t i = 0; i < n; ++i) {
      double r = 0, c = 0;
      for (int64_t j = 0; j < n; ++j) {
        if (j == i) continue;
        c += std::abs((*a)(j, i));
        r += std::abs((*a)(i, j));
      }
      if (c == 0 || r == 0) continue;
      const double s = c + r;
      double f = 1;
      for (double g = r / 2; c < g; c *= 4) f *= 2;
      for (double g = r * 2; c > g; c /= 4) f /= 2;
      if ((c + r) / f >= 0.95 * s) continue;
      changed = true;
      for (int64_t j = 0; j < n; ++j) (*a)(i, j) /= f;
      for (int64_t j = 0; j < n; ++j) (*a)(j, i) *= f;
    }
  }
}

void to_hessenberg(Matrix* a) {
  const int64_t n = a->rows;
  for (int64_t m = 1; m + 1 < n; ++m) {
    int64_t pivot = m;
    for (int64_t j = m; j < n; ++j) {
      if (std::abs((*a)(j, m - 1)) > std::abs((*a)(pivot, m - 1))) pivot = j;
    }
    const double x = (*a)(pivot, m - 1);
    if (pivot != m) {
      for (int64_t j = m - 1; j < n; ++j) std::swap((*a)(pivot, j), (*a)(m, j));
      for (int64_t j = 0; j < n; ++j) std::swap((*a)(j, pivot), (*a)(j, m));
    }
    if (x == 0) continue;
    for (int64_t i = m + 1; i < n; ++i) {
      const double y = (*a)(i, m - 1) / x;
      if (y == 0) continue;
      (*a)(i, m - 1) = 0;
      for (int64_t j = m; j < n; ++j) (*a)(i, j) -= y * (*a)(m, j);
      for (int64_t j = 0; j < n; ++j) (*a)(j, m) += y * (*a)(j, i);
    }
  }
}

// The two eigenvalues of [[a, b], [c, d]].
void pair_values(double a, double b, double c, double d, std::complex<double>* first, std::complex<double>* second) {
  const double p = 0.5 * (a - d), disc = p * p + b * c, mean = d;
  if (disc >= 0) {
    const double z = p + std::copysign(std::sqrt(disc), p);
    *first = mean + z;
    *second = z == 0 ? mean : mean - b * c / z;
    return;
  }
  const double imaginary = std::sqrt(-disc);
  *first = {mean + p, imaginary};
  *second = {mean + p, -imaginary};
}

}  // namespace

Status eigenvalues(Matrix a, std::vector<std::complex<double>>* values) {
  const int64_t n = a.rows;
  values->assign(static_cast<size_t>(n), 0);
  for (const double x : a.values) {
    if (!std::isfinite(x)) return bad_input("eigenvalues: the matrix has an entry that is not finite");
  }
  balance(&a);
  to_hessenberg(&a);
  const double eps = 0x1p-52;
  double scale = 0;
  for (const double x : a.values) scale = std::max(scale, std::abs(x));
  int64_t high = n - 1;
  for (int rounds = 0; high >= 0;) {
    int64_t low = high;
    for (; low > 0; --low) {
      const double size = std::abs(a(low - 1, low - 1)) + std::abs(a(low, low));
      if (std::abs(a(low, low - 1)) <= eps * (size == 0 ? scale : size)) {
        a(low, low - 1) = 0;
        break;
      }
    }
    if (low == high) {
      (*values)[static_cast<size_t>(high)] = a(high, high);
      --high;
      rounds = 0;
      continue;
    }
    if (low == high - 1) {
      pair_values(a(low, low), a(low, high), a(high, low), a(high, high), &(*values)[static_cast<size_t>(low)],
                  &(*values)[static_cast<size_t>(high)]);
      high -= 2;
      rounds = 0;
      continue;
    }
    if (++rounds > 100) return bad_input("eigenvalues: the QR method does not converge on this matrix");
    // Francis' double step, with the last 2 x 2 block's eigenvalues as shifts; every tenth round an exceptional one.
    double s = a(high - 1, high - 1) + a(high, high);
    double t = a(high - 1, high - 1) * a(high, high) - a(high - 1, high) * a(high, high - 1);
    if (rounds % 10 == 0) {
      const double w = std::abs(a(high, high - 1)) + std::abs(a(high - 1, high - 2));
      s = 1.5 * w;
      t = w * w;
    }
    double x = a(low, low) * a(low, low) + a(low, low + 1) * a(low + 1, low) - s * a(low, low) + t;
    double y = a(low + 1, low) * (a(low, low) + a(low + 1, low + 1) - s);
    double z = a(low + 1, low) * a(low + 2, low + 1);
    for (int64_t k = low; k < high; ++k) {
      const int64_t count = k + 2 <= high ? 3 : 2;  // a reflection of three rows, the last of two
      double u[3] = {x, y, count == 3 ? z : 0};
      const double size = std::sqrt(u[0] * u[0] + u[1] * u[1] + u[2] * u[2]);
      if (size != 0) {
        u[0] += std::copysign(size, u[0]);
        const double h = u[0] * u[0] + u[1] * u[1] + u[2] * u[2];
        for (int64_t j = std::max(low, k - 1); j < n; ++j) {
          double f = 0;
          for (int64_t i = 0; i < count; ++i) f += u[i] * a(k + i, j);
          f *= 2 / h;
          for (int64_t i = 0; i < count; ++i) a(k + i, j) -= f * u[i];
        }
        for (int64_t j = 0; j <= std::min(high, k + 3); ++j) {
          double f = 0;
          for (int64_t i = 0; i < count; ++i) f += u[i] * a(j, k + i);
          f *= 2 / h;
          for (int64_t i = 0; i < count; ++i) a(j, k + i) -= f * u[i];
        }
      }
      x = a(k + 1, k);
      y = k + 2 <= high ? a(k + 2, k) : 0;
      z = k + 3 <= high ? a(k + 3, k) : 0;
    }
    for (int64_t i = low + 2; i <= high; ++i) {  // what the reflections have made zero
      for (int64_t j = low; j + 1 < i; ++j) a(i, j) = 0;
    }
  }
  std::sort(values->begin(), values->end(), [](const std::complex<double>& p, const std::complex<double>& q) {
    return p.real() != q.real() ? p.real() < q.real() : p.imag() < q.imag();
  });
  return {};
}

}  // namespace linnet::analysis
