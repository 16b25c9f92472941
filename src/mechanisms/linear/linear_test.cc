// linear: agreement with the reference in every implementation and dtype, the reference itself by finite differences, the
// relations, edge cases and policies of the mechanism's page, states over splits and over many tokens, bits, refusals.
#include "linear.h"

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
using check::entry;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::tokens;
using check::whole_numbers;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- agreement with the reference -----------------------------------------------------------------------------------------

const char* const kLines[] = {
    "linear B=1 T=1 S=1 Hq=1 Hk=1 Hv=1 K=8 V=8 pass=bwd seed=2",
    "linear B=2 T=31 S=31 Hq=2 Hk=2 Hv=2 K=16 V=16 pass=bwd",
    "linear B=1 T=32 S=32 Hq=2 Hk=2 Hv=2 K=16 V=24 pass=bwd strided=1",
    "linear B=1 T=33 S=33 Hq=3 Hk=3 Hv=3 K=20 V=13 pass=bwd with=initial_state,initial_z",
    "linear B=2 T=97 S=97 Hq=2 Hk=2 Hv=2 K=64 V=64 map=elu1 normalize=1 pass=bwd",
    "linear B=1 T=1301 S=1301 Hq=1 Hk=1 Hv=1 K=16 V=16 threads=7 pass=bwd with=initial_state",
    "linear B=1 T=67 S=67 Hq=2 Hk=2 Hv=2 K=72 V=136 threads=2 pass=bwd",
    "linear B=1 T=40 S=40 Hq=1 Hk=1 Hv=1 K=1 V=1 pass=bwd",
    "linear B=1 T=70 S=70 Hq=4 Hk=2 Hv=1 K=16 V=16 map=softplus normalize=1 threads=3 pass=bwd",
    "linear B=1 T=70 S=70 Hq=1 Hk=2 Hv=6 K=16 V=16 map=silu pass=bwd with=initial_state,initial_z",
    "linear B=1 T=70 S=70 Hq=6 Hk=2 Hv=3 K=16 V=16 map=relu pass=bwd",
    "linear B=1 T=100 S=100 Hq=2 Hk=2 Hv=2 K=16 V=16 N=4 map=elu1 normalize=1 with=cu_seqlens,initial_state,initial_z pass=bwd",
    "linear B=1 T=100 S=100 Hq=2 Hk=2 Hv=2 K=16 V=16 N=3 causal=0 with=cu_seqlens,key_mask pass=bwd",
    "linear B=2 T=50 S=90 Hq=2 Hk=2 Hv=2 K=16 V=24 causal=0 map=elu1 normalize=1 with=initial_state,initial_z pass=bwd",
    "linear B=1 T=1200 S=900 Hq=1 Hk=1 Hv=1 K=16 V=16 causal=0 threads=4 pass=bwd",
    "linear B=2 T=70 S=70 Hq=2 Hk=2 Hv=2 K=16 V=16 map=elu1 normalize=1 with=key_mask values=garbage pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=2 K=16 V=16 map=relu2 normalize=1 eps=0.001 pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=2 K=20 V=16 map=hedgehog normalize=1 pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=2 K=12 V=16 map=taylor2 normalize=1 pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=2 K=10 V=16 map=dpfp dpfp_nu=3 normalize=1 pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=4 K=20 V=16 R=33 map=t2r with=w threads=2 pass=bwd",
    "linear B=2 T=50 S=50 Hq=2 Hk=2 Hv=2 K=20 V=16 R=7 map=t2r normalize=1 with=w,key_mask values=garbage pass=bwd",
    "linear B=2 T=90 S=90 Hq=2 Hk=2 Hv=2 K=20 V=16 map=exp pass=bwd",
    "linear B=2 T=90 S=90 Hq=4 Hk=2 Hv=1 K=20 V=16 map=exp normalize=1 with=initial_state,initial_z,key_mask pass=bwd",
    "linear B=2 T=90 S=70 Hq=2 Hk=2 Hv=2 K=20 V=16 map=exp causal=0 normalize=1 pass=bwd",
    "linear B=0 T=5 S=5 Hq=2 Hk=2 Hv=2 K=8 V=8 pass=bwd seed=2",
    "linear B=2 T=0 S=0 Hq=2 Hk=2 Hv=2 K=8 V=8 with=initial_state,initial_z pass=bwd",
    "linear B=1 T=5 S=0 Hq=2 Hk=2 Hv=2 K=8 V=8 map=elu1 normalize=1 causal=0 pass=bwd",
    "linear_decode B=2 T=1 Hq=4 Hk=4 Hv=4 K=32 V=40 threads=2",
    "linear_decode B=3 T=3 Hq=4 Hk=2 Hv=1 K=16 V=130 map=elu1 normalize=1 with=z",
    "linear_decode B=1 T=5 Hq=2 Hk=2 Hv=2 K=16 V=16 map=exp normalize=1 with=z,compensation strided=1",
    "linear_decode B=1 T=2 Hq=2 Hk=2 Hv=2 K=16 V=1 R=20 map=t2r with=w",
    "linear_decode B=1 T=2 Hq=2 Hk=2 Hv=2 K=9 V=7 map=taylor2 with=compensation",
    "linear_decode B=2 T=0 Hq=2 Hk=2 Hv=2 K=8 V=8 with=compensation",
};

