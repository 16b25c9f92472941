// Decoders that are Llama but for a few switches: one row of a table each.
#include <cmath>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

enum class Norm { rms, rms_plain, layer, layer_bias, layer_plus_one, layer_plain };  // layer: no bias; plain: no weight either

struct Kin {
  const char* type;
  BlockOrder order = BlockOrder::pre;
  Norm norm = Norm::rms;
  const char* eps_field = "rms_norm_eps";
  double eps = 1e-6, theta = 10000, share = 1;
  bool interleaved = false;  // pairs of channels that turn together lie side by side
  int64_t width = 0;         // of a head; 0: hidden / heads
  const char *bias_field = "attention_bias", *out_bias_field = "attention_bias", *mlp_bias_field = "mlp_bias";  // null: none
  bool bias = false, out_bias = false, mlp_bias = false;
  const char* qk_norm = "none";
  bool norm_last = false;                               // q and k turn first
  bool tied = false, gated = true, joined_mlp = false;  // joined: gate and up in one matrix
  const char* act = "silu";
  bool unturned_full = false;  // layers without a window do not turn where others have one
};

constexpr Kin kKin[] = {
    {.type = "granite"},
    {.type = "arcee", .eps = 1e-5, .gated = false, .act = "relu2"},
    {.type = "ernie4_5",
     .eps = 1e-5,
     .theta = 500000,
     .interleaved = true,
     .width = 128,
     .bias_field = "use_bias",
     .out_bias_field = "use_bias",
     .mlp_bias_field = "use_bias",
     .tied = true},
    {.type = "glm",
     .eps = 1.5625e-7,
     .share = 0.5,
     .interleaved = true,
     .width = 128,
     .out_bias_field = nullptr,
     .mlp_bias_field = nullptr,
     .bias = true,
     .joined_mlp = true},
    {.type = "glm4",
     .order = BlockOrder::sandwich,
     .eps = 1.5625e-7,
     .share = 0.5,
     .interleaved = true,
     .width = 128,
     .out_bias_field = nullptr,
     .mlp_bias_field = nullptr,
     .bias = true,
     .joined_mlp = true},
    {.type = "seed_oss", .width = 128, .out_bias_field = "attention_out_bias", .bias = true},
    {.type = "helium", .eps = 1e-8, .theta = 100000, .interleaved = true, .width = 128, .out_bias_field = nullptr},
    {.type = "olmo", .norm = Norm::layer_plain, .eps_field = nullptr, .eps = 1e-5},
    {.type = "olmo3", .order = BlockOrder::after, .eps = 1e-5, .theta = 500000, .qk_norm = "rms_all"},
    {.type = "exaone4",
     .order = BlockOrder::after,
     .eps = 1e-5,
     .bias_field = nullptr,
     .out_bias_field = nullptr,
     .mlp_bias_field = nullptr,
     .qk_norm = "rms",
     .unturned_full = true},
    {.type = "cohere",
     .order = BlockOrder::parallel,
     .norm = Norm::layer,
     .eps_field = "layer_norm_eps",
     .eps = 1e-5,
     .theta = 500000,
     .interleaved = true,
     .mlp_bias_field = nullptr,
     .tied = true},
    {.type = "cohere2",
     .order = BlockOrder::parallel,
     .norm = Norm::layer,
     .eps_field = "layer_norm_eps",
     .eps = 1e-5,
     .interleaved = true,
     .mlp_bias_field = nullptr,
     .tied = true,
     .unturned_full = true},
    {.type = "nemotron",
     .norm = Norm::layer_plus_one,
     .eps_field = "norm_eps",
     .eps = 1e-5,
     .share = 0.5,
     .gated = false,
     .act = "relu2"},
    {.type = "ministral", .bias_field = nullptr, .out_bias_field = nullptr, .mlp_bias_field = nullptr},
    {.type = "cwm", .eps = 1e-5, .theta = 1e6, .width = 128, .bias_field = nullptr, .out_bias_field = nullptr},
    {.type = "jais2",
     .norm = Norm::layer_bias,
     .eps_field = "layer_norm_eps",
     .eps = 1e-5,
     .bias = true,
     .out_bias = true,
     .mlp_bias = true,
     .gated = false,
     .act = "relu2"},
    {.type = "hunyuan_v1_dense", .eps = 1e-5, .mlp_bias_field = nullptr, .qk_norm = "rms", .norm_last = true},
    {.type = "nanochat",
     .norm = Norm::rms_plain,
     .mlp_bias_field = nullptr,
     .qk_norm = "rms_plain",
     .norm_last = true,
     .gated = false,
     .act = "relu2"},
    {.type = "apertus",
     .eps = 1e-5,
     .theta = 12e6,
     .mlp_bias_field = nullptr,
     .qk_norm = "rms",
     .gated = false,
     .act = "xielu"},
};

