// Decoders with layer norms from before Llama: GPT-Neo, GPT-J, CodeGen, OPT, XGLM, BioGPT, Falcon.
#include <cmath>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

// Rows [first, first + ..) of each of `blocks` blocks of a tensor of `total` rows.
NameRule part_of(const char* ours, const char* theirs, int64_t first, int64_t total, int64_t blocks = 0) {
  NameRule rule{ours, theirs};
  rule.first = first;
  rule.total = total;
  rule.joined_heads = blocks;
  return rule;
}

std::vector<layers::Setting> plain_heads(const Description& d, int64_t heads, int64_t kv_heads, bool bias, bool out_bias) {
  return head_options(d.hidden, {heads, kv_heads, d.hidden / heads}, bias, out_bias);
}

bool check_heads(Config& config, const Description& d, int64_t heads) {
  if (d.hidden % heads != 0) {
    config.refuse("the hidden size is " + std::to_string(d.hidden) + ", expected a multiple of the heads, " +
                  std::to_string(heads));
  }
  return config.status().ok();
}

// The window of each layer of GPT-Neo: attention_layers, or what attention_types stands for.
std::vector<bool> local_layers(Config& config, int64_t layers) {
  std::vector<bool> local;
  const auto add = [&](const JsonValue& name) { local.push_back(name.equals("local")); };
  if (config.given("attention_layers")) {
    for (JsonItems names(config.value("attention_layers")); names.next();) add(names.value());
  } else {
    for (JsonItems entries(config.value("attention_types")); entries.next();) {
      JsonItems entry(entries.value());
      if (!entry.next()) break;
      const JsonValue names = entry.value();
      int64_t times = 0;
      if (!entry.next() || entry.value().count(times) != nullptr) break;
      for (int64_t i = 0; i < times && static_cast<int64_t>(local.size()) < layers; ++i) {
        for (JsonItems each(names); each.next();) add(each.value());
      }
    }
  }
  if (static_cast<int64_t>(local.size()) != layers) {
    config.refuse("attention_types names " + std::to_string(local.size()) + " layers, expected " + std::to_string(layers));
  }
  return local;
}

}  // namespace

