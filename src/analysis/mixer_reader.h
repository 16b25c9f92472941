// What the builders of systems share: the tensors of a mixer by name, with sizes that must agree, and an empty system.
#pragma once

#include <charconv>
#include <cmath>
#include <string>
#include <system_error>
#include <vector>

#include "analysis/mixers.h"

namespace linnet::analysis {

inline double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// The tensors of a mixer by name, with sizes that must agree.
class Reader {
 public:
  Reader(std::string mixer, const MixerInputs& inputs) : mixer_(std::move(mixer)), inputs_(inputs) {}

  // A tensor whose sizes are these; a size of -1 is learned.
  Status get(const std::string& name, const std::vector<int64_t*>& sizes, const double** values) const {
    const auto found = inputs_.tensors.find(name);
    if (found == inputs_.tensors.end()) return error("it needs a tensor " + name);
    const Array& array = found->second;
    if (array.shape.size() != sizes.size()) {
      return error(name + " has rank " + std::to_string(array.shape.size()) + ", expected " + std::to_string(sizes.size()));
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (*sizes[i] < 0) *sizes[i] = array.shape[i];
      if (array.shape[i] != *sizes[i]) {
        return error(name + " has size " + std::to_string(array.shape[i]) + " in dimension " + std::to_string(i) +
                     ", expected " + std::to_string(*sizes[i]));
      }
    }
    for (size_t i = 0; i < array.values.size(); ++i) {
      if (!std::isfinite(array.values[i])) return error(name + "[" + std::to_string(i) + "] is not finite");
    }
    *values = array.values.data();
    return {};
  }
  bool has(const std::string& name) const { return inputs_.tensors.count(name) > 0; }
  size_t rank(const std::string& name) const { return has(name) ? inputs_.tensors.at(name).shape.size() : 0; }
  Status real(const std::string& name, double* value) const {
    const auto found = inputs_.words.find(name);
    if (found == inputs_.words.end()) return {};
    const std::string& text = found->second;
    const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (code != std::errc() || stop != text.data() + text.size() || !std::isfinite(*value)) {
      return error(name + " is '" + text + "', expected a number");
    }
    return {};
  }
  std::string word(const std::string& name, const std::string& otherwise) const {
    const auto found = inputs_.words.find(name);
    return found == inputs_.words.end() ? otherwise : found->second;
  }
  Status error(const std::string& sentence) const { return bad_input("dsf: " + mixer_ + ": " + sentence); }

 private:
  std::string mixer_;
  const MixerInputs& inputs_;
};

// q, k [T, K] and v [T, V] (or u).
struct Heads {
  int64_t T = -1, K = -1, V = -1;
  const double *q = nullptr, *k = nullptr, *v = nullptr;
};
inline Status read_heads(const Reader& in, Heads* h) {
  const bool scan = !in.has("q") && in.has("c");  // state space models call them c and b
  LINNET_TRY(in.get(scan ? "c" : "q", {&h->T, &h->K}, &h->q));
  LINNET_TRY(in.get(scan ? "b" : "k", {&h->T, &h->K}, &h->k));
  return in.get(in.has("v") ? "v" : "u", {&h->T, &h->V}, &h->v);
}

inline void start(System* s, int64_t T, int64_t n, int64_t channels, Form form, bool shared = true) {
  *s = System();
  s->T = T;
  s->n = n;
  s->channels = channels;
  s->form = form;
  s->shared = shared;
  const auto steps = static_cast<size_t>(T);
  if (form == Form::scalar) {
    s->log_decay.assign(steps, 0);
    s->decay_sign.assign(steps, 1);
    s->log_weight.assign(steps, 0);
    s->weight_sign.assign(steps, 1);
  } else {
    s->L.assign(static_cast<size_t>(T * (form == Form::dense ? n * n : n * s->sets())), 0);
  }
  s->b.assign(static_cast<size_t>(T * s->sets() * n), 0);
  s->c.assign(static_cast<size_t>(T * s->sets() * n), 0);
}

inline double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace linnet::analysis
