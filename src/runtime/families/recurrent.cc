// Families whose mixers are recurrences, alone or among layers of softmax attention.
//
//   mamba, mamba2             transformers' and flash-linear-attention's: a norm and the mixer, no MLP
//   falcon_mamba              Mamba with norms of dt, B and C
//   lfm2                      gated short convolutions among attention
//   qwen3_5_text, qwen3_5     Gated DeltaNet among attention with the gate G1; of the second the part for text
//   olmo_hybrid               Gated DeltaNet among attention, with norms before the one and behind the other
//   nemotron_h                Mamba-2, attention or an MLP in each layer; those without experts
//   bamba, granitemoehybrid   Mamba-2 among attention; of Granite's those without experts
//   gla, retnet, delta_net, gated_deltanet, kda   flash-linear-attention's, with layers of attention where `attn` lists them
#include <cmath>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

using layers::number_text, layers::Setting;

std::string whole(int64_t x) { return std::to_string(x); }
std::string yes(bool on) { return on ? "1" : "0"; }

// The fields of every family here; the number of layers.
int64_t read_sizes(Config& config, Description& d, const char* eps, double usual_eps, bool tied, int64_t layers = 0) {
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, int64_t{1} << 40);
  d.eps = config.real(eps, 0, 1, usual_eps);
  d.tied = config.flag("tie_word_embeddings", tied);
  if (d.tied) d.ignored.push_back("lm_head.weight");
  return layers > 0 ? layers : config.count("num_hidden_layers", 1, kMaxLayers);
}

void add_names(Description& d, const std::string& theirs, std::initializer_list<const char*> parameters) {
  for (const char* name : parameters) d.names.push_back({std::string("layers.#.self_attn.") + name, theirs + name});
}

// Rows `first` to `first` + n of a tensor of `total` rows.
NameRule rows_of(const std::string& ours, const std::string& theirs, int64_t first, int64_t total) {
  NameRule rule{ours, theirs};
  rule.first = first;
  rule.total = total;
  return rule;
}

// A number of a list: JSON has no infinity, transformers writes {"__float__": "Infinity"}.
bool read_limit(const JsonValue& value, double* x) {
  if (value.has("__float__")) {
    *x = INFINITY;
    return value.find("__float__").string() == "Infinity";
  }
  if (value.text() == "Infinity") {
    *x = INFINITY;
    return true;
  }
  return value.number(*x);
}
// The range of Mamba-2's step sizes, [low, high].
void add_step_limit(Config& config, const char* field, std::vector<Setting>& options) {
  if (!config.given(field)) return;
  double limit[2] = {0, INFINITY};
  int n = 0;
  for (JsonItems items(config.value(field)); items.next() && n < 3; ++n) {
    if (n == 2 || !read_limit(items.value(), &limit[n]) || !(limit[n] >= 0)) {
      return config.refuse(std::string(field) + " is no pair of numbers from 0 on");
    }
  }
  options.push_back({"dt_min", number_text(limit[0])});
  if (std::isfinite(limit[1])) options.push_back({"dt_max", number_text(limit[1])});
}

void expect_silu(Config& config, const char* field) {
  const std::string act = activation_name(config, field, "silu");
  if (act != "silu") config.refuse(std::string(field) + " is " + json_quote_short(act) + ", expected silu");
}

}  // namespace

