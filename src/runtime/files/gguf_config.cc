#include "runtime/files/gguf_config.h"

#include <cmath>
#include <cstring>

#include "core/files/json.h"

namespace linnet {

namespace {

// Llama 3's scaling of the frequencies stands in the file as one factor per frequency. The published models have
// low_freq_factor 1, high_freq_factor 4 and an original length of 8192; that these give the file's factors is checked.
Status read_rope_factors(const GgufFile& file, double theta, int64_t width, double& factor) {
  const GgufTensor& t = *file.tensor("rope_freqs.weight");
  const auto fail = [&](const char* reason) { return bad_input(file.path() + ": rope_freqs.weight " + reason); };
  if (t.type != GgufType::f32 || t.elements() != width / 2) return fail("does not have one F32 for each pair of channels");
  std::vector<float> factors(static_cast<size_t>(t.elements()));
  std::memcpy(factors.data(), t.data, t.bytes);
  factor = 1;
  for (const float f : factors) factor = std::max(factor, static_cast<double>(f));
  for (size_t i = 0; i < factors.size(); ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(width));
    const double turns = 8192 * frequency / (2 * M_PI), low = 1, high = 4;
    double expected = 1;
    if (turns < low) {
      expected = factor;
    } else if (turns <= high) {
      const double s = (turns - low) / (high - low);
      expected = 1 / ((1 - s) / factor + s);
    }
    if (!(std::abs(factors[i] - expected) <= 1e-3 * expected)) return fail("holds other factors than those of Llama 3");
  }
  return {};
}

}  // namespace

Status gguf_config(const GgufFile& file, std::string& json) {
  const auto fail = [&](const std::string& reason) { return bad_input(file.path() + ": " + reason); };
  std::string_view arch;
  if (!file.find("general.architecture").text(arch)) return fail("general.architecture is missing");
  // A file of architecture llama with experts is a Mixtral.
  constexpr struct {
    const char *arch, *type, *experts;  // model_type without experts and with them; null: there is none
  } kArchitectures[] = {{"llama", "llama", "mixtral"}, {"qwen2", "qwen2", nullptr},        {"qwen3", "qwen3", nullptr},
                        {"gpt2", "gpt2", nullptr},     {"qwen2moe", nullptr, "qwen2_moe"}, {"qwen3moe", nullptr, "qwen3_moe"},
                        {"olmoe", nullptr, "olmoe"}};
  const std::string prefix = std::string(arch) + ".";
  int64_t experts = 0;
  file.find(prefix + "expert_count").integer(experts);
  const char* type = nullptr;
  for (const auto& row : kArchitectures) {
    if (arch == row.arch) type = experts > 0 ? row.experts : row.type;
  }
  if (type == nullptr) {
    return fail("general.architecture is " + json_quote_short(arch) + (experts > 0 ? " with experts" : "") +
                ", expected llama, qwen2, qwen3 or gpt2, or with experts llama, qwen2moe, qwen3moe or olmoe");
  }
  const bool gpt2 = arch == "gpt2";
  const GgufTensor* table = file.tensor("token_embd.weight");
  if (table == nullptr || table->rank != 2) return fail("token_embd.weight is missing or no matrix");
  JsonWriter w;
  w.begin_object().member("model_type", type).member("vocab_size", table->shape[0]);
  const auto copy = [&](const char* key, const char* name) {
    const GgufValue value = file.find(prefix + key);
    int64_t whole = 0;
    double real = 0;
    if (value.integer(whole)) {
      w.member(name, whole);
    } else if (value.real(real)) {
      w.member(name, real);
    }
  };
  copy("embedding_length", gpt2 ? "n_embd" : "hidden_size");
  copy("block_count", gpt2 ? "n_layer" : "num_hidden_layers");
  copy("feed_forward_length", gpt2 ? "n_inner" : "intermediate_size");
  copy("attention.head_count", gpt2 ? "n_head" : "num_attention_heads");
  copy("context_length", gpt2 ? "n_positions" : "max_position_embeddings");
  copy("attention.head_count_kv", "num_key_value_heads");
  copy("attention.key_length", "head_dim");
  copy("attention.layer_norm_rms_epsilon", "rms_norm_eps");
  copy("attention.layer_norm_epsilon", "layer_norm_epsilon");
  copy("rope.freq_base", "rope_theta");
  if (experts > 0) {
    copy("expert_count", "num_experts");
    copy("expert_used_count", "num_experts_per_tok");
    copy("expert_shared_feed_forward_length", "shared_expert_intermediate_size");
    // Inner sizes stand in the shapes, too, which older files have alone.
    const GgufTensor* gate = file.tensor("blk.0.ffn_gate_exps.weight");
    const GgufTensor* shared = file.tensor("blk.0.ffn_gate_shexp.weight");
    if (gate == nullptr || gate->rank != 3) return fail("blk.0.ffn_gate_exps.weight is missing or no stack of matrices");
    w.member("moe_intermediate_size", gate->shape[1]);
    int64_t inner = 0;
    if (shared != nullptr && shared->rank == 2 && !file.find(prefix + "expert_shared_feed_forward_length").integer(inner)) {
      w.member("shared_expert_intermediate_size", shared->shape[0]);
    }
    w.member("norm_topk_prob", arch == "llama" || arch == "qwen3moe");  // as llama.cpp has it, whatever the file says
  }
  w.member("tie_word_embeddings", file.tensor("output.weight") == nullptr);
  if (arch == "llama") w.member("attention_bias", file.tensor("blk.0.attn_q.bias") != nullptr);

  std::string_view scaling;
  double factor = 0;
  if (file.find(prefix + "rope.scaling.type").text(scaling) && scaling != "none") {
    w.key("rope_scaling").begin_object().member("rope_type", std::string(scaling));
    if (file.find(prefix + "rope.scaling.factor").real(factor)) w.member("factor", factor);
    w.end_object();
  } else if (file.tensor("rope_freqs.weight") != nullptr) {
    double theta = 10000;
    int64_t width = 0;
    file.find(prefix + "rope.freq_base").real(theta);
    if (!file.find(prefix + "rope.dimension_count").integer(width) || width < 2) return fail("rope.dimension_count is missing");
    LINNET_TRY(read_rope_factors(file, theta, width, factor));
    w.key("rope_scaling").begin_object().member("rope_type", "llama3").member("factor", factor).member("low_freq_factor", 1);
    w.member("high_freq_factor", 4).member("original_max_position_embeddings", 8192).end_object();
  }
  w.end_object();
  json = w.text();
  return {};
}

