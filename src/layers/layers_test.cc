// One table for all layers: at once = in pieces = token by token = packed = several sessions in one call, in f64 and f32; the
// vector files in four types; wrong options get their sentence.
#include "check/files/layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "capi/linnet_c.h"
#include "check/tensor.h"
#include "core/log.h"
#include "core/tolerance.h"
#include "layers/cost.h"
#include "layers/describe.h"
#include "layers/expression.h"
#include "layers/layer.h"
#include "layers/runner.h"

namespace linnet::layers {
namespace {

using check::random_tensor;
using check::rms_error;
using check::Tensor;

std::vector<Setting> settings(const std::string& text) {  // "hidden=8 heads=2"
  std::vector<Setting> list;
  std::istringstream words(text);
  for (std::string word; words >> word;) list.push_back({word.substr(0, word.find('=')), word.substr(word.find('=') + 1)});
  return list;
}

struct Case {
  const char* layer;
  const char* options;
  int64_t tokens = 11;
  bool decodes = true;
};

const Case kCases[] = {
    {"softmax_attention", "hidden=12 heads=4 kv_heads=2 key=6 rope=half qk_norm=rms"},
    {"softmax_attention", "hidden=12 heads=2 key=4 value=3 rope=interleaved bias=1 out_bias=1 sinks=1 window=3,-1 softcap=5"},
    {"softmax_attention", "hidden=8 heads=2 position=G1 rope_dims=2"},
    {"softmax_attention", "hidden=8 heads=2 position=G1 granularity=headwise act=silu shared=1"},
    {"softmax_attention", "hidden=8 heads=2 position=G1 gate_from=parameter mode=add act=identity"},
    {"softmax_attention", "hidden=8 heads=4 kv_heads=2 position=G2 rope=none"},
    {"softmax_attention", "hidden=8 heads=2 position=G3 qk_norm=layer"},
    {"softmax_attention", "hidden=8 heads=2 position=G4 qk_norm=rms_plus_one"},
    {"softmax_attention", "hidden=8 heads=2 position=G5"},
    {"softmax_attention", "hidden=12 heads=4 kv_heads=2 key=6 qk_norm=rms norm_last=1"},
    {"softmax_attention", "hidden=8 heads=2 qk_norm=rms_plain norm_last=1 rope_back=1"},
    {"softmax_attention", "hidden=12 heads=3 rope=none alibi=300 bias=1"},
    {"softmax_attention", "hidden=8 heads=2 causal=0", 7, false},
    {"retention", "hidden=12 heads=2"},
    {"retention", "hidden=12 heads=3 rope=half norm=1 eps=1e-5 gate=0"},
    {"simple_gla", "hidden=8 heads=2"},
    {"normalised_attention", "hidden=8 heads=2"},
    {"normalised_attention", "hidden=8 heads=2 taps=3 normaliser=sum map=elu1"},
    {"normalised_attention", "hidden=8 heads=2 taps=3 normaliser=softmax"},
    {"normalised_attention", "hidden=8 heads=2 key=3 value=5 map=elu1 normaliser=softplus scaled=1 offset=2"},
    {"gated_linear_attention", "hidden=8 heads=2 rank=3"},
    {"gated_linear_attention", "hidden=8 heads=4 kv_heads=2 key=3 value=4 rank=3 taps=3 gate_bias=1 clamp=-0.1"},
    {"deltanet", "hidden=8 heads=2"},
    {"deltanet", "hidden=8 heads=2 taps=0 gate=1 double=1 activation=elu1 norm=sum"},
    {"deltanet", "hidden=8 heads=2 taps=2 use_beta=0 activation=relu conv_bias=1"},
    {"gated_deltanet", "hidden=8 heads=2 key=3 value=5"},
    {"gated_deltanet", "hidden=8 heads=2 value_heads=4 key=3 value=5 gate=0 taps=2 double=1"},
    {"kda", "hidden=8 heads=2 key=3 value=4"},
    {"kda", "hidden=8 heads=2 key=3 value=4 lower=-5 gate=0"},
    {"short_conv", "hidden=6"},
    {"short_conv", "hidden=6 taps=1 bias=1"},
    {"mamba1", "hidden=6 state=4"},
    {"mamba1", "hidden=8 inner=12 state=3 rank=2 norms=1"},
    {"mamba1", "hidden=6 state=4 inner=10 rank=2 taps=3 bias=1 conv_bias=0 skip=0"},
    {"mamba2", "hidden=6 head=3 state=4"},
    {"mamba2", "hidden=8 head=4 state=3 groups=2 norm_before_gate=1 skip_per_channel=1 dt_max=0.5"},
    {"mamba2", "hidden=6 head=3 state=4 norm=0 step_low=0.1 step_high=1 rate_low=0.05 rate_high=0.5"},
    {"metala_attention", "hidden=8 heads=2"},
    {"metala_attention", "hidden=8 heads=2 taps=2 aug=linear gate_bias=0"},
    {"metala_attention", "hidden=8 heads=2 taps=0 aug=none gate=0"},
    {"h3_mixer", "hidden=6 head_dim=2 shift=3 modes=2"},
    {"h3_mixer", "hidden=6 shift=3 modes=2 disc=zoh bias=0"},
    {"zeros_attention", "hidden=8 heads=2"},
    {"zeros_attention", "hidden=8 heads=2 zeroth=1 rope=half-crossed"},
    {"zeros_attention", "hidden=8 heads=2 zeroth=1 logits=l1 rope=interleaved-crossed norm=0"},
    {"zeros_attention", "hidden=8 heads=2 zeroth=1 logits=rms rope=none bias=0"},
    {"zeros_attention", "hidden=8 heads=2 order=quadratic", 9, false},
    {"zeros_attention", "hidden=8 heads=2 causal=0", 9, false},
    {"free_energy_mixer", "hidden=8 heads=2 conv_hidden=3"},
    {"free_energy_mixer", "hidden=8 heads=2 prior=linear conv_hidden=3 rope=interleaved"},
    {"free_energy_mixer", "hidden=8 heads=2 prior=gated conv=0"},
    {"free_energy_mixer", "hidden=8 heads=2 prior=gated conv_hidden=3", 83},
    {"free_energy_mixer", "hidden=8 heads=2 prior=aft conv_hidden=3 gate=0"},
    {"free_energy_mixer", "hidden=8 heads=2 prior=ssm rank=3 conv_hidden=3"},
    {"free_energy_mixer", "hidden=8 heads=2 lse=0 conv=0"},
    {"free_energy_mixer", "hidden=8 heads=2 temperature=0 conv=0"},
    {"linear_attention", "hidden=8 heads=2"},
    {"linear_attention", "hidden=8 heads=2 map=identity norm=rms"},
    {"linear_attention", "hidden=8 heads=2 map=cosine norm=layer"},
    {"linear_attention", "hidden=8 heads=2 map=relu rope=half"},
    {"linear_attention", "hidden=8 heads=2 map=relu2 kv_heads=1"},
    {"linear_attention", "hidden=8 heads=2 map=silu"},
    {"linear_attention", "hidden=8 heads=2 map=softplus"},
    {"linear_attention", "hidden=8 heads=2 map=focused"},
    {"linear_attention", "hidden=8 heads=2 map=cosformer max_length=64"},
    {"linear_attention", "hidden=8 heads=2 map=favor_relu features=5"},
    {"linear_attention", "hidden=8 heads=2 map=hedgehog"},
    {"linear_attention", "hidden=8 heads=2 map=hedgehog_exp features=3"},
    {"linear_attention", "hidden=8 heads=2 map=hedgehog_joint"},
    {"linear_attention", "hidden=8 heads=2 map=t2r features=6"},
    {"linear_attention", "hidden=8 heads=2 map=rebased"},
    {"linear_attention", "hidden=8 heads=2 map=dpfp dpfp_nu=2"},
    {"linear_attention", "hidden=8 heads=2 map=taylor"},
    {"linear_attention", "hidden=8 heads=2 map=product norm=rms"},
    {"linear_attention", "hidden=8 heads=2 map=exp", 17},
    {"linear_attention", "hidden=8 heads=2 map=favor features=5", 17},
    {"linear_attention", "hidden=8 heads=2 map=favor features=20", 83},
    {"linear_attention", "hidden=8 heads=2 map=favor_hyp features=3", 83},
    {"linear_attention", "hidden=8 heads=2 map=efficient", 83},
    {"linear_attention", "hidden=8 heads=2 map=exp", 83},
    {"linear_attention", "hidden=8 heads=2 map=focused", 83},
    {"linear_attention", "hidden=8 heads=2 map=exp key_top=global", 9, false},
    {"linear_attention", "hidden=8 heads=2 causal=0", 9, false},
    {"taylor_attention", "hidden=8 heads=2 key=2 value=4"},
    {"taylor_attention", "hidden=8 heads=2 mode=compact"},
    {"taylor_attention", "hidden=8 heads=2 mode=compact_l2"},
    {"qt_attention", "hidden=8 dim=4 tokens=9", 9, false},
    {"qt_attention", "hidden=8 dim=4 tokens=9 taps=0", 9, false},
    {"qt_attention", "hidden=8 dim=4 height=3 width=5 taps=3", 15, false},
    {"inline_attention", "hidden=8 heads=2 height=2 width=4 prefix=1", 9, false},
    {"inline_attention", "hidden=8 heads=2 residual=0 causal=1 kernel=relu"},
    {"monarch_attention", "hidden=8 heads=2 block=3 causal=1"},
    {"monarch_attention", "hidden=8 heads=2 block=7 causal=1", 83},
    {"monarch_attention", "hidden=8 heads=2 block=7 causal=1", 84},
    {"monarch_attention", "hidden=8 heads=2 steps=2", 9, false},
    {"hierarchical_attention", "hidden=8 heads=2 arity=2"},
    {"hierarchical_attention", "hidden=8 heads=2 arity=3", 83},
    {"hierarchical_attention", "hidden=8 heads=2 arity=4 include_self=0", 256},
    {"hierarchical_attention", "hidden=8 heads=2 arity=3 tie=prefix"},
    {"hierarchical_attention", "hidden=8 heads=2 tie=block causal=0 branching=2,4 head_norm=1 residual=1", 9, false},
    {"distilled_attention", "hidden=8 heads=2 features=6 rope=half"},
    {"distilled_attention", "hidden=8 heads=4 kv_heads=2 features=6 balanced=1", 41},
    {"hybrid_attention", "hidden=8 heads=2 window=4"},
    {"hybrid_attention", "hidden=8 heads=2 window=1 rope=half", 17},
    {"hybrid_attention", "hidden=8 heads=2 window=16", 91},
    {"hybrid_attention", "hidden=8 heads=2 window=40 form=terraced", 131},
    {"softmax_attention", "hidden=16 heads=4 kv_heads=2 window=6,-1 prefix=3", 151},
    {"softmax_attention", "hidden=8 heads=2 window=0,-1", 131},
    {"softmax_attention", "hidden=8 heads=2 window=100,-1 prefix=1 position=G1", 301},
    {"converted_attention", "hidden=16 heads=4 kv_heads=2 mechanism=window window=7 sinks=3", 131},
    {"converted_attention", "hidden=16 heads=4 kv_heads=2 mechanism=window windows=7,0 sinks=3 rope=interleaved", 131},
    {"converted_attention", "hidden=16 heads=4 kv_heads=2 mechanism=window window=6 sinks=2 causal=0 bias=1 out_bias=1", 17,
     false},
    {"converted_attention", "hidden=16 heads=4 kv_heads=2 mechanism=distill features=5 qk_norm=rms"},
    {"converted_attention", "hidden=16 heads=4 mechanism=distill features=5 causal=0 scale=0.3", 9, false},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=hybrid window=4 key=4", 27},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=hybrid-exact window=4 sinks=2 features=5 key=4", 131},
    {"converted_attention", "hidden=12 heads=3 mechanism=hybrid-exact window=1 scale=0.3", 27},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=hedgehog features=3 key=4"},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=t2r features=5 key=4 qk_norm=rms", 131},
    {"converted_attention", "hidden=12 heads=3 mechanism=hedgehog causal=0", 9, false},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=gdn window=0 key=4"},
    {"converted_attention",
     "hidden=12 heads=4 kv_heads=2 mechanism=gdn window=5 sinks=1 key=4 rope_scaling=linear rope_factor=2", 131},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=gla window=5 key=4", 131},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=monarch causal=0 steps=2 key=4", 9, false},
    {"converted_attention", "hidden=12 heads=4 kv_heads=2 mechanism=hierarchical causal=0 arity=2 key=4", 9, false},
    {"hybrid_attention", "hidden=8 heads=2 window=3 form=terraced features=3"},
};

