// The maps of features.h in plain double loops; sums by shared/mapped_ref.h.
#include <cmath>

#include "features.h"
#include "features_shape.h"
#include "mechanisms/shared/mapped_ref.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet::ref {
namespace {

double relu(double x) { return x <= 0 ? 0 : x; }  // keeps NaN
double softplus(double x) { return relu(x) + std::log1p(std::exp(-std::fabs(x))); }
double at_least(double floor_of, double x) { return x < floor_of ? floor_of : x; }  // keeps NaN
double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

class Map final : public RowMap {
 public:
  Map(const FeaturesShape& shape, bool running) : s(shape), running_(running) {
    K = s.K;
    F = s.F + (running ? 1 : 0);
  }
  FeaturesShape s;
  View w, b, proj, gamma, beta;
  double *y = nullptr, *dy = nullptr, *u = nullptr;                          // rows, [max(K, R, M)]
  double *dw = nullptr, *db = nullptr, *dgamma = nullptr, *dbeta = nullptr;  // sums, in the order of the tensors
  double *levels = nullptr,
         *dlevels = nullptr;  // efficient, not causal: [B, H, K], log sum_j exp(k_j), sum_j phi(k_j) dphi(k_j)

  bool has_top() const override { return s.has_top(); }
  double row_top(const RowPlace&, const double* x) const override {
    double top = -HUGE_VAL;
    if (s.map == FeaturesMap::exp || s.map == FeaturesMap::efficient) {
      for (int64_t c = 0; c < K; ++c) top = std::fmax(top, s.temperature * x[c]);
      return top;
    }
    for (int64_t r = 0; r < s.M; ++r) {
      const double p = projected(x, r);
      top = std::fmax(top, s.map == FeaturesMap::favor_hyp ? std::fabs(p) : p);
    }
    return top;
  }

