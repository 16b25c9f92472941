// Small models of every family with random weights, for tests: a folder that Model::load reads.
#pragma once

#include <sys/stat.h>

#include <map>
#include <string>
#include <vector>

#include "core/files/file.h"
#include "core/files/safetensors.h"
#include "layers/record.h"
#include "runtime/config.h"
#include "runtime/description.h"
#include "runtime/tokenizer/tokenizer.h"
#include "runtime/weights.h"

namespace linnet::made {

inline bool is_bert(const std::string& family) { return family.find("bert") != std::string::npos; }

// Configurations with 3 layers of 4 heads, 256 tokens of context or more.
inline std::string config_of(const std::string& family, const std::string& more = "") {
  const std::string rest = more.empty() ? "}" : ", " + more + "}";
  if (family == "gpt2") {
    return R"({"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512)" + rest;
  }
  if (is_bert(family)) {
    return R"({"model_type": ")" + family +
           R"(", "vocab_size": 64, "pad_token_id": 1, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
               "intermediate_size": 48, "max_position_embeddings": 256)" +
           rest;
  }
  if (family == "vit" || family == "deit") {
    return R"({"model_type": ")" + family + R"(", "image_size": 32, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3,
               "num_attention_heads": 4, "intermediate_size": 48, "id2label": {"0": "a", "1": "b", "2": "c"})" +
           rest;
  }
  return R"({"model_type": ")" + family + R"(", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
             "max_position_embeddings": 2048, "tie_word_embeddings": true, "eos_token_id": 256, "hidden_act": "gelu_new",
             "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, 
             "use_parallel_residual": true, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "sliding_window": null,
             "attn_logit_softcapping": null, "final_logit_softcapping": 30.0, "num_experts": 5, "num_experts_per_tok": 2,
             "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
             "mlp_only_layers": [1])" +
         rest;
}

// The byte-level tokeniser with one token for each byte and an end; or letters as WordPiece.
inline std::string tokenizer_of(const std::string& family) {
  const auto utf8 = [](uint32_t c) {
    if (c < 0x80) return std::string(1, static_cast<char>(c));
    return std::string{static_cast<char>(0xc0 | (c >> 6)), static_cast<char>(0x80 | (c & 63))};
  };
  std::string vocabulary;
  const auto add = [&](const std::string& token, int id) {
    std::string quoted;
    for (const char c : token) quoted += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    vocabulary += (vocabulary.empty() ? "\"" : ", \"") + quoted + "\": " + std::to_string(id);
  };
  if (is_bert(family)) {
    int id = 0;
    for (const char* token : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) add(token, id++);
    for (char c = 'a'; c <= 'z'; ++c) add(std::string(1, c), id++);
    for (char c = 'a'; c <= 'z'; ++c) add(std::string("##") + c, id++);
    return R"({"version": "1.0", "added_tokens": [], "normalizer": {"type": "BertNormalizer", "clean_text": true,
      "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}, "pre_tokenizer": {"type": "BertPreTokenizer"},
      "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "[SEP]", "type_id": 0}}], "pair": [],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
                           "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}},
      "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
      "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": {)" +
           vocabulary + "}}}";
  }
  for (int byte = 0; byte < 256; ++byte) add(utf8(byte_level_character(static_cast<unsigned char>(byte))), byte);
  return R"({"version": "1.0", "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
      "rstrip": false, "normalized": false, "special": true}], "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {)" +
         vocabulary + R"(}, "merges": []}})";
}

// A folder with this config, a tokeniser and random weights for every tensor of its records, under the family's names.
inline Status make(const std::string& folder, const std::string& json, uint64_t seed = 1) {
  mkdir(folder.c_str(), 0777);
  LINNET_TRY(write_file(folder + "/config.json", json));
  Config config;
  Description d;
  LINNET_TRY(Config::parse(json, "config.json", config));
  LINNET_TRY(describe_model(config, d));
  if (d.image == 0) LINNET_TRY(write_file(folder + "/tokenizer.json", tokenizer_of(d.family)));
  layers::Record body, head;
  LINNET_TRY(record_body(d, &body));
  std::vector<const layers::Record*> records = {&body};
  if (d.image > 0 || d.head) {
    LINNET_TRY(record_head(d, &head));
    records.push_back(&head);
  }
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, Tensor> tensors;
  for (const layers::Record* record : records) {
    for (const layers::Parameter& p : record->parameters) {
      std::string theirs;
      const NameRule* rule = find_name(d, p.name, &theirs);
      if (rule == nullptr) return bad_input(p.name + " has no name");
      if (tensors.count(theirs) != 0 && rule->parts == 1 && rule->total == 0 && rule->stacked == 0) continue;
      std::vector<double> values = layers::initial_values(p.init, p.shape, p.name, seed);
      // Scores that differ, so that attention matters.
      if (p.name.find("q_proj.weight") != std::string::npos || p.name.find("k_proj.weight") != std::string::npos) {
        for (double& x : values) x *= 20;
      }
      if (p.name.find("v_proj.weight") != std::string::npos || p.name.find("o_proj.weight") != std::string::npos) {
        for (double& x : values) x *= 10;
      }
      Tensor& t = tensors[theirs];
      const bool turned = rule->transposed && p.shape.size() == 2;
      const int64_t rows = p.shape[0], columns = static_cast<int64_t>(values.size()) / rows, all = source_rows(*rule, rows);
      t.shape = p.shape;
      t.shape[0] = all;
      if (turned) std::swap(t.shape[0], t.shape[1]);
      t.values.resize(static_cast<size_t>(all * columns));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t row = source_row(*rule, r, rows, expert_of(p.name)), at = turned ? c * all + row : row * columns + c;
          t.values[static_cast<size_t>(at)] = static_cast<float>(values[static_cast<size_t>(r * columns + c)]);
        }
      }
    }
  }
  if (d.image > 0) {
    tensors["embeddings.cls_token"] = {{1, 1, d.hidden}, std::vector<float>(static_cast<size_t>(d.hidden), 0.1f)};
    for (const char* table : {"embeddings.position_embeddings"}) tensors[table].shape.insert(tensors[table].shape.begin(), 1);
    tensors["embeddings.patch_embeddings.projection.weight"].shape = {d.hidden, d.channels, d.patch, d.patch};
  }
  std::vector<SafetensorsTensor> list;
  for (const auto& [name, t] : tensors) list.push_back({name, "F32", t.shape, t.values.data()});
  return write_safetensors(folder + "/model.safetensors", list);
}

}  // namespace linnet::made
