#include "convert/measure.h"

#include <algorithm>
#include <cmath>

#include "core/executor.h"
#include "linnet.h"

namespace linnet::convert {

namespace {

constexpr int64_t kErrorRows = 256, kKlRows = 512, kHeadRows = 64;

// Gram matrices of the output projection of each head: G_h = Wo_h^T Wo_h, [heads, value, value].
std::vector<float> grams(const LayeredModel& model, int64_t layer) {
  const int64_t H = model.heads(layer), V = model.value(layer), C = model.hidden();
  const std::vector<float> w = model.output_weight(layer);  // [C, H V]
  std::vector<float> g(static_cast<size_t>(H * V * V), 0);
  for (int64_t h = 0; h < H; ++h) {
    float* gram = g.data() + h * V * V;
    if (w.empty()) {
      for (int64_t i = 0; i < V; ++i) gram[i * V + i] = 1;
      continue;
    }
    for (int64_t c = 0; c < C; ++c) {
      const float* row = w.data() + c * H * V + h * V;
      for (int64_t i = 0; i < V; ++i) {
        for (int64_t j = 0; j < V; ++j) gram[i * V + j] += row[i] * row[j];
      }
    }
  }
  return g;
}

double square(const float* gram, const float* d, int64_t V) {
  double total = 0;
  for (int64_t i = 0; i < V; ++i) {
    float sum = 0;
    for (int64_t j = 0; j < V; ++j) sum += gram[i * V + j] * d[j];
    total += static_cast<double>(d[i]) * static_cast<double>(sum);
  }
  return std::max(total, 0.0);
}

// Adds the error of each head over sampled rows.
void add_errors(const std::vector<float>& g, const HeadTaps& taps, int64_t from, const std::vector<float>* other,
                std::vector<double>& heads) {
  const int64_t H = taps.heads, V = taps.value, T = taps.tokens - from, rows = std::min(kErrorRows, T);
  std::vector<float> d(static_cast<size_t>(V));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = from + (2 * r + 1) * T / (2 * rows);
    for (int64_t h = 0; h < H; ++h) {
      const size_t at = static_cast<size_t>((t * H + h) * V);
      for (int64_t i = 0; i < V; ++i) {
        const size_t n = at + static_cast<size_t>(i);
        d[static_cast<size_t>(i)] = other == nullptr ? taps.out[n] : (*other)[n] - taps.out[n];
      }
      heads[static_cast<size_t>(h)] += square(g.data() + h * V * V, d.data(), V) / static_cast<double>(rows);
    }
  }
}

Status windowed(const HeadTaps& t, bool causal, int64_t window, int64_t sinks, std::vector<float>& out) {
  out.resize(t.out.size());
  SoftmaxArgs args;
  args.q = View::dense(t.q.data(), Dtype::f32, {1, t.tokens, t.heads, t.key});
  args.k = View::dense(t.k.data(), Dtype::f32, {1, t.tokens, t.kv_heads, t.key});
  args.v = View::dense(t.v.data(), Dtype::f32, {1, t.tokens, t.kv_heads, t.value});
  args.scale = Maybe(t.scale);
  args.causal = causal;
  args.window.left = causal ? window - 1 : window / 2;
  args.window.right = causal ? -1 : (window - 1) / 2;
  args.prefix = sinks;
  args.softcap = t.softcap;
  SoftmaxOut result;
  result.out = View::dense(out.data(), Dtype::f32, {1, t.tokens, t.heads, t.value});
  std::vector<char> memory(static_cast<size_t>(softmax_workspace(args, Pass::forward, {})) + 128);
  Context context;
  context.workspace = memory.data();
  context.workspace_bytes = static_cast<int64_t>(memory.size());
  return softmax(args, result, context);
}

}  // namespace

Status embed(const LayeredModel& model, const Sample& sample, std::vector<float>& x) {
  return sample.pixels.empty() ? model.embed(sample.tokens, x) : model.embed_image(sample.pixels, x);
}

