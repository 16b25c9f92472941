// The teacher, the losses of distill and their gradients, one head at a time and one row of scores at a time: nothing of size
// T x T is kept.
#include <algorithm>
#include <cmath>

#include "core/launch.h"
#include "distill.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet {
namespace {

using ref::get;
using ref::put;
using ref::takes_part;

struct Head {
  const DistillArgs& args;
  int64_t h;
  int64_t B, T, K, V, M;
  double eta, root, factor;
  double *lq, *lk;        // [B, T, M]: whole log features, the query's norm included
  double *score, *log_a;  // [T]: one row
  double *p, *student;    // [T]
  double* g;              // [4, T]: d loss / d log a of the row
  double* share;          // [M]
  double *dlq, *dlk;      // [4, M] and [4, B, T, M]: per loss
  double *o, *teacher;    // [V]
  double *q, *k, *v;      // [B, T, K], [B, T, K], [B, T, V] of this head

  bool allowed(int64_t b, int64_t i, int64_t j) const { return takes_part(args.key_mask, b, j) && (!args.causal || j <= i); }
  int64_t keys(int64_t i) const { return args.causal ? i + 1 : T; }
};

Head cut(Arena& arena, const DistillArgs& args, int64_t h) {
  const int64_t B = args.q.size[0], T = args.q.size[1], K = args.q.size[3], V = args.v.size[3], M = args.z.size[1];
  Head r{args,
         h,
         B,
         T,
         K,
         V,
         M,
         1 / std::sqrt(static_cast<double>(K)),
         std::sqrt(std::sqrt(static_cast<double>(K))),
         distill_scale(args.scale, K),
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr,
         nullptr};
  r.lq = arena.take<double>(B * T * M);
  r.lk = arena.take<double>(B * T * M);
  for (double** row : {&r.score, &r.log_a, &r.p, &r.student}) *row = arena.take<double>(T);
  r.g = arena.take<double>(4 * T);
  r.share = arena.take<double>(M);
  r.dlq = arena.take<double>(4 * B * T * M);
  r.dlk = arena.take<double>(4 * B * T * M);
  r.o = arena.take<double>(V);
  r.teacher = arena.take<double>(V);
  r.q = arena.take<double>(B * T * K);
  r.k = arena.take<double>(B * T * K);
  r.v = arena.take<double>(B * T * V);
  return r;
}

void load(const Head& r) {
  for (int64_t i = 0; i < r.B * r.T; ++i) {
    const int64_t b = i / r.T, t = i % r.T;
    double qq = 0, kk = 0;
    for (int64_t c = 0; c < r.K; ++c) {
      const double q = r.q[i * r.K + c] = r.factor * get(r.args.q, b, t, r.h, c),
                   k = r.k[i * r.K + c] = get(r.args.k, b, t, r.h, c);
      qq += q * q;
      kk += k * k;
    }
    for (int64_t c = 0; c < r.V; ++c) r.v[i * r.V + c] = get(r.args.v, b, t, r.h, c);
    for (int64_t m = 0; m < r.M; ++m) {
      double dq = 0, dk = 0;
      for (int64_t c = 0; c < r.K; ++c) {
        const double z = get(r.args.z, r.h, m, c);
        dq += z * r.q[i * r.K + c];
        dk += z * r.k[i * r.K + c];
      }
      const double alpha = 0.5 * std::log(get(r.args.alpha, r.h, m) / static_cast<double>(r.M));
      r.lq[i * r.M + m] = dq / r.root - 0.5 * r.eta * qq + alpha;
      r.lk[i * r.M + m] =
          dk / r.root - 0.5 * r.eta * kk + alpha + (r.args.key_logw.given() ? get(r.args.key_logw, b, t, r.h) : 0);
    }
  }
}

// The row's scores, log a, and both rows of weights. Returns false for a row without a key.
bool row(const Head& r, int64_t b, int64_t i, double* log_norm, double* log_sum) {
  double top = -HUGE_VAL, most = -HUGE_VAL;
  const double* lq = r.lq + (b * r.T + i) * r.M;
  for (int64_t j = 0; j < r.keys(i); ++j) {
    r.p[j] = r.student[j] = 0;
    if (!r.allowed(b, i, j)) continue;
    double dot = 0;
    for (int64_t c = 0; c < r.K; ++c) dot += r.q[(b * r.T + i) * r.K + c] * r.k[(b * r.T + j) * r.K + c];
    r.score[j] = r.eta * dot + (r.args.key_logw.given() ? get(r.args.key_logw, b, j, r.h) : 0);
    const double* lk = r.lk + (b * r.T + j) * r.M;
    double peak = -HUGE_VAL, sum = 0;
    for (int64_t m = 0; m < r.M; ++m) peak = std::max(peak, lq[m] + lk[m]);
    for (int64_t m = 0; m < r.M; ++m) sum += std::exp(lq[m] + lk[m] - peak);
    r.log_a[j] = peak + std::log(sum);
    top = std::max(top, r.score[j]);
    most = std::max(most, r.log_a[j]);
  }
  if (top == -HUGE_VAL) return false;
  double norm = 0, sum = 0;
  for (int64_t j = 0; j < r.keys(i); ++j) {
    if (!r.allowed(b, i, j)) continue;
    norm += r.p[j] = std::exp(r.score[j] - top);
    sum += r.student[j] = std::exp(r.log_a[j] - most);
  }
  for (int64_t j = 0; j < r.keys(i); ++j) {
    r.p[j] /= norm;
    r.student[j] /= sum;
  }
  *log_norm = top + std::log(norm);
  *log_sum = most + std::log(sum);
  return true;
}

// dlq_im += sum_j g_ij r_ijm, dlk_jm += g_ij r_ijm for each loss, r the share of feature m in a_ij
void spread(const Head& r, int64_t b, int64_t i) {
  const int64_t rows = r.B * r.T * r.M;
  const double* lq = r.lq + (b * r.T + i) * r.M;
  double* dlq = r.dlq + (b * r.T + i) * r.M;
  for (int64_t j = 0; j < r.keys(i); ++j) {
    if (!r.allowed(b, i, j)) continue;
    const double* lk = r.lk + (b * r.T + j) * r.M;
    double* dlk = r.dlk + (b * r.T + j) * r.M;
    for (int64_t m = 0; m < r.M; ++m) {
      const double part = std::exp(lq[m] + lk[m] - r.log_a[j]);
      for (int loss = 0; loss < 4; ++loss) {
        const double d = r.g[loss * r.T + j];
        if (d == 0) continue;
        dlq[loss * rows + m] += d * part;
        dlk[loss * rows + m] += d * part;
      }
    }
  }
}

void gradients(const Head& r, int loss, const View& dz, const View& dalpha) {
  const int64_t rows = r.B * r.T * r.M;
  for (int64_t m = 0; m < r.M; ++m) {
    double dlog = 0;
    for (int64_t i = 0; i < r.B * r.T; ++i) dlog += r.dlq[loss * rows + i * r.M + m] + r.dlk[loss * rows + i * r.M + m];
    if (dalpha.given()) put(dalpha, 0.5 * dlog / get(r.args.alpha, r.h, m), r.h, m);
    for (int64_t c = 0; dz.given() && c < r.K; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < r.B * r.T; ++i) {
        const double dlk = r.dlk[loss * rows + i * r.M + m];
        sum += r.dlq[loss * rows + i * r.M + m] * r.q[i * r.K + c] + (dlk == 0 ? 0 : dlk * r.k[i * r.K + c]);
      }
      put(dz, sum / r.root, r.h, m, c);
    }
  }
}

}  // namespace

