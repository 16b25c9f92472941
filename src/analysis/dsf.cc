#include "analysis/dsf.h"

#include <algorithm>
#include <cmath>

#include "core/files/json.h"

namespace linnet::analysis {
namespace {

constexpr double kRankThreshold = 1e-10;  // of the largest singular value
constexpr double kSums = 1e-8;            // of the rows' sums, for their class
constexpr double kSameBlock = 1e-9;       // relative: a block m I
constexpr double kMemoryShare = 0.99;

double largest(const std::vector<double>& x) {
  double most = 0;
  for (const double each : x) most = std::max(most, std::abs(each));
  return most;
}

double quantile(std::vector<double> x, double p) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(std::lround(p * static_cast<double>(x.size() - 1)))];
}

// M, its kind, and the squares ||G[t, i]||_F^2 that the memory length counts. y by G goes to `out`.
void mix(const System& s, const std::vector<double>& u, SystemReport* r, Matrix* squares, std::vector<double>* out) {
  const int64_t T = s.T, Dy = s.outputs(), Du = s.inputs();
  *squares = Matrix(T, T);
  out->assign(static_cast<size_t>(T * Dy), 0);
  if (s.full) {
    bool same = Dy == Du, diagonal = Dy == Du;
    std::vector<Matrix> g;
    double most = 0;
    for (int64_t lag = 0; lag < T; ++lag) most = std::max(most, largest(g.emplace_back(lag_response(s, lag)).values));
    for (const Matrix& block : g) {
      for (int64_t y = 0; y < Dy && same + diagonal > 0; ++y) {
        for (int64_t x = 0; x < Du; ++x) {
          if (y != x && std::abs(block(y, x)) > kSameBlock * most) same = diagonal = false;
          if (y == x && std::abs(block(y, x) - block(0, 0)) > kSameBlock * most) same = false;
        }
      }
    }
    r->mixing = Matrix(T, T);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i <= t; ++i) {
        const Matrix& block = g[static_cast<size_t>(t - i)];
        const double norm = frobenius(block);
        (*squares)(t, i) = norm * norm;
        r->mixing(t, i) = diagonal ? block(0, 0) : norm;
        for (int64_t y = 0; y < Dy; ++y) {
          for (int64_t x = 0; x < Du; ++x)
            (*out)[static_cast<size_t>(t * Dy + y)] += block(y, x) * u[static_cast<size_t>(i * Du + x)];
        }
      }
    }
    r->mixing_kind = same ? "scalar" : diagonal ? "channelwise" : "norms";
    return;
  }
  bool same = true;
  Matrix m;
  for (int64_t j = 0; j < s.channels; ++j) {
    if (j == 0 || !s.shared) m = channel_mixing(s, j);
    if (j == 0) r->mixing = m;
    const double most = largest(r->mixing.values);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i <= t; ++i) {
        const double x = m(t, i);
        same &= std::abs(x - r->mixing(t, i)) <= kSameBlock * most;
        (*squares)(t, i) += x * x;
        (*out)[static_cast<size_t>(t * Dy + j)] += x * u[static_cast<size_t>(i * Du + j)];
      }
    }
  }
  r->mixing_kind = same ? "scalar" : "channelwise";
}

Status spectrum(const System& s, SystemReport* r) {
  const int64_t sets = s.full ? 1 : s.sets();
  r->multiplicity = s.full ? 1 : s.channels / sets;
  std::vector<Complex> values;
  std::vector<double> later;
  for (int64_t t = 0; t < s.T; ++t) {
    double radius = 0;
    for (int64_t set = 0; set < sets; ++set) {
      LINNET_TRY(block_eigenvalues(s, t, set, &values));
      for (const Complex& z : values) {
        r->eig_real.push_back(z.real());
        r->eig_imag.push_back(z.imag());
        radius = std::max(radius, std::abs(z));
      }
    }
    r->spectral_radius.push_back(radius);
    if (t > 0) later.push_back(radius);
    r->growth |= radius > 1 + 1e-12;
  }
  r->radius_low = quantile(later, 0.1);
  r->radius_middle = quantile(later, 0.5);
  r->radius_high = quantile(later, 0.9);
  const double middle = r->radius_middle;
  r->half_life = middle == 0 ? 0 : std::abs(middle - 1) < 1e-12 ? HUGE_VAL : std::log(0.5) / std::log(middle);
  return {};
}

void memory(const Matrix& squares, SystemReport* r) {
  for (int64_t t = 0; t < squares.rows; ++t) {
    double total = 0, sum = 0;
    for (int64_t i = 0; i <= t; ++i) total += squares(t, i);
    int64_t length = 0;
    while (length <= t && total > 0 && sum < kMemoryShare * total) sum += squares(t, t - length++);
    r->memory_length.push_back(length);
  }
}

