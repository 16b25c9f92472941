// softmax: agreement with the reference in every implementation and dtype, the reference itself by finite differences, the
// relations and policies of the mechanism's page, bit-equality, refusals.
#include "softmax.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check/agreement.h"
#include "core/half.h"
#include "core/op.h"
#include "core/tolerance.h"

namespace linnet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- agreement with the reference -------------------------------------------------------------------------------------------

const char* const kLines[] = {
    "softmax B=1 Tq=1 Tk=1 H=1 Hkv=1 K=8 V=8 pass=bwd seed=2",
    "softmax B=1 Tq=5 Tk=2 H=1 Hkv=1 K=8 V=8 causal=1 pass=bwd",
    "softmax B=2 Tq=63 Tk=64 H=2 Hkv=2 K=16 V=16 causal=1 pass=bwd",
    "softmax B=1 Tq=64 Tk=64 H=2 Hkv=1 K=32 V=48 pass=bwd",
    "softmax B=2 Tq=65 Tk=130 H=3 Hkv=3 K=20 V=13 causal=1 strided=1 pass=bwd",
    "softmax B=1 Tq=200 Tk=131 H=6 Hkv=2 K=64 V=64 causal=1 threads=3 pass=bwd",
    "softmax B=1 Tq=257 Tk=257 H=2 Hkv=2 K=64 V=64 causal=1 pass=bwd",
    "softmax B=1 Tq=40 Tk=67 H=1 Hkv=1 K=1 V=1 pass=bwd",
    "softmax B=1 Tq=130 Tk=67 H=1 Hkv=1 K=130 V=200 threads=2 pass=bwd",
    "softmax B=1 Tq=150 Tk=300 H=4 Hkv=2 K=16 V=24 window=40,17 prefix=5 values=garbage pass=bwd",
    "softmax B=1 Tq=300 Tk=300 H=2 Hkv=1 K=16 V=16 causal=1 window=33,-1 prefix=70 pass=bwd",
    "softmax B=1 Tq=200 Tk=200 H=2 Hkv=2 K=8 V=8 window=-1,9 pass=bwd",
    "softmax B=1 Tq=190 Tk=150 H=2 Hkv=2 K=8 V=8 window=20,20 pass=bwd",
    "softmax B=1 Tq=200 Tk=220 H=2 Hkv=2 K=8 V=8 causal=1 chunk=50 pass=bwd",
    "softmax B=1 Tq=220 Tk=200 H=2 Hkv=2 K=8 V=8 window=30,-1 prefix=60 chunk=64 pass=bwd",
    "softmax B=2 Tq=70 Tk=90 H=2 Hkv=1 K=16 V=16 softcap=3 pass=bwd",
    "softmax B=2 Tq=70 Tk=90 H=2 Hkv=2 K=16 V=16 causal=1 softcap=2 with=bias,sinks values=masked pass=bwd",
    "softmax B=2 Tq=70 Tk=90 H=4 Hkv=2 K=16 V=16 with=bias,key_len values=masked,garbage strided=1 pass=bwd seed=3",
    "softmax B=3 Tq=40 Tk=100 H=2 Hkv=2 K=16 V=16 causal=1 with=sinks,key_len values=garbage pass=bwd",
    "softmax B=1 Tq=100 Tk=120 H=4 Hkv=2 K=16 V=16 N=4 causal=1 with=cu_seqlens_q,cu_seqlens_k pass=bwd",
    "softmax B=1 Tq=100 Tk=120 H=2 Hkv=2 K=16 V=16 N=3 window=12,3 with=bias,sinks,cu_seqlens_q,cu_seqlens_k threads=2 "
    "pass=bwd",
    "softmax B=1 Tq=80 Tk=80 H=2 Hkv=2 K=16 V=16 scale=0 pass=bwd",
    "softmax B=1 Tq=80 Tk=80 H=2 Hkv=2 K=16 V=16 causal=1 scale=-0.4 pass=bwd",
    "softmax B=1 Tq=100 Tk=100 H=2 Hkv=2 K=16 V=16 causal=1 scale=1000 pass=bwd",
    "softmax B=1 Tq=3 Tk=2500 H=2 Hkv=2 K=24 V=40 causal=1 with=sinks threads=2 pass=bwd",
    "softmax B=2 Tq=1 Tk=1100 H=4 Hkv=1 K=128 V=128 with=key_len pass=bwd",
    "softmax B=1 Tq=2 Tk=2100 H=8 Hkv=2 K=16 V=16 window=1500,3 prefix=3 values=garbage pass=bwd",
    "softmax B=1 Tq=1 Tk=1500 H=2 Hkv=2 K=16 V=16 window=100,-1 prefix=2 softcap=5 with=bias pass=bwd",
    "softmax B=0 Tq=4 Tk=6 H=2 Hkv=2 K=8 V=8 pass=bwd",
    "softmax B=0 Tq=4 Tk=6 H=2 Hkv=2 K=8 V=8 with=bias pass=bwd",
    "softmax B=2 Tq=0 Tk=6 H=2 Hkv=2 K=8 V=8 with=sinks pass=bwd",
    "softmax B=2 Tq=5 Tk=0 H=2 Hkv=2 K=8 V=8 pass=bwd",
    "softmax B=2 Tq=5 Tk=0 H=2 Hkv=2 K=8 V=8 causal=1 with=sinks pass=bwd",
    "softmax_decode B=2 T=1 capacity=70 H=4 Hkv=4 K=16 V=24 with=cache_start values=garbage seed=2",
    "softmax_decode B=3 T=3 capacity=1300 H=8 Hkv=2 K=32 V=32 window=100,-1 prefix=4 with=sinks threads=2",
    "softmax_decode B=1 T=90 capacity=400 H=2 Hkv=1 K=16 V=16 softcap=4 seed=4",
    "softmax_decode B=2 T=0 capacity=10 H=2 Hkv=2 K=8 V=8",
    "softmax_paged B=2 Tq=1 P=40 page=16 pages=20 H=4 Hkv=2 K=32 V=32 values=garbage",
    "softmax_paged B=2 Tq=70 P=200 page=1 pages=100 H=2 Hkv=2 K=16 V=16 causal=1 with=sinks",
    "softmax_paged B=1 Tq=2 P=9 page=300 pages=7 H=2 Hkv=2 K=16 V=16 causal=1 window=700,-1 prefix=9 threads=2",
    "softmax_merge P=5 B=2 T=7 H=3 V=20 pass=bwd",
    "softmax_merge P=1 B=1 T=1 H=1 V=1 pass=bwd",
};

