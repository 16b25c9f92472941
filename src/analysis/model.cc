#include "analysis/model.h"

#include <algorithm>
#include <cmath>

#include "analysis/taps.h"
#include "report/chart.h"
#include "report/page.h"
#include "report/text.h"

namespace linnet::analysis {
namespace {

Status activity(const LayeredModel& parts, int64_t layer, const std::vector<float>& y, LayerActivity* a) {
  const int64_t C = parts.hidden();
  a->index = layer;
  a->mixer = parts.mixer(layer);
  std::vector<float> sizes(y.size());
  for (size_t i = 0; i < y.size(); ++i) {
    sizes[i] = std::abs(y[i]);
    if (!std::isfinite(y[i])) {
      return bad_input("layer " + std::to_string(layer) + ": its output is not finite at token " +
                       std::to_string(static_cast<int64_t>(i) / C) + ", channel " +
                       std::to_string(static_cast<int64_t>(i) % C) + "; the model's activations are broken there");
    }
    if (static_cast<double>(sizes[i]) > a->largest) {
      a->largest = static_cast<double>(sizes[i]);
      a->token = static_cast<int64_t>(i) / C;
      a->channel = static_cast<int64_t>(i) % C;
    }
  }
  const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2);
  std::nth_element(sizes.begin(), middle, sizes.end());
  a->median = static_cast<double>(*middle);
  return {};
}

// Every head of a layer without softmax weights. The first tokens are enough: nothing later changes what they saw.
Status recurrent_heads(const LayeredModel& parts, int64_t layer, const std::vector<float>& x, ModelReport* report) {
  const int64_t T = std::min(static_cast<int64_t>(x.size()) / parts.hidden(), kRecurrentTokens);
  const std::vector<float> first(x.begin(), x.begin() + T * parts.hidden());
  std::vector<float> y;
  OpTaps taps;
  LINNET_TRY(parts.record(layer, tapped_ops(), first, y, &taps));
  for (int64_t h = 0; h < heads_of(taps); ++h) {
    RecurrentHead head{.layer = layer, .head = h};
    MixerInputs inputs;
    std::string mixer;
    KernelRead read;
    LINNET_TRY(mixer_of_taps(taps, h, &inputs, &mixer, &read));
    LINNET_TRY(analyse(mixer, inputs, {}, &head.system));
    head.kernel_error = kernel_error(head.system, read);
    head.system.system = System();  // large, and reported already
    head.system.eig_real.clear(), head.system.eig_imag.clear();
    report->recurrent.push_back(std::move(head));
  }
  return {};
}

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double each : x) sum += each;
  return x.empty() ? 0 : sum / static_cast<double>(x.size());
}

double real(const JsonValue& v) {
  double x = NAN;
  v.number(x);
  return x;
}

std::vector<std::string> names_of(const JsonValue& json) {
  std::vector<std::string> names;
  for (JsonItems items(json.find("measures")); items.next();) names.push_back(items.value().string());
  return names;
}

}  // namespace

double kernel_error(const SystemReport& r, const KernelRead& read) {
  double most = 1, apart = 0;
  const std::vector<double> expected = read.behind ? read.behind(r.system, r.out) : r.out;
  for (size_t i = 0; i < std::min(read.out.size(), expected.size()); ++i) {
    most = std::max(most, std::abs(expected[i]));
    apart = std::max(apart, std::abs(read.out[i] - expected[i]));
  }
  return apart / most;
}

Status analyse_model(const LayeredModel& parts, std::vector<float> x, const HeadOptions& options,
                     const std::function<void(int64_t layer)>& told, ModelReport* report) {
  report->options = options;
  report->causal = parts.causal();
  report->tokens = static_cast<int64_t>(x.size()) / parts.hidden();
  std::vector<float> y;
  for (int64_t i = 0; i < parts.layers(); ++i) {
    if (told) told(i);
    ConvertedLayer plain;
    plain.index = i;
    const bool attends = parts.attends(i);
    {
      HeadTaps taps;
      LINNET_TRY(parts.block(plain, x, y, nullptr, attends ? &taps : nullptr));
      LINNET_TRY(activity(parts, i, y, &report->layers.emplace_back()));
      std::vector<HeadStatistics> heads;
      if (attends) LINNET_TRY(head_statistics(taps, i, parts.causal(), options, heads));
      report->heads.insert(report->heads.end(), heads.begin(), heads.end());
    }
    if (!attends) {
      if (const Status status = recurrent_heads(parts, i, x, report); !status.ok())
        report->left_out.push_back(status.message());
    }
    x.swap(y);
  }
  return {};
}

