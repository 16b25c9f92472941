#include "mapped_ref.h"

#include <cmath>
#include <limits>

#include "ref_rows.h"

namespace linnet::ref {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

struct Head {
  const MappedCall& call;
  RowMap& map;
  const MappedScratch& s;
  int64_t b, h;
  int64_t V() const { return call.v.size[3]; }
  bool running() const { return map.has_top() && call.causal && call.rule == KeyTop::running; }

  void key(int64_t j) const {  // v - v0
    load_row(call.k, b, j, h, s.x);
    load_row(call.v, b, j, h, s.v);
    for (int64_t c = 0; c < V(); ++c) s.v[c] -= s.v0[c];
  }
  // The mean value, for the backward alone: there G.v_j less G.o_i is then taken between small numbers.
  void find_v0(bool backward) const {
    double n = 0;
    for (int64_t c = 0; c < V(); ++c) s.v0[c] = 0;
    for (int64_t j = 0; backward && call.normalizer != Normalizer::none && j < call.k.size[1]; ++j) {
      if (!takes_part(call.key_mask, b, j)) continue;
      load_row(call.v, b, j, h, s.v);
      n += 1;
      for (int64_t c = 0; c < V(); ++c) s.v0[c] += s.v[c];
    }
    for (int64_t c = 0; c < V(); ++c) s.v0[c] = n > 0 && std::isfinite(s.v0[c]) ? s.v0[c] / n : 0;
  }
  // tops[j]: what keys subtract, as row j sees it.
  void find_tops() const {
    if (!map.has_top()) {
      for (int64_t j = 0; j < call.k.size[1]; ++j) s.tops[j] = 0;
      return;
    }
    double top = kMinusInfinity;
    for (int64_t j = 0; j < call.k.size[1]; ++j) {
      if (takes_part(call.key_mask, b, j)) {
        key(j);
        const double own = map.row_top({b, j, h, true, 0}, s.x);
        if (own < HUGE_VAL) top = std::fmax(top, own);  // an infinite key leaves the others their unit
      }
      s.tops[j] = top;
    }
    if (call.rule == KeyTop::given) top = get(call.key_top, b, h);
    for (int64_t j = 0; !running() && j < call.k.size[1]; ++j) s.tops[j] = top;
  }
  void clear() const {
    for (int64_t i = 0; i < map.F; ++i) s.z[i] = 0;
    for (int64_t i = 0; i < map.F * V(); ++i) s.S[i] = 0;
  }
  // The running top moves from `before` to `after`: all features but the last are in its units.
  void rescale(double before, double after) const {
    if (before == after) return;
    const double factor = std::exp(-std::fabs(after - before));
    for (int64_t i = 0; i + 1 < map.F; ++i) {
      s.z[i] *= factor;
      for (int64_t j = 0; j < V(); ++j) s.S[i * V() + j] *= factor;
    }
  }
  void add(const double* f, const double* row, double last) const {
    for (int64_t i = 0; i < map.F; ++i) {
      s.z[i] += f[i] * last;
      for (int64_t j = 0; j < V(); ++j) s.S[i * V() + j] += f[i] * row[j];
    }
  }
  void absorb(int64_t j, double* unit) const {
    if (running() && s.tops[j] != *unit) {
      if (*unit != kMinusInfinity) rescale(*unit, s.tops[j]);
      *unit = s.tops[j];
    }
    if (!takes_part(call.key_mask, b, j)) return;
    key(j);
    map.apply({b, j, h, true, s.tops[j]}, s.x, s.f);
    add(s.f, s.v, 1);
  }
  void query(int64_t t) const {
    load_row(call.q, b, t, h, s.x);
    map.apply({b, t, h, false, 0}, s.x, s.f);
  }
  double divisor(double d) const {
    switch (call.normalizer) {
      case Normalizer::none: return 1;
      case Normalizer::max: return d > call.eps || std::isnan(d) ? d : call.eps;
      default: return d + call.eps;
    }
  }
  double read() const {
    double d = 0;
    for (int64_t i = 0; i < map.F; ++i) d += s.f[i] * s.z[i];
    const double den = divisor(d);
    for (int64_t j = 0; j < V(); ++j) {
      double sum = 0;
      for (int64_t i = 0; i < map.F; ++i) sum += s.f[i] * s.S[i * V() + j];
      s.o[j] = den == 0 ? 0 : sum / den + d / den * s.v0[j];
    }
    return den;
  }
  // [G / den | ...]: the first part in s.v, the last returned.
  double incoming(int64_t t) const {
    for (int64_t j = 0; j < V(); ++j) s.v[j] = 0;
    if (!call.dout.given()) return 0;
    load_row(call.dout, b, t, h, s.v);
    if (call.normalizer == Normalizer::none) return 0;
    load_row(call.out, b, t, h, s.o);
    const double den = get(call.den, b, t, h), inverse = den == 0 ? 0 : 1 / den;
    // den may have been saved in f32, where the clamp's eps rounds up.
    const bool clamped = call.normalizer == Normalizer::max && den <= call.eps * (1 + 0x1p-23);
    double last = 0;
    for (int64_t j = 0; j < V(); ++j) {
      last -= s.v[j] * ((clamped ? 0 : s.o[j]) - s.v0[j]) * inverse;
      s.v[j] *= inverse;
    }
    return last;
  }
};

void store_phi(const View& out, RowMap& map, const View& x, bool key, double top, int64_t b, int64_t h,
               const MappedScratch& s) {
  for (int64_t t = 0; out.given() && t < x.size[1]; ++t) {
    load_row(x, b, t, h, s.x);
    map.apply({b, t, h, key, top}, s.x, s.f);
    store_row(out, b, t, h, s.f);
  }
}

}  // namespace

