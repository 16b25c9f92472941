#include "runtime/description.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>

#include "layers/layer.h"
#include "runtime/converted.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

using layers::kB, layers::kT, layers::number_text, layers::Recorder, layers::Setting, layers::Value;

class ModelRecorder {
 public:
  explicit ModelRecorder(const Description& d) : d_(d), l_(d.family) {}

  Status embedding(layers::Record* record) {
    l_.output(embedded());
    return l_.finish(record);
  }
  Status block(size_t i, layers::Record* record) {
    const Value x = l_.input("hidden", {kB, kT, d_.hidden});
    Recorder::Scope scope(l_, "layers." + std::to_string(i));
    l_.output(block(d_.blocks[i], x));
    return l_.finish(record);
  }
  Status last_norm(layers::Record* record) {
    l_.output(norm("norm", l_.input("hidden", {kB, kT, d_.hidden})));
    return l_.finish(record);
  }

  Status body(layers::Record* record) {
    Value x = embedded();
    for (size_t i = 0; i < d_.blocks.size() && l_.ok(); ++i) {
      Recorder::Scope scope(l_, "layers." + std::to_string(i));
      x = block(d_.blocks[i], x);
    }
    if (d_.final_norm) x = norm("norm", x);
    l_.output(x);
    return l_.finish(record);
  }

  Status head(layers::Record* record) {
    const Value x = l_.input("hidden", {kB, kT, d_.two_heads ? 2 * d_.hidden : d_.hidden});
    const auto classifier = [&](const std::string& name, Value from) {
      return l_.dense(from, l_.weight(name + ".weight", {d_.classes, d_.hidden}), l_.weight(name + ".bias", {d_.classes}));
    };
    if (d_.two_heads) {
      const Value a = classifier("classifier", l_.slice(x, 0, d_.hidden));
      const Value b = classifier("second_classifier", l_.slice(x, d_.hidden, 2 * d_.hidden));
      l_.output(l_.map("0.5 * (a + b)", {{"a", a}, {"b", b}}));
    } else if (d_.image > 0) {
      l_.output(classifier("classifier", x));
    } else {
      const Value bias = d_.head_bias ? l_.weight("lm_head.bias", {d_.vocabulary}) : Value();
      const Value logits =
          l_.dense(x, l_.weight(d_.tied ? "embed_tokens.weight" : "lm_head.weight", {d_.vocabulary, d_.hidden}), bias);
      const std::string cap = number_text(d_.logit_cap);
      if (d_.logit_cap > 0) {
        l_.output(l_.map(cap + " * tanh(x / " + cap + ")", {{"x", logits}}));
      } else {
        l_.output(d_.logit_scale != 1 ? l_.map("x * " + number_text(d_.logit_scale), {{"x", logits}}) : logits);
      }
    }
    return l_.finish(record);
  }

 private:
  Value embedded() {
    Value x = d_.image > 0 ? patches() : tokens();
    if (d_.embed_norm) x = norm("embed_norm", x, table_width());
    if (d_.embed_width == 0) return x;
    return l_.dense(x, l_.weight("embed_project.weight", {d_.hidden, d_.embed_width}),
                    l_.weight("embed_project.bias", {d_.hidden}));
  }

  int64_t table_width() const { return d_.embed_width > 0 ? d_.embed_width : d_.hidden; }
  Value embedding(const char* name, int64_t rows, Value ids) {
    const Value table = l_.weight(std::string(name) + ".weight", {rows, table_width()});
    return l_.op("embedding", {{"table", table}, {"ids", ids}}, {}, name);
  }

  Value tokens() {
    Value x = embedding("embed_tokens", d_.vocabulary, l_.input("tokens", {kB, kT}, true));
    if (d_.embed_scale != 1) x = l_.map("x * " + number_text(d_.embed_scale), {{"x", x}});
    if (d_.positions > 0) x = add(x, embedding("embed_positions", d_.positions, l_.input("positions", {kB, kT}, true)));
    if (d_.sinusoid_first >= 0) x = sinusoids(x);
    if (d_.types > 0) x = add(x, embedding("embed_types", d_.types, l_.input("types", {kB, kT}, true)));
    if (d_.task) x = l_.map("x + task", {{"x", x}, {"task", l_.weight("embed_task.weight", {1, table_width()})}}, "task");
    return x;
  }

