// distill in plain double loops: log features here, their sums by the reference of `linear` (map exp, normalised, eps 0), which
// keeps each feature in units of its running maximum.
#include <cmath>

#include "core/launch.h"
#include "distill.h"
#include "mechanisms/linear/linear.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet::ref {
namespace {

struct Sizes4 {
  int64_t B, T, H, K, V, M;
  double root, factor;  // K^1/4, and what multiplies q
};
template <class Args>
Sizes4 sizes_of(const Args& args) {
  const int64_t K = args.q.size[3];
  return {args.q.size[0],
          args.q.size[1],
          args.q.size[2],
          K,
          args.v.size[3],
          args.z.size[1],
          std::sqrt(std::sqrt(static_cast<double>(K))),
          distill_scale(args.scale, K)};
}

// lq (without the query's norm, which cancels) or lk of row (b, t, h)
template <class Args>
void log_features(const Args& args, const Sizes4& s, bool key, int64_t b, int64_t t, int64_t h, double* l) {
  const View& x = key ? args.k : args.q;
  double norm = 0;
  for (int64_t c = 0; c < s.K; ++c) norm += get(x, b, t, h, c) * get(x, b, t, h, c);
  for (int64_t m = 0; m < s.M; ++m) {
    double dot = 0;
    for (int64_t c = 0; c < s.K; ++c) dot += get(args.z, h, m, c) * get(x, b, t, h, c);
    const double alpha = 0.5 * std::log(get(args.alpha, h, m) / static_cast<double>(s.M));
    l[m] = key ? dot / s.root - norm / (2 * s.root * s.root) + alpha : s.factor * dot / s.root + alpha;
    if (key && args.key_logw.given()) l[m] += get(args.key_logw, b, t, h);
  }
}

struct Work {
  View lq, lk, v, out, den, dlq, dlk, dv;  // doubles
  double* v0;                              // [B, H, V]: the first value that takes part, taken off and added again
  char* linear;
};
View doubles(Arena& arena, std::initializer_list<int64_t> sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return View::dense(arena.take<double>(n), Dtype::f64, sizes);
}
LinearArgs linear_args(const DistillArgs& args, const Work& r) {
  LinearArgs linear;
  linear.q = r.lq;
  linear.k = r.lk;
  linear.v = r.v;
  linear.key_mask = args.key_mask;
  linear.map = FeatureMap::exp;
  linear.causal = args.causal;
  linear.normalize = true;
  linear.scale = 1;
  linear.eps = 0;
  return linear;
}
Work cut(Arena& arena, const DistillArgs& args, Pass pass) {
  const Sizes4 s = sizes_of(args);
  Work r{};
  r.lq = doubles(arena, {s.B, s.T, s.H, s.M});
  r.lk = doubles(arena, {s.B, s.T, s.H, s.M});
  r.v = doubles(arena, {s.B, s.T, s.H, s.V});
  r.out = doubles(arena, {s.B, s.T, s.H, s.V});
  r.den = doubles(arena, {s.B, s.T, s.H});
  r.v0 = arena.take<double>(s.B * s.H * s.V);
  const bool backward = pass == Pass::backward;
  if (backward) {
    r.dlq = doubles(arena, {s.B, s.T, s.H, s.M});
    r.dlk = doubles(arena, {s.B, s.T, s.H, s.M});
    r.dv = doubles(arena, {s.B, s.T, s.H, s.V});
  }
  const LinearArgs linear = linear_args(args, r);
  int64_t bytes = linear_workspace(linear, Pass::forward, 1);
  if (backward) {
    const int64_t more = linear_workspace(linear, Pass::backward, 1);
    bytes = more > bytes ? more : bytes;
  }
  r.linear = arena.take<char>(bytes);
  return r;
}
void attend(const DistillArgs& args, const Work& r, const Launch& launch) {
  const Sizes4 s = sizes_of(args);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      double* v0 = r.v0 + (b * s.H + h) * s.V;
      for (int64_t j = 0; j < s.V; ++j) v0[j] = 0;
      for (int64_t t = 0; t < s.T; ++t) {
        if (!takes_part(args.key_mask, b, t)) continue;
        for (int64_t j = 0; j < s.V; ++j) v0[j] = std::isfinite(get(args.v, b, t, h, j)) ? get(args.v, b, t, h, j) : 0;
        break;
      }
      for (int64_t t = 0; t < s.T; ++t) {
        log_features(args, s, false, b, t, h, r.lq.at<double>(b, t, h));
        log_features(args, s, true, b, t, h, r.lk.at<double>(b, t, h));
        for (int64_t j = 0; j < s.V; ++j) *r.v.at<double>(b, t, h, j) = get(args.v, b, t, h, j) - v0[j];
      }
    }
  }
  linear_forward(linear_args(args, r), {.out = r.out, .den = r.den}, {launch.executor, r.linear, 1});
}

}  // namespace

void distill_forward(const DistillArgs& args, const DistillOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Work r = cut(arena, args, Pass::forward);
  const Sizes4 s = sizes_of(args);
  attend(args, r, launch);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t h = 0; h < s.H; ++h) {
        const bool seen = *r.den.at<double>(b, t, h) != -HUGE_VAL;
        for (int64_t j = 0; j < s.V; ++j) {
          put(out.out, seen ? *r.out.at<double>(b, t, h, j) + r.v0[(b * s.H + h) * s.V + j] : 0, b, t, h, j);
        }
      }
    }
  }
  if (!distill_wants_losses(out)) return;
  double* scratch = arena.take<double>(distill_loss_scratch(args));
  for (int64_t h = 0; h < s.H; ++h) distill_losses(args, out, h, scratch);
}

