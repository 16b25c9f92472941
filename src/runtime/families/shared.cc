// What the configurations of several families have in common.
#include <cmath>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

using layers::number_text, layers::Setting;

HeadSizes read_heads(Config& config, int64_t hidden, int64_t width, int64_t heads, int64_t kv_heads) {
  HeadSizes sizes;
  sizes.heads =
      heads > 0 ? config.count("num_attention_heads", 1, kMaxHeads, heads) : config.count("num_attention_heads", 1, kMaxHeads);
  sizes.kv_heads = config.count("num_key_value_heads", 1, kMaxHeads, kv_heads > 0 ? kv_heads : sizes.heads);
  if (width == 0 && !config.given("head_dim") && hidden % sizes.heads != 0) {
    config.refuse("hidden_size is " + std::to_string(hidden) + ", expected a multiple of num_attention_heads, " +
                  std::to_string(sizes.heads));
  }
  sizes.width = config.count("head_dim", 1, kMaxWidth, width > 0 ? width : std::max<int64_t>(hidden / sizes.heads, 1));
  if (sizes.heads % sizes.kv_heads != 0) {
    config.refuse("num_attention_heads is " + std::to_string(sizes.heads) + ", expected a multiple of num_key_value_heads, " +
                  std::to_string(sizes.kv_heads));
  }
  return sizes;
}