  void apply(const RowPlace& at, const double* x, double* f) const override {
    switch (s.map) {
      case FeaturesMap::identity:
      case FeaturesMap::focused:  // its rows are features already
        for (int64_t c = 0; c < K; ++c) f[c] = x[c];
        break;
      case FeaturesMap::cosine: {
        const double norm = length(x);
        for (int64_t c = 0; c < K; ++c) f[c] = norm == 0 ? 0 : x[c] / norm;
        break;
      }
      case FeaturesMap::elu1:
        for (int64_t c = 0; c < K; ++c) f[c] = x[c] > 0 ? x[c] + 1 : std::exp(x[c]);
        break;
      case FeaturesMap::relu:
        for (int64_t c = 0; c < K; ++c) f[c] = relu(x[c]);
        break;
      case FeaturesMap::relu2:
        for (int64_t c = 0; c < K; ++c) f[c] = relu(x[c]) * relu(x[c]);
        break;
      case FeaturesMap::exp: {
        const double top = at.key ? at.top : row_top(at, x);
        for (int64_t c = 0; c < K; ++c) f[c] = std::exp(s.temperature * x[c] - top);
        extend(at, 1, 0, f);
        break;
      }
      case FeaturesMap::cosformer: {
        const double angle = 1.57079632679489661923 * (static_cast<double>(at.t) + 1) / s.length;
        for (int64_t c = 0; c < K; ++c) {
          f[c] = relu(x[c]) * std::sin(angle);
          f[K + c] = relu(x[c]) * std::cos(angle);
        }
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        exponentials(at, x, f);
        const double g = 1 / std::sqrt(static_cast<double>(s.F));
        const double more = running_ && at.key ? 0 : s.favor_eps;
        for (int64_t r = 0; r < s.F; ++r) f[r] = g * (f[r] + more);
        extend(at, g, s.favor_eps, f);
        break;
      }
      case FeaturesMap::favor_relu:
        for (int64_t r = 0; r < s.M; ++r) f[r] = relu(projected(x, r)) + kFavorReluFloor;
        break;
      case FeaturesMap::hedgehog:
        project(at, x);
        softmax(s.R, y, 1, f);
        softmax(s.R, y, -1, f + s.R);
        for (int64_t r = 0; r < F; ++r) f[r] = at_least(kHedgehogFloor, f[r]);
        break;
      case FeaturesMap::hedgehog_exp: {
        project(at, x);
        const int64_t high = extreme(1), low = extreme(-1);
        for (int64_t r = 0; r < s.R; ++r) {
          f[r] = at_least(kHedgehogFloor, std::exp(y[r] - y[high]));
          f[s.R + r] = at_least(kHedgehogFloor, std::exp(y[low] - y[r]));
        }
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        project(at, x);
        double top = 0, sum = 0;
        for (int64_t r = 0; r < K; ++r) top = std::fmax(top, std::fabs(y[r]));
        for (int64_t r = 0; r < K; ++r) {
          f[r] = std::exp(2 * (y[r] - top));
          f[K + r] = std::exp(2 * (-y[r] - top));
          sum += f[r] + f[K + r];
        }
        for (int64_t r = 0; r < 2 * K; ++r) f[r] /= sum;
        break;
      }
      case FeaturesMap::t2r:
        project(at, x);
        for (int64_t r = 0; r < s.R; ++r) f[r] = relu(y[r]);
        break;
      case FeaturesMap::rebased:
        normalise(x);
        for (int64_t c = 0; c < K; ++c) y[c] = u[c] * get(gamma, c) + get(beta, c);
        pack(y, 1 / std::sqrt(static_cast<double>(K)), std::sqrt(2 / static_cast<double>(K)), f);
        break;
      case FeaturesMap::dpfp:
        for (int64_t j = 1; j <= s.nu; ++j) {
          for (int64_t i = 0; i < 2 * K; ++i) f[(j - 1) * 2 * K + i] = rectified(x, i) * rectified(x, rolled(i, j));
        }
        break;
      case FeaturesMap::taylor: {
        const double root = 1 / std::sqrt(std::sqrt(static_cast<double>(K)));
        f[0] = 1;
        for (int64_t c = 0; c < K; ++c) f[1 + c] = y[c] = root * x[c];
        pack(y, std::sqrt(0.5), 1, f + 1 + K);
        break;
      }
      case FeaturesMap::efficient:
        if (!at.key) {
          softmax(K, x, 1, f);
        } else {
          for (int64_t c = 0; c < K; ++c) f[c] = std::exp(x[c] - level(at, c));
        }
        extend(at, 1, 0, f);
        break;
    }
  }