TEST(Softmax, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

// ---- calls on doubles and floats, for the relations -------------------------------------------------------------------------

struct Tensor {
  std::vector<int64_t> sizes;
  Dtype dtype = Dtype::none;
  std::vector<double> bytes;  // aligned storage for any dtype

  Tensor() = default;
  Tensor(Dtype type, std::vector<int64_t> shape) : sizes(std::move(shape)), dtype(type) {
    bytes.assign(static_cast<size_t>(count() * dtype_size(type) / 8 + 1), 0);
  }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t s : sizes) n *= s;
    return n;
  }
  View view() const {
    return dtype == Dtype::none ? View() : View::dense(bytes.data(), dtype, sizes.data(), static_cast<int>(sizes.size()));
  }
  double get(int64_t i) const { return load_f64(bytes.data(), dtype, i); }
  void set(int64_t i, double x) {
    if (dtype == Dtype::i64) {
      reinterpret_cast<int64_t*>(bytes.data())[i] = static_cast<int64_t>(x);
    } else {
      store_f64(bytes.data(), dtype, i, x);
    }
  }
  // The index of (b, t, h, c) in a [B, T, H, D] tensor.
  int64_t at(int64_t b, int64_t t, int64_t h = 0, int64_t c = 0) const {
    const int64_t D = sizes.size() == 4 ? sizes[3] : 1;
    return ((b * sizes[1] + t) * sizes[2] + h) * D + c;
  }
  bool operator==(const Tensor& o) const {
    if (sizes != o.sizes || dtype != o.dtype) return false;
    for (int64_t i = 0; i < count(); ++i) {
      if (!(get(i) == o.get(i) || (std::isnan(get(i)) && std::isnan(o.get(i))))) return false;
    }
    return true;
  }
};

