// The specification of `monarch`: the updates of monarch.h as plain loops in double, one head and one tile of queries at a
// time.
//
// Invalid keys are skipped, so what they hold never matters; blocks without a valid key take no part. The factors R and L are
// held whole: this file is for reading and for measuring against.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/op.h"
#include "grid.h"

namespace linnet::ref {
namespace {

constexpr double kMinusInfinity = -HUGE_VAL;

void load_row(const View& x, int64_t b, int64_t t, int64_t h, int64_t width, double* row) {
  const int64_t start = b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
  for (int64_t i = 0; i < width; ++i) row[i] = x.given() && t >= 0 ? load_f64(x.data, x.dtype, start + i) : 0;
}
void store_row(const View& x, int64_t b, int64_t t, int64_t h, int64_t width, const double* row) {
  if (!x.given() || t < 0) return;
  const int64_t start = b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
  for (int64_t i = 0; i < width; ++i) store_f64(x.data, x.dtype, start + i, row[i]);
}
double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
void add_scaled(double* y, double a, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}
void clear(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
}

// d := p (d - sum p d), the gradient of a softmax's logits. d is first taken relative to its value at the largest weight, which
// changes nothing but rounding: where one weight is nearly 1, d - sum p d would be a difference of equal numbers.
void softmax_gradient(const double* p, double* d, int64_t n) {
  const int64_t top = std::max_element(p, p + n) - p;
  const double base = n > 0 ? d[top] : 0;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[i] * (d[i] -= base);
  for (int64_t i = 0; i < n; ++i) d[i] = p[i] * (d[i] - sum);
}

// Softmax of x[0], x[stride], ... in place, entries of -inf skipped; returns the logsumexp, -inf for none.
double softmax(double* x, int64_t n, int64_t stride) {
  double m = kMinusInfinity, sum = 0;
  for (int64_t i = 0; i < n; ++i) m = x[i * stride] > m || std::isnan(x[i * stride]) ? x[i * stride] : m;
  if (m == kMinusInfinity) {
    for (int64_t i = 0; i < n; ++i) x[i * stride] = 0;
    return kMinusInfinity;
  }
  for (int64_t i = 0; i < n; ++i) sum += x[i * stride] = x[i * stride] == kMinusInfinity ? 0 : std::exp(x[i * stride] - m);
  for (int64_t i = 0; i < n; ++i) x[i * stride] /= sum;
  return m + std::log(sum);
}

// One step of one tile of queries. P = key tiles x rows blocks, r rows, c cols.
struct Step {
  double* mean;  // [P, c, K]
  double* z;     // [P, c, c] logits of R, -inf where the key is invalid
  double* R;     // [P, c, c]
  double* a;     // [P, c, K]
  double* ent;   // [P, c]: c[j,k]
  double* L;     // [c, P, r]
  double* logL;  // [c, P, r]
  double* W;     // [c, P, r]
};

struct Unit {
  const MonarchGrid& g;
  int64_t b, h, tile, r, c, P, K, V;
  double *q, *k, *v;   // [r, c, K], [P, c, K], [P, c, V]
  double* y;           // [P, c, V]
  double *row, *lse;   // [max], [r, c]
  double largest = 0;  // |logit|

  Unit(const MonarchGrid& grid, Arena& arena)
      : g(grid), b(0), h(0), tile(0), r(grid.rows), c(grid.cols), P(grid.k_tiles * grid.rows), K(grid.K), V(grid.V) {
    q = arena.take<double>(r * c * K);
    k = arena.take<double>(P * c * K);
    v = arena.take<double>(P * c * V);
    y = arena.take<double>(P * c * V);
    row = arena.take<double>(K + V + c + r);
    lse = arena.take<double>(r * c);
  }
  Step step(Arena& arena) const {
    return {arena.take<double>(P * c * K), arena.take<double>(P * c * c), arena.take<double>(P * c * c),
            arena.take<double>(P * c * K), arena.take<double>(P * c),     arena.take<double>(c * P * r),
            arena.take<double>(c * P * r), arena.take<double>(c * P * r)};
  }

