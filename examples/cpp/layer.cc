// A layer of your own: recorded once, it runs a prompt at once and then token by token, with the state kept for you.
#include <linnet/layers.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

using linnet::Dtype;
using linnet::Status;
using linnet::View;
namespace layers = linnet::layers;

namespace {

constexpr int64_t T = 32, C = 64, H = 4;

// Linear attention whose memory forgets at a rate that each token chooses, behind a norm.
layers::Value remember(layers::Recorder& l, layers::Value x) {  // x [B, T, C]
  const auto project = [&](const char* name) { return l.split(l.dense(x, l.weight(name, {C, C}, layers::xavier())), H); };
  const layers::Value a = l.dense(x, l.weight("a_proj.weight", {H, C}, layers::normal(0.02)));
  const layers::Value g = l.map("-softplus(a)", {{"a", a}}, "g");  // log of what is kept
  const layers::Value y = l.op(
      "decay", {{"q", project("q_proj.weight")}, {"k", project("k_proj.weight")}, {"v", project("v_proj.weight")}, {"g", g}});
  const layers::Value z = l.op("rms_norm", {{"x", l.join(y)}, {"weight", l.weight("norm.weight", {C}, layers::ones())}});
  return l.dense(z, l.weight("o_proj.weight", {C, C}, layers::xavier()));
}

int fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return static_cast<int>(status.code());
}

}  // namespace

int main() {
  layers::Recorder recorder("remember");
  recorder.output(remember(recorder, recorder.input("x", {layers::kB, layers::kT, C})));
  layers::Record record;
  Status status = recorder.finish(&record);
  if (!status.ok()) return fail(status);
  std::printf("%s: %lld parameters\n", record.name.c_str(), static_cast<long long>(record.parameter_count()));

  layers::Runner runner;
  status = layers::Runner::make(std::move(record), {}, &runner);
  if (status.ok()) status = runner.bind_initial(1);  // a trained layer binds its tensors by name instead
  if (!status.ok()) return fail(status);

  std::vector<float> x(T * C), whole(x.size()), stepped(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37F * static_cast<float>(i));
  const auto tokens = [](std::vector<float>& values, int64_t from, int64_t to) {
    return View::dense(values.data() + from * C, Dtype::f32, {1, to - from, C});
  };
  status = runner.run(tokens(x, 0, T), tokens(whole, 0, T));
  if (!status.ok()) return fail(status);

  layers::State state;
  status = runner.make_state(1, T, &state);
  if (status.ok()) status = runner.run(tokens(x, 0, T / 2), tokens(stepped, 0, T / 2), {&state});  // half as a prompt
  for (int64_t t = T / 2; t < T && status.ok(); ++t) {                                             // the rest one by one
    status = runner.run(tokens(x, t, t + 1), tokens(stepped, t, t + 1), {&state});
  }
  if (!status.ok()) return fail(status);
  float apart = 0;
  for (size_t i = 0; i < whole.size(); ++i) apart = std::max(apart, std::abs(whole[i] - stepped[i]));
  std::printf("at once and token by token differ by %.1e; the state is %lld bytes\n", static_cast<double>(apart),
              static_cast<long long>(state.bytes()));
  return apart < 1e-4F ? 0 : 1;
}
