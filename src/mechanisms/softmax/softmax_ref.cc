// The specification of `softmax`: plain loops in double, one query row at a time. Kernels are measured against this file.
//
// A masked pair is skipped, so what a masked key or value holds never matters; bias = -inf is a mask. Results are rounded once,
// when they are stored. Workspace: the keys and values of one head in double, a few rows, and the sums of dbias and dsinks.
#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/op.h"
#include "softmax.h"

namespace linnet::ref {
namespace {

constexpr double kMinusInfinity = -HUGE_VAL;

double* load_row(const View& view, int64_t b, int64_t t, int64_t h, int64_t width, double* row) {
  const int64_t start = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < width; ++c) row[c] = view.given() ? load_f64(view.data, view.dtype, start + c) : 0;
  return row;
}
void store_row(const View& view, int64_t b, int64_t t, int64_t h, int64_t width, const double* row) {
  if (!view.given()) return;
  const int64_t start = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < width; ++c) store_f64(view.data, view.dtype, start + c, row[c]);
}
double load_one(const View& view, int64_t b, int64_t t, int64_t h) {  // lse, dlse: [B, Tq, H]
  return view.given() ? load_f64(view.data, view.dtype, b * view.stride[0] + t * view.stride[1] + h * view.stride[2]) : 0;
}
void store_one(const View& view, int64_t b, int64_t t, int64_t h, double x) { store_row(view, b, t, h, 1, &x); }
double sink_of(const View& sinks, int64_t h) {
  return sinks.given() ? load_f64(sinks.data, sinks.dtype, h * sinks.stride[0]) : kMinusInfinity;
}
double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}
void add_scaled(double* y, double a, const double* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}
void clear(double* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) x[c] = 0;
}

// What turns q.k into a logit, and who sees whom.
struct Rules {
  double scale, softcap;
  bool causal;
  Window window;
  int64_t prefix, chunk;

  bool visible(int64_t t, int64_t j, int64_t n) const {  // a query at key position t, key j of n
    if (j < 0 || j >= n) return false;
    const int64_t right = causal ? 0 : window.right;
    if (right >= 0 && j - t > right) return false;
    if (window.left >= 0 && j < t - window.left && j >= prefix) return false;
    if (chunk > 0 && (t < 0 || t / chunk != j / chunk)) return false;
    return true;
  }
  double capped(double dot_product) const {
    const double s = scale * dot_product;
    return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
  }
};

// One item of the batch or one packed sequence: queries q0 .. q0+tq-1 and keys k0 .. k0+n-1 of batch row b.
struct Sequence {
  int64_t b, q0, tq, k0, n;
};
int64_t sequences(const SoftmaxArgs& args) {
  return args.cu_seqlens_q.given() ? args.cu_seqlens_q.size[0] - 1 : args.q.size[0];
}
Sequence sequence(const SoftmaxArgs& args, int64_t s) {
  if (args.cu_seqlens_q.given()) {
    const int64_t q0 = index_value(args.cu_seqlens_q, s), k0 = index_value(args.cu_seqlens_k, s);
    return {0, q0, index_value(args.cu_seqlens_q, s + 1) - q0, k0, index_value(args.cu_seqlens_k, s + 1) - k0};
  }
  return {s, 0, args.q.size[1], 0, args.key_len.given() ? index_value(args.key_len, s) : args.k.size[1]};
}
Rules rules(const SoftmaxArgs& args) {
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.size[3])));
  return {scale, args.softcap, args.causal, args.window, args.prefix, args.chunk};
}
double bias_of(const View& bias, int64_t b, int64_t h, int64_t i, int64_t j) {
  return load_f64(bias.data, bias.dtype, b * bias.stride[0] + h * bias.stride[1] + i * bias.stride[2] + j * bias.stride[3]);
}

// One row: s[0 .. n) holds the logits, -inf where masked. Returns lse and leaves out = sum_j exp(s_j - lse) v_j.
double attend(const double* s, int64_t n, double sink, const double* v, int64_t width, double* out) {
  double m = sink;
  for (int64_t j = 0; j < n; ++j) m = s[j] > m ? s[j] : m;
  if (m == kMinusInfinity) m = 0;  // nothing is visible: every exponential below is 0
  double sum = sink == kMinusInfinity ? 0 : std::exp(sink - m);
  clear(out, width);
  for (int64_t j = 0; j < n; ++j) {
    if (s[j] == kMinusInfinity) continue;
    const double weight = std::exp(s[j] - m);
    sum += weight;
    add_scaled(out, weight, v + j * width, width);
  }
  for (int64_t c = 0; c < width && sum != 0; ++c) out[c] /= sum;
  return m + std::log(sum);
}