Status model_mixer(const LayeredModel& parts, std::vector<float> x, int64_t layer, int64_t head, MixerInputs* inputs,
                   std::string* mixer, KernelRead* read) {
  if (layer < 0 || layer >= parts.layers()) {
    return bad_input("the model has layers 0 to " + std::to_string(parts.layers() - 1) + ", but --layer is " +
                     std::to_string(layer));
  }
  std::vector<float> y;
  for (int64_t i = 0; i < layer; ++i) {
    ConvertedLayer plain;
    plain.index = i;
    LINNET_TRY(parts.block(plain, x, y));
    x.swap(y);
  }
  OpTaps taps;
  LINNET_TRY(parts.record(layer, tapped_ops(), x, y, &taps));
  const Status status = mixer_of_taps(taps, head, inputs, mixer, read);
  return status.ok() ? status
                     : bad_input("layer " + std::to_string(layer) + ", " + parts.mixer(layer) + ": " + status.message());
}

std::string model_json(const ModelReport& r) {
  const std::vector<std::string> cheaper = cheaper_names(r.options);
  JsonWriter w(1);
  w.begin_object().member("kind", "heads").member("model", r.path).member("tokens", r.tokens).member("causal", r.causal);
  w.member("rows", r.options.rows)
      .member("sinks", r.options.sinks)
      .member("samples", r.options.samples)
      .key("measures")
      .begin_array();
  for (const char* name : {"entropy", "entropy_ratio", "distance", "first_mass", "sink_mass", "stable_rank", "effective_rank",
                           "dof", "key_condition"}) {
    w.value(name);
  }
  for (const char* what : {"confused_", "margin_"}) {
    for (const char* name : kConfusedBy) w.value(std::string(what) + name);
  }
  for (const int64_t each : r.options.windows) w.value("window_" + std::to_string(each));
  for (const std::string& name : cheaper) w.value("kl_" + name);
  w.end_array().key("heads").begin_array();
  const auto put = [&](const std::string& name, double x) {
    w.key(name);
    std::isfinite(x) ? w.value(x) : w.value(nullptr);
  };
  for (const HeadStatistics& h : r.heads) {
    w.begin_object().member("layer", h.layer).member("head", h.head);
    put("entropy", h.entropy), put("entropy_ratio", h.entropy_ratio), put("distance", h.distance),
        put("first_mass", h.first_mass);
    put("sink_mass", h.sink_mass), put("stable_rank", h.stable_rank), put("effective_rank", h.effective_rank),
        put("dof", h.dof);
    put("key_condition", h.key_condition);
    w.member("query_pairs", h.confusions.pairs);
    for (size_t i = 0; i < 3; ++i) {
      w.member(std::string("confused_") + kConfusedBy[i], h.confusions.confused[i]);
      put(std::string("margin_") + kConfusedBy[i], h.confusions.margin[i]);
    }
    for (size_t i = 0; i < r.options.windows.size(); ++i)
      put("window_" + std::to_string(r.options.windows[i]), i < h.window_mass.size() ? h.window_mass[i] : NAN);
    for (size_t i = 0; i < cheaper.size(); ++i) put("kl_" + cheaper[i], i < h.kl.size() ? h.kl[i] : NAN);
    w.end_object();
  }
  w.end_array().key("layers").begin_array();
  for (const LayerActivity& a : r.layers) {
    w.begin_object().member("layer", a.index).member("mixer", a.mixer).member("largest", a.largest).member("median", a.median);
    w.member("token", a.token).member("channel", a.channel).end_object();
  }
  w.end_array().key("recurrent").begin_array();
  for (const RecurrentHead& h : r.recurrent) {
    const SystemReport& s = h.system;
    const std::vector<double> memory(s.memory_length.begin(), s.memory_length.end());
    w.begin_object()
        .member("layer", h.layer)
        .member("head", h.head)
        .member("mixer", s.mixer)
        .member("state_size", s.state_size);
    w.member("radius_q10", s.radius_low).member("radius_q50", s.radius_middle).member("radius_q90", s.radius_high);
    put("half_life", s.half_life);
    w.member("memory", mean(memory))
        .member("semiseparable_rank", s.semiseparable_rank)
        .member("effective_rank", s.effective_rank);
    w.member("relative_entropy", mean(s.relative_entropy)).member("local_mass", mean(s.local_mass));
    w.member("negative_mass", mean(s.negative_mass)).member("class", s.row_class).member("kernel_error", h.kernel_error);
    w.end_object();
  }
  w.end_array().key("left_out").begin_array();
  for (const std::string& sentence : r.left_out) w.value(sentence);
  return w.end_array().end_object().text();
}