  void backward(const RowPlace& at, const double* x, const double* df, double* dx) override {
    switch (s.map) {
      case FeaturesMap::identity:
      case FeaturesMap::focused:
        for (int64_t c = 0; c < K; ++c) dx[c] += df[c];
        break;
      case FeaturesMap::cosine: {
        const double norm = length(x);
        double dot = 0;
        for (int64_t c = 0; norm > 0 && c < K; ++c) dot += x[c] / norm * df[c];
        for (int64_t c = 0; norm > 0 && c < K; ++c) dx[c] += (df[c] - x[c] / norm * dot) / norm;
        break;
      }
      case FeaturesMap::elu1:
        for (int64_t c = 0; c < K; ++c) dx[c] += x[c] > 0 ? df[c] : std::exp(x[c]) * df[c];
        break;
      case FeaturesMap::relu:
        for (int64_t c = 0; c < K; ++c) dx[c] += x[c] > 0 ? df[c] : 0;
        break;
      case FeaturesMap::relu2:
        for (int64_t c = 0; c < K; ++c) dx[c] += 2 * relu(x[c]) * df[c];
        break;
      case FeaturesMap::exp: {
        const double top = at.key ? at.top : row_top(at, x);
        for (int64_t c = 0; c < K; ++c) dx[c] += s.temperature * std::exp(s.temperature * x[c] - top) * df[c];
        break;
      }
      case FeaturesMap::cosformer: {
        const double angle = 1.57079632679489661923 * (static_cast<double>(at.t) + 1) / s.length;
        for (int64_t c = 0; c < K; ++c) {
          if (x[c] > 0) dx[c] += std::sin(angle) * df[c] + std::cos(angle) * df[K + c];
        }
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        // The last feature of running maxima is, for queries, favor_eps times the sum of the others.
        const double g = 1 / std::sqrt(static_cast<double>(s.F)), root = 1 / std::sqrt(std::sqrt(static_cast<double>(K)));
        const double last = running_ && !at.key ? s.favor_eps * g * df[s.F] : 0;
        exponentials(at, x, u);
        double total = 0;
        for (int64_t r = 0; r < s.F; ++r) total += u[r] = g * u[r] * (df[r] + last);
        for (int64_t c = 0; c < K; ++c) {
          double sum = -total * root * x[c];
          for (int64_t r = 0; r < s.M; ++r) {
            sum += (u[r] - (s.map == FeaturesMap::favor_hyp ? u[s.M + r] : 0)) * get(proj, r, c);
          }
          dx[c] += root * sum;
        }
        break;
      }
      case FeaturesMap::favor_relu: {
        const double root = 1 / std::sqrt(std::sqrt(static_cast<double>(K)));
        for (int64_t r = 0; r < s.M; ++r) {
          if (!(projected(x, r) > 0)) continue;
          for (int64_t c = 0; c < K; ++c) dx[c] += root * get(proj, r, c) * df[r];
        }
        break;
      }
      case FeaturesMap::hedgehog:
        project(at, x);
        for (int64_t r = 0; r < s.R; ++r) dy[r] = 0;
        softmax_backward(1, df);
        softmax_backward(-1, df + s.R);
        leave(at, x, dx);
        break;
      case FeaturesMap::hedgehog_exp: {
        project(at, x);
        const int64_t high = extreme(1), low = extreme(-1);
        for (int64_t r = 0; r < s.R; ++r) dy[r] = 0;
        for (int64_t r = 0; r < s.R; ++r) {
          const double up = std::exp(y[r] - y[high]), down = std::exp(y[low] - y[r]);
          const double d = up > kHedgehogFloor ? up * df[r] : 0, e = down > kHedgehogFloor ? down * df[s.R + r] : 0;
          dy[r] += d - e;
          dy[high] -= d;
          dy[low] += e;
        }
        leave(at, x, dx);
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        apply(at, x, u);
        double mean = 0;
        for (int64_t r = 0; r < 2 * K; ++r) mean += u[r] * df[r];
        for (int64_t r = 0; r < K; ++r) dy[r] = 2 * (u[r] * (df[r] - mean) - u[K + r] * (df[K + r] - mean));
        leave(at, x, dx);
        break;
      }
      case FeaturesMap::t2r:
        project(at, x);
        for (int64_t r = 0; r < s.R; ++r) dy[r] = y[r] > 0 ? df[r] : 0;
        leave(at, x, dx);
        break;
      case FeaturesMap::rebased: {
        const double inverse = normalise(x), n = static_cast<double>(K);
        for (int64_t c = 0; c < K; ++c) {
          y[c] = u[c] * get(gamma, c) + get(beta, c);
          dy[c] = 0;
        }
        unpack(y, 1 / std::sqrt(n), std::sqrt(2 / n), df, dy);
        double mean = 0, dot = 0;
        for (int64_t c = 0; c < K; ++c) {
          dgamma[c] += dy[c] * u[c];
          dbeta[c] += dy[c];
          mean += dy[c] * get(gamma, c) / n;
          dot += dy[c] * get(gamma, c) * u[c] / n;
        }
        for (int64_t c = 0; c < K; ++c) dx[c] += inverse * (dy[c] * get(gamma, c) - mean - u[c] * dot);
        break;
      }
      case FeaturesMap::dpfp:
        for (int64_t j = 1; j <= s.nu; ++j) {
          for (int64_t i = 0; i < 2 * K; ++i) {
            const int64_t other = rolled(i, j);
            const double slope = df[(j - 1) * 2 * K + i];
            add_rectified(x, i, slope * rectified(x, other), dx);
            add_rectified(x, other, slope * rectified(x, i), dx);
          }
        }
        break;
      case FeaturesMap::taylor: {
        const double root = 1 / std::sqrt(std::sqrt(static_cast<double>(K)));
        for (int64_t c = 0; c < K; ++c) {
          y[c] = root * x[c];
          dy[c] = df[1 + c];
        }
        unpack(y, std::sqrt(0.5), 1, df + 1 + K, dy);
        for (int64_t c = 0; c < K; ++c) dx[c] += root * dy[c];
        break;
      }
      case FeaturesMap::efficient: {
        double mean = 0;
        apply(at, x, u);
        for (int64_t c = 0; !at.key && c < K; ++c) mean += u[c] * df[c];
        for (int64_t c = 0; c < K; ++c) {
          dx[c] += u[c] * (df[c] - mean);
          if (at.key && s.over_tokens) dlevels[(at.b * s.H + at.h) * K + c] += u[c] * df[c];
        }
        break;
      }
    }
  }

