// Attention through the feature maps, on the vector units: the walks of shared/mapped.h with the maps of features_maps.h.
//
// focused is a map of a whole token, all heads together: its features are written to the workspace, the walks take them as they
// are, and the gradient of the features goes through the map afterwards, token by token. efficient, not causal, takes its keys'
// softmax over the tokens: maxima and sums of the channels come first, and what the sums' gradient takes off dk comes last.
#include "core/half.h"
#include "features.h"
#include "features_maps.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"

namespace linnet::LINNET_ISA {
namespace {

template <class Body>
LINNET_INLINE auto by_type(Dtype dtype, const Body& body) {
  return dtype == Dtype::f64 ? body.template operator()<double>() : body.template operator()<float>();
}
// Where all features of a query may vanish together, so does den, and the gradient of q is a difference of terms that it
// divides: in float that loses more digits than the gates allow. These maps run their backward in double. So does a single
// feature: it divides out, and what eps leaves of the gradient is such a difference; and so do favor's, all of which may be
// close to favor_eps. With eps 0, focused runs in double both ways: a head whose channels are small beside those of the token's
// other heads has features far below float's range, whose ratios count. So does rebased over less than four keys: a query may
// be nearly orthogonal to all of them, and the sum of packed squares that is their score then keeps few digits.
template <class Body>
LINNET_INLINE auto by_pass(const FeaturesArgs& args, Pass pass, const Body& body) {
  const FeaturesShape s = features_shape(args);
  bool vanishes = s.F == 1;
  switch (args.map) {
    case FeaturesMap::relu:
    case FeaturesMap::relu2:
    case FeaturesMap::cosformer:
    case FeaturesMap::favor:
    case FeaturesMap::favor_hyp:
    case FeaturesMap::favor_relu:
    case FeaturesMap::t2r:
    case FeaturesMap::dpfp: vanishes = true; break;
    default: break;
  }
  const bool tiny = s.map == FeaturesMap::focused && s.eps == 0,
             few = s.map == FeaturesMap::rebased && !args.causal && args.k.size[1] < 4;
  const bool exact = s.normalizer != Normalizer::none && (tiny || few);
  return by_type(exact || (pass == Pass::backward && vanishes) ? Dtype::f64 : args.q.dtype, body);
}
template <class T>
inline constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;

template <class T>
struct Work {
  FeaturesShape s;
  int64_t n = 0, heads = 0;  // columns of y, and how many matrices
  T *in = nullptr, *back = nullptr, *bias = nullptr, *gamma = nullptr, *beta = nullptr;
  T *phi_q = nullptr, *phi_k = nullptr, *dphi_q = nullptr, *dphi_k = nullptr;  // focused: [B, T, H, K]; efficient: dphi_k
  T *inverse = nullptr, *slope = nullptr;            // focused, [H, ldk]: 1 / softplus(scale), sigmoid / softplus^2
  T* rows = nullptr;                                 // per worker; focused: [4, H, ldk], efficient over tokens: [C + 1, ldk]
  T* dscale = nullptr;                               // focused: [tasks, H, ldk]
  T *token_tops = nullptr, *token_shares = nullptr;  // efficient over tokens: [B, H, ldk]
  double* units = nullptr;                           // [B, H]
  T* dparam = nullptr;
  int64_t params = 0;
};

inline constexpr int64_t kFocusedTokens = 64;  // a task of the focused map; its part of dscale is added up in order
template <class Args>
LINNET_INLINE int64_t focused_tasks(const Args& args) {
  const auto tasks = [](const View& x) { return x.size[0] * ((x.size[1] + kFocusedTokens - 1) / kFocusedTokens); };
  return tasks(args.q) + tasks(args.k);
}

template <class T, class Args>
Work<T> cut(Arena& arena, const Args& args, Pass pass, int workers) {
  Work<T> r;
  r.s = features_shape(args);
  const int64_t K = r.s.K, ldk = round_up<T>(K);
  const bool joint = r.s.map == FeaturesMap::hedgehog_joint;
  r.n = joint ? K : r.s.R > 0 ? r.s.R : r.s.M;
  r.heads = r.n == 0 ? 0 : joint || r.s.M > 0 ? 1 : r.s.H;
  const int64_t ldn = round_up<T>(r.n);
  if (r.n > 0) {
    r.in = arena.take<T>(r.heads * K * ldn);
    r.back = arena.take<T>(r.heads * r.n * ldk);
    r.bias = arena.take<T>(r.heads * ldn);
  }
  r.gamma = arena.take<T>(ldk);
  r.beta = arena.take<T>(ldk);
  r.units = arena.take<double>(r.s.B * r.s.H);
  const bool backward = pass == Pass::backward;
  if (r.s.R > 0 || joint) r.params = K * ldn + ldn;
  if (r.s.map == FeaturesMap::rebased) r.params = 2 * ldk;
  if (r.s.over_tokens) {
    r.params = ldk;  // the sum over keys of phi dphi, channel by channel
    r.token_tops = arena.take<T>(r.s.B * r.s.H * ldk);
    r.token_shares = arena.take<T>(r.s.B * r.s.H * ldk);
    r.rows = arena.take<T>(workers * (kChunk + 1) * ldk);
    if (backward) r.dphi_k = arena.take<T>(args.k.elements());
  }
  if (backward && r.params > 0) r.dparam = arena.take<T>(2 * r.s.B * r.s.H * r.params);
  if (r.s.map != FeaturesMap::focused) return r;
  r.phi_q = arena.take<T>(args.q.elements());
  r.phi_k = arena.take<T>(args.k.elements());
  r.inverse = arena.take<T>(r.s.H * ldk);
  r.slope = arena.take<T>(r.s.H * ldk);
  r.rows = arena.take<T>(workers * 4 * r.s.H * ldk);
  if (backward) {
    r.dphi_q = arena.take<T>(args.q.elements());
    r.dphi_k = arena.take<T>(args.k.elements());
    r.dscale = arena.take<T>(focused_tasks(args) * r.s.H * ldk);
  }
  return r;
}

LINNET_INLINE double at(const View& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return load_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
}

// Parameters in T; matrices both ways. favor: the factor K^-1/4 of x goes into them.
template <class T, class Args>
void load_parameters(const Args& args, const Work<T>& r) {
  const int64_t K = r.s.K, ldk = round_up<T>(K), ldn = round_up<T>(r.n);
  const bool joint = r.s.map == FeaturesMap::hedgehog_joint;
  const double root = r.s.M > 0 ? 1 / __builtin_sqrt(__builtin_sqrt(static_cast<double>(K))) : 1;
  for (int64_t i = 0; i < r.heads * K * ldn; ++i) r.in[i] = 0;
  for (int64_t i = 0; i < r.heads * r.n * ldk; ++i) r.back[i] = 0;
  for (int64_t i = 0; i < r.heads * ldn; ++i) r.bias[i] = 0;
  for (int64_t h = 0; h < r.heads; ++h) {
    for (int64_t c = 0; c < r.n; ++c) {
      for (int64_t k = 0; k < K; ++k) {
        const double w = r.s.M > 0 ? at(args.proj, c, k) * root : joint ? at(args.w, c, k) : at(args.w, h, k, c);
        r.in[(h * K + k) * ldn + c] = r.back[(h * r.n + c) * ldk + k] = static_cast<T>(w);
      }
      if (args.b.given()) r.bias[h * ldn + c] = static_cast<T>(joint ? at(args.b, c) : at(args.b, h, c));
    }
  }
  for (int64_t c = 0; c < ldk; ++c) {
    r.gamma[c] = args.gamma.given() && c < K ? static_cast<T>(at(args.gamma, c)) : T(0);
    r.beta[c] = args.beta.given() && c < K ? static_cast<T>(at(args.beta, c)) : T(0);
  }
  if (r.s.map != FeaturesMap::focused) return;
  for (int64_t i = 0; i < r.s.H * ldk; ++i) {
    const int64_t c = i % ldk, h = i / ldk;
    const double scale = c < K ? at(args.scale, h * K + c) : 0;
    const double wide = (scale > 0 ? scale : 0) + __builtin_log1p(__builtin_exp(-__builtin_fabs(scale)));
    const double sigmoid = scale >= 0 ? 1 / (1 + __builtin_exp(-scale)) : __builtin_exp(scale) / (1 + __builtin_exp(scale));
    r.inverse[i] = static_cast<T>(1 / wide);
    r.slope[i] = static_cast<T>(sigmoid / (wide * wide));
  }
}

template <class T>
FeatureSelf<T> self_of(const Work<T>& r, bool running) {
  FeatureSelf<T> m;
  m.s = r.s;
  m.running = running;
  m.n = r.n;
  m.in = r.in;
  m.back = r.back;
  m.bias = r.s.map == FeaturesMap::t2r || r.s.map == FeaturesMap::hedgehog_joint ? r.bias : nullptr;
  m.gamma = r.gamma;
  m.beta = r.beta;
  m.shared = r.heads == 1;
  m.token_tops = r.token_tops;
  m.token_shares = r.token_shares;
  return m;
}
template <class T>
RowMap<T> row_map(const FeatureSelf<T>& m, int64_t params) {
  return {&m,
          static_cast<int>(m.s.K),
          static_cast<int>(m.s.F) + (m.running ? 1 : 0),
          m.scratch(),
          params,
          features_apply<T>,
          m.s.has_top() ? features_tops<T> : nullptr,
          features_backward_rows<T>,
          m.s.map == FeaturesMap::taylor && m.s.K > 0 ? 1 / __builtin_sqrt(static_cast<double>(m.s.K)) : 0};
}

// ---- efficient: the softmax of keys over tokens

// Calls body(count, first token) for each chunk of one head's keys, in dense scratch.
template <class T, class Body>
void each_keys(const FeaturesArgs& args, int64_t b, int64_t h, T* rows, const Body& body) {
  const View& k = args.k;
  for (int64_t at = 0; at < k.size[1]; at += kChunk) {
    const int n = chunk_rows(at, k.size[1]);
    load_rows<T>(k, b * k.stride[0] + at * k.stride[1] + h * k.stride[2], k.stride[1], n, static_cast<int>(k.size[3]), rows,
                 round_up<T>(k.size[3]));
    body(n, at);
  }
}
LINNET_INLINE bool masked(const View& mask, int64_t b, int64_t t) { return mask.given() && *mask.at<const uint8_t>(b, t) == 0; }

template <class T>
void take_token_sums(const FeaturesArgs& args, const Work<T>& r, const Launch& launch) {
  using X = Vec<T>;
  if (!r.s.over_tokens) return;
  const int64_t ldk = round_up<T>(r.s.K);
  parallel(launch, r.s.B * r.s.H, [&](int64_t task, int worker) {
    const int64_t b = task / r.s.H, h = task % r.s.H;
    T* rows = r.rows + worker * (kChunk + 1) * ldk;
    T* part = rows + kChunk * ldk;  // sums of a chunk, then of chunks: fewer roundings
    T* top = r.token_tops + task * ldk;
    T* share = r.token_shares + task * ldk;
    for (int64_t c = 0; c < ldk; ++c) top[c] = static_cast<T>(-__builtin_inf());
    each_keys<T>(args, b, h, rows, [&](int n, int64_t at) {
      for (int i = 0; i < n; ++i) {
        if (masked(args.key_mask, b, at + i)) continue;
        for (int64_t c = 0; c < ldk; c += X::W) X::store(top + c, max(X::load(top + c), X::load(rows + i * ldk + c)));
      }
    });
    for (int64_t c = 0; c < ldk; ++c) {
      share[c] = 0;
      if (top[c] == static_cast<T>(-__builtin_inf())) top[c] = 0;  // no key
    }
    each_keys<T>(args, b, h, rows, [&](int n, int64_t at) {
      for (int64_t c = 0; c < ldk; ++c) part[c] = 0;
      for (int i = 0; i < n; ++i) {
        if (masked(args.key_mask, b, at + i)) continue;
        for (int64_t c = 0; c < ldk; c += X::W) {
          X::store(part + c, X::load(part + c) + exp(X::load(rows + i * ldk + c) - X::load(top + c)));
        }
      }
      for (int64_t c = 0; c < ldk; c += X::W) X::store(share + c, X::load(share + c) + X::load(part + c));
    });
    for (int64_t c = 0; c < ldk; ++c) share[c] = share[c] == 0 ? T(1) : 1 / share[c];
  });
}

// dk = phi(k) (dphi(k) - sum_j phi(k_j) dphi(k_j)): the first term stands in dphi_k, the sum in dparam.
template <class T>
void leave_token_sums(const FeaturesArgs& args, const Work<T>& r, const View& dk, const Launch& launch) {
  using X = Vec<T>;
  if (!r.s.over_tokens || !dk.given()) return;
  const int64_t ldk = round_up<T>(r.s.K), H = r.s.H, K = r.s.K, S = args.k.size[1];
  parallel(launch, r.s.B * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    T* rows = r.rows + worker * (kChunk + 1) * ldk;
    const T* top = r.token_tops + task * ldk;
    const T* share = r.token_shares + task * ldk;
    const T* total = r.dparam + (r.s.B * H + task) * r.params;
    each_keys<T>(args, b, h, rows, [&](int n, int64_t at) {
      for (int i = 0; i < n; ++i) {
        T* row = rows + i * ldk;
        const bool out = masked(args.key_mask, b, at + i);
        for (int64_t c = 0; c < K; c += X::W) {
          const typename X::V phi = exp(X::load(row + c) - X::load(top + c)) * X::load(share + c);
          const typename X::V own = X::load(r.dphi_k + ((b * S + at + i) * H + h) * K + c, static_cast<int>(K - c));
          X::store(row + c, out ? X::zero() : own - phi * X::load(total + c));
        }
      }
      store_rows<T>(rows, ldk, n, static_cast<int>(K), dk, b * dk.stride[0] + at * dk.stride[1] + h * dk.stride[2],
                    dk.stride[1], nullptr);
    });
  });
}

// ---- focused

// u^p for 0 <= u <= 1
template <class V>
LINNET_INLINE V power(V u, double p) {
  if (p == __builtin_floor(p)) {
    V product = u;
    for (int i = 1; i < static_cast<int>(p); ++i) product = product * u;
    return product;
  }
  using T = typename Real<V>::T;
  return exp(log(u) * static_cast<T>(p));
}

// y [H, ldk] = (relu(x) + floor) / softplus(scale) of one token; u = y / top. Returns |y|, |u^p| and top.
template <class T>
struct Token {
  T n, m, top;
};
template <class T>
Token<T> focused_token(const Work<T>& r, const View& x, int64_t b, int64_t t, T* y, T* u) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(r.s.K);
  const int64_t ldk = round_up<T>(K);
  V top = X::zero(), squares = X::zero(), powers = X::zero();
  load_rows<T>(x, b * x.stride[0] + t * x.stride[1], x.stride[2], static_cast<int>(r.s.H), K, y, ldk);
  for (int64_t h = 0; h < r.s.H; ++h) {
    for (int c = 0; c < K; c += X::W) {
      const V a = (rectify<T>(X::load(y + h * ldk + c)) + X::broadcast(static_cast<T>(kFocusedFloor))) *
                  X::load(r.inverse + h * ldk + c);
      const V kept = select(X::prefix(K - c), a, V{});
      X::store(y + h * ldk + c, kept);
      top = max(kept, top);
    }
  }
  const T largest = highest(top);
  for (int64_t i = 0; i < r.s.H * ldk; i += X::W) {
    const V a = X::load(y + i), ratio = a / X::broadcast(largest), p = select(gt(a, V{}), power(ratio, r.s.power), a * T(0));
    X::store(u + i, ratio);
    squares = fma(ratio, ratio, squares);
    powers = fma(p, p, powers);
  }
  return {largest * static_cast<T>(__builtin_sqrt(static_cast<double>(sum(squares)))),
          static_cast<T>(__builtin_sqrt(static_cast<double>(sum(powers)))), largest};
}

