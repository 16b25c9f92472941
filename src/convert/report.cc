// The pages of a conversion: report.md and one self-contained report.html, both made from report.json.
#include <algorithm>
#include <cmath>

#include "convert/convert.h"
#include "core/files/json.h"
#include "report/chart.h"
#include "report/page.h"
#include "report/text.h"

namespace linnet::convert {

namespace {

using report::bytes_text, report::html_escape, report::percent_text;

double real(const JsonValue& v) {
  double x = 0;
  v.number(x);
  return x;
}
std::string whole(double x) { return std::to_string(static_cast<int64_t>(std::llround(x))); }
std::string fixed(double x, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

// What a model wrote, on one line of at most `most` bytes: control characters become spaces, letters stay whole.
std::string one_line(std::string text, size_t most = std::string::npos) {
  for (char& c : text) c = static_cast<unsigned char>(c) < 32 || c == 127 ? ' ' : c;
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most) + " ...";
}

struct Rows {
  std::string title, sentence;
  std::vector<std::string> heading;
  std::vector<std::vector<std::string>> rows;
};

std::string headline(const JsonValue& r) {
  const JsonValue e = r.find("evaluation");
  std::string text =
      percent_text(real(r.find("cost"))) + " of the softmax attention's cost at " + whole(real(r.find("length"))) + " tokens";
  for (JsonItems items(e); items.next();) {
    const std::string name = items.key().string();
    if (name.rfind("blocks_", 0) == 0) {
      text += ", perplexity ratio " + fixed(real(items.value().find("ratio")), 4) + " in blocks of " + name.substr(7);
    }
  }
  if (e.has("embedding")) text += ", mean cosine " + fixed(real(e.find("embedding").find("cosine")), 4);
  double asked = 0, teacher = 0, student = 0;
  for (JsonItems items(e.find("recall").find("tasks")); items.next();) {
    asked += real(items.value().find("trials"));
    teacher += real(items.value().find("teacher")), student += real(items.value().find("student"));
  }
  if (asked > 0) text += ", recalls " + whole(student) + " of " + whole(asked) + " (the teacher " + whole(teacher) + ")";
  JsonValue longest;
  for (JsonItems items(e.find("speed").find("lengths")); items.next();) longest = items.value();
  if (longest.is(JsonValue::Kind::object)) {
    const JsonValue a = longest.find("teacher"), b = longest.find("student");
    text += ", prefill " + fixed(real(b.find("prefill")) / real(a.find("prefill")), 2) + " and decode " +
            fixed(real(b.find("decode")) / real(a.find("decode")), 2) + " times as fast at " +
            whole(real(longest.find("length"))) + " tokens";
  }
  text += ".";
  if (!r.find("reliable").boolean()) text += " UNRELIABLE: planned and evaluated on random inputs, since no text was given.";
  return text;
}

// What was scored under this name of the evaluation; empty: something else.
std::string plan_name(const std::string& name) {
  static const std::pair<const char*, const char*> kNames[] = {
      {"blocks", "this plan"},
      {"baseline", "baseline: least harmed layers get a window of "},
      {"uniform", "evenly spaced layers get a window of "},
      {"lolcats", "least harmed layers get LoLCATs' form (window 64, Hedgehog features of all channels), untrained"},
      {"liger", "least harmed layers get Liger's form (window 64, gated linear attention), untrained"},
      {"hedgehog", "least harmed layers get Hedgehog features of all channels alone, untrained"},
  };
  const size_t first = name.find('_'), last = name.rfind('_');
  if (name.substr(0, first) == "branch") return "";
  for (const auto& [start, text] : kNames) {
    if (name.substr(0, first) == start) return text + (first < last ? name.substr(first + 1, last - first - 1) : "");
  }
  return "";
}

// What is left of the attention under this name; empty: something else.
std::string branch_name(const std::string& name) {
  static const std::pair<const char*, const char*> kNames[] = {
      {"branch_first_", "all but the first keys (no sinks)"},
      {"branch_near_", "windows alone: no head and no layer sees all keys"},
      {"branch_window_", "windows alone: nothing of what was trained beside them"},
      {"branch_far_", "what was trained alone, without its window"},
  };
  for (const auto& [start, text] : kNames) {
    if (name.rfind(start, 0) == 0) return text;
  }
  return "";
}

std::vector<Rows> tables(const JsonValue& r) {
  std::vector<Rows> out;
  const JsonValue e = r.find("evaluation");
  Rows loss{"Loss before and after",
            "The same tokens, the same code, f32. KL is that of the student's next token from the teacher's.",
            {"plan", "block", "tokens", "softmax layers", "cost", "teacher perplexity", "student perplexity", "ratio", "KL",
             "same top token"},
            {}};
  Rows position{"Loss by position",
                "Nats a token; longest blocks of the plan.",
                {"positions", "tokens", "teacher", "student", "ratio", "KL"},
                {}};
  for (JsonItems items(e); items.next();) {
    const std::string name = items.key().string();
    const std::string plan = plan_name(name);
    if (plan.empty()) continue;
    const bool own = name.rfind("blocks_", 0) == 0;
    const JsonValue& v = items.value();
    loss.rows.push_back({plan, whole(real(v.find("length"))), whole(real(v.find("tokens"))),
                         whole(real(v.find("softmax_layers"))), fixed(real(v.find("cost")), 3),
                         fixed(real(v.find("teacher_perplexity")), 3), fixed(real(v.find("student_perplexity")), 3),
                         fixed(real(v.find("ratio")), 4), fixed(real(v.find("kl")), 4),
                         percent_text(real(v.find("agreement")))});
    if (!own) continue;
    position.rows.clear();
    for (JsonItems p(v.find("positions")); p.next();) {
      if (real(p.value().find("tokens")) == 0) continue;
      position.rows.push_back({whole(real(p.value().find("first"))) + "-" + whole(real(p.value().find("last"))),
                               whole(real(p.value().find("tokens"))), fixed(real(p.value().find("teacher_loss")), 4),
                               fixed(real(p.value().find("student_loss")), 4), fixed(real(p.value().find("ratio")), 4),
                               fixed(real(p.value().find("kl")), 4)});
    }
  }
  if (!loss.rows.empty()) out.push_back(loss);
  Rows branches{"Each branch alone",
                "The converted model with a part of its attention left out, on the same tokens: what carries the result.",
                {"what is left", "block", "student perplexity", "ratio", "KL", "same top token"},
                {}};
  for (JsonItems items(e); items.next();) {
    const std::string name = branch_name(items.key().string());
    if (name.empty()) continue;
    const JsonValue& v = items.value();
    branches.rows.push_back({name, whole(real(v.find("length"))), fixed(real(v.find("student_perplexity")), 3),
                             fixed(real(v.find("ratio")), 4), fixed(real(v.find("kl")), 4),
                             percent_text(real(v.find("agreement")))});
  }
  if (!branches.rows.empty()) out.push_back(branches);
  if (e.has("embedding")) {
    const JsonValue v = e.find("embedding");
    out.push_back({"Embeddings",
                   "Cosine of the student's pooled states to the teacher's.",
                   {"samples", "tokens", "mean cosine", "worst"},
                   {{whole(real(v.find("samples"))), whole(real(v.find("length"))), fixed(real(v.find("cosine")), 4),
                     fixed(real(v.find("worst")), 4)}}});
  }
  if (!position.rows.empty()) out.push_back(position);
  Rows speed{
      "Rates and state",
      "One run, both models with 4-bit weights, tokens a second; decode: the fastest of 12 tokens.",
      {"tokens", "prefill teacher", "student", "times", "decode teacher", "student", "times", "state teacher", "student"},
      {}};
  for (JsonItems items(e.find("speed").find("lengths")); items.next();) {
    const JsonValue a = items.value().find("teacher"), b = items.value().find("student");
    speed.rows.push_back({whole(real(items.value().find("length"))), fixed(real(a.find("prefill")), 0),
                          fixed(real(b.find("prefill")), 0), fixed(real(b.find("prefill")) / real(a.find("prefill")), 2),
                          fixed(real(a.find("decode")), 1), fixed(real(b.find("decode")), 1),
                          fixed(real(b.find("decode")) / real(a.find("decode")), 2), bytes_text(real(a.find("state_bytes"))),
                          bytes_text(real(b.find("state_bytes")))});
  }
  if (!speed.rows.empty()) out.push_back(speed);
  Rows recall{"Recall",
              "A pass key hidden in text, a number among name = number lines; right answers, 4-bit weights.",
              {"task", "tokens", "teacher", "student", "of"},
              {}};
  for (JsonItems items(e.find("recall").find("tasks")); items.next();) {
    const JsonValue& v = items.value();
    recall.rows.push_back({v.find("task").string(), whole(real(v.find("length"))), whole(real(v.find("teacher"))),
                           whole(real(v.find("student"))), whole(real(v.find("trials")))});
  }
  if (!recall.rows.empty()) out.push_back(recall);
  Rows tried{
      "Plans tried for recall",
      "Passages of the plan text are repeated at its end, so that what continues them stands far back. The teacher's loss on "
      "them is " +
          fixed(real(r.find("recall_teacher")), 3) + " nats a token, on the text before " +
          fixed(real(r.find("recall_plain")), 3) +
          ". Heads that fetch them are weighed more until the student's loss is near it.",
      {"weight of recall", "KL of text", "KL of repeated passages", "loss of repeated passages"},
      {}};
  for (JsonItems items(r.find("recall")); items.next();) {
    const JsonValue& v = items.value();
    tried.rows.push_back({fixed(real(v.find("weight")), 2), fixed(real(v.find("kl")), 5), fixed(real(v.find("recall_kl")), 4),
                          fixed(real(v.find("loss")), 4)});
  }
  if (!tried.rows.empty()) out.push_back(tried);
  Rows plan{"The plan",
            "Damage: " + r.find("unit").string() +
                ", predicted for this choice; alone: measured with the reference window in this layer only. "
                "Statistics are means over heads; degrees of freedom (features that the kernel needs): the largest.",
            {"layer", "attention", "cost", "damage", "alone", "entropy", "distance", "in window", "on sinks", "stable rank",
             "degrees of freedom"},
            {}};
  for (JsonItems items(r.find("layers")); items.next();) {
    const JsonValue& v = items.value();
    plan.rows.push_back({whole(real(v.find("index"))), v.find("label").string(), fixed(real(v.find("cost")), 3),
                         fixed(real(v.find("damage")), 5), fixed(real(v.find("alone")), 5), fixed(real(v.find("entropy")), 2),
                         fixed(real(v.find("distance")), 0), fixed(real(v.find("window_mass")), 3),
                         fixed(real(v.find("sink_mass")), 3), fixed(real(v.find("stable_rank")), 2),
                         fixed(real(v.find("dof")), 1)});
  }
  out.push_back(plan);
  Rows time{"Time", "Seconds of each stage; a resumed run counts its own.", {"stage", "seconds"}, {}};
  for (JsonItems items(r.find("seconds")); items.next();)
    time.rows.push_back({items.value().find("stage").string(), fixed(real(items.value().find("seconds")), 1)});
  out.push_back(time);
  Rows sources{"Sources", "SHA-256 of what was read.", {"file", "SHA-256"}, {}};
  for (JsonItems items(r.find("sources")); items.next();)
    sources.rows.push_back({items.key().string(), items.value().string()});
  out.push_back(sources);
  return out;
}

std::string data_sentence(const JsonValue& r) {
  const std::string text = r.find("text").string(), other = r.find("eval_text").string();
  if (text.empty()) return "No text was given: random inputs.";
  return "Measured and planned on " + text + ", evaluated on " + (other.empty() ? "another part of it" : other) +
         "; the parts share no document.";
}

}  // namespace

std::string report_markdown(const std::string& json) {
  JsonValue r;
  if (!parse_json(json, "report.json", {.max_bytes = json.size() + 1}, r).ok()) return "";
  std::string text = "# " + r.find("model").string() + ", converted\n\n" + headline(r) + "\n\n" + data_sentence(r) + "\n";
  for (const Rows& t : tables(r)) {
    text += "\n## " + t.title + "\n\n" + t.sentence + "\n\n|";
    for (const std::string& cell : t.heading) text += " " + cell + " |";
    text += "\n|";
    for (size_t i = 0; i < t.heading.size(); ++i) text += "---|";
    for (const auto& row : t.rows) {
      text += "\n|";
      for (const std::string& cell : row) text += " " + cell + " |";
    }
    text += "\n";
  }
  for (JsonItems items(r.find("evaluation").find("texts")); items.next();) {
    const JsonValue& v = items.value();
    text += "\n## " + one_line(v.find("prompt").string(), 80) + "\n\nteacher: " + one_line(v.find("teacher").string()) +
            "\n\nstudent: " + one_line(v.find("student").string()) + "\n\nThe first " + whole(real(v.find("same_tokens"))) +
            " of " + whole(real(v.find("of"))) + " tokens agree.\n";
  }
  return text;
}

std::string report_page(const std::string& json) {
  JsonValue r;
  if (!parse_json(json, "report.json", {.max_bytes = json.size() + 1}, r).ok()) return "";
  const std::string model = r.find("model").string();
  std::string page = report::page_head("Linnet: " + model + " converted") + "<h1>" + html_escape(model) +
                     ", converted</h1><p>" + html_escape(headline(r)) + "</p><p>" + html_escape(data_sentence(r)) + "</p>";
  std::vector<std::string> charts;
  report::Chart cost, harm;
  cost.name = "cost of each layer's attention";
  cost.x = {.label = "layer"};
  cost.y = {.label = "share of its softmax cost", .low = 0, .high = 1};
  harm.name = "damage of each layer";
  harm.x = {.label = "layer"};
  harm.y = {.label = r.find("unit").string()};
  report::ChartLine costs{.label = "cost"}, damages{.label = "this choice", .color = 1},
      alone{.label = "reference window", .color = 2};
  for (JsonItems items(r.find("layers")); items.next();) {
    const JsonValue& v = items.value();
    const double i = real(v.find("index"));
    costs.points.emplace_back(i, real(v.find("cost")));
    costs.titles.push_back(v.find("label").string());
    damages.points.emplace_back(i, real(v.find("damage")));
    alone.points.emplace_back(i, real(v.find("alone")));
  }
  cost.lines = {costs};
  harm.lines = {damages, alone};
  charts.push_back(report::panel("The plan, layer by layer",
                                 "What remains of each layer's cost; pointing at a mark names its attention.",
                                 report::draw(cost)));
  charts.push_back(report::panel("What each layer's attention matters",
                                 "Predicted damage of the choice, and measured damage of the reference window alone.",
                                 report::draw(harm)));
  report::Chart positions;
  positions.name = "KL by position";
  positions.x = {.label = "position", .log = true};
  positions.y = {.label = "KL, nats a token", .low = 0};
  int color = 0;
  for (JsonItems items(r.find("evaluation")); items.next();) {
    const std::string name = items.key().string();
    if (name.rfind("blocks_", 0) != 0) continue;
    report::ChartLine line{.label = "blocks of " + name.substr(7), .color = color, .shape = color};
    ++color;
    for (JsonItems p(items.value().find("positions")); p.next();) {
      if (real(p.value().find("tokens")) > 0)
        line.points.emplace_back(std::sqrt(std::max(real(p.value().find("first")), 16.0) * real(p.value().find("last"))),
                                 real(p.value().find("kl")));
    }
    positions.lines.push_back(line);
  }
  if (!positions.lines.empty())
    charts.push_back(
        report::panel("Loss by position", "How far the student's next token is from the teacher's.", report::draw(positions)));
  report::Chart recall;
  recall.name = "recall by length";
  recall.x = {.label = "tokens", .log = true, .text = report::count_text};
  recall.y = {.label = "share of right answers", .low = 0, .high = 1};
  for (int i = 0; i < 4; ++i) {  // two tasks, teacher and student
    const std::string task = i < 2 ? "passkey" : "associative", who = i % 2 == 0 ? "teacher" : "student";
    report::ChartLine line{.label = task + ", " + who, .color = i, .shape = i % 2};
    for (JsonItems items(r.find("evaluation").find("recall").find("tasks")); items.next();) {
      const JsonValue& v = items.value();
      if (v.find("task").string() != task) continue;
      line.points.emplace_back(real(v.find("length")),
                               real(v.find(i % 2 == 0 ? "teacher" : "student")) / std::max(real(v.find("trials")), 1.0));
    }
    if (!line.points.empty()) recall.lines.push_back(line);
  }
  if (!recall.lines.empty())
    charts.push_back(
        report::panel("Recall against length",
                      "A pass key hidden in text, and a number among name = number lines; both models with 4-bit weights.",
                      report::draw(recall)));
  const JsonValue lengths = r.find("evaluation").find("speed").find("lengths");
  for (const char* what : {"prefill", "decode", "state_bytes"}) {
    report::Chart chart;
    chart.name = what;
    chart.x = {.label = "tokens", .log = true, .text = report::count_text};
    const bool state = std::string(what) == "state_bytes";
    chart.y = {.label = state ? "state" : "tokens a second", .log = !state, .text = state ? report::bytes_text : nullptr};
    for (int i = 0; i < 2; ++i) {
      report::ChartLine line{.label = i == 0 ? "teacher" : "student", .color = i, .shape = i};
      for (JsonItems items(lengths); items.next();) {
        line.points.emplace_back(real(items.value().find("length")),
                                 real(items.value().find(i == 0 ? "teacher" : "student").find(what)));
      }
      if (!line.points.empty()) chart.lines.push_back(line);
    }
    if (!chart.lines.empty()) {
      charts.push_back(report::panel(state                            ? "State"
                                     : std::string(what) == "prefill" ? "Prefill"
                                                                      : "Decode",
                                     state ? "Bytes of a session." : "Both models with 4-bit weights in one run.",
                                     report::draw(chart)));
    }
  }
  page += report::panels(charts);
  for (const Rows& t : tables(r)) page += report::panel(t.title, t.sentence, report::table(t.heading, t.rows), true);
  std::vector<std::vector<std::string>> texts;
  for (JsonItems items(r.find("evaluation").find("texts")); items.next();) {
    const JsonValue& v = items.value();
    texts.push_back({one_line(v.find("prompt").string()), one_line(v.find("teacher").string()),
                     one_line(v.find("student").string()),
                     whole(real(v.find("same_tokens"))) + " of " + whole(real(v.find("of")))});
  }
  if (!texts.empty()) {
    page += report::panel("Side by side",
                          "The most likely tokens behind each prompt; the last column counts equal ones from the start.",
                          report::table({"prompt", "teacher", "student", "same tokens"}, texts), true);
  }
  return page + report::page_foot();
}

}  // namespace linnet::convert