std::vector<std::vector<std::string>> model_rows(const JsonValue& json, int digits) {
  const std::vector<std::string> names = names_of(json);
  std::vector<std::vector<std::string>> rows(1, {"layer", "head"});
  rows[0].insert(rows[0].end(), names.begin(), names.end());
  for (JsonItems items(json.find("heads")); items.next();) {
    const JsonValue& h = items.value();
    std::vector<std::string>& row = rows.emplace_back();
    for (const char* name : {"layer", "head"}) row.push_back(std::to_string(static_cast<int64_t>(real(h.find(name)))));
    for (const std::string& name : names) {
      const double x = real(h.find(name.c_str()));
      row.push_back(std::isnan(x) ? "-" : report::significant(x, digits));
    }
  }
  return rows;
}

std::string model_page(const JsonValue& json) {
  using namespace report;
  std::string model = json.find("model").string();  // the name alone: a page may be shown to others
  while (model.size() > 1 && model.back() == '/') model.pop_back();
  model = model.substr(model.rfind('/') + 1);
  const double tokens = real(json.find("tokens"));
  std::vector<JsonValue> heads;
  int64_t width = 0;
  for (JsonItems items(json.find("heads")); items.next();) {
    heads.push_back(items.value());
    width = std::max(width, static_cast<int64_t>(real(items.value().find("head"))) + 1);
  }
  std::vector<int64_t> shown;  // layers with heads
  for (const JsonValue& h : heads) {
    const auto layer = static_cast<int64_t>(real(h.find("layer")));
    if (shown.empty() || shown.back() != layer) shown.push_back(layer);
  }
  std::string html = page_head("Linnet: " + model) + "<h1>" + html_escape(model) + "</h1>\n<p class=\"lead\">" +
                     html_escape(count_text(tokens) + " tokens, " + std::to_string(heads.size()) +
                                 " heads with softmax weights; each number a mean over sampled queries") +
                     "</p>\n";
  const auto strip = [&](const std::string& name, const std::string& heading, const std::string& sentence, double high) {
    HeatStrip s;
    s.name = heading + " by layer and head";
    s.text = [](double x) { return significant(x, 3); };
    s.left = 70;
    s.width = 620;
    s.groups = {{"heads 0 to " + std::to_string(width - 1), static_cast<int>(width)}};
    for (int64_t h = 0; h < width; ++h) s.columns.push_back("head " + std::to_string(h));
    double most = 0;
    for (const int64_t layer : shown) {
      s.rows.push_back("layer " + std::to_string(layer));
      s.values.emplace_back(static_cast<size_t>(width), 0.0);
    }
    for (const JsonValue& h : heads) {
      const auto layer = static_cast<int64_t>(real(h.find("layer")));
      const auto row = static_cast<size_t>(std::find(shown.begin(), shown.end(), layer) - shown.begin());
      const double x = real(h.find(name.c_str()));
      s.values[row][static_cast<size_t>(real(h.find("head")))] = std::isnan(x) ? 0 : x;
      if (!std::isnan(x)) most = std::max(most, x);
    }
    s.high = high > 0 ? high : std::max(most, 1e-12);
    return panel(heading, sentence, draw(s));
  };
  std::vector<std::string> list;
  if (!heads.empty()) {
    list.push_back(
        strip("entropy_ratio", "Entropy", "Of the weights, relative to even weights: 0 looks at one key, 1 at all alike.", 1));
    list.push_back(strip("distance", "Distance", "Mean distance of what a query reads, in tokens.", 0));
    list.push_back(strip("first_mass", "First token", "Weight on the first key: a sink holds what a head does not need.", 1));
    list.push_back(strip("effective_rank", "Effective rank", "Patterns that the first 512 tokens' weights mix.", 0));
    list.push_back(
        strip("dof", "Degrees of freedom", "Features that linear attention needs here, gauss kernel, lambda 1/64.", 0));
    list.push_back(strip("key_condition", "Spread of keys", "Smallest over largest singular value of the centred keys.", 0));
    list.push_back(strip("confused_linear", "Queries confused",
                         "Pairs of different queries that linear attention (relu) would give the same weights.", 0));
  }
  const std::vector<std::string> names = names_of(json);
  for (const std::string& name : names) {
    if (heads.empty()) break;
    if (name.rfind("window_", 0) == 0)
      list.push_back(strip(name, "Weight within " + name.substr(7), "Weight on the nearest tokens.", 1));
    if (name.rfind("kl_", 0) == 0) {
      list.push_back(strip(name, "KL to " + name.substr(3),
                           "What this mechanism would lose here before training, in nats; 2 or more is yellow.", 2));
    }
  }
  if (!list.empty()) html += panels(list);
  Chart massive;
  massive.name = "largest and median activation behind each layer";
  massive.width = 900;
  massive.height = 380;
  massive.x = {.label = "layer", .text = count_text};
  massive.y = {.label = "magnitude of the hidden states", .log = true, .text = [](double x) { return significant(x, 2); }};
  ChartLine largest{.label = "largest", .color = 0, .shape = 0}, median{.label = "median", .color = 1, .shape = 1};
  std::vector<std::vector<std::string>> rows;
  for (JsonItems items(json.find("layers")); items.next();) {
    const JsonValue& a = items.value();
    const double layer = real(a.find("layer")), top = real(a.find("largest")), middle = real(a.find("median"));
    if (top > 0)
      largest.points.emplace_back(layer, top),
          largest.titles.push_back("layer " + count_text(layer) + ": " + significant(top, 3));
    if (middle > 0)
      median.points.emplace_back(layer, middle),
          median.titles.push_back("layer " + count_text(layer) + ": " + significant(middle, 3));
    rows.push_back({count_text(layer), a.find("mixer").string(), significant(top, 4), significant(middle, 3),
                    significant(middle > 0 ? top / middle : 0, 3), count_text(real(a.find("token"))),
                    count_text(real(a.find("channel")))});
  }
  massive.lines = {largest, median};
  html += panel("Massive activations",
                "Hidden states behind each layer. A few entries thousands of times the median go with attention sinks.",
                draw(massive), true);
  html += panel("Layers", "Where the largest entry stands.",
                table({"layer", "mixer", "largest", "median", "ratio", "token", "channel"}, rows), true);
  std::vector<std::vector<std::string>> recurrent;
  for (JsonItems items(json.find("recurrent")); items.next();) {
    const JsonValue& h = items.value();
    const double life = real(h.find("half_life"));
    recurrent.push_back({count_text(real(h.find("layer"))) + ", " + count_text(real(h.find("head"))), h.find("mixer").string(),
                         count_text(real(h.find("state_size"))),
                         significant(real(h.find("radius_q10")), 3) + " to " + significant(real(h.find("radius_q90")), 3),
                         std::isnan(life) ? "never"
                         : life < 0       ? "grows"
                                          : significant(life, 3),
                         significant(real(h.find("memory")), 3), count_text(real(h.find("semiseparable_rank"))),
                         significant(real(h.find("local_mass")), 2), significant(real(h.find("negative_mass")), 2),
                         h.find("class").string()});
  }
  if (!recurrent.empty()) {
    html += panel("Heads without softmax", "As dynamical systems on the first tokens of the text (docs/understand.md).",
                  table({"layer, head", "mixer", "states", "eigenvalues", "half life", "memory", "semiseparable rank",
                         "local mass", "negative mass", "class"},
                        recurrent),
                  true);
  }
  const std::vector<std::vector<std::string>> all = model_rows(json, 3);
  if (all.size() > 1) {
    html += panel("All numbers", "KL in nats, KL(cheaper || softmax).", table(all.front(), {all.begin() + 1, all.end()}), true);
  }
  return html + page_foot();
}

}  // namespace linnet::analysis