std::string line(const Case& c) { return std::string(c.layer) + " " + c.options; }

// Initial values moved by noise, so that nothing that starts at zero stays out of the computation.
void bind_noisy(Runner* runner) {
  uint64_t seed = 7;
  for (const Parameter& p : runner->record().parameters) {
    std::vector<double> values = initial_values(p.init, p.shape, p.name, 3);
    const Tensor noise = random_tensor({static_cast<int64_t>(values.size())}, ++seed);
    for (size_t i = 0; p.trained && i < values.size(); ++i) values[i] += 0.2 * noise.get(static_cast<int64_t>(i));
    ASSERT_TRUE(runner->bind_values(p.name, values).ok()) << p.name;
  }
}

Tensor run(Runner* runner, const Tensor& x, const std::vector<State*>& states = {}) {
  const Shape& shape = runner->record().values[static_cast<size_t>(runner->record().output)].shape;
  Tensor out(x.dtype, {x.sizes[0], x.sizes[1], shape.back()});
  const Status status = runner->run(x.view(), out.view(), states);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

Tensor in_steps(Runner* runner, const Tensor& x, const std::vector<int64_t>& sizes) {
  State state;
  const Status status = runner->make_state(x.sizes[0], 4, &state);  // caches grow on the way
  EXPECT_TRUE(status.ok()) << status.message();
  Tensor all(x.dtype,
             {x.sizes[0], x.sizes[1], runner->record().values[static_cast<size_t>(runner->record().output)].shape.back()});
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    const Tensor part = run(runner, check::tokens(x, begin, begin + size), {&state});
    for (int64_t b = 0; b < x.sizes[0]; ++b) {
      for (int64_t i = 0; i < size * all.sizes[2]; ++i) {
        all.set((b * all.sizes[1] + begin) * all.sizes[2] + i, part.get(b * size * all.sizes[2] + i));
      }
    }
    begin += size;
  }
  EXPECT_EQ(state.position(), x.sizes[1]);
  return all;
}

