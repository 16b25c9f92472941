// BERT, MiniLM, RoBERTa, DistilBERT, ELECTRA and ALBERT: post-norm blocks that see both sides; word, position and type tables
// with a norm. The tables of the last two may be narrower than the blocks; ALBERT's blocks share their weights. ERNIE and
// data2vec are BERT and RoBERTa by other names; RoBERTa-PreLayerNorm, XLM-RoBERTa-XL and Megatron-BERT norm what a block reads.
// Nomic BERT turns its heads instead of counting positions in a table, and gates its MLP.
#include <algorithm>

#include "core/files/json.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_bert(Config& config, Description& d) {
  d.causal = d.head = d.final_norm = d.rms = false;
  d.embed_norm = true;
  d.order = BlockOrder::post;
  const bool before = d.family == "roberta-prelayernorm", large = d.family == "xlm-roberta-xl",
             megatron = d.family == "megatron-bert";
  const bool roberta = d.family == "roberta" || d.family == "xlm-roberta" || d.family == "camembert" ||
                       d.family == "data2vec-text" || before || large,
             distil = d.family == "distilbert", albert = d.family == "albert", electra = d.family == "electra";
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, roberta ? 50265 : 30522);
  d.hidden = config.count(distil ? "dim" : "hidden_size", 1, kMaxWidth, 768);
  const int64_t positions = config.count("max_position_embeddings", 1, int64_t{1} << 24, roberta ? 514 : 512);
  // RoBERTa counts from behind the number of its padding token: the rows before are no text's.
  const int64_t first = roberta ? config.count("pad_token_id", 0, kMaxVocabularyRows, 1) + 1 : 0;
  if (positions <= first) config.refuse("max_position_embeddings is " + std::to_string(positions) + ", expected more");
  d.context = d.positions = positions - first;
  d.types = distil ? 0 : config.count("type_vocab_size", 1, 65536, roberta ? 1 : 2);
  d.eps = distil ? 1e-12 : config.real("layer_norm_eps", 0, 1, roberta ? 1e-5 : 1e-12);
  const int64_t layers = config.count(distil ? "n_layers" : "num_hidden_layers", 1, kMaxLayers, distil ? 6 : 12);
  const int64_t heads = config.count(distil ? "n_heads" : "num_attention_heads", 1, kMaxHeads, 12);
  const int64_t inner = config.count(distil ? "hidden_dim" : "intermediate_size", 1, kMaxWidth, 3072);
  const std::string act = activation_name(config, distil ? "activation" : "hidden_act", albert ? "gelu_new" : "gelu");
  if (albert || electra) d.embed_width = config.count("embedding_size", 1, kMaxWidth, 128);
  if (electra && d.embed_width == d.hidden) d.embed_width = 0;
  if (albert &&
      (config.count("num_hidden_groups", 1, kMaxLayers, 1) != 1 || config.count("inner_group_num", 1, kMaxLayers, 1) != 1)) {
    config.refuse("num_hidden_groups and inner_group_num are not both 1, as ALBERT's published models have them");
  }
  if (before || large || megatron) {
    d.order = BlockOrder::pre;
    d.final_norm = true;
    d.embed_norm = before;
  }
  if (config.flag("is_decoder", false)) config.refuse("is_decoder is true, expected false");
  d.task = d.family == "ernie" && config.flag("use_task_id", false);
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
  d.prefixes = {"",        "bert.",  "roberta.",       "distilbert.",          "electra.",
                "albert.", "ernie.", "data2vec_text.", "roberta_prelayernorm."};
  NameRule table{"embed_positions.weight", "embeddings.position_embeddings.weight"};
  table.first = first;
  table.total = positions;
  if (distil) {
    d.names = {{"embed_tokens.weight", "embeddings.word_embeddings.weight"},
               table,
               {"embed_norm.*", "embeddings.LayerNorm.*"},
               {"layers.#.self_attn.q_proj.*", "transformer.layer.#.attention.q_lin.*"},
               {"layers.#.self_attn.k_proj.*", "transformer.layer.#.attention.k_lin.*"},
               {"layers.#.self_attn.v_proj.*", "transformer.layer.#.attention.v_lin.*"},
               {"layers.#.self_attn.o_proj.*", "transformer.layer.#.attention.out_lin.*"},
               {"layers.#.input_layernorm.*", "transformer.layer.#.sa_layer_norm.*"},
               {"layers.#.mlp.up_proj.*", "transformer.layer.#.ffn.lin1.*"},
               {"layers.#.mlp.down_proj.*", "transformer.layer.#.ffn.lin2.*"},
               {"layers.#.post_attention_layernorm.*", "transformer.layer.#.output_layer_norm.*"}};
    d.ignored = {"embeddings.position_ids", "vocab_transform.weight", "vocab_transform.bias", "vocab_layer_norm.weight",
                 "vocab_layer_norm.bias",   "vocab_projector.weight", "vocab_projector.bias", "pre_classifier.weight",
                 "pre_classifier.bias",     "classifier.weight",      "classifier.bias"};
    return;
  }
  if (albert) {
    const std::string shared = "encoder.albert_layer_groups.0.albert_layers.0.";
    d.names = {{"embed_tokens.weight", "embeddings.word_embeddings.weight"},
               table,
               {"embed_types.weight", "embeddings.token_type_embeddings.weight"},
               {"embed_norm.*", "embeddings.LayerNorm.*"},
               {"embed_project.*", "encoder.embedding_hidden_mapping_in.*"},
               {"layers.#.self_attn.q_proj.*", shared + "attention.query.*"},
               {"layers.#.self_attn.k_proj.*", shared + "attention.key.*"},
               {"layers.#.self_attn.v_proj.*", shared + "attention.value.*"},
               {"layers.#.self_attn.o_proj.*", shared + "attention.dense.*"},
               {"layers.#.input_layernorm.*", shared + "attention.LayerNorm.*"},
               {"layers.#.mlp.up_proj.*", shared + "ffn.*"},
               {"layers.#.mlp.down_proj.*", shared + "ffn_output.*"},
               {"layers.#.post_attention_layernorm.*", shared + "full_layer_layer_norm.*"}};
    d.ignored = {"pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"};
    for (const char* rest :
         {"bias", "LayerNorm.weight", "LayerNorm.bias", "dense.weight", "dense.bias", "decoder.weight", "decoder.bias"})
      d.ignored.push_back(std::string("predictions.") + rest);
    for (const char* rest : {"weight", "bias"}) d.ignored.push_back(std::string("sop_classifier.classifier.") + rest);
    return;
  }
  d.names = {{"embed_tokens.weight", "embeddings.word_embeddings.weight"},
             table,
             {"embed_project.*", "embeddings_project.*"},
             {"embed_types.weight", "embeddings.token_type_embeddings.weight"},
             {"embed_norm.*", "embeddings.LayerNorm.*"},
             {"layers.#.self_attn.q_proj.*", "encoder.layer.#.attention.self.query.*"},
             {"layers.#.self_attn.k_proj.*", "encoder.layer.#.attention.self.key.*"},
             {"layers.#.self_attn.v_proj.*", "encoder.layer.#.attention.self.value.*"},
             {"layers.#.self_attn.o_proj.*", "encoder.layer.#.attention.output.dense.*"},
             {"layers.#.mlp.up_proj.*", "encoder.layer.#.intermediate.dense.*"},
             {"layers.#.mlp.down_proj.*", "encoder.layer.#.output.dense.*"}};
  const char* norms[3] = {"attention.output.LayerNorm.*", "output.LayerNorm.*", ""};
  if (before) norms[0] = "attention.LayerNorm.*", norms[1] = "intermediate.LayerNorm.*", norms[2] = "LayerNorm.*";
  if (large) norms[0] = "attention.self_attn_layer_norm.*", norms[1] = "LayerNorm.*", norms[2] = "encoder.LayerNorm.*";
  if (megatron) norms[0] = "attention.ln.*", norms[1] = "ln.*", norms[2] = "encoder.ln.*";
  d.names.push_back({"layers.#.input_layernorm.*", std::string("encoder.layer.#.") + norms[0]});
  d.names.push_back({"layers.#.post_attention_layernorm.*", std::string("encoder.layer.#.") + norms[1]});
  if (d.final_norm) d.names.push_back({"norm.*", norms[2]});
  if (d.task) {  // a text has the first of the tasks
    NameRule task{"embed_task.weight", "embeddings.task_type_embeddings.weight"};
    task.total = config.count("task_type_vocab_size", 1, 65536, 3);
    d.names.push_back(task);
  }
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
               "classifier.bias",
               "classifier.dense.weight",
               "classifier.dense.bias",
               "classifier.out_proj.weight",
               "classifier.out_proj.bias",
               "lm_head.bias",
               "lm_head.dense.weight",
               "lm_head.dense.bias",
               "lm_head.layer_norm.weight",
               "lm_head.layer_norm.bias",
               "lm_head.decoder.weight",
               "lm_head.decoder.bias",
               "generator_predictions.LayerNorm.weight",
               "generator_predictions.LayerNorm.bias",
               "generator_predictions.dense.weight",
               "generator_predictions.dense.bias",
               "generator_lm_head.weight",
               "generator_lm_head.bias",
               "discriminator_predictions.dense.weight",
               "discriminator_predictions.dense.bias",
               "discriminator_predictions.dense_prediction.weight",
               "discriminator_predictions.dense_prediction.bias"};
}

