// linear_decode on the vector units: per (batch row, head) and token one pass over the state, in place
// (recurrence/cpu/decode.h).
#include "core/half.h"
#include "linear.h"
#include "linear_maps.h"
#include "linear_shape.h"
#include "linear_weights.h"
#include "mechanisms/recurrence/cpu/decode.h"
#include "mechanisms/recurrence/cpu/walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct DecodeScratch {
  T *q, *k, *v, *o, *scratch;
  LINNET_INLINE static DecodeScratch cut(Arena& arena, const LinearShape& s, const Map<T>& map) {
    DecodeScratch r;
    r.q = arena.take<T>(round_up<T>(s.F));
    r.k = arena.take<T>(round_up<T>(s.F));
    r.v = arena.take<T>(round_up<T>(s.V));
    r.o = arena.take<T>(round_up<T>(s.V));
    r.scratch = arena.take<T>(map.scratch(1));
    return r;
  }
};

template <class T>
LINNET_INLINE Map<T> map_of(const LinearDecodeArgs& args, const LinearShape& s) {
  return {args.map, static_cast<int>(s.K), static_cast<int>(s.F), static_cast<int>(args.dpfp_nu)};
}

// phi(q) in units of exp(the largest q); returns that.
template <class T, class E>
T shifted_query(const E* q, int K, T* f) {
  using X = Vec<T>;
  using V = typename X::V;
  V top = X::broadcast(static_cast<T>(-__builtin_inf()));
  for (int c = 0; c < K; c += X::W) {
    top = max(select(X::prefix(K - c), X::load(q + c, K - c), X::broadcast(static_cast<T>(-__builtin_inf()))), top);
  }
  const T largest = highest(top);
  for (int c = 0; c < K; c += X::W) X::store(f + c, exp(X::load(q + c, K - c) - X::broadcast(largest)));
  return largest;
}

template <class T, class E>
void decode_head(const LinearDecodeArgs& args, const LinearDecodeOut& out, const LinearShape& s, const Map<T>& map, int64_t b,
                 int64_t h, bool more, const DecodeScratch<T>& r) {
  using X = Vec<T>;
  const int F = static_cast<int>(s.F), width = static_cast<int>(s.V);
  T* state = args.state.at<T>(b, h);
  T* z = args.z.given() ? args.z.at<T>(b, h) : nullptr;
  T* rest = args.compensation.given() ? args.compensation.at<T>(b, h) : nullptr;
  const T scale = static_cast<T>(s.scale), eps = static_cast<T>(args.eps);
  for (int64_t t = 0; t < s.T; ++t) {
    map_rows<T>(map, args.k.at<const E>(b, t, s.k_head(h)), 0, 1, r.k, round_up<T>(F), r.scratch);
    load_tile<T>(args.v.at<const E>(b, t, s.v_head(h)), 0, 1, width, r.v, round_up<T>(width));
    const E* query = args.q.at<const E>(b, t, s.q_head(h));
    T unit = 0;
    if (s.shifted) {
      unit = shifted_query<T>(query, F, r.q);
    } else {
      map_rows<T>(map, query, 0, 1, r.q, round_up<T>(F), r.scratch);
    }
    T factor = scale;
    if (z != nullptr) {
      typename X::V dot = X::zero();
      for (int c = 0; c < F; c += X::W) {
        const typename X::V sum_of = X::load(z + c, F - c) + X::load(r.k + c, F - c);
        X::store(z + c, sum_of, F - c);
        dot = fma(X::load(r.q + c, F - c), sum_of, dot);
      }
      if (args.normalize) {
        const T den = scale * sum(dot) + (eps == 0 ? T(0) : eps * exp(X::broadcast(-unit))[0]);
        factor = den == 0 ? T(0) : scale / den;
      }
    }
    if (more && t + 1 == s.T) {
      const int64_t next_b = h + 1 < s.H ? b : b + 1, next_h = h + 1 < s.H ? h + 1 : 0;
      fetch_elements(args.q.at<const E>(next_b, 0, s.q_head(next_h)), static_cast<int>(s.K));
      fetch_elements(args.k.at<const E>(next_b, 0, s.k_head(next_h)), static_cast<int>(s.K));
      fetch_elements(args.v.at<const E>(next_b, 0, s.v_head(next_h)), width);
      fetch_result(out.out.at<E>(next_b, 0, next_h), width);
    }
    if (rest != nullptr) {
      decode_step<true>(F, width, state, args.state.stride[2], rest, args.compensation.stride[2], r.k, r.q, r.v, r.o);
    } else {
      decode_step<false>(F, width, state, args.state.stride[2], rest, 0, r.k, r.q, r.v, r.o);
    }
    store_tile<T>(r.o, round_up<T>(width), 1, width, out.out.at<E>(b, t, h), 0, &factor);
  }
}

template <class T, class E>
struct DecodePass {
  static int64_t worker_bytes(const LinearDecodeArgs& args, const LinearShape& s) {
    Arena arena;
    DecodeScratch<T>::cut(arena, s, map_of<T>(args, s));
    return arena.used();
  }
  static int64_t workspace(const LinearDecodeArgs& args, int workers) {
    const LinearShape s = linear_shape(args);
    Arena arena;
    arena.take<char>(workers * worker_bytes(args, s));
    if (args.map == FeatureMap::t2r) arena.take<T>(s.Hq * weight_elements<T>(s));
    return arena.used();
  }
  static void run(const LinearDecodeArgs& args, const LinearDecodeOut& out, const Launch& launch) {
    const LinearShape s = linear_shape(args);
    Arena arena(launch.workspace);
    const int64_t bytes = worker_bytes(args, s);
    char* workers = arena.take<char>(launch.workers * bytes);
    T* weights = nullptr;
    if (args.map == FeatureMap::t2r) {
      weights = arena.take<T>(s.Hq * weight_elements<T>(s));
      load_weights_of<T, E>(args, s, weights);
    }
    parallel_near(launch, s.B * s.H, [&](int64_t task, int worker, bool more) {
      Arena own(workers + worker * bytes);
      const int64_t b = task / s.H, h = task % s.H;
      Map<T> map = map_of<T>(args, s);
      if (weights != nullptr) {
        map.w = weights + s.q_head(h) * weight_elements<T>(s);
        map.wt = map.w + s.F * round_up<T>(s.K);
      }
      decode_head<T, E>(args, out, s, map, b, h, more, DecodeScratch<T>::cut(own, s, map));
    });
  }
};

}  // namespace

void linear_decode_forward(const LinearDecodeArgs& args, const LinearDecodeOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { DecodePass<T, E>::run(args, out, launch); });
}

int64_t linear_decode_workspace(const LinearDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return DecodePass<T, E>::workspace(args, workers); });
}

}  // namespace linnet::LINNET_ISA