Matrix block(const Matrix& m, int64_t row, int64_t cols) {
  Matrix out(m.rows - row, cols);
  for (int64_t i = row; i < m.rows; ++i) std::copy(m.row(i), m.row(i) + cols, out.row(i - row));
  return out;
}

constexpr int64_t kPicture = 48;       // rows of a thinned matrix
constexpr size_t kEigenvalues = 1500;  // in JSON

// The entry of the largest magnitude of each square of entries.
Matrix thinned(const Matrix& m, int64_t most) {
  if (m.rows <= most) return m;
  Matrix out(most, most);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) {
      double& to = out(i * most / m.rows, j * most / m.cols);
      if (std::abs(m(i, j)) > std::abs(to)) to = m(i, j);
    }
  }
  return out;
}

}  // namespace

int64_t semiseparable_rank(const Matrix& m) {
  if (m.rows < 2) return 0;
  const std::vector<double> all = singular_values(m);
  const double threshold = kRankThreshold * all.front();
  std::vector<int64_t> cuts;
  if (m.rows <= kEveryCut) {
    for (int64_t t = 1; t < m.rows; ++t) cuts.push_back(t);
  } else {
    cuts = {m.rows / 4, m.rows / 2, 3 * m.rows / 4};
  }
  int64_t most = 0;
  for (const int64_t t : cuts) {
    if (std::min(t, m.rows - t) <= most) continue;  // it cannot be larger
    most = std::max(most, count_above(singular_values(block(m, t, t)), threshold));
  }
  return most;
}

void describe_mixing(const Matrix& m, const SystemSetting& setting, SystemReport* r) {
  r->mixing = m;
  if (setting.ranks && m.rows > 0) {
    r->singular_values = singular_values(m);
    const double first = r->singular_values.front();
    double sum = 0, squares = 0, entropy = 0;
    for (const double x : r->singular_values) {
      sum += x;
      squares += x * x;
    }
    for (const double x : r->singular_values) entropy -= x > 0 ? x / sum * std::log(x / sum) : 0;
    r->rank = first > 0 ? count_above(r->singular_values, kRankThreshold * first) : 0;
    r->effective_rank = first > 0 ? std::exp(entropy) : 0;
    r->stable_rank = first > 0 ? squares / (first * first) : 0;
    r->semiseparable_rank = first > 0 ? semiseparable_rank(m) : 0;
  }
  bool ones = true, zeros = true, negative = false;
  for (int64_t t = 0; t < m.rows; ++t) {
    double sum = 0, size = 0, entropy = 0, distance = 0, local = 0, below = 0;
    for (int64_t i = 0; i < m.cols; ++i) {
      sum += m(t, i);
      size += std::abs(m(t, i));
      negative |= m(t, i) < -kSums;
    }
    for (int64_t i = 0; i < m.cols && size > 0; ++i) {
      const double p = std::abs(m(t, i)) / size;
      if (p == 0) continue;
      entropy -= p * std::log(p);
      distance += p * static_cast<double>(t - i);
      if (t - i >= 0 && t - i < setting.window) local += p;
      if (m(t, i) < 0) below += p;
    }
    if (size == 0) {
      ++r->zero_rows;
    } else {
      ones &= std::abs(sum - 1) <= kSums;
      zeros &= std::abs(sum) <= kSums;
    }
    r->row_sum.push_back(sum);
    r->entropy.push_back(entropy);
    r->relative_entropy.push_back(t == 0 ? 0 : entropy / std::log(static_cast<double>(t + 1)));
    r->mean_distance.push_back(distance);
    r->local_mass.push_back(local);
    r->negative_mass.push_back(below);
  }
  r->row_class = ones ? (negative ? "affine" : "convex") : zeros ? "zero-sum" : negative ? "signed" : "nonnegative";
}

