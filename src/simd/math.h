// math: elementary functions over vectors, float (vf) and double (vd).
//
//   Vec<float>::V p = exp2_nonpositive(t);      // in the namespace of the instruction set, like everything in simd
//
// Range reduction and one polynomial each, fitted by src/simd/fit_polynomials.py; no tables, no branches, no calls. The table
// gives the largest error in ULP that the tests allow on every instruction set (core/tolerance.h, simd_test.cc), over every
// 97th float and over millions of doubles. NaN gives NaN everywhere.
//
//   function            range     ULP f32  f64   special values
//   exp                 all           1.1  1.1   -inf: 0, inf: inf; subnormal results are right
//   exp2                all           1.3  1.3   -inf: 0, inf: inf; subnormal results are right
//   exp2_nonpositive    t <= 0        1.3  1.3   0: 1; -inf and t < -126.5 (-1022.5): 0; subnormal in the half before that
//   expm1               all           1.8  2.0   -0: -0, -inf: -1, inf: inf
//   log                 all           0.9  0.9   0: -inf, negative: NaN, inf: inf
//   log1p               all           1.6  1.6   -0: -0, -1: -inf, below: NaN, inf: inf
//   sigmoid             all           2.5  2.5   -inf: 0, inf: 1
//   sigmoid2            all           2.5  2.5   sigmoid(x ln 2); 0 below -126.5 (-1022.5)
//   softplus            all           1.8  1.8   log(1 + e^x); -inf: 0, inf: inf
//   tanh                all           1.6  1.6   -0: -0, -inf: -1, inf: 1
//
// decay_factor and expm1_or_exp: expm1 or exp, lane by lane. exp and what is made of it take Several vectors too (several.h).
//
// softplus(x, between) and sigmoid2(x, between) call between() where their instructions wait for each other: other work for the
// core meanwhile, some 100 instructions, as it looks no further ahead.
//
// While subnormals are flushed (ftz.h) a subnormal argument counts as 0 and a subnormal result becomes 0.
#pragma once

#include "simd/several.h"
#include "simd/vec.h"