TEST(Layers, EveryLayerStandsInTheTable) {
  for (const Layer* layer : all_layers()) {
    const bool found =
        std::any_of(std::begin(kCases), std::end(kCases), [&](const Case& c) { return layer->name() == c.layer; });
    EXPECT_TRUE(found) << layer->name();
  }
}

// What takes the tokens of a prompt one by one says so, once.
TEST(Layers, SlowPromptsAreLogged) {
  static std::vector<std::string> said;
  set_log_hook([](const char* sentence, void*) { said.emplace_back(sentence); }, nullptr);
  const auto prompts = [](const char* layer, const std::vector<Setting>& options) {
    Record record;
    ASSERT_TRUE(record_layer(*find_layer(layer), options, &record).ok());
    Runner runner;
    ASSERT_TRUE(Runner::make(std::move(record), {}, &runner).ok());
    ASSERT_TRUE(runner.bind_initial(1).ok());
    in_steps(&runner, random_tensor({1, 32, 8}, 1, Dtype::f32), {16, 16});
  };
  prompts("monarch_attention", {{"hidden", "8"}, {"heads", "2"}, {"block", "4"}, {"causal", "1"}});
  prompts("monarch_attention", {{"hidden", "8"}, {"heads", "2"}, {"block", "4"}, {"causal", "1"}});
  prompts("hierarchical_attention", {{"hidden", "8"}, {"heads", "2"}, {"tie", "prefix"}});
  prompts("linear_attention", {{"hidden", "8"}, {"heads", "2"}, {"map", "exp"}});
  set_log_hook(nullptr, nullptr);
  ASSERT_EQ(said.size(), 2U);
  EXPECT_EQ(said[0],
            "monarch_attention: monarch_decode takes the tokens of a prompt one by one where tokens came before them, "
            "which is slow for many");
  EXPECT_EQ(said[1],
            "hierarchical_attention: hierarchical_decode takes the tokens of a prompt one by one where tie is prefix, "
            "which is slow for many");
}