void add_rotary(Config& config, int64_t width, double share, std::vector<Setting>& options, double theta, const char* part) {
  const bool newer = config.given("rope_parameters");
  JsonValue fields = config.value(newer ? "rope_parameters" : "rope_scaling");
  if (newer && part != nullptr && fields.has(part)) fields = fields.find(part);
  Config nested(fields, config.source());
  const bool scaled = newer || config.given("rope_scaling");
  theta = newer ? nested.real("rope_theta", 1, 1e12, theta) : theta;
  options.push_back({"rope_base", number_text(theta)});
  if (newer) share = nested.real("partial_rotary_factor", 0, 1, share);
  if (share < 1) {
    const auto turning = static_cast<int64_t>(share * static_cast<double>(width));
    if (turning < 2 || turning % 2 != 0) {
      config.refuse("the rotary share of a head is " + std::to_string(turning) + " channels, expected an even number");
    }
    options.push_back({"rope_dims", std::to_string(turning)});
  }
  const std::string kind = scaled ? nested.text("rope_type", nested.text("type", "default")) : "default";
  if (kind == "linear" || kind == "llama3" || kind == "yarn") {
    options.push_back({"rope_scaling", kind});
    options.push_back({"rope_factor", number_text(nested.real("factor", 1e-6, 1e6))});
  } else if (kind != "default" && kind != "dynamic") {  // dynamic: nothing changes within max_position_embeddings
    config.refuse("rope_type is " + json_quote_short(kind) + ", expected default, linear, dynamic, llama3 or yarn");
  }
  if (kind == "yarn") {
    const double factor = nested.real("factor", 1e-6, 1e6);
    const int64_t context = config.count("max_position_embeddings", 1, int64_t{1} << 40, 2048);
    const auto length = [&](double m) { return factor > 1 ? 0.1 * m * std::log(factor) + 1 : 1; };
    const double some = nested.real("mscale", 0, 1e6, 0), all = nested.real("mscale_all_dim", 0, 1e6, 0);
    const double usual = some > 0 && all > 0 ? length(some) / length(all) : length(1);
    if (!nested.flag("truncate", true)) config.refuse("truncate of the rotary scaling is false, expected true");
    options.push_back({"rope_low", number_text(nested.real("beta_slow", 1e-6, 1e6, 1))});
    options.push_back({"rope_high", number_text(nested.real("beta_fast", 1e-6, 1e6, 32))});
    options.push_back(
        {"rope_length", std::to_string(nested.count("original_max_position_embeddings", 1, int64_t{1} << 40, context))});
    options.push_back({"rope_attention", number_text(nested.real("attention_factor", 0, 1e6, usual))});
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

std::vector<layers::Setting> head_options(int64_t hidden, const HeadSizes& sizes, bool bias, bool out_bias) {
  return {{"hidden", std::to_string(hidden)},
          {"heads", std::to_string(sizes.heads)},
          {"kv_heads", std::to_string(sizes.kv_heads)},
          {"key", std::to_string(sizes.width)},
          {"bias", bias ? "1" : "0"},
          {"out_bias", out_bias ? "1" : "0"}};
}

void add_decoder_names(Description& d) {
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.*", "model.norm.*"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
  d.ignored = {"rotary_emb.inv_freq"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

bool lists(const JsonValue& list, int64_t number) {
  for (JsonItems items(list); items.next();) {
    int64_t entry = 0;
    if (items.value().count(entry) == nullptr && entry == number) return true;
  }
  return false;
}

void read_granite_scales(Config& config, Description& d) {
  d.embed_scale = config.real("embedding_multiplier", 1e-9, 1e9, 1);
  d.residual_scale = config.real("residual_multiplier", 1e-9, 1e9, 1);
  d.logit_scale = 1 / config.real("logits_scaling", 1e-9, 1e9, 1);
}

void describe_text_part(Config& config, Description& d) {
  Config text(config.value("text_config"), config.source());
  const std::string own = d.family;
  d.family = own == "gemma3" ? "gemma3_text" : "mistral";
  if (const std::string type = text.text("model_type", d.family); type != d.family) {
    config.refuse("model_type of text_config is " + json_quote_short(type) + ", expected " + d.family);
    return;
  }
  own == "gemma3" ? describe_gemma(text, d) : describe_llama(text, d);
  d.family = own;
  if (!text.status().ok()) return config.refuse(text.status().message().substr(config.source().size() + 2));
  const bool tied = config.flag("tie_word_embeddings", d.tied);
  if (tied && !d.tied) d.ignored.push_back("lm_head.weight");
  d.tied = tied;
  // Files have one of two orders of names; heads stand outside.
  for (NameRule& rule : d.names) {
    if (rule.theirs.rfind("model.", 0) == 0) rule.theirs = rule.theirs.substr(6);
  }
  d.prefixes = {"language_model.model.", "model.language_model."};
  d.ignored.insert(d.ignored.end(), {"vision_tower.*", "model.vision_tower.*", "multi_modal_projector.*",
                                     "model.multi_modal_projector.*", "language_model.lm_head.weight"});
}

std::string layer_type(Config& config, int64_t i, int64_t layers) {
  if (!config.given("layer_types")) {  // older files: every so many layers one sees all, or a word such as LLLG
    const JsonValue pattern = config.value("sliding_window_pattern");
    if (pattern.is(JsonValue::Kind::string)) {
      const std::string word = pattern.string();
      if (!word.empty()) return word[static_cast<size_t>(i) % word.size()] == 'L' ? "sliding_attention" : "full_attention";
    }
    int64_t period = 0;
    if (pattern.is(JsonValue::Kind::null) || pattern.count(period) != nullptr || period < 1) return "";
    return (i + 1) % period != 0 ? "sliding_attention" : "full_attention";
  }
  JsonItems types(config.value("layer_types"));
  for (int64_t j = 0; j <= i; ++j) {
    if (!types.next()) {
      config.refuse("layer_types has fewer than " + std::to_string(layers) + " entries");
      return "";
    }
  }
  return types.value().string();
}

int64_t layer_window(Config& config, int64_t i, int64_t layers, int64_t first) {
  if (!config.given("sliding_window") || !config.flag("use_sliding_window", !config.given("max_window_layers"))) return -1;
  const int64_t window = config.count("sliding_window", 1, int64_t{1} << 40);
  if (const std::string type = layer_type(config, i, layers); !type.empty()) return type == "sliding_attention" ? window : -1;
  return i >= config.count("max_window_layers", 0, kMaxLayers, first) ? window : -1;
}

void add_window(int64_t window, BlockSpec& block) {
  if (window > 0) block.options.push_back({"window", std::to_string(window - 1) + ",-1"});
}

}  // namespace linnet