MappedScratch cut_mapped(Arena& arena, const RowMap& map, const MappedCall& call) {
  MappedScratch s;
  s.x = arena.take<double>(map.K);
  s.dx = arena.take<double>(map.K);
  s.f = arena.take<double>(map.F);
  s.df = arena.take<double>(map.F);
  s.v = arena.take<double>(call.v.size[3]);
  s.o = arena.take<double>(call.v.size[3]);
  s.S = arena.take<double>(map.F * call.v.size[3]);
  s.z = arena.take<double>(map.F);
  s.tops = arena.take<double>(call.k.size[1]);
  s.v0 = arena.take<double>(call.v.size[3]);
  return s;
}

void mapped_forward(const MappedCall& call, RowMap& map, const MappedScratch& s) {
  for (int64_t b = 0; b < call.q.size[0]; ++b) {
    for (int64_t h = 0; h < call.q.size[2]; ++h) {
      const Head head{call, map, s, b, h};
      double unit = kMinusInfinity;
      head.find_v0(call.forward_mean);
      head.find_tops();
      head.clear();
      for (int64_t j = 0; !call.causal && j < call.k.size[1]; ++j) head.absorb(j, &unit);
      for (int64_t t = 0; t < call.q.size[1]; ++t) {
        if (call.causal) head.absorb(t, &unit);
        head.query(t);
        const double den = head.read();
        store_row(call.out, b, t, h, s.o);
        if (call.den.given()) put(call.den, den, b, t, h);
      }
      for (int64_t i = 0; i < map.F - (head.running() ? 1 : 0); ++i) {
        if (call.final_z.given()) put(call.final_z, s.z[i], b, h, i);
        for (int64_t j = 0; call.final_state.given() && j < head.V(); ++j) {
          put(call.final_state, s.S[i * head.V() + j] + s.z[i] * s.v0[j], b, h, i, j);
        }
      }
      store_phi(call.phi_q, map, call.q, false, 0, b, h, s);
      store_phi(call.phi_k, map, call.k, true,
                call.k.size[1] > 0 && s.tops[call.k.size[1] - 1] != kMinusInfinity ? s.tops[call.k.size[1] - 1] : 0, b, h, s);
    }
  }
}