  bool valid(int64_t p, int64_t i) const { return g.valid_key(b, g.key(p / r, p % r, i)); }
  bool present(int64_t p) const {
    if (!g.visible(tile, p / r)) return false;
    for (int64_t i = 0; i < c; ++i) {
      if (valid(p, i)) return true;
    }
    return false;
  }
  void load() {
    for (int64_t l = 0; l < r; ++l) {
      for (int64_t j = 0; j < c; ++j) load_row(g.q, b, g.query(tile, l, j), h, K, q + (l * c + j) * K);
    }
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t i = 0; i < c; ++i) {
        const int64_t t = valid(p, i) ? g.key(p / r, p % r, i) : -1;
        load_row(g.k, b, t, h, K, k + (p * c + i) * K);
        load_row(g.v, b, t, h, V, v + (p * c + i) * V);
      }
    }
  }
  void first_mean(const Step& s) const {
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t i = 0; i < c * K; ++i) s.mean[p * c * K + i] = q[p % r * c * K + i];
    }
  }
  void factors(const Step& s) {
    for (int64_t p = 0; p < P; ++p) {
      const bool here = present(p);
      for (int64_t j = 0; j < c; ++j) {
        double *const R = s.R + (p * c + j) * c, *const z = s.z + (p * c + j) * c, *const a = s.a + (p * c + j) * K;
        for (int64_t i = 0; i < c; ++i) {
          z[i] = here && valid(p, i) ? g.scale * dot(s.mean + (p * c + j) * K, k + (p * c + i) * K, K) : kMinusInfinity;
          if (z[i] != kMinusInfinity) largest = std::fmax(largest, std::fabs(z[i]));
          R[i] = z[i];
        }
        const double normaliser = softmax(R, c, 1);
        clear(a, K);
        double sum = 0;
        for (int64_t i = 0; here && i < c; ++i) {
          if (!valid(p, i)) continue;
          sum += R[i] * z[i];
          add_scaled(a, R[i], k + (p * c + i) * K, K);
        }
        s.ent[p * c + j] = here ? sum - normaliser : 0;
      }
    }
    for (int64_t j = 0; j < c; ++j) {
      for (int64_t l = 0; l < r; ++l) {
        double* const logL = s.logL + j * P * r + l;
        for (int64_t p = 0; p < P; ++p) {
          const double logit = g.scale * dot(s.a + (p * c + j) * K, q + (l * c + j) * K, K);
          largest = std::fmax(largest, std::fabs(logit));
          logL[p * r] = s.L[(j * P + p) * r + l] = present_[static_cast<size_t>(p)] ? logit - s.ent[p * c + j] : kMinusInfinity;
        }
        const double normaliser = softmax(s.L + j * P * r + l, P, r);
        lse[l * c + j] = normaliser;
        for (int64_t p = 0; p < P; ++p) {
          const bool counts = logL[p * r] != kMinusInfinity && g.valid_query(b, g.query(tile, l, j));
          logL[p * r] = counts ? logL[p * r] - normaliser : kMinusInfinity;
        }
      }
      for (int64_t p = 0; p < P; ++p) {
        double* const W = s.W + (j * P + p) * r;
        for (int64_t l = 0; l < r; ++l) W[l] = s.logL[(j * P + p) * r + l];
        softmax(W, r, 1);
      }
    }
  }
  void next_mean(const Step& s, const Step& next) const {
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t j = 0; j < c; ++j) {
        double* const mean = next.mean + (p * c + j) * K;
        clear(mean, K);
        for (int64_t l = 0; l < r; ++l) add_scaled(mean, s.W[(j * P + p) * r + l], q + (l * c + j) * K, K);
      }
    }
  }
  void mean_values(const Step& s) const {
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t j = 0; j < c; ++j) {
        clear(y + (p * c + j) * V, V);
        for (int64_t i = 0; i < c; ++i) {
          if (s.R[(p * c + j) * c + i] != 0) add_scaled(y + (p * c + j) * V, s.R[(p * c + j) * c + i], v + (p * c + i) * V, V);
        }
      }
    }
  }
  void find_present() {
    present_.resize(static_cast<size_t>(P));
    for (int64_t p = 0; p < P; ++p) present_[static_cast<size_t>(p)] = present(p);
  }
  // Runs all steps; steps[s] when kept, else steps[0] again and again.
  void run(const Step* steps, bool kept) {
    find_present();
    load();
    first_mean(steps[0]);
    for (int64_t s = 0; s < g.steps; ++s) {
      const Step& now = steps[kept ? s : 0];
      factors(now);
      if (s + 1 < g.steps) next_mean(now, steps[kept ? s + 1 : 0]);
    }
    mean_values(steps[kept ? g.steps - 1 : 0]);
  }

 private:
  std::vector<char> present_;
};

