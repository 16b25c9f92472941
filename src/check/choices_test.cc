// Which row of the GPU's table a call takes, without a GPU: choosing looks at shapes, strides and addresses alone.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>

#include "check/plan.h"
#include "core/log.h"

namespace linnet::check {
namespace {

struct Chosen {
  std::string forward, backward;  // without "cuda."; "none": no row takes the call
  std::vector<Choice> list;
};
Chosen choose(const std::string& line) {
  Case c;
  Chosen chosen = {"none", "none", {}};
  const Status parsed = parse_case(line, &c);
  EXPECT_TRUE(parsed.ok()) << parsed.message();
  const Status status = choices(c, &chosen.list);
  EXPECT_TRUE(status.ok()) << line << ": " << status.message();
  for (const Choice& choice : chosen.list) {
    if (!choice.chosen || choice.impl->device != Device::cuda) continue;
    const std::string& name = choice.impl->name;
    (choice.pass == Pass::forward ? chosen.forward : chosen.backward) = name.find('.') == name.npos ? name : name.substr(5);
  }
  return chosen;
}

// What the table promises for a member of the recurrence family, said once more, by what a user sees.
struct Call {
  std::string op;
  bool beta, per_channel;
  Dtype dtype;
  int64_t T, K, V;
  bool l2_norm, strided;

  bool is_16_bit() const { return dtype == Dtype::bf16 || dtype == Dtype::f16; }
  // What does not fit is copied first; with beta in bf16 and not for keys of few channels.
  bool has_tiles() const {
    const bool as_it_is = (K == 64 || K == 128) && (V == 64 || V == 128) && !l2_norm && !strided && (!beta || K == V);
    return is_16_bit() && K <= 128 && V <= 128 && (as_it_is || !beta || (dtype == Dtype::bf16 && K >= 64));
  }
  bool is_refused() const { return dtype == Dtype::f64 || K > 256; }

  // The general engine takes what token by token would, and in 16 bits what the multiply-add units would.
  std::string in_general(const std::string& row, bool few) const {
    return !few && (row == "step" || (row == "chunk" && dtype != Dtype::f32)) ? "general" : row;
  }
  std::string forward() const {
    if (is_refused()) return "none";
    const std::string row = tuned_forward();
    return per_channel && row == "chunk" ? row : in_general(row, T < 16);
  }
  std::string backward() const { return is_refused() ? "none" : in_general(tuned_backward(), false); }
  std::string tuned_forward() const {
    const bool bf16 = dtype == Dtype::bf16;
    if (beta) return !has_tiles() ? "step" : !per_channel ? "delta" : bf16 ? "kda" : "step";
    if (has_tiles() && !per_channel) return "tile";
    if (has_tiles() && bf16) return "channel";
    return K <= 128 && V <= 128 && T >= 32 ? "chunk" : "step";
  }
  std::string tuned_backward() const {
    const bool bf16_tiles = dtype == Dtype::bf16 && has_tiles();
    if (beta && per_channel) return bf16_tiles ? "kda" : "step";
    if (beta) return bf16_tiles ? "delta" : l2_norm ? "step" : "chunk";
    if (per_channel) return bf16_tiles ? "channel" : "step";
    if (has_tiles()) return "tile";
    return K <= 128 && V <= 128 && T >= 32 ? "chunk" : "step";
  }
  std::string line() const {
    return op + (op == "gated_delta" && !per_channel ? " other=g" : "") + (op == "decay" ? " with=g" : "") +
           " B=1 T=" + std::to_string(T) + " Hq=2 Hk=2 Hv=2 K=" + std::to_string(K) + " V=" + std::to_string(V) +
           (l2_norm ? " l2_norm=1" : "") + (strided ? " strided=1" : "") + " dtype=" + dtype_name(dtype) + " pass=bwd";
  }
};

TEST(Choices, of_the_recurrence_family) {
  struct Member {
    const char* op;
    bool beta, per_channel;
  };
  constexpr Member kMembers[] = {{"decay", false, false},
                                 {"gla", false, true},
                                 {"delta", true, false},
                                 {"gated_delta", true, true},
                                 {"gated_delta", true, false}};
  constexpr int64_t kWidths[][2] = {{24, 33}, {64, 64}, {64, 128}, {128, 128}, {128, 40}, {200, 64}, {300, 64}};
  std::map<std::string, std::set<std::string>> seen;
  int count = 0;
  for (const Member& member : kMembers) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (const auto& [K, V] : kWidths) {
        for (const int64_t T : {1, 31, 40, 9000}) {
          for (const bool l2_norm : {false, true}) {
            for (const bool strided : {false, true}) {
              if (l2_norm && !member.beta) continue;
              const Call call = {member.op, member.beta, member.per_channel, dtype, T, K, V, l2_norm, strided};
              const Chosen chosen = choose(call.line());
              EXPECT_EQ(chosen.forward, call.forward()) << call.line();
              EXPECT_EQ(chosen.backward, call.backward()) << call.line();
              seen[member.op].insert(chosen.forward);
              seen[member.op].insert(chosen.backward);
              ++count;
            }
          }
        }
      }
    }
  }
  EXPECT_GE(count, 1500);
  for (const auto& [name, rows] : seen) {  // every row runs something
    for (const Impl& impl : find_op(name)->impls) {
      const bool used = impl.device == Device::cpu || rows.count(impl.name.substr(5)) > 0;
      EXPECT_TRUE(used) << name << ": " << impl.name;
    }
  }
}