TEST(Layers, AtOnceInPiecesAndTokenByToken) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line(c));
    Record record;
    const Status status = record_layer(*find_layer(c.layer), settings(c.options), &record);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(decodable(record).ok(), c.decodes) << decodable(record).message();
    const int64_t hidden = record.values[static_cast<size_t>(record.inputs[0])].shape[2], T = c.tokens;
    Tensor exact;
    for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
      Runner runner;
      ASSERT_TRUE(Runner::make(record, {.activations = dtype}, &runner).ok());
      bind_noisy(&runner);
      const Tensor x = random_tensor({2, T, hidden}, 1, dtype);
      const Tensor whole = run(&runner, x);
      for (int64_t i = 0; i < whole.count(); ++i) ASSERT_TRUE(std::isfinite(whole.get(i)));
      if (dtype == Dtype::f64) exact = whole;
      const double gate = dtype == Dtype::f64 ? 1e-11 : 1e-5;
      EXPECT_LT(rms_error(whole, exact), dtype == Dtype::f64 ? 1e-300 : 1e-5);
      if (!c.decodes) continue;
      EXPECT_LT(rms_error(in_steps(&runner, x, {T}), whole), gate) << "a prompt with a state";
      EXPECT_LT(rms_error(in_steps(&runner, x, {T - 6, 5, 1}), whole), gate) << "pieces";
      EXPECT_LT(rms_error(in_steps(&runner, x, {T / 2, T - T / 2}), whole), gate) << "halves";
      EXPECT_LT(rms_error(in_steps(&runner, x, std::vector<int64_t>(static_cast<size_t>(T), 1)), whole), gate) << "tokens";
      // Two sessions of different lengths in one call.
      State a, b;
      ASSERT_TRUE(runner.make_state(1, 64, &a).ok());
      ASSERT_TRUE(runner.make_state(1, 64, &b).ok());
      run(&runner, check::tokens(check::entry(x, 0), 0, T - 1), {&a});
      run(&runner, check::tokens(check::entry(x, 1), 0, T - 2), {&b});
      Tensor both(dtype, {2, 1, hidden});
      for (int64_t i = 0; i < hidden; ++i) {
        both.set(i, x.get((T - 1) * hidden + i));
        both.set(hidden + i, x.get((T + T - 2) * hidden + i));
      }
      State copy;
      ASSERT_TRUE(a.copy(&copy).ok());
      const Tensor next = run(&runner, both, {&a, &b});
      const int64_t O = next.sizes[2];
      for (int64_t i = 0; i < O; ++i) {
        EXPECT_NEAR(next.get(i), whole.get((T - 1) * O + i), 100 * gate * (1 + std::abs(whole.get((T - 1) * O + i))));
        EXPECT_NEAR(next.get(O + i), whole.get((T + T - 2) * O + i),
                    100 * gate * (1 + std::abs(whole.get((T + T - 2) * O + i))));
      }
      EXPECT_EQ(copy.position(), T - 1);
    }
  }
}