template <class T>
void focused_apply(const Work<T>& r, const View& x, T* phi, const Launch& launch) {
  using X = Vec<T>;
  const int64_t ldk = round_up<T>(r.s.K), tokens = x.size[0] * x.size[1], H = r.s.H, K = r.s.K;
  parallel(launch, (tokens + kFocusedTokens - 1) / kFocusedTokens, [&](int64_t task, int worker) {
    T* y = r.rows + worker * 4 * H * ldk;
    T* u = y + H * ldk;
    for (int64_t i = task * kFocusedTokens; i < tokens && i < (task + 1) * kFocusedTokens; ++i) {
      const Token<T> token = focused_token(r, x, i / x.size[1], i % x.size[1], y, u);
      const typename X::V factor = X::broadcast(token.n / token.m);
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t c = 0; c < K; c += X::W) {
          X::store(phi + (i * H + h) * K + c, power(X::load(u + h * ldk + c), r.s.power) * factor, static_cast<int>(K - c));
        }
      }
    }
  });
}

// dphi through the map; `dscale`: a place for each task.
template <class T>
void focused_backward(const Work<T>& r, const View& x, const View& mask, const T* dphi, const View& dx, T* dscale,
                      const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t ldk = round_up<T>(r.s.K), H = r.s.H, K = r.s.K, each = (x.size[1] + kFocusedTokens - 1) / kFocusedTokens;
  parallel(launch, x.size[0] * each, [&](int64_t task, int worker) {
    T* y = r.rows + worker * 4 * H * ldk;
    T* u = y + H * ldk;
    T* d = u + H * ldk;
    T* own = d + H * ldk;
    T* sums = dscale + task * H * ldk;
    for (int64_t i = 0; i < H * ldk; ++i) sums[i] = 0;
    const int64_t b = task / each, begin = task % each * kFocusedTokens;
    for (int64_t t = begin; t < x.size[1] && t < begin + kFocusedTokens; ++t) {
      const int64_t place = b * dx.stride[0] + t * dx.stride[1];
      if (masked(mask, b, t)) {
        for (int64_t i = 0; i < H * ldk; ++i) d[i] = 0;
        if (dx.given()) store_rows<T>(d, ldk, static_cast<int>(H), static_cast<int>(K), dx, place, dx.stride[2], nullptr);
        continue;
      }
      const Token<T> token = focused_token(r, x, b, t, y, u);
      const V over_m = X::broadcast(1 / token.m);
      V dots = X::zero();
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t c = 0; c < K; c += X::W) {
          const V slope = X::load(dphi + ((b * x.size[1] + t) * H + h) * K + c, static_cast<int>(K - c));
          X::store(d + h * ldk + c, slope);
          dots =
              fma(slope, select(X::prefix(static_cast<int>(K - c)), power(X::load(u + h * ldk + c), r.s.power), V{}) * over_m,
                  dots);
        }
      }
      const V dn = X::broadcast(sum(dots)), over_n = X::broadcast(1 / token.n);
      const V lead = X::broadcast(static_cast<T>(r.s.power) * token.n / (token.top * token.m));
      load_rows<T>(x, b * x.stride[0] + t * x.stride[1], x.stride[2], static_cast<int>(H), static_cast<int>(K), own, ldk);
      for (int64_t i = 0; i < H * ldk; i += X::W) {
        const V a = X::load(u + i), p = power(a, r.s.power), z = p * over_m;
        const V below = r.s.power == 1 ? X::broadcast(1) : select(gt(a, V{}), p / a, V{});
        const V dy = fma(lead * below, X::load(d + i) - z * dn, dn * X::load(y + i) * over_n);
        const V raw = X::load(own + i);
        const V floor_of = X::broadcast(static_cast<T>(kFocusedFloor));
        X::store(sums + i, X::load(sums + i) - dy * (rectify<T>(raw) + floor_of) * X::load(r.slope + i));
        X::store(d + i, select(gt(raw, V{}), dy * X::load(r.inverse + i), V{}));
      }
      if (dx.given()) store_rows<T>(d, ldk, static_cast<int>(H), static_cast<int>(K), dx, place, dx.stride[2], nullptr);
    }
  });
}