Tensor random_tensor(std::vector<int64_t> sizes, uint64_t seed, Dtype dtype = Dtype::f64) {
  Tensor t(dtype, std::move(sizes));
  std::mt19937_64 random(seed);
  std::normal_distribution<double> draw;
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, draw(random));
  return t;
}
Tensor constant(std::vector<int64_t> sizes, double x, Dtype dtype = Dtype::f64) {
  Tensor t(dtype, std::move(sizes));
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, x);
  return t;
}
Tensor integers(const std::vector<int64_t>& values) {
  Tensor t(Dtype::i64, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
  return t;
}
// Tokens [begin, end) of a [B, T, H, D] tensor.
Tensor tokens(const Tensor& x, int64_t begin, int64_t end) {
  std::vector<int64_t> sizes = x.sizes;
  sizes[1] = end - begin;
  Tensor part(x.dtype, sizes);
  const int64_t row = x.count() / (x.sizes[0] * x.sizes[1]);
  for (int64_t b = 0; b < sizes[0]; ++b) {
    for (int64_t i = 0; i < sizes[1] * row; ++i) part.set(b * sizes[1] * row + i, x.get((b * x.sizes[1] + begin) * row + i));
  }
  return part;
}
Tensor batch_row(const Tensor& x, int64_t b) {
  std::vector<int64_t> sizes = x.sizes;
  sizes[0] = 1;
  Tensor part(x.dtype, sizes);
  for (int64_t i = 0; i < part.count(); ++i) part.set(i, x.get(b * part.count() + i));
  return part;
}

struct Attention {
  Tensor q, k, v, bias, sinks, key_len, cu_q, cu_k, dout, dlse;
  Tensor out, lse, dq, dk, dv, dbias, dsinks;
  SoftmaxArgs options;

  Attention(int64_t B, int64_t Tq, int64_t Tk, int64_t H, int64_t Hkv, int64_t D, uint64_t seed, Dtype dtype = Dtype::f64) {
    q = random_tensor({B, Tq, H, D}, seed, dtype);
    k = random_tensor({B, Tk, Hkv, D}, seed + 1, dtype);
    v = random_tensor({B, Tk, Hkv, D}, seed + 2, dtype);
    dout = random_tensor({B, Tq, H, D}, seed + 3, dtype);
  }
  SoftmaxArgs args() const {
    SoftmaxArgs a = options;
    a.q = q.view();
    a.k = k.view();
    a.v = v.view();
    a.bias = bias.view();
    a.sinks = sinks.view();
    a.key_len = key_len.view();
    a.cu_seqlens_q = cu_q.view();
    a.cu_seqlens_k = cu_k.view();
    return a;
  }
  Attention& forward(const char* impl = nullptr, Executor* executor = nullptr) {
    const Dtype wide = q.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    out = Tensor(q.dtype, {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]});
    lse = Tensor(wide, {q.sizes[0], q.sizes[1], q.sizes[2]});
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::forward, &context);
    const Status status = softmax(args(), {out.view(), lse.view()}, context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  Attention& backward(const char* impl = nullptr, Executor* executor = nullptr) {
    dq = Tensor(q.dtype, q.sizes);
    dk = Tensor(k.dtype, k.sizes);
    dv = Tensor(v.dtype, v.sizes);
    dbias = bias.dtype == Dtype::none ? Tensor() : Tensor(bias.dtype, bias.sizes);
    dsinks = sinks.dtype == Dtype::none ? Tensor() : Tensor(sinks.dtype, sinks.sizes);
    Context context{.executor = executor, .impl = impl};
    const std::vector<double> memory = workspace(Pass::backward, &context);
    const Status status =
        softmax_backward(args(), {out.view(), lse.view()},
                         {dout.view(), dlse.view(), dq.view(), dk.view(), dv.view(), dbias.view(), dsinks.view()}, context);
    EXPECT_TRUE(status.ok()) << status.message();
    return *this;
  }
  std::vector<double> workspace(Pass pass, Context* context) const {
    context->workspace_bytes = softmax_workspace(args(), pass, *context);
    std::vector<double> memory(static_cast<size_t>(context->workspace_bytes / 8 + 1), kNan);
    context->workspace = memory.data();
    return memory;
  }
};

void expect_near(const Tensor& got, const Tensor& want, double tolerance, const char* what) {
  ASSERT_EQ(got.count(), want.count()) << what;
  double largest = 0;
  for (int64_t i = 0; i < want.count(); ++i) {
    if (std::isfinite(want.get(i))) largest = std::max(largest, std::fabs(want.get(i)));
  }
  for (int64_t i = 0; i < want.count(); ++i) {
    const double x = got.get(i), y = want.get(i);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    ASSERT_LE(std::fabs(x - y), tolerance * std::max(largest, 1e-300)) << what << " element " << i << ": " << x << ", " << y;
  }
}
bool finite(const Tensor& t) {
  for (int64_t i = 0; i < t.count(); ++i) {
    if (!std::isfinite(t.get(i))) return false;
  }
  return true;
}
constexpr double kClose = 1e-12;

// ---- the reference by finite differences ------------------------------------------------------------------------------------

TEST(SoftmaxReference, GradientsAgreeWithDifferences) {
  Attention a(2, 5, 7, 4, 2, 3, 1);
  a.options = {.causal = true, .window = {3, -1}, .prefix = 1, .softcap = 1.5};
  a.bias = random_tensor({4, 1, 7}, 9);
  a.sinks = random_tensor({4}, 10);
  a.key_len = integers({7, 6});
  a.dlse = random_tensor({2, 5, 4}, 11);
  a.forward("ref").backward("ref");
  const auto loss = [](Attention b) {
    b.forward("ref");
    double sum = 0;
    for (int64_t i = 0; i < b.out.count(); ++i) sum += b.out.get(i) * b.dout.get(i);
    for (int64_t i = 0; i < b.lse.count(); ++i) {
      if (std::isfinite(b.lse.get(i))) sum += b.lse.get(i) * b.dlse.get(i);
    }
    return sum;
  };
  struct Pair {
    Tensor Attention::*input;
    Tensor Attention::*gradient;
    const char* name;
  };
  for (const Pair& pair : {Pair{&Attention::q, &Attention::dq, "dq"}, Pair{&Attention::k, &Attention::dk, "dk"},
                           Pair{&Attention::v, &Attention::dv, "dv"}, Pair{&Attention::bias, &Attention::dbias, "dbias"},
                           Pair{&Attention::sinks, &Attention::dsinks, "dsinks"}}) {
    const int64_t count = (a.*pair.input).count();
    for (int64_t i = 0; i < count; i += std::max<int64_t>(1, count / 24)) {
      constexpr double h = 1e-3;  // fourth order: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h
      const auto at = [&](double step) {
        Attention b = a;
        (b.*pair.input).set(i, (a.*pair.input).get(i) + step);
        return loss(b);
      };
      const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      EXPECT_NEAR((a.*pair.gradient).get(i), difference, 1e-9 * (1 + std::fabs(difference))) << pair.name << " " << i;
    }
  }
}

// ---- relations --------------------------------------------------------------------------------------------------------------

TEST(SoftmaxRelations, MasksThatMeanTheSame) {
  Attention a(1, 150, 150, 2, 1, 16, 20);
  Attention causal = a, window = a, full = a, wide = a, own = a;
  causal.options.causal = true;
  window.options.window = {-1, 0};
  EXPECT_TRUE(causal.forward().backward().out == window.forward().backward().out);
  EXPECT_TRUE(causal.dk == window.dk);
  wide.options.window = {150, 150};
  EXPECT_TRUE(full.forward().out == wide.forward().out);
  own.options.window = {0, 0};
  own.forward();
  for (int64_t t = 0; t < 150; ++t) {
    for (int64_t c = 0; c < 16; ++c) ASSERT_EQ(own.out.get(own.out.at(0, t, 1, c)), own.v.get(own.v.at(0, t, 0, c)));
  }
}

TEST(SoftmaxRelations, PackedSequencesAreSeparateCalls) {
  Attention a(1, 180, 200, 4, 2, 16, 30);
  const std::vector<int64_t> q = {0, 0, 70, 100, 180}, k = {0, 20, 90, 90, 200};
  a.cu_q = integers(q);
  a.cu_k = integers(k);
  a.options = {.causal = true, .window = {50, -1}, .prefix = 3};
  a.forward().backward();
  for (size_t s = 0; s + 1 < q.size(); ++s) {
    Attention one = a;
    one.cu_q = one.cu_k = Tensor();
    one.q = tokens(a.q, q[s], q[s + 1]);
    one.dout = tokens(a.dout, q[s], q[s + 1]);
    one.k = tokens(a.k, k[s], k[s + 1]);
    one.v = tokens(a.v, k[s], k[s + 1]);
    one.forward().backward();
    EXPECT_TRUE(one.out == tokens(a.out, q[s], q[s + 1])) << s;
    EXPECT_TRUE(one.lse == tokens(a.lse, q[s], q[s + 1])) << s;
    EXPECT_TRUE(one.dq == tokens(a.dq, q[s], q[s + 1])) << s;
    EXPECT_TRUE(one.dk == tokens(a.dk, k[s], k[s + 1])) << s;
    EXPECT_TRUE(one.dv == tokens(a.dv, k[s], k[s + 1])) << s;
  }
}

TEST(SoftmaxRelations, GroupedHeadsAreRepeatedKeys) {
  Attention a(2, 70, 90, 6, 2, 16, 40);
  Attention b = a;
  b.k = Tensor(Dtype::f64, {2, 90, 6, 16});
  b.v = b.k;
  for (int64_t i = 0; i < b.k.count(); ++i) {
    const int64_t from = i / (6 * 16) * 32 + i / 16 % 6 / 3 * 16 + i % 16;
    b.k.set(i, a.k.get(from));
    b.v.set(i, a.v.get(from));
  }
  EXPECT_TRUE(a.forward().out == b.forward().out);
  a.backward();
  b.backward();
  EXPECT_TRUE(a.dq == b.dq);
  Tensor sum(Dtype::f64, a.dk.sizes);
  for (int64_t i = 0; i < b.dk.count(); ++i) {
    const int64_t to = i / (6 * 16) * 32 + i / 16 % 6 / 3 * 16 + i % 16;
    sum.set(to, sum.get(to) + b.dk.get(i));
  }
  expect_near(a.dk, sum, kClose, "dk");
}

TEST(SoftmaxRelations, KeyLengthsAreTruncatedKeys) {
  Attention a(3, 30, 150, 2, 2, 16, 50);
  const std::vector<int64_t> lengths = {150, 70, 0};
  a.key_len = integers(lengths);
  a.options.causal = true;
  a.forward().backward();
  for (int64_t b = 0; b < 3; ++b) {
    Attention one = a;
    one.key_len = Tensor();
    const int64_t n = lengths[static_cast<size_t>(b)];
    one.q = batch_row(a.q, b);
    one.dout = batch_row(a.dout, b);
    one.k = tokens(batch_row(a.k, b), 0, n);
    one.v = tokens(batch_row(a.v, b), 0, n);
    one.forward().backward();
    EXPECT_TRUE(one.out == batch_row(a.out, b)) << b;
    EXPECT_TRUE(one.dk == tokens(batch_row(a.dk, b), 0, n)) << b;
    EXPECT_TRUE(tokens(batch_row(a.dk, b), n, 150) == constant({1, 150 - n, 2, 16}, 0)) << b;
  }
}

// Splits of the keys, joined by softmax_merge in any order.
TEST(SoftmaxRelations, SplitKeysAndMergeAreTheWhole) {
  Attention a(1, 20, 130, 2, 2, 8, 60);
  a.forward();
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 1, 130}, {0, 64, 65, 130}, {0, 0, 99, 100, 130}}) {
    const int64_t P = static_cast<int64_t>(cuts.size()) - 1;
    Tensor outs(Dtype::f64, {P, 1, 20, 2, 8}), lses(Dtype::f64, {P, 1, 20, 2});
    for (int64_t p = 0; p < P; ++p) {
      const size_t s = static_cast<size_t>(P - 1 - p);  // last part first
      Attention part = a;
      part.k = tokens(a.k, cuts[s], cuts[s + 1]);
      part.v = tokens(a.v, cuts[s], cuts[s + 1]);
      part.forward();
      for (int64_t i = 0; i < part.out.count(); ++i)
        outs.set(p * part.out.count() + i, cuts[s] == cuts[s + 1] ? kNan : part.out.get(i));
      for (int64_t i = 0; i < part.lse.count(); ++i) lses.set(p * part.lse.count() + i, part.lse.get(i));
    }
    Tensor out(Dtype::f64, a.out.sizes), lse(Dtype::f64, a.lse.sizes);
    std::vector<double> memory(1000, kNan);
    const Status status = softmax_merge({outs.view(), lses.view()}, {out.view(), lse.view()},
                                        {.workspace = memory.data(), .workspace_bytes = 8000});
    ASSERT_TRUE(status.ok()) << status.message();
    expect_near(out, a.out, kClose, "out");
    expect_near(lse, a.lse, kClose, "lse");
  }
}