Status measure_layer(const LayeredModel& model, int64_t layer, const std::vector<Sample>& samples,
                     const std::vector<std::vector<float>>& inputs, const std::vector<int64_t>& windows, int64_t sinks,
                     const std::vector<ConvertedLayer>& whole, LayerErrors& out, std::vector<std::vector<float>>& outputs) {
  out = {};
  outputs.resize(samples.size());
  ConvertedLayer plain;
  plain.index = layer;
  if (!model.converts(layer)) {
    for (size_t s = 0; s < samples.size(); ++s) LINNET_TRY(model.block(plain, inputs[s], outputs[s]));
    return {};
  }
  const int64_t H = model.heads(layer), kv = model.kv_heads(layer), groups = H / kv;
  const std::vector<float> g = grams(model, layer);
  out.window.assign(static_cast<size_t>(kv), std::vector<double>(windows.size(), 0));
  out.whole.assign(whole.size(), 0);
  out.single.assign(static_cast<size_t>(kv), std::vector<double>(whole.size(), 0));
  std::vector<float> other, ignored;
  for (size_t s = 0; s < samples.size(); ++s) {
    HeadTaps taps;
    LINNET_TRY(model.block(plain, inputs[s], outputs[s], nullptr, &taps));
    for (const float x : outputs[s]) {
      if (!std::isfinite(x)) return bad_input("layer " + std::to_string(layer) + ": its output is not finite");
    }
    std::vector<analysis::HeadStatistics> heads;
    LINNET_TRY(analysis::head_statistics(
        taps, layer, model.causal(),
        {.rows = 128, .sinks = sinks, .windows = windows, .degrees = s == 0 && samples[0].from == 0, .samples = 256}, heads));
    const double share = 1 / static_cast<double>(samples.size());
    if (s == 0) out.heads.assign(heads.size(), {.layer = layer, .window_mass = std::vector<double>(windows.size(), 0)});
    for (size_t h = 0; h < heads.size(); ++h) {
      analysis::HeadStatistics& to = out.heads[h];
      to.head = static_cast<int64_t>(h);
      to.entropy += share * heads[h].entropy;
      to.entropy_ratio += share * heads[h].entropy_ratio;
      to.distance += share * heads[h].distance;
      to.sink_mass += share * heads[h].sink_mass;
      to.stable_rank += share * heads[h].stable_rank;
      to.dof += heads[h].dof;  // of the first sample
      for (size_t w = 0; w < windows.size(); ++w) to.window_mass[w] += share * heads[h].window_mass[w];
    }
    std::vector<double> energy(static_cast<size_t>(H), 0);
    add_errors(g, taps, samples[s].from, nullptr, energy);
    for (const double e : energy) out.energy += e;
    for (size_t w = 0; w < windows.size(); ++w) {
      if (windows[w] + sinks >= taps.tokens && windows[w] >= 2 * taps.tokens) continue;
      LINNET_TRY(windowed(taps, model.causal(), windows[w], sinks, other));
      std::vector<double> errors(static_cast<size_t>(H), 0);
      add_errors(g, taps, samples[s].from, &other, errors);
      for (int64_t h = 0; h < H; ++h) out.window[static_cast<size_t>(h / groups)][w] += errors[static_cast<size_t>(h)];
    }
    for (size_t o = 0; o < whole.size() && model.replaces(layer); ++o) {
      ConvertedLayer candidate = whole[o];
      candidate.index = layer;
      HeadTaps changed;
      LINNET_TRY(model.block(candidate, inputs[s], ignored, nullptr, &changed));
      std::vector<double> errors(static_cast<size_t>(H), 0);
      add_errors(g, taps, samples[s].from, &changed.out, errors);
      for (const double e : errors) out.whole[o] += e;
      for (int64_t h = 0; h < H; ++h) out.single[static_cast<size_t>(h / groups)][o] += errors[static_cast<size_t>(h)];
    }
  }
  return {};
}