template <class T>
View rows_view(const T* rows, const View& like) {
  return View::dense(rows, kDtype<T>, like.size, 4);
}

template <class T>
MappedCall<T> call_of(const FeaturesArgs& args, const Work<T>& r, const FeatureSelf<T>& self) {
  MappedCall<T> call;
  const bool focused = args.map == FeaturesMap::focused;
  call.q = focused ? rows_view(r.phi_q, args.q) : args.q;
  call.k = focused ? rows_view(r.phi_k, args.k) : args.k;
  call.v = args.v;
  call.key_mask = args.key_mask;
  call.causal = args.causal;
  call.normalizer = r.s.normalizer;
  call.eps = r.s.eps;
  call.rule = args.key_top;
  call.key_tops = args.key_tops;
  call.shares = r.s.over_tokens;
  call.map = row_map(self, r.params);
  return call;
}

void put(const View& view, double x, int64_t i, int64_t j = 0, int64_t k = 0) {
  store_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2], x);
}

// Sums over batch rows (and heads where a parameter is shared), queries before keys, in double.
template <class T>
void reduce_parameters(const Work<T>& r, const FeaturesGrads& grads) {
  const int64_t K = r.s.K, ldn = round_up<T>(r.n), ldk = round_up<T>(K), units = r.s.B * r.s.H;
  const bool joint = r.s.map == FeaturesMap::hedgehog_joint, rebased = r.s.map == FeaturesMap::rebased;
  const auto total = [&](int64_t h, int64_t place) {  // of head h, or of all
    double sum = 0;
    for (int64_t u = 0; u < 2 * units; ++u) {
      if (joint || rebased || u % r.s.H == h) sum += static_cast<double>(r.dparam[u * r.params + place]);
    }
    return sum;
  };
  if (rebased) {
    for (int64_t c = 0; c < K; ++c) {
      if (grads.dgamma.given()) put(grads.dgamma, total(0, c), c);
      if (grads.dbeta.given()) put(grads.dbeta, total(0, ldk + c), c);
    }
    return;
  }
  for (int64_t h = 0; h < (joint ? 1 : r.s.H); ++h) {
    for (int64_t c = 0; c < r.n; ++c) {
      for (int64_t k = 0; grads.dw.given() && k < K; ++k) {
        const double sum = total(h, k * ldn + c);
        joint ? put(grads.dw, sum, c, k) : put(grads.dw, sum, h, k, c);
      }
      if (!grads.db.given()) continue;
      const double sum = total(h, K * ldn + c);
      joint ? put(grads.db, sum, c) : put(grads.db, sum, h, c);
    }
  }
}

}  // namespace