// The strictly causal form: p[(l c + j), :] over the earlier blocks' representatives (rows entries) and the own keys (c
// entries).
struct Causal {
  double* p;  // [r, c, r + c]
};
void causal_weights(Unit& u, const Step& s, const Causal& w) {
  const int64_t n = u.r + u.c;
  for (int64_t l = 0; l < u.r; ++l) {
    for (int64_t j = 0; j < u.c; ++j) {
      double* const p = w.p + (l * u.c + j) * n;
      const double* const q = u.q + (l * u.c + j) * u.K;
      for (int64_t k = 0; k < u.r; ++k) {
        p[k] = k < l ? u.g.scale * dot(q, s.a + (k * u.c + j) * u.K, u.K) - s.ent[k * u.c + j] : kMinusInfinity;
      }
      for (int64_t i = 0; i < u.c; ++i) {
        const double logit = u.g.scale * dot(q, u.k + (l * u.c + i) * u.K, u.K);
        p[u.r + i] = i <= j ? logit : kMinusInfinity;
        u.largest = std::fmax(u.largest, std::fabs(logit));
      }
      u.lse[l * u.c + j] = softmax(p, n, 1);
    }
  }
}

template <class F>
void for_units(Unit& u, const F& f) {
  for (u.b = 0; u.b < u.g.B; ++u.b) {
    for (u.h = 0; u.h < u.g.H; ++u.h) {
      for (u.tile = 0; u.tile < u.g.q_tiles; ++u.tile) f();
    }
  }
}

void forward(const MonarchGrid& g, const MonarchOut* out, char* workspace, int64_t* bytes, double* largest) {
  Arena arena(workspace);
  Unit u(g, arena);
  const Step step = u.step(arena);
  const Causal causal{arena.take<double>(g.causal ? g.rows * g.cols * (g.rows + g.cols) : 0)};
  if (bytes != nullptr) *bytes = arena.used();
  if (workspace == nullptr) return;
  for_units(u, [&] {
    u.run(&step, false);
    if (g.causal) causal_weights(u, step, causal);
    if (out == nullptr) return;
    for (int64_t l = 0; l < u.r; ++l) {
      for (int64_t j = 0; j < u.c; ++j) {
        clear(u.row, u.V);
        const double* const own = g.causal ? causal.p + (l * u.c + j) * (u.r + u.c) : nullptr;
        for (int64_t p = 0; p < u.P; ++p) {
          const double weight = g.causal ? own[p] : step.L[(j * u.P + p) * u.r + l];
          if (weight != 0) add_scaled(u.row, weight, u.y + (p * u.c + j) * u.V, u.V);
        }
        for (int64_t i = 0; g.causal && i <= j; ++i) add_scaled(u.row, own[u.r + i], u.v + (l * u.c + i) * u.V, u.V);
        const int64_t t = g.query(u.tile, l, j);
        store_row(out->out, u.b, t, u.h, u.V, u.row);
        store_row(out->lse, u.b, t, u.h, 1, &u.lse[l * u.c + j]);
      }
    }
  });
  if (largest != nullptr) *largest = u.largest;
}

int64_t forward_bytes(const MonarchGrid& g) {
  int64_t bytes = 0;
  forward(g, nullptr, nullptr, &bytes, nullptr);
  return bytes;
}