void describe_mamba(Config& config, Description& d) {
  const bool second = d.family == "mamba2";
  const bool transformers = !second || config.given("layer_norm_epsilon");
  const int64_t blocks = read_sizes(config, d, transformers ? "layer_norm_epsilon" : "norm_eps", 1e-5, !second);
  const int64_t inner = static_cast<int64_t>(config.real("expand", 1e-3, 1e3, 2) * static_cast<double>(d.hidden));
  expect_silu(config, "hidden_act");
  BlockSpec block;
  block.mixer = second ? "mamba2" : "mamba1";
  block.mlp.kind = MlpSpec::Kind::none;
  block.options = {{"hidden", whole(d.hidden)},
                   {"inner", whole(inner)},
                   {"state", whole(config.count("state_size", 1, kMaxWidth, second ? 128 : 16))},
                   {"taps", whole(config.count("conv_kernel", 1, 64, 4))},
                   {"conv_bias", yes(config.flag("use_conv_bias", true))},
                   {"bias", yes(config.flag("use_bias", false))}};
  if (second) {
    block.options.push_back({"head", whole(config.count("head_dim", 1, kMaxWidth, 64))});
    block.options.push_back({"groups", whole(config.count("n_groups", 1, kMaxWidth, transformers ? 8 : 1))});
    block.options.push_back({"eps", number_text(d.eps)});
    block.options.push_back({"norm_all", yes(transformers)});
    block.options.push_back({"norm", yes(config.flag("rmsnorm", true))});
    block.options.push_back({"norm_before_gate", yes(!transformers && config.flag("norm_before_gate", false))});
    block.options.push_back({"skip_per_channel", yes(config.flag("D_has_hdim", false))});
    add_step_limit(config, config.given("dt_limit") ? "dt_limit" : "time_step_limit", block.options);
  }
  if (d.family == "falcon_mamba") {
    block.options.push_back({"norms", "1"});
    block.options.push_back({"eps", number_text(config.real("mixer_rms_eps", 0, 1, 1e-6))});
  }
  if (!second && config.given("time_step_rank") && !config.value("time_step_rank").is(JsonValue::Kind::string)) {
    block.options.push_back({"rank", whole(config.count("time_step_rank", 1, kMaxWidth))});
  }
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(blocks), block);
  d.names = {{"embed_tokens.weight", "backbone.embeddings.weight"},
             {"layers.#.input_layernorm.*", "backbone.layers.#.norm.*"},
             {"layers.#.self_attn.*", "backbone.layers.#.mixer.*"},
             {"norm.weight", "backbone.norm_f.weight"},
             {"lm_head.weight", "lm_head.weight"}};
}

void describe_lfm2(Config& config, Description& d) {
  const int64_t blocks = read_sizes(config, d, "norm_eps", 1e-5, true);
  d.tied = config.flag("tie_embedding", d.tied);
  if (d.tied) d.ignored.push_back("lm_head.weight");
  const HeadSizes sizes = read_heads(config, d.hidden);
  int64_t inner = config.given("block_ff_dim") ? config.count("block_ff_dim", 1, kMaxWidth)
                                               : config.count("intermediate_size", 1, kMaxWidth, 12288);
  if (config.flag("block_auto_adjust_ff_dim", true)) {
    const int64_t multiple = config.count("block_multiple_of", 1, kMaxWidth, 256);
    const int64_t whole_thirds = 2 * inner / 3;
    inner = static_cast<int64_t>(config.real("block_ffn_dim_multiplier", 1e-3, 1e3, 1) * static_cast<double>(whole_thirds));
    inner = (inner + multiple - 1) / multiple * multiple;
  }
  BlockSpec attention, conv;
  attention.options = {{"hidden", whole(d.hidden)},
                       {"heads", whole(sizes.heads)},
                       {"kv_heads", whole(sizes.kv_heads)},
                       {"key", whole(sizes.width)},
                       {"qk_norm", "rms"},
                       {"norm_eps", number_text(d.eps)}};
  add_rotary(config, sizes.width, 1, attention.options, config.real("rope_theta", 1, 1e12, 1e6));
  conv.mixer = "short_conv";
  conv.options = {{"hidden", whole(d.hidden)},
                  {"taps", whole(config.count("conv_L_cache", 1, 64, 3))},
                  {"bias", yes(config.flag("conv_bias", false))}};
  attention.mlp = conv.mlp = {MlpSpec::Kind::glu, "silu", inner, false};
  for (int64_t i = 0; i < blocks && config.status().ok(); ++i) {
    const std::string type = config.given("layer_types") ? layer_type(config, i, blocks) : "";
    const bool sees =
        type.empty() ? !config.given("full_attn_idxs") || lists(config.value("full_attn_idxs"), i) : type == "full_attention";
    d.blocks.push_back(sees ? attention : conv);
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"},
             {"layers.#.input_layernorm.*", "model.layers.#.operator_norm.*"},
             {"layers.#.post_attention_layernorm.*", "model.layers.#.ffn_norm.*"},
             {"layers.#.mlp.gate_proj.*", "model.layers.#.feed_forward.w1.*"},
             {"layers.#.mlp.up_proj.*", "model.layers.#.feed_forward.w3.*"},
             {"layers.#.mlp.down_proj.*", "model.layers.#.feed_forward.w2.*"},
             {"layers.#.self_attn.o_proj.*", "model.layers.#.self_attn.out_proj.*"},
             {"layers.#.self_attn.q_norm.*", "model.layers.#.self_attn.q_layernorm.*"},
             {"layers.#.self_attn.k_norm.*", "model.layers.#.self_attn.k_layernorm.*"}};
  add_names(d, "model.layers.#.conv.", {"in_proj.*", "out_proj.*", "conv.*"});
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.weight", "model.embedding_norm.weight"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
}