struct ForwardScratch {
  double *k, *v, *q, *s, *out;
  ForwardScratch(Arena& arena, int64_t tokens, int64_t K, int64_t V)
      : k(arena.take<double>(tokens * K)),
        v(arena.take<double>(tokens * V)),
        q(arena.take<double>(K)),
        s(arena.take<double>(tokens)),
        out(arena.take<double>(V)) {}
};

// Rows of one head whose keys and values already stand in the scratch.
void attend_rows(const Rules& rule, const Sequence& seq, int64_t h, const View& q, const View& bias, const View& sinks,
                 const SoftmaxOut& result, const ForwardScratch& scratch) {
  const int64_t K = q.size[3], V = result.out.size[3];
  for (int64_t i = 0; i < seq.tq; ++i) {
    load_row(q, seq.b, seq.q0 + i, h, K, scratch.q);
    for (int64_t j = 0; j < seq.n; ++j) {
      const double b = bias.given() ? bias_of(bias, seq.b, h, seq.q0 + i, seq.k0 + j) : 0;
      const bool seen = rule.visible(i + seq.n - seq.tq, j, seq.n) && b != kMinusInfinity;
      scratch.s[j] = seen ? rule.capped(dot(scratch.q, scratch.k + j * K, K)) + b : kMinusInfinity;
    }
    const double lse = attend(scratch.s, seq.n, sink_of(sinks, h), scratch.v, V, scratch.out);
    store_row(result.out, seq.b, seq.q0 + i, h, V, scratch.out);
    store_one(result.lse, seq.b, seq.q0 + i, h, lse);
  }
}

// The largest |logit| of a visible pair, before and after the soft cap and the bias, the sink's included; infinities and NaN
// are left out.
double largest(const Rules& rule, const Sequence& seq, int64_t h, const View& q, const View& bias, const View& sinks,
               const std::vector<double>& keys) {
  const int64_t K = q.size[3];
  std::vector<double> row(static_cast<size_t>(K));
  double most = 0;
  const auto meet = [&](double x) {
    if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
  };
  if (seq.tq > 0) meet(sink_of(sinks, h));
  for (int64_t i = 0; i < seq.tq; ++i) {
    load_row(q, seq.b, seq.q0 + i, h, K, row.data());
    for (int64_t j = 0; j < seq.n; ++j) {
      if (!rule.visible(i + seq.n - seq.tq, j, seq.n)) continue;
      const double product = dot(row.data(), keys.data() + j * K, K);
      meet(rule.scale * product);
      meet(rule.capped(product) + (bias.given() ? bias_of(bias, seq.b, h, seq.q0 + i, seq.k0 + j) : 0));
    }
  }
  return most;
}

}  // namespace

double softmax_largest_logit(const SoftmaxArgs& args) {
  const int64_t H = args.q.size[2], Hkv = args.k.size[2], K = args.q.size[3];
  double most = 0;
  for (int64_t s = 0; s < sequences(args); ++s) {
    const Sequence seq = sequence(args, s);
    std::vector<double> keys(static_cast<size_t>(seq.n * K));
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) load_row(args.k, seq.b, seq.k0 + j, h / (H / Hkv), K, keys.data() + j * K);
      most = std::fmax(most, largest(rules(args), seq, h, args.q, args.bias, args.sinks, keys));
    }
  }
  return most;
}

double softmax_decode_largest_logit(const SoftmaxDecodeArgs& args) {
  const int64_t T = args.q.size[1], H = args.q.size[2], Hkv = args.k.size[2], K = args.q.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  const Rules rule{scale, args.softcap, true, args.window, args.prefix, 0};
  double most = 0;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const int64_t length = index_value(args.lengths, b),
                  start = args.cache_start.given() ? index_value(args.cache_start, b) : 0;
    const Sequence seq{b, 0, T, start, length + T - start};
    std::vector<double> keys(static_cast<size_t>(seq.n * K));
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) {
        const bool cached = start + j < length;
        load_row(cached ? args.k_cache : args.k, b, cached ? start + j : start + j - length, h / (H / Hkv), K,
                 keys.data() + j * K);
      }
      most = std::fmax(most, largest(rule, seq, h, args.q, View(), args.sinks, keys));
    }
  }
  return most;
}