struct Gradients {
  double *dq, *dk, *dv, *dout, *dlse;        // [r, c, K], [S, K], [S, V], [r, c, V], [r, c]
  double *dR, *dmean, *da, *dent, *dy, *db;  // [P, c, c], [P, c, K], [P, c, K], [P, c], [P, c, V], [c, P, r]
};

// One step of the chain from dbeta (in d.db) and dR to dmean; adds to dq and dk. Page, section "Gradients".
void step_backward(const Unit& u, const Step& s, const Gradients& d) {
  const int64_t r = u.r, c = u.c, P = u.P, K = u.K;
  const double scale = u.g.scale;
  clear(d.da, P * c * K);
  clear(d.dent, P * c);
  clear(d.dmean, P * c * K);
  for (int64_t j = 0; j < c; ++j) {
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t l = 0; l < r; ++l) {
        const double x = d.db[(j * P + p) * r + l];
        if (x == 0) continue;
        add_scaled(d.dq + (l * c + j) * K, scale * x, s.a + (p * c + j) * K, K);
        add_scaled(d.da + (p * c + j) * K, scale * x, u.q + (l * c + j) * K, K);
        d.dent[p * c + j] -= x;
      }
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t j = 0; j < c; ++j) {
      const double *const R = s.R + (p * c + j) * c, *const z = s.z + (p * c + j) * c, *const da = d.da + (p * c + j) * K;
      double* const dR = d.dR + (p * c + j) * c;
      const double top = *std::max_element(z, z + c);
      for (int64_t i = 0; i < c; ++i) {
        const int64_t t = u.g.key(p / r, p % r, i);
        if (z[i] == kMinusInfinity) continue;
        add_scaled(d.dk + t * K, R[i], da, K);
        dR[i] += dot(da, u.k + (p * c + i) * K, K) + d.dent[p * c + j] * (z[i] - top);
      }
      softmax_gradient(R, dR, c);
      for (int64_t i = 0; i < c; ++i) {
        const int64_t t = u.g.key(p / r, p % r, i);
        if (z[i] == kMinusInfinity) continue;
        const double dz = scale * dR[i];
        add_scaled(d.dmean + (p * c + j) * K, dz, u.k + (p * c + i) * K, K);
        add_scaled(d.dk + t * K, dz, s.mean + (p * c + j) * K, K);
      }
    }
  }
}

// Into the step before `now`, whose W made the means: dq, and dbeta of that step; dR starts at 0.
void between_steps(const Unit& u, const Step& before, const Gradients& d) {
  const int64_t r = u.r, c = u.c, P = u.P, K = u.K;
  for (int64_t j = 0; j < c; ++j) {
    for (int64_t p = 0; p < P; ++p) {
      const double* const W = before.W + (j * P + p) * r;
      double* const dlog = d.db + (j * P + p) * r;
      for (int64_t l = 0; l < r; ++l) {
        add_scaled(d.dq + (l * c + j) * K, W[l], d.dmean + (p * c + j) * K, K);
        dlog[l] = dot(d.dmean + (p * c + j) * K, u.q + (l * c + j) * K, K);
      }
      softmax_gradient(W, dlog, r);
    }
    for (int64_t l = 0; l < r; ++l) {
      double sum = 0;
      for (int64_t p = 0; p < P; ++p) sum += d.db[(j * P + p) * r + l];
      for (int64_t p = 0; p < P; ++p) d.db[(j * P + p) * r + l] -= before.L[(j * P + p) * r + l] * sum;
    }
  }
  clear(d.dR, P * c * c);
}