TEST(Linear, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

// ---- calls for the relations ------------------------------------------------------------------------------------------------

struct Attention {
  Tensor q, k, v, w, key_mask, cu_seqlens, initial_state, initial_z, dout, dfinal_state, dfinal_z;
  Tensor out, final_state, final_z, den, dq, dk, dv, dw, dinitial_state, dinitial_z;
  LinearArgs options;

  Attention(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, uint64_t seed, Dtype dtype = Dtype::f64) {
    q = random_tensor({B, T, H, K}, seed, dtype);
    k = random_tensor({B, T, H, K}, seed + 1, dtype);
    v = random_tensor({B, T, H, V}, seed + 2, dtype);
    dout = random_tensor({B, T, H, V}, seed + 3, dtype);
  }
  Dtype wide() const { return q.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }
  LinearArgs args() const {
    LinearArgs a = options;
    a.q = q.view();
    a.k = k.view();
    a.v = v.view();
    a.w = w.view();
    a.key_mask = key_mask.view();
    a.cu_seqlens = cu_seqlens.view();
    a.initial_state = initial_state.view();
    a.initial_z = initial_z.view();
    return a;
  }
  // The sizes an output has, from the declaration.
  Tensor output(const char* name) const {
    LinearArgs a = args();
    Dims dims;
    bool packed;
    View view;
    EXPECT_TRUE(prepare(linear_op(), &a, &dims, &packed).ok());
    EXPECT_TRUE(output_shape(linear_op(), *linear_op().find_output(name), &a, dims, packed, &view).ok());
    return Tensor(view.dtype, std::vector<int64_t>(view.size, view.size + view.rank));
  }
  Tensor random_state(uint64_t seed) const { return random_tensor(output("final_state").sizes, seed, wide()); }
  Tensor random_z(uint64_t seed) const {
    Tensor z = random_tensor(output("final_z").sizes, seed, wide());
    for (int64_t i = 0; i < z.count(); ++i) z.set(i, std::fabs(z.get(i)));
    return z;
  }
  Attention& forward(const char* impl = nullptr, Executor* executor = nullptr) {
    out = output("out");
    final_state = output("final_state");
    final_z = output("final_z");
    den = output("den");
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::forward, &context);
    const Status status = linear(args(), outputs(), context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  Attention& backward(const char* impl = nullptr, Executor* executor = nullptr) {
    const auto like = [](const Tensor& t) { return t.dtype == Dtype::none ? Tensor() : Tensor(t.dtype, t.sizes); };
    dq = like(q);
    dk = like(k);
    dv = like(v);
    dw = like(w);
    dinitial_state = like(initial_state);
    dinitial_z = like(initial_z);
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::backward, &context);
    const LinearGrads grads{dout.view(), dfinal_state.view(), dfinal_z.view(),       dq.view(),        dk.view(),
                            dv.view(),   dw.view(),           dinitial_state.view(), dinitial_z.view()};
    const Status status = linear_backward(args(), outputs(), grads, context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  LinearOut outputs() const { return {out.view(), final_state.view(), final_z.view(), den.view()}; }
  std::vector<double> workspace(Pass pass, Context* context) const {
    context->workspace_bytes = linear_workspace(args(), pass, *context);
    std::vector<double> memory(static_cast<size_t>(context->workspace_bytes / 8 + 1), kNan);
    context->workspace = memory.data();
    return memory;
  }
  // Tokens [begin, end) of every tensor along T, starting from these states.
  Attention part(int64_t begin, int64_t end) const {
    Attention a = *this;
    for (Tensor Attention::*x : {&Attention::q, &Attention::k, &Attention::v, &Attention::dout, &Attention::key_mask}) {
      a.*x = tokens(this->*x, begin, end);
    }
    a.cu_seqlens = Tensor();
    return a;
  }
};

struct Decoder {
  Tensor state, z, compensation;
  LinearDecodeArgs options;

  Tensor step(const Tensor& q, const Tensor& k, const Tensor& v, const char* impl = nullptr) {
    LinearDecodeArgs args = options;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.state = state.view();
    args.z = z.view();
    args.compensation = compensation.view();
    Tensor out(q.dtype, {v.sizes[0], v.sizes[1], state.sizes[1], v.sizes[3]});
    Context context{.impl = impl};
    std::vector<double> memory(static_cast<size_t>(linear_decode_workspace(args, context) / 8 + 1), kNan);
    context.workspace = memory.data();
    context.workspace_bytes = static_cast<int64_t>(memory.size() * 8);
    const Status status = linear_decode(args, {out.view()}, context);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }
};

double gate(Dtype dtype, Pass pass = Pass::forward) { return rms_gate(dtype, pass, Against::reference, true, 0); }
bool finite(const Tensor& t) {
  for (int64_t i = 0; i < t.count(); ++i) {
    if (!std::isfinite(t.get(i))) return false;
  }
  return true;
}
std::vector<const char*> kernels() {
  std::vector<const char*> names;
  for (const Impl& impl : linear_op().impls) {
    if (impl.name != "ref" && impl.device == Device::cpu && impl.missing().empty()) names.push_back(impl.name.c_str());
  }
  return names;
}
constexpr FeatureMap kAllMaps[] = {FeatureMap::identity, FeatureMap::elu1,     FeatureMap::relu, FeatureMap::relu2,
                                   FeatureMap::silu,     FeatureMap::softplus, FeatureMap::exp,  FeatureMap::hedgehog,
                                   FeatureMap::taylor2,  FeatureMap::dpfp,     FeatureMap::t2r};

// ---- the reference by finite differences ------------------------------------------------------------------------------------

TEST(LinearReference, GradientsAgreeWithDifferences) {
  struct Pair {
    Tensor Attention::*input;
    Tensor Attention::*gradient;
    const char* name;
  };
  const Pair pairs[] = {{&Attention::q, &Attention::dq, "dq"},
                        {&Attention::k, &Attention::dk, "dk"},
                        {&Attention::v, &Attention::dv, "dv"},
                        {&Attention::w, &Attention::dw, "dw"},
                        {&Attention::initial_state, &Attention::dinitial_state, "dinitial_state"},
                        {&Attention::initial_z, &Attention::dinitial_z, "dinitial_z"}};
  for (const FeatureMap map : kAllMaps) {
    for (int form = 0; form < 4; ++form) {
      Attention a(1, 5, 2, 3, 2, 10 + static_cast<uint64_t>(map));
      a.options = {
          .map = map, .causal = form % 2 == 0, .normalize = form / 2 == 1, .eps = 0.1, .dpfp_nu = 2, .allow_signed = true};
      if (map == FeatureMap::t2r) a.w = random_tensor({2, 4, 3}, 90);
      a.key_mask = constant({1, 5}, 1, Dtype::u8);
      a.key_mask.set(1, 0);
      a.initial_state = a.random_state(50);
      a.initial_z = a.random_z(51);
      a.dfinal_state = a.random_state(52);
      a.dfinal_z = a.random_z(53);
      a.forward("ref").backward("ref");
      const auto loss = [](Attention b) {
        b.forward("ref");
        double sum = 0;
        for (int64_t i = 0; i < b.out.count(); ++i) sum += b.out.get(i) * b.dout.get(i);
        for (int64_t i = 0; i < b.final_state.count(); ++i) sum += b.final_state.get(i) * b.dfinal_state.get(i);
        for (int64_t i = 0; i < b.final_z.count(); ++i) sum += b.final_z.get(i) * b.dfinal_z.get(i);
        return sum;
      };
      for (const Pair& pair : pairs) {
        if ((a.*pair.input).dtype == Dtype::none) continue;
        const int64_t count = (a.*pair.input).count();
        for (int64_t i = 0; i < count; i += std::max<int64_t>(1, count / 7)) {
          constexpr double h = 1e-4;  // fourth order: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h
          const auto at = [&](double step) {
            Attention b = a;
            (b.*pair.input).set(i, (a.*pair.input).get(i) + step);
            return loss(b);
          };
          const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
          EXPECT_NEAR((a.*pair.gradient).get(i), difference, 1e-7 * (1 + std::fabs(difference)))
              << pair.name << " " << i << " map " << static_cast<int>(map) << " form " << form;
        }
      }
    }
  }
}

// ---- relations and edge cases of the page -----------------------------------------------------------------------------------

TEST(LinearRelations, OneTokenReturnsItsValue) {
  for (const FeatureMap map : {FeatureMap::elu1, FeatureMap::softplus, FeatureMap::exp, FeatureMap::hedgehog}) {
    Attention a(2, 1, 3, 8, 5, 1);
    a.options = {.map = map, .normalize = true, .eps = 0};
    EXPECT_LE(rms_error(a.forward().out, a.v), gate(Dtype::f64)) << static_cast<int>(map);
  }
  // with eps: out = v s / (s + eps), s = scale phi(q).phi(k)
  Attention a(1, 1, 1, 4, 3, 2);
  a.options = {.map = FeatureMap::relu, .normalize = true, .scale = 0.5, .eps = 0.25};
  a.forward();
  double s = 0;
  for (int64_t c = 0; c < 4; ++c) s += 0.5 * std::fmax(a.q.get(c), 0) * std::fmax(a.k.get(c), 0);
  for (int64_t j = 0; j < 3; ++j) EXPECT_NEAR(a.out.get(j), a.v.get(j) * s / (s + 0.25), 1e-15);
  EXPECT_NEAR(a.den.get(0), s + 0.25, 1e-15);
}

TEST(LinearRelations, NotCausalIsCausalForTheLastRow) {
  Attention causal(2, 75, 2, 16, 12, 3);
  causal.options = {.map = FeatureMap::elu1, .normalize = true};
  Attention full = causal;
  full.options.causal = false;
  causal.forward();
  full.forward();
  EXPECT_LE(rms_error(tokens(full.out, 74, 75), tokens(causal.out, 74, 75)), gate(Dtype::f64));
  EXPECT_LE(rms_error(full.final_state, causal.final_state), gate(Dtype::f64));
  EXPECT_LE(rms_error(full.final_z, causal.final_z), gate(Dtype::f64));
}

TEST(LinearRelations, PositiveWeightsAverageAConstantToItself) {
  Attention a(1, 100, 2, 16, 8, 4);
  a.v = constant({1, 100, 2, 8}, 2.5);
  a.options = {.map = FeatureMap::elu1, .normalize = true, .eps = 0};
  EXPECT_LE(rms_error(a.forward().out, a.v), gate(Dtype::f64));
}

TEST(LinearRelations, Taylor2IsTheSeriesOfExp) {
  // T = 1, value 1, not normalised, scale 1: out = phi(q).phi(k) = 1 + s + s^2 / 2, s = q.k / sqrt(K)
  Attention a(1, 1, 1, 7, 1, 5);
  a.v = constant({1, 1, 1, 1}, 1);
  a.options = {.map = FeatureMap::taylor2, .scale = 1.0};
  double s = 0;
  for (int64_t c = 0; c < 7; ++c) s += a.q.get(c) * a.k.get(c) / std::sqrt(7.0);
  EXPECT_NEAR(a.forward().out.get(0), 1 + s + s * s / 2, 1e-14);
}

TEST(LinearRelations, GroupedHeadsAreRepeatedHeads) {
  for (const bool normalize : {false, true}) {
    Attention grouped(1, 70, 6, 16, 8, 6);
    grouped.k = random_tensor({1, 70, 2, 16}, 61);
    grouped.v = random_tensor({1, 70, 3, 8}, 62);
    grouped.options = {.map = FeatureMap::elu1, .normalize = normalize};
    Attention repeated = grouped;
    repeated.k = Tensor(Dtype::f64, {1, 70, 6, 16});
    repeated.v = Tensor(Dtype::f64, {1, 70, 6, 8});
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t h = 0; h < 6; ++h) {
        for (int64_t c = 0; c < 16; ++c) repeated.k.set(repeated.k.at(0, t, h, c), grouped.k.get(grouped.k.at(0, t, h / 3, c)));
        for (int64_t c = 0; c < 8; ++c) repeated.v.set(repeated.v.at(0, t, h, c), grouped.v.get(grouped.v.at(0, t, h / 2, c)));
      }
    }
    grouped.forward().backward();
    repeated.forward().backward();
    EXPECT_TRUE(grouped.out == repeated.out);
    EXPECT_TRUE(grouped.dq == repeated.dq);
    Tensor dk(Dtype::f64, {1, 70, 2, 16});
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t h = 0; h < 6; ++h) {
        for (int64_t c = 0; c < 16; ++c) {
          dk.set(dk.at(0, t, h / 3, c), dk.get(dk.at(0, t, h / 3, c)) + repeated.dk.get(repeated.dk.at(0, t, h, c)));
        }
      }
    }
    EXPECT_LE(rms_error(grouped.dk, dk), gate(Dtype::f64, Pass::backward));
  }
}

