// h3: agreement with the reference and the relations of the page: one token, no key filter, retention, linearity, time shift,
// prefill then decode, accuracy over thousands of tokens at the published initial values, refusals.
#include "h3.h"

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

Tensors mixer(int64_t B, int64_t T, int64_t C, int64_t H, int64_t R, int64_t M, Dtype dtype = Dtype::f64) {
  return {{"q", random_tensor({B, T, C}, 1, dtype)},  {"k", random_tensor({B, T, C}, 2, dtype)},
          {"v", random_tensor({B, T, C}, 3, dtype)},  {"sb", random_tensor({C, R}, 4, dtype)},
          {"sc", random_tensor({C, R}, 5, dtype)},    {"sd", random_tensor({C}, 6, dtype)},
          {"log_dt", random_tensor({H}, 7, dtype)},   {"log_neg_re", random_tensor({H, M}, 8, dtype)},
          {"imag", random_tensor({H, M}, 9, dtype)},  {"b", random_tensor({H, M, 2}, 10, dtype)},
          {"c", random_tensor({H, M, 2}, 11, dtype)}, {"d", random_tensor({H}, 12, dtype)}};
}
// The published initial values: memories of tens to thousands of tokens, phases up to 31 pi.
Tensors published(int64_t T, int64_t C, Dtype dtype) {
  Tensors x = mixer(1, T, C, C, 64, 32, dtype);
  for (int64_t c = 0; c < C; ++c) {
    for (int64_t i = 0; i < 64; ++i) {
      x["sb"].set(c * 64 + i, i == 0 ? 1 : 0);
      x["sc"].set(c * 64 + i, x["sc"].get(c * 64 + i) / 8);
    }
    x["log_dt"].set(c, std::log(0.001) + static_cast<double>(c) / static_cast<double>(C) * std::log(100));
    for (int64_t m = 0; m < 32; ++m) {
      x["log_neg_re"].set(c * 32 + m, std::log(0.5));
      x["imag"].set(c * 32 + m, 3.14159265358979 * static_cast<double>(m));
      x["b"].set((c * 32 + m) * 2, 1);
      x["b"].set((c * 32 + m) * 2 + 1, 0);
    }
  }
  return x;
}

TEST(H3, AgreesWithTheReference) {
  check::expect_agreement({
      "h3 B=2 T=1 C=4 R=3 H=4 M=2 pass=bwd",
      "h3 B=1 T=64 C=17 R=8 H=17 M=5 pass=bwd threads=3",
      "h3 B=1 T=65 C=6 R=5 H=3 M=3 disc=zoh pass=bwd with=initial_state_shift,initial_state_diag strided=1",
      "h3 B=1 T=1700 C=4 R=9 H=2 M=4 pass=bwd with=initial_state_shift,initial_state_diag",
      "h3 B=1 T=150 C=4 R=70 H=4 M=2 N=4 pass=bwd with=cu_seqlens,initial_state_shift,initial_state_diag",
      "h3 B=2 T=0 C=4 R=3 H=2 M=2 pass=bwd with=initial_state_shift,initial_state_diag",
      "h3 B=3 T=37 C=18 R=3 H=18 M=2 form=fft pass=bwd threads=3 skip=state_shift,state_diag,dstate_shift,dstate_diag",
      "h3 B=1 T=1 C=2 R=3 H=1 M=2 form=fft disc=zoh pass=bwd skip=state_shift,state_diag,dstate_shift,dstate_diag",
      "h3 B=2 T=300 C=10 R=9 H=2 M=5 form=fft pass=bwd strided=1 skip=state_shift,state_diag,dstate_shift,dstate_diag",
      "h3 B=2 T=512 C=6 R=17 H=3 M=3 form=fft pass=bwd skip=state_shift,state_diag,dstate_shift,dstate_diag",
      "h3_decode B=2 T=2 C=40 R=64 H=40 M=32 threads=2",
      "h3_decode B=3 T=1 C=6 R=9 H=2 M=5",
      "h3_decode B=3 T=1 C=70 R=5 H=70 M=3",  // several heads in a task, several groups of rows
      "h3_decode B=4 T=1 C=140 R=5 H=70 M=9",
      "h3_decode B=7 T=1 C=530 R=3 H=530 M=2 threads=2",
      "h3_decode B=1 T=1 C=6 R=3 H=2 M=5 disc=zoh strided=1",
  });
}