void tile_backward(Unit& u, const Step* steps, const Causal& causal, const Gradients& d) {
  const int64_t r = u.r, c = u.c, P = u.P, K = u.K, V = u.V;
  clear(d.dR, P * c * c);
  clear(d.dy, P * c * V);
  for (int64_t j = 0; j < c; ++j) {
    for (int64_t l = 0; l < r; ++l) {
      const double* const dout = d.dout + (l * c + j) * V;
      const double* const own = u.g.causal ? causal.p + (l * c + j) * (r + c) : nullptr;
      // dout.y relative to its value at the largest weight, as in softmax_gradient; the weights sum to 1, so that dlse stays.
      const auto weight = [&](int64_t p) { return u.g.causal ? own[p] : steps[u.g.steps - 1].L[(j * P + p) * r + l]; };
      double delta = -d.dlse[l * c + j], base = 0, largest = 0;
      for (int64_t p = 0; p < P; ++p) {
        if (weight(p) > largest) largest = weight(p), base = dot(dout, u.y + (p * c + j) * V, V);
      }
      for (int64_t i = 0; u.g.causal && i <= j; ++i) {
        if (own[r + i] > largest) largest = own[r + i], base = dot(dout, u.v + (l * c + i) * V, V);
      }
      for (int64_t p = 0; p < P; ++p) {
        if (weight(p) == 0) continue;
        delta += weight(p) * (dot(dout, u.y + (p * c + j) * V, V) - base);
        add_scaled(d.dy + (p * c + j) * V, weight(p), dout, V);
      }
      for (int64_t i = 0; u.g.causal && i <= j; ++i) delta += own[r + i] * (dot(dout, u.v + (l * c + i) * V, V) - base);
      for (int64_t p = 0; p < P; ++p) {
        const double w = weight(p);
        d.db[(j * P + p) * r + l] = w == 0 ? 0 : w * (dot(dout, u.y + (p * c + j) * V, V) - base - delta);
      }
      for (int64_t i = 0; u.g.causal && i <= j; ++i) {
        const int64_t t = u.g.key(0, l, i);
        if (t < 0 || u.g.query(0, l, j) < 0) continue;
        const double ds = u.g.scale * own[r + i] * (dot(dout, u.v + (l * c + i) * V, V) - base - delta);
        add_scaled(d.dv + t * V, own[r + i], dout, V);
        add_scaled(d.dq + (l * c + j) * K, ds, u.k + (l * c + i) * K, K);
        add_scaled(d.dk + t * K, ds, u.q + (l * c + j) * K, K);
      }
    }
  }
  const Step& last = steps[u.g.steps - 1];
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t j = 0; j < c; ++j) {
      for (int64_t i = 0; i < c; ++i) {
        if (last.z[(p * c + j) * c + i] == kMinusInfinity) continue;
        add_scaled(d.dv + u.g.key(p / r, p % r, i) * V, last.R[(p * c + j) * c + i], d.dy + (p * c + j) * V, V);
        d.dR[(p * c + j) * c + i] = dot(d.dy + (p * c + j) * V, u.v + (p * c + i) * V, V);
      }
    }
  }
  for (int64_t s = u.g.steps - 1;; --s) {
    step_backward(u, steps[s], d);
    if (s == 0) break;
    between_steps(u, steps[s - 1], d);
  }
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t j = 0; j < c; ++j) add_scaled(d.dq + (p % r * c + j) * K, 1, d.dmean + (p * c + j) * K, K);
  }
}