double softmax_paged_largest_logit(const SoftmaxPagedArgs& args) {
  const int64_t page = args.k_pages.size[1], H = args.q.size[2], Hkv = args.k_pages.size[2], K = args.q.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  const Rules rule{scale, args.softcap, args.causal, args.window, args.prefix, 0};
  double most = 0;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const Sequence seq{b, 0, args.q.size[1], 0, index_value(args.lengths, b)};
    std::vector<double> keys(static_cast<size_t>(seq.n * K));
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) {
        load_row(args.k_pages, index_value(args.page_table, b, j / page), j % page, h / (H / Hkv), K, keys.data() + j * K);
      }
      most = std::fmax(most, largest(rule, seq, h, args.q, View(), args.sinks, keys));
    }
  }
  return most;
}

int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, int) {
  Arena arena;
  const int64_t Tk = args.k.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3];
  ForwardScratch(arena, Tk, K, V);
  if (pass == Pass::forward) return arena.used();
  arena.take<double>(Tk * K + Tk * V + K + V + H);
  // dbias has at most this many sums: a broadcast dimension counts 1, even of a batch of 0.
  int64_t sums = 1;
  for (int d = 0; d < args.bias.rank; ++d) sums *= args.bias.size[d] > 1 ? args.bias.size[d] : 1;
  if (args.bias.given()) arena.take<double>(sums);
  return arena.used();
}

void softmax_forward(const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const int64_t H = args.q.size[2], Hkv = args.k.size[2], K = args.q.size[3], V = args.v.size[3];
  const ForwardScratch scratch(arena, args.k.size[1], K, V);
  for (int64_t s = 0; s < sequences(args); ++s) {
    const Sequence seq = sequence(args, s);
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) {
        load_row(args.k, seq.b, seq.k0 + j, h / (H / Hkv), K, scratch.k + j * K);
        load_row(args.v, seq.b, seq.k0 + j, h / (H / Hkv), V, scratch.v + j * V);
      }
      attend_rows(rules(args), seq, h, args.q, args.bias, args.sinks, out, scratch);
    }
  }
}

void softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const int64_t Tk = args.k.size[1], H = args.q.size[2], Hkv = args.k.size[2], K = args.q.size[3], V = args.v.size[3];
  const Rules rule = rules(args);
  const ForwardScratch scratch(arena, Tk, K, V);
  double* const dk = arena.take<double>(Tk * K + Tk * V + K + V + H);
  double *const dv = dk + Tk * K, *const dq = dv + Tk * V, *const dout = dq + K, *const dsinks = dout + V;
  clear(dsinks, H);
  // The sums of dbias are laid out densely in the gradient's own sizes, 1 where the bias is broadcast.
  int64_t bias_step[4] = {}, bias_count = 1;
  double* dbias = nullptr;
  if (grads.dbias.given()) {
    for (int d = 3; d >= 0; --d) {
      bias_step[d] = grads.dbias.size[d] == 1 ? 0 : bias_count;
      bias_count *= grads.dbias.size[d];
    }
    dbias = arena.take<double>(bias_count);
    clear(dbias, bias_count);
  }

  for (int64_t s = 0; s < sequences(args); ++s) {
    const Sequence seq = sequence(args, s);
    for (int64_t g = 0; g < Hkv; ++g) {
      for (int64_t j = 0; j < seq.n; ++j) {
        load_row(args.k, seq.b, seq.k0 + j, g, K, scratch.k + j * K);
        load_row(args.v, seq.b, seq.k0 + j, g, V, scratch.v + j * V);
      }
      clear(dk, Tk * K);
      clear(dv, Tk * V);
      for (int64_t h = g * (H / Hkv); h < (g + 1) * (H / Hkv); ++h) {
        const double sink = sink_of(args.sinks, h);
        for (int64_t i = 0; i < seq.tq; ++i) {
          const int64_t row = seq.q0 + i;
          load_row(args.q, seq.b, row, h, K, scratch.q);
          load_row(grads.dout, seq.b, row, h, V, dout);
          load_row(out.out, seq.b, row, h, V, scratch.out);
          const double lse = load_one(out.lse, seq.b, row, h);
          const double delta = dot(dout, scratch.out, V) - load_one(grads.dlse, seq.b, row, h);
          clear(dq, K);
          for (int64_t j = 0; j < seq.n; ++j) {
            const double b = args.bias.given() ? bias_of(args.bias, seq.b, h, row, seq.k0 + j) : 0;
            if (!rule.visible(i + seq.n - seq.tq, j, seq.n) || b == kMinusInfinity) continue;
            const double *k = scratch.k + j * K, *v = scratch.v + j * V;
            const double product = dot(scratch.q, k, K);
            const double p = std::exp(rule.capped(product) + b - (lse == kMinusInfinity ? 0 : lse));
            double ds = p * (dot(dout, v, V) - delta);
            if (dbias != nullptr) {
              dbias[seq.b * bias_step[0] + h * bias_step[1] + row * bias_step[2] + (seq.k0 + j) * bias_step[3]] += ds;
            }
            if (rule.softcap > 0) ds /= std::pow(std::cosh(rule.scale * product / rule.softcap), 2);  // 1 - tanh^2
            add_scaled(dv + j * V, p, dout, V);
            add_scaled(dk + j * K, rule.scale * ds, scratch.q, K);
            add_scaled(dq, rule.scale * ds, k, K);
          }
          store_row(grads.dq, seq.b, row, h, K, dq);
          if (sink != kMinusInfinity) dsinks[h] -= std::exp(sink - lse) * delta;
        }
      }
      const int64_t stored = args.cu_seqlens_q.given() ? seq.n : Tk;  // keys behind key_len get zeros
      for (int64_t j = 0; j < stored; ++j) {
        store_row(grads.dk, seq.b, seq.k0 + j, g, K, dk + j * K);
        store_row(grads.dv, seq.b, seq.k0 + j, g, V, dv + j * V);
      }
    }
  }
  for (int64_t h = 0; h < H && grads.dsinks.given(); ++h) {
    store_f64(grads.dsinks.data, grads.dsinks.dtype, h * grads.dsinks.stride[0], dsinks[h]);
  }
  if (dbias == nullptr) return;
  const View& view = grads.dbias;
  for (int64_t index = 0; index < bias_count; ++index) {
    int64_t rest = index, offset = 0;
    for (int d = 3; d >= 0; --d) {
      offset += rest % view.size[d] * view.stride[d];
      rest /= view.size[d];
    }
    store_f64(view.data, view.dtype, offset, dbias[index]);
  }
}

int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, Pass, int) {
  Arena arena;
  ForwardScratch(arena, args.k_cache.size[1], args.q.size[3], args.v.size[3]);
  return arena.used();
}

void softmax_decode_forward(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const int64_t T = args.q.size[1], H = args.q.size[2], Hkv = args.k.size[2], K = args.q.size[3], V = args.v.size[3];
  const ForwardScratch scratch(arena, args.k_cache.size[1], K, V);
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  const Rules rule{scale, args.softcap, true, args.window, args.prefix, 0};
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const int64_t length = index_value(args.lengths, b),
                  start = args.cache_start.given() ? index_value(args.cache_start, b) : 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t g = 0; g < Hkv; ++g) {
        store_row(args.k_cache, b, length + t, g, K, load_row(args.k, b, t, g, K, scratch.k));
        store_row(args.v_cache, b, length + t, g, V, load_row(args.v, b, t, g, V, scratch.v));
      }
    }
    if (args.lengths.dtype == Dtype::i32) {
      *args.lengths.at<int32_t>(b) += static_cast<int32_t>(T);
    } else {
      *args.lengths.at<int64_t>(b) += T;
    }
    const Sequence seq{b, 0, T, start, length + T - start};
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) {
        load_row(args.k_cache, b, start + j, h / (H / Hkv), K, scratch.k + j * K);
        load_row(args.v_cache, b, start + j, h / (H / Hkv), V, scratch.v + j * V);
      }
      attend_rows(rule, seq, h, args.q, View(), args.sinks, out, scratch);
    }
  }
}

int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, Pass, int) {
  Arena arena;
  ForwardScratch(arena, args.page_table.size[1] * args.k_pages.size[1], args.q.size[3], args.v_pages.size[3]);
  return arena.used();
}