  // Sines in the first half of the channels, cosines in the second.
  Value sinusoids(Value x) {
    const int64_t half = d_.hidden / 2;
    std::vector<double> frequencies;
    for (int64_t i = 0; i < half; ++i) {
      frequencies.push_back(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(std::max<int64_t>(half - 1, 1))));
    }
    const Value f = l_.table(frequencies);
    const std::string angle = "((position + " + std::to_string(d_.sinusoid_first) + ") * f)";
    return l_.concat(l_.map("x + sin" + angle, {{"x", l_.slice(x, 0, half)}, {"f", f}}, "position_sines"),
                     l_.map("x + cos" + angle, {{"x", l_.slice(x, half, d_.hidden)}, {"f", f}}, "position_cosines"));
  }

  // The class token's row of the input is zero: its embedding and all positions stand in embed_positions (families/vit.cc).
  Value patches() {
    const int64_t side = d_.image / d_.patch, count = side * side + d_.class_tokens, inputs = d_.channels * d_.patch * d_.patch;
    l_.tokens(count);
    const Value x = l_.input("patches", {kB, kT, inputs});
    const Value rows = l_.dense(x, l_.weight("patches.weight", {d_.hidden, inputs}), l_.weight("patches.bias", {d_.hidden}));
    return add(rows, embedding("embed_positions", count, l_.input("positions", {kB, kT}, true)));
  }

  Value add(Value x, Value y) { return l_.op("add", {{"x", x}, {"y", y}}); }

  Value norm(const std::string& name, Value x) { return norm(name, x, d_.hidden); }
  Value norm(const std::string& name, Value x, int64_t width) {
    std::vector<Setting> eps = {{"eps", number_text(d_.eps)}};
    if (!d_.rms && !d_.norm_weight) return l_.op("layer_norm", {{"x", x}}, eps, name);
    if (!d_.norm_weight) return l_.op("rms_norm", {{"x", x}}, eps, name);
    Value weight = l_.weight(name + ".weight", {width}, d_.plus_one ? layers::zeros() : layers::ones());
    if (d_.rms) {
      if (d_.plus_one) eps.push_back({"plus_one", "1"});
      return l_.op("rms_norm", {{"x", x}, {"weight", weight}}, eps, name);
    }
    if (d_.plus_one) weight = l_.map("1 + w", {{"w", weight}}, name + ".factor");
    const Value bias = d_.norm_bias ? l_.weight(name + ".bias", {width}, layers::zeros()) : Value();
    return l_.op("layer_norm", {{"x", x}, {"weight", weight}, {"bias", bias}}, eps, name);
  }

  Value mixer(const BlockSpec& spec, Value x) {
    Recorder::Scope scope(l_, "self_attn");
    return scaled(layers::record_layer(l_, spec.mixer, spec.options, x));
  }
  Value scaled(Value y) { return d_.residual_scale == 1 ? y : l_.map("y * " + number_text(d_.residual_scale), {{"y", y}}); }

  Value mlp(const MlpSpec& spec, Value x) {
    Recorder::Scope scope(l_, "mlp");
    return scaled(spec.kind == MlpSpec::Kind::experts ? experts(spec, x) : feed_forward(spec, x));
  }

  Value experts(const MlpSpec& spec, Value x) {
    const Value scores = l_.dense(x, l_.weight("router.weight", {spec.experts, d_.hidden}, layers::normal(0.02)));
    const Value shares = l_.map("exp(x - amax(x)) / sum(exp(x - amax(x)))", {{"x", scores}}, "router_weights");
    std::vector<layers::Expert> list;
    for (int64_t e = 0; e < spec.experts; ++e) {
      Recorder::Scope scope(l_, "experts." + std::to_string(e));
      const auto weight = [&](const char* name, int64_t out, int64_t in) {
        return l_.weight(name, {out, in}, layers::normal(0.02));
      };
      list.push_back({weight("gate_proj.weight", spec.inner, d_.hidden), weight("up_proj.weight", spec.inner, d_.hidden),
                      weight("down_proj.weight", d_.hidden, spec.inner)});
    }
    const Value y = l_.experts(x, shares, list, spec.top, spec.normalised, spec.act);
    if (spec.shared == 0) return y;
    Value shared;
    {
      Recorder::Scope scope(l_, "shared_expert");
      shared = feed_forward({.kind = MlpSpec::Kind::glu, .act = spec.act, .inner = spec.shared}, x);
    }
    if (!spec.shared_gate) return add(y, shared);
    const Value gate = l_.dense(x, l_.weight("shared_expert_gate.weight", {1, d_.hidden}, layers::normal(0.02)));
    return l_.map("y + sigmoid(gate) * shared", {{"y", y}, {"gate", gate}, {"shared", shared}}, "shared_expert_sum");
  }

  Value feed_forward(const MlpSpec& spec, Value x) {
    const auto map = [&](const char* name, Value from, int64_t in, int64_t out) {
      const std::string stem = name;
      const Value bias = spec.bias ? l_.weight(stem + ".bias", {out}, layers::zeros()) : Value();
      return l_.dense(from, l_.weight(stem + ".weight", {out, in}, layers::normal(0.02)), bias);
    };
    Value y;
    if (spec.kind == MlpSpec::Kind::glu) {
      const Value gate = map("gate_proj", x, d_.hidden, spec.inner), up = map("up_proj", x, d_.hidden, spec.inner);
      y = l_.op("glu", {{"gate", gate}, {"up", up}}, {{"act", spec.act}});
    } else if (spec.act == "xielu") {  // arXiv 2411.13010, with its two slopes kept positive by softplus
      const Value rise = l_.weight("act_fn.alpha_p", {1}, layers::zeros()),
                  fall = l_.weight("act_fn.alpha_n", {1}, layers::zeros());
      y = l_.map("softplus(p) * square(relu(x)) + (0.5 + softplus(n)) * (expm1(min(x, 0)) - min(x, 0)) + 0.5 * x",
                 {{"x", map("up_proj", x, d_.hidden, spec.inner)}, {"p", rise}, {"n", fall}}, "xielu");
    } else {
      y = l_.op("activation", {{"x", map("up_proj", x, d_.hidden, spec.inner)}}, {{"act", spec.act}});
    }
    return map("down_proj", y, spec.inner, d_.hidden);
  }

  Value block(const BlockSpec& spec, Value x) {
    const bool has_mlp = spec.mlp.kind != MlpSpec::Kind::none;
    switch (spec.order.value_or(d_.order)) {
      case BlockOrder::pre:
        if (spec.mixer.empty()) return add(x, mlp(spec.mlp, norm("post_attention_layernorm", x)));
        x = add(x, mixer(spec, spec.input_norm ? norm("input_layernorm", x) : x));
        return has_mlp ? add(x, mlp(spec.mlp, norm("post_attention_layernorm", x))) : x;
      case BlockOrder::post:
        x = norm("input_layernorm", add(x, mixer(spec, x)));
        return has_mlp ? norm("post_attention_layernorm", add(x, mlp(spec.mlp, x))) : x;
      case BlockOrder::parallel: {
        const Value y = norm("input_layernorm", x);
        x = add(x, mixer(spec, y));
        return has_mlp ? add(x, mlp(spec.mlp, y)) : x;
      }
      case BlockOrder::parallel_norms: {
        const Value y = has_mlp ? mlp(spec.mlp, norm("post_attention_layernorm", x)) : Value();
        x = add(x, mixer(spec, norm("input_layernorm", x)));
        return has_mlp ? add(x, y) : x;
      }
      case BlockOrder::after:
        x = add(x, norm("post_attention_layernorm", mixer(spec, x)));
        return has_mlp ? add(x, norm("post_feedforward_layernorm", mlp(spec.mlp, x))) : x;
      case BlockOrder::sandwich:
        x = add(x, norm("post_attention_layernorm", mixer(spec, norm("input_layernorm", x))));
        return has_mlp ? add(x, norm("post_feedforward_layernorm", mlp(spec.mlp, norm("pre_feedforward_layernorm", x)))) : x;
    }
    return x;
  }

  const Description& d_;
  Recorder l_;
};