TEST(H3, PrefillThenDecodeIsOneRun) {
  Tensors whole = mixer(2, 80, 6, 3, 5, 3);
  ASSERT_EQ(invoke("h3", {}, &whole), "");
  Tensors part = whole;
  for (const char* name : {"q", "k", "v"}) part[name] = tokens(whole[name], 0, 70);
  ASSERT_EQ(invoke("h3", {}, &part), "");
  Tensors step = part;
  for (int64_t t = 70; t < 80; ++t) {
    for (const char* name : {"q", "k", "v"}) step[name] = tokens(whole[name], t, t + 1);
    ASSERT_EQ(invoke("h3_decode", {}, &step), "");
    EXPECT_LE(rms_error(step["out"], tokens(whole["out"], t, t + 1)), 1e-12) << t;
  }
  EXPECT_LE(rms_error(step["state_diag"], whole["state_diag"]), 1e-12);
  EXPECT_LE(rms_error(step["state_shift"], whole["state_shift"]), 1e-12);
}

Tensor out_alone(const Tensors& x, H3Form form) {
  const auto view = [&](const char* name) { return x.at(name).view(); };
  H3Args args;
  args.q = view("q"), args.k = view("k"), args.v = view("v");
  args.sb = view("sb"), args.sc = view("sc"), args.sd = view("sd"), args.log_dt = view("log_dt");
  args.log_neg_re = view("log_neg_re"), args.imag = view("imag"), args.b = view("b"), args.c = view("c"), args.d = view("d");
  args.form = form;
  Tensor y(args.q.dtype, x.at("q").sizes);
  H3Out out;
  out.out = y.view();
  Context context;
  context.workspace_bytes = h3_workspace(args, Pass::forward, context);
  std::vector<double> memory(static_cast<size_t>(context.workspace_bytes / 8 + 1), std::nan(""));
  context.workspace = memory.data();
  EXPECT_EQ(h3(args, out, context).message(), "");
  return y;
}

// Both forms of the long filter, at lengths around a power of two; what is not a number reaches no earlier token.
TEST(H3, TransformsAreChunks) {
  for (const int64_t T : {255, 256, 257, 1000}) {
    Tensors x = published(T, 18, Dtype::f64);
    const Tensor chunked = out_alone(x, H3Form::chunk), transformed = out_alone(x, H3Form::fft);
    EXPECT_LE(rms_error(transformed, chunked), 1e-12) << T;
    EXPECT_NE(transformed, chunked) << T;
    x["v"].set((T - 5) * 18 + 3, std::nan(""));
    const Tensor broken = out_alone(x, H3Form::fft);
    for (int64_t i = 0; i < T * 18; ++i) EXPECT_EQ(std::isnan(broken.get(i)), i / 18 >= T - 5 && i % 18 == 3) << i;
  }
}

// T = 1: y = q (kd_0 + d) (ks_0 + sd) k v
TEST(H3, OneToken) {
  Tensors x = mixer(1, 1, 4, 4, 3, 2);
  ASSERT_EQ(invoke("h3", {}, &x), "");
  for (int64_t c = 0; c < 4; ++c) {
    const double want = x["q"].get(c) * (x["taps_diag"].get(c) + x["d"].get(c)) * (x["taps_shift"].get(c) + x["sd"].get(c)) *
                        x["k"].get(c) * x["v"].get(c);
    EXPECT_NEAR(x["out"].get(c), want, 1e-13 * std::fabs(want) + 1e-15);
  }
}