 private:
  double level(const RowPlace& at, int64_t c) const { return s.over_tokens ? levels[(at.b * s.H + at.h) * K + c] : at.top; }
  double length(const double* x) const {
    double square = 0;
    for (int64_t c = 0; c < K; ++c) square += x[c] * x[c];
    return std::sqrt(square);
  }
  double projected(const double* x, int64_t r) const {
    double sum = 0;
    for (int64_t c = 0; c < K; ++c) sum += get(proj, r, c) * x[c] / std::sqrt(std::sqrt(static_cast<double>(K)));
    return sum;
  }
  // f [F] = exp(+-w.y - |y|^2 / 2 - top)
  void exponentials(const RowPlace& at, const double* x, double* f) const {
    const double norm = length(x) * length(x) / (2 * std::sqrt(static_cast<double>(K)));
    const double top = at.key ? at.top : row_top(at, x);
    for (int64_t r = 0; r < s.M; ++r) {
      const double p = projected(x, r);
      f[r] = std::exp(p - norm - top);
      if (s.map == FeaturesMap::favor_hyp) f[s.M + r] = std::exp(-p - norm - top);
    }
  }
  // Running maxima: the last feature carries what is added to each of a key's features after the shift.
  void extend(const RowPlace& at, double g, double more, double* f) const {
    if (!running_) return;
    double sum = 0;
    for (int64_t r = 0; r < s.F; ++r) sum += f[r];
    f[s.F] = at.key ? 1 : g * more * sum;
  }
  bool joint() const { return s.map == FeaturesMap::hedgehog_joint; }
  double weight(int64_t h, int64_t in, int64_t out) const { return joint() ? get(w, out, in) : get(w, h, in, out); }
  int64_t outputs() const { return joint() ? K : s.R; }
  void project(const RowPlace& at, const double* x) const {
    for (int64_t r = 0; r < outputs(); ++r) {
      double sum = !b.given() ? 0 : joint() ? get(b, r) : get(b, at.h, r);
      for (int64_t c = 0; c < K; ++c) sum += x[c] * weight(at.h, c, r);
      y[r] = sum;
    }
  }
  void leave(const RowPlace& at, const double* x, double* dx) {
    for (int64_t r = 0; r < outputs(); ++r) {
      for (int64_t c = 0; c < K; ++c) {
        dx[c] += weight(at.h, c, r) * dy[r];
        dw[joint() ? r * K + c : (at.h * K + c) * s.R + r] += x[c] * dy[r];
      }
      if (b.given()) db[joint() ? r : at.h * s.R + r] += dy[r];
    }
  }
  static void softmax(int64_t n, const double* x, double sign, double* f) {
    double top = -HUGE_VAL, sum = 0;
    for (int64_t r = 0; r < n; ++r) top = std::fmax(top, sign * x[r]);
    for (int64_t r = 0; r < n; ++r) sum += f[r] = std::exp(sign * x[r] - top);
    for (int64_t r = 0; r < n; ++r) f[r] /= sum;
  }
  void softmax_backward(double sign, const double* df) {
    softmax(s.R, y, sign, u);
    double mean = 0;
    for (int64_t r = 0; r < s.R; ++r) mean += u[r] > kHedgehogFloor ? u[r] * df[r] : 0;
    for (int64_t r = 0; r < s.R; ++r) dy[r] += sign * u[r] * ((u[r] > kHedgehogFloor ? df[r] : 0) - mean);
  }
  int64_t extreme(double sign) const {
    int64_t at = 0;
    for (int64_t r = 1; r < s.R; ++r) at = sign * y[r] > sign * y[at] ? r : at;
    return at;
  }
  // u = (x - mean) / deviation; returns 1 / deviation
  double normalise(const double* x) const {
    const double n = static_cast<double>(K);
    double mean = 0, square = 0;
    for (int64_t c = 0; c < K; ++c) mean += x[c] / n;
    for (int64_t c = 0; c < K; ++c) square += (x[c] - mean) * (x[c] - mean) / n;
    const double inverse = 1 / std::sqrt(square + kRebasedEps);
    for (int64_t c = 0; c < K; ++c) u[c] = (x[c] - mean) * inverse;
    return inverse;
  }
  // [square a_i^2 ; pair a_i a_j, i < j]
  void pack(const double* a, double square, double pair, double* f) const {
    int64_t n = 0;
    for (int64_t i = 0; i < K; ++i) f[n++] = square * a[i] * a[i];
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = i + 1; j < K; ++j) f[n++] = pair * a[i] * a[j];
    }
  }
  void unpack(const double* a, double square, double pair, const double* df, double* da) const {
    int64_t n = 0;
    for (int64_t i = 0; i < K; ++i) da[i] += 2 * square * a[i] * df[n++];
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = i + 1; j < K; ++j, ++n) {
        da[i] += pair * a[j] * df[n];
        da[j] += pair * a[i] * df[n];
      }
    }
  }
  int64_t rolled(int64_t i, int64_t j) const { return ((i - j) % (2 * K) + 2 * K) % (2 * K); }
  double rectified(const double* x, int64_t i) const { return i < K ? relu(x[i]) : relu(-x[i - K]); }
  void add_rectified(const double* x, int64_t i, double slope, double* dx) const {
    if (i < K) {
      if (x[i] > 0) dx[i] += slope;
    } else if (x[i - K] < 0) {
      dx[i - K] -= slope;
    }
  }
  bool running_;
};