// Every way of cutting the queries into steps with a cache gives the rows of the full causal call.
TEST(SoftmaxRelations, DecodingIsTheCausalCall) {
  constexpr int64_t T = 140;
  for (const int64_t step : {1, 3, 64, 140}) {
    Attention a(2, T, T, 4, 2, 16, 70);
    a.options = {.causal = true, .window = {90, -1}, .prefix = 2};
    a.sinks = random_tensor({4}, 79);
    a.forward();
    Tensor k_cache = constant({2, T + 5, 2, 16}, kNan), v_cache = k_cache, lengths = integers({0, 0});
    for (int64_t t = 0; t < T; t += step) {
      const int64_t end = std::min(T, t + step);
      const Tensor q = tokens(a.q, t, end), k = tokens(a.k, t, end), v = tokens(a.v, t, end);
      Tensor out(Dtype::f64, q.sizes), lse(Dtype::f64, {2, end - t, 4});
      SoftmaxDecodeArgs args{.q = q.view(),
                             .k = k.view(),
                             .v = v.view(),
                             .k_cache = k_cache.view(),
                             .v_cache = v_cache.view(),
                             .lengths = lengths.view(),
                             .sinks = a.sinks.view(),
                             .window = {90, -1},
                             .prefix = 2};
      Context context;
      context.workspace_bytes = softmax_decode_workspace(args, context);
      std::vector<double> memory(static_cast<size_t>(context.workspace_bytes / 8 + 1), kNan);
      context.workspace = memory.data();
      const Status status = softmax_decode(args, {out.view(), lse.view()}, context);
      ASSERT_TRUE(status.ok()) << status.message();
      expect_near(out, tokens(a.out, t, end), kClose, "out");
      expect_near(lse, tokens(a.lse, t, end), kClose, "lse");
    }
    EXPECT_EQ(lengths.get(0), T);
  }
}