void features_forward(const FeaturesArgs& args, const FeaturesOut& out, const Launch& launch) {
  by_pass(args, Pass::forward, [&]<class T>() {
    Arena arena(launch.workspace);
    const Work<T> r = cut<T>(arena, args, Pass::forward, launch.workers);
    load_parameters(args, r);
    const FeatureSelf<T> self = self_of(r, features_running(args));
    if (args.map == FeaturesMap::focused) {
      focused_apply(r, args.q, r.phi_q, launch);
      focused_apply(r, args.k, r.phi_k, launch);
    }
    take_token_sums(args, r, launch);
    MappedCall<T> call = call_of(args, r, self);
    call.out = out.out;
    call.den = out.den;
    call.final_state = out.final_state;
    call.final_z = out.final_z;
    const Launch rest = after(launch, arena.used());
    mapped_forward(call, rest);
    if (out.phi_q.given()) mapped_features<T>(call.map, call.q, false, nullptr, out.phi_q, rest);
    if (!out.phi_k.given()) return;
    if (call.map.tops != nullptr) mapped_units<T>(call.map, call.k, args.key_mask, args.key_tops, r.units, rest);
    mapped_features<T>(call.map, call.k, true, call.map.tops == nullptr ? nullptr : r.units, out.phi_k, rest);
  });
}