void softmax_paged_forward(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const int64_t page = args.k_pages.size[1], H = args.q.size[2], Hkv = args.k_pages.size[2];
  const int64_t K = args.q.size[3], V = args.v_pages.size[3];
  const ForwardScratch scratch(arena, args.page_table.size[1] * page, K, V);
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  const Rules rule{scale, args.softcap, args.causal, args.window, args.prefix, 0};
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const Sequence seq{b, 0, args.q.size[1], 0, index_value(args.lengths, b)};
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t j = 0; j < seq.n; ++j) {
        const int64_t p = index_value(args.page_table, b, j / page);
        load_row(args.k_pages, p, j % page, h / (H / Hkv), K, scratch.k + j * K);
        load_row(args.v_pages, p, j % page, h / (H / Hkv), V, scratch.v + j * V);
      }
      attend_rows(rule, seq, h, args.q, View(), args.sinks, out, scratch);
    }
  }
}

// Part p of out_parts [P, B, T, H, V] or lse_parts [P, B, T, H].
static View part(const View& parts, int64_t p) {
  View view = parts;
  if (!view.given()) return view;
  view.rank = parts.rank - 1;
  for (int d = 0; d < view.rank; ++d) {
    view.size[d] = parts.size[d + 1];
    view.stride[d] = parts.stride[d + 1];
  }
  view.data = static_cast<char*>(parts.data) + p * parts.stride[0] * dtype_size(parts.dtype);
  return view;
}

int64_t softmax_merge_workspace(const SoftmaxMergeArgs& args, Pass, int) {
  Arena arena;
  arena.take<double>(3 * args.out_parts.size[4]);
  return arena.used();
}

void softmax_merge_forward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  const int64_t P = args.out_parts.size[0], V = args.out_parts.size[4];
  double *const sum = Arena(launch.workspace).take<double>(3 * V), *const row = sum + V;
  for (int64_t b = 0; b < args.out_parts.size[1]; ++b) {
    for (int64_t t = 0; t < args.out_parts.size[2]; ++t) {
      for (int64_t h = 0; h < args.out_parts.size[3]; ++h) {
        double m = kMinusInfinity, total = 0;
        for (int64_t p = 0; p < P; ++p) {
          const double lse = load_one(part(args.lse_parts, p), b, t, h);
          m = lse > m ? lse : m;
        }
        if (m == kMinusInfinity) m = 0;
        clear(sum, V);
        for (int64_t p = 0; p < P; ++p) {
          const double lse = load_one(part(args.lse_parts, p), b, t, h);
          if (lse == kMinusInfinity) continue;
          total += std::exp(lse - m);
          add_scaled(sum, std::exp(lse - m), load_row(part(args.out_parts, p), b, t, h, V, row), V);
        }
        for (int64_t c = 0; c < V && total != 0; ++c) sum[c] /= total;
        store_row(out.out, b, t, h, V, sum);
        store_one(out.lse, b, t, h, m + std::log(total));
      }
    }
  }
}

// With w = exp(lse_p - lse): dout_p = w dout, dlse_p = w (dout.(out_p - out) + dlse); 0 for skipped parts.
void softmax_merge_backward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const SoftmaxMergeGrads& grads,
                            const Launch& launch) {
  const int64_t P = args.out_parts.size[0], V = args.out_parts.size[4];
  double *const dout = Arena(launch.workspace).take<double>(3 * V), *const whole = dout + V, *const row = whole + V;
  for (int64_t b = 0; b < args.out_parts.size[1]; ++b) {
    for (int64_t t = 0; t < args.out_parts.size[2]; ++t) {
      for (int64_t h = 0; h < args.out_parts.size[3]; ++h) {
        load_row(grads.dout, b, t, h, V, dout);
        load_row(out.out, b, t, h, V, whole);
        const double lse = load_one(out.lse, b, t, h), dlse = load_one(grads.dlse, b, t, h);
        for (int64_t p = 0; p < P; ++p) {
          const double lse_part = load_one(part(args.lse_parts, p), b, t, h);
          const double w = lse_part == kMinusInfinity ? 0 : std::exp(lse_part - lse);
          load_row(part(args.out_parts, p), b, t, h, V, row);
          const double dlse_part = lse_part == kMinusInfinity ? 0 : w * (dot(dout, row, V) - dot(dout, whole, V) + dlse);
          for (int64_t c = 0; c < V; ++c) row[c] = lse_part == kMinusInfinity ? 0 : w * dout[c];
          store_row(part(grads.dout_parts, p), b, t, h, V, row);
          store_one(part(grads.dlse_parts, p), b, t, h, dlse_part);
        }
      }
    }
  }
}

}  // namespace linnet::ref
