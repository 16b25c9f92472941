#include "analysis/icl_train.h"

#include <algorithm>
#include <cmath>

#include "check/random.h"
#include "core/executor.h"

namespace linnet::analysis {
namespace {

constexpr int64_t kPieces = 8;  // of a batch, whatever the threads: sums have one order
constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kLeast = 0.01;
constexpr double kGoodStart = 0.01;  // above theory

// Which prompts are drawn.
struct Design {
  int64_t d = 0, n = 0;
  double noise = 0, drift = 1, alpha = 0, gamma = 1;
  bool retrieval = false, aligned = false;
  Matrix root_x, root_b;  // Sx^1/2, Sb^1/2; empty: the identity
};

void normals(check::Random& random, const Matrix& root, double* out, int64_t d) {
  if (root.rows == 0) {
    for (int64_t c = 0; c < d; ++c) out[c] = random.normal();
    return;
  }
  std::vector<double> plain(static_cast<size_t>(d));
  for (double& x : plain) x = random.normal();
  for (int64_t c = 0; c < d; ++c) {
    out[c] = 0;
    for (int64_t k = 0; k < d; ++k) out[c] += root(c, k) * plain[static_cast<size_t>(k)];
  }
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Z [n + 1, d + 1] with (x, 0) in its last row; the label of that row is returned.
double draw_prompt(const Design& o, check::Random& random, double* Z, double* beta) {
  const int64_t d = o.d, width = d + 1;
  double* query = Z + o.n * width;
  const double noise = std::sqrt(o.noise), rest = std::sqrt(1 - o.alpha * o.alpha), fresh = std::sqrt(1 - o.drift * o.drift);
  normals(random, o.root_b, beta, d);
  normals(random, o.root_x, query, d);
  for (int64_t i = 0; i < o.n; ++i) {
    double* x = Z + i * width;
    normals(random, o.root_x, x, d);
    for (int64_t c = 0; c < d && o.retrieval; ++c) x[c] = o.alpha * query[c] + rest * x[c];
    for (int64_t c = 0; c < d && o.aligned; ++c) x[c] += o.alpha * beta[c];
    x[d] = o.gamma * dot(x, beta, d) + (noise > 0 ? noise * random.normal() : 0);
    for (int64_t c = 0; c < d && o.drift < 1; ++c) beta[c] = o.drift * beta[c] + fresh * random.normal();
  }
  for (int64_t c = 0; c < d && o.aligned; ++c) query[c] += o.alpha * beta[c];
  query[d] = 0;
  return o.gamma * dot(query, beta, d) + (noise > 0 ? noise * random.normal() : 0);
}

// The layer: its parameters in one vector, the prediction, and the gradient of (prediction * pull) added to another.
struct Model {
  bool h3 = false, adapts = false;
  int64_t n = 0, width = 0, keys = 0;
  Matrix base;  // adapted: the step that stays, [width, width]

  int64_t wk() const { return width * keys; }
  int64_t wv() const { return 2 * width * keys; }
  int64_t head() const { return wv() + width * width; }
  int64_t taps() const { return head() + width; }
  int64_t size() const { return adapts ? wv() : h3 ? taps() + n : taps(); }

  std::vector<double> initial(uint64_t seed) const {
    check::Random random(seed, "icl weights");
    std::vector<double> p(static_cast<size_t>(size()));
    const double scale = 1 / std::sqrt(static_cast<double>(width));
    for (double& x : p) x = scale * random.normal();
    if (adapts) std::fill(p.begin() + wk(), p.end(), 0.0);  // the update begins at 0
    if (h3) std::fill(p.begin() + taps(), p.end(), 1.0);
    return p;
  }

  double run(const double* p, const double* Z, double label, std::vector<double>& memory, double* gradient,
             double share) const {
    return h3 ? run_h3(p, Z, label, memory, gradient, share) : run_attention(p, Z, label, memory, gradient, share);
  }

  // The error (label - prediction). With z the query: a = z wq, G = sum z_i z_i^T, u = wv h, f = a . (wk^T G u) / n.
  double run_attention(const double* p, const double* Z, double label, std::vector<double>& memory, double* gradient,
                       double share) const {
    const int64_t W = width, r = keys;
    memory.assign(static_cast<size_t>(W * W + 4 * W + 2 * r), 0);
    double *G = memory.data(), *u = G + W * W, *g = u + W, *dg = g + W, *du = dg + W, *a = du + W, *q = a + r;
    for (int64_t i = 0; i < n; ++i) {
      const double* z = Z + i * W;
      for (int64_t b = 0; b < W; ++b) {
        for (int64_t c = 0; c <= b; ++c) G[b * W + c] += z[b] * z[c];
      }
    }
    for (int64_t b = 0; b < W; ++b) {
      for (int64_t c = 0; c < b; ++c) G[c * W + b] = G[b * W + c];
      u[b] = adapts ? (b == W - 1 ? 1 : 0) : dot(p + wv() + b * W, p + head(), W);
    }
    const double* z = Z + n * W;
    const double unit = 1 / static_cast<double>(n);
    double f = 0;
    for (int64_t b = 0; b < W; ++b) {
      g[b] = dot(G + b * W, u, W);
      for (int64_t c = 0; c < r; ++c) {
        a[c] += z[b] * p[b * r + c];
        q[c] += g[b] * p[wk() + b * r + c];
      }
    }
    for (int64_t b = 0; b < W && adapts; ++b) f += z[b] * dot(base.row(b), g, W);
    f = unit * (f + dot(a, q, r));
    const double error = label - f;
    if (gradient == nullptr) return error;
    const double pull = -2 * error * unit * share;
    for (int64_t b = 0; b < W; ++b) {
      for (int64_t c = 0; c < r; ++c) {
        gradient[b * r + c] += pull * z[b] * q[c];
        gradient[wk() + b * r + c] += pull * g[b] * a[c];
      }
      dg[b] = pull * dot(p + wk() + b * r, a, r);
    }
    for (int64_t b = 0; b < W && !adapts; ++b) {
      du[b] = dot(G + b * W, dg, W);
      for (int64_t c = 0; c < W; ++c) {
        gradient[wv() + b * W + c] += du[b] * p[head() + c];
        gradient[head() + c] += du[b] * p[wv() + b * W + c];
      }
    }
    return error;
  }

  double run_h3(const double* p, const double* Z, double label, std::vector<double>& memory, double* gradient,
                double share) const {
    const int64_t W = width;
    memory.assign(static_cast<size_t>((2 * n + 3) * W), 0);
    double *a = memory.data(), *sum = a + W, *pull_c = sum + W, *K = pull_c + W, *V = K + n * W;
    const double *z = Z + n * W, *omega = p + taps(), *h = p + head();
    const auto times = [&](const double* row, const double* w, double* to) {
      for (int64_t b = 0; b < W; ++b) {
        for (int64_t c = 0; c < W; ++c) to[c] += row[b] * w[b * W + c];
      }
    };
    times(z, p, a);
    for (int64_t i = 0; i < n; ++i) {
      times(Z + i * W, p + wk(), K + i * W);
      times(Z + i * W, p + wv(), V + i * W);
      for (int64_t c = 0; c < W; ++c) sum[c] += omega[i] * K[i * W + c] * V[i * W + c];
    }
    const double unit = 1 / static_cast<double>(n);
    double f = 0;
    for (int64_t c = 0; c < W; ++c) f += unit * a[c] * sum[c] * h[c];
    const double error = label - f;
    if (gradient == nullptr) return error;
    const double pull = -2 * error * unit * share;
    for (int64_t c = 0; c < W; ++c) {
      gradient[head() + c] += pull * a[c] * sum[c];
      pull_c[c] = pull * a[c] * h[c];
    }
    for (int64_t b = 0; b < W; ++b) {
      for (int64_t c = 0; c < W; ++c) gradient[b * W + c] += pull * z[b] * sum[c] * h[c];
    }
    for (int64_t i = 0; i < n; ++i) {
      double *k = K + i * W, *v = V + i * W, turned = 0;
      for (int64_t c = 0; c < W; ++c) {
        turned += pull_c[c] * k[c] * v[c];
        const double dk = pull_c[c] * omega[i] * v[c], dv = pull_c[c] * omega[i] * k[c];
        k[c] = dk, v[c] = dv;
      }
      gradient[taps() + i] += turned;
      for (int64_t b = 0; b < W; ++b) {
        for (int64_t c = 0; c < W; ++c) {
          gradient[wk() + b * W + c] += Z[i * W + b] * k[c];
          gradient[wv() + b * W + c] += Z[i * W + b] * v[c];
        }
      }
    }
    return error;
  }

  // The step W [d, d] that the layer takes on x and X^T y.
  Matrix step(const std::vector<double>& p) const {
    const int64_t d = width - 1;
    Matrix W(d, d);
    for (int64_t a = 0; a < d; ++a) {
      for (int64_t b = 0; b < d; ++b) {
        double sum = 0;
        if (h3) {
          for (int64_t c = 0; c < width; ++c) {
            const auto at = [&](int64_t part, int64_t row) { return p[static_cast<size_t>(part + row * width + c)]; };
            sum += p[static_cast<size_t>(head() + c)] * at(0, a) * (at(wk(), b) * at(wv(), d) + at(wk(), d) * at(wv(), b));
          }
        } else {
          const double by_key = dot(p.data() + a * keys, p.data() + wk() + b * keys, keys);
          const double by_value = dot(p.data() + a * keys, p.data() + wk() + d * keys, keys);  // the label as the key
          const auto u = [&](int64_t row) { return dot(p.data() + wv() + row * width, p.data() + head(), width); };
          sum = adapts ? by_key : by_key * u(d) + by_value * u(b);
          if (adapts) sum += base(a, b);
        }
        W(a, b) = sum;
      }
    }
    return W;
  }
};

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  const auto n = static_cast<int64_t>(a.size());
  const double size = std::sqrt(dot(a.data(), a.data(), n) * dot(b.data(), b.data(), n));
  return size == 0 ? 0 : dot(a.data(), b.data(), n) / size;
}

// A pass over `count` prompts in kPieces pieces: sums of e^2 and e^4, and of the gradient where one is wanted.
struct Pass {
  const Design* design;
  const Model* model;
  const double* parameters;
  uint64_t seed;
  int64_t count;
  bool learns;
  std::vector<double> squares, fourths;
  std::vector<std::vector<double>> gradients;