void features_backward(const FeaturesArgs& args, const FeaturesOut& out, const FeaturesGrads& grads, const Launch& launch) {
  by_pass(args, Pass::backward, [&]<class T>() {
    Arena arena(launch.workspace);
    const Work<T> r = cut<T>(arena, args, Pass::backward, launch.workers);
    load_parameters(args, r);
    const FeatureSelf<T> self = self_of(r, features_running(args));
    const bool focused = args.map == FeaturesMap::focused;
    if (focused) {
      focused_apply(r, args.q, r.phi_q, launch);
      focused_apply(r, args.k, r.phi_k, launch);
    }
    take_token_sums(args, r, launch);
    MappedCall<T> call = call_of(args, r, self);
    call.out = out.out;
    call.den = out.den;
    call.dout = grads.dout;
    call.dq = focused ? rows_view(r.dphi_q, args.q) : grads.dq;
    const bool over_tokens = r.s.over_tokens && grads.dk.given();
    call.dk = focused || over_tokens ? rows_view(r.dphi_k, args.k) : grads.dk;
    call.dv = grads.dv;
    call.dparam = r.dparam;
    call.wants_params =
        over_tokens || (r.params > 0 && (grads.dw.given() || grads.db.given() || grads.dgamma.given() || grads.dbeta.given()));
    mapped_backward(call, after(launch, arena.used()));
    if (over_tokens) leave_token_sums(args, r, grads.dk, launch);
    if (call.wants_params && !over_tokens) reduce_parameters(r, grads);
    if (!focused) return;
    const int64_t ldk = round_up<T>(r.s.K), part = r.s.H * ldk;
    const int64_t first = args.q.size[0] * ((args.q.size[1] + kFocusedTokens - 1) / kFocusedTokens);
    focused_backward(r, args.q, View(), r.dphi_q, grads.dq, r.dscale, launch);
    focused_backward(r, args.k, args.key_mask, r.dphi_k, grads.dk, r.dscale + first * part, launch);
    for (int64_t i = 0; grads.dscale.given() && i < r.s.H * r.s.K; ++i) {
      double sum = 0;
      for (int64_t task = 0; task < focused_tasks(args); ++task) {
        sum += static_cast<double>(r.dscale[task * part + i / r.s.K * ldk + i % r.s.K]);
      }
      put(grads.dscale, sum, i);
    }
  });
}

