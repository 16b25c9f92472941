// Decode of mapped.h: a few tokens, the state in place.
#include "mapped.h"
#include "mechanisms/recurrence/cpu/decode.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {
template <class T>
struct DecodeScratch {
  T *x, *q, *k, *v, *o, *scratch;
};
template <class T>
DecodeScratch<T> cut_decode(Arena& arena, const MappedDecode<T>& call) {
  DecodeScratch<T> s;
  s.x = arena.take<T>(round_up<T>(call.map.K));
  s.q = arena.take<T>(round_up<T>(call.map.F));
  s.k = arena.take<T>(round_up<T>(call.map.F));
  s.v = arena.take<T>(round_up<T>(call.v.size[3]));
  s.o = arena.take<T>(round_up<T>(call.v.size[3]));
  s.scratch = arena.take<T>(call.map.scratch);
  return s;
}
}  // namespace

template <class T>
int64_t mapped_decode_bytes(const MappedDecode<T>& call, int workers) {
  Arena arena;
  cut_decode(arena, call);
  return workers * arena.used();
}
template <class T>
void mapped_decode(const MappedDecode<T>& call, const Launch& launch) {
  using X = Vec<T>;
  const int64_t each = mapped_decode_bytes(call, 1), H = call.q.size[2];
  const int K = call.map.K, F = call.map.F, width = static_cast<int>(call.v.size[3]);
  const T eps = static_cast<T>(call.eps);
  parallel(launch, call.q.size[0] * H, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * each);
    const DecodeScratch<T> s = cut_decode(arena, call);
    const int64_t b = task / H, h = task % H;
    const auto rows = [&](const View& view, int64_t t, int cols, T* to) {
      load_rows<T>(view, b * view.stride[0] + t * view.stride[1] + h * view.stride[2], 0, 1, cols, to, round_up<T>(cols));
    };
    T* z = call.z.template at<T>(b, h);
    double unit = call.key_tops.given() ? given_top(call.key_tops, b, h) : 0;
    T* const top = call.top.given() ? call.top.template at<T>(b, h) : nullptr;
    T* const sums = call.sums.given() ? call.sums.template at<T>(b, h) : nullptr;
    // To the units of a top that has grown: S = f S + (1 - f) floor sum v, z alike.
    const auto raise = [&](double own) {
      const double before = static_cast<double>(*top), after = own > before && own < __builtin_inf() ? own : before;
      unit = after == -__builtin_inf() ? 0 : after;
      if (after == before) return;
      const T less = before == -__builtin_inf() ? T(0) : static_cast<T>(__builtin_exp(before - after));
      const T rest = sums == nullptr ? T(0) : (1 - less) * static_cast<T>(call.floor);
      for (int c = 0; c < F; ++c) {
        T* row = call.state.template at<T>(b, h, c);
        for (int j = 0; j < width; ++j) row[j] = less * row[j] + (rest == 0 ? T(0) : rest * sums[j]);
        z[c] = less * z[c] + (rest == 0 ? T(0) : rest * sums[width]);
      }
      *top = static_cast<T>(after);
      unit = static_cast<double>(*top);
    };
    for (int64_t t = 0; t < call.q.size[1]; ++t) {
      rows(call.k, t, K, s.x);
      if (top != nullptr) {
        double own = 0;
        call.map.tops(call.map.self, {b, h, call.first + t, 1, true, 1}, s.x, round_up<T>(K), &own, s.scratch);
        raise(own);
      }
      call.map.apply(call.map.self, {b, h, call.first + t, 1, true, 1, unit}, s.x, round_up<T>(K), s.k, round_up<T>(F),
                     s.scratch);
      rows(call.q, t, K, s.x);
      call.map.apply(call.map.self, {b, h, call.first + t, 1, false, 1}, s.x, round_up<T>(K), s.q, round_up<T>(F), s.scratch);
      rows(call.v, t, width, s.v);
      for (int j = 0; sums != nullptr && j <= width; ++j) sums[j] += j < width ? s.v[j] : T(1);
      typename X::V dot = X::zero();
      for (int c = 0; c < F; c += X::W) {
        const typename X::V sum_of = X::load(z + c, F - c) + X::load(s.k + c, F - c);
        X::store(z + c, sum_of, F - c);
        dot = fma(X::load(s.q + c, F - c), sum_of, dot);
      }
      const T d = sum(dot), den = call.normalizer == Normalizer::none  ? T(1)
                                  : call.normalizer == Normalizer::add ? d + eps
                                  : d > eps || d != d                  ? d
                                                                       : eps;
      const T factor = den == 0 ? T(0) : 1 / den;
      decode_step<false>(F, width, call.state.template at<T>(b, h), call.state.stride[2], static_cast<T*>(nullptr), 0, s.k, s.q,
                         s.v, s.o);
      store_rows<T>(s.o, round_up<T>(width), 1, width, call.out,
                    b * call.out.stride[0] + t * call.out.stride[1] + h * call.out.stride[2], 0, &factor);
    }
  });
}

template int64_t mapped_decode_bytes<float>(const MappedDecode<float>&, int);
template int64_t mapped_decode_bytes<double>(const MappedDecode<double>&, int);
template void mapped_decode<float>(const MappedDecode<float>&, const Launch&);
template void mapped_decode<double>(const MappedDecode<double>&, const Launch&);

}  // namespace linnet::LINNET_ISA