TEST(LinearEdges, MaskedKeysAreAsIfTheyWereNotThere) {
  for (const FeatureMap map : {FeatureMap::elu1, FeatureMap::exp, FeatureMap::softplus}) {
    Attention masked(1, 90, 1, 16, 8, 7);
    masked.options = {.map = map, .causal = false, .normalize = true};
    Attention without = masked;
    masked.key_mask = constant({1, 90}, 1, Dtype::u8);
    std::vector<int64_t> kept;
    for (int64_t j = 0; j < 90; ++j) {
      if (j % 3 != 1) kept.push_back(j);
      if (j % 3 == 1) masked.key_mask.set(j, 0);
    }
    const auto keep = [&](const Tensor& x) {
      Tensor y(x.dtype, {1, static_cast<int64_t>(kept.size()), 1, x.sizes[3]});
      for (size_t i = 0; i < kept.size(); ++i) {
        for (int64_t c = 0; c < x.sizes[3]; ++c) y.set(y.at(0, static_cast<int64_t>(i), 0, c), x.get(x.at(0, kept[i], 0, c)));
      }
      return y;
    };
    without.k = keep(masked.k);
    without.v = keep(masked.v);
    masked.forward().backward();
    without.forward().backward();
    EXPECT_LE(rms_error(masked.out, without.out), gate(Dtype::f64));
    EXPECT_LE(rms_error(keep(masked.dk), without.dk), gate(Dtype::f64, Pass::backward));
    EXPECT_LE(rms_error(keep(masked.dv), without.dv), gate(Dtype::f64, Pass::backward));
  }
}

