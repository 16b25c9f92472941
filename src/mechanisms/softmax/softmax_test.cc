// softmax against its reference: every implementation this machine runs, every dtype, every option; then the relations,
// policies and refusals of the mechanism's page.
#include "softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/op.h"
#include "core/tolerance.h"

namespace linnet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A dense tensor with guards at both ends, filled with a pattern that no computation makes by chance.
struct Tensor {
  static constexpr size_t kGuard = 256;
  std::vector<int64_t> sizes;
  Dtype dtype = Dtype::none;
  std::vector<char> bytes;

  Tensor() = default;
  Tensor(Dtype type, std::vector<int64_t> shape) : sizes(std::move(shape)), dtype(type) {
    bytes.assign(2 * kGuard + static_cast<size_t>(count() * dtype_size(type)), static_cast<char>(0xa5));
  }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t s : sizes) n *= s;
    return n;
  }
  View view() const {
    if (dtype == Dtype::none) return {};
    return View::dense(bytes.data() + kGuard, dtype, sizes.data(), static_cast<int>(sizes.size()));
  }
  double get(int64_t i) const { return load_f64(bytes.data() + kGuard, dtype, i); }
  void set(int64_t i, double x) {
    if (dtype == Dtype::i64) {
      reinterpret_cast<int64_t*>(bytes.data() + kGuard)[i] = static_cast<int64_t>(x);
    } else {
      store_f64(bytes.data() + kGuard, dtype, i, x);
    }
  }
  bool guards_intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes[i] != static_cast<char>(0xa5) || bytes[bytes.size() - 1 - i] != static_cast<char>(0xa5)) return false;
    }
    return true;
  }
  Tensor to(Dtype type) const {
    if (dtype == Dtype::none || dtype == Dtype::i64) return *this;
    Tensor other(type, sizes);
    for (int64_t i = 0; i < count(); ++i) other.set(i, get(i));
    return other;
  }
};