TEST(SoftmaxRelations, PagedIsContiguous) {
  constexpr int64_t T = 150;
  Attention a(1, 5, T, 4, 2, 16, 80);
  a.options.causal = true;
  a.forward();
  for (const int64_t page : {1, 7, 16, 64, 150, 400}) {
    const int64_t used = (T + page - 1) / page, P = used + 3;
    Tensor k_pages = constant({P, page, 2, 16}, kNan), v_pages = k_pages, table(Dtype::i64, {1, used + 2});
    for (int64_t i = 0; i < used + 2; ++i) table.set(i, i < used ? static_cast<double>((i * 5 + 2) % P) : -77);
    std::vector<int64_t> order(static_cast<size_t>(P));
    for (int64_t i = 0; i < P; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937_64(static_cast<uint64_t>(page)));
    for (int64_t i = 0; i < used; ++i) table.set(i, static_cast<double>(order[static_cast<size_t>(i)]));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t c = 0; c < 32; ++c) {
        const int64_t to = (order[static_cast<size_t>(t / page)] * page + t % page) * 32 + c;
        k_pages.set(to, a.k.get(t * 32 + c));
        v_pages.set(to, a.v.get(t * 32 + c));
      }
    }
    const Tensor lengths = integers({T});
    Tensor out(Dtype::f64, a.out.sizes), lse(Dtype::f64, a.lse.sizes);
    SoftmaxPagedArgs args{.q = a.q.view(),
                          .k_pages = k_pages.view(),
                          .v_pages = v_pages.view(),
                          .page_table = table.view(),
                          .lengths = lengths.view(),
                          .causal = true};
    Context context;
    context.workspace_bytes = softmax_paged_workspace(args, context);
    std::vector<double> memory(static_cast<size_t>(context.workspace_bytes / 8 + 1), kNan);
    context.workspace = memory.data();
    const Status status = softmax_paged(args, {out.view(), lse.view()}, context);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(out == a.out) << page;
    EXPECT_TRUE(lse == a.lse) << page;
  }
}

TEST(SoftmaxRelations, Sinks) {
  Attention plain(1, 70, 80, 2, 2, 8, 90), none = plain, with = plain, huge = plain, tiny = plain;
  plain.forward();
  none.sinks = constant({2}, -kInf);
  none.forward().backward();
  EXPECT_TRUE(none.out == plain.out);
  EXPECT_TRUE(none.lse == plain.lse);
  EXPECT_TRUE(none.dsinks == constant({2}, 0));
  with.sinks = constant({2}, 1.25);
  with.forward();
  Tensor out = plain.out, lse = plain.lse;
  for (int64_t i = 0; i < lse.count(); ++i) {
    const double l = plain.lse.get(i), keep = 1 / (1 + std::exp(1.25 - l));
    lse.set(i, std::log(std::exp(l) + std::exp(1.25)));
    for (int64_t c = 0; c < 8; ++c) out.set(i * 8 + c, plain.out.get(i * 8 + c) * keep);
  }
  expect_near(with.out, out, kClose, "out");
  expect_near(with.lse, lse, kClose, "lse");
  huge.sinks = constant({2}, 800);  // the published kernels overflow from a difference of 88 on
  huge.forward().backward();
  EXPECT_TRUE(finite(huge.out) && finite(huge.dq) && finite(huge.dsinks));
  EXPECT_NEAR(huge.lse.get(0), 800, 1e-10);
  tiny.sinks = constant({2}, -800);
  EXPECT_TRUE(tiny.forward().out == plain.out);
}

TEST(SoftmaxRelations, BiasAndSoftCap) {
  Attention plain(1, 70, 80, 2, 2, 8, 100), shifted = plain, loose = plain, masked = plain;
  plain.options.causal = shifted.options.causal = loose.options.causal = true;
  plain.forward();
  shifted.bias = constant({70, 1}, 3);
  shifted.forward();
  expect_near(shifted.out, plain.out, kClose, "out");
  Tensor lse = plain.lse;
  for (int64_t i = 0; i < lse.count(); ++i) lse.set(i, lse.get(i) + 3);
  expect_near(shifted.lse, lse, kClose, "lse");
  loose.options.softcap = 1e7;
  expect_near(loose.forward().out, plain.out, kClose, "out");
  masked.bias = Tensor(Dtype::f64, {70, 80});  // the causal mask as a bias
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t j = 0; j < 80; ++j) masked.bias.set(i * 80 + j, j <= i + 10 ? 0 : -kInf);
  }
  expect_near(masked.forward().out, plain.out, kClose, "out");
}