TEST(LinearEdges, ARowThatSeesNothingIsZero) {
  for (const FeatureMap map : {FeatureMap::elu1, FeatureMap::relu, FeatureMap::exp}) {
    for (const double eps : {0.0, 1e-6}) {
      Attention a(1, 40, 2, 8, 8, 8);
      a.options = {.map = map, .normalize = true, .eps = eps};
      a.key_mask = constant({1, 40}, 0, Dtype::u8);
      for (int64_t j = 35; j < 40; ++j) a.key_mask.set(j, 1);
      a.forward().backward();
      EXPECT_TRUE(tokens(a.out, 0, 35) == constant({1, 35, 2, 8}, 0)) << static_cast<int>(map);
      EXPECT_TRUE(rms_error(tokens(a.dq, 0, 35), constant({1, 35, 2, 8}, 0)) == 0) << static_cast<int>(map);
      EXPECT_TRUE(finite(a.out) && finite(a.dq) && finite(a.dk) && finite(a.dv)) << static_cast<int>(map);
    }
  }
}

TEST(LinearEdges, NoTokensLeaveTheStatesAsTheyAre) {
  Attention a(2, 0, 3, 8, 5, 9);
  a.options.map = FeatureMap::hedgehog;
  a.initial_state = a.random_state(1);
  a.initial_z = a.random_z(2);
  a.dfinal_state = a.random_state(3);
  a.dfinal_z = a.random_z(4);
  a.forward().backward();
  EXPECT_TRUE(a.final_state == a.initial_state);
  EXPECT_TRUE(a.final_z == a.initial_z);
  EXPECT_TRUE(a.dinitial_state == a.dfinal_state);
  EXPECT_TRUE(a.dinitial_z == a.dfinal_z);
}