// ---- focused: one map of a whole token, all its heads together

struct Focused {
  int64_t H, K;
  double power;
  View scale;
  double *y, *u, *d;  // [H, K]

  void load(const View& x, int64_t b, int64_t t) const {
    for (int64_t h = 0; h < H; ++h) {
      load_row(x, b, t, h, y + h * K);
      for (int64_t c = 0; c < K; ++c) y[h * K + c] = (relu(y[h * K + c]) + kFocusedFloor) / softplus(get(scale, h * K + c));
    }
  }
  void lengths(double* n, double* m, double* top) const {
    *n = *m = *top = 0;
    for (int64_t i = 0; i < H * K; ++i) *top = std::fmax(*top, y[i]);
    for (int64_t i = 0; i < H * K; ++i) {
      u[i] = y[i] / *top;
      *n += y[i] * y[i];
      *m += std::pow(u[i], 2 * power);
    }
    *n = std::sqrt(*n);
    *m = std::sqrt(*m);
  }
  void apply(const View& x, const View& phi) const {
    for (int64_t b = 0; b < x.size[0]; ++b) {
      for (int64_t t = 0; t < x.size[1]; ++t) {
        double n, m, top;
        load(x, b, t);
        lengths(&n, &m, &top);
        for (int64_t i = 0; i < H * K; ++i) d[i] = n * std::pow(u[i], power) / m;
        for (int64_t h = 0; h < H; ++h) store_row(phi, b, t, h, d + h * K);
      }
    }
  }
  // dphi to dx; dscale += its part. Masked tokens have dphi 0 and are left alone.
  void backward(const View& x, const View& mask, const View& dphi, const View& dx, double* dscale) const {
    for (int64_t b = 0; b < x.size[0]; ++b) {
      for (int64_t t = 0; t < x.size[1]; ++t) {
        double n, m, top, dn = 0;
        if (!takes_part(mask, b, t)) {
          for (int64_t i = 0; i < H * K; ++i) d[i] = 0;
          for (int64_t h = 0; dx.given() && h < H; ++h) store_row(dx, b, t, h, d + h * K);
          continue;
        }
        load(x, b, t);
        lengths(&n, &m, &top);
        for (int64_t h = 0; h < H; ++h) load_row(dphi, b, t, h, d + h * K);
        for (int64_t i = 0; i < H * K; ++i) dn += d[i] * std::pow(u[i], power) / m;
        for (int64_t i = 0; i < H * K; ++i) {
          const double z = std::pow(u[i], power) / m;
          d[i] = power / top * std::pow(u[i], power - 1) * n * (d[i] - z * dn) / m + dn * y[i] / n;
        }
        for (int64_t h = 0; h < H; ++h) {
          double* row = d + h * K;
          load_row(x, b, t, h, u);
          for (int64_t c = 0; c < K; ++c) {
            const double wide = softplus(get(scale, h * K + c)), a = relu(u[c]) + kFocusedFloor;
            dscale[h * K + c] -= row[c] * a * sigmoid(get(scale, h * K + c)) / (wide * wide);
            row[c] = u[c] > 0 ? row[c] / wide : 0;
          }
          if (dx.given()) store_row(dx, b, t, h, row);
        }
      }
    }
  }
};

