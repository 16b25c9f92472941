// Exact and linear attention on the same random input, forward and backward, then a few tokens of decoding with the state.
#include <linnet/linnet.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

using linnet::Dtype;
using linnet::Pass;
using linnet::Status;
using linnet::View;

namespace {

constexpr int64_t B = 1, T = 256, H = 4, D = 64;

std::vector<float> random_rows(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(engine);
  return values;
}

// Workspace is the caller's: ask how much, keep it as long as you like, hand it in.
linnet::Context context(std::vector<char>& memory, int64_t bytes) {
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
  return {.workspace = memory.data(), .workspace_bytes = static_cast<int64_t>(memory.size())};
}

int fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return static_cast<int>(status.code());
}

}  // namespace

int main() {
  const std::vector<float> q = random_rows(B * T * H * D, 1), k = random_rows(B * T * H * D, 2),
                           v = random_rows(B * T * H * D, 3);
  std::vector<float> exact(q.size()), cheap(q.size()), lse(B * T * H), dq(q.size()), dk(q.size()), dv(q.size()),
      dout(q.size(), 1.0F);
  const auto rows = [](const std::vector<float>& x) { return View::dense(x.data(), Dtype::f32, {B, T, H, D}); };
  std::vector<char> memory;

  const linnet::SoftmaxArgs softmax{.q = rows(q), .k = rows(k), .v = rows(v), .causal = true};
  const linnet::SoftmaxOut result{.out = rows(exact), .lse = View::dense(lse.data(), Dtype::f32, {B, T, H})};
  Status status = linnet::softmax(softmax, result, context(memory, linnet::softmax_workspace(softmax, Pass::forward, {})));
  if (!status.ok()) return fail(status);
  const linnet::SoftmaxGrads grads{.dout = rows(dout), .dq = rows(dq), .dk = rows(dk), .dv = rows(dv)};
  status =
      linnet::softmax_backward(softmax, result, grads, context(memory, linnet::softmax_workspace(softmax, Pass::backward, {})));
  if (!status.ok()) return fail(status);

  // Linear attention: the same first 255 tokens, then the last one by decoding from the state.
  std::vector<float> state(B * H * D * D), z(B * H * D);
  const auto first = [](const std::vector<float>& x) { return View::dense(x.data(), Dtype::f32, {B, T - 1, H, D}); };
  const auto last = [](const std::vector<float>& x) {
    return View::dense(x.data() + (T - 1) * H * D, Dtype::f32, {B, 1, H, D});
  };
  const View state_view = View::dense(state.data(), Dtype::f32, {B, H, D, D}),
             z_view = View::dense(z.data(), Dtype::f32, {B, H, D});
  std::vector<float> den(B * (T - 1) * H);
  const linnet::LinearArgs linear{
      .q = first(q), .k = first(k), .v = first(v), .map = linnet::FeatureMap::elu1, .normalize = true};
  const linnet::LinearOut linear_out{.out = first(cheap),
                                     .final_state = state_view,
                                     .final_z = z_view,
                                     .den = View::dense(den.data(), Dtype::f32, {B, T - 1, H})};
  status = linnet::linear(linear, linear_out, context(memory, linnet::linear_workspace(linear, Pass::forward, {})));
  if (!status.ok()) return fail(status);
  const linnet::LinearDecodeArgs step{.q = last(q),
                                      .k = last(k),
                                      .v = last(v),
                                      .state = state_view,
                                      .z = z_view,
                                      .map = linnet::FeatureMap::elu1,
                                      .normalize = true};
  status = linnet::linear_decode(step, {.out = last(cheap)}, context(memory, linnet::linear_decode_workspace(step, {})));
  if (!status.ok()) return fail(status);

  double difference = 0, size = 0, gradient = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += std::pow(exact[i] - cheap[i], 2);
    size += std::pow(exact[i], 2);
    gradient += std::fabs(dq[i]);
  }
  std::printf("linear (elu1) against softmax on random input: relative RMS difference %.3f; mean |dq| of softmax %.4f\n",
              std::sqrt(difference / size), gradient / static_cast<double>(dq.size()));

  // A wrong shape is a sentence, not a crash.
  linnet::SoftmaxArgs wrong = softmax;
  wrong.k = View::dense(k.data(), Dtype::f32, {B, T, H, D / 2});
  std::printf("a wrong shape says: %s\n", linnet::softmax(wrong, result, {}).message().c_str());
  return 0;
}