Status trace(const LayeredModel& model, const std::vector<Sample>& samples, bool keep_inputs, const Told& told, Traced& out) {
  const size_t layers = static_cast<size_t>(model.layers());
  out.inputs.assign(keep_inputs ? layers : 0, std::vector<std::vector<float>>(samples.size()));
  out.last.resize(samples.size());
  for (size_t s = 0; s < samples.size(); ++s) {
    std::vector<float> x, y;
    LINNET_TRY(embed(model, samples[s], x));
    for (size_t i = 0; i < layers; ++i) {
      ConvertedLayer plain;
      plain.index = static_cast<int64_t>(i);
      LINNET_TRY(model.block(plain, x, y));
      if (keep_inputs) out.inputs[i][s] = x;
      x.swap(y);
      if (told) told("teacher", static_cast<int64_t>(s * layers + i + 1), static_cast<int64_t>(samples.size() * layers));
    }
    LINNET_TRY(model.finish(x));
    for (const float value : x) {
      if (!std::isfinite(value)) return bad_input("the model's states are not finite");
    }
    out.last[s] = std::move(x);
  }
  return {};
}

Status run_from(const LayeredModel& model, const std::vector<ConvertedLayer>& layers, size_t first, std::vector<float> x,
                const ParameterValues* extra, std::vector<float>& out) {
  std::vector<float> y;
  for (size_t i = first; i < layers.size(); ++i) {
    LINNET_TRY(model.block(layers[i], x, y, extra));
    x.swap(y);
  }
  LINNET_TRY(model.finish(x));
  out = std::move(x);
  return {};
}

namespace {

double log_sum(const float* row, int64_t n, float& top) {
  top = *std::max_element(row, row + n);
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += static_cast<double>(std::exp(row[j] - top));
  return std::log(sum) + static_cast<double>(top);
}

double kl_row(const float* p, const float* q, int64_t n, double lp, double lq) {
  double total = 0;
  for (int64_t j = 0; j < n; ++j) {
    const double a = static_cast<double>(p[j]) - lp;
    if (a > -30) total += std::exp(a) * (a - (static_cast<double>(q[j]) - lq));
  }
  return total;
}

}  // namespace

std::vector<float> pooled(const LayeredModel& model, const std::vector<float>& states) {
  const size_t C = static_cast<size_t>(model.hidden()), T = model.description().image > 0 ? 1 : states.size() / C;
  std::vector<double> sum(C, 0);
  for (size_t t = 0; t < T; ++t) {
    for (size_t c = 0; c < C; ++c) sum[c] += static_cast<double>(states[t * C + c]);
  }
  double square = 0;
  for (const double x : sum) square += x * x;
  std::vector<float> out;
  for (const double x : sum) out.push_back(static_cast<float>(x / std::max(std::sqrt(square), 1e-300)));
  return out;
}