  void run() {
    squares.assign(kPieces, 0);
    fourths.assign(kPieces, 0);
    gradients.resize(kPieces);
    default_executor().run(
        kPieces, [](void* self, int64_t piece, int) { static_cast<Pass*>(self)->run_piece(piece); }, this);
  }
  void run_piece(int64_t piece) {
    const auto at = static_cast<size_t>(piece);
    check::Random random(seed * kPieces + static_cast<uint64_t>(piece), "icl prompts");
    std::vector<double> Z(static_cast<size_t>((design->n + 1) * (design->d + 1))), beta(static_cast<size_t>(design->d)), memory;
    if (learns) gradients[at].assign(static_cast<size_t>(model->size()), 0);
    for (int64_t i = piece * count / kPieces; i < (piece + 1) * count / kPieces; ++i) {
      const double label = draw_prompt(*design, random, Z.data(), beta.data());
      const double e = model->run(parameters, Z.data(), label, memory, learns ? gradients[at].data() : nullptr,
                                  1 / static_cast<double>(count));
      squares[at] += e * e;
      fourths[at] += e * e * e * e;
    }
  }
};

// Adam from one random start.
std::vector<double> train(const Model& model, const IclTraining& training, uint64_t seed, Pass* pass) {
  std::vector<double> p = model.initial(seed), first(p.size(), 0), second(p.size(), 0);
  pass->learns = true;
  pass->parameters = p.data();
  pass->count = training.batch;
  for (int64_t step = 1; step <= training.steps; ++step) {
    pass->seed = seed * 1'000'003 + static_cast<uint64_t>(step);
    pass->run();
    const auto t = static_cast<double>(step);
    const double fall = 0.5 * (1 + std::cos(M_PI * t / static_cast<double>(training.steps)));
    const double level = std::sqrt(1 - std::pow(kBeta2, t)) / (1 - std::pow(kBeta1, t));
    const double rate = training.rate * level * (kLeast + (1 - kLeast) * fall);
    for (size_t i = 0; i < p.size(); ++i) {
      double g = 0;
      for (const std::vector<double>& each : pass->gradients) g += each[i];
      first[i] = kBeta1 * first[i] + (1 - kBeta1) * g;
      second[i] = kBeta2 * second[i] + (1 - kBeta2) * g * g;
      p[i] -= rate * first[i] / (std::sqrt(second[i]) + 1e-12);
    }
  }
  return p;
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& icl_experiments() {
  static const std::vector<std::pair<std::string, std::string>> list = {{"full", "attention"},
                                                                        {"full", "h3"},
                                                                        {"rank", "attention"},
                                                                        {"adapted", "attention"},
                                                                        {"drift_attention", "attention"},
                                                                        {"drift_h3", "h3"},
                                                                        {"retrieval", "attention"},
                                                                        {"aligned", "attention"}};
  return list;
}

Status check_training(const IclTraining& t) {
  if (t.steps < 1 || t.steps > 1'000'000)
    return bad_input("icl: steps is " + std::to_string(t.steps) + ", expected 1 to 1000000");
  if (t.batch < kPieces || t.batch > 100'000)
    return bad_input("icl: batch is " + std::to_string(t.batch) + ", expected " + std::to_string(kPieces) + " to 100000");
  if (!(t.rate > 0 && t.rate <= 1))
    return bad_input("icl: rate is " + std::to_string(t.rate) + ", expected above 0, at most 1");
  return {};
}

Status icl_experiment(const std::string& name, const std::string& layer, const IclSetting& o, int64_t n,
                      const IclTraining& training, IclMeasured* m) {
  LINNET_TRY(check_training(training));
  if (n < 1) return bad_input("icl: n is " + std::to_string(n) + ", expected at least 1 to train on");
  IclSetting one = o;
  one.n = {n};
  IclCurve curve;
  LINNET_TRY(icl_curve(name, one, &curve));
  const IclCase c = icl_case(one);
  const int64_t d = curve.d;
  *m = {.name = name, .layer = layer, .d = d, .n = n, .theory = curve.loss[0]};
  Design design{.d = d, .n = n, .noise = o.noise, .root_x = {}, .root_b = {}};
  Model model{.h3 = layer == "h3", .adapts = name == "adapted", .n = n, .width = d + 1, .keys = d + 1, .base = {}};
  Matrix best = identity(d);
  std::vector<double> omega(static_cast<size_t>(n), 1);
  const auto root = [](double x) { return std::sqrt(std::max(x, 0.0)); };
  const bool plain = name == "full" || name == "rank" || name == "adapted";
  if (plain) {
    design.root_x = symmetric_function(symmetric_eigen(c.prompts.Sx), root);
    design.root_b = symmetric_function(symmetric_eigen(name == "adapted" ? c.Sb_new : c.prompts.Sb), root);
  }
  if (name == "full") optimal_loss(c.prompts, n, &best);
  if (name == "rank") {
    model.keys = o.rank;
    rank_loss(c.prompts, n, o.rank, &best);
  }
  if (name == "adapted") {
    Matrix W, update;
    optimal_loss(c.prompts, n, &W);
    adapted_loss(c.prompts, c.Sb_new, n, o.rank, &update);
    best = static_cast<double>(n) * (W + update);
    model.base = Matrix(d + 1, d + 1);
    for (int64_t a = 0; a < d; ++a) {
      for (int64_t b = 0; b < d; ++b) model.base(a, b) = static_cast<double>(n) * W(a, b);
    }
    model.keys = o.rank;
  }
  if (name == "drift_attention" || name == "drift_h3") design.drift = o.drift;
  if (name == "drift_h3") drift_weighted_loss(d, n, o.noise, o.drift, &omega);
  if (name == "retrieval") design.retrieval = true, design.alpha = o.alpha;
  if (name == "aligned") design.aligned = true, design.alpha = o.alpha, design.gamma = aligned_gamma(d, o.alpha);
  if (model.keys < 1) return bad_input("icl: rank is 0: there is nothing to train");

  Pass pass{.design = &design,
            .model = &model,
            .parameters = nullptr,
            .seed = 0,
            .count = 0,
            .learns = false,
            .squares = {},
            .fourths = {},
            .gradients = {}};
  const auto test = [&](const std::vector<double>& p, uint64_t seed, double* fourths) {
    pass.learns = false;
    pass.parameters = p.data();
    pass.count = training.tests;
    pass.seed = seed;
    pass.run();
    double squares = 0;
    for (size_t i = 0; i < pass.squares.size(); ++i) squares += pass.squares[i], *fourths += pass.fourths[i];
    return squares;
  };
  std::vector<double> p;
  double least = HUGE_VAL, ignored = 0;
  const uint64_t stream = training.seed * 1'000'003;
  while (m->tries < training.tries && !(least < (1 + kGoodStart) * m->theory)) {
    const std::vector<double> tried = train(model, training, training.seed + static_cast<uint64_t>(m->tries++) * 7919, &pass);
    const double loss = test(tried, stream - 1, &ignored) / static_cast<double>(training.tests);
    if (p.empty() || loss < least) p = tried, least = loss;
  }
  double fourths = 0;
  const double squares = test(p, stream - 2, &fourths);
  const auto count = static_cast<double>(training.tests);
  m->loss = squares / count;
  m->deviation = std::sqrt(std::max(fourths / count - m->loss * m->loss, 0.0) / count);
  if (!std::isfinite(m->loss)) {
    return bad_input("icl: " + name + ", " + layer + ": the loss is no number after " + std::to_string(training.steps) +
                     " steps; take a smaller rate than " + std::to_string(training.rate));
  }
  m->alignment = cosine(model.step(p).values, best.values);
  if (model.h3) m->filter = cosine(std::vector<double>(p.begin() + model.taps(), p.end()), omega);
  return {};
}

}  // namespace linnet::analysis
