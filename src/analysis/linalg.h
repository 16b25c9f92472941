// linalg: the small dense problems of the analysis, in double, without a library: products, solves, eigenvalues of symmetric
// and of general matrices, singular values.
//
//   Matrix a(3, 3);                                 // row-major, zeros
//   Eigen e = symmetric_eigen(a);                   // e.values descending, e.vectors in columns
//   std::vector<std::complex<double>> z;
//   LINNET_TRY(eigenvalues(a, &z));                 // of any square matrix
#pragma once

#include <complex>
#include <cstdint>
#include <vector>

#include "core/status.h"

namespace linnet::analysis {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c), 0) {}
  Matrix(int64_t r, int64_t c, std::vector<double> v) : rows(r), cols(c), values(std::move(v)) {}
  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double operator()(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
  double* row(int64_t i) { return values.data() + i * cols; }
  const double* row(int64_t i) const { return values.data() + i * cols; }
};

Matrix identity(int64_t n);
Matrix transposed(const Matrix& a);
Matrix operator*(const Matrix& a, const Matrix& b);
Matrix operator+(const Matrix& a, const Matrix& b);
Matrix operator-(const Matrix& a, const Matrix& b);
Matrix operator*(double s, const Matrix& a);
double trace(const Matrix& a);
double frobenius(const Matrix& a);

// a x = b by elimination with row exchanges; false when a is singular to rounding.
bool solve(Matrix a, std::vector<double> b, std::vector<double>* x);

struct Eigen {
  std::vector<double> values;  // descending
  Matrix vectors;              // in columns
};
// Of (a + a^T) / 2, by Jacobi rotations: orthogonal to rounding, and accurate in the small values of scaled matrices.
Eigen symmetric_eigen(const Matrix& a);
// f of a symmetric matrix: vectors f(values) vectors^T.
Matrix symmetric_function(const Eigen& e, double (*f)(double));

// Singular values in descending order: a QR factor with column exchanges, then one-sided Jacobi on its transpose. Small values
// of graded matrices keep their digits.
std::vector<double> singular_values(const Matrix& a);
struct Svd {
  Matrix u, v;  // a = u diag(values) v^T
  std::vector<double> values;
};
Svd singular_value_decomposition(const Matrix& a);
// Values above `threshold`: a rank.
int64_t count_above(const std::vector<double>& values, double threshold);

// Eigenvalues of any square matrix: balanced, reduced to Hessenberg form, then the double-shift QR method. Sorted by real, then
// imaginary part. Refused with a sentence when they do not converge (NaN or infinity among the entries).
Status eigenvalues(Matrix a, std::vector<std::complex<double>>* values);

}  // namespace linnet::analysis