namespace linnet::LINNET_ISA {

template <class V>
struct Real;  // the constants of one precision
template <>
struct Real<vf> {
  using T = float;
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kBias = 127, kRootHalf = 0x3f3504f3u;  // bits of sqrt(1/2)
  static constexpr T kMagic = 0x1.8p23f;  // x + kMagic - kMagic rounds |x| < 2^22 to the nearest integer
  static constexpr T kTwoMantissa = 0x1p23f, kSmallestNormal = 0x1p-126f;
  static constexpr T kExpLow = -104, kExpHigh = 89, kExpm1Low = -18, kExp2Low = -127, kDecayLow = -88;
  static constexpr T kLog2e = 0x1.715476p0f;
  static constexpr T kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;  // 12 bits, so that n * kLn2High is exact
  static constexpr T kTanhEdge = 0.625f;
};
template <>
struct Real<vd> {
  using T = double;
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kBias = 1023, kRootHalf = 0x3fe6a09e667f3bcdull;
  static constexpr T kMagic = 0x1.8p52;
  static constexpr T kTwoMantissa = 0x1p52, kSmallestNormal = 0x1p-1022;
  static constexpr T kExpLow = -746, kExpHigh = 710, kExpm1Low = -40, kExp2Low = -1023, kDecayLow = -709;
  static constexpr T kLog2e = 0x1.71547652b82fep0;
  static constexpr T kLn2High = 0x1.62e42fefp-1, kLn2Low = 0x1.473de6af278edp-34;  // 32 bits
  static constexpr T kTanhEdge = 0.55;
};

template <class V, int N>
struct Real<Several<V, N>> : Real<V> {};
#if defined(__FMA__)
inline constexpr bool kFused = true;  // fma() rounds once
#else
inline constexpr bool kFused = false;
#endif
// Whether V holds floats, not doubles.
template <class V>
inline constexpr bool kSingle = sizeof(typename Real<V>::T) == 4;

template <class V, class T>
LINNET_INLINE V splat(T a) {
  return a - V{};
}

// c0 + x (c1 + x (c2 + ...))
template <class V, class T>
LINNET_INLINE V horner(V, T c0) {
  return splat<V>(c0);
}
template <class V, class T, class... C>
LINNET_INLINE V horner(V x, T c0, C... rest) {
  return fma(x, horner(x, rest...), splat<V>(c0));
}

// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2; relative error in e^r - 1: 2^-26.2 (degree 4), 2^-61.7 (degree 10)
template <class V>
LINNET_INLINE V exp_tail(V r) {
  if constexpr (kSingle<V>) {
    return horner(r, 0x1.fffffep-2f, 0x1.5554b0p-3f, 0x1.555674p-5f, 0x1.122776p-7f, 0x1.6bebfcp-10f);
  } else {
    return horner(r, 0x1.0000000000000p-1, 0x1.5555555555559p-3, 0x1.555555555553fp-5, 0x1.111111110f6dap-7,
                  0x1.6c16c16c1f09ap-10, 0x1.a01a01afd40c3p-13, 0x1.a01a017bbe775p-16, 0x1.71ddf87e4d066p-19,
                  0x1.27e53639b302ap-22, 0x1.af5e75c1f995cp-26, 0x1.1ee876d424c44p-29);
  }
}
// e^r - 1 for |r| <= ln 2 / 2
template <class V>
LINNET_INLINE V expm1_near(V r) {
  return fma(r * r, exp_tail(r), r);
}
// (2^t - 1) / t for |t| <= 1/2; relative error in 2^t: 2^-28.9 (degree 5), 2^-58.0 (degree 10)
template <class V>
LINNET_INLINE V exp2_tail(V t) {
  if constexpr (kSingle<V>) {
    return horner(t, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6aee8p-5f, 0x1.3b2d4cp-7f, 0x1.5f3e52p-10f, 0x1.41fbbep-13f);
  } else {
    return horner(t, 0x1.62e42fefa39efp-1, 0x1.ebfbdff82c5a4p-3, 0x1.c6b08d7049fe8p-5, 0x1.3b2ab6fba0119p-7,
                  0x1.5d87fe78cd6b6p-10, 0x1.4309130ed8e58p-13, 0x1.ffcbfba986a09p-17, 0x1.62bfc79d16b11p-20,
                  0x1.b5267cd64a87ap-24, 0x1.e61b4febe9cd3p-28, 0x1.e79bc3411f41fp-32);
  }
}
// log(1 + f) - f for sqrt(1/2) - 1 <= f <= sqrt(2) - 1; relative error in log(1 + f): 2^-30.3, 2^-58.5.
template <class V>
LINNET_INLINE V log1p_tail(V f) {
  if constexpr (kSingle<V>) {  // -f^2/2 + f^3 q(f), degree 8
    const V q = horner(f, 0x1.555548p-2f, -0x1.000006p-2f, 0x1.99a4b6p-3f, -0x1.555c4ep-3f, 0x1.233768p-3f, -0x1.fc2208p-4f,
                       0x1.e6f068p-4f, -0x1.de3c12p-4f, 0x1.1457a6p-4f);
    return f * f * fma(f, q, splat<V>(-0.5f));
  } else {  // 2 atanh(s) = 2 s + s^3 q(s^2), s = f / (2 + f), q of degree 6; 2 s = f - f^2/2 + s f^2/2 keeps f exact
    const V s = f / (f + 2.0), z = s * s, half_square = 0.5 * f * f;
    const V q = horner(z, 0x1.5555555555592p-1, 0x1.999999997fdb3p-2, 0x1.24924941f164ap-2, 0x1.c71c52092f936p-3,
                       0x1.74663ef068c40p-3, 0x1.39a1ba09d6c43p-3, 0x1.2f056939deadfp-3);
    return fma(s, fma(z, q, half_square), -half_square);
  }
}
// (tanh(x) / x - 1) / x^2 in z = x^2, x up to kTanhEdge; relative error in tanh: 2^-27.8 (degree 4), 2^-60.6 (degree 10)
LINNET_INLINE vf tanh_tail(vf z) {
  return horner(z, -0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c58p-5f, 0x1.522690p-6f, -0x1.75e19ap-8f);
}
LINNET_INLINE vd tanh_tail(vd z) {
  return horner(z, -0x1.555555555554fp-2, 0x1.111111111079fp-3, -0x1.ba1ba1b97d88ep-5, 0x1.664f485970a1ep-6,
                -0x1.226e2f147a647p-7, 0x1.d6d29b96caad0p-9, -0x1.7d8fd3abe8c44p-10, 0x1.3483ae8364102p-11,
                -0x1.e96fc5610da54p-13, 0x1.5d7458d31f3a6p-14, -0x1.4711077396255p-16);
}

// 2^n for integers -kBias <= n <= kBias, as a float; n == -kBias gives 0.
template <class V>
LINNET_INLINE V power_of_two(V n) {
  using R = Real<V>;
  return from_bits(bits(n + (R::kMagic + static_cast<typename R::T>(R::kBias))) << R::kMantissa);
}

// p 2^n for an integer n, rounded once; 1/2 < p < 2, |n| <= 2 kBias.
template <class V>
LINNET_INLINE V scale_by_power(V p, V n) {
#if defined(LINNET_ISA_avx512)
  if constexpr (sizeof(typename Real<V>::T) == 4) {
    return _mm512_maskz_scalef_ps(kAll16, p, n);
  } else {
    return _mm512_maskz_scalef_pd(kAll8, p, n);
  }
#else
  const auto magic = Real<V>::kMagic;
  const V half = (n * static_cast<typename Real<V>::T>(0.5) + magic) - magic;  // two factors: one alone cannot reach subnormals
  return p * power_of_two(half) * power_of_two(n - half);
#endif
}

template <class V, int N>
LINNET_INLINE Several<V, N> scale_by_power(const Several<V, N>& p, const Several<V, N>& n) {
  return each([](V x, V y) { return scale_by_power(x, y); }, p, n);
}

// x = n ln 2 + r, |r| <= ln 2 / 2
template <class V>
LINNET_INLINE V reduce_exp(V x, V* n) {
  using R = Real<V>;
  *n = fma(x, splat<V>(R::kLog2e), splat<V>(R::kMagic)) - R::kMagic;
  return fma(*n, splat<V>(-R::kLn2Low), fma(*n, splat<V>(-R::kLn2High), x));
}

struct Nothing {
  LINNET_INLINE void operator()() const {}
};

// exp(x) for x <= 0: one clamp less.
template <class V, class Between = Nothing>
LINNET_INLINE V exp_nonpositive(V x, const Between& between = {}) {
  using R = Real<V>;
  V n;
  const V r = reduce_exp(max(splat<V>(R::kExpLow), x), &n);  // in this order NaN stays
  between();
  return scale_by_power(expm1_near(r) + typename R::T(1), n);
}

template <class V>
LINNET_INLINE V exp(V x) {
  return exp_nonpositive(min(splat<V>(Real<V>::kExpHigh), x));
}

// 2^t for t <= 0, the exponential of online softmax. Also right for 0 < t < 127 (1023); no clamp there.
template <class V, class Between = Nothing>
LINNET_INLINE V exp2_nonpositive(V t, const Between& between = {}) {
  using R = Real<V>;
  constexpr auto magic = R::kMagic + static_cast<typename R::T>(R::kBias);
  t = max(splat<V>(R::kExp2Low), t);
  const V m = t + magic, f = t - (m - magic);
  between();
  return fma(f, exp2_tail(f), splat<V>(typename R::T(1))) * from_bits(bits(m) << R::kMantissa);
}

// t = n + f, n an integer, |f| <= 1/2; any t.
template <class V>
struct Split {
  V n, f;
};
template <class V>
LINNET_INLINE Split<V> split(V t) {
#if defined(LINNET_ISA_avx512)
  // An infinite t leaves f = 0. vreduce waits for what was in its target register before: cleared, nothing is.
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  V f = {};
  if constexpr (kSingle<V>) {
    __asm__("vreduceps %2, %1, %0" : "+v"(f) : "v"(t), "i"(kNearest));
    return {_mm512_maskz_roundscale_ps(kAll16, t, kNearest), f};
  } else {
    __asm__("vreducepd %2, %1, %0" : "+v"(f) : "v"(t), "i"(kNearest));
    return {_mm512_maskz_roundscale_pd(kAll8, t, kNearest), f};
  }
#else
  constexpr auto edge = 2 * static_cast<typename Real<V>::T>(Real<V>::kBias);
  t = min(splat<V>(edge), max(splat<V>(-edge), t));  // in this order NaN stays
  const V n = round(t);
  return {n, t - n};
#endif
}

// 2^t: on avx512 with no clamps at all.
template <class V>
LINNET_INLINE V exp2(V t) {
  const Split<V> at = split(t);
  return scale_by_power(fma(at.f, exp2_tail(at.f), splat<V>(typename Real<V>::T(1))), at.n);
}

// expm1(x) of x = n ln 2 + r and tail = e^r - 1: 2^n tail + (2^n - 1), computed with 2^(n-1) because 2^n may overflow where the
// result does not. n == 0: exact for tiny x; the sign of zero.
template <class V>
LINNET_INLINE V expm1_of(V tail, V n, V x) {
  using T = typename Real<V>::T;
  const V power = power_of_two(n - T(1)), large = fma(power, tail, power - T(0.5)) * T(2);
  return copysign(select(eq(n, V{}), tail, large), x);
}

template <class V>
LINNET_INLINE V expm1(V x) {
  using R = Real<V>;
  const V clamped = min(splat<V>(R::kExpHigh), max(splat<V>(R::kExpm1Low), x));
  V n;
  const V r = reduce_exp(clamped, &n);
  return expm1_of(expm1_near(r), n, x);
}

// expm1(x) where `small` holds, which needs x >= -18 (-40), else exp(x): the bits of both, their range reduction shared.
template <class V, class M>
LINNET_INLINE V expm1_or_exp(V x, M small) {
  using R = Real<V>;
  V n;
  const V r = reduce_exp(min(splat<V>(R::kExpHigh), max(splat<V>(R::kExpLow), x)), &n), tail = expm1_near(r);
  return select(small, expm1_of(tail, n, x), scale_by_power(tail + typename R::T(1), n));
}

// The same for x <= 0, `keep` 1 where expm1 is wanted and 0 where exp is: 2^n tail + (2^n - keep). Below the smallest normal
// number exp is 0, as while subnormals are flushed.
template <class V>
LINNET_INLINE V decay_factor(V x, V keep) {
  using R = Real<V>;
  constexpr auto magic = R::kMagic + static_cast<typename R::T>(R::kBias);
  x = max(splat<V>(R::kDecayLow), x);
  const V m = fma(x, splat<V>(R::kLog2e), splat<V>(magic)), n = m - magic, power = from_bits(bits(m) << R::kMantissa);
  const V r = fma(n, splat<V>(-R::kLn2Low), fma(n, splat<V>(-R::kLn2High), x));
  return fma(power, expm1_near(r), power - keep);
}

// x = 2^e m with sqrt(1/2) <= m < sqrt(2); x positive, normal and finite. biased = e + kBias
template <class V>
LINNET_INLINE V reduce_log(V x, V* e, decltype(bits(x))* biased) {
  using R = Real<V>;
  using U = decltype(bits(x));
  constexpr auto one = R::kBias << R::kMantissa;
  const U i = bits(x) + (one - R::kRootHalf);
  *biased = i >> R::kMantissa;
  *e = from_bits(*biased | bits(splat<V>(R::kTwoMantissa))) - (R::kTwoMantissa + static_cast<typename R::T>(R::kBias));
  return from_bits((i & ((decltype(R::kBias){1} << R::kMantissa) - 1)) + R::kRootHalf);
}

// e ln 2 + log(1 + f)
template <class V>
LINNET_INLINE V join_log(V e, V f) {
  using R = Real<V>;
  return fma(e, splat<V>(R::kLn2High), f + fma(e, splat<V>(R::kLn2Low), log1p_tail(f)));
}

template <class V>
LINNET_INLINE V log(V x) {
  using R = Real<V>;
  using T = typename R::T;
  const auto subnormal = lt(x, splat<V>(R::kSmallestNormal));
  V e;
  decltype(bits(x)) biased;
  const V m = reduce_log(select(subnormal, x * R::kTwoMantissa, x), &e, &biased);
  e = e - select(subnormal, splat<V>(T(R::kMantissa)), V{});
  const V infinity = splat<V>(static_cast<T>(__builtin_inf())), nan = splat<V>(static_cast<T>(__builtin_nan("")));
  V r = join_log(e, m - T(1));
  r = select(lt(x, infinity), r, x);  // inf and NaN stay
  return select(le(x, V{}), select(eq(x, V{}), -infinity, nan), r);
}

// log(1 + e) for 0 <= e <= 1.
template <class V, class Between = Nothing>
LINNET_INLINE V log1p_unit(V e, const Between& between = {}) {
  using T = typename Real<V>::T;
  if constexpr (kSingle<V> && kFused) {  // 2 atanh(s) = e + s (s^2 q(s^2) - e), s up to 1/3, q of degree 4: 2^-33.1
    const V s = e / (e + 2.0f), z = s * s;
    between();
    const V q = horner(z, 0x1.555558p-1f, 0x1.9996a8p-2f, 0x1.250972p-2f, 0x1.b6d698p-3f, 0x1.f1af14p-3f);
    return fma(s, fma(z, q, -e), e);
  } else {                                             // 1 + e = 1 + f or 2 (1 + f), f = e or (e - 1) / 2, both exact
    const auto upper = gt(e, splat<V>(T(0.4140625)));  // just below sqrt(2) - 1
    return join_log(select(upper, splat<V>(T(1)), V{}), select(upper, (e - T(1)) * T(0.5), e));
  }
}

// 1 + x = u + c exactly; log(u + c) = e ln 2 + log(1 + f) with f = (m - 1) + c 2^-e, where u = 2^e m.
template <class V>
LINNET_INLINE V log1p(V x) {
  using R = Real<V>;
  using T = typename R::T;
  const V u = x + T(1), back = u - T(1), c = (T(1) - (u - back)) + (x - back);
  V e;
  decltype(bits(x)) biased;
  const V m = reduce_log(u, &e, &biased);
  const V inverse =
      from_bits((2 * R::kBias + 1 - biased) << R::kMantissa);  // 2^(1-e), which exists for every e; c is 0 for large e
  const V infinity = splat<V>(static_cast<T>(__builtin_inf())), nan = splat<V>(static_cast<T>(__builtin_nan("")));
  V r = join_log(e, fma(c * T(0.5), inverse, m - T(1)));
  r = select(lt(x, infinity), r, x);
  r = select(le(u, V{}), select(eq(u, V{}), -infinity, nan), r);
  return copysign(r, x);
}

template <class V>
LINNET_INLINE V sigmoid(V x) {
  using T = typename Real<V>::T;
  const V e = exp_nonpositive(minus_abs(x)), one = splat<V>(T(1));
  return select(lt(x, V{}), e, one) / (one + e);
}

// 1 / (1 + 2^-x): sigmoid of x ln 2, for arguments that are products, into which the factor goes for nothing.
template <class V, class Between = Nothing>
LINNET_INLINE V sigmoid2(V x, const Between& between = {}) {
  using T = typename Real<V>::T;
  const V e = exp2_nonpositive(minus_abs(x), between), one = splat<V>(T(1));
  between();
  return select(lt(x, V{}), e, one) / (one + e);
}

// max(x, 0) + log(1 + e) with e = e^-|x|.
template <class V, class Between = Nothing>
LINNET_INLINE V softplus(V x, const Between& between = {}) {
  const V e = exp_nonpositive(minus_abs(x), between);
  between();
  return max(V{}, x) + log1p_unit(e, between);
}

// Polynomial near 0, else 1 - 2 e / (1 + e) with e = e^-2|x|.
template <class V>
LINNET_INLINE V tanh(V x) {
  using R = Real<V>;
  using T = typename R::T;
  const V a = abs(x), z = a * a, e = exp_nonpositive(a * T(-2));
  const V near = fma(a * z, tanh_tail(z), a), far = T(1) - (e + e) / (e + T(1));
  return copysign(select(lt(a, splat<V>(R::kTanhEdge)), near, far), x);
}

}  // namespace linnet::LINNET_ISA