void describe_nomic_bert(Config& config, Description& d) {
  d.causal = d.head = d.final_norm = d.rms = false;
  d.embed_norm = true;
  d.order = BlockOrder::post;
  const bool older = config.given("n_embd");  // the names of GPT-2's fields, as the models were published
  const auto field = [&](const char* newer, const char* old) { return older ? old : newer; };
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 30528);
  d.hidden = config.count(field("hidden_size", "n_embd"), 1, kMaxWidth, 768);
  d.context = config.count(field("max_position_embeddings", "n_positions"), 1, int64_t{1} << 40, 2048);
  d.types = config.count("type_vocab_size", 1, 65536, 2);
  d.eps = config.real(field("layer_norm_eps", "layer_norm_epsilon"), 0, 1, 1e-12);
  const int64_t layers = config.count(field("num_hidden_layers", "n_layer"), 1, kMaxLayers, 12),
                heads = config.count(field("num_attention_heads", "n_head"), 1, kMaxHeads, 12),
                inner = config.count(field("intermediate_size", "n_inner"), 1, kMaxWidth, 3072);
  if (d.hidden % heads != 0) {
    config.refuse("the hidden size is " + std::to_string(d.hidden) + ", expected a multiple of the heads, " +
                  std::to_string(heads));
  }
  const int64_t width = config.count("head_dim", 1, kMaxWidth, std::max<int64_t>(d.hidden / heads, 1));
  for (const char* absent : {"prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved",
                             "use_rms_norm", "parallel_block"}) {
    if (config.flag(absent, false)) config.refuse(std::string(absent) + " is true, expected false");
  }
  if (config.real("rotary_emb_fraction", 0, 1, 1) != 1) config.refuse("rotary_emb_fraction is not 1");
  if (config.given("rotary_emb_scale_base")) config.refuse("rotary_emb_scale_base is given, expected null");
  std::string act = config.text("activation_function", "swiglu");
  if (older && act != "swiglu") config.refuse("activation_function is " + json_quote_short(act) + ", expected swiglu");
  act = older ? "silu" : activation_name(config, "hidden_act", "silu");
  BlockSpec block;
  block.options = {
      {"hidden", std::to_string(d.hidden)}, {"heads", std::to_string(heads)}, {"key", std::to_string(width)}, {"causal", "0"}};
  add_rotary(config, width, 1, block.options, config.real(field("rope_theta", "rotary_emb_base"), 1, 1e12, 1000));
  block.mlp = {MlpSpec::Kind::glu, act, inner, false};
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {"", "nomic_bert.", "bert."};
  d.names = {{"embed_tokens.weight", "embeddings.word_embeddings.weight"},
             {"embed_types.weight", "embeddings.token_type_embeddings.weight"},
             {"embed_norm.*", "emb_ln.*"},
             {"layers.#.self_attn.q_proj.*", "encoder.layers.#.attn.Wqkv.*", false, 0, 3},
             {"layers.#.self_attn.k_proj.*", "encoder.layers.#.attn.Wqkv.*", false, 1, 3},
             {"layers.#.self_attn.v_proj.*", "encoder.layers.#.attn.Wqkv.*", false, 2, 3},
             {"layers.#.self_attn.o_proj.*", "encoder.layers.#.attn.out_proj.*"},
             {"layers.#.input_layernorm.*", "encoder.layers.#.norm1.*"},
             {"layers.#.post_attention_layernorm.*", "encoder.layers.#.norm2.*"},
             {"layers.#.mlp.up_proj.*", "encoder.layers.#.mlp.fc11.*"},
             {"layers.#.mlp.gate_proj.*", "encoder.layers.#.mlp.fc12.*"},
             {"layers.#.mlp.down_proj.*", "encoder.layers.#.mlp.fc2.*"}};
  d.ignored = {"rotary_emb.inv_freq", "cls.*", "pooler.dense.weight", "pooler.dense.bias"};
}

}  // namespace linnet