// No key filter, M = 1, imag = 0, zoh, 2 c bd = 1, d = 0: retention with decay exp(A dt) per head.
TEST(H3, IsRetentionWithoutFilters) {
  Tensors x = mixer(1, 90, 6, 2, 2, 1);
  Tensors r;
  for (int64_t i = 0; i < 12; ++i) x["sb"].set(i, i % 2 == 0), x["sc"].set(i, 0);
  for (int64_t i = 0; i < 6; ++i) x["sd"].set(i, 1);
  Tensor g = constant({2}, 0);
  for (int64_t h = 0; h < 2; ++h) {
    x["imag"].set(h, 0);
    x["d"].set(h, 0);
    const double A = -std::exp(x["log_neg_re"].get(h)), dt = std::exp(x["log_dt"].get(h));
    g.set(h, A * dt);
    x["b"].set(2 * h, A / std::expm1(A * dt));
    x["b"].set(2 * h + 1, 0);
    x["c"].set(2 * h, 0.5);
    x["c"].set(2 * h + 1, 0);
  }
  ASSERT_EQ(invoke("h3", {{"disc", "zoh"}}, &x), "");
  for (const char* name : {"q", "k", "v"}) {
    r[name] = x[name];
    r[name].sizes = {1, 90, 2, 3};
  }
  r["g_head"] = g;
  ASSERT_EQ(invoke("decay", {{"scale", "1"}}, &r), "");
  for (int64_t t = 0; t < 90; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t slot = 0; slot < 3; ++slot) {
        EXPECT_NEAR(x["out"].get(t * 6 + slot * 2 + h), r["out"].get((t * 2 + h) * 3 + slot), 1e-12);
      }
    }
  }
}

TEST(H3, DelayedInputsGiveADelayedOutput) {
  Tensors x = mixer(1, 100, 4, 2, 5, 3);
  Tensors y = x;
  for (const char* name : {"q", "k", "v"}) {
    for (int64_t i = 0; i < 400; ++i) y[name].set(i, i < 28 ? 0 : x[name].get(i - 28));
  }
  ASSERT_EQ(invoke("h3", {}, &x), "");
  ASSERT_EQ(invoke("h3", {}, &y), "");
  EXPECT_LE(rms_error(tokens(y["out"], 7, 100), tokens(x["out"], 0, 93)), 1e-12);
}

// f32 over 4000 tokens with the published initial values: phases and memories that f32 powers would lose (the page: 5e-5).
TEST(H3, LongMemoriesKeepTheirDigits) {
  Tensors x = published(4000, 4, Dtype::f32);
  Tensors reference = x;
  for (auto& [name, tensor] : reference) {
    Tensor wide(Dtype::f64, tensor.sizes);
    for (int64_t i = 0; i < tensor.count(); ++i) wide.set(i, tensor.get(i));
    tensor = wide;
  }
  ASSERT_EQ(invoke("h3", {}, &x), "");
  ASSERT_EQ(invoke("h3", {}, &reference, "ref"), "");
  const double gate = rms_gate(Dtype::f32, Pass::forward, Against::reference, false, 0);
  EXPECT_LE(rms_error(x["out"], reference["out"]), gate);
  EXPECT_LE(rms_error(x["taps_diag"], reference["taps_diag"]), gate);
  EXPECT_LE(rms_error(x["state_diag"], reference["state_diag"]), gate);
}

TEST(H3, Refusals) {
  Tensors x = mixer(1, 4, 6, 3, 2, 2);
  EXPECT_EQ(invoke("h3", {{"heads", "2"}}, &x), "h3: heads is 2, expected 3 (the heads of log_dt)");
  EXPECT_EQ(invoke("h3", {{"head_dim", "3"}}, &x),
            "h3: head_dim is 3, expected 2 (the channels of q over the heads of log_dt)");
  x["log_dt"] = random_tensor({4}, 1);
  EXPECT_NE(invoke("h3", {}, &x), "");
}

}  // namespace
}  // namespace linnet