// HunYuan stretches the base of its frequencies by alpha^(d / (d - 2)) and calls that dynamic.
void stretch_base(Config& config, int64_t width, std::vector<layers::Setting>& options) {
  Config rope(config.value(config.given("rope_parameters") ? "rope_parameters" : "rope_scaling"), config.source());
  const double alpha = rope.real("alpha", 0, 1e12, 0);
  if (!rope.status().ok()) return config.refuse(rope.status().message().substr(config.source().size() + 2));
  if (alpha == 0 || rope.text("rope_type", rope.text("type", "default")) != "dynamic") return;
  if (width < 3) return config.refuse("head_dim is " + std::to_string(width) + ", expected more than 2");
  for (layers::Setting& option : options) {
    if (option.name != "rope_base") continue;
    const double base = std::stod(option.text), channels = static_cast<double>(width);
    option.text = layers::number_text(base * std::pow(alpha, channels / (channels - 2)));
  }
}

}  // namespace

void describe_kin(Config& config, Description& d) {
  const Kin* row = kKin;
  while (d.family != row->type) ++row;
  const Kin& kin = *row;
  const bool nanochat = d.family == "nanochat", apertus = d.family == "apertus", hunyuan = d.family == "hunyuan_v1_dense";
  const bool granite = d.family == "granite", cohere = d.family == "cohere" || d.family == "cohere2";
  const auto flag = [&](const char* field, bool otherwise) { return field != nullptr && config.flag(field, otherwise); };
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, 2048);
  d.eps = kin.eps_field == nullptr ? kin.eps : config.real(kin.eps_field, 0, 1, kin.eps);
  d.order = kin.order;
  d.rms = kin.norm == Norm::rms || kin.norm == Norm::rms_plain;
  d.plus_one = kin.norm == Norm::layer_plus_one;
  d.norm_bias = kin.norm == Norm::layer_plus_one || kin.norm == Norm::layer_bias;
  d.norm_weight = kin.norm != Norm::layer_plain && kin.norm != Norm::rms_plain;
  d.embed_norm = nanochat;
  if (nanochat) d.logit_cap = config.real("final_logit_softcapping", 0, 1e6, 15);
  d.tied = config.flag("tie_word_embeddings", kin.tied);
  if (granite) read_granite_scales(config, d);
  if (cohere) d.logit_scale = config.real("logit_scale", 1e-9, 1e9, 0.0625);
  if (config.flag("use_qk_norm", hunyuan) != hunyuan) {
    config.refuse(std::string("use_qk_norm is ") + (hunyuan ? "false, expected true" : "true, expected false"));
  }
  if (config.flag("use_cla", false)) config.refuse("use_cla is true, expected false");
  if (d.family == "cwm" && !config.given("layer_types")) config.refuse("layer_types is missing");
  if ((d.family == "cwm" || apertus) && !config.given("rope_parameters") && !config.given("rope_scaling")) {
    config.refuse("rope_parameters is missing");
  }
  if (config.given("clip_qkv")) config.refuse("clip_qkv is given, expected null");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers),
                inner = config.count("intermediate_size", 1, kMaxWidth);
  const HeadSizes sizes = read_heads(config, d.hidden, kin.width);
  const bool bias = flag(kin.bias_field, kin.bias);
  BlockSpec block;
  block.options = head_options(d.hidden, sizes, bias, flag(kin.out_bias_field, kin.out_bias));
  block.options.insert(block.options.end(), {{"qk_norm", kin.qk_norm},
                                             {"norm_eps", layers::number_text(d.eps)},
                                             {"norm_last", kin.norm_last ? "1" : "0"},
                                             {"rope_back", nanochat ? "1" : "0"}});
  if (granite) block.options.push_back({"scale", layers::number_text(config.real("attention_multiplier", 1e-9, 1e9, 1))});
  const bool xielu = apertus && config.text("hidden_act", kin.act) == "xielu";
  block.mlp = {kin.gated ? MlpSpec::Kind::glu : MlpSpec::Kind::plain,
               xielu ? "xielu" : activation_name(config, "hidden_act", kin.act), inner, flag(kin.mlp_bias_field, kin.mlp_bias)};
  const double theta = config.real("rope_theta", 1, 1e12, kin.theta);
  const double share = config.real("partial_rotary_factor", 0, 1, kin.share);
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    d.blocks.push_back(block);
    BlockSpec& own = d.blocks.back();
    const std::string type = layer_type(config, i, layers);
    add_rotary(config, sizes.width, share, own.options, theta, type.empty() ? nullptr : type.c_str());
    if (hunyuan) stretch_base(config, sizes.width, own.options);
    const int64_t window = layer_window(config, i, layers, 0);
    add_window(window, own);
    const bool turns = !kin.unturned_full || window > 0 || !config.given("sliding_window");
    own.options.push_back({"rope", turns ? kin.interleaved ? "interleaved" : "half" : "none"});
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  if (kin.joined_mlp) {
    for (const int64_t half : {0, 1}) {
      NameRule rule{half == 0 ? "layers.#.mlp.gate_proj.*" : "layers.#.mlp.up_proj.*", "model.layers.#.mlp.gate_up_proj.*"};
      rule.first = half * inner;
      rule.total = 2 * inner;
      d.names.push_back(rule);
    }
  }
  if (d.family == "glm4") {
    d.names.push_back({"layers.#.post_attention_layernorm.*", "model.layers.#.post_self_attn_layernorm.*"});
    d.names.push_back({"layers.#.pre_feedforward_layernorm.*", "model.layers.#.post_attention_layernorm.*"});
    d.names.push_back({"layers.#.post_feedforward_layernorm.*", "model.layers.#.post_mlp_layernorm.*"});
  }
  if (hunyuan) {
    d.names.push_back({"layers.#.self_attn.q_norm.*", "model.layers.#.self_attn.query_layernorm.*"});
    d.names.push_back({"layers.#.self_attn.k_norm.*", "model.layers.#.self_attn.key_layernorm.*"});
  }
  if (nanochat) {
    d.names.push_back({"layers.#.mlp.up_proj.*", "model.layers.#.mlp.fc1.*"});
    d.names.push_back({"layers.#.mlp.down_proj.*", "model.layers.#.mlp.fc2.*"});
  }
  if (apertus) {
    d.names.push_back({"layers.#.input_layernorm.*", "model.layers.#.attention_layernorm.*"});
    d.names.push_back({"layers.#.post_attention_layernorm.*", "model.layers.#.feedforward_layernorm.*"});
  }
  add_decoder_names(d);
  if (xielu) d.ignored.insert(d.ignored.end(), {"mlp.act_fn.beta", "mlp.act_fn.eps"});  // 0.5 and -1e-6, always
}

}  // namespace linnet