// What the signs of a pattern stand for.
struct Meant {
  std::string layer, expert, rest;  // # @ *
};

// Whether `name` fits the pattern; what its signs met.
bool fits(const std::string& pattern, const std::string& name, Meant* meant) {
  size_t n = 0;
  for (size_t p = 0; p < pattern.size(); ++p) {
    if (pattern[p] == '#' || pattern[p] == '@') {
      const size_t begin = n;
      while (n < name.size() && std::isdigit(static_cast<unsigned char>(name[n]))) ++n;
      if (n == begin) return false;
      (pattern[p] == '#' ? meant->layer : meant->expert) = name.substr(begin, n - begin);
    } else if (pattern[p] == '*') {
      meant->rest = name.substr(n);
      return !meant->rest.empty();
    } else if (n >= name.size() || name[n++] != pattern[p]) {
      return false;
    }
  }
  return n == name.size();
}

}  // namespace

const char* block_order_name(BlockOrder order) {
  constexpr const char* kNames[] = {"pre", "post", "parallel", "parallel", "after", "sandwich"};
  return kNames[static_cast<size_t>(order)];
}

Status record_body(const Description& d, layers::Record* record) { return ModelRecorder(d).body(record); }
Status record_head(const Description& d, layers::Record* record) { return ModelRecorder(d).head(record); }
Status record_embedding(const Description& d, layers::Record* record) { return ModelRecorder(d).embedding(record); }
Status record_block(const Description& d, size_t block, layers::Record* record) {
  return ModelRecorder(d).block(block, record);
}
Status record_norm(const Description& d, layers::Record* record) { return ModelRecorder(d).last_norm(record); }