View rows_like(Arena& arena, const View& x) {
  return View::dense(arena.take<double>(x.elements()), Dtype::f64, x.size, x.rank);
}

struct Work {
  FeaturesShape s;
  Focused focused;
  View phi_q, phi_k, dphi_q, dphi_k;  // focused; efficient over tokens: dphi_k
  double *y, *dy, *u, *dw, *db, *dgamma, *dbeta, *dscale, *levels, *dlevels;
};
template <class Args>
Work cut(Arena& arena, const Args& args, bool backward) {
  Work r{};
  r.s = features_shape(args);
  int64_t wide = 2 * r.s.K + 1;
  for (const int64_t n : {2 * r.s.R, 2 * r.s.M}) wide = n > wide ? n : wide;
  for (double** row : {&r.y, &r.dy, &r.u}) *row = arena.take<double>(wide);
  if (backward) {
    r.dw = arena.take<double>(args.w.elements());
    r.db = arena.take<double>(args.b.elements());
    for (double** row : {&r.dgamma, &r.dbeta}) *row = arena.take<double>(r.s.K);
    r.dscale = arena.take<double>(r.s.H * r.s.K);
  }
  if (r.s.over_tokens) {
    for (double** row : {&r.levels, &r.dlevels}) *row = arena.take<double>(r.s.B * r.s.H * r.s.K);
    if (backward) r.dphi_k = rows_like(arena, args.k);
  }
  if (args.map != FeaturesMap::focused) return r;
  r.focused = {r.s.H, r.s.K, r.s.power, args.scale, nullptr, nullptr, nullptr};
  for (double** row : {&r.focused.y, &r.focused.u, &r.focused.d}) *row = arena.take<double>(r.s.H * r.s.K);
  r.phi_q = rows_like(arena, args.q);
  r.phi_k = rows_like(arena, args.k);
  if (backward) {
    r.dphi_q = rows_like(arena, args.q);
    r.dphi_k = rows_like(arena, args.k);
  }
  return r;
}
template <class Args>
Map map_of(const Args& args, const Work& r, bool running) {
  Map map(r.s, running);
  map.w = args.w;
  map.b = args.b;
  map.proj = args.proj;
  map.gamma = args.gamma;
  map.beta = args.beta;
  map.y = r.y;
  map.dy = r.dy;
  map.u = r.u;
  map.dw = r.dw;
  map.db = r.db;
  map.dgamma = r.dgamma;
  map.dbeta = r.dbeta;
  map.levels = r.levels;
  map.dlevels = r.dlevels;
  return map;
}
MappedCall call_of(const FeaturesArgs& args, const FeaturesOut& out, const Work& r) {
  MappedCall call;
  call.q = args.map == FeaturesMap::focused ? r.phi_q : args.q;
  call.k = args.map == FeaturesMap::focused ? r.phi_k : args.k;
  call.v = args.v;
  call.key_mask = args.key_mask;
  call.out = out.out;
  call.den = out.den;
  call.phi_q = out.phi_q;
  call.phi_k = out.phi_k;
  call.final_state = out.final_state;
  call.final_z = out.final_z;
  call.normalizer = r.s.normalizer;
  call.eps = r.s.eps;
  call.causal = args.causal;
  call.rule = args.key_top;
  call.key_top = args.key_tops;
  return call;
}
// levels[b, h, c] = log sum_j exp(k_jc) over the keys that take part
void find_levels(const FeaturesArgs& args, const Work& r) {
  if (!r.s.over_tokens) return;
  for (int64_t i = 0; i < r.s.B * r.s.H * r.s.K; ++i) {
    const int64_t b = i / (r.s.H * r.s.K), h = i / r.s.K % r.s.H, c = i % r.s.K;
    double top = -HUGE_VAL, sum = 0;
    for (const bool sums : {false, true}) {
      for (int64_t j = 0; j < args.k.size[1]; ++j) {
        if (!takes_part(args.key_mask, b, j)) continue;
        const double x = get(args.k, b, j, h, c);
        if (sums) {
          sum += std::exp(x - top);
        } else {
          top = std::fmax(top, x);
        }
      }
    }
    r.levels[i] = sum == 0 ? 0 : top + std::log(sum);
  }
}
// dk = phi(k) (dphi(k) - sum_j phi(k_j) dphi(k_j)): the first term stands in dphi_k, the sum in dlevels
void leave_levels(const FeaturesArgs& args, const Work& r, const View& dk) {
  for (int64_t i = 0; dk.given() && i < args.k.elements(); ++i) {
    const int64_t c = i % r.s.K, h = i / r.s.K % r.s.H, j = i / r.s.K / r.s.H % args.k.size[1],
                  b = i / r.s.K / r.s.H / args.k.size[1];
    const int64_t at = (b * r.s.H + h) * r.s.K + c;
    const bool part = takes_part(args.key_mask, b, j);
    put(dk, part ? get(r.dphi_k, b, j, h, c) - std::exp(get(args.k, b, j, h, c) - r.levels[at]) * r.dlevels[at] : 0, b, j, h,
        c);
  }
}
void put_all(const View& view, const double* from) {
  if (!view.given()) return;
  for (int64_t i = 0; i < view.elements(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = view.rank - 1; d >= 0; --d) {
      offset += rest % view.size[d] * view.stride[d];
      rest /= view.size[d];
    }
    store_f64(view.data, view.dtype, offset, from[i]);
  }
}

}  // namespace