bool distill_one_feature(const View& alpha, int64_t h) {
  int64_t count = 0;
  for (int64_t m = 0; m < alpha.size[1]; ++m) count += get(alpha, h, m) > 0 ? 1 : 0;
  return count <= 1;
}

bool distill_wants_losses(const DistillOut& out) {
  for (const View* view :
       {&out.out_softmax, &out.loss_l2, &out.loss_l2rel, &out.loss_ce, &out.loss_kl, &out.loss_mse, &out.dz_l2, &out.dz_l2rel,
        &out.dz_ce, &out.dz_mse, &out.dalpha_l2, &out.dalpha_l2rel, &out.dalpha_ce, &out.dalpha_mse}) {
    if (view->given()) return true;
  }
  return false;
}

int64_t distill_loss_scratch(const DistillArgs& args) {
  Arena arena;
  cut(arena, args, 0);
  return arena.used() / static_cast<int64_t>(sizeof(double));
}

void distill_losses(const DistillArgs& args, const DistillOut& out, int64_t h, double* scratch) {
  Arena arena(reinterpret_cast<char*>(scratch));
  const Head r = cut(arena, args, h);
  load(r);
  const double rows = static_cast<double>(r.B * r.T), cells = rows * static_cast<double>(r.V);
  for (int64_t i = 0; i < 4 * r.B * r.T * r.M; ++i) r.dlq[i] = r.dlk[i] = 0;
  // First the largest allowed score of the head, in whose units l2rel is taken, and the sum of K^2 there.
  double top = -HUGE_VAL, squares = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t b = 0; b < r.B; ++b) {
      for (int64_t i = 0; i < r.T; ++i) {
        for (int64_t j = 0; j < r.keys(i); ++j) {
          if (!r.allowed(b, i, j)) continue;
          double dot = 0;
          for (int64_t c = 0; c < r.K; ++c) dot += r.q[(b * r.T + i) * r.K + c] * r.k[(b * r.T + j) * r.K + c];
          const double score = r.eta * dot + (args.key_logw.given() ? get(args.key_logw, b, j, h) : 0);
          if (pass == 0) top = std::max(top, score);
          if (pass == 1) squares += std::exp(2 * (score - top));
        }
      }
    }
  }
  double l2 = 0, l2rel = 0, ce = 0, kl = 0, mse = 0;
  const bool grads = out.dz_l2.given() || out.dz_l2rel.given() || out.dz_ce.given() || out.dz_mse.given() ||
                     out.dalpha_l2.given() || out.dalpha_l2rel.given() || out.dalpha_ce.given() || out.dalpha_mse.given();
  for (int64_t b = 0; b < r.B; ++b) {
    for (int64_t i = 0; i < r.T; ++i) {
      double log_norm = 0, log_sum = 0;
      const bool seen = row(r, b, i, &log_norm, &log_sum);
      for (int64_t c = 0; c < r.V; ++c) {
        r.o[c] = r.teacher[c] = 0;
        for (int64_t j = 0; seen && j < r.keys(i); ++j) {
          if (!r.allowed(b, i, j)) continue;
          r.teacher[c] += r.p[j] * r.v[(b * r.T + j) * r.V + c];
          r.o[c] += r.student[j] * r.v[(b * r.T + j) * r.V + c];
        }
        mse += (r.o[c] - r.teacher[c]) * (r.o[c] - r.teacher[c]) / cells;
        if (out.out_softmax.given()) put(out.out_softmax, r.teacher[c], b, i, h, c);
      }
      if (!seen) continue;
      for (int loss = 0; loss < 4; ++loss) {
        for (int64_t j = 0; j < r.keys(i); ++j) {
          double& g = r.g[loss * r.T + j] = 0;
          if (!r.allowed(b, i, j)) continue;
          if (loss == 0) {
            const double teacher = std::exp(r.score[j]), student = std::exp(r.log_a[j]), d = student - teacher;
            l2 += d * d / rows;
            g = 2 * d * student / rows;
          } else if (loss == 1) {
            const double student = std::exp(r.log_a[j] - top), d = student - std::exp(r.score[j] - top);
            l2rel += d * d / squares;
            g = 2 * d * student / squares;
          } else if (loss == 2) {
            ce -= r.p[j] * (r.log_a[j] - log_sum) / rows;
            if (r.p[j] > 0) kl += r.p[j] * (r.score[j] - log_norm - (r.log_a[j] - log_sum)) / rows;
            g = (r.student[j] - r.p[j]) / rows;
          } else {
            double dot = 0;
            for (int64_t c = 0; c < r.V; ++c) {
              dot += 2 / cells * (r.o[c] - r.teacher[c]) * (r.v[(b * r.T + j) * r.V + c] - r.o[c]);
            }
            g = r.student[j] * dot;
          }
        }
      }
      if (grads) spread(r, b, i);
    }
  }
  const struct {
    const View& view;
    double value;
  } losses[] = {{out.loss_l2, l2}, {out.loss_l2rel, l2rel}, {out.loss_ce, ce}, {out.loss_kl, kl}, {out.loss_mse, mse}};
  for (const auto& loss : losses) {
    if (loss.view.given()) put(loss.view, loss.value, h);
  }
  gradients(r, 0, out.dz_l2, out.dalpha_l2);
  gradients(r, 1, out.dz_l2rel, out.dalpha_l2rel);
  gradients(r, 2, out.dz_ce, out.dalpha_ce);
  gradients(r, 3, out.dz_mse, out.dalpha_mse);
}

}  // namespace linnet