Status analyse(std::string_view mixer, const MixerInputs& inputs, const SystemSetting& setting, SystemReport* r) {
  *r = SystemReport();
  LINNET_TRY(build_system(mixer, inputs, &r->system, &r->out));
  const System& s = r->system;
  r->mixer = find_mixer(mixer)->name;
  if (s.T > kMaxAnalysed) {
    return bad_input("dsf: " + r->mixer + ": the sequence has " + std::to_string(s.T) + " tokens, expected at most " +
                     std::to_string(kMaxAnalysed) + ": take a part of it");
  }
  r->state_size = s.reals();
  const auto key = inputs.tensors.find("k");
  if (s.cache && key != inputs.tensors.end()) r->cache_size = s.T * (key->second.shape.back() + s.channels);
  const std::vector<double>& u = system_input(inputs).values;
  const std::vector<double> recurrent = run(s, u);
  const double size = std::max(1.0, largest(r->out));
  Matrix squares;
  std::vector<double> by_transfer;
  mix(s, u, r, &squares, &by_transfer);
  for (size_t i = 0; i < r->out.size(); ++i) {
    const double a = std::abs(recurrent[i] - r->out[i]) / size, b = std::abs(by_transfer[i] - r->out[i]) / size;
    r->recurrence_error = std::isnan(a) ? HUGE_VAL : std::max(r->recurrence_error, a);
    r->transfer_error = std::isnan(b) ? HUGE_VAL : std::max(r->transfer_error, b);
  }
  LINNET_TRY(spectrum(s, r));
  memory(squares, r);
  describe_mixing(Matrix(r->mixing), setting, r);
  return {};
}

Status normaliser_of(const std::string& mixer, const System& s, std::vector<double>* n) {
  const std::string open = "dsf: " + mixer + ": ";
  n->clear();
  if (s.complex)
    return bad_input(open + "its eigenvalues are complex, but a normaliser n_t = -sum log a_t wants real ones above 0");
  if (s.full || s.form != Form::scalar || s.cache)
    return bad_input(open + "its L_t is no single number, so that no normaliser n_t = -sum log a_t stands for it");
  double sum = 0;
  for (size_t t = 0; t < s.log_decay.size(); ++t) {
    const bool cut = std::isinf(s.log_decay[t]) || s.decay_sign[t] <= 0;
    if (t > 0 && cut) {
      return bad_input(open + "its decay at token " + std::to_string(t) + " is " + (s.decay_sign[t] < 0 ? "negative" : "0") +
                       ", but a normaliser n_t = -sum log a_t wants decays above 0");
    }
    if (t > 0) sum -= s.log_decay[t];
    n->push_back(sum);
  }
  return {};
}

Status injectivity(std::string_view mixer, const MixerInputs& inputs, Injectivity* result) {
  *result = Injectivity();
  const auto found = inputs.tensors.find("q");
  if (found == inputs.tensors.end() || found->second.shape.size() != 2)
    return bad_input("dsf: " + std::string(mixer) + " has no queries q [T, K]");
  const int64_t T = found->second.shape[0], K = found->second.shape[1];
  const auto query = [&](int64_t t) {
    return std::vector<double>(found->second.values.begin() + t * K, found->second.values.begin() + (t + 1) * K);
  };
  const auto apart = [](const std::vector<double>& a, const std::vector<double>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
  };
  std::vector<std::vector<double>> weights(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) LINNET_TRY(query_weights(mixer, inputs, query(t), &weights[static_cast<size_t>(t)]));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < t; ++i) {
      double distance = 0;
      for (int64_t c = 0; c < K; ++c)
        distance += std::pow(query(t)[static_cast<size_t>(c)] - query(i)[static_cast<size_t>(c)], 2);
      if (std::sqrt(distance) <= 1e-6) continue;
      ++result->pairs;
      result->collisions += apart(weights[static_cast<size_t>(t)], weights[static_cast<size_t>(i)]) < 1e-6;
    }
  }
  for (const double factor : {0.5, 2.0, -1.0}) {
    bool same = T > 0;
    for (int64_t t = 0; t < T && same; ++t) {
      std::vector<double> scaled = query(t), w;
      for (double& x : scaled) x *= factor;
      LINNET_TRY(query_weights(mixer, inputs, scaled, &w));
      same = apart(w, weights[static_cast<size_t>(t)]) < 1e-6;
    }
    if (same) result->same_factors.push_back(factor);
  }
  if (T == 0) return {};
  Matrix jacobian(T, K);  // at the last query, by central differences
  for (int64_t c = 0; c < K; ++c) {
    std::vector<double> up = query(T - 1), down = up, a, b;
    up[static_cast<size_t>(c)] += 1e-5;
    down[static_cast<size_t>(c)] -= 1e-5;
    LINNET_TRY(query_weights(mixer, inputs, up, &a));
    LINNET_TRY(query_weights(mixer, inputs, down, &b));
    for (int64_t i = 0; i < T; ++i) jacobian(i, c) = (a[static_cast<size_t>(i)] - b[static_cast<size_t>(i)]) / 2e-5;
  }
  const std::vector<double> values = singular_values(jacobian);
  result->jacobian_rank = values.front() > 0 ? count_above(values, 1e-6 * values.front()) : 0;
  return {};
}