void distill_backward(const DistillArgs& args, const DistillOut&, const DistillGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Work r = cut(arena, args, Pass::backward);
  const Sizes4 s = sizes_of(args);
  attend(args, r, launch);
  LinearGrads inner;
  inner.dout = grads.dout;
  inner.dq = r.dlq;
  inner.dk = r.dlk;
  inner.dv = r.dv;
  linear_backward(linear_args(args, r), {.out = r.out, .den = r.den}, inner, {launch.executor, r.linear, 1});
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t h = 0; h < s.H; ++h) {
        double* dlq = r.dlq.at<double>(b, t, h);
        for (int64_t m = 0; distill_one_feature(args.alpha, h) && m < s.M; ++m) dlq[m] = 0;
        const double* dlk = r.dlk.at<double>(b, t, h);
        const bool kept = takes_part(args.key_mask, b, t);
        double total = 0;
        for (int64_t m = 0; m < s.M; ++m) total += dlk[m];
        if (grads.dkey_logw.given()) put(grads.dkey_logw, total, b, t, h);
        for (int64_t c = 0; c < s.K; ++c) {
          double dq = 0, dk = kept ? -total * get(args.k, b, t, h, c) / (s.root * s.root) : 0;
          for (int64_t m = 0; m < s.M; ++m) {
            dq += s.factor * dlq[m] * get(args.z, h, m, c) / s.root;
            dk += dlk[m] * get(args.z, h, m, c) / s.root;
          }
          if (grads.dq.given()) put(grads.dq, dq, b, t, h, c);
          if (grads.dk.given()) put(grads.dk, dk, b, t, h, c);
        }
        for (int64_t j = 0; grads.dv.given() && j < s.V; ++j) put(grads.dv, *r.dv.at<double>(b, t, h, j), b, t, h, j);
      }
    }
  }
  for (int64_t h = 0; h < s.H; ++h) {
    for (int64_t m = 0; m < s.M; ++m) {
      double dlog = 0;
      for (int64_t i = 0; i < s.B * s.T; ++i) {
        dlog += *r.dlq.at<double>(i / s.T, i % s.T, h, m) + *r.dlk.at<double>(i / s.T, i % s.T, h, m);
      }
      if (grads.dalpha.given()) put(grads.dalpha, 0.5 * dlog / get(args.alpha, h, m), h, m);
      for (int64_t c = 0; grads.dz.given() && c < s.K; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < s.B * s.T; ++i) {
          const int64_t b = i / s.T, t = i % s.T;
          sum += s.factor * *r.dlq.at<double>(b, t, h, m) * get(args.q, b, t, h, c);
          if (takes_part(args.key_mask, b, t)) sum += *r.dlk.at<double>(b, t, h, m) * get(args.k, b, t, h, c);
        }
        put(grads.dz, sum / s.root, h, m, c);
      }
    }
  }
}
int64_t distill_workspace(const DistillArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, args, pass);
  if (pass == Pass::forward) arena.take<double>(distill_loss_scratch(args));
  return arena.used();
}

void distill_decode_forward(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Launch& launch) {
  const Sizes4 s = sizes_of(args);
  Arena arena(launch.workspace);
  double* l = arena.take<double>(s.M);
  double* S = arena.take<double>(s.M * s.V);
  double* n = arena.take<double>(s.M);
  double* c = arena.take<double>(s.M);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t m = 0; m < s.M; ++m) {
        n[m] = get(args.n, b, h, m);
        c[m] = get(args.c, b, h, m);
        for (int64_t j = 0; j < s.V; ++j) S[m * s.V + j] = get(args.state, b, h, m, j);
      }
      for (int64_t t = 0; t < s.T; ++t) {
        log_features(args, s, true, b, t, h, l);
        for (int64_t m = 0; m < s.M; ++m) {
          const double top = std::fmax(c[m], l[m]);
          const double old = c[m] == -HUGE_VAL ? 0 : std::exp(c[m] - top), add = l[m] == -HUGE_VAL ? 0 : std::exp(l[m] - top);
          n[m] = old * n[m] + add;
          for (int64_t j = 0; j < s.V; ++j) S[m * s.V + j] = old * S[m * s.V + j] + add * get(args.v, b, t, h, j);
          c[m] = top;
        }
        log_features(args, s, false, b, t, h, l);
        double peak = -HUGE_VAL, den = 0;
        for (int64_t m = 0; m < s.M; ++m) peak = std::fmax(peak, l[m] + c[m]);
        for (int64_t m = 0; m < s.M; ++m) {
          l[m] = peak == -HUGE_VAL ? 0 : std::exp(l[m] + c[m] - peak);
          den += l[m] * n[m];
        }
        for (int64_t j = 0; j < s.V; ++j) {
          double sum = 0;
          for (int64_t m = 0; m < s.M; ++m) sum += l[m] * S[m * s.V + j];
          put(out.out, den == 0 ? 0 : sum / den, b, t, h, j);
        }
      }
      for (int64_t m = 0; m < s.M; ++m) {
        put(args.n, n[m], b, h, m);
        put(args.c, c[m], b, h, m);
        for (int64_t j = 0; j < s.V; ++j) put(args.state, S[m * s.V + j], b, h, m, j);
      }
    }
  }
}
int64_t distill_decode_workspace(const DistillDecodeArgs& args, Pass, int) {
  const Sizes4 s = sizes_of(args);
  Arena arena;
  arena.take<double>(s.M);
  arena.take<double>(s.M * s.V);
  arena.take<double>(s.M);
  arena.take<double>(s.M);
  return arena.used();
}

}  // namespace linnet::ref