// With values that are unit vectors out is P, and the gradient of a full bias is dS.
TEST(SoftmaxRelations, RowsOfTheLogitGradient) {
  Attention a(1, 40, 16, 2, 2, 16, 110);
  for (int64_t j = 0; j < 16; ++j) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t c = 0; c < 16; ++c) a.v.set(a.v.at(0, j, h, c), j == c ? 1 : 0);
    }
  }
  a.bias = random_tensor({1, 2, 40, 16}, 111);
  const auto row_sum = [](const Tensor& dbias, int64_t h, int64_t i) {
    double sum = 0;
    for (int64_t j = 0; j < 16; ++j) sum += dbias.get((h * 40 + i) * 16 + j);
    return sum;
  };
  Attention without = a, sink = a, of_lse = a;
  without.forward().backward();
  sink.sinks = constant({2}, 0.5);
  sink.forward().backward();
  of_lse.dout = constant(a.dout.sizes, 0);
  of_lse.dlse = constant({1, 40, 2}, 1);
  of_lse.forward().backward();
  for (int64_t h = 0; h < 2; ++h) {
    double total = 0;
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_NEAR(row_sum(without.dbias, h, i), 0, 1e-14);
      double delta = 0;
      for (int64_t c = 0; c < 16; ++c) delta += sink.dout.get(sink.out.at(0, i, h, c)) * sink.out.get(sink.out.at(0, i, h, c));
      const double weight = std::exp(0.5 - sink.lse.get(sink.lse.at(0, i, h)));
      EXPECT_NEAR(row_sum(sink.dbias, h, i), weight * delta, 1e-13);
      total += weight * delta;
      for (int64_t j = 0; j < 16; ++j) {
        EXPECT_NEAR(of_lse.dbias.get((h * 40 + i) * 16 + j), of_lse.out.get(of_lse.out.at(0, i, h, j)), 1e-14);
      }
    }
    EXPECT_NEAR(sink.dsinks.get(h), -total, 1e-12);
  }
}

TEST(SoftmaxRelations, OneKeyHasNoGradient) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
    Attention a(2, 1, 1, 3, 3, 40, 120, dtype);
    a.forward().backward();
    EXPECT_TRUE(a.out == a.v);
    EXPECT_TRUE(a.dq == constant(a.q.sizes, 0, dtype));
    EXPECT_TRUE(a.dk == constant(a.k.sizes, 0, dtype));
    expect_near(a.dv, a.dout, 8 * epsilon(dtype), "dv");
  }
}

// ---- NaN, infinity, extremes ------------------------------------------------------------------------------------------------

std::vector<std::string> implementations() {
  std::vector<std::string> names;
  for (const Impl& impl : softmax_op().impls) {
    if (impl.missing().empty()) names.push_back(impl.name);
  }
  return names;
}

// What a masked key, value, query or dout holds must not matter, in any implementation and type.
TEST(SoftmaxPolicy, MaskedRowsMayHoldAnything) {
  for (const std::string& impl : implementations()) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (const double bad : {kNan, kInf}) {
        SCOPED_TRACE(impl + " " + dtype_name(dtype) + " " + std::to_string(bad));
        const double close = 4 * epsilon(dtype);  // sums over visible pairs alone may run in another order
        // Queries stand at positions 30 .. 99; keys from 90 on are seen by the last ten, so tiles are cut there.
        Attention clean(1, 70, 100, 2, 1, 16, 130, dtype);
        clean.options.causal = true;
        clean.forward(impl.c_str()).backward(impl.c_str());
        Attention dirty = clean;
        for (int64_t i = dirty.k.at(0, 90); i < dirty.k.count(); ++i) dirty.k.set(i, bad), dirty.v.set(i, bad);
        dirty.forward(impl.c_str()).backward(impl.c_str());
        expect_near(tokens(dirty.out, 0, 60), tokens(clean.out, 0, 60), close, "out");
        EXPECT_TRUE(tokens(dirty.lse, 0, 60) == tokens(clean.lse, 0, 60));
        expect_near(tokens(dirty.dq, 0, 60), tokens(clean.dq, 0, 60), close, "dq");
        EXPECT_FALSE(finite(tokens(dirty.out, 60, 70)));  // those that see it
        // Queries that see only the first keys: their NaN reaches no later key.
        Attention early = clean;
        for (int64_t i = 0; i < early.q.at(0, 20); ++i) early.q.set(i, bad), early.dout.set(i, bad);
        early.forward(impl.c_str()).backward(impl.c_str());
        EXPECT_TRUE(tokens(early.out, 20, 70) == tokens(clean.out, 20, 70));
        EXPECT_TRUE(finite(tokens(early.dk, 50, 100)));  // position 30 + 19 = 49 is the last that they see
        EXPECT_TRUE(finite(tokens(early.dv, 50, 100)));
        EXPECT_FALSE(finite(tokens(early.dk, 0, 50)));
        // A bias of -inf is a mask.
        Attention hidden = clean;
        hidden.options.causal = false;
        hidden.bias = constant({100}, 0, dtype);
        for (int64_t j = 90; j < 100; ++j) hidden.bias.set(j, -kInf);
        Attention filled = hidden;
        for (int64_t i = filled.k.at(0, 90); i < filled.k.count(); ++i) filled.k.set(i, bad), filled.v.set(i, bad);
        hidden.forward(impl.c_str()).backward(impl.c_str());
        filled.forward(impl.c_str()).backward(impl.c_str());
        expect_near(filled.out, hidden.out, close, "out under a bias");
        expect_near(filled.dq, hidden.dq, close, "dq under a bias");
        EXPECT_TRUE(finite(filled.dk) && finite(filled.dv) && finite(filled.dbias));
      }
    }
  }
}