struct Line {
  const char *line, *forward, *backward;
};
class ChoiceLines : public testing::TestWithParam<Line> {};

TEST_P(ChoiceLines, holds) {
  const Line& line = GetParam();
  const Chosen chosen = choose(line.line);
  EXPECT_EQ(chosen.forward, line.forward) << line.line;
  EXPECT_EQ(chosen.backward, line.backward) << line.line;
}

INSTANTIATE_TEST_SUITE_P(
    all, ChoiceLines,
    testing::Values(
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=128 V=64 dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=128 V=64 map=elu1 normalize=1 dtype=bf16 pass=bwd", "general", "general"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=64 map=elu1 dtype=bf16 pass=fwd", "tile", "none"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=40 V=96 map=relu with=key_mask dtype=f16 pass=bwd", "tile", "tile"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=64 causal=0 dtype=bf16 pass=bwd", "general", "general"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=24 V=33 dtype=f32 pass=bwd", "chunk", "chunk"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=64 map=dpfp dtype=f32 pass=fwd", "none", "none"},
        Line{"linear T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=300 dtype=f32 pass=bwd", "general", "general"},
        Line{"softmax Tq=100 Tk=100 H=2 Hkv=2 K=64 V=128 dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"softmax Tq=130 Tk=100 H=4 Hkv=2 K=128 V=128 causal=1 with=sinks dtype=bf16 pass=bwd", "hopper", "tile"},
        Line{"softmax Tq=130 Tk=100 H=4 Hkv=2 K=128 V=128 with=key_len dtype=bf16 pass=fwd", "tile", "none"},
        Line{"softmax Tq=100 Tk=100 H=4 Hkv=2 K=33 V=256 with=bias,sinks softcap=5 strided=1 dtype=f16 pass=bwd", "tile",
             "tile"},
        Line{"softmax Tq=100 Tk=100 H=2 Hkv=2 K=300 V=64 dtype=bf16 pass=bwd", "plain", "plain"},
        Line{"softmax Tq=100 Tk=100 H=2 Hkv=2 K=64 V=64 dtype=f32 pass=bwd", "plain", "plain"},
        Line{"softmax Tq=100 Tk=100 H=2 Hkv=2 K=64 V=64 dtype=f64 pass=bwd", "none", "none"},
        Line{"softmax_decode T=1 H=8 Hkv=2 K=64 V=64 capacity=500 dtype=bf16", "tile", "none"},
        Line{"softmax_paged Tq=2 H=8 Hkv=2 K=64 V=64 P=9 page=16 pages=4 dtype=f32", "plain", "none"},
        Line{"gated Tq=100 Tk=100 H=2 Hkv=2 K=64 V=64 dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"gated Tq=100 Tk=100 H=2 Hkv=2 K=64 V=64 position=G2 dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"gated Tq=100 Tk=100 H=2 Hkv=2 K=64 V=64 position=G3 dtype=bf16 pass=bwd", "plain", "plain"},
        Line{"fem_read S=100 H=2 K=64 V=32 with=q,k dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"fem_read S=100 H=2 K=64 V=32 with=q,k dtype=f16 pass=bwd", "plain", "plain"},
        Line{"fem_read S=100 H=2 K=64 V=32 with=q,k cap=50 dtype=f32 pass=bwd", "none", "none"},
        Line{"zeros_softmax T=100 H=2 K=64 V=64 dtype=bf16 pass=bwd", "cuda", "cuda"},
        Line{"linear_decode T=1 K=64 V=64 dtype=bf16", "decode", "none"},
        Line{"linear_decode T=4 K=64 V=64 dtype=bf16", "tile", "none"},
        Line{"linear_decode T=1 K=64 V=64 with=z map=elu1 normalize=1 dtype=bf16", "step", "none"},
        Line{"mamba_ssd T=130 H=8 V=128 G=1 K=128 with=D,z dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"mamba_ssd T=130 H=8 V=40 G=1 K=24 with=D,z dtype=bf16 pass=bwd", "chunk", "chunk"},
        Line{"mamba_ssd T=130 H=8 V=40 G=1 K=200 dtype=f32 pass=bwd", "step", "step"},
        Line{"mamba_ssd_decode T=1 H=8 V=64 G=1 K=128 dtype=bf16", "decode", "none"},
        Line{"metala_mixer T=100 H=2 K=64 V=64 dtype=bf16 pass=bwd", "channel", "channel"},
        Line{"metala_mixer T=100 H=2 K=64 V=64 dtype=f16 pass=bwd", "chunk", "general"},
        Line{"metala_mixer T=10 H=2 K=64 V=64 dtype=bf16 pass=fwd", "step", "none"},
        Line{"metala_mixer_decode T=1 H=2 K=64 V=64 dtype=bf16", "decode", "none"},
        Line{"gla_decode T=1 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=f32", "decode", "none"},
        Line{"gla_decode T=1 Hq=2 Hk=2 Hv=2 K=64 V=63 dtype=f32", "step", "none"},
        Line{"gla_decode T=5 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16", "channel", "none"},
        Line{"delta_decode T=1 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16", "decode", "none"},
        Line{"delta_decode T=1 Hq=2 Hk=2 Hv=2 K=64 V=64 l2_norm=1 dtype=bf16", "step", "none"},
        Line{"delta_decode T=5 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16", "step", "none"},
        Line{"recurrence T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16 pass=bwd", "tile", "tile"},
        Line{"recurrence T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 with=g,beta dtype=bf16 pass=bwd", "kda", "kda"},
        Line{"monarch B=1 T=256 S=256 H=1 K=64 V=64 dtype=f16 pass=bwd", "head", "head"},
        Line{"monarch B=1 T=256 S=256 H=1 K=128 V=64 dtype=f16 pass=bwd", "head", "tile"},
        Line{"monarch B=1 T=1000 S=1000 H=2 K=64 V=64 dtype=f16 pass=bwd", "tile", "tile"},
        Line{"monarch B=1 T=1000 S=1000 H=2 K=64 V=64 dtype=f32 pass=bwd", "plain", "plain"},
        Line{"monarch B=1 T=1000 S=1000 H=2 K=64 V=64 causal=1 dtype=f16 pass=bwd", "plain", "plain"},
        Line{"causal_conv T=70 E=33 W=3 dtype=f32 pass=bwd", "cuda", "cuda"},
        // by name
        Line{"delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16 pass=bwd impl=cuda", "delta", "delta"},
        Line{"delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16 pass=bwd impl=cuda.step", "step", "step"},
        Line{"delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16 pass=bwd impl=cuda.general", "general", "general"},
        Line{"decay T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=f32 pass=bwd impl=cuda.general", "general", "general"},
        Line{"delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=f32 pass=bwd impl=cuda.chunk", "none", "chunk"}));

std::string reason_of(const Chosen& chosen, const std::string& row) {
  for (const Choice& choice : chosen.list) {
    if (choice.impl->name == row && choice.pass == Pass::forward) return choice.reason;
  }
  return "no such row";
}

TEST(Choices, say_why) {
  const std::string line = "delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16";
  EXPECT_EQ(reason_of(choose(line), "cuda.delta"), "");
  EXPECT_EQ(reason_of(choose(line + " l2_norm=1"), "cuda.delta"), "");  // its rows are normed first
  EXPECT_EQ(reason_of(choose(line + " strided=1"), "cuda.delta"), "");  // copied first
  EXPECT_EQ(reason_of(choose(line), "cuda.chunk"), "it has no delta rule (beta)");
  EXPECT_EQ(reason_of(choose("decay T=100 Hq=2 Hk=2 Hv=2 K=40 V=40 dtype=f16"), "cuda.chunk"),
            "cuda.general takes this call in 16 bits");
  EXPECT_EQ(reason_of(choose("delta K=300 V=64"), "cuda.step"), "the CUDA kernels take keys of at most 256 channels");
}

TEST(Choices, obey_the_environment) {
  const std::string line = "delta T=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=bf16";
  setenv("LINNET_IMPL", "delta:cuda.step,gla:ref", 1);
  EXPECT_EQ(choose(line).forward, "step");
  setenv("LINNET_IMPL", "delta:ref", 1);  // of the CPU: the GPU's calls are free
  EXPECT_EQ(choose(line).forward, "delta");
  unsetenv("LINNET_IMPL");
  EXPECT_EQ(choose(line).forward, "delta");
}

// Memory for every row that may run, and a row that takes all that another operator's word promises.
TEST(Choices, rows_are_named_and_have_memory) {
  for (const Op* op : all_ops()) {
    std::set<std::string> names;
    for (const Impl& impl : op->impls) {
      EXPECT_TRUE(names.insert(impl.name).second) << op->name << ": " << impl.name << " twice";
      EXPECT_EQ(impl.device == Device::cuda, is_named(impl, "cuda")) << op->name << ": " << impl.name;
    }
  }
  for (const Choice& choice : choose("gated_delta T=9000 Hq=2 Hk=2 Hv=2 K=128 V=128 other=g dtype=bf16 pass=bwd").list) {
    const bool steps = choice.impl->name == "cuda.step" && choice.pass == Pass::forward;
    if (choice.impl->name != "cuda.delta" && !steps) continue;
    EXPECT_EQ(choice.workspace == 0, steps) << choice.impl->name;
  }
}

TEST(Log, says_once_that_a_row_is_slow_and_why) {
  static std::vector<std::string> said;
  set_log_hook([](const char* sentence, void*) { said.emplace_back(sentence); }, nullptr);
  const Op& op = *find_op("delta");
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  op.construct(args, out, grads);
  alignas(16) static char place[256];
  const auto set = [&](const char* name, Dtype dtype, std::initializer_list<int64_t> size) {
    View view = View::dense(place, dtype, size.begin(), static_cast<int>(size.size()));
    view.device = Device::cuda;
    *reinterpret_cast<View*>(args + op.find_input(name)->offset) = view;
  };
  for (const char* name : {"q", "k", "v"}) set(name, Dtype::f32, {1, 1000, 2, 64});
  set("beta", Dtype::f32, {1, 1000, 2});
  const Impl* step = nullptr;
  for (const Impl& impl : op.impls) step = impl.name == "cuda.step" ? &impl : step;
  ASSERT_NE(step, nullptr);
  EXPECT_GT(step->slow_from, 0);
  for (int i = 0; i < 2; ++i) log_slow(op, *step, Pass::forward, args, nullptr);
  set_log_hook(nullptr, nullptr);
  log_slow(op, *step, Pass::backward, args, nullptr);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0],
            "delta: the call runs on cuda.step, which is slow for this many tokens; cuda.chunk: it has no delta rule (beta); "
            "cuda.delta: its tensors are bf16 or f16");
}

}  // namespace
}  // namespace linnet::check
