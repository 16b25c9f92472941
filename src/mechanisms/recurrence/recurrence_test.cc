// recurrence and its members decay, gla, delta, gated_delta: agreement with the reference in every implementation and dtype,
// the reference by finite differences, the properties of the engine's page, reductions between members, states, bits, refusals.
#include "recurrence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/agreement.h"
#include "check/tensor.h"
#include "core/op.h"
#include "core/tolerance.h"

namespace linnet {
namespace {

using check::constant;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::tokens;
using check::whole_numbers;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- agreement with the reference -----------------------------------------------------------------------------------------

const char* const kLines[] = {
    "decay B=1 T=1 Hq=1 Hk=1 Hv=1 K=8 V=8 with=g pass=bwd seed=2",
    "decay B=2 T=31 Hq=2 Hk=2 Hv=2 K=16 V=24 with=g_head,initial_state pass=bwd strided=1",
    "decay B=1 T=97 Hq=4 Hk=2 Hv=1 K=20 V=13 with=g,initial_state values=masked,mixed pass=bwd threads=3",
    "decay B=1 T=70 Hq=2 Hk=2 Hv=2 K=64 V=64 pass=bwd",
    "gla B=1 T=32 Hq=2 Hk=2 Hv=2 K=16 V=16 pass=bwd",
    "gla B=2 T=33 Hq=3 Hk=3 Hv=3 K=17 V=65 with=initial_state values=masked pass=bwd strided=1",
    "gla B=1 T=301 Hq=1 Hk=1 Hv=1 K=64 V=40 values=mixed pass=bwd threads=2",
    "gla B=1 T=100 Hq=2 Hk=2 Hv=2 K=16 V=16 N=4 with=cu_seqlens,initial_state pass=bwd",
    "delta B=2 T=31 Hq=2 Hk=2 Hv=2 K=16 V=16 pass=bwd",
    "delta B=1 T=65 Hq=2 Hk=2 Hv=4 K=24 V=72 l2_norm=1 double_beta=1 with=initial_state pass=bwd",
    "delta B=1 T=45 Hq=2 Hk=2 Hv=2 K=16 V=16 chunk=7 pass=bwd threads=2",
    "delta B=1 T=50 Hq=1 Hk=1 Hv=1 K=1 V=1 pass=bwd",
    // A thousandth is left of the states.
    "delta B=1 T=60 Hq=2 K=1 Hk=2 Hv=2 V=4 N=4 l2_norm=1 with=cu_seqlens,initial_state skip=dout pass=bwd seed=426032",
    "gated_delta B=1 T=1301 Hq=1 Hk=1 Hv=1 K=16 V=48 other=g threads=7 pass=bwd with=initial_state",
    "gated_delta B=1 T=1301 Hq=1 Hk=1 Hv=1 K=16 V=48 threads=7 pass=bwd with=initial_state",
    "gated_delta B=2 T=67 Hq=2 Hk=2 Hv=6 K=40 V=24 other=g values=masked,mixed pass=bwd",
    "gated_delta B=2 T=67 Hq=2 Hk=6 Hv=3 K=40 V=24 values=masked,mixed pass=bwd strided=1",
    "gated_delta B=1 T=100 Hq=2 Hk=2 Hv=2 K=16 V=16 N=5 with=cu_seqlens,initial_state pass=bwd",
    "recurrence B=2 T=40 Hq=2 Hk=2 Hv=2 K=16 V=16 pass=bwd",
    "recurrence B=2 T=40 Hq=2 Hk=2 Hv=2 K=16 V=16 with=beta,g,initial_state other=g pass=bwd",
    "recurrence B=0 T=5 Hq=2 Hk=2 Hv=2 K=8 V=8 with=g pass=bwd",
    "recurrence B=2 T=5 Hq=0 Hk=0 Hv=0 K=8 V=8 with=g,beta,initial_state pass=bwd",
    "recurrence B=2 T=0 Hq=2 Hk=2 Hv=2 K=8 V=8 with=g,beta,initial_state pass=bwd",
    "recurrence_segments B=2 T=50 Hq=2 Hk=2 Hv=2 K=16 V=12 segment=16 with=g,beta",
    "recurrence_segments B=1 T=50 Hq=2 Hk=2 Hv=2 K=16 V=12 segment=50 with=g other=g",
    "recurrence_segments B=1 T=1038 Hq=1 Hk=1 Hv=1 K=24 V=1 with=g,beta seed=461206",  // A below the normal numbers of f32
    "decay_decode B=2 T=1 Hq=4 Hk=4 Hv=4 K=32 V=40 with=g threads=2",
    "decay_decode B=2 T=3 Hq=4 Hk=2 Hv=1 K=32 V=130 with=g_head",
    "gla_decode B=3 T=3 Hq=2 Hk=2 Hv=2 K=16 V=300 values=masked,mixed strided=1",
    "delta_decode B=1 T=5 Hq=2 Hk=2 Hv=2 K=16 V=16 l2_norm=1 double_beta=1",
    "gated_delta_decode B=1 T=2 Hq=2 Hk=2 Hv=4 K=9 V=7 values=mixed",
    "gated_delta_decode B=1 T=2 Hq=2 Hk=2 Hv=4 K=128 V=128 other=g values=masked",
};

TEST(Recurrence, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

// ---- calls for the relations ------------------------------------------------------------------------------------------------

struct Walk {
  Tensor q, k, v, g, g_head, beta, cu_seqlens, initial_state, dout, dfinal_state;
  Tensor out, final_state, dq, dk, dv, dg, dg_head, dbeta, dinitial_state;
  RecurrenceArgs options;
  int64_t heads;

  Walk(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, uint64_t seed, Dtype dtype = Dtype::f64) : heads(H) {
    q = random_tensor({B, T, H, K}, seed, dtype);
    k = random_tensor({B, T, H, K}, seed + 1, dtype);
    v = random_tensor({B, T, H, V}, seed + 2, dtype);
    dout = random_tensor({B, T, H, V}, seed + 3, dtype);
    for (int64_t row = 0; row < B * T * H; ++row) {  // keys of length one
      double squares = 0;
      for (int64_t c = 0; c < K; ++c) squares += k.get(row * K + c) * k.get(row * K + c);
      for (int64_t c = 0; c < K; ++c) k.set(row * K + c, k.get(row * K + c) / std::sqrt(squares));
    }
  }
  Dtype wide() const { return q.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }
  int64_t sequences() const { return cu_seqlens.dtype == Dtype::none ? q.sizes[0] : cu_seqlens.sizes[0] - 1; }
  std::vector<int64_t> state_sizes() const { return {sequences(), heads, q.sizes[3], v.sizes[3]}; }
  Walk& scalar_decay(double size, uint64_t seed = 20) { return decay({q.sizes[0], q.sizes[1], heads}, size, seed); }
  Walk& channel_decay(double size, uint64_t seed = 21) {
    return decay({q.sizes[0], q.sizes[1], heads, q.sizes[3]}, size, seed);
  }
  Walk& decay(std::vector<int64_t> sizes, double size, uint64_t seed) {
    g = random_tensor(std::move(sizes), seed, wide());
    for (int64_t i = 0; i < g.count(); ++i) g.set(i, -size * std::fabs(g.get(i)));
    return *this;
  }
  Walk& strengths(double most = 1, uint64_t seed = 22) {
    beta = random_tensor({q.sizes[0], q.sizes[1], heads}, seed, wide());
    for (int64_t i = 0; i < beta.count(); ++i) beta.set(i, most / (1 + std::exp(-beta.get(i))));
    return *this;
  }
  Walk& states(uint64_t seed = 23) {
    initial_state = random_tensor(state_sizes(), seed, wide());
    dfinal_state = random_tensor(state_sizes(), seed + 1, wide());
    return *this;
  }
  RecurrenceArgs args() const {
    RecurrenceArgs a = options;
    a.q = q.view();
    a.k = k.view();
    a.v = v.view();
    a.g = g.view();
    a.g_head = g_head.view();
    a.beta = beta.view();
    a.cu_seqlens = cu_seqlens.view();
    a.initial_state = initial_state.view();
    return a;
  }
  RecurrenceOut outputs() const { return {out.view(), final_state.view()}; }
  Walk& forward(const char* impl = nullptr, Executor* executor = nullptr) {
    out = Tensor(v.dtype, {v.sizes[0], v.sizes[1], heads, v.sizes[3]});
    final_state = Tensor(wide(), state_sizes());
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::forward, &context);
    const Status status = recurrence(args(), outputs(), context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  Walk& backward(const char* impl = nullptr, Executor* executor = nullptr) {
    const auto like = [](const Tensor& t) { return t.dtype == Dtype::none ? Tensor() : Tensor(t.dtype, t.sizes); };
    dq = like(q);
    dk = like(k);
    dv = like(v);
    dg = like(g);
    dg_head = like(g_head);
    dbeta = like(beta);
    dinitial_state = like(initial_state);
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::backward, &context);
    const RecurrenceGrads grads{dout.view(),  dfinal_state.view(),  dq.view(), dk.view(), dv.view(), dg.view(), dg_head.view(),
                                dbeta.view(), dinitial_state.view()};
    const Status status = recurrence_backward(args(), outputs(), grads, context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  std::vector<double> workspace(Pass pass, Context* context) const {
    context->workspace_bytes = recurrence_workspace(args(), pass, *context);
    std::vector<double> memory(static_cast<size_t>(context->workspace_bytes / 8 + 1), kNan);
    context->workspace = memory.data();
    return memory;
  }
  Walk part(int64_t begin, int64_t end) const {
    Walk a = *this;
    for (Tensor Walk::*x : {&Walk::q, &Walk::k, &Walk::v, &Walk::g, &Walk::beta, &Walk::dout})
      a.*x = tokens(this->*x, begin, end);
    a.cu_seqlens = Tensor();
    return a;
  }
};

double gate(Dtype dtype, Pass pass = Pass::forward) { return rms_gate(dtype, pass, Against::reference, false, 0); }

void expect_same(const Walk& a, const Walk& b, Dtype dtype, const std::string& what) {
  EXPECT_LE(rms_error(a.out, b.out), gate(dtype)) << what;
  EXPECT_LE(rms_error(a.final_state, b.final_state), gate(dtype)) << what;
  const Pass backward = Pass::backward;
  if (a.dq.dtype == Dtype::none) return;
  EXPECT_LE(rms_error(a.dq, b.dq), gate(dtype, backward)) << what;
  EXPECT_LE(rms_error(a.dk, b.dk), gate(dtype, backward)) << what;
  EXPECT_LE(rms_error(a.dv, b.dv), gate(dtype, backward)) << what;
}

// ---- the reference by finite differences ------------------------------------------------------------------------------------

TEST(RecurrenceReference, GradientsAgreeWithDifferences) {
  struct Pair {
    Tensor Walk::*input;
    Tensor Walk::*gradient;
    const char* name;
  };
  const Pair pairs[] = {{&Walk::q, &Walk::dq, "dq"},          {&Walk::k, &Walk::dk, "dk"},
                        {&Walk::v, &Walk::dv, "dv"},          {&Walk::g, &Walk::dg, "dg"},
                        {&Walk::beta, &Walk::dbeta, "dbeta"}, {&Walk::initial_state, &Walk::dinitial_state, "dinitial_state"}};
  for (int form = 0; form < 6; ++form) {
    Walk a(1, 5, 2, 3, 2, 10);
    if (form % 3 == 1) a.scalar_decay(0.3);
    if (form % 3 == 2) a.channel_decay(0.3);
    if (form >= 3) a.strengths();
    a.options.l2_norm = form >= 4;
    a.states();
    a.forward("ref").backward("ref");
    const auto loss = [](Walk b) {
      b.forward("ref");
      double sum = 0;
      for (int64_t i = 0; i < b.out.count(); ++i) sum += b.out.get(i) * b.dout.get(i);
      for (int64_t i = 0; i < b.final_state.count(); ++i) sum += b.final_state.get(i) * b.dfinal_state.get(i);
      return sum;
    };
    for (const Pair& pair : pairs) {
      const int64_t count = (a.*pair.input).dtype == Dtype::none ? 0 : (a.*pair.input).count();
      for (int64_t i = 0; i < count; i += std::max<int64_t>(1, count / 7)) {
        constexpr double h = 1e-4;  // fourth order: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h
        const auto at = [&](double step) {
          Walk b = a;
          (b.*pair.input).set(i, (a.*pair.input).get(i) + step);
          return loss(b);
        };
        const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
        EXPECT_NEAR((a.*pair.gradient).get(i), difference, 1e-7 * (1 + std::fabs(difference))) << pair.name << " form " << form;
      }
    }
  }
}

// ---- properties of the page -------------------------------------------------------------------------------------------------

TEST(RecurrenceProperties, ChunkSizesGiveTheSame) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
    Walk whole(1, 90, 2, 24, 20, 30, dtype);
    whole.channel_decay(0.1).strengths().states().forward().backward();
    for (const int64_t chunk : {1, 7, 16, 64, 90}) {
      Walk other = whole;
      other.options.chunk = chunk;
      expect_same(other.forward().backward(), whole, dtype, "chunk " + std::to_string(chunk));
    }
  }
}

TEST(RecurrenceProperties, NoDecayIsADecayOfOne) {
  for (const bool beta : {false, true}) {
    Walk none(2, 70, 2, 16, 12, 31);
    if (beta) none.strengths();
    none.states().forward().backward();
    Walk scalar = none, channel = none;
    expect_same(scalar.scalar_decay(0).forward().backward(), none, Dtype::f64, "scalar");
    expect_same(channel.channel_decay(0).forward().backward(), none, Dtype::f64, "channel");
  }
}

TEST(RecurrenceProperties, AScalarDecayIsEqualChannels) {
  for (const double size : {0.01, 1.0, 30.0}) {
    Walk scalar(1, 70, 2, 16, 12, 32);
    scalar.scalar_decay(size).strengths().states().forward().backward();
    Walk channel = scalar;
    channel.g = Tensor(Dtype::f64, {1, 70, 2, 16});
    for (int64_t i = 0; i < channel.g.count(); ++i) channel.g.set(i, scalar.g.get(i / 16));
    expect_same(channel.forward().backward(), scalar, Dtype::f64, "size " + std::to_string(size));
    Tensor sums(Dtype::f64, {1, 70, 2});
    for (int64_t i = 0; i < channel.dg.count(); ++i) sums.set(i / 16, sums.get(i / 16) + channel.dg.get(i));
    EXPECT_LE(rms_error(scalar.dg, sums), gate(Dtype::f64, Pass::backward));
  }
}

TEST(RecurrenceProperties, WithoutStrengthNothingIsWritten) {
  Walk a(1, 50, 1, 8, 6, 33);
  a.scalar_decay(0.1).states();
  a.beta = constant({1, 50, 1}, 0);
  a.forward().backward();
  double total = 0;
  for (int64_t t = 0; t < 50; ++t) {
    total += a.g.get(t);
    for (int64_t j = 0; j < 6; ++j) {
      double read = 0;
      for (int64_t c = 0; c < 8; ++c) read += a.q.get(t * 8 + c) * a.initial_state.get(c * 6 + j);
      EXPECT_NEAR(a.out.get(t * 6 + j), std::exp(total) * read / std::sqrt(8.0), 1e-13);
    }
  }
  for (int64_t i = 0; i < a.dv.count(); ++i) EXPECT_EQ(a.dv.get(i), 0);
  for (int64_t i = 0; i < a.dbeta.count(); ++i) EXPECT_TRUE(std::isfinite(a.dbeta.get(i)));
}

TEST(RecurrenceProperties, UnitKeysOfFullStrengthReplaceTheValue) {
  Walk a(1, 40, 1, 16, 8, 34);
  a.beta = constant({1, 40, 1}, 1);
  a.q = a.k;
  a.options.scale = 1;
  EXPECT_LE(rms_error(a.forward().out, a.v), gate(Dtype::f64));  // S_t^T k_t = v_t
  Walk twice = a.part(0, 2);
  for (int64_t c = 0; c < 16; ++c) twice.k.set(16 + c, twice.k.get(c));
  for (int64_t j = 0; j < 8; ++j) twice.v.set(8 + j, twice.v.get(j));
  const Tensor once = a.part(0, 1).forward().final_state;
  EXPECT_LE(rms_error(twice.forward().final_state, once), gate(Dtype::f64));  // the same pair again changes nothing
}

TEST(RecurrenceProperties, OrthonormalKeysMakeTheDeltaRuleLinear) {
  Walk delta(1, 12, 1, 16, 8, 35);
  for (int64_t i = 0; i < delta.k.count(); ++i) delta.k.set(i, i / 16 == i % 16 ? 1 : 0);
  delta.scalar_decay(0.2).strengths();
  Walk plain = delta;
  plain.beta = Tensor();
  for (int64_t i = 0; i < plain.v.count(); ++i) plain.v.set(i, plain.v.get(i) * delta.beta.get(i / 8));
  expect_same(delta.forward(), plain.forward(), Dtype::f64, "orthonormal");
}

TEST(RecurrenceProperties, ADecayOfZeroStartsANewSequence) {
  for (const bool channel : {false, true}) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
      Walk a(1, 77, 2, 16, 12, 36, dtype);
      channel ? a.channel_decay(0.1) : a.scalar_decay(0.1);
      a.strengths().states();
      const int64_t row = channel ? 2 * 16 : 2;
      for (int64_t i = 0; i < row; ++i) a.g.set(45 * row + i, -kInf);
      Walk after = a.part(45, 77);
      after.initial_state = Tensor();
      after.forward();
      a.forward().backward();
      EXPECT_LE(rms_error(tokens(a.out, 45, 77), after.out), gate(dtype));
      EXPECT_LE(rms_error(a.final_state, after.final_state), gate(dtype));
      for (int64_t i = 0; i < a.dinitial_state.count(); ++i) EXPECT_EQ(a.dinitial_state.get(i) * 0, 0);
      for (int64_t i = 0; i < row; ++i) EXPECT_EQ(a.dg.get(45 * row + i), 0);
    }
  }
}

TEST(RecurrenceProperties, SplitsAndPackingGiveTheSame) {
  Walk whole(1, 100, 2, 16, 12, 37);
  whole.channel_decay(0.1).strengths().states().forward();
  for (const int64_t cut : {1, 31, 32, 33, 99}) {
    Walk first = whole.part(0, cut), second = whole.part(cut, 100);
    second.initial_state = first.forward().final_state;
    second.forward();
    EXPECT_LE(rms_error(first.out, tokens(whole.out, 0, cut)), gate(Dtype::f64));
    EXPECT_LE(rms_error(second.out, tokens(whole.out, cut, 100)), gate(Dtype::f64));
    EXPECT_LE(rms_error(second.final_state, whole.final_state), gate(Dtype::f64));
  }
  Walk packed = whole;
  packed.cu_seqlens = whole_numbers({0, 33, 33, 100});
  packed.initial_state = Tensor();
  packed.forward();
  Walk left = whole.part(0, 33), right = whole.part(33, 100);
  left.initial_state = right.initial_state = Tensor();
  EXPECT_TRUE(tokens(packed.out, 0, 33) == left.forward().out);  // bit for bit
  EXPECT_TRUE(tokens(packed.out, 33, 100) == right.forward().out);
}

TEST(RecurrenceProperties, ThreadsChangeNoBit) {
  for (const bool channel : {false, true}) {  // channel: more than one segment of chunks in the backward of many threads
    const int64_t T = channel ? 3800 : 1500, K = channel ? 128 : 32, V = channel ? 128 : 48;
    Walk one(1, T, 1, K, V, 38, Dtype::f32);
    channel ? one.channel_decay(0.05) : one.scalar_decay(0.05);
    one.strengths().states();
    Walk many = one;
    ThreadPool single(1);
    one.forward(nullptr, &single).backward(nullptr, &single);
    for (const int threads : {2, 3, 7}) {
      ThreadPool pool(threads);
      many.forward(nullptr, &pool).backward(nullptr, &pool);
      EXPECT_TRUE(many.out == one.out && many.final_state == one.final_state) << threads;
      EXPECT_TRUE(many.dq == one.dq && many.dk == one.dk && many.dv == one.dv) << threads;
      EXPECT_TRUE(many.dg == one.dg && many.dbeta == one.dbeta && many.dinitial_state == one.dinitial_state) << threads;
    }
  }
}

TEST(RecurrenceProperties, StatesKeepTheirPrecisionOverManyTokens) {
  for (const double decay : {1e-6, 1e-3, 1.0, 13.8}) {  // decays 1 - 1e-6 to 1e-6
    Walk exact(1, 32768, 1, 8, 4, 39);
    exact.g = constant({1, 32768, 1}, static_cast<double>(static_cast<float>(-decay)));
    Walk rounded(1, 32768, 1, 8, 4, 39, Dtype::f32);
    rounded.g = constant({1, 32768, 1}, -decay, Dtype::f32);
    for (Tensor Walk::*x : {&Walk::q, &Walk::k, &Walk::v}) {
      for (int64_t i = 0; i < (exact.*x).count(); ++i) (exact.*x).set(i, (rounded.*x).get(i));
    }
    EXPECT_LE(rms_error(rounded.forward().final_state, exact.forward("ref").final_state), decay < 1e-4 ? 5e-6 : 1e-6) << decay;
  }
}

TEST(RecurrenceProperties, StrongGatesKeepTheGradientOfTheGate) {
  for (const double size : {1.0, 10.0, 100.0}) {
    Walk a(1, 70, 1, 16, 12, 40, Dtype::f32);
    a.channel_decay(size).states().forward().backward();
    Walk reference = a;
    reference.forward("ref").backward("ref");
    for (int64_t i = 0; i < a.dg.count(); ++i) ASSERT_TRUE(std::isfinite(a.dg.get(i)));
    EXPECT_LE(rms_error(a.dg, reference.dg), gate(Dtype::f32, Pass::backward)) << size;
  }
}

TEST(RecurrenceProperties, ScalingAndPermutingKeepTheirMeaning) {
  Walk a(1, 60, 1, 16, 12, 41);
  a.channel_decay(0.2).strengths().states().forward();
  Walk scaled = a, permuted = a;
  for (Tensor Walk::*x : {&Walk::v, &Walk::initial_state}) {
    for (int64_t i = 0; i < (a.*x).count(); ++i) (scaled.*x).set(i, 4 * (a.*x).get(i));
  }
  scaled.forward();
  for (int64_t i = 0; i < a.out.count(); ++i) EXPECT_EQ(scaled.out.get(i), 4 * a.out.get(i));
  for (Tensor Walk::*x : {&Walk::q, &Walk::k, &Walk::g}) {
    for (int64_t i = 0; i < (a.*x).count(); ++i) (permuted.*x).set(i, (a.*x).get(i / 16 * 16 + (i % 16 * 5) % 16));
  }
  for (int64_t i = 0; i < 16 * 12; ++i) permuted.initial_state.set(i, a.initial_state.get((i / 12 * 5) % 16 * 12 + i % 12));
  EXPECT_LE(rms_error(permuted.forward().out, a.out), gate(Dtype::f64));
}

// A and B of two halves composed are those of the whole, and carry the state.
TEST(RecurrenceProperties, SegmentsCompose) {
  constexpr int64_t K = 8, V = 5;
  Walk a(1, 48, 1, K, V, 42);
  a.channel_decay(0.1).strengths().states();
  Tensor out(Dtype::f64, {1, 48, 1, V}), S(Dtype::f64, {1, 1, K, V}), A(Dtype::f64, {1, 1, K, K});
  Tensor part_A(Dtype::f64, {2, 1, 1, K, K}), part_S(Dtype::f64, {2, 1, 1, K, V});
  RecurrenceSegmentsArgs args;
  args.q = a.q.view();
  args.k = a.k.view();
  args.v = a.v.view();
  args.g = a.g.view();
  args.beta = a.beta.view();
  args.segment = 24;
  Context context;
  std::vector<double> memory(static_cast<size_t>(recurrence_segments_workspace(args, context) / 8 + 1), kNan);
  context.workspace = memory.data();
  context.workspace_bytes = static_cast<int64_t>(memory.size() * 8);
  const Status status = recurrence_segments(args, {out.view(), S.view(), A.view(), part_A.view(), part_S.view()}, context);
  ASSERT_TRUE(status.ok()) << status.message();
  a.forward();
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < K; ++j) {
      double product = 0;
      for (int64_t c = 0; c < K; ++c) product += part_A.get(K * K + i * K + c) * part_A.get(c * K + j);
      EXPECT_NEAR(A.get(i * K + j), product, 1e-14);
    }
    for (int64_t j = 0; j < V; ++j) {
      double composed = part_S.get(K * V + i * V + j), carried = S.get(i * V + j);
      for (int64_t c = 0; c < K; ++c) composed += part_A.get(K * K + i * K + c) * part_S.get(c * V + j);
      for (int64_t c = 0; c < K; ++c) carried += A.get(i * K + c) * a.initial_state.get(c * V + j);
      EXPECT_NEAR(S.get(i * V + j), composed, 1e-14);
      EXPECT_NEAR(a.final_state.get(i * V + j), carried, 1e-13);
    }
  }
}

