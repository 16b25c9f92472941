// BERT and MiniLM: post-norm blocks that see both sides; word, position and type tables with a norm.
#include "core/json.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_bert(Config& config, Description& d) {
  d.causal = d.head = d.final_norm = d.rms = false;
  d.embed_norm = true;
  d.order = BlockOrder::post;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 30522);
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 768);
  d.context = d.positions = config.count("max_position_embeddings", 1, int64_t{1} << 24, 512);
  d.types = config.count("type_vocab_size", 1, 65536, 2);
  d.eps = config.real("layer_norm_eps", 0, 1, 1e-12);
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers, 12);
  const int64_t heads = config.count("num_attention_heads", 1, kMaxHeads, 12);
  const int64_t inner = config.count("intermediate_size", 1, kMaxWidth, 3072);
  const std::string act = activation_name(config, "hidden_act", "gelu");
  if (const std::string kind = config.text("position_embedding_type", "absolute"); kind != "absolute") {
    config.refuse("position_embedding_type is " + json_quote_short(kind) + ", expected absolute");
  }
  if (d.hidden % heads != 0) {
    config.refuse("hidden_size is " + std::to_string(d.hidden) + ", expected a multiple of num_attention_heads, " +
                  std::to_string(heads));
  }
  if (!config.status().ok()) return;
  BlockSpec block;
  block.options = {{"hidden", std::to_string(d.hidden)},
                   {"heads", std::to_string(heads)},
                   {"causal", "0"},
                   {"rope", "none"},
                   {"bias", "1"},
                   {"out_bias", "1"}};
  block.mlp = {MlpSpec::Kind::plain, act, inner, true};
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {"", "bert."};
  d.names = {{"embed_tokens.weight", "embeddings.word_embeddings.weight"},
             {"embed_positions.weight", "embeddings.position_embeddings.weight"},
             {"embed_types.weight", "embeddings.token_type_embeddings.weight"},
             {"embed_norm.*", "embeddings.LayerNorm.*"},
             {"layers.#.self_attn.q_proj.*", "encoder.layer.#.attention.self.query.*"},
             {"layers.#.self_attn.k_proj.*", "encoder.layer.#.attention.self.key.*"},
             {"layers.#.self_attn.v_proj.*", "encoder.layer.#.attention.self.value.*"},
             {"layers.#.self_attn.o_proj.*", "encoder.layer.#.attention.output.dense.*"},
             {"layers.#.input_layernorm.*", "encoder.layer.#.attention.output.LayerNorm.*"},
             {"layers.#.mlp.up_proj.*", "encoder.layer.#.intermediate.dense.*"},
             {"layers.#.mlp.down_proj.*", "encoder.layer.#.output.dense.*"},
             {"layers.#.post_attention_layernorm.*", "encoder.layer.#.output.LayerNorm.*"}};
  // Heads for other tasks: the encoder's states are what is read here.
  d.ignored = {"embeddings.position_ids",
               "pooler.dense.weight",
               "pooler.dense.bias",
               "cls.predictions.bias",
               "cls.predictions.transform.dense.weight",
               "cls.predictions.transform.dense.bias",
               "cls.predictions.transform.LayerNorm.weight",
               "cls.predictions.transform.LayerNorm.bias",
               "cls.predictions.decoder.weight",
               "cls.predictions.decoder.bias",
               "cls.seq_relationship.weight",
               "cls.seq_relationship.bias",
               "classifier.weight",
               "classifier.bias"};
}

}  // namespace linnet