void use_gguf_names(const GgufFile& file, Description& d) {
  int64_t heads = 0, kv_heads = 0;
  if (d.family == "llama" || d.family == "mixtral") {
    file.find("llama.attention.head_count").integer(heads);
    kv_heads = heads;
    file.find("llama.attention.head_count_kv").integer(kv_heads);
  }
  const bool gpt2 = d.family == "gpt2";
  d.prefixes = {""};
  d.ignored = {"rope_freqs.weight"};
  d.names = {{"embed_tokens.weight", "token_embd.weight"},
             {"embed_positions.weight", "position_embd.weight"},
             {"layers.#.input_layernorm.*", "blk.#.attn_norm.*"},
             {"layers.#.post_attention_layernorm.*", "blk.#.ffn_norm.*"},
             {"layers.#.self_attn.q_norm.*", "blk.#.attn_q_norm.*"},
             {"layers.#.self_attn.k_norm.*", "blk.#.attn_k_norm.*"},
             {"layers.#.self_attn.q_proj.*", gpt2 ? "blk.#.attn_qkv.*" : "blk.#.attn_q.*", false, 0, gpt2 ? 3 : 1, heads},
             {"layers.#.self_attn.k_proj.*", gpt2 ? "blk.#.attn_qkv.*" : "blk.#.attn_k.*", false, gpt2 ? 1 : 0, gpt2 ? 3 : 1,
              kv_heads},
             {"layers.#.self_attn.v_proj.*", gpt2 ? "blk.#.attn_qkv.*" : "blk.#.attn_v.*", false, gpt2 ? 2 : 0, gpt2 ? 3 : 1},
             {"layers.#.self_attn.o_proj.*", "blk.#.attn_output.*"},
             {"layers.#.mlp.router.*", "blk.#.ffn_gate_inp.*"},
             {"layers.#.mlp.shared_expert_gate.*", "blk.#.ffn_gate_inp_shexp.*"},
             {"layers.#.mlp.shared_expert.gate_proj.*", "blk.#.ffn_gate_shexp.*"},
             {"layers.#.mlp.shared_expert.up_proj.*", "blk.#.ffn_up_shexp.*"},
             {"layers.#.mlp.shared_expert.down_proj.*", "blk.#.ffn_down_shexp.*"},
             {"layers.#.mlp.gate_proj.*", "blk.#.ffn_gate.*"},
             {"layers.#.mlp.up_proj.*", "blk.#.ffn_up.*"},
             {"layers.#.mlp.down_proj.*", "blk.#.ffn_down.*"},
             {"norm.*", "output_norm.*"},
             {"lm_head.weight", "output.weight"}};
  int64_t experts = 0;
  for (const BlockSpec& block : d.blocks) experts = std::max(experts, block.mlp.experts);
  if (experts == 0) return;
  for (const char* name : {"gate", "up", "down"}) {
    const std::string part = name;
    d.names.push_back({"layers.#.mlp.experts.@." + part + "_proj.weight", "blk.#.ffn_" + part + "_exps.weight"});
    d.names.back().stacked = experts;
  }
}

}  // namespace linnet