void features_forward(const FeaturesArgs& args, const FeaturesOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Work r = cut(arena, args, false);
  Map map = map_of(args, r, features_running(args));
  find_levels(args, r);
  if (args.map == FeaturesMap::focused) {
    r.focused.apply(args.q, r.phi_q);
    r.focused.apply(args.k, r.phi_k);
  }
  const MappedCall call = call_of(args, out, r);
  mapped_forward(call, map, cut_mapped(arena, map, call));
}
void features_backward(const FeaturesArgs& args, const FeaturesOut& out, const FeaturesGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Work r = cut(arena, args, true);
  for (int64_t i = 0; i < args.w.elements(); ++i) r.dw[i] = 0;
  for (int64_t i = 0; i < args.b.elements(); ++i) r.db[i] = 0;
  for (int64_t i = 0; i < r.s.K; ++i) r.dgamma[i] = r.dbeta[i] = 0;
  for (int64_t i = 0; i < r.s.H * r.s.K; ++i) r.dscale[i] = 0;
  Map map = map_of(args, r, features_running(args));
  find_levels(args, r);
  for (int64_t i = 0; r.s.over_tokens && i < r.s.B * r.s.H * r.s.K; ++i) r.dlevels[i] = 0;
  const bool focused = args.map == FeaturesMap::focused;
  if (focused) {
    r.focused.apply(args.q, r.phi_q);
    r.focused.apply(args.k, r.phi_k);
  }
  MappedCall call = call_of(args, out, r);
  call.dout = grads.dout;
  call.dq = focused ? r.dphi_q : grads.dq;
  call.dk = focused || r.s.over_tokens ? r.dphi_k : grads.dk;
  call.dv = grads.dv;
  mapped_backward(call, map, cut_mapped(arena, map, call));
  if (focused) {
    r.focused.backward(args.q, View(), r.dphi_q, grads.dq, r.dscale);
    r.focused.backward(args.k, args.key_mask, r.dphi_k, grads.dk, r.dscale);
  }
  if (r.s.over_tokens) leave_levels(args, r, grads.dk);
  put_all(grads.dw, r.dw);
  put_all(grads.db, r.db);
  put_all(grads.dgamma, r.dgamma);
  put_all(grads.dbeta, r.dbeta);
  put_all(grads.dscale, r.dscale);
}
int64_t features_workspace(const FeaturesArgs& args, Pass pass, int) {
  Arena arena;
  const Work r = cut(arena, args, pass == Pass::backward);
  const Map map(r.s, features_running(args));
  cut_mapped(arena, map, call_of(args, FeaturesOut(), r));
  return arena.used();
}