TEST(SoftmaxPolicy, NanStaysInItsRowHeadAndSequence) {
  for (const std::string& impl : implementations()) {
    SCOPED_TRACE(impl);
    Attention clean(2, 70, 80, 2, 2, 16, 140, Dtype::f32), dirty = clean;
    clean.forward(impl.c_str());
    dirty.q.set(dirty.q.at(1, 33, 1, 5), kNan);
    dirty.forward(impl.c_str());
    for (int64_t i = 0; i < clean.out.count(); ++i) {
      const bool row = i / 16 == (1 * 70 + 33) * 2 + 1;
      ASSERT_TRUE(row ? std::isnan(dirty.out.get(i)) : dirty.out.get(i) == clean.out.get(i)) << i;
    }
    EXPECT_TRUE(std::isnan(dirty.lse.get(dirty.lse.at(1, 33, 1))));
    dirty.backward(impl.c_str());
    clean.backward(impl.c_str());
    EXPECT_TRUE(batch_row(dirty.dk, 0) == batch_row(clean.dk, 0));
  }
}

TEST(SoftmaxPolicy, RowsThatSeeNothing) {
  for (const std::string& impl : implementations()) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
      Attention a(1, 90, 20, 2, 1, 16, 150, dtype);
      a.options.causal = true;
      a.dlse = constant({1, 90, 2}, 1, dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32);
      a.forward(impl.c_str()).backward(impl.c_str());
      for (int64_t t = 0; t < 70; ++t) {
        ASSERT_EQ(a.lse.get(a.lse.at(0, t, 1)), -kInf);
        ASSERT_EQ(a.out.get(a.out.at(0, t, 1, 3)), 0);
        ASSERT_EQ(a.dq.get(a.dq.at(0, t, 1, 3)), 0);
      }
      EXPECT_TRUE(finite(a.dk) && finite(a.dv) && finite(a.dq) && finite(a.out)) << impl;
    }
  }
}

TEST(SoftmaxPolicy, ExtremeLogitsStayFinite) {
  for (const std::string& impl : implementations()) {
    for (const double scale : {1e4, -1e4, 1e20}) {
      Attention a(1, 70, 70, 2, 2, 16, 160, Dtype::f32);
      a.options.causal = true;
      a.options.scale = scale;
      a.forward(impl.c_str());
      EXPECT_TRUE(finite(a.out) && finite(a.lse)) << impl << " " << scale;
      if (scale == 1e20) continue;  // lse in f32 tells nothing about such weights
      a.backward(impl.c_str());
      EXPECT_TRUE(finite(a.dq) && finite(a.dk) && finite(a.dv)) << impl << " " << scale;
    }
  }
}

// ---- bits -------------------------------------------------------------------------------------------------------------------

TEST(SoftmaxBits, ThreadsRunsAndBatchPositions) {
  struct Shape {
    int64_t B, Tq, Tk, H, Hkv;
  };
  for (const Shape& s : {Shape{1, 300, 300, 1, 1}, Shape{3, 100, 130, 4, 2}, Shape{2, 1, 2500, 4, 2}}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      Attention first(s.B, s.Tq, s.Tk, s.H, s.Hkv, 32, 170, dtype);
      first.options = {.causal = true, .window = {200, -1}};
      first.bias = random_tensor({s.H, 1, s.Tk}, 171, dtype);
      first.sinks = random_tensor({s.H}, 172, dtype);
      first.forward(nullptr, &inline_executor()).backward(nullptr, &inline_executor());
      for (const int threads : {1, 2, 3, 4, 7, 8, 16, 2}) {
        ThreadPool pool(threads);
        Attention again = first;
        again.forward(nullptr, &pool).backward(nullptr, &pool);
        EXPECT_TRUE(again.out == first.out && again.lse == first.lse) << threads;
        EXPECT_TRUE(again.dq == first.dq && again.dk == first.dk && again.dv == first.dv) << threads;
        EXPECT_TRUE(again.dbias == first.dbias && again.dsinks == first.dsinks) << threads;
      }
      for (int64_t b = 0; b < s.B; ++b) {
        Attention one = first;
        for (Tensor Attention::*t : {&Attention::q, &Attention::k, &Attention::v, &Attention::dout})
          one.*t = batch_row(first.*t, b);
        one.forward().backward();
        EXPECT_TRUE(one.out == batch_row(first.out, b) && one.dk == batch_row(first.dk, b) && one.dq == batch_row(first.dq, b))
            << b;
      }
    }
  }
}

TEST(SoftmaxBits, CallsFromManyThreads) {
  Attention first(1, 130, 130, 2, 2, 16, 180, Dtype::f32);
  first.forward().backward();
  std::vector<Attention> runs(4, first);
  std::vector<std::thread> threads;
  for (Attention& run : runs) threads.emplace_back([&run] { run.forward().backward(); });
  for (std::thread& thread : threads) thread.join();
  for (const Attention& run : runs) EXPECT_TRUE(run.out == first.out && run.dq == first.dq && run.dk == first.dk);
}