// Softmax in bf16 inside a layer in f32: near the exact layer however the tokens come, and half the cache. Operands and result
// are rounded on their own: twice the gate of an operator that rounds what it multiplies.
const double kNarrowAttention = 2 * rms_gate(Dtype::bf16, Pass::forward, Against::reference, false, 0, Rounding::matrix_units);
TEST(Layers, AttentionInFewerBits) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line(c));
    Record record;
    ASSERT_TRUE(record_layer(*find_layer(c.layer), settings(c.options), &record).ok());
    const bool softmax = std::any_of(record.steps.begin(), record.steps.end(),
                                     [](const Step& step) { return step.kind == StepKind::op && step.op->name == "softmax"; });
    const int64_t hidden = record.values[static_cast<size_t>(record.inputs[0])].shape[2], T = c.tokens;
    Runner exact, wide, narrow;
    ASSERT_TRUE(Runner::make(record, {.activations = Dtype::f64}, &exact).ok());
    ASSERT_TRUE(Runner::make(record, {}, &wide).ok());
    ASSERT_TRUE(Runner::make(record, {.attention = Dtype::bf16}, &narrow).ok());
    for (Runner* runner : {&exact, &wide, &narrow}) bind_noisy(runner);
    const Tensor x = random_tensor({2, T, hidden}, 1, Dtype::f32), want = run(&exact, random_tensor({2, T, hidden}, 1));
    const Tensor whole = run(&narrow, x);
    if (!softmax) {
      EXPECT_EQ(rms_error(whole, run(&wide, x)), 0);
      continue;
    }
    EXPECT_GT(rms_error(whole, want), 1e-6);
    EXPECT_LT(rms_error(whole, want), kNarrowAttention);
    if (!c.decodes) continue;
    EXPECT_LT(rms_error(in_steps(&narrow, x, {T}), want), kNarrowAttention) << "a prompt with a state";
    EXPECT_LT(rms_error(in_steps(&narrow, x, {T - 6, 5, 1}), want), kNarrowAttention) << "pieces";
    EXPECT_LT(rms_error(in_steps(&narrow, x, std::vector<int64_t>(static_cast<size_t>(T), 1)), want), kNarrowAttention);
    int64_t many = 0, few = 0;
    ASSERT_TRUE(state_bytes(record, 1 << 12, Dtype::f32, &many).ok());
    ASSERT_TRUE(state_bytes(record, 1 << 12, Dtype::f32, &few, Dtype::bf16).ok());
    EXPECT_LT(few, many);
  }
}

TEST(Layers, PackedSequencesAreSeparate) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line(c));
    Record record;
    ASSERT_TRUE(record_layer(*find_layer(c.layer), settings(c.options), &record).ok());
    if (record.tokens > 0) continue;
    Runner runner;
    ASSERT_TRUE(Runner::make(record, {.activations = Dtype::f64}, &runner).ok());
    bind_noisy(&runner);
    const Tensor x = random_tensor({1, 9, record.values[static_cast<size_t>(record.inputs[0])].shape[2]}, 5);
    Tensor packed = run(&runner, x);
    const Status status = runner.run_packed(x.view(), {0, 4, 4, 9}, packed.view());
    ASSERT_TRUE(status.ok()) << status.message();
    const Tensor first = run(&runner, check::tokens(x, 0, 4)), second = run(&runner, check::tokens(x, 4, 9));
    EXPECT_LT(rms_error(check::tokens(packed, 0, 4), first), 1e-11);
    EXPECT_LT(rms_error(check::tokens(packed, 4, 9), second), 1e-11);
  }
}