TEST(LinearEdges, LargeExponentsStayFinite) {
  // Map exp, normalised: 1e4 in every place would overflow any float; the running units keep the weights finite.
  for (const char* impl : kernels()) {
    for (const bool causal : {true, false}) {
      Attention a(1, 70, 2, 16, 8, 11, Dtype::f32);
      for (int64_t i = 0; i < a.q.count(); ++i) {
        a.q.set(i, a.q.get(i) * 3e3);
        a.k.set(i, a.k.get(i) * 3e3);
      }
      a.options = {.map = FeatureMap::exp, .causal = causal, .normalize = true};
      Attention want = a;
      a.forward(impl).backward(impl);
      EXPECT_TRUE(finite(a.out) && finite(a.den) && finite(a.dq) && finite(a.dk) && finite(a.dv)) << impl << causal;
      want.forward("ref");
      const double largest = 2.5e4;
      EXPECT_LE(rms_error(a.out, want.out), rms_gate(Dtype::f32, Pass::forward, Against::reference, true, largest)) << impl;
    }
  }
}

// ---- NaN and infinity -------------------------------------------------------------------------------------------------------

TEST(LinearPolicy, AnUnusualRowReachesNoEarlierRowAndNoOtherHead) {
  for (const char* impl : kernels()) {
    for (const FeatureMap map : {FeatureMap::identity, FeatureMap::elu1, FeatureMap::exp}) {
      for (const double bad : {kNan, kInf}) {
        for (const int which : {0, 1, 2}) {
          Attention a(2, 80, 2, 16, 20, 12, Dtype::f32);
          a.options = {.map = map, .normalize = map != FeatureMap::identity};
          Attention b = a;
          Tensor& x = which == 0 ? b.q : which == 1 ? b.k : b.v;
          x.set(x.at(1, 45, 0, 3), bad);  // in the middle of the second chunk
          a.forward(impl);
          b.forward(impl);
          for (int64_t n = 0; n < 2; ++n) {
            for (int64_t t = 0; t < 80; ++t) {
              for (int64_t h = 0; h < 2; ++h) {
                if (n == 1 && h == 0 && (which == 0 ? t == 45 : t >= 45)) continue;
                for (int64_t c = 0; c < 20; ++c) {
                  const double want = a.out.get(a.out.at(n, t, h, c)), got = b.out.get(b.out.at(n, t, h, c));
                  // exp takes such a chunk row by row, which rounds otherwise
                  const bool same = map == FeatureMap::exp ? std::fabs(got - want) < 1e-5 : got == want;
                  ASSERT_TRUE(same) << impl << " map " << static_cast<int>(map) << " bad " << bad << " in " << which << " at "
                                    << n << " " << t << " " << h << " " << c << ": " << got << ", " << want;
                }
              }
            }
          }
        }
      }
    }
  }
}

