// Symmetric eigenproblems in double, for the reference side of distill. Plain functions over arrays; no memory of their own.
#pragma once

#include <cstdint>

namespace linnet {

// Eigenvalues of the symmetric a [n, n] (overwritten) to `values` [n], descending. e: scratch [n]. Householder, then implicit
// QL.
void symmetric_eigenvalues(int64_t n, double* a, double* values, double* e);
// Eigenvalues and vectors (rows of `vectors` [n, n]) by cyclic Jacobi; a [n, n] is overwritten.
void symmetric_eigenvectors(int64_t n, double* a, double* values, double* vectors);

// Rotates the rows of g [n, n] until they are orthogonal (one-sided Jacobi): row i becomes sigma_i u_i, where the columns were
// those of U Sigma V^T. Small rows keep their digits beside large ones.
void orthogonal_rows(int64_t n, double* g);

}  // namespace linnet