void describe_gpt_neo(Config& config, Description& d) {
  d.rms = false;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 50257);
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 2048);
  d.context = d.positions = config.count("max_position_embeddings", 1, int64_t{1} << 24, 2048);
  d.eps = config.real("layer_norm_epsilon", 0, 1, 1e-5);
  d.tied = config.flag("tie_word_embeddings", true);
  const int64_t layers = config.count("num_layers", 1, kMaxLayers, 24), heads = config.count("num_heads", 1, kMaxHeads, 16),
                inner = config.count("intermediate_size", 1, kMaxWidth, 4 * d.hidden),
                window = config.count("window_size", 1, int64_t{1} << 40, 256);
  const std::string act = activation_name(config, "activation_function", "gelu_new");
  if (!check_heads(config, d, heads)) return;
  const std::vector<bool> local = local_layers(config, layers);
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    BlockSpec block;
    block.options = plain_heads(d, heads, heads, false, true);
    block.options.push_back({"rope", "none"});
    block.options.push_back({"scale", "1"});
    block.mlp = {MlpSpec::Kind::plain, act, inner, true};
    if (local[static_cast<size_t>(i)]) add_window(window, block);
    d.blocks.push_back(std::move(block));
  }
  d.prefixes = {"transformer.", ""};
  d.names = {{"embed_tokens.weight", "wte.weight"},
             {"embed_positions.weight", "wpe.weight"},
             {"layers.#.input_layernorm.*", "h.#.ln_1.*"},
             {"layers.#.post_attention_layernorm.*", "h.#.ln_2.*"},
             {"layers.#.self_attn.o_proj.*", "h.#.attn.attention.out_proj.*"},
             {"layers.#.self_attn.*", "h.#.attn.attention.*"},
             {"layers.#.mlp.up_proj.*", "h.#.mlp.c_fc.*"},
             {"layers.#.mlp.down_proj.*", "h.#.mlp.c_proj.*"},
             {"norm.*", "ln_f.*"},
             {"lm_head.weight", "lm_head.weight"}};
  d.ignored = {"attention.bias", "attention.masked_bias"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

void describe_gptj(Config& config, Description& d) {
  const bool codegen = d.family == "codegen";
  d.rms = false;
  d.order = BlockOrder::parallel;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 50400);
  d.hidden = config.count("n_embd", 1, kMaxWidth, 4096);
  d.context = config.count("n_positions", 1, int64_t{1} << 40, 2048);
  d.eps = config.real("layer_norm_epsilon", 0, 1, 1e-5);
  d.tied = config.flag("tie_word_embeddings", false);
  d.head_bias = true;
  const int64_t layers = config.count("n_layer", 1, kMaxLayers, 28), heads = config.count("n_head", 1, kMaxHeads, 16),
                inner = config.count("n_inner", 1, kMaxWidth, 4 * d.hidden);
  if (!check_heads(config, d, heads)) return;
  if (codegen && heads % 4 != 0) config.refuse("n_head is " + std::to_string(heads) + ", expected a multiple of 4");
  const int64_t turning = config.count("rotary_dim", 2, kMaxWidth, d.hidden / heads);
  BlockSpec block;
  block.options = plain_heads(d, heads, heads, false, false);
  block.options.push_back({"rope", "interleaved"});
  block.options.push_back({"rope_dims", std::to_string(turning)});
  block.mlp = {MlpSpec::Kind::plain, activation_name(config, "activation_function", "gelu_new"), inner, true};
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {"transformer.", ""};
  d.names = {{"embed_tokens.weight", "wte.weight"}, {"layers.#.input_layernorm.*", "h.#.ln_1.*"}};
  if (codegen) {  // four blocks of a quarter of the heads, in each of them queries, values, keys
    const char* joined = "h.#.attn.qkv_proj.*";
    d.names.push_back(part_of("layers.#.self_attn.q_proj.*", joined, 0, 3 * d.hidden, 4));
    d.names.push_back(part_of("layers.#.self_attn.v_proj.*", joined, d.hidden / 4, 3 * d.hidden, 4));
    d.names.push_back(part_of("layers.#.self_attn.k_proj.*", joined, d.hidden / 2, 3 * d.hidden, 4));
  }
  d.names.push_back({"layers.#.self_attn.o_proj.*", "h.#.attn.out_proj.*"});
  d.names.push_back({"layers.#.self_attn.*", "h.#.attn.*"});
  d.names.push_back({"layers.#.mlp.up_proj.*", "h.#.mlp.fc_in.*"});
  d.names.push_back({"layers.#.mlp.down_proj.*", "h.#.mlp.fc_out.*"});
  d.names.push_back({"norm.*", "ln_f.*"});
  d.names.push_back({"lm_head.*", "lm_head.*"});
  d.ignored = {"attn.bias", "attn.masked_bias", "attn.causal_mask", "attn.embed_positions"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

void describe_opt(Config& config, Description& d) {
  d.rms = false;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 50272);
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 768);
  d.context = d.positions = config.count("max_position_embeddings", 1, int64_t{1} << 24, 2048);
  d.eps = 1e-5;
  d.tied = config.flag("tie_word_embeddings", true);
  const bool before = config.flag("do_layer_norm_before", true), bias = config.flag("enable_bias", true);
  d.order = before ? BlockOrder::pre : BlockOrder::post;
  d.final_norm = before && !config.flag("_remove_final_layer_norm", false);
  if (config.count("word_embed_proj_dim", 1, kMaxWidth, d.hidden) != d.hidden) {
    config.refuse("word_embed_proj_dim is not hidden_size, " + std::to_string(d.hidden));
  }
  if (!config.flag("layer_norm_elementwise_affine", true))
    config.refuse("layer_norm_elementwise_affine is false, expected true");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers, 12),
                heads = config.count("num_attention_heads", 1, kMaxHeads, 12),
                inner = config.count("ffn_dim", 1, kMaxWidth, 3072);
  const std::string act = activation_name(config, "activation_function", "relu");
  if (!check_heads(config, d, heads)) return;
  BlockSpec block;
  block.options = plain_heads(d, heads, heads, bias, bias);
  block.options.push_back({"rope", "none"});
  block.mlp = {MlpSpec::Kind::plain, act, inner, bias};
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {"model.decoder.", "decoder.", ""};
  d.names = {{"embed_tokens.weight", "embed_tokens.weight"},
             part_of("embed_positions.weight", "embed_positions.weight", 2, d.positions + 2),  // two rows that no text has
             {"layers.#.input_layernorm.*", "layers.#.self_attn_layer_norm.*"},
             {"layers.#.post_attention_layernorm.*", "layers.#.final_layer_norm.*"},
             {"layers.#.self_attn.o_proj.*", "layers.#.self_attn.out_proj.*"},
             {"layers.#.mlp.up_proj.*", "layers.#.fc1.*"},
             {"layers.#.mlp.down_proj.*", "layers.#.fc2.*"},
             {"layers.#.*", "layers.#.*"},
             {"norm.*", "final_layer_norm.*"},
             {"lm_head.weight", "lm_head.weight"}};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