int64_t backward(const MonarchGrid& g, const MonarchGrads& grads, char* workspace) {
  Arena arena(workspace);
  Unit u(g, arena);
  const int64_t r = u.r, c = u.c, P = u.P, K = u.K, V = u.V;
  std::vector<Step> steps;
  for (int64_t s = 0; s < g.steps; ++s) steps.push_back(u.step(arena));
  const Causal causal{arena.take<double>(g.causal ? r * c * (r + c) : 0)};
  const Gradients d{arena.take<double>(r * c * K), arena.take<double>(g.S * K),   arena.take<double>(g.S * V),
                    arena.take<double>(r * c * V), arena.take<double>(r * c),     arena.take<double>(P * c * c),
                    arena.take<double>(P * c * K), arena.take<double>(P * c * K), arena.take<double>(P * c),
                    arena.take<double>(P * c * V), arena.take<double>(c * P * r)};
  if (workspace == nullptr) return arena.used();
  for (u.b = 0; u.b < g.B; ++u.b) {
    for (u.h = 0; u.h < g.H; ++u.h) {
      clear(d.dk, g.S * K);
      clear(d.dv, g.S * V);
      for (u.tile = 0; u.tile < g.q_tiles; ++u.tile) {
        clear(d.dq, r * c * K);
        for (int64_t at = 0; at < r * c; ++at) {
          const int64_t t = g.query(u.tile, at / c, at % c);
          load_row(grads.dout, u.b, t, u.h, V, d.dout + at * V);
          load_row(grads.dlse, u.b, t, u.h, 1, d.dlse + at);
        }
        u.run(steps.data(), true);
        if (g.causal) causal_weights(u, steps[0], causal);
        tile_backward(u, steps.data(), causal, d);
        for (int64_t at = 0; at < r * c; ++at) store_row(grads.dq, u.b, g.query(u.tile, at / c, at % c), u.h, K, d.dq + at * K);
      }
      for (int64_t t = 0; t < g.S; ++t) {
        store_row(grads.dk, u.b, t, u.h, K, d.dk + t * K);
        store_row(grads.dv, u.b, t, u.h, V, d.dv + t * V);
      }
    }
  }
  return 0;
}

double largest_logit(const MonarchGrid& g) {
  std::vector<char> memory(static_cast<size_t>(forward_bytes(g) + 128));
  double largest = 0;
  forward(g, nullptr, memory.data(), nullptr, &largest);
  return largest;
}

}  // namespace

int64_t monarch_workspace(const MonarchArgs& args, Pass pass, int) {
  const MonarchGrid g = monarch_grid(args);
  return pass == Pass::forward ? forward_bytes(g) : backward(g, {}, nullptr);
}
void monarch_forward(const MonarchArgs& args, const MonarchOut& out, const Launch& launch) {
  forward(monarch_grid(args), &out, launch.workspace, nullptr, nullptr);
}
void monarch_backward(const MonarchArgs& args, const MonarchOut&, const MonarchGrads& grads, const Launch& launch) {
  backward(monarch_grid(args), grads, launch.workspace);
}
double monarch_largest_logit(const MonarchArgs& args) { return largest_logit(monarch_grid(args)); }

int64_t monarch_tiled_workspace(const MonarchTiledArgs& args, Pass pass, int) {
  const MonarchGrid g = monarch_grid(args);
  return pass == Pass::forward ? forward_bytes(g) : backward(g, {}, nullptr);
}
void monarch_tiled_forward(const MonarchTiledArgs& args, const MonarchOut& out, const Launch& launch) {
  forward(monarch_grid(args), &out, launch.workspace, nullptr, nullptr);
}
void monarch_tiled_backward(const MonarchTiledArgs& args, const MonarchOut&, const MonarchGrads& grads, const Launch& launch) {
  backward(monarch_grid(args), grads, launch.workspace);
}
double monarch_tiled_largest_logit(const MonarchTiledArgs& args) { return largest_logit(monarch_grid(args)); }

// ---- decode ----------------------------------------------------------------------------------------------------------------