int64_t features_workspace(const FeaturesArgs& args, Pass pass, int workers) {
  return by_pass(args, pass, [&]<class T>() {
    Arena arena;
    const Work<T> r = cut<T>(arena, args, pass, workers);
    const FeatureSelf<T> self = self_of(r, features_running(args));
    const MappedCall<T> call = call_of(args, r, self);
    if (pass == Pass::backward) return arena.used() + mapped_backward_bytes(call, workers);
    const int64_t a = mapped_forward_bytes(call, workers), b = mapped_features_bytes(call.map, workers);
    return arena.used() + (a > b ? a : b);
  });
}

namespace {

constexpr int64_t kChunkTokens = 16;  // so many tokens at once go in chunks

// Positions of cosformer count from the first token of the sequence, and key_tops bound no exponent.
bool in_chunks(const FeaturesDecodeArgs& args) {
  return args.q.size[1] >= kChunkTokens && args.map != FeaturesMap::cosformer && !args.key_tops.given();
}
template <class T>
MappedCall<T> chunks_of(const FeaturesDecodeArgs& args, const Work<T>& r, const FeatureSelf<T>& self) {
  MappedCall<T> call;
  const bool focused = args.map == FeaturesMap::focused;
  call.q = focused ? rows_view(r.phi_q, args.q) : args.q;
  call.k = focused ? rows_view(r.phi_k, args.k) : args.k;
  call.v = args.v;
  call.causal = true;
  call.normalizer = r.s.normalizer;
  call.eps = r.s.eps;
  call.rule = KeyTop::running;
  call.map = row_map(self, 0);
  call.state = args.state;
  call.z = args.z;
  if (!r.s.has_top()) return call;
  call.top = args.top;
  call.sums = args.sums;
  call.floor = features_floor(r.s);
  return call;
}

}  // namespace