// Two batch rows 6 GB apart: offsets beyond 2^31 elements.
TEST(SoftmaxBits, OffsetsBeyond32Bits) {
  constexpr int64_t stride = int64_t{3} << 30;
  const size_t bytes = static_cast<size_t>(stride) * 2 + 65536;
  void* const far = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (far == MAP_FAILED) GTEST_SKIP() << "no 6 GB of address space";
  Attention a(2, 9, 9, 1, 1, 16, 190, Dtype::bf16);
  a.forward();
  std::memcpy(far, a.k.bytes.data(), 9 * 16 * 2);
  std::memcpy(static_cast<Bf16*>(far) + stride, reinterpret_cast<const Bf16*>(a.k.bytes.data()) + 9 * 16, 9 * 16 * 2);
  SoftmaxArgs args = a.args();
  args.k.data = far;
  args.k.stride[0] = stride;
  Tensor out(Dtype::bf16, a.out.sizes);
  Context context;
  const std::vector<double> memory = a.workspace(Pass::forward, &context);
  const Status status = softmax(args, {out.view(), View()}, context);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(out == a.out);
  munmap(far, bytes);
}

// ---- refusals ---------------------------------------------------------------------------------------------------------------

TEST(SoftmaxRefuses, WithASentence) {
  struct Bad {
    const char* sentence;
    std::function<void(SoftmaxArgs&)> spoil;
  };
  const Attention a(2, 6, 8, 4, 2, 8, 200, Dtype::f32);
  const Tensor three = random_tensor({2, 8, 3, 8}, 1, Dtype::f32), narrow = random_tensor({2, 8, 2, 6}, 1, Dtype::f32);
  const Tensor wide = random_tensor({2, 8, 2, 8}, 1), lengths = integers({9, 1}), cu = integers({0, 6}), one = integers({1, 0});
  const Bad cases[] = {
      {"softmax: q is missing", [](SoftmaxArgs& x) { x.q = View(); }},
      {"softmax: k has 3 heads, expected a divisor of 4 (the heads of q)",
       [&](SoftmaxArgs& x) { x.k = three.view(), x.v = three.view(); }},
      {"softmax: k has 6 channels in dimension 3 of [B, Tk, Hkv, K], expected 8 (same as q)",
       [&](SoftmaxArgs& x) { x.k = narrow.view(); }},
      {"softmax: v is f64, expected f32 (same as q)", [&](SoftmaxArgs& x) { x.v = wide.view(); }},
      {"softmax: window is (-2, 0), expected values of at least -1 (-1: unlimited)",
       [](SoftmaxArgs& x) {
         x.window = {-2, 0};
       }},
      {"softmax: softcap is -1, expected at least 0", [](SoftmaxArgs& x) { x.softcap = -1; }},
      {"softmax: scale is nan, expected a finite number", [](SoftmaxArgs& x) { x.scale = kNan; }},
      {"softmax: key_len[0] is 9, expected 0 to 8", [&](SoftmaxArgs& x) { x.key_len = lengths.view(); }},
      {"softmax: cu_seqlens_q and cu_seqlens_k go together, only one is given",
       [&](SoftmaxArgs& x) { x.cu_seqlens_q = cu.view(), x.q.size[0] = x.k.size[0] = x.v.size[0] = 1; }},
      {"softmax: cu_seqlens_q starts at 1, expected 0",
       [&](SoftmaxArgs& x) {
         x.cu_seqlens_q = x.cu_seqlens_k = one.view();
         x.q.size[0] = x.k.size[0] = x.v.size[0] = 1;
       }},
  };
  for (const Bad& bad : cases) {
    SoftmaxArgs args = a.args();
    bad.spoil(args);
    Tensor out(Dtype::f32, {2, 6, 4, 8});
    std::vector<double> memory(1 << 18);
    const Status status = softmax(args, {out.view(), View()},
                                  {.workspace = memory.data(), .workspace_bytes = static_cast<int64_t>(memory.size()) * 8});
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.message(), bad.sentence);
    EXPECT_TRUE(out == constant(out.sizes, 0, Dtype::f32));  // nothing written
  }
}

TEST(SoftmaxRefuses, FullCachesAndWrongPages) {
  const Tensor x = random_tensor({1, 2, 1, 4}, 1, Dtype::f32), cache = random_tensor({1, 5, 1, 4}, 2, Dtype::f32);
  const Tensor full = integers({4}), short_length = integers({1}), start = integers({2});
  Tensor out(Dtype::f32, {1, 2, 1, 4}), table(Dtype::i64, {1, 2});
  std::vector<double> memory(1 << 16);
  const Context context{.workspace = memory.data(), .workspace_bytes = static_cast<int64_t>(memory.size()) * 8};
  SoftmaxDecodeArgs decode{
      .q = x.view(), .k = x.view(), .v = x.view(), .k_cache = cache.view(), .v_cache = cache.view(), .lengths = full.view()};
  EXPECT_EQ(softmax_decode(decode, {out.view(), View()}, context).message(),
            "softmax_decode: the cache of item 0 holds 4 of 5 tokens, no room for 2 more");
  EXPECT_EQ(full.get(0), 4);
  decode.lengths = short_length.view();
  decode.cache_start = start.view();
  EXPECT_EQ(softmax_decode(decode, {out.view(), View()}, context).message(),
            "softmax_decode: cache_start[0] is 2, expected at most 1 (its length)");
  const Tensor pages = random_tensor({3, 4, 1, 4}, 3, Dtype::f32), lengths = integers({5});
  table.set(1, 3);
  const SoftmaxPagedArgs paged{
      .q = x.view(), .k_pages = pages.view(), .v_pages = pages.view(), .page_table = table.view(), .lengths = lengths.view()};
  EXPECT_EQ(softmax_paged(paged, {out.view(), View()}, context).message(),
            "softmax_paged: page_table[0][1] is 3, expected 0 to 2");
}

}  // namespace
}  // namespace linnet
