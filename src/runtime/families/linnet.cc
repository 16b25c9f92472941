// model_type "linnet": any list of layers with any MLP.
//
//   {"model_type": "linnet", "vocab_size": 512, "hidden_size": 64, "max_position_embeddings": 4096, "tie_word_embeddings":
//   true,
//    "linnet": {"order": "pre", "norm": "rms", "norm_eps": 1e-6, "positions": 0,
//               "layers": [{"mixer": "gated_deltanet", "options": {"heads": 2, "key": 32, "value": 64}, "mlp": "glu", "act":
//               "silu",
//                           "intermediate_size": 128, "bias": false, "repeat": 3},
//                          {"mixer": "softmax_attention", "options": {"heads": 4}, "mlp": "none"}]}}
//
// Tensors have the names of description.h as they are; a mixer's option `hidden` is hidden_size unless it is given.
#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

std::string option_text_of(const JsonValue& value) {
  if (value.is(JsonValue::Kind::string)) return value.string();
  if (value.text() == "true") return "1";
  if (value.text() == "false") return "0";
  if (value.is(JsonValue::Kind::array)) {
    std::string text;
    for (JsonItems items(value); items.next();) text += (text.empty() ? "" : ",") + std::string(items.value().text());
    return text;
  }
  return std::string(value.text());
}

BlockSpec read_block(Config& entry, const Description& d) {
  BlockSpec block;
  block.mixer = entry.text("mixer", "softmax_attention");
  if (layers::find_layer(block.mixer) == nullptr) {
    entry.refuse("mixer is " + json_quote_short(block.mixer) + ", which is no layer; linnet list has them all");
  }
  const JsonValue options = entry.value("options");
  if (!options.has("hidden")) block.options.push_back({"hidden", std::to_string(d.hidden)});
  for (JsonItems items(options); items.next();) block.options.push_back({items.key().string(), option_text_of(items.value())});
  const std::string mlp = entry.text("mlp", "glu");
  if (mlp != "glu" && mlp != "plain" && mlp != "none") {
    entry.refuse("mlp is " + json_quote_short(mlp) + ", expected glu, plain or none");
  }
  block.mlp.kind = mlp == "glu" ? MlpSpec::Kind::glu : mlp == "plain" ? MlpSpec::Kind::plain : MlpSpec::Kind::none;
  block.mlp.act = activation_name(entry, "act", mlp == "plain" ? "gelu" : "silu");
  block.mlp.inner = entry.count("intermediate_size", 1, kMaxWidth, 4 * d.hidden);
  block.mlp.bias = entry.flag("bias", false);
  return block;
}

}  // namespace

void describe_linnet(Config& config, Description& d) {
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, int64_t{1} << 40);
  d.tied = config.flag("tie_word_embeddings", false);
  Config own(config.value("linnet"), config.source());
  const auto keep = [&](Config& nested) {
    if (!nested.status().ok()) config.refuse(nested.status().message().substr(config.source().size() + 2));
    return nested.status().ok();
  };
  const std::string order = own.text("order", "pre"), norm = own.text("norm", "rms");
  if (order != "pre" && order != "post" && order != "parallel") {
    own.refuse("order is " + json_quote_short(order) + ", expected pre, post or parallel");
  }
  if (norm != "rms" && norm != "layer") own.refuse("norm is " + json_quote_short(norm) + ", expected rms or layer");
  d.order = order == "pre" ? BlockOrder::pre : order == "post" ? BlockOrder::post : BlockOrder::parallel;
  d.rms = norm == "rms";
  d.eps = own.real("norm_eps", 0, 1, 1e-6);
  d.positions = own.count("positions", 0, int64_t{1} << 24, 0);
  d.final_norm = own.flag("final_norm", d.order != BlockOrder::post);
  if (d.positions > 0 && d.context > d.positions) d.context = d.positions;
  if (!keep(own)) return;
  if (!own.value("layers").is(JsonValue::Kind::array)) return config.refuse("linnet.layers is missing: the list of blocks");
  for (JsonItems items(own.value("layers")); items.next();) {
    Config entry(items.value(), config.source());
    const BlockSpec block = read_block(entry, d);
    const int64_t repeat = entry.count("repeat", 1, kMaxLayers, 1);
    if (!keep(entry)) return;
    d.blocks.insert(d.blocks.end(), static_cast<size_t>(repeat), block);
    if (static_cast<int64_t>(d.blocks.size()) > kMaxLayers) {
      return config.refuse("linnet.layers has more than " + std::to_string(kMaxLayers) + " blocks");
    }
  }
  if (d.blocks.empty()) config.refuse("linnet.layers is empty");
  d.names = {{"*", "*"}};
  if (d.tied) d.ignored = {"lm_head.weight"};
}

}  // namespace linnet