TEST(Layers, VectorFilesInEveryType) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(LINNET_SOURCE_DIR "/tests/vectors")) {
    if (entry.path().extension() != ".safetensors") continue;
    SafetensorsFile file;
    ASSERT_TRUE(SafetensorsFile::open(entry.path(), file).ok());
    const bool own = check::layer_files().takes(file.metadata("mechanism"), file.metadata("operator"));
    if (!own && check::layer_in_file(file) == nullptr) continue;
    ++files;
    for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
      check::Result result;
      const Status status = check::layer_files().run(file, dtype, {}, &result);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(result.ok()) << entry.path() << " " << dtype_name(dtype) << "\n" << result.text();
    }
  }
  EXPECT_GE(files, 13);
}

TEST(Layers, WrongOptionsGetASentence) {
  const struct {
    const char *layer, *options, *sentence;
  } cases[] = {
      {"gated_deltanet", "heads=0", "gated_deltanet: heads is 0, expected at least 1"},
      {"gated_deltanet", "heads=two", "gated_deltanet: heads is 'two', expected a whole number"},
      {"gated_deltanet", "colour=red", "gated_deltanet: there is no option 'colour'"},
      {"gated_deltanet", "hidden=8 heads=2 value_heads=3", "gated_deltanet: value_heads is 3, expected a multiple of heads, 2"},
      {"softmax_attention", "hidden=10 heads=4", "softmax_attention: hidden is 10, expected a multiple of heads, 4"},
      {"softmax_attention", "hidden=8 heads=4 kv_heads=3", "softmax_attention: heads is 4, expected a multiple of kv_heads, 3"},
      {"softmax_attention", "hidden=6 heads=2", "softmax_attention: rotary: "},
      {"softmax_attention", "hidden=8 heads=2 position=G5 granularity=headwise", "softmax_attention: the gate G5 has no heads"},
      {"converted_attention", "hidden=6 heads=2", "converted_attention: rotary: "},
      {"converted_attention", "hidden=8 heads=2 mechanism=gla causal=0", "converted_attention: gla sees no later token"},
      {"mamba2", "hidden=8 head=3", "mamba2: inner is 16, expected a multiple of head, 3"},
      {"zeros_attention", "hidden=6 heads=2", "zeros_attention: a head has 3 channels, expected an even number"},
      {"hierarchical_attention", "hidden=8 heads=2 tie=block",
       "hierarchical_attention: tie is block, expected prefix or row when causal"},
      {"free_energy_mixer", "hidden=8 heads=3", "free_energy_mixer: width is 4, expected a multiple of heads, 3"},
      {"inline_attention", "hidden=8 heads=2", "inline_attention: the residual needs height and width of the grid"},
  };
  for (const auto& c : cases) {
    Record record;
    const Status status = record_layer(*find_layer(c.layer), settings(c.options), &record);
    EXPECT_EQ(status.code(), Code::bad_input) << c.layer << " " << c.options;
    EXPECT_EQ(status.message().substr(0, std::strlen(c.sentence)), c.sentence);
  }
}

TEST(Layers, WrongTensorsGetASentence) {
  Record record;
  ASSERT_TRUE(record_layer(*find_layer("deltanet"), settings("hidden=8 heads=2"), &record).ok());
  Runner runner, other;
  ASSERT_TRUE(Runner::make(record, {}, &runner).ok());
  ASSERT_TRUE(Runner::make(record, {}, &other).ok());
  const Tensor x = random_tensor({1, 3, 8}, 1, Dtype::f32), wrong = random_tensor({1, 3, 7}, 1, Dtype::f32);
  Tensor out(Dtype::f32, {1, 3, 8});
  const auto message = [&](const Status& status) { return status.message(); };
  EXPECT_EQ(message(runner.run(x.view(), out.view())), "deltanet: q_proj.weight is not bound");
  EXPECT_EQ(message(runner.bind("q_proj.bias", x.view())), "deltanet: there is no parameter 'q_proj.bias'");
  EXPECT_EQ(message(runner.bind("q_proj.weight", x.view())), "deltanet: q_proj.weight has shape [1, 3, 8], expected [8, 8]");
  ASSERT_TRUE(runner.bind_initial(1).ok());
  ASSERT_TRUE(other.bind_initial(1).ok());
  EXPECT_TRUE(runner.unbound().empty());
  EXPECT_EQ(message(runner.run(wrong.view(), out.view())), "deltanet: x has shape [1, 3, 7], expected [B, T, 8]");
  EXPECT_EQ(message(runner.run(x.view(), wrong.view())), "deltanet: out has shape [1, 3, 7], expected [B, T, 8]");
  State state;
  ASSERT_TRUE(other.make_state(1, 8, &state).ok());
  EXPECT_EQ(message(runner.run(x.view(), out.view(), {&state})), "deltanet: state 0 was not made by this runner");
  ASSERT_TRUE(runner.make_state(2, 8, &state).ok());
  EXPECT_EQ(message(runner.run(x.view(), out.view(), {&state})),
            "deltanet: the states have 2 rows, expected 1 (the rows of x)");
  EXPECT_EQ(message(runner.run_packed(x.view(), {0, 2}, out.view())), "deltanet: offsets are no ascending numbers from 0 to 3");
}

