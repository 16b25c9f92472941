// The specification of `hierarchical_decode`: one head, one token at a time, in double.
#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/op.h"
#include "hierarchical.h"

namespace linnet::ref {
namespace {

template <class... I>
int64_t place(const View& x, I... index) {
  const int64_t indices[] = {static_cast<int64_t>(index)...};
  int64_t offset = 0;
  for (size_t i = 0; i < sizeof...(index); ++i) offset += indices[i] * x.stride[i];
  return offset;
}
template <class... I>
double get(const View& x, I... index) {
  return load_f64(x.data, x.dtype, place(x, index...));
}
template <class... I>
void set(const View& x, double value, I... index) {
  store_f64(x.data, x.dtype, place(x, index...), value);
}
void set_count(const View& x, int64_t b, int64_t l, int64_t value) {
  if (x.dtype == Dtype::i32) {
    static_cast<int32_t*>(x.data)[b * x.stride[0] + l * x.stride[1]] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t*>(x.data)[b * x.stride[0] + l * x.stride[1]] = value;
  }
}

// One token of one head. The lists as they stand; its own leaf and, for prefix, the means of the open nodes ask.
void token(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut* out, int64_t b, int64_t t, int64_t h, int64_t close,
           double* largest) {
  const int64_t K = args.q.size[3], V = args.v.size[3], levels = args.list_count.size[1];
  const bool prefix = args.tie == HierarchicalTie::prefix;
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  std::vector<double> query(static_cast<size_t>(K)), result(static_cast<size_t>(V)), n(static_cast<size_t>(levels) + 1, 1.0);
  std::vector<double> g(n.size()), lambda(n.size()), mass(n.size(), 1.0);
  std::vector<std::vector<double>> logits(n.size());
  double self = 0;
  for (int64_t c = 0; c < K; ++c) self += get(args.q, b, t, h, c) * get(args.k, b, t, h, c);
  g[0] = scale * self;
  *largest = std::fmax(*largest, std::fabs(g[0]));
  for (int64_t l = 1; l <= levels; ++l) n[static_cast<size_t>(l)] = get(args.open_n, b, l - 1) + 1;
  for (int64_t l = 0; l < levels; ++l) {
    const auto at = static_cast<size_t>(l);
    for (int64_t c = 0; c < K; ++c) {  // the mean query of level l: the token, or the open node of that level with the token
      const double q = get(args.q, b, t, h, c);
      query[static_cast<size_t>(c)] = l == 0 || !prefix ? q : (get(args.sum_q, b, h, l - 1, c) + q) / n[at];
    }
    double top = prefix ? g[at] : -HUGE_VAL, total = 0;
    for (int64_t i = 0; i < index_value(args.list_count, b, l); ++i) {
      double s = 0;
      for (int64_t c = 0; c < K; ++c) s += query[static_cast<size_t>(c)] * get(args.list_k, b, h, l, i, c);
      *largest = std::fmax(*largest, std::fabs(scale * s));
      logits[at].push_back(scale * s + std::log(get(args.list_n, b, l, i)));
      top = std::fmax(top, logits[at].back());
    }
    if (!prefix) continue;
    for (const double s : logits[at]) total += std::exp(s - top);
    lambda[at] = top + std::log(total + std::exp(g[at] - top));
    g[at + 1] = (get(args.sum_g, b, h, l) + n[at] * lambda[at]) / n[at + 1];
  }
  if (!prefix) {  // one softmax over all
    double top = args.include_self ? g[0] : -HUGE_VAL, total = 0;
    for (const auto& list : logits) {
      for (const double s : list) top = std::fmax(top, s);
    }
    for (const auto& list : logits) {
      for (const double s : list) total += std::exp(s - top);
    }
    total += args.include_self ? std::exp(g[0] - top) : 0;
    for (double& x : lambda) x = top + std::log(total);
    mass[0] = args.include_self ? std::exp(g[0] - lambda[0]) : 0;
  } else {
    for (int64_t l = levels - 1; l >= 0; --l) {
      const auto at = static_cast<size_t>(l);
      mass[at] = mass[at + 1] * std::exp(g[at] - lambda[at]);
    }
  }
  if (out == nullptr) return;
  for (int64_t c = 0; c < V; ++c) {
    double sum = mass[0] == 0 ? 0 : mass[0] * get(args.v, b, t, h, c);
    for (int64_t l = 0; l < levels; ++l) {
      const auto at = static_cast<size_t>(l);
      for (size_t i = 0; i < logits[at].size(); ++i) {
        const double weight = std::exp(logits[at][i] - lambda[at]) * (prefix ? mass[at + 1] : 1);
        sum += weight * get(args.list_v, b, h, l, static_cast<int64_t>(i), c);
      }
    }
    set(out->out, sum, b, t, h, c);
  }
  // The token joins the open nodes; of the node that ends highest its parent keeps the means.
  for (int64_t l = 0; l < levels; ++l) {
    for (int64_t c = 0; c < K; ++c) {
      set(args.sum_q, get(args.sum_q, b, h, l, c) + get(args.q, b, t, h, c), b, h, l, c);
      set(args.sum_k, get(args.sum_k, b, h, l, c) + get(args.k, b, t, h, c), b, h, l, c);
    }
    for (int64_t c = 0; c < V; ++c) set(args.sum_v, get(args.sum_v, b, h, l, c) + get(args.v, b, t, h, c), b, h, l, c);
  }
  const int64_t i = index_value(args.list_count, b, close);
  for (int64_t c = 0; c < K; ++c) {
    const double mean =
        close == 0 ? get(args.k, b, t, h, c) : get(args.sum_k, b, h, close - 1, c) / n[static_cast<size_t>(close)];
    set(args.list_k, mean, b, h, close, i, c);
  }
  for (int64_t c = 0; c < V; ++c) {
    const double mean =
        close == 0 ? get(args.v, b, t, h, c) : get(args.sum_v, b, h, close - 1, c) / n[static_cast<size_t>(close)];
    set(args.list_v, mean, b, h, close, i, c);
  }
  if (prefix) {
    const auto at = static_cast<size_t>(close);
    set(args.sum_g, get(args.sum_g, b, h, close) + n[at] * lambda[at], b, h, close);
  }
  for (int64_t l = 0; l < close; ++l) {
    for (int64_t c = 0; c < K; ++c) set(args.sum_q, 0, b, h, l, c), set(args.sum_k, 0, b, h, l, c);
    for (int64_t c = 0; c < V; ++c) set(args.sum_v, 0, b, h, l, c);
    set(args.sum_g, 0, b, h, l);
  }
}

}  // namespace

int64_t hierarchical_decode_workspace(const HierarchicalDecodeArgs&, Pass, int) { return 0; }
void hierarchical_decode_forward(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Launch&) {
  const int64_t levels = args.list_count.size[1];
  double unused = 0;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t t = 0; t < args.q.size[1]; ++t) {
      const int64_t length = index_value(args.lengths, b), close = hierarchical_closing(args, b, t, length);
      for (int64_t h = 0; h < args.q.size[2]; ++h) token(args, &out, b, t, h, close, &unused);
      const int64_t i = index_value(args.list_count, b, close);
      for (int64_t l = 0; l < levels; ++l) set(args.open_n, get(args.open_n, b, l) + 1, b, l);
      set(args.list_n, close == 0 ? 1 : get(args.open_n, b, close - 1), b, close, i);
      set_count(args.list_count, b, close, i + 1);
      for (int64_t l = 0; l < close; ++l) {
        set_count(args.list_count, b, l, 0);
        set(args.open_n, 0, b, l);
      }
      View lengths = args.lengths;
      lengths.stride[1] = 0;
      set_count(lengths, b, 0, length + 1);
    }
  }
}
double hierarchical_decode_largest_logit(const HierarchicalDecodeArgs& args) {
  double largest = 0;
  for (int64_t b = 0; b < args.q.size[0] && args.q.size[1] > 0; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) token(args, nullptr, b, 0, h, 0, &largest);
  }
  return largest;
}

}  // namespace linnet::ref