Dtype wide(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

Tensor normal(std::vector<int64_t> sizes, uint64_t seed, double deviation = 1) {
  Tensor t(Dtype::f64, std::move(sizes));
  std::mt19937_64 random(seed);
  std::normal_distribution<double> draw(0, deviation);
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, draw(random));
  return t;
}
Tensor integers(std::vector<int64_t> values) {
  Tensor t(Dtype::i64, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
  return t;
}

// One line of the tables. Sizes of 1 in `bias` broadcast; empty: no bias.
struct Case {
  int64_t B = 1, Tq = 1, Tk = 1, H = 1, Hkv = 1, K = 8, V = 8;
  bool causal = false;
  Window window;
  int64_t prefix = 0, chunk = 0;
  double softcap = 0;
  Maybe scale;
  std::vector<int64_t> bias;
  bool sinks = false;
  std::vector<int64_t> key_len, cu_q, cu_k;
  double magnitude = 1;  // of queries

  std::string text() const {
    const auto list = [](const std::vector<int64_t>& v) {
      std::string s;
      for (const int64_t x : v) s += (s.empty() ? "" : ",") + std::to_string(x);
      return s;
    };
    const auto n = [](int64_t x) { return std::to_string(x); };
    std::string s = "[" + n(B) + "," + n(Tq) + "/" + n(Tk) + "," + n(H) + "/" + n(Hkv) + "," + n(K) + "/" + n(V) + "]";
    if (causal) s += " causal";
    if (window.left >= 0 || window.right >= 0) s += " window " + n(window.left) + "," + n(window.right);
    if (prefix) s += " prefix " + n(prefix);
    if (chunk) s += " chunk " + n(chunk);
    if (softcap > 0) s += " softcap " + std::to_string(softcap);
    if (scale.given) s += " scale " + std::to_string(scale.value);
    if (!bias.empty()) s += " bias " + list(bias);
    if (sinks) s += " sinks";
    if (!key_len.empty()) s += " key_len " + list(key_len);
    if (!cu_q.empty()) s += " packed " + list(cu_q) + " / " + list(cu_k);
    if (magnitude != 1) s += " magnitude " + std::to_string(magnitude);
    return s;
  }
};

// The tensors of a call and its results.
struct Attention {
  Tensor q, k, v, bias, sinks, key_len, cu_q, cu_k, dout, dlse;
  Tensor out, lse, dq, dk, dv, dbias, dsinks;
  SoftmaxArgs options;

  Attention() = default;
  Attention(const Case& c, uint64_t seed) {
    q = normal({c.B, c.Tq, c.H, c.K}, seed, c.magnitude);
    k = normal({c.B, c.Tk, c.Hkv, c.K}, seed + 1);
    v = normal({c.B, c.Tk, c.Hkv, c.V}, seed + 2);
    if (!c.bias.empty()) bias = normal(c.bias, seed + 3);
    if (c.sinks) sinks = normal({c.H}, seed + 4);
    if (!c.key_len.empty()) key_len = integers(c.key_len);
    if (!c.cu_q.empty()) cu_q = integers(c.cu_q), cu_k = integers(c.cu_k);
    dout = normal({c.B, c.Tq, c.H, c.V}, seed + 5);
    dlse = normal({c.B, c.Tq, c.H}, seed + 6);
    options.causal = c.causal;
    options.window = c.window;
    options.prefix = c.prefix;
    options.chunk = c.chunk;
    options.softcap = c.softcap;
    options.scale = c.scale;
  }
  // The same call with every tensor rounded to a type.
  Attention to(Dtype type) const {
    Attention r = *this;
    for (Tensor Attention::*t :
         {&Attention::q, &Attention::k, &Attention::v, &Attention::bias, &Attention::sinks, &Attention::dout})
      r.*t = (this->*t).to(type);
    r.dlse = dlse.to(wide(type));
    return r;
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
  Status forward(const char* impl, Executor* executor = nullptr) {
    const SoftmaxArgs a = args();
    out = Tensor(q.dtype, dout.sizes);
    lse = Tensor(wide(q.dtype), {q.sizes[0], q.sizes[1], q.sizes[2]});
    Context context{.executor = executor, .impl = impl};
    std::vector<double> memory = workspace(a, Pass::forward, &context);
    const Status status = softmax(a, {out.view(), lse.view()}, context);
    check_guards();
    return status;
  }
  Status backward(const char* impl, Executor* executor = nullptr) {
    const SoftmaxArgs a = args();
    for (const auto& [input, gradient] :
         std::vector<std::pair<Tensor Attention::*, Tensor Attention::*>>{{&Attention::q, &Attention::dq},
                                                                          {&Attention::k, &Attention::dk},
                                                                          {&Attention::v, &Attention::dv},
                                                                          {&Attention::bias, &Attention::dbias},
                                                                          {&Attention::sinks, &Attention::dsinks}}) {
      if ((this->*input).dtype != Dtype::none) this->*gradient = Tensor((this->*input).dtype, (this->*input).sizes);
    }
    Context context{.executor = executor, .impl = impl};
    std::vector<double> memory = workspace(a, Pass::backward, &context);
    const Status status =
        softmax_backward(a, {out.view(), lse.view()},
                         {dout.view(), dlse.view(), dq.view(), dk.view(), dv.view(), dbias.view(), dsinks.view()}, context);
    check_guards();
    return status;
  }
  void check_guards() const {
    for (const Tensor* t : {&q, &k, &v, &out, &lse, &dq, &dk, &dv, &dbias, &dsinks}) {
      EXPECT_TRUE(t->dtype == Dtype::none || t->guards_intact());
    }
  }
  // Exactly the bytes asked for, NaN inside, a guard behind.
  static std::vector<double> workspace(const SoftmaxArgs& a, Pass pass, Context* context) {
    context->workspace_bytes = softmax_workspace(a, pass, *context);
    std::vector<double> memory(static_cast<size_t>(context->workspace_bytes / 8 + 2), kNan);
    context->workspace = memory.data();
    return memory;
  }
};

// Both metrics of tolerance.h; NaN and infinities must stand at the same places.
void expect_close(const Tensor& got, const Tensor& want, double gate, double scale, const std::string& what) {
  ASSERT_EQ(got.count(), want.count()) << what;
  double error = 0, norm = 0, worst = 0, largest = 0;
  for (int64_t i = 0; i < want.count(); ++i) {
    const double x = got.get(i), y = want.get(i);
    if (std::isnan(y) || std::isinf(y)) {
      ASSERT_TRUE(std::isnan(y) ? std::isnan(x) : x == y) << what << " element " << i << ": " << x << ", expected " << y;
      continue;
    }
    ASSERT_TRUE(std::isfinite(x)) << what << " element " << i << ": " << x << ", expected " << y;
    error += (x - y) * (x - y);
    norm += y * y;
    worst = std::max(worst, std::fabs(x - y));
    largest = std::max(largest, std::fabs(y));
  }
  if (largest < kCancelled * scale) {
    EXPECT_LE(worst, kCancelledEpsilons * epsilon(got.dtype) * scale) << what << ", all cancelled";
    return;
  }
  EXPECT_LE(std::sqrt(error / norm), gate) << what << " RMS";
  EXPECT_LE(worst / largest, kMaxOverRms * gate) << what << " max";
}

std::vector<std::string> implementations() {
  std::vector<std::string> names;
  for (const Impl& impl : softmax_op().impls) {
    if (impl.missing().empty() && impl.name != "ref") names.push_back(impl.name);
  }
  return names;
}
const Dtype kDtypes[] = {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};

void compare(const Attention& source, const std::string& text, double logit = 8) {
  for (const Dtype dtype : kDtypes) {
    const Attention rounded = source.to(dtype);
    Attention want = rounded.to(Dtype::f64);
    ASSERT_TRUE(want.forward("ref").ok());
    ASSERT_TRUE(want.backward("ref").ok());
    double scale = 1;
    for (const Tensor* t : {&want.q, &want.k, &want.v, &want.dout}) {
      for (int64_t i = 0; i < t->count(); ++i) {
        if (std::isfinite(t->get(i))) scale = std::max(scale, std::fabs(t->get(i)));
      }
    }
    for (const std::string& impl : implementations()) {
      Attention got = rounded;
      const std::string what = text + " " + dtype_name(dtype) + " " + impl;
      const Status forward = got.forward(impl.c_str());
      ASSERT_TRUE(forward.ok()) << what << ": " << forward.message();
      const double gate = rms_gate(dtype, Pass::forward, Against::reference, false, logit);
      expect_close(got.out, want.out, gate, scale, what + " out");
      expect_close(got.lse, want.lse,
                   wide(dtype) == Dtype::f32 ? rms_gate(Dtype::f32, Pass::forward, Against::reference, false, logit) : gate,
                   scale, what + " lse");
      ASSERT_TRUE(got.backward(impl.c_str()).ok()) << what;
      const double back = rms_gate(dtype, Pass::backward, Against::reference, false, logit);
      expect_close(got.dq, want.dq, back, scale, what + " dq");
      expect_close(got.dk, want.dk, back, scale, what + " dk");
      expect_close(got.dv, want.dv, back, scale, what + " dv");
      if (got.bias.dtype != Dtype::none) expect_close(got.dbias, want.dbias, back, scale, what + " dbias");
      if (got.sinks.dtype != Dtype::none) expect_close(got.dsinks, want.dsinks, back, scale, what + " dsinks");
    }
  }
}

const Case kCases[] = {
    {.Tq = 1, .Tk = 1},
    {.Tq = 5, .Tk = 2, .causal = true},
    {.B = 2, .Tq = 63, .Tk = 64, .H = 2, .Hkv = 2, .K = 16, .V = 16, .causal = true},
    {.B = 1, .Tq = 64, .Tk = 64, .H = 2, .Hkv = 1, .K = 32, .V = 48},
    {.B = 2, .Tq = 65, .Tk = 130, .H = 3, .Hkv = 3, .K = 20, .V = 13, .causal = true},
    {.B = 1, .Tq = 200, .Tk = 131, .H = 6, .Hkv = 2, .K = 64, .V = 64, .causal = true},
    {.B = 1, .Tq = 257, .Tk = 257, .H = 2, .Hkv = 2, .K = 64, .V = 64, .causal = true},
    {.B = 1, .Tq = 150, .Tk = 300, .H = 4, .Hkv = 2, .K = 16, .V = 24, .window = {40, 17}, .prefix = 5},
    {.B = 1, .Tq = 300, .Tk = 300, .H = 2, .Hkv = 1, .K = 16, .V = 16, .causal = true, .window = {33, -1}, .prefix = 70},
    {.B = 1, .Tq = 200, .Tk = 200, .H = 2, .Hkv = 2, .K = 8, .V = 8, .window = {-1, 9}},
    {.B = 1, .Tq = 190, .Tk = 150, .H = 2, .Hkv = 2, .K = 8, .V = 8, .window = {20, 20}},
    {.B = 1, .Tq = 200, .Tk = 220, .H = 2, .Hkv = 2, .K = 8, .V = 8, .causal = true, .chunk = 50},
    {.B = 1, .Tq = 220, .Tk = 200, .H = 2, .Hkv = 2, .K = 8, .V = 8, .window = {30, -1}, .prefix = 60, .chunk = 64},
    {.B = 2, .Tq = 70, .Tk = 90, .H = 2, .Hkv = 1, .K = 16, .V = 16, .softcap = 3},
    {.B = 2,
     .Tq = 70,
     .Tk = 90,
     .H = 2,
     .Hkv = 2,
     .K = 16,
     .V = 16,
     .causal = true,
     .softcap = 2,
     .bias = {2, 2, 70, 90},
     .sinks = true},
    {.B = 2, .Tq = 70, .Tk = 90, .H = 4, .Hkv = 2, .K = 16, .V = 16, .bias = {1, 4, 1, 90}},
    {.B = 2, .Tq = 70, .Tk = 90, .H = 4, .Hkv = 4, .K = 16, .V = 16, .causal = true, .bias = {70, 90}},
    {.B = 2, .Tq = 70, .Tk = 90, .H = 2, .Hkv = 2, .K = 16, .V = 16, .bias = {2, 1, 70, 1}, .key_len = {33, 0}},
    {.B = 1, .Tq = 9, .Tk = 9, .H = 2, .Hkv = 2, .K = 16, .V = 16, .bias = {1}},
    {.B = 3, .Tq = 40, .Tk = 100, .H = 2, .Hkv = 2, .K = 16, .V = 16, .causal = true, .sinks = true, .key_len = {100, 0, 17}},
    {.B = 1,
     .Tq = 100,
     .Tk = 120,
     .H = 4,
     .Hkv = 2,
     .K = 16,
     .V = 16,
     .causal = true,
     .cu_q = {0, 0, 30, 100, 100},
     .cu_k = {0, 10, 10, 100, 120}},
    {.B = 1,
     .Tq = 100,
     .Tk = 120,
     .H = 2,
     .Hkv = 2,
     .K = 16,
     .V = 16,
     .window = {12, 3},
     .bias = {1, 2, 100, 120},
     .sinks = true,
     .cu_q = {0, 70, 100},
     .cu_k = {0, 90, 120}},
    {.B = 1,
     .Tq = 100,
     .Tk = 120,
     .H = 2,
     .Hkv = 2,
     .K = 16,
     .V = 16,
     .bias = {2, 1, 120},
     .cu_q = {0, 70, 100},
     .cu_k = {0, 90, 120}},
    {.B = 1, .Tq = 80, .Tk = 80, .H = 2, .Hkv = 2, .K = 16, .V = 16, .scale = Maybe(0.0)},
    {.B = 1, .Tq = 80, .Tk = 80, .H = 2, .Hkv = 2, .K = 16, .V = 16, .causal = true, .scale = Maybe(-0.4)},
    {.B = 1, .Tq = 3, .Tk = 2500, .H = 2, .Hkv = 2, .K = 24, .V = 40, .causal = true, .sinks = true},
    {.B = 2, .Tq = 1, .Tk = 1100, .H = 4, .Hkv = 1, .K = 128, .V = 128, .key_len = {1100, 5}},
    {.B = 1, .Tq = 2, .Tk = 2100, .H = 8, .Hkv = 2, .K = 16, .V = 16, .window = {1500, 3}, .prefix = 3},
    {.B = 1,
     .Tq = 1,
     .Tk = 1500,
     .H = 2,
     .Hkv = 2,
     .K = 16,
     .V = 16,
     .window = {100, -1},
     .prefix = 2,
     .softcap = 5,
     .bias = {1500}},
    {.B = 1, .Tq = 130, .Tk = 67, .H = 1, .Hkv = 1, .K = 130, .V = 200},
    {.B = 1, .Tq = 40, .Tk = 67, .H = 1, .Hkv = 1, .K = 1, .V = 1},
    {.B = 0, .Tq = 4, .Tk = 6, .H = 2, .Hkv = 2},
    {.B = 2, .Tq = 0, .Tk = 6, .H = 2, .Hkv = 2, .sinks = true},
    {.B = 2, .Tq = 5, .Tk = 0, .H = 2, .Hkv = 2},
    {.B = 2, .Tq = 5, .Tk = 0, .H = 2, .Hkv = 2, .causal = true, .sinks = true},
};

TEST(Softmax, AgreesWithTheReference) {
  uint64_t seed = 1;
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.text());
    compare(Attention(c, seed += 10), c.text());
  }
}

}  // namespace
}  // namespace linnet