void mapped_backward(const MappedCall& call, RowMap& map, const MappedScratch& s) {
  const auto leave = [&](const View& dx, int64_t b, int64_t t, int64_t h) {
    if (dx.given()) store_row(dx, b, t, h, s.dx);
  };
  for (int64_t b = 0; b < call.q.size[0]; ++b) {
    for (int64_t h = 0; h < call.q.size[2]; ++h) {
      const Head head{call, map, s, b, h};
      const int64_t V = head.V();
      double unit = kMinusInfinity;
      head.find_v0(true);
      head.find_tops();
      head.clear();
      for (int64_t j = 0; !call.causal && j < call.k.size[1]; ++j) head.absorb(j, &unit);
      for (int64_t t = 0; t < call.q.size[1]; ++t) {
        if (call.causal) head.absorb(t, &unit);
        const double last = head.incoming(t);
        for (int64_t i = 0; i < map.F; ++i) {
          s.df[i] = last * s.z[i];
          for (int64_t j = 0; j < V; ++j) s.df[i] += s.S[i * V + j] * s.v[j];
        }
        load_row(call.q, b, t, h, s.x);
        for (int64_t c = 0; c < map.K; ++c) s.dx[c] = 0;
        map.backward({b, t, h, false, 0}, s.x, s.df, s.dx);
        leave(call.dq, b, t, h);
      }
      // R = sum phi(q_i) [G_i / den_i | last_i], over i >= j when causal
      head.clear();
      unit = -kMinusInfinity;
      const auto add_query = [&](int64_t t) {
        if (head.running() && s.tops[t] != unit) {
          if (unit != -kMinusInfinity) head.rescale(unit, s.tops[t]);
          unit = s.tops[t];
        }
        const double last = head.incoming(t);
        head.query(t);
        head.add(s.f, s.v, last);
      };
      for (int64_t t = 0; !call.causal && t < call.q.size[1]; ++t) add_query(t);
      for (int64_t j = call.k.size[1]; j-- > 0;) {
        if (call.causal) add_query(j);
        for (int64_t c = 0; c < map.K; ++c) s.dx[c] = 0;
        for (int64_t c = 0; c < V; ++c) s.o[c] = 0;
        if (takes_part(call.key_mask, b, j)) {
          head.key(j);
          map.apply({b, j, h, true, s.tops[j]}, s.x, s.f);
          for (int64_t i = 0; i < map.F; ++i) {
            s.df[i] = s.z[i];
            for (int64_t c = 0; c < V; ++c) {
              s.df[i] += s.S[i * V + c] * s.v[c];
              s.o[c] += s.S[i * V + c] * s.f[i];
            }
          }
          map.backward({b, j, h, true, s.tops[j]}, s.x, s.df, s.dx);
        }
        leave(call.dk, b, j, h);
        if (call.dv.given()) store_row(call.dv, b, j, h, s.o);
      }
    }
  }
}

void mapped_decode(const MappedCall& call, RowMap& map, int64_t first, const MappedScratch& s) {
  for (int64_t b = 0; b < call.q.size[0]; ++b) {
    for (int64_t h = 0; h < call.q.size[2]; ++h) {
      const Head head{call, map, s, b, h};
      const int64_t V = head.V();
      for (int64_t c = 0; c < V; ++c) s.v0[c] = 0;
      for (int64_t i = 0; i < map.F; ++i) {
        s.z[i] = get(call.final_z, b, h, i);
        for (int64_t j = 0; j < V; ++j) s.S[i * V + j] = get(call.final_state, b, h, i, j);
      }
      double top = call.key_top.given() ? get(call.key_top, b, h) : 0;
      for (int64_t t = 0; t < call.q.size[1]; ++t) {
        head.key(t);
        if (call.running_top.given()) {  // the units of the sums grow with the largest exponent
          const double own = map.row_top({b, first + t, h, true, 0}, s.x), before = get(call.running_top, b, h);
          const double after = own > before && own < HUGE_VAL ? own : before;
          const double less = after == before ? 1 : before == -HUGE_VAL ? 0 : std::exp(before - after);
          for (int64_t i = 0; after != before && i < map.F; ++i) {
            const double rest = call.sums.given() ? (1 - less) * call.floor : 0;
            s.z[i] = less * s.z[i] + (rest == 0 ? 0 : rest * get(call.sums, b, h, V));
            for (int64_t j = 0; j < V; ++j) {
              s.S[i * V + j] = less * s.S[i * V + j] + (rest == 0 ? 0 : rest * get(call.sums, b, h, j));
            }
          }
          put(call.running_top, after, b, h);
          for (int64_t j = 0; call.sums.given() && j <= V; ++j) {
            put(call.sums, get(call.sums, b, h, j) + (j < V ? s.v[j] : 1), b, h, j);
          }
          top = after == -HUGE_VAL ? 0 : after;
        }
        map.apply({b, first + t, h, true, top}, s.x, s.f);
        head.add(s.f, s.v, 1);
        load_row(call.q, b, t, h, s.x);
        map.apply({b, first + t, h, false, 0}, s.x, s.f);
        head.read();
        store_row(call.out, b, t, h, s.o);
      }
      for (int64_t i = 0; i < map.F; ++i) {
        put(call.final_z, s.z[i], b, h, i);
        for (int64_t j = 0; j < V; ++j) put(call.final_state, s.S[i * V + j], b, h, i, j);
      }
    }
  }
}

}  // namespace linnet::ref