namespace {

void describe_qwen3_5_text(Config& config, Description& d, const std::string& prefix) {
  const int64_t blocks = read_sizes(config, d, "rms_norm_eps", 1e-6, false);
  d.plus_one = true;
  const HeadSizes sizes = read_heads(config, d.hidden, 256);
  const int64_t heads = config.count("linear_num_key_heads", 1, kMaxHeads, 16),
                value_heads = config.count("linear_num_value_heads", 1, kMaxHeads, 32),
                key = config.count("linear_key_head_dim", 1, kMaxWidth, 128),
                value = config.count("linear_value_head_dim", 1, kMaxWidth, 128);
  if (config.flag("attention_bias", false)) config.refuse("attention_bias is true, expected false: the gate has no bias here");
  expect_silu(config, "hidden_act");
  BlockSpec attention, delta;
  attention.options = {{"hidden", whole(d.hidden)}, {"heads", whole(sizes.heads)}, {"kv_heads", whole(sizes.kv_heads)},
                       {"key", whole(sizes.width)}, {"qk_norm", "rms_plus_one"},   {"norm_eps", number_text(d.eps)},
                       {"position", "G1"}};
  add_rotary(config, sizes.width, config.real("partial_rotary_factor", 0, 1, 0.25), attention.options,
             config.real("rope_theta", 1, 1e12, 10000));
  delta.mixer = "gated_deltanet";
  delta.options = {{"hidden", whole(d.hidden)},
                   {"heads", whole(heads)},
                   {"value_heads", whole(value_heads)},
                   {"key", whole(key)},
                   {"value", whole(value)},
                   {"eps", number_text(d.eps)},
                   {"taps", whole(config.count("linear_conv_kernel_dim", 1, 64, 4))}};
  attention.mlp = delta.mlp = {MlpSpec::Kind::glu, "silu", config.count("intermediate_size", 1, kMaxWidth, 12288), false};
  if (!config.status().ok()) return;
  d.names = {{"embed_tokens.weight", prefix + "embed_tokens.weight"}};
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t interval = config.count("full_attention_interval", 1, kMaxLayers, 4);
    const bool sees = config.given("layer_types") ? layer_type(config, i, blocks) == "full_attention" : (i + 1) % interval == 0;
    d.blocks.push_back(sees ? attention : delta);
    const std::string ours = "layers." + whole(i) + ".self_attn.", at = prefix + "layers." + whole(i) + ".";
    if (sees) {  // q and its gate lie head by head
      for (int64_t part = 0; part < 2; ++part) {
        NameRule rule{ours + (part == 0 ? "q_proj.weight" : "g_proj.weight"), at + "self_attn.q_proj.weight"};
        rule.part = part;
        rule.parts = 2;
        rule.joined_heads = sizes.heads;
        d.names.push_back(rule);
      }
      continue;
    }
    const int64_t keys = heads * key, all = 2 * keys + value_heads * value;
    for (const auto& [name, first] : {std::pair("q", int64_t{0}), std::pair("k", keys), std::pair("v", 2 * keys)}) {
      d.names.push_back(rows_of(ours + name + "_proj.weight", at + "linear_attn.in_proj_qkv.weight", first, all));
      d.names.push_back(rows_of(ours + name + "_conv1d.weight", at + "linear_attn.conv1d.weight", first, all));
    }
    d.names.push_back({ours + "g_proj.weight", at + "linear_attn.in_proj_z.weight"});
    d.names.push_back({ours + "b_proj.weight", at + "linear_attn.in_proj_b.weight"});
    d.names.push_back({ours + "a_proj.weight", at + "linear_attn.in_proj_a.weight"});
    d.names.push_back({ours + "o_norm.weight", at + "linear_attn.norm.weight"});
    d.names.push_back({ours + "o_proj.weight", at + "linear_attn.out_proj.weight"});
    d.names.push_back({ours + "*", at + "linear_attn.*"});
  }
  d.names.push_back({"layers.#.*", prefix + "layers.#.*"});
  d.names.push_back({"norm.weight", prefix + "norm.weight"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
  d.ignored.insert(d.ignored.end(), {"model.visual.*", "visual.*", "mtp.*"});
}

}  // namespace

void describe_qwen3_5(Config& config, Description& d) {
  if (d.family == "qwen3_5_text") return describe_qwen3_5_text(config, d, "model.");
  Config text(config.value("text_config"), config.source());
  describe_qwen3_5_text(text, d, "model.language_model.");
  if (!text.status().ok()) config.refuse(text.status().message().substr(config.source().size() + 2));
}

void describe_olmo_hybrid(Config& config, Description& d) {
  const int64_t blocks = read_sizes(config, d, "rms_norm_eps", 1e-6, false);
  const HeadSizes sizes = read_heads(config, d.hidden);
  const bool bias = config.flag("attention_bias", false);
  const int64_t heads = config.count("linear_num_key_heads", 1, kMaxHeads, sizes.heads),
                value_heads = config.count("linear_num_value_heads", 1, kMaxHeads, sizes.heads),
                key = config.count("linear_key_head_dim", 1, kMaxWidth, std::max<int64_t>(3 * d.hidden / (4 * heads), 1)),
                value = config.count("linear_value_head_dim", 1, kMaxWidth, 2 * key);
  expect_silu(config, "hidden_act");
  BlockSpec attention, delta;
  attention.order = BlockOrder::after;
  attention.options = head_options(d.hidden, sizes, bias, bias);
  attention.options.insert(attention.options.end(), {{"qk_norm", "rms_all"}, {"norm_eps", number_text(d.eps)}});
  Config rope(config.value("rope_parameters"), config.source());  // without a base there are no positions
  if (config.given("rope_theta") || rope.given("rope_theta")) {
    add_rotary(config, sizes.width, 1, attention.options, config.real("rope_theta", 1, 1e12, 10000));
  } else {
    attention.options.push_back({"rope", "none"});
  }
  delta.mixer = "gated_deltanet";
  delta.options = {{"hidden", whole(d.hidden)},
                   {"heads", whole(heads)},
                   {"value_heads", whole(value_heads)},
                   {"key", whole(key)},
                   {"value", whole(value)},
                   {"eps", "1e-5"},
                   {"double", yes(config.flag("linear_allow_neg_eigval", true))},
                   {"taps", whole(config.count("linear_conv_kernel_dim", 1, 64, 4))}};
  attention.mlp = delta.mlp = {MlpSpec::Kind::glu, "silu", config.count("intermediate_size", 1, kMaxWidth), false};
  if (!config.status().ok()) return;
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  const auto either = [&](const std::string& ours, const std::string& one, NameRule other) {
    NameRule rule{ours, one};
    rule.or_next = true;
    d.names.push_back(rule);
    other.ours = ours;
    d.names.push_back(other);
  };
  for (int64_t i = 0; i < blocks; ++i) {
    const std::string type = layer_type(config, i, blocks);
    if (type != "full_attention" && type != "linear_attention") {
      return config.refuse("an entry of layer_types is " + json_quote_short(type) +
                           ", expected linear_attention or full_attention");
    }
    const bool sees = type == "full_attention";
    d.blocks.push_back(sees ? attention : delta);
    if (sees) continue;
    const std::string ours = "layers." + whole(i) + ".", at = "model." + ours;
    const int64_t keys = heads * key, all = 2 * keys + value_heads * value;
    for (const auto& [name, first] : {std::pair("q", int64_t{0}), std::pair("k", keys), std::pair("v", 2 * keys)}) {
      const std::string conv = std::string(name) + "_conv1d.weight";
      either(ours + "self_attn." + conv, at + "linear_attn." + conv, rows_of("", at + "linear_attn.conv1d.weight", first, all));
    }
    d.names.push_back({ours + "self_attn.*", at + "linear_attn.*"});
  }
  // Files are named by transformers, or by those who trained it.
  either("layers.#.input_layernorm.*", "model.layers.#.input_layernorm.*", {"", "model.layers.#.attention_layer_norm.*"});
  either("layers.#.post_attention_layernorm.*", "model.layers.#.post_attention_layernorm.*",
         {"", "model.layers.#.feedforward_layer_norm.*"});
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.weight", "model.norm.weight"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
}

namespace {

// What each layer of Nemotron-H is: m, a, - for Mamba, attention, an MLP, from a list of words or a word such as M-M*-.
std::string layer_letters(Config& config) {
  std::string letters;
  const std::string pattern = config.text("hybrid_override_pattern", "");
  for (const char c : pattern) letters += c == 'M' ? 'm' : c == '*' ? 'a' : c == '-' ? '-' : '?';
  const char* field = config.given("layers_block_type") ? "layers_block_type" : "layer_types";
  if (config.given(field)) letters.clear();
  for (JsonItems items(config.value(field)); items.next();) {
    const std::string type = items.value().string();
    letters += type == "mamba" || type == "linear_attention"     ? 'm'
               : type == "attention" || type == "full_attention" ? 'a'
               : type == "mlp"                                   ? '-'
                                                                 : '?';
  }
  if (letters.empty()) config.refuse("layers_block_type is missing");
  if (letters.find('?') != std::string::npos) {
    config.refuse("a layer is neither Mamba nor attention nor an MLP: experts are not known here");
  }
  return letters;
}

}  // namespace

void describe_nemotron_h(Config& config, Description& d) {
  const std::string letters = layer_letters(config);
  if (!config.status().ok()) return;
  if (letters.size() > kMaxLayers) return config.refuse("there are more than " + whole(kMaxLayers) + " layers");
  read_sizes(config, d, "layer_norm_epsilon", 1e-5, false, static_cast<int64_t>(letters.size()));
  const HeadSizes sizes = read_heads(config, d.hidden, 128, 32, 8);
  const int64_t heads = config.count("mamba_num_heads", 1, kMaxHeads, 128),
                head = config.count("mamba_head_dim", 1, kMaxWidth, 64);
  for (const char* field : {"attention_bias", "residual_in_fp32"}) {
    if (config.flag(field, false)) config.refuse(std::string(field) + " is true, expected false");
  }
  if (config.given("sliding_window")) config.refuse("sliding_window is given, expected null");
  expect_silu(config, "mamba_hidden_act");
  BlockSpec attention, mamba, alone;
  attention.options = {{"hidden", whole(d.hidden)},
                       {"heads", whole(sizes.heads)},
                       {"kv_heads", whole(sizes.kv_heads)},
                       {"key", whole(sizes.width)},
                       {"rope", "none"}};
  mamba.mixer = "mamba2";
  mamba.options = {{"hidden", whole(d.hidden)},
                   {"inner", whole(heads * head)},
                   {"head", whole(head)},
                   {"groups", whole(config.count("n_groups", 1, kMaxWidth, 8))},
                   {"state", whole(config.count("ssm_state_size", 1, kMaxWidth, 128))},
                   {"taps", whole(config.count("conv_kernel", 1, 64, 4))},
                   {"conv_bias", yes(config.flag("use_conv_bias", true))},
                   {"bias", yes(config.flag("use_bias", false))},
                   {"eps", number_text(d.eps)},
                   {"dt_min", number_text(config.real("time_step_min", 0, 1e6, 1e-3))}};
  attention.mlp.kind = mamba.mlp.kind = MlpSpec::Kind::none;
  alone.mixer = "";
  alone.mlp = {MlpSpec::Kind::plain, activation_name(config, "mlp_hidden_act", "relu2"),
               config.count("intermediate_size", 1, kMaxWidth, 21504), config.flag("mlp_bias", false)};
  if (!config.status().ok()) return;
  for (const char letter : letters) d.blocks.push_back(letter == 'm' ? mamba : letter == 'a' ? attention : alone);
  d.prefixes = {"backbone.", "model."};
  d.names = {{"embed_tokens.weight", "embeddings.weight"},
             {"layers.#.input_layernorm.*", "layers.#.norm.*"},
             {"layers.#.post_attention_layernorm.*", "layers.#.norm.*"},
             {"layers.#.self_attn.*", "layers.#.mixer.*"},
             {"layers.#.mlp.*", "layers.#.mixer.*"},
             {"norm.weight", "norm_f.weight"},
             {"lm_head.weight", "lm_head.weight"}};
  d.ignored.push_back("mtp.*");
}

void describe_mamba_hybrid(Config& config, Description& d) {
  const bool granite = d.family == "granitemoehybrid";
  const int64_t blocks = read_sizes(config, d, "rms_norm_eps", granite ? 1e-6 : 1e-5, false);
  const HeadSizes sizes = read_heads(config, d.hidden);
  const bool bias = config.flag("attention_bias", false);
  BlockSpec attention, mamba;
  attention.options = head_options(d.hidden, sizes, bias, bias);
  if (granite && config.text("position_embedding_type", "nope") != "rope") {
    attention.options.push_back({"rope", "none"});
  } else {
    add_rotary(config, sizes.width, config.real("partial_rotary_factor", 0, 1, granite ? 1 : 0.5), attention.options,
               config.real("rope_theta", 1, 1e12, 10000));
  }
  const int64_t heads = config.count("mamba_n_heads", 1, kMaxHeads, 128);
  const int64_t inner = config.count("mamba_expand", 1, 1000, 2) * d.hidden;
  if (inner % heads != 0) config.refuse("mamba_n_heads is " + whole(heads) + ", expected a divisor of " + whole(inner));
  mamba.mixer = "mamba2";
  mamba.options = {{"hidden", whole(d.hidden)},
                   {"inner", whole(inner)},
                   {"head", whole(inner / heads)},
                   {"groups", whole(config.count("mamba_n_groups", 1, kMaxWidth, 1))},
                   {"state", whole(config.count("mamba_d_state", 1, kMaxWidth, 256))},
                   {"taps", whole(config.count("mamba_d_conv", 1, 64, 4))},
                   {"conv_bias", yes(config.flag("mamba_conv_bias", true))},
                   {"bias", yes(config.flag("mamba_proj_bias", false))},
                   {"eps", number_text(d.eps)},
                   {"norm_all", "1"}};
  add_step_limit(config, "time_step_limit", mamba.options);
  const std::string act = activation_name(config, "hidden_act", "silu");
  const int64_t width = config.count(granite ? "shared_intermediate_size" : "intermediate_size", 1, kMaxWidth);
  attention.mlp = mamba.mlp = {MlpSpec::Kind::glu, act, width, config.flag("mlp_bias", false)};
  const int64_t experts = granite ? config.count("num_local_experts", 0, kMaxExperts, 8) : 0;
  if (experts > 0) {
    attention.mlp = {.kind = MlpSpec::Kind::experts,
                     .act = act,
                     .inner = config.count("intermediate_size", 1, kMaxWidth),
                     .experts = experts,
                     .top = config.count("num_experts_per_tok", 1, experts, std::min<int64_t>(2, experts)),
                     .shared = width};
    mamba.mlp = attention.mlp;
  }
  if (granite) {
    read_granite_scales(config, d);
    attention.options.push_back({"scale", number_text(config.real("attention_multiplier", 1e-9, 1e9, 1))});
  }
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < blocks; ++i) {
    const std::string type = config.given("layer_types") ? layer_type(config, i, blocks) : "";
    const bool sees =
        type.empty() ? lists(config.value("attn_layer_indices"), i) : type == "attention" || type == "full_attention";
    d.blocks.push_back(sees ? attention : mamba);
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  add_names(d, "model.layers.#.mamba.", {"in_proj.*", "conv1d.*", "A_log", "D", "dt_bias", "norm.*", "out_proj.*"});
  if (experts > 0) {
    add_granite_experts(mamba.mlp, d);
  } else if (granite) {
    d.names.push_back(rows_of("layers.#.mlp.gate_proj.*", "model.layers.#.shared_mlp.input_linear.*", 0, 2 * width));
    d.names.push_back(rows_of("layers.#.mlp.up_proj.*", "model.layers.#.shared_mlp.input_linear.*", width, 2 * width));
    d.names.push_back({"layers.#.mlp.down_proj.*", "model.layers.#.shared_mlp.output_linear.*"});
  } else {
    d.names.push_back({"layers.#.post_attention_layernorm.*", "model.layers.#.pre_ff_layernorm.*"});
    d.names.push_back({"layers.#.mlp.*", "model.layers.#.feed_forward.*"});
  }
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.weight", granite ? "model.norm.weight" : "model.final_layernorm.weight"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
}

namespace {

// What flash-linear-attention's mixers are here; `heads` is num_heads.
BlockSpec fla_mixer(Config& config, const std::string& family, int64_t hidden, double eps) {
  BlockSpec block;
  const bool retnet = family == "retnet", gla = family == "gla", delta = family == "delta_net";
  const int64_t heads = config.count("num_heads", 1, kMaxHeads, gla ? 4 : retnet ? 8 : family == "gated_deltanet" ? 6 : 16);
  const auto per_head = [&](const char* field, double usual) {  // channels of a head, all of them `field` times hidden
    return whole(static_cast<int64_t>(static_cast<double>(hidden) * config.real(field, 1e-3, 1e3, usual)) / heads);
  };
  const int64_t taps = config.flag("use_short_conv", !gla && !retnet) ? config.count("conv_size", 1, 64, 4) : 0;
  block.options = {{"hidden", whole(hidden)}, {"heads", whole(heads)}, {"eps", number_text(eps)}};
  const auto add = [&](const char* name, const std::string& value) { block.options.push_back({name, value}); };
  const auto expect = [&](const char* field, bool value) {
    if (config.flag(field, value) != value) config.refuse(std::string(field) + " is not known here with this value");
  };
  for (const char* field : {"feature_map", "attnres_block_size"}) {
    if (config.given(field)) config.refuse(std::string(field) + " is given, expected null: nothing here has it");
  }
  expect("use_gv", false);
  if (gla || retnet) {
    block.mixer = gla ? "gated_linear_attention" : "retention";
    add("key", per_head("expand_k", gla ? 0.5 : 1));
    add("value", per_head("expand_v", gla ? 1 : 2));
    add("gate", yes(config.flag("use_output_gate", true)));
    add("norm", yes(config.flag("elementwise_affine", true)));
    const int64_t kv_heads = config.count("num_kv_heads", 1, kMaxHeads, heads);
    if (gla) {
      expect("use_gk", true);
      add("kv_heads", whole(kv_heads == heads ? 0 : kv_heads));
      add("taps", whole(taps));
      if (config.given("clamp_min")) add("clamp", number_text(config.real("clamp_min", -1e9, 0)));
    } else {
      expect("use_short_conv", false);
      if (kv_heads != heads) config.refuse("num_kv_heads is " + whole(kv_heads) + ", expected num_heads, " + whole(heads));
      add("rope", "half");
    }
  } else if (delta) {
    block.mixer = "deltanet";
    add("key", per_head("expand_k", 1));
    add("value", per_head("expand_v", 1));
    add("taps", whole(taps));
    const std::string act = config.text("qk_activation", "silu");
    add("activation", act == "elu" ? "elu1" : act);
    add("norm", config.text("qk_norm", "l2"));
    add("use_beta", yes(config.flag("use_beta", true)));
    add("double", yes(config.flag("allow_neg_eigval", false)));
    add("gate", yes(config.flag("use_gate", false)));
  } else {
    const bool kda = family == "kda";
    block.mixer = family;
    const int64_t key = config.count("head_dim", 1, kMaxWidth, kda ? 128 : 256);
    const int64_t value_heads = config.count("num_v_heads", 1, kMaxHeads, heads);
    add("key", whole(key));
    add("value", whole(static_cast<int64_t>(static_cast<double>(key) * config.real("expand_v", 1e-3, 1e3, kda ? 1 : 2))));
    add("taps", whole(taps));
    add("double", yes(config.flag("allow_neg_eigval", false)));
    if (kda) {
      if (value_heads != heads) config.refuse("num_v_heads is " + whole(value_heads) + ", expected num_heads, " + whole(heads));
      if (config.given("lower_bound")) add("lower", number_text(config.real("lower_bound", -1e9, 1e9)));
    } else {
      add("value_heads", whole(value_heads));
      add("gate", yes(config.flag("use_gate", true)));
    }
  }
  return block;
}

// Layers of softmax attention as `attn` describes them: {"layers": [1, 5], "num_heads": 8, ..}.
void add_attention(Config& config, const JsonValue& spec_value, const MlpSpec& mlp, Description& d) {
  Config spec(spec_value, config.source());
  BlockSpec attention;
  const int64_t heads = spec.count("num_heads", 1, kMaxHeads), window = spec.count("window_size", 1, int64_t{1} << 40, 0);
  attention.options = {{"hidden", whole(d.hidden)},
                       {"heads", whole(heads)},
                       {"kv_heads", whole(spec.count("num_kv_heads", 1, kMaxHeads, heads))},
                       {"bias", yes(spec.flag("qkv_bias", false))},
                       {"rope_base", number_text(spec.real("rope_theta", 1, 1e12, 10000))}};
  add_window(window > 0 ? window : -1, attention);
  attention.mlp = mlp;
  if (!spec.given("layers")) spec.refuse("attn has no list of layers");
  if (!spec.status().ok()) return config.refuse(spec.status().message().substr(config.source().size() + 2));
  for (size_t i = 0; i < d.blocks.size(); ++i) {
    if (lists(spec.value("layers"), static_cast<int64_t>(i))) d.blocks[i] = attention;
  }
}

}  // namespace

void describe_fla(Config& config, Description& d) {
  const int64_t blocks = read_sizes(config, d, "norm_eps", 1e-6, false);
  BlockSpec block = fla_mixer(config, d.family, d.hidden, d.eps);
  expect_silu(config, "hidden_act");
  const double ratio = config.real("hidden_ratio", 1e-3, 1e3, d.family == "retnet" ? 2 : 4);
  const int64_t usual = (static_cast<int64_t>(static_cast<double>(d.hidden) * ratio * 2 / 3) + 255) / 256 * 256;
  block.mlp = {MlpSpec::Kind::glu, "silu", config.count("intermediate_size", 1, kMaxWidth, usual), false};
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(blocks), block);
  if (const JsonValue attn = config.value("attn"); attn.is(JsonValue::Kind::array)) {
    for (JsonItems specs(attn); specs.next();) add_attention(config, specs.value(), block.mlp, d);
  } else if (config.given("attn")) {
    add_attention(config, attn, block.mlp, d);
  }
  // Theirs has one of two names: with the gate inside it, or behind it.
  const bool fused = config.flag("fuse_norm", true) && config.flag("use_output_gate", true);
  const std::string norm = fused ? "model.layers.#.attn.g_norm_swish_gate.*" : "model.layers.#.attn.g_norm.*";
  d.names = {{"embed_tokens.weight", "model.embeddings.weight"},
             {"layers.#.input_layernorm.*", "model.layers.#.attn_norm.*"},
             {"layers.#.post_attention_layernorm.*", "model.layers.#.mlp_norm.*"},
             {"layers.#.self_attn.g_norm_swish_gate.*", norm},
             {"layers.#.self_attn.g_norm.*", norm}};
  d.names.push_back({"layers.#.self_attn.*", "model.layers.#.attn.*"});
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.weight", "model.norm.weight"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
  d.ignored.push_back("rotary.inv_freq");
}

}  // namespace linnet