void describe_fairseq(Config& config, Description& d) {
  const bool xglm = d.family == "xglm";
  d.rms = false;
  d.eps = 1e-5;  // whatever layer_norm_eps says
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, xglm ? 256008 : 42384);
  d.hidden = config.count(xglm ? "d_model" : "hidden_size", 2, kMaxWidth, 1024);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 24, xglm ? 2048 : 1024);
  d.tied = config.flag("tie_word_embeddings", true);
  if (config.flag("scale_embedding", true)) d.embed_scale = std::sqrt(static_cast<double>(d.hidden));
  if (config.flag("add_cross_attention", false)) config.refuse("add_cross_attention is true, expected false");
  const int64_t layers = config.count(xglm ? "num_layers" : "num_hidden_layers", 1, kMaxLayers, 24),
                heads = config.count(xglm ? "attention_heads" : "num_attention_heads", 1, kMaxHeads, 16),
                inner = config.count(xglm ? "ffn_dim" : "intermediate_size", 1, kMaxWidth, 4096);
  const std::string act = activation_name(config, xglm ? "activation_function" : "hidden_act", "gelu");
  if (d.hidden % 2 != 0) config.refuse("the hidden size is " + std::to_string(d.hidden) + ", expected an even number");
  if (!check_heads(config, d, heads)) return;
  BlockSpec block;
  block.options = plain_heads(d, heads, heads, true, true);
  block.options.push_back({"rope", "none"});
  block.mlp = {MlpSpec::Kind::plain, act, inner, true};
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {xglm ? "model." : "biogpt.", ""};
  d.names = {{"embed_tokens.weight", "embed_tokens.weight"},
             {"layers.#.input_layernorm.*", "layers.#.self_attn_layer_norm.*"},
             {"layers.#.post_attention_layernorm.*", "layers.#.final_layer_norm.*"},
             {"layers.#.self_attn.o_proj.*", "layers.#.self_attn.out_proj.*"},
             {"layers.#.mlp.up_proj.*", "layers.#.fc1.*"},
             {"layers.#.mlp.down_proj.*", "layers.#.fc2.*"},
             {"layers.#.*", "layers.#.*"},
             {"norm.*", "layer_norm.*"},
             {"lm_head.weight", xglm ? "lm_head.weight" : "output_projection.weight"}};
  // Both count positions from 2 on, in sines or in a table.
  if (xglm) {
    d.sinusoid_first = 2;
    d.ignored = {"embed_positions.weights"};
  } else {
    d.positions = d.context;
    d.names.push_back(part_of("embed_positions.weight", "embed_positions.weight", 2, d.positions + 2));
  }
  if (d.tied) d.ignored.push_back(xglm ? "lm_head.weight" : "output_projection.weight");
}

void describe_falcon(Config& config, Description& d) {
  d.rms = false;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 65024);
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 4544);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, 2048);
  d.eps = config.real("layer_norm_epsilon", 0, 1, 1e-5);
  d.tied = config.flag("tie_word_embeddings", true);
  const bool newer = config.flag("new_decoder_architecture", false), parallel = config.flag("parallel_attn", true),
             one = config.flag("multi_query", true), bias = config.flag("bias", false);
  if (config.flag("alibi", false)) config.refuse("alibi is true, expected false");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers, 32),
                heads = config.count("num_attention_heads", 1, kMaxHeads, 71);
  const int64_t kv = newer ? config.count("num_kv_heads", 1, kMaxHeads, heads) : one ? 1 : heads;
  const int64_t norms = config.count("num_ln_in_parallel_attn", 1, 2, newer ? 2 : 1);
  const int64_t inner = config.count("ffn_hidden_size", 1, kMaxWidth, 4 * d.hidden);
  const std::string act = activation_name(config, "activation", "gelu");
  if (!check_heads(config, d, heads)) return;
  if (heads % kv != 0) config.refuse("num_attention_heads is no multiple of num_kv_heads");
  d.order = !parallel ? BlockOrder::pre : newer && norms == 2 ? BlockOrder::parallel_norms : BlockOrder::parallel;
  BlockSpec block;
  block.options = plain_heads(d, heads, kv, bias, bias);
  add_rotary(config, d.hidden / heads, 1, block.options, config.real("rope_theta", 1, 1e12, 10000));
  block.mlp = {MlpSpec::Kind::plain, act, inner, bias};
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(layers), block);
  // For each head of keys: its queries, its key, its value; with one such head that is all queries, then the key and the value.
  const int64_t width = d.hidden / heads, group = heads / kv * width, total = d.hidden + 2 * kv * width;
  const char* joined = "h.#.self_attention.query_key_value.*";
  d.prefixes = {"transformer.", ""};
  d.names = {{"embed_tokens.weight", "word_embeddings.weight"},
             part_of("layers.#.self_attn.q_proj.*", joined, 0, total, kv),
             part_of("layers.#.self_attn.k_proj.*", joined, group, total, kv),
             part_of("layers.#.self_attn.v_proj.*", joined, group + width, total, kv),
             {"layers.#.self_attn.o_proj.*", "h.#.self_attention.dense.*"},
             {"layers.#.mlp.up_proj.*", "h.#.mlp.dense_h_to_4h.*"},
             {"layers.#.mlp.down_proj.*", "h.#.mlp.dense_4h_to_h.*"}};
  if (d.order == BlockOrder::parallel_norms) {
    d.names.push_back({"layers.#.input_layernorm.*", "h.#.ln_attn.*"});
    d.names.push_back({"layers.#.post_attention_layernorm.*", "h.#.ln_mlp.*"});
  }
  d.names.push_back({"layers.#.*", "h.#.*"});
  d.names.push_back({"norm.*", "ln_f.*"});
  d.names.push_back({"lm_head.weight", "lm_head.weight"});
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

}  // namespace linnet