// ---- states -----------------------------------------------------------------------------------------------------------------

TEST(LinearStates, SplitAnywhereIsTheWhole) {
  for (const FeatureMap map : {FeatureMap::identity, FeatureMap::softplus, FeatureMap::exp}) {
    Attention whole(1, 67, 2, 12, 10, 13);
    whole.options = {.map = map, .normalize = map != FeatureMap::identity};
    whole.initial_state = whole.random_state(1);
    for (int64_t i = 0; i < whole.initial_state.count(); ++i) whole.initial_state.set(i, std::fabs(whole.initial_state.get(i)));
    whole.initial_z = whole.random_z(2);
    whole.forward();
    for (int64_t cut = 0; cut <= 67; ++cut) {
      Attention first = whole.part(0, cut), second = whole.part(cut, 67);
      first.forward();
      second.initial_state = first.final_state;
      second.initial_z = first.final_z;
      second.forward();
      const double limit = gate(Dtype::f64);
      EXPECT_LE(rms_error(first.out, tokens(whole.out, 0, cut)), limit) << cut;
      EXPECT_LE(rms_error(second.out, tokens(whole.out, cut, 67)), limit) << cut;
      EXPECT_LE(rms_error(second.final_state, whole.final_state), limit) << cut;
      EXPECT_LE(rms_error(second.final_z, whole.final_z), limit) << cut;
    }
    Decoder decoder{whole.initial_state, whole.initial_z, {}, {}};
    decoder.options.map = map;
    decoder.options.normalize = whole.options.normalize;
    for (int64_t t = 0; t < 67; ++t) {
      const Tensor out = decoder.step(tokens(whole.q, t, t + 1), tokens(whole.k, t, t + 1), tokens(whole.v, t, t + 1));
      EXPECT_LE(rms_error(out, tokens(whole.out, t, t + 1)), gate(Dtype::f64)) << t;
    }
    EXPECT_LE(rms_error(decoder.state, whole.final_state), gate(Dtype::f64));
    EXPECT_LE(rms_error(decoder.z, whole.final_z), gate(Dtype::f64));
  }
}

TEST(LinearStates, PackedSequencesAreSeparateCalls) {
  for (const char* impl : kernels()) {
    for (const bool causal : {true, false}) {
      Attention a(1, 180, 2, 16, 12, 14, Dtype::f32);
      a.options = {.map = FeatureMap::elu1, .causal = causal, .normalize = true};
      const std::vector<int64_t> cuts = {0, 0, 70, 101, 101, 180, 180};
      a.cu_seqlens = whole_numbers(cuts, causal ? Dtype::i64 : Dtype::i32);
      a.initial_state = a.random_state(1);
      a.initial_z = a.random_z(2);
      a.dfinal_state = a.random_state(3);
      a.dfinal_z = a.random_z(4);
      a.forward(impl).backward(impl);
      for (size_t s = 0; s + 1 < cuts.size(); ++s) {
        const int64_t n = static_cast<int64_t>(s);
        Attention one = a.part(cuts[s], cuts[s + 1]);
        one.initial_state = entry(a.initial_state, n);
        one.initial_z = entry(a.initial_z, n);
        one.dfinal_state = entry(a.dfinal_state, n);
        one.dfinal_z = entry(a.dfinal_z, n);
        one.forward(impl).backward(impl);
        EXPECT_TRUE(one.out == tokens(a.out, cuts[s], cuts[s + 1])) << impl << s;
        EXPECT_TRUE(one.final_state == entry(a.final_state, n)) << impl << s;
        EXPECT_TRUE(one.final_z == entry(a.final_z, n)) << impl << s;
        EXPECT_TRUE(one.dq == tokens(a.dq, cuts[s], cuts[s + 1])) << impl << s;
        EXPECT_TRUE(one.dk == tokens(a.dk, cuts[s], cuts[s + 1])) << impl << s;
        EXPECT_TRUE(one.dv == tokens(a.dv, cuts[s], cuts[s + 1])) << impl << s;
        EXPECT_TRUE(one.dinitial_state == entry(a.dinitial_state, n)) << impl << s;
        EXPECT_TRUE(one.dinitial_z == entry(a.dinitial_z, n)) << impl << s;
      }
    }
  }
}

