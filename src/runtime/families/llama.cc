// Llama, Qwen2, Qwen3: pre-norm blocks of rotary attention with grouped heads and a gated MLP.
#include "core/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

using layers::number_text, layers::Setting;

// rope_theta and rope_scaling of older files, rope_parameters of newer ones.
void add_rotary(Config& config, std::vector<Setting>& options) {
  const bool newer = config.given("rope_parameters");
  Config nested(config.value(newer ? "rope_parameters" : "rope_scaling"), config.source());
  const bool scaled = newer || config.given("rope_scaling");
  const double theta = newer ? nested.real("rope_theta", 1, 1e12, config.real("rope_theta", 1, 1e12, 10000))
                             : config.real("rope_theta", 1, 1e12, 10000);
  options.push_back({"rope_base", number_text(theta)});
  const std::string kind = scaled ? nested.text("rope_type", nested.text("type", "default")) : "default";
  if (kind == "linear" || kind == "llama3") {
    options.push_back({"rope_scaling", kind});
    options.push_back({"rope_factor", number_text(nested.real("factor", 1e-6, 1e6))});
  } else if (kind != "default") {
    config.refuse("rope_type is " + json_quote_short(kind) + ", expected default, linear or llama3");
  }
  if (kind == "llama3") {
    options.push_back({"rope_low", number_text(nested.real("low_freq_factor", 0, 1e6))});
    options.push_back({"rope_high", number_text(nested.real("high_freq_factor", 0, 1e6))});
    options.push_back({"rope_length", std::to_string(nested.count("original_max_position_embeddings", 1, int64_t{1} << 40))});
  }
  if (!nested.status().ok() && config.status().ok()) {
    config.refuse(nested.status().message().substr(config.source().size() + 2));
  }
}

// The window of layer i, -1: none.
int64_t window_of(Config& config, int64_t i, int64_t layers) {
  if (!config.given("sliding_window") || !config.flag("use_sliding_window", !config.given("max_window_layers"))) return -1;
  const int64_t window = config.count("sliding_window", 1, int64_t{1} << 40);
  if (config.given("layer_types")) {
    JsonItems types(config.value("layer_types"));
    for (int64_t j = 0; j <= i; ++j) {
      if (!types.next()) {
        config.refuse("layer_types has fewer than " + std::to_string(layers) + " entries");
        return -1;
      }
    }
    return types.value().equals("sliding_attention") ? window : -1;
  }
  return i >= config.count("max_window_layers", 0, kMaxLayers, 28) ? window : -1;
}

}  // namespace

void describe_llama(Config& config, Description& d) {
  const bool llama = d.family == "llama", qwen2 = d.family == "qwen2", qwen3 = d.family == "qwen3";
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, llama ? 2048 : 32768);
  d.eps = config.real("rms_norm_eps", 0, 1, 1e-6);
  d.tied = config.flag("tie_word_embeddings", false);
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers),
                inner = config.count("intermediate_size", 1, kMaxWidth);
  const int64_t heads = config.count("num_attention_heads", 1, kMaxHeads);
  const int64_t kv_heads = config.count("num_key_value_heads", 1, kMaxHeads, heads);
  const int64_t width = config.count("head_dim", 1, kMaxWidth, qwen3 ? 128 : heads > 0 ? d.hidden / heads : 1);
  if (!config.given("head_dim") && !qwen3 && d.hidden % heads != 0) {
    config.refuse("hidden_size is " + std::to_string(d.hidden) + ", expected a multiple of num_attention_heads, " +
                  std::to_string(heads));
  }
  if (heads % kv_heads != 0) {
    config.refuse("num_attention_heads is " + std::to_string(heads) + ", expected a multiple of num_key_value_heads, " +
                  std::to_string(kv_heads));
  }
  const bool bias = config.flag("attention_bias", qwen2);
  BlockSpec block;
  block.options = {
      {"hidden", std::to_string(d.hidden)}, {"heads", std::to_string(heads)}, {"kv_heads", std::to_string(kv_heads)},
      {"key", std::to_string(width)},       {"bias", bias ? "1" : "0"},       {"out_bias", bias && !qwen2 ? "1" : "0"}};
  if (qwen3) {
    block.options.push_back({"qk_norm", "rms"});
    block.options.push_back({"norm_eps", number_text(d.eps)});
  }
  add_rotary(config, block.options);
  block.mlp = {MlpSpec::Kind::glu, activation_name(config, "hidden_act", "silu"), inner, config.flag("mlp_bias", false)};
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    d.blocks.push_back(block);
    if (const int64_t window = window_of(config, i, layers); window > 0) {
      d.blocks.back().options.push_back({"window", std::to_string(window - 1) + ",-1"});  // the token itself is one of them
    }
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"},
             {"layers.#.*", "model.layers.#.*"},
             {"norm.weight", "model.norm.weight"},
             {"lm_head.weight", "lm_head.weight"}};
  d.ignored = {"rotary_emb.inv_freq"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

}  // namespace linnet