namespace {

void load_state(const View& x, int64_t b, int64_t h, int64_t j, int64_t k, int64_t width, double* row) {
  const int64_t start = b * x.stride[0] + h * x.stride[1] + j * x.stride[2] + k * x.stride[3];
  for (int64_t i = 0; i < width; ++i) row[i] = load_f64(x.data, x.dtype, start + i);
}
void store_state(const View& x, int64_t b, int64_t h, int64_t j, int64_t k, int64_t width, const double* row) {
  const int64_t start = b * x.stride[0] + h * x.stride[1] + j * x.stride[2] + k * x.stride[3];
  for (int64_t i = 0; i < width; ++i) store_f64(x.data, x.dtype, start + i, row[i]);
}

// logits [n], keys and values of one row: out and lse. finish(i, value row) fetches value i.
void decode_head(const MonarchDecodeArgs& args, const MonarchOut* out, int64_t b, int64_t h, double* memory, double* largest) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3], block = args.q_block.size[1], M = args.a.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  double *const q = memory, *const k = q + K, *const v = k + K, *const result = v + V, *const p = result + V;
  const int64_t start = index_value(args.lengths, b);
  for (int64_t t = 0; t < T; ++t) {
    const int64_t l = (start + t) / block, j = (start + t) % block;
    load_row(args.q, b, t, h, K, q);
    if (out != nullptr) {
      store_row(args.q_block, b, j, h, K, q);
      load_row(args.k, b, t, h, K, k);
      store_row(args.k_block, b, j, h, K, k);
      load_row(args.v, b, t, h, V, v);
      store_row(args.v_block, b, j, h, V, v);
    }
    for (int64_t i = 0; i < l; ++i) {
      load_state(args.a, b, h, j, i, K, k);
      double c;
      load_state(args.c, b, h, j, i, 1, &c);
      p[i] = scale * dot(q, k, K);
      *largest = std::fmax(*largest, std::fabs(p[i]));
      p[i] -= c;
    }
    for (int64_t i = 0; i <= j; ++i) {
      load_row(args.k_block, b, i, h, K, k);
      p[l + i] = scale * dot(q, k, K);
      *largest = std::fmax(*largest, std::fabs(p[l + i]));
    }
    if (out == nullptr) return;  // the first token tells the size of the logits
    const double lse = softmax(p, l + j + 1, 1);
    clear(result, V);
    for (int64_t i = 0; i < l; ++i) {
      load_state(args.y, b, h, j, i, V, v);
      add_scaled(result, p[i], v, V);
    }
    for (int64_t i = 0; i <= j; ++i) {
      load_row(args.v_block, b, i, h, V, v);
      add_scaled(result, p[l + i], v, V);
    }
    store_row(out->out, b, t, h, V, result);
    store_row(out->lse, b, t, h, 1, &lse);
    if (j + 1 < block || l >= M) continue;
    for (int64_t slot = 0; slot < block; ++slot) {  // the block is full: its representatives
      load_row(args.q_block, b, slot, h, K, q);
      for (int64_t i = 0; i < block; ++i) {
        load_row(args.k_block, b, i, h, K, k);
        p[i] = p[block + i] = scale * dot(q, k, K);
      }
      double c = -softmax(p, block, 1);
      clear(result, V);
      clear(q, K);
      for (int64_t i = 0; i < block; ++i) {
        load_row(args.k_block, b, i, h, K, k);
        load_row(args.v_block, b, i, h, V, v);
        c += p[i] * p[block + i];
        add_scaled(q, p[i], k, K);
        add_scaled(result, p[i], v, V);
      }
      store_state(args.a, b, h, slot, l, K, q);
      store_state(args.c, b, h, slot, l, 1, &c);
      store_state(args.y, b, h, slot, l, V, result);
    }
  }
}

}  // namespace

int64_t monarch_decode_workspace(const MonarchDecodeArgs& args, Pass, int) {
  const int64_t logits = args.a.size[3] + 2 * args.q_block.size[1];
  return (2 * args.q.size[3] + 2 * args.v.size[3] + logits) * static_cast<int64_t>(sizeof(double));
}
void monarch_decode_forward(const MonarchDecodeArgs& args, const MonarchOut& out, const Launch& launch) {
  double largest = 0;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      decode_head(args, &out, b, h, reinterpret_cast<double*>(launch.workspace), &largest);
    }
    const int64_t length = index_value(args.lengths, b) + args.q.size[1];
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] = static_cast<int32_t>(length);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] = length;
    }
  }
}
double monarch_decode_largest_logit(const MonarchDecodeArgs& args) {
  std::vector<double> memory(static_cast<size_t>(monarch_decode_workspace(args, Pass::forward, 1)) / sizeof(double));
  double largest = 0;
  for (int64_t b = 0; b < args.q.size[0] && args.q.size[1] > 0; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) decode_head(args, nullptr, b, h, memory.data(), &largest);
  }
  return largest;
}

}  // namespace linnet::ref