// ---- refusals
// -----------------------------------------------------------------------------------------------------------------

TEST(RecurrenceRefusals, EachInOneSentence) {
  const auto refused = [](const Walk& a, const std::string& part) {
    Tensor out(a.v.dtype, {a.v.sizes[0], a.v.sizes[1], a.heads, a.v.sizes[3]});
    const Status status = recurrence(a.args(), {out.view(), View()}, {});
    ASSERT_FALSE(status.ok()) << part;
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    for (int64_t i = 0; i < out.count(); ++i) ASSERT_EQ(out.get(i), 0);
  };
  Walk a(1, 10, 2, 4, 3, 50);
  Walk bad = a;
  bad.k = random_tensor({1, 10, 2, 5}, 1);
  refused(bad, "k has 5");
  bad = a;
  bad.g = random_tensor({1, 10}, 1);
  refused(bad, "g has shape [1, 10], expected [B, T, H, K] or [B, T, H]");
  bad = a;
  bad.g = random_tensor({1, 10, 3}, 1);
  refused(bad, "g has 3");
  bad = a;
  bad.beta = random_tensor({1, 9, 2}, 1);
  refused(bad, "beta has 9");
  bad = a;
  bad.cu_seqlens = whole_numbers({0, 7, 3, 10});
  refused(bad, "cu_seqlens");
  bad = a;
  bad.cu_seqlens = whole_numbers({0, 7, 9});
  refused(bad, "cu_seqlens");
  bad = a;
  bad.initial_state = random_tensor({1, 2, 3, 4}, 1);
  refused(bad, "initial_state");
  bad = a;
  bad.initial_state = random_tensor({1, 2, 4, 3}, 1, Dtype::f32);
  refused(bad, "initial_state is f32, expected f64");
  bad = a;
  bad.options.chunk = -1;
  refused(bad, "chunk");
}

}  // namespace
}  // namespace linnet