Status distance(const LayeredModel& model, const std::vector<std::vector<float>>& expected,
                const std::vector<std::vector<float>>& found, bool pool_first, double& out, int64_t from) {
  const int64_t C = model.hidden(), vocabulary = model.description().vocabulary;
  double total = 0;
  if (!model.causal()) {
    for (size_t s = 0; s < expected.size(); ++s) {
      const int64_t T = pool_first || model.description().image > 0 ? 1 : static_cast<int64_t>(expected[s].size()) / C;
      double ab = 0, aa = 0, bb = 0;
      for (int64_t c = 0; c < C; ++c) {
        double a = 0, b = 0;
        for (int64_t t = 0; t < T; ++t) {
          a += static_cast<double>(expected[s][static_cast<size_t>(t * C + c)]);
          b += static_cast<double>(found[s][static_cast<size_t>(t * C + c)]);
        }
        ab += a * b, aa += a * a, bb += b * b;
      }
      total += 1 - ab / std::max(std::sqrt(aa * bb), 1e-300);
    }
    out = total / static_cast<double>(expected.size());
    return {};
  }
  int64_t count = 0;
  std::vector<float> rows_a, rows_b, a(static_cast<size_t>(kHeadRows * vocabulary)), b(a.size());
  for (size_t s = 0; s < expected.size(); ++s) {
    const int64_t T = static_cast<int64_t>(expected[s].size()) / C - from, rows = std::min<int64_t>(T, kKlRows);
    for (int64_t begin = 0; begin < rows; begin += kHeadRows) {
      const int64_t part = std::min(kHeadRows, rows - begin);
      rows_a.clear(), rows_b.clear();
      for (int64_t r = begin; r < begin + part; ++r) {
        const ptrdiff_t t = (from + (2 * r + 1) * T / (2 * rows)) * C;
        rows_a.insert(rows_a.end(), expected[s].begin() + t, expected[s].begin() + t + C);
        rows_b.insert(rows_b.end(), found[s].begin() + t, found[s].begin() + t + C);
      }
      LINNET_TRY(model.logits(rows_a.data(), part, a.data()));
      LINNET_TRY(model.logits(rows_b.data(), part, b.data()));
      struct Work {
        const float *a, *b;
        int64_t n;
        std::vector<double> kl;
      } work{a.data(), b.data(), vocabulary, std::vector<double>(static_cast<size_t>(part))};
      default_executor().run(
          part,
          [](void* context, int64_t i, int) {
            Work& w = *static_cast<Work*>(context);
            float top;
            const double lp = log_sum(w.a + i * w.n, w.n, top), lq = log_sum(w.b + i * w.n, w.n, top);
            w.kl[static_cast<size_t>(i)] = kl_row(w.a + i * w.n, w.b + i * w.n, w.n, lp, lq);
          },
          &work);
      for (const double kl : work.kl) total += kl;
      count += part;
    }
  }
  out = total / static_cast<double>(std::max<int64_t>(count, 1));
  return {};
}

Status score_block(const LayeredModel& head, const std::vector<int32_t>& tokens, const std::vector<float>& teacher,
                   const std::vector<float>& student, BlockScore& out) {
  const int64_t C = head.hidden(), n = head.description().vocabulary, T = static_cast<int64_t>(tokens.size()) - 1;
  out = {};
  out.teacher.resize(static_cast<size_t>(T));
  out.student.resize(out.teacher.size());
  out.kl.resize(out.teacher.size());
  std::vector<float> a(static_cast<size_t>(kHeadRows * n)), b(a.size());
  std::vector<unsigned char> same(out.teacher.size());
  for (int64_t t = 0; t < T; t += kHeadRows) {
    const int64_t part = std::min(kHeadRows, T - t);
    LINNET_TRY(head.logits(teacher.data() + t * C, part, a.data()));
    LINNET_TRY(head.logits(student.data() + t * C, part, b.data()));
    struct Work {
      const float *a, *b;
      const int32_t* next;
      BlockScore* out;
      unsigned char* same;
      int64_t first, n;
    } work{a.data(), b.data(), tokens.data() + t + 1, &out, same.data(), t, n};
    default_executor().run(
        part,
        [](void* context, int64_t i, int) {
          Work& w = *static_cast<Work*>(context);
          const float *p = w.a + i * w.n, *q = w.b + i * w.n;
          float top;
          const double lp = log_sum(p, w.n, top), lq = log_sum(q, w.n, top);
          const size_t at = static_cast<size_t>(w.first + i);
          w.out->teacher[at] = static_cast<float>(lp - static_cast<double>(p[w.next[i]]));
          w.out->student[at] = static_cast<float>(lq - static_cast<double>(q[w.next[i]]));
          w.out->kl[at] = static_cast<float>(kl_row(p, q, w.n, lp, lq));
          w.same[at] = std::max_element(p, p + w.n) - p == std::max_element(q, q + w.n) - q;
        },
        &work);
  }
  for (const unsigned char each : same) out.agreed += each;
  return {};
}

}  // namespace linnet::convert