void features_decode_forward(const FeaturesDecodeArgs& args, const FeaturesDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Work r = cut(arena, args, false);
  Map map = map_of(args, r, false);
  const bool focused = args.map == FeaturesMap::focused;
  if (focused) {
    r.focused.apply(args.q, r.phi_q);
    r.focused.apply(args.k, r.phi_k);
  }
  MappedCall call;
  call.q = focused ? r.phi_q : args.q;
  call.k = focused ? r.phi_k : args.k;
  call.v = args.v;
  call.out = out.out;
  call.final_state = args.state;
  call.final_z = args.z;
  call.normalizer = r.s.normalizer;
  call.eps = r.s.eps;
  call.key_top = args.key_tops;
  if (!args.key_tops.given() && r.s.has_top()) {
    call.running_top = args.top;
    call.sums = args.sums;
    call.floor = features_floor(r.s);
  }
  mapped_decode(call, map, args.position, cut_mapped(arena, map, call));
}
int64_t features_decode_workspace(const FeaturesDecodeArgs& args, Pass, int) {
  Arena arena;
  const Work r = cut(arena, args, false);
  const Map map(r.s, false);
  MappedCall call;
  call.k = args.k;
  call.v = args.v;
  cut_mapped(arena, map, call);
  return arena.used();
}

}  // namespace linnet::ref