TEST(Layers, CheckpointShapesOfTheSameNumbersAreBound) {
  Record record;
  ASSERT_TRUE(record_layer(*find_layer("kda"), settings("hidden=8 heads=2 key=4 value=4"), &record).ok());
  Runner runner;
  ASSERT_TRUE(Runner::make(record, {}, &runner).ok());
  EXPECT_TRUE(runner.bind("q_conv1d.weight", random_tensor({8, 1, 4}, 1, Dtype::bf16).view()).ok());
  EXPECT_TRUE(runner.bind("dt_bias", random_tensor({8}, 1, Dtype::f32).view()).ok());
  EXPECT_TRUE(runner.bind("A_log", random_tensor({1, 1, 2, 1}, 1, Dtype::f32).view()).ok());
}

// What the papers' pages count.
TEST(Layers, ParametersAndStates) {
  const struct {
    const char *layer, *options;
    int64_t parameters, state;  // state in f32 numbers of one row
  } cases[] = {
      {"metala_attention", "hidden=1024 heads=8", 4 * 1024 * 1024 + 1024 / 2 + 5 * 1024, 1024 * 1024 / 16 + 3 * 1024},
      {"mamba1", "hidden=768 state=16", 768 * 3072 + 1536 * 5 + 1536 * 80 + 1536 * 49 + 1536 * 16 + 1536 + 1536 * 768,
       1536 * 16 + 1536 * 3},
      {"gated_deltanet", "", 2 * 1536 * 2048 + 3 * 3072 * 2048 + (2 * 1536 + 3072) * 4 + 2 * 6 * 2048 + 2 * 6 + 512,
       6 * 256 * 512 + 3 * (2 * 1536 + 3072)},
  };
  for (const auto& c : cases) {
    Record record;
    ASSERT_TRUE(record_layer(*find_layer(c.layer), settings(c.options), &record).ok());
    EXPECT_EQ(record.parameter_count(), c.parameters) << c.layer;
    int64_t bytes = 0;
    ASSERT_TRUE(state_bytes(record, 1000, Dtype::f32, &bytes).ok());
    EXPECT_EQ(bytes, 4 * c.state) << c.layer;
  }
}

TEST(Layers, CostsAddUp) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line(c));
    Record record;
    ASSERT_TRUE(record_layer(*find_layer(c.layer), settings(c.options), &record).ok());
    Cost whole, next;
    Status status = record_cost(record, 1, record.tokens > 0 ? record.tokens : 32, 0, Dtype::f32, &whole);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GT(whole.flops, 0);
    EXPECT_GT(whole.bytes, 0);
    if (!c.decodes) continue;
    status = record_cost(record, 1, 1, 32, Dtype::f32, &next);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GT(next.flops, 0);
    EXPECT_LT(next.flops, whole.flops);
  }
}

TEST(Layers, JsonIsWhole) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line(c));
    std::string text;
    ASSERT_TRUE(layer_json(*find_layer(c.layer), settings(c.options), 0, &text).ok());
    JsonValue root;
    ASSERT_TRUE(parse_json(text, "layer", {}, root).ok());
    EXPECT_EQ(root.find("name").string(), c.layer);
    EXPECT_EQ(root.find("decode").boolean(), c.decodes);
  }
  size_t needed = 0;
  char message[256];
  EXPECT_EQ(linnet_layer_json("deltanet", nullptr, 0, nullptr, 0, &needed, message, sizeof message), LINNET_OK);
  std::string text(needed, ' ');
  EXPECT_EQ(linnet_layer_json("deltanet", nullptr, 0, text.data(), needed, &needed, message, sizeof message), LINNET_OK);
  EXPECT_EQ(text.substr(0, 18), "{\"name\":\"deltanet\"");
  EXPECT_EQ(linnet_layer_json("deltanot", nullptr, 0, nullptr, 0, &needed, message, sizeof message), LINNET_BAD_INPUT);
  EXPECT_STREQ(message, "there is no layer 'deltanot'");
  JsonValue root;
  EXPECT_TRUE(parse_json(linnet_describe_layers(), "layers", {}, root).ok());
}

