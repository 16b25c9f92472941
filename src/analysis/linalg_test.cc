#include "analysis/linalg.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/random.h"

namespace linnet::analysis {
namespace {

Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  Matrix a(rows, cols);
  check::Random random(seed);
  for (double& x : a.values) x = random.normal();
  return a;
}

double largest(const Matrix& a) {
  double most = 0;
  for (const double x : a.values) most = std::max(most, std::abs(x));
  return most;
}

TEST(Linalg, Solve) {
  for (const int64_t n : {1, 2, 7, 30}) {
    const Matrix a = random_matrix(n, n, 5);
    std::vector<double> want, b, x;
    for (int64_t i = 0; i < n; ++i) want.push_back(static_cast<double>(i) - 2);
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += a(i, j) * want[static_cast<size_t>(j)];
      b.push_back(sum);
    }
    ASSERT_TRUE(solve(a, b, &x));
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], want[i], 1e-10);
  }
  std::vector<double> x;
  EXPECT_FALSE(solve(Matrix(2, 2, {1, 2, 2, 4}), {1, 1}, &x));
}

TEST(Linalg, SymmetricEigen) {
  for (const int64_t n : {1, 2, 5, 40}) {
    Matrix a = random_matrix(n, n, 7);
    a = a + transposed(a);
    const Eigen e = symmetric_eigen(a);
    EXPECT_LT(largest(symmetric_function(e, [](double x) { return x; }) - a), 1e-12 * (1 + largest(a)));
    EXPECT_LT(largest(transposed(e.vectors) * e.vectors - identity(n)), 1e-13);
    for (size_t i = 1; i < e.values.size(); ++i) EXPECT_GE(e.values[i - 1], e.values[i]);
  }
}

// A graded matrix: columns of sizes 1 to 1e-60. The smallest singular value keeps its digits.
TEST(Linalg, SingularValuesOfGradedMatrices) {
  const Matrix q = random_matrix(6, 6, 9);
  Matrix a = q;
  double determinant = 1;
  for (int64_t j = 0; j < 6; ++j) {
    for (int64_t i = 0; i < 6; ++i) a(i, j) *= std::pow(10.0, -12.0 * static_cast<double>(j));
    determinant *= std::pow(10.0, -12.0 * static_cast<double>(j));
  }
  const std::vector<double> values = singular_values(a), plain = singular_values(q);
  double product = 1, plain_product = 1;
  for (const double x : values) product *= x;
  for (const double x : plain) plain_product *= x;
  EXPECT_NEAR(product / (plain_product * determinant), 1, 1e-12);  // |det| is the product of the singular values
}

TEST(Linalg, SingularValueDecomposition) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 5}, {9, 4}, {4, 9}, {1, 3}, {33, 31}}) {
    const Matrix a = random_matrix(rows, cols, 11);
    const Svd svd = singular_value_decomposition(a);
    Matrix us = svd.u;
    for (int64_t i = 0; i < us.rows; ++i) {
      for (int64_t j = 0; j < us.cols; ++j) us(i, j) *= svd.values[static_cast<size_t>(j)];
    }
    EXPECT_LT(largest(us * transposed(svd.v) - a), 1e-13 * static_cast<double>(rows + cols));
    const std::vector<double> values = singular_values(a);
    ASSERT_EQ(values.size(), static_cast<size_t>(std::min(rows, cols)));
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], svd.values[i], 1e-12 * values[0]);
  }
  EXPECT_TRUE(singular_values(Matrix(0, 3)).empty());
  EXPECT_EQ(count_above(singular_values(Matrix(4, 4)), 1e-10), 0);
}

TEST(Linalg, Eigenvalues) {
  std::vector<std::complex<double>> z;
  ASSERT_TRUE(eigenvalues(Matrix(2, 2, {0, -1, 1, 0}), &z).ok());  // a quarter turn
  EXPECT_NEAR(std::abs(z[0] - std::complex<double>(0, -1)), 0, 1e-15);
  EXPECT_NEAR(std::abs(z[1] - std::complex<double>(0, 1)), 0, 1e-15);
  ASSERT_TRUE(eigenvalues(Matrix(3, 3, {0, 0, 6, 1, 0, -11, 0, 1, 6}), &z).ok());  // companion of (x-1)(x-2)(x-3)
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(std::abs(z[static_cast<size_t>(i)] - std::complex<double>(i + 1, 0)), 0, 1e-12);
  ASSERT_TRUE(eigenvalues(Matrix(3, 3, {0, 0, 1, 1, 0, 0, 0, 1, 0}), &z).ok());  // a cycle: the cube roots of 1
  for (const auto& each : z) EXPECT_NEAR(std::abs(each * each * each - 1.0), 0, 1e-13);
  ASSERT_TRUE(eigenvalues(Matrix(4, 4), &z).ok());
  for (const auto& each : z) EXPECT_EQ(each, 0.0);
  for (const int64_t n : {1, 2, 3, 4, 10, 40, 100}) {  // trace and trace of the square
    const Matrix a = random_matrix(n, n, 13);
    ASSERT_TRUE(eigenvalues(a, &z).ok());
    std::complex<double> sum = 0, squares = 0;
    for (const auto& each : z) {
      sum += each;
      squares += each * each;
    }
    const double size = static_cast<double>(n);
    EXPECT_NEAR(std::abs(sum - trace(a)), 0, 1e-12 * size * size) << n;
    EXPECT_NEAR(std::abs(squares - trace(a * a)), 0, 1e-12 * size * size) << n;
    const Matrix s = a + transposed(a);
    ASSERT_TRUE(eigenvalues(s, &z).ok());
    const Eigen e = symmetric_eigen(s);
    for (size_t i = 0; i < z.size(); ++i) {
      EXPECT_NEAR(std::abs(z[i] - e.values[e.values.size() - 1 - i]), 0, 1e-11 * size) << n;
    }
  }
  EXPECT_FALSE(eigenvalues(Matrix(1, 1, {std::nan("")}), &z).ok());
}

}  // namespace
}  // namespace linnet::analysis