void features_decode_forward(const FeaturesDecodeArgs& args, const FeaturesDecodeOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    Arena arena(launch.workspace);
    const Work<T> r = cut<T>(arena, args, Pass::forward, launch.workers);
    load_parameters(args, r);
    const bool chunks = in_chunks(args);
    FeatureSelf<T> self = self_of(r, chunks && r.s.has_top());
    self.exact = !chunks;
    const bool focused = args.map == FeaturesMap::focused;
    if (focused) {
      focused_apply(r, args.q, r.phi_q, launch);
      focused_apply(r, args.k, r.phi_k, launch);
    }
    if (chunks) {
      MappedCall<T> whole = chunks_of(args, r, self);
      whole.out = out.out;
      return mapped_forward(whole, after(launch, arena.used()));
    }
    MappedDecode<T> call;
    call.q = focused ? rows_view(r.phi_q, args.q) : args.q;
    call.k = focused ? rows_view(r.phi_k, args.k) : args.k;
    call.v = args.v;
    call.state = args.state;
    call.z = args.z;
    call.out = out.out;
    call.map = row_map(self, 0);
    call.normalizer = r.s.normalizer;
    call.eps = r.s.eps;
    call.first = args.position;
    call.key_tops = args.key_tops;
    if (!args.key_tops.given() && r.s.has_top()) {
      call.top = args.top;
      call.sums = args.sums;
      call.floor = features_floor(r.s);
    }
    mapped_decode(call, after(launch, arena.used()));
  });
}
int64_t features_decode_workspace(const FeaturesDecodeArgs& args, Pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    Arena arena;
    const Work<T> r = cut<T>(arena, args, Pass::forward, workers);
    const bool chunks = in_chunks(args);
    const FeatureSelf<T> self = self_of(r, chunks && r.s.has_top());
    if (chunks) return arena.used() + mapped_forward_bytes(chunks_of(args, r, self), workers);
    MappedDecode<T> call;
    call.v = args.v;
    call.map = row_map(self, 0);
    return arena.used() + mapped_decode_bytes(call, workers);
  });
}

}  // namespace linnet::LINNET_ISA
