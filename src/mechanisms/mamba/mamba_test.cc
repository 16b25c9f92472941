// mamba: agreement with the reference, the relations and edge cases of the page: prefill then decode, SSD as the recurrence, S6
// as SSD, steps from 1e-4 to 1e3, refusals.
#include <cmath>

#include "check/agreement.h"
#include "check/named.h"
#include "core/tolerance.h"

namespace linnet {
namespace {

using check::constant;
using check::invoke;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::tokens;

Tensor negative(std::vector<int64_t> sizes, uint64_t seed, Dtype dtype = Dtype::f64) {
  Tensor t = random_tensor(std::move(sizes), seed, dtype);
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, -std::fabs(t.get(i)) - 0.1);
  return t;
}
Tensors scan(int64_t B, int64_t T, int64_t E, int64_t K, Dtype dtype = Dtype::f64) {
  const Dtype wide = dtype == Dtype::f64 ? dtype : Dtype::f32;
  return {{"x", random_tensor({B, T, E}, 1, dtype)}, {"dt", random_tensor({B, T, E}, 2, dtype)},
          {"A", negative({E, K}, 3, wide)},          {"B", random_tensor({B, T, K}, 4, dtype)},
          {"C", random_tensor({B, T, K}, 5, dtype)}, {"D", random_tensor({E}, 6, wide)},
          {"z", random_tensor({B, T, E}, 7, dtype)}, {"dt_bias", random_tensor({E}, 8, wide)}};
}
Tensors ssd(int64_t B, int64_t T, int64_t H, int64_t V, int64_t G, int64_t K) {
  return {{"x", random_tensor({B, T, H, V}, 1)}, {"dt", random_tensor({B, T, H}, 2)},   {"A", negative({H}, 3)},
          {"B", random_tensor({B, T, G, K}, 4)}, {"C", random_tensor({B, T, G, K}, 5)}, {"D", random_tensor({H}, 6)},
          {"z", random_tensor({B, T, H, V}, 7)}, {"dt_bias", random_tensor({H}, 8)}};
}
bool finite(const Tensor& t) {
  for (int64_t i = 0; i < t.count(); ++i) {
    if (!std::isfinite(t.get(i))) return false;
  }
  return true;
}

TEST(Mamba, AgreesWithTheReference) {
  check::expect_agreement({
      "mamba_selective_scan B=2 T=1 E=5 G=1 K=16 pass=bwd with=D,z,dt_bias,initial_state",
      "mamba_selective_scan B=1 T=97 E=70 G=2 K=16 pass=bwd with=D,z,dt_bias threads=3",
      "mamba_selective_scan B=1 T=100 E=16 G=4 K=5 N=4 pass=bwd with=cu_seqlens,initial_state,D strided=1",
      "mamba_selective_scan B=2 T=33 E=6 G=1 K=33 other=B,C pass=bwd with=dt_bias",
      "mamba_selective_scan B=2 T=0 E=6 G=1 K=4 pass=bwd with=initial_state",
      "mamba_selective_scan_decode B=3 T=2 E=70 G=1 K=16 with=D,z,dt_bias threads=2",
      "mamba_selective_scan_decode B=1 T=1 E=6 G=2 K=5 strided=1",
      "mamba_selective_scan_decode B=8 T=1 E=1100 G=1 K=16 with=D,z,dt_bias threads=2",  // long blocks
      "mamba_ssd B=2 T=1 H=2 V=8 G=1 K=16 pass=bwd with=D,z,dt_bias,initial_state",
      "mamba_ssd B=1 T=97 H=4 V=33 G=2 K=16 pass=bwd with=D,z,dt_bias threads=3",
      "mamba_ssd B=1 T=100 H=4 V=16 G=4 K=20 N=4 dt_min=0.5 dt_max=1 other=D pass=bwd with=cu_seqlens,initial_state,D "
      "strided=1",
      "mamba_ssd B=1 T=700 H=4 V=33 G=1 K=16 pass=bwd with=D,dt_bias,initial_state threads=3",  // heads side by side
      "mamba_ssd B=1 T=1000 H=4 V=33 G=1 K=16 pass=bwd with=D,dt_bias threads=7",               // their columns, too
      "mamba_ssd B=2 T=0 H=2 V=4 G=1 K=4 pass=bwd with=initial_state",
      "mamba_ssd_decode B=3 T=2 H=4 V=40 G=2 K=16 with=D,z,dt_bias threads=2",
      "mamba_ssd_decode B=1 T=1 H=2 V=130 G=1 K=5 other=D with=D strided=1",
  });
}

TEST(Mamba, PrefillThenDecodeIsOneRun) {
  for (const std::string op : {"mamba_selective_scan", "mamba_ssd"}) {
    Tensors whole = op == "mamba_ssd" ? ssd(2, 40, 4, 6, 2, 5) : scan(2, 40, 20, 5);
    ASSERT_EQ(invoke(op, {}, &whole), "");
    Tensors part = whole;
    for (const char* name : {"x", "dt", "B", "C", "z"}) part[name] = tokens(whole[name], 0, 33);
    ASSERT_EQ(invoke(op, {}, &part), "");
    Tensors step = whole;
    step["state"] = part["final_state"];
    for (int64_t t = 33; t < 40; ++t) {
      for (const char* name : {"x", "dt", "B", "C", "z"}) step[name] = tokens(whole[name], t, t + 1);
      ASSERT_EQ(invoke(op + "_decode", {}, &step), "");
      EXPECT_LE(rms_error(step["out"], tokens(whole["out"], t, t + 1)), 1e-13) << op << t;
    }
    EXPECT_LE(rms_error(step["state"], whole["final_state"]), 1e-13) << op;
  }
}

// q = C, k = B, v = delta x, g = delta A, scale 1
TEST(Mamba, SsdIsTheRecurrence) {
  Tensors s = ssd(1, 50, 2, 6, 1, 5);
  s.erase("D");
  s.erase("z");
  ASSERT_EQ(invoke("mamba_ssd", {}, &s), "");
  Tensors r = {{"q", s["C"]}, {"k", s["B"]}, {"v", s["x"]}, {"g", s["dt"]}};
  for (int64_t i = 0; i < s["dt"].count(); ++i) {
    const double delta = std::log1p(std::exp(s["dt"].get(i) + s["dt_bias"].get(i % 2)));
    r["g"].set(i, delta * s["A"].get(i % 2));
    for (int64_t j = 0; j < 6; ++j) r["v"].set(i * 6 + j, delta * s["x"].get(i * 6 + j));
  }
  ASSERT_EQ(invoke("recurrence", {{"scale", "1"}}, &r), "");
  EXPECT_LE(rms_error(s["out"], r["out"]), 1e-13);
  EXPECT_LE(rms_error(s["final_state"], r["final_state"]), 1e-13);
}

// SSD with one channel per head is S6 with one rate for all state elements of a channel.
TEST(Mamba, SsdOfWidthOneIsTheScan) {
  Tensors s = ssd(1, 30, 4, 1, 1, 3);
  ASSERT_EQ(invoke("mamba_ssd", {}, &s), "");
  Tensors c = s;
  for (const char* name : {"x", "z"}) c[name].sizes = {1, 30, 4};
  for (const char* name : {"B", "C"}) c[name].sizes = {1, 30, 3};
  c["A"] = constant({4, 3}, 0);
  for (int64_t i = 0; i < 12; ++i) c["A"].set(i, s["A"].get(i / 3));
  ASSERT_EQ(invoke("mamba_selective_scan", {}, &c), "");
  Tensor out = c["out"];
  out.sizes = s["out"].sizes;
  EXPECT_LE(rms_error(out, s["out"]), 1e-13);
}

// Small steps: the rounding of a decay near 1 must not add up (the page: 6e-7 and 1.2e-6 with the bracket form, 3e-5 without).
TEST(Mamba, SmallStepsDoNotDrift) {
  Tensors x = scan(1, 2000, 16, 16, Dtype::f32);
  for (int64_t i = 0; i < x["dt"].count(); ++i) x["dt"].set(i, -9.2);
  x.erase("dt_bias");
  x.erase("z");
  x.erase("D");
  Tensors reference = x;
  for (auto& [name, tensor] : reference) {
    Tensor wide(Dtype::f64, tensor.sizes);
    for (int64_t i = 0; i < tensor.count(); ++i) wide.set(i, tensor.get(i));
    tensor = wide;
  }
  ASSERT_EQ(invoke("mamba_selective_scan", {}, &x), "");
  ASSERT_EQ(invoke("mamba_selective_scan", {}, &reference, "ref"), "");
  EXPECT_LE(rms_error(x["out"], reference["out"]), rms_gate(Dtype::f32, Pass::forward, Against::reference, false, 0));
  EXPECT_LE(rms_error(x["final_state"], reference["final_state"]), kLongChunked);
}

TEST(Mamba, ExtremeStepsStayFinite) {
  for (const double dt : {-1e4, 1e4}) {
    Tensors x = scan(1, 40, 8, 4, Dtype::f32);
    for (int64_t i = 0; i < x["dt"].count(); ++i) x["dt"].set(i, i % 3 == 0 ? dt : x["dt"].get(i));
    ASSERT_EQ(invoke("mamba_selective_scan", {}, &x), "");
    x["dout"] = random_tensor({1, 40, 8}, 9, Dtype::f32);
    ASSERT_EQ(invoke("mamba_selective_scan", {}, &x), "");
    for (const char* name : {"out", "final_state", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias"}) {
      EXPECT_TRUE(finite(x[name])) << name << " " << dt;
    }
  }
}

TEST(Mamba, Refusals) {
  Tensors x = scan(1, 4, 6, 4);
  x["C"] = random_tensor({1, 4, 1, 4}, 1);
  EXPECT_EQ(invoke("mamba_selective_scan", {}, &x), "mamba_selective_scan: C has rank 4, expected 3 (same as B)");
  x = scan(1, 4, 6, 4);
  x["initial_state"] = random_tensor({1, 6, 4}, 1, Dtype::f32);
  EXPECT_EQ(invoke("mamba_selective_scan", {}, &x), "mamba_selective_scan: initial_state is f32, expected f64");
  Tensors s = ssd(1, 4, 4, 2, 2, 3);
  EXPECT_EQ(invoke("mamba_ssd", {{"dt_min", "2"}, {"dt_max", "1"}}, &s).rfind("mamba_ssd: dt_max is 1", 0), 0U);
  s = ssd(1, 4, 0, 2, 2, 3);
  EXPECT_EQ(invoke("mamba_ssd", {}, &s), "mamba_ssd: x has 0 heads, expected at least one for each of B's 2 groups");
}

}  // namespace
}  // namespace linnet