const NameRule* find_name(const Description& d, const std::string& ours, std::string* theirs, const NameRule* behind) {
  for (const NameRule& rule : d.names) {
    if (behind != nullptr && &rule <= behind) continue;
    Meant meant;
    if (!fits(rule.ours, ours, &meant)) continue;
    theirs->clear();
    for (const char c : rule.theirs) {
      if (c == '#') {
        *theirs += meant.layer;
      } else if (c == '@') {
        *theirs += meant.expert;
      } else if (c == '*') {
        *theirs += meant.rest;
      } else {
        *theirs += c;
      }
    }
    return &rule;
  }
  return nullptr;
}

int64_t expert_of(const std::string& ours) {
  const std::string mark = ".mlp.experts.";
  const size_t at = ours.find(mark);
  return at == std::string::npos ? 0 : std::atoll(ours.c_str() + at + mark.size());
}

Status describe_model(Config& config, Description& out) {
  const std::string type = config.text("model_type", "");
  LINNET_TRY(config.status());
  std::string known;  // the first of them: all would fill a screen
  for (const Family& family : kFamilies) {
    if (&family < kFamilies + 12) known += std::string(known.empty() ? "" : ", ") + family.model_type;
    if (type != family.model_type) continue;
    Description d;
    d.family = type;
    family.describe(config, d);
    LINNET_TRY(config.status());
    if (type != "linnet" && config.given("linnet")) LINNET_TRY(apply_conversion(config, d));
    out = std::move(d);
    return {};
  }
  return bad_input(config.source() + ": model_type is " + json_quote_short(type) + ", expected one of " + known + ", .. (" +
                   std::to_string(std::size(kFamilies)) + " in all: docs/run-a-model.md)");
}

}  // namespace linnet
