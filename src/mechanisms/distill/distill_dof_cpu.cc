// Degrees of freedom of many samples: for a single lambda no eigenvalues are needed,
//
//   N(lambda) = tr(C (C + E)^-1) = J - sum_i E_i / (1 + E_i) |column i of L^-1|^2,   L L^T = (1 + E)^-1/2 (C + E) (1 + E)^-1/2
//
// C the gauss kernel and E_i = lambda, or lambda exp(-eta |x_i|^2) for the softmax kernel, which is C between two diagonals:
// one sample of huge norm costs the others no digit. Both in blocks of 128 by the small matrix product in double: J^3 / 3 flops
// each. Few samples, whole spectra and leverage scores go to the plain loops of the reference, whose results they must equal
// digit by digit.
#include "core/half.h"
#include "distill.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

inline constexpr int64_t kBlock = 128, kFew = 1024;

struct Subtract {  // C = C - acc
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int, int) const {
    return c - acc;
  }
};

struct Work {
  int64_t J, D, ld, blocks;
  double* g;             // [J, ld]: the Gram matrix, then its factor, lower half
  double *x, *xt;        // [J, ldd], [D, ld]
  double* norms;         // [J]: |x|^2 / 2
  double *ratio, *root;  // [J]: E / (1 + E), (1 + E)^-1/2
  double* inverse;       // [blocks, 128, 128]: of the diagonal blocks of L
  double* panel;         // [128, ld]: the current block column, transposed
  double* parts;         // [blocks]
  char* workers;
  int64_t worker_bytes;
};
Work cut(Arena& arena, const View& x, int workers) {
  Work r;
  r.J = x.size[0];
  r.D = x.size[1];
  r.ld = round_up<double>(r.J) + 8;  // a power of two would make the rows collide
  r.blocks = (r.J + kBlock - 1) / kBlock;
  r.g = arena.take<double>(r.J * r.ld);
  r.x = arena.take<double>(r.J * round_up<double>(r.D));
  r.xt = arena.take<double>(r.D * r.ld);
  r.norms = arena.take<double>(r.J);
  r.ratio = arena.take<double>(r.J);
  r.root = arena.take<double>(r.J);
  r.inverse = arena.take<double>(r.blocks * kBlock * kBlock);
  r.panel = arena.take<double>(kBlock * r.ld);
  r.parts = arena.take<double>(r.blocks);
  Arena own;
  own.take<double>(r.J * kBlock);
  own.take<double>(kBlock * kBlock);
  r.worker_bytes = own.used();
  r.workers = arena.take<char>(workers * r.worker_bytes);
  return r;
}
LINNET_INLINE int block_rows(const Work& r, int64_t i) {
  return static_cast<int>(r.J - i * kBlock < kBlock ? r.J - i * kBlock : kBlock);
}

// The diagonal of the problem: ratio and root, for log(lambda) and a norm (mean, gram, trace).
void scale_diagonal(const Work& r, bool gauss, double log_lambda, int norm) {
  const double eta = 1 / __builtin_sqrt(static_cast<double>(r.D)), count = static_cast<double>(r.J);
  double m = 0, trace = 0;
  for (int64_t i = 0; !gauss && i < r.J; ++i) m = 2 * eta * r.norms[i] > m || i == 0 ? 2 * eta * r.norms[i] : m;
  for (int64_t i = 0; i < r.J; ++i) trace += gauss ? 1 : __builtin_exp(2 * eta * r.norms[i] - m);
  for (int64_t i = 0; i < r.J; ++i) {
    const double own = gauss ? 0 : 2 * eta * r.norms[i];  // the logarithm of the kernel's diagonal
    const double log_E =
        norm == 2 ? log_lambda + __builtin_log(trace) + m - own : log_lambda + (norm == 0 ? __builtin_log(count) : 0) - own;
    r.ratio[i] = 1 / (1 + __builtin_exp(-log_E));
    r.root[i] = 1 / __builtin_sqrt(1 + __builtin_exp(log_E));
  }
}

