// The plain loops of distill_hybrid and distill_hybrid_decode: their specification.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/element.h"
#include "distill.h"

namespace linnet::ref {
namespace {

double score(const View& q, const View& k, int64_t b, int64_t t, int64_t j, int64_t h) {
  double sum = 0;
  for (int64_t c = 0; c < q.size[3]; ++c) sum += element(q, b, t, h, c) * element(k, b, j, h, c);
  return sum / std::sqrt(static_cast<double>(q.size[3]));
}

// l(x)_m + weight of the balanced row x[b, t, h].
std::vector<double> log_features(const View& x, const View& z, const View& alpha, int64_t b, int64_t t, int64_t h,
                                 double weight) {
  const int64_t K = x.size[3], M = z.size[1];
  const double root = std::sqrt(static_cast<double>(K));
  double square = 0;
  for (int64_t c = 0; c < K; ++c) square += element(x, b, t, h, c) * element(x, b, t, h, c);
  std::vector<double> l(static_cast<size_t>(M));
  for (int64_t m = 0; m < M; ++m) {
    double sum = 0;
    for (int64_t c = 0; c < K; ++c) sum += element(z, h, m, c) * element(x, b, t, h, c);
    l[static_cast<size_t>(m)] =
        sum / std::sqrt(root) - square / (2 * root) + weight + 0.5 * std::log(element(alpha, h, m) / static_cast<double>(M));
  }
  return l;
}

double log_sum(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  if (top == -HUGE_VAL) return top;
  double sum = 0;
  for (const double each : x) sum += std::exp(each - top);
  return top + std::log(sum);
}

}  // namespace

void distill_hybrid_forward(const DistillHybridArgs& args, const DistillHybridOut& out, const Launch&) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], V = args.v.size[3];
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      std::vector<std::vector<double>> lk;
      for (int64_t j = 0; j < T; ++j)
        lk.push_back(log_features(args.k_balanced, args.z, args.alpha, b, j, h, element(args.key_logw, b, j, h)));
      for (int64_t i = 0; i < T; ++i) {
        const std::vector<double> lq =
            log_features(args.q_balanced, args.z, args.alpha, b, i, h, element(args.query_logw, b, i, h));
        std::vector<double> a;
        for (int64_t j = 0; j <= i; ++j) {
          if (j > i - args.window || j < args.sinks) {
            a.push_back(score(args.q, args.k, b, i, j, h));
            continue;
          }
          std::vector<double> both = lq;
          for (size_t m = 0; m < both.size(); ++m) both[m] += lk[static_cast<size_t>(j)][m];
          a.push_back(log_sum(both));
        }
        const double total = log_sum(a);
        for (int64_t c = 0; c < V; ++c) {
          double sum = 0;
          for (int64_t j = 0; j <= i; ++j) {
            const double p = std::exp(a[static_cast<size_t>(j)] - total);
            if (p != 0) sum += p * element(args.v, b, j, h, c);
          }
          set_element(out.out, sum, b, i, h, c);
        }
      }
    }
  }
}
int64_t distill_hybrid_workspace(const DistillHybridArgs&, Pass, int) { return 0; }

void distill_hybrid_decode_forward(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Launch&) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3];
  const int64_t M = args.z.size[1], window = args.window, room = 2 * window;
  const auto copy = [](const View& from, int64_t b, int64_t t, const View& to, int64_t row, int64_t h, int64_t width) {
    for (int64_t c = 0; c < width; ++c) set_element(to, element(from, b, t, h, c), b, row, h, c);
  };
  const auto absorb = [&](int64_t b, int64_t h, int64_t j) {
    for (int64_t m = 0; m < M; ++m) {
      const double l = element(args.l_near, b, j, h, m), c = element(args.c, b, h, m), top = std::max(l, c);
      if (top == -HUGE_VAL) continue;
      const double old = std::exp(c - top), own = std::exp(l - top);
      set_element(args.c, top, b, h, m);
      set_element(args.n, old * element(args.n, b, h, m) + own, b, h, m);
      for (int64_t e = 0; e < V; ++e)
        set_element(args.state, old * element(args.state, b, h, m, e) + own * element(args.v_near, b, j, h, e), b, h, m, e);
    }
  };
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first_before = distill_held_rows(args.first, b), held_before = distill_held_rows(args.held, b);
    int64_t first = first_before, held = held_before;
    for (int64_t h = 0; h < H; ++h) {
      first = first_before, held = held_before;
      for (int64_t t = 0; t < T; ++t) {
        if (first < args.sinks) {
          copy(args.k, b, t, args.k_first, first, h, K);
          copy(args.v, b, t, args.v_first, first++, h, V);
        } else {
          if (held == room) {
            for (int64_t j = 0; j < window; ++j) {
              copy(args.k_near, b, window + j, args.k_near, j, h, K);
              copy(args.v_near, b, window + j, args.v_near, j, h, V);
              copy(args.l_near, b, window + j, args.l_near, j, h, M);
            }
            held = window;
          }
          copy(args.k, b, t, args.k_near, held, h, K);
          copy(args.v, b, t, args.v_near, held, h, V);
          const std::vector<double> l =
              log_features(args.k_balanced, args.z, args.alpha, b, t, h, element(args.key_logw, b, t, h));
          for (int64_t m = 0; m < M; ++m) set_element(args.l_near, l[static_cast<size_t>(m)], b, held, h, m);
          if (++held > window) absorb(b, h, held - window - 1);
        }
        const int64_t begin = std::max<int64_t>(0, held - window);
        std::vector<double> a;
        for (int64_t j = 0; j < first; ++j) a.push_back(score(args.q, args.k_first, b, t, j, h));
        for (int64_t j = begin; j < held; ++j) a.push_back(score(args.q, args.k_near, b, t, j, h));
        std::vector<double> f = log_features(args.q_balanced, args.z, args.alpha, b, t, h, element(args.query_logw, b, t, h));
        double top = a.empty() ? -HUGE_VAL : *std::max_element(a.begin(), a.end()), total = 0;
        for (int64_t m = 0; m < M; ++m) top = std::max(top, f[static_cast<size_t>(m)] += element(args.c, b, h, m));
        for (double& each : a) total += each = std::exp(each - top);
        for (int64_t m = 0; m < M; ++m) {
          double& each = f[static_cast<size_t>(m)];
          each = each == -HUGE_VAL ? 0 : std::exp(each - top);
          total += each * element(args.n, b, h, m);
        }
        for (int64_t c = 0; c < V; ++c) {
          double sum = 0;
          for (int64_t j = 0; j < first; ++j) sum += a[static_cast<size_t>(j)] * element(args.v_first, b, j, h, c);
          for (int64_t j = begin; j < held; ++j)
            sum += a[static_cast<size_t>(first + j - begin)] * element(args.v_near, b, j, h, c);
          for (int64_t m = 0; m < M; ++m) {
            if (f[static_cast<size_t>(m)] != 0) sum += f[static_cast<size_t>(m)] * element(args.state, b, h, m, c);
          }
          set_element(out.out, total == 0 ? 0 : sum / total, b, t, h, c);
        }
      }
    }
    distill_window_hold(args.first, b, first);
    distill_window_hold(args.held, b, held);
  }
}
int64_t distill_hybrid_decode_workspace(const DistillHybridDecodeArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