// y_t = exp(-n_t) z_t, z_t = sum_{i<=t} (q_t . k_i) v_i.
Status normalised_gradients(const MixerInputs& inputs, const std::vector<double>& dout, std::vector<double>* dq,
                            std::vector<double>* dk, std::vector<double>* dv, std::vector<double>* dn) {
  System system;
  std::vector<double> out;
  LINNET_TRY(build_system("normalised", inputs, &system, &out));
  const int64_t T = system.T, K = system.n, V = system.channels;
  if (dout.size() != out.size())
    return bad_input("dsf: normalised: dout has " + std::to_string(dout.size()) + " entries, expected " +
                     std::to_string(out.size()));
  const double *q = inputs.tensors.at("q").values.data(), *k = inputs.tensors.at("k").values.data(),
               *n = inputs.tensors.at("n").values.data();
  const double* v = system_input(inputs).values.data();
  dq->assign(static_cast<size_t>(T * K), 0);
  dk->assign(static_cast<size_t>(T * K), 0);
  dv->assign(static_cast<size_t>(T * V), 0);
  dn->assign(static_cast<size_t>(T), 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < V; ++j)
      (*dn)[static_cast<size_t>(t)] -= out[static_cast<size_t>(t * V + j)] * dout[static_cast<size_t>(t * V + j)];
    for (int64_t i = 0; i <= t; ++i) {
      double score = 0, pull = 0;
      for (int64_t a = 0; a < K; ++a) score += q[t * K + a] * k[i * K + a];
      for (int64_t j = 0; j < V; ++j) {
        const double dz = std::exp(-n[t]) * dout[static_cast<size_t>(t * V + j)];
        pull += dz * v[i * V + j];
        (*dv)[static_cast<size_t>(i * V + j)] += score * dz;
      }
      for (int64_t a = 0; a < K; ++a) {
        (*dq)[static_cast<size_t>(t * K + a)] += pull * k[i * K + a];
        (*dk)[static_cast<size_t>(i * K + a)] += pull * q[t * K + a];
      }
    }
  }
  return {};
}

std::string report_json(const std::vector<SystemReport>& reports, int indent) {
  JsonWriter json(indent);
  const auto list = [&](const char* name, const auto& values) {
    json.key(name).begin_array();
    for (const auto& x : values) json.value(x);
    json.end_array();
  };
  json.begin_object().member("kind", "dsf").key("mixers").begin_array();
  for (const SystemReport& r : reports) {
    const System& s = r.system;
    json.begin_object().member("mixer", r.mixer).member("tokens", s.T).member("states", s.states());
    json.member("state_size", r.state_size).member("state_expansion", s.n).member("cache_size", r.cache_size);
    json.member("complex", s.complex).member("cache", s.cache).member("restarts", s.restarts);
    json.member("recurrence_error", r.recurrence_error).member("transfer_error", r.transfer_error).member("ok", r.ok());
    json.member("spectral_radius_q10", r.radius_low).member("spectral_radius_q50", r.radius_middle);
    json.member("spectral_radius_q90", r.radius_high).member("half_life", r.half_life).member("growth", r.growth);
    json.member("multiplicity", r.multiplicity).member("mixing_kind", r.mixing_kind).member("rank", r.rank);
    json.member("effective_rank", r.effective_rank).member("stable_rank", r.stable_rank);
    json.member("semiseparable_rank", r.semiseparable_rank).member("class", r.row_class).member("zero_rows", r.zero_rows);
    std::vector<double> normaliser;
    const Status found = normaliser_of(r.mixer, s, &normaliser);
    found.ok() ? list("normaliser", normaliser) : static_cast<void>(json.member("no_normaliser", found.message()));
    list("spectral_radius", r.spectral_radius);
    // What the page needs, thinned: a picture of M, eigenvalues in the plane.
    const Matrix picture = thinned(r.mixing, kPicture);
    json.member("mixing_size", picture.rows);
    list("mixing", picture.values);
    std::vector<double> real, imag;
    const size_t step = std::max<size_t>(1, r.eig_real.size() / kEigenvalues);
    for (size_t i = 0; i < r.eig_real.size(); i += step) {
      real.push_back(r.eig_real[i]);
      imag.push_back(r.eig_imag[i]);
    }
    list("eig_real", real);
    list("eig_imag", imag);
    list("memory_length", r.memory_length);
    list("singular_values", r.singular_values);
    list("row_sum", r.row_sum);
    list("entropy", r.entropy);
    list("relative_entropy", r.relative_entropy);
    list("mean_distance", r.mean_distance);
    list("local_mass", r.local_mass);
    list("negative_mass", r.negative_mass);
    json.end_object();
  }
  json.end_array().end_object();
  return json.text();
}

}  // namespace linnet::analysis