// g = (C + E) / sqrt((1 + E_i) (1 + E_j)), lower half.
void gram(const Work& r, const Launch& launch) {
  using X = Vec<double>;
  const double eta = 1 / __builtin_sqrt(static_cast<double>(r.D));
  parallel(launch, r.blocks, [&](int64_t block, int) {
    const int rows = block_rows(r, block);
    const int64_t first = block * kBlock, columns = first + rows;
    double* to = r.g + first * r.ld;
    gemm<double>(rows, static_cast<int>(columns), static_cast<int>(r.D),
                 as_is(static_cast<const double*>(r.x + first * round_up<double>(r.D)), round_up<double>(r.D)), r.xt, r.ld, to,
                 r.ld, Store{});
    for (int i = 0; i < rows; ++i, to += r.ld) {
      for (int64_t j = 0; j < columns; j += X::W) {
        const int lanes = static_cast<int>(columns - j);
        const vd e = X::load(to + j, lanes) - X::broadcast(r.norms[first + i]) - X::load(r.norms + j, lanes);
        X::store(to + j, exp(e * X::broadcast(eta)) * X::broadcast(r.root[first + i]) * X::load(r.root + j, lanes), lanes);
      }
      to[first + i] = 1;
    }
  });
}

// The lower block at (first, first) becomes its Cholesky factor; its inverse (lower, zeros above) goes to `inverse`.
void factor_block(const Work& r, int64_t first, int n, double* inverse) {
  double* a = r.g + first * r.ld + first;
  for (int j = 0; j < n; ++j) {
    double pivot = a[j * r.ld + j];
    for (int c = 0; c < j; ++c) pivot -= a[j * r.ld + c] * a[j * r.ld + c];
    const double root = __builtin_sqrt(pivot > 1e-300 ? pivot : 1e-300);
    a[j * r.ld + j] = root;
    for (int i = j + 1; i < n; ++i) {
      double sum = a[i * r.ld + j];
      for (int c = 0; c < j; ++c) sum -= a[i * r.ld + c] * a[j * r.ld + c];
      a[i * r.ld + j] = sum / root;
    }
  }
  for (int64_t i = 0; i < kBlock * kBlock; ++i) inverse[i] = 0;
  for (int j = 0; j < n; ++j) {
    inverse[j * kBlock + j] = 1 / a[j * r.ld + j];
    for (int i = j + 1; i < n; ++i) {
      double sum = 0;
      for (int c = j; c < i; ++c) sum -= a[i * r.ld + c] * inverse[c * kBlock + j];
      inverse[i * kBlock + j] = sum / a[i * r.ld + i];
    }
  }
}

void factor(const Work& r, const Launch& launch) {
  for (int64_t k = 0; k < r.blocks; ++k) {
    const int64_t first = k * kBlock;
    const int n = block_rows(r, k);
    double* inverse = r.inverse + k * kBlock * kBlock;
    factor_block(r, first, n, inverse);
    // Blocks below: A L_kk^-T. Its transpose, L_kk^-1 A^T, is what the update below multiplies with.
    parallel(launch, r.blocks - k - 1, [&](int64_t task, int worker) {
      const int64_t row = (k + 1 + task) * kBlock;
      const int rows = block_rows(r, k + 1 + task);
      double* turned = reinterpret_cast<double*>(r.workers + worker * r.worker_bytes);  // [n, rows]
      load_tile_transposed<double>(static_cast<const double*>(r.g + row * r.ld + first), r.ld, rows, n, turned, kBlock);
      gemm<double>(n, rows, n, as_is(static_cast<const double*>(inverse), kBlock), turned, kBlock, r.panel + row, r.ld,
                   Store{});
      for (int i = 0; i < rows; ++i) {
        for (int c = 0; c < n; ++c) r.g[(row + i) * r.ld + first + c] = r.panel[c * r.ld + row + i];
      }
    });
    parallel(launch, r.blocks - k - 1, [&](int64_t task, int) {
      const int64_t block = r.blocks - 1 - task, row = block * kBlock, begin = first + n;  // the longest first
      const int rows = block_rows(r, block);
      gemm<double>(rows, static_cast<int>(row + rows - begin), n,
                   as_is(static_cast<const double*>(r.g + row * r.ld + first), r.ld), r.panel + begin, r.ld,
                   r.g + row * r.ld + begin, r.ld, Subtract{});
    });
  }
}