TEST(LinearStates, ManyTokens) {
  constexpr int64_t T = 32768, K = 16, V = 16;
  for (const bool repeated : {false, true}) {
    Attention a(1, T, 1, K, V, 15, Dtype::f32);
    if (repeated) {
      for (int64_t t = 1; t < T; ++t) {
        for (int64_t c = 0; c < K; ++c) {
          a.k.set(t * K + c, a.k.get(c));
          a.v.set(t * V + c, a.v.get(c));
        }
      }
    }
    std::vector<double> sums(K * V);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < K * V; ++i) sums[static_cast<size_t>(i)] += a.k.get(t * K + i / V) * a.v.get(t * V + i % V);
    }
    Tensor want(Dtype::f64, {1, 1, K, V});
    for (int64_t i = 0; i < K * V; ++i) want.set(i, sums[static_cast<size_t>(i)]);
    for (const char* impl : kernels()) {
      EXPECT_LE(rms_error(a.forward(impl).final_state, want), repeated ? kLongRepeated : kLongChunked) << impl << repeated;
      // One call with all tokens runs the same steps as T calls with one.
      Decoder plain{constant({1, 1, K, V}, 0, Dtype::f32), {}, {}, {}}, exact = plain;
      exact.compensation = plain.state;
      exact.step(a.q, a.k, a.v, impl);
      for (int64_t i = 0; i < K * V; ++i) {
        const double rest = exact.compensation.get(i);
        EXPECT_LE(std::fabs(rest), std::fabs(exact.state.get(i)) * epsilon(Dtype::f32)) << impl;
      }
      EXPECT_LE(rms_error(exact.state, want), kLongCompensated) << impl << repeated;
      plain.step(a.q, a.k, a.v, impl);
      EXPECT_TRUE(repeated || rms_error(plain.state, want) <= kLongSteps) << impl;
    }
  }
}

// ---- bits and memory --------------------------------------------------------------------------------------------------------

TEST(LinearBits, ThreadsChangeNothing) {
  struct Form {
    int64_t B, T, H;
    bool causal, normalize;
    FeatureMap map;
  };
  // One head of many tokens climbs the ladder from 2 threads on; five heads are cut differently by every number of threads.
  const Form forms[] = {{1, 2500, 1, true, true, FeatureMap::elu1},
                        {1, 1300, 1, true, false, FeatureMap::identity},
                        {1, 1100, 1, false, true, FeatureMap::elu1},
                        {2, 300, 5, true, false, FeatureMap::identity},
                        {1, 300, 3, true, true, FeatureMap::exp}};
  for (const char* impl : kernels()) {
    for (const Form& form : forms) {
      Attention one(form.B, form.T, form.H, 40, 24, 16, Dtype::f32);
      one.options = {.map = form.map, .causal = form.causal, .normalize = form.normalize};
      one.forward(impl, &inline_executor()).backward(impl, &inline_executor());
      for (const int threads : {2, 3, 4, 7, 8, 16}) {
        ThreadPool pool(threads);
        Attention many = one;
        many.forward(impl, &pool).backward(impl, &pool);
        EXPECT_TRUE(many.out == one.out && many.final_state == one.final_state && many.final_z == one.final_z)
            << impl << threads;
        EXPECT_TRUE(many.dq == one.dq && many.dk == one.dk && many.dv == one.dv) << impl << threads << " T " << form.T;
      }
    }
  }
}