TEST(Map, SentencesOfWrongExpressions) {
  const struct {
    const char *text, *sentence;
  } cases[] = {
      {"a +", "map \"a +\": expected a number, a name or '(' at character 4"},
      {"a + c", "map \"a + c\": there is no tensor 'c' at character 5"},
      {"f(a)", "map \"f(a)\": there is no function 'f' at character 1"},
      {"max(a)", "map \"max(a)\": max has 1 arguments, expected 2 at character 7"},
      {"(a", "map \"(a\": expected ')' at character 3"},
      {"a b", "map \"a b\": expected an operator at character 3"},
  };
  for (const auto& c : cases) {
    MapProgram program;
    EXPECT_EQ(parse_map(c.text, {"a", "b"}, &program).message(), c.sentence);
  }
}

// Every function against the C library, in double and float, over rows with tails and broadcasts.
TEST(Map, Values) {
  const struct {
    const char* text;
    double (*want)(double a, double b);
  } cases[] = {
      {"a + 2 * b - 3", [](double a, double b) { return a + 2 * b - 3; }},
      {"(a - b) / (1 + a * a)", [](double a, double b) { return (a - b) / (1 + a * a); }},
      {"-exp(a) * softplus(a + b)", [](double a, double b) { return -std::exp(a) * std::log1p(std::exp(a + b)); }},
      {"1 - sigmoid(a)", [](double a, double) { return 1 - 1 / (1 + std::exp(-a)); }},
      {"silu(a) + logsigmoid(b)", [](double a, double b) { return a / (1 + std::exp(-a)) - std::log1p(std::exp(-b)); }},
      {"tanh(a) * sqrt(abs(b))", [](double a, double b) { return std::tanh(a) * std::sqrt(std::abs(b)); }},
      {"min(a, b) + max(a, 0.5) + clip(b, -1, 1)",
       [](double a, double b) { return std::min(a, b) + std::max(a, 0.5) + std::min(std::max(b, -1.0), 1.0); }},
      {"gelu(a) + relu(b) + square(a)",
       [](double a, double b) { return 0.5 * a * std::erfc(-a / std::sqrt(2.0)) + std::max(b, 0.0) + a * a; }},
      {"log(exp(a)) + expm1(b) + log1p(a * a)", [](double a, double b) { return a + std::expm1(b) + std::log1p(a * a); }},
      {"sin(a) + cos(b) + erf(a) + rsqrt(1 + b * b)",
       [](double a, double b) { return std::sin(a) + std::cos(b) + std::erf(a) + 1 / std::sqrt(1 + b * b); }},
      {"gelu_tanh(a)",
       [](double a, double) { return 0.5 * a * (1 + std::tanh(std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a))); }},
  };
  for (const auto& c : cases) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
      Recorder l("map");
      const Value a = l.input("a", {kB, kT, 37}), b = l.input("b", {37});
      l.output(l.map(c.text, {{"a", a}, {"b", b}}));
      Record record;
      ASSERT_TRUE(l.finish(&record).ok());
      Runner runner;
      ASSERT_TRUE(Runner::make(record, {.activations = dtype}, &runner).ok());
      const Tensor x = random_tensor({2, 3, 37}, 1, dtype), y = random_tensor({37}, 2, dtype);
      Tensor out(dtype, {2, 3, 37});
      ASSERT_TRUE(runner.run({x.view(), y.view()}, out.view()).ok());
      for (int64_t i = 0; i < out.count(); ++i) {
        const double want = c.want(x.get(i), y.get(i % 37));
        EXPECT_NEAR(out.get(i), want, (dtype == Dtype::f64 ? 1e-14 : 2e-6) * (1 + std::abs(want))) << c.text;
      }
    }
  }
}

TEST(Map, ReductionsAndPositions) {
  Recorder l("map");
  const Value a = l.input("a", {kB, kT, 3, 5});
  l.output(l.map("sum(a * a) / 5 - mean(a * a) + amax(a) + position", {{"a", a}}));
  Record record;
  ASSERT_TRUE(l.finish(&record).ok());
  Runner runner;
  ASSERT_TRUE(Runner::make(record, {.activations = Dtype::f64}, &runner).ok());
  const Tensor x = random_tensor({2, 4, 3, 5}, 1);
  Tensor out(Dtype::f64, {2, 4, 3, 5});
  ASSERT_TRUE(runner.run(x.view(), out.view()).ok());
  for (int64_t i = 0; i < out.count(); ++i) {
    double most = -1e300;
    for (int64_t j = 0; j < 5; ++j) most = std::max(most, x.get(i / 5 * 5 + j));
    EXPECT_NEAR(out.get(i), most + static_cast<double>(i / 15 % 4), 1e-14);
  }
}

}  // namespace
}  // namespace linnet::layers