// sum_i ratio_i |column i of L^-1|^2, one block column at a time: X_j = L_jj^-1, X_i = -L_ii^-1 sum_k L_ik X_k.
double inverse_squares(const Work& r, const Launch& launch) {
  parallel(launch, r.blocks, [&](int64_t j, int worker) {
    Arena own(r.workers + worker * r.worker_bytes);
    double* x = own.take<double>(r.J * kBlock);
    double* sum = own.take<double>(kBlock * kBlock);
    const int n = block_rows(r, j);
    double total = 0;
    for (int64_t i = j; i < r.blocks; ++i) {
      const int rows = block_rows(r, i);
      double* to = x + (i - j) * kBlock * kBlock;
      const double* inverse = r.inverse + i * kBlock * kBlock;
      if (i == j) {
        for (int64_t e = 0; e < rows * kBlock; ++e) to[e] = inverse[e];
      } else {
        gemm<double>(rows, n, static_cast<int>((i - j) * kBlock),
                     as_is(static_cast<const double*>(r.g + i * kBlock * r.ld + j * kBlock), r.ld), x, kBlock, sum, kBlock,
                     Store{});
        gemm<double>(rows, n, rows, as_is(inverse, kBlock), sum, kBlock, to, kBlock, Scale<double>{-1});
      }
      for (int a = 0; a < rows; ++a) {
        for (int c = 0; c < n; ++c) total += r.ratio[j * kBlock + c] * to[a * kBlock + c] * to[a * kBlock + c];
      }
    }
    r.parts[j] = total;
  });
  double total = 0;
  for (int64_t j = 0; j < r.blocks; ++j) total += r.parts[j];
  return total;
}

}  // namespace

void distill_dof_forward(const DistillDofArgs& args, const DistillDofOut& out, const Launch& launch) {
  const View results[2][3] = {{out.dof_softmax_mean, out.dof_softmax_gram, out.dof_softmax_trace},
                              {out.dof_gauss_mean, out.dof_gauss_gram, out.dof_gauss_trace}};
  const int64_t N = args.lambda.size[0];
  int64_t wanted = 0;
  for (int i = 0; i < 6; ++i) wanted += results[i / 3][i % 3].given() ? N : 0;
  const bool spectra =
      out.eig_softmax_mean.given() || out.eig_gauss_mean.given() || out.leverage.given() || out.unresolved.given();
  // Two factorisations' worth of products take a twelfth of the time of a spectrum.
  if (args.x.size[0] <= kFew || spectra || wanted > 12) return ref::distill_dof_forward(args, out, launch);
  Arena arena(launch.workspace);
  const Work r = cut(arena, args.x, launch.workers);
  const int64_t ldd = round_up<double>(r.D);
  load_rows<double>(args.x, 0, args.x.stride[0], static_cast<int>(r.J), static_cast<int>(r.D), r.x, ldd);
  for (int64_t i = 0; i < r.J; ++i) {
    r.norms[i] = 0;
    for (int64_t c = 0; c < r.D; ++c) {
      r.xt[c * r.ld + i] = r.x[i * ldd + c];
      r.norms[i] += 0.5 * r.x[i * ldd + c] * r.x[i * ldd + c];
    }
  }
  for (int kind = 0; kind < 2; ++kind) {
    for (int norm = 0; norm < 3; ++norm) {
      const View& to = results[kind][norm];
      for (int64_t n = 0; to.given() && n < N; ++n) {
        const double lambda = load_f64(args.lambda.data, args.lambda.dtype, n * args.lambda.stride[0]);
        scale_diagonal(r, kind == 1, __builtin_log(lambda), norm);
        gram(r, launch);
        factor(r, launch);
        store_f64(to.data, to.dtype, n * to.stride[0], static_cast<double>(r.J) - inverse_squares(r, launch));
      }
    }
  }
}
int64_t distill_dof_workspace(const DistillDofArgs& args, Pass pass, int workers) {
  const int64_t plain = ref::distill_dof_workspace(args, pass, workers);
  if (args.x.size[0] <= kFew) return plain;
  Arena arena;
  cut(arena, args.x, workers);
  return arena.used() > plain ? arena.used() : plain;
}

}  // namespace linnet::LINNET_ISA