TEST(LinearBits, AValueThatIsNotFiniteDoesNotChangeTheRestOfItsChunk) {
  // The row-by-row form that such a chunk takes gives the same bits in the columns that stay finite.
  Attention a(1, 64, 1, 16, 16, 17, Dtype::f32);
  Attention b = a;
  b.v.set(b.v.at(0, 20, 0, 5), kInf);
  a.forward();
  b.forward();
  for (int64_t t = 0; t < 64; ++t) {
    for (int64_t c = 0; c < 16; ++c) {
      if (c == 5 && t >= 20) continue;
      ASSERT_EQ(a.out.get(a.out.at(0, t, 0, c)), b.out.get(b.out.at(0, t, 0, c))) << t << " " << c;
    }
  }
}

TEST(LinearMemory, WorkspaceDoesNotGrowWithTheSequence) {
  const float nothing = 0;
  for (const int threads : {1, 2, 16}) {
    ThreadPool pool(threads);
    for (const int64_t H : {1, 8}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const auto bytes = [&](int64_t T) {
          LinearArgs args;
          args.q = args.k = args.v = View::dense(&nothing, Dtype::f32, {1, T, H, 64});
          return linear_workspace(args, pass, {.executor = &pool});
        };
        EXPECT_EQ(bytes(4096), bytes(262144)) << threads << " threads, " << H << " heads";
        EXPECT_LE(bytes(262144), int64_t{16} << 20);
      }
    }
  }
}

// ---- refusals ---------------------------------------------------------------------------------------------------------------

TEST(LinearRefusals, SayWhatIsWrong) {
  struct Refusal {
    void (*spoil)(Attention*);
    const char* sentence;
  };
  const Refusal refusals[] = {
      {[](Attention* a) {
         a->k = random_tensor({1, 10, 2, 7}, 1);
       },
       "linear: k has 7 channels in dimension 3 of [B, S, Hk, K], expected 8 (same as q)"},
      {[](Attention* a) {
         a->k = random_tensor({1, 9, 2, 8}, 1), a->v = random_tensor({1, 9, 2, 6}, 1);
       },
       "linear: k has 9 tokens, expected 10 (same as q) when causal or packed"},
      {[](Attention* a) { a->options.normalize = true; },
       "linear: normalize with map identity can divide by zero; choose a positive map or set allow_signed"},
      {[](Attention* a) { a->options.map = FeatureMap::t2r; }, "linear: w is missing; map t2r needs it"},
      {[](Attention* a) {
         a->w = random_tensor({2, 4, 8}, 1);
       },
       "linear: w is given, expected none with map identity"},
      {[](Attention* a) { a->options.eps = -1; }, "linear: eps is -1, expected at least 0"},
      {[](Attention* a) { a->options = {.map = FeatureMap::exp, .normalize = true, .scale = -1.0}; },
       "linear: scale is -1.000000, expected a positive number with normalize and map exp"},
      {[](Attention* a) {
         a->initial_state = random_tensor({1, 2, 8, 5}, 1);
       },
       "linear: initial_state has 5 channels in dimension 3 of [N, H, F, V], expected 6 (same as v)"},
      {[](Attention* a) {
         a->v = random_tensor({1, 10, 3, 6}, 1);
       },
       "linear: q has 2 heads, expected a divisor of 3"},
      {[](Attention* a) {
         a->cu_seqlens = whole_numbers({0, 4, 9});
       },
       "linear: cu_seqlens ends at 9, expected 10 (the number of tokens)"},
      {[](Attention* a) {
         a->v = random_tensor({1, 10, 2, 6}, 1, Dtype::f32);
       },
       "linear: v is f32, expected f64 (same as q)"},
  };
  for (const Refusal& refusal : refusals) {
    Attention a(1, 10, 2, 8, 6, 18);
    refusal.spoil(&a);
    Tensor out = constant({1, 10, 2, 6}, 7);
    std::vector<double> memory(1 << 16);
    const Status status = linear(a.args(), {.out = out.view()}, {.workspace = memory.data(), .workspace_bytes = 8 << 16});
    EXPECT_EQ(status.code(), Code::bad_input);
    EXPECT_EQ(status.message(), refusal.sentence);
    EXPECT_TRUE(out == constant({1, 10, 2, 6}, 7));
  }
}

TEST(LinearRefusals, DecodeNeedsItsSums) {
  const Tensor q = random_tensor({1, 1, 2, 8}, 1), state = random_tensor({1, 2, 8, 8}, 2);
  Tensor out(Dtype::f64, {1, 1, 2, 8});
  LinearDecodeArgs args;
  args.q = args.k = args.v = q.view();
  args.state = state.view();
  args.map = FeatureMap::elu1;
  args.normalize = true;
  const Status status = linear_decode(args, {out.view()}, {});
  EXPECT_EQ(status.message(), "linear_decode: z is missing; normalize needs it");
}

}  // namespace
}  // namespace linnet
