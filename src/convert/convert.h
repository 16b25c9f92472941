// convert: a pretrained softmax transformer becomes one with cheaper attention, in stages that can be interrupted at any moment
// (docs/convert.md). Nothing of the source is changed; the result appears complete or not at all.
//
//   ConvertOptions options{.model = "smollm2.gguf", .out = "fast", .text = "text.txt", .budget = 0.3, .zero_shot = true};
//   ConvertResult result;
//   LINNET_TRY(convert_model(options, told, result));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/measure.h"
#include "convert/plan.h"
#include "core/status.h"

namespace linnet::convert {

struct ConvertOptions {
  std::string model, out, text, eval_text, plan;
  double budget = 0.25;
  int64_t length = 0;  // 0: the model's context, at most 8192
  int64_t sinks = 4, seed = 0, threads = 0;
  std::vector<int64_t> windows;         // empty: 64, 128, .. 2048 below the length; encoders: 16, 32, ..
  std::vector<std::string> mechanisms;  // empty: what the family can do
  std::vector<int64_t> keep;            // layers that stay
  int64_t keep_count = -1;              // so many layers stay, those that replacing harms most; -1: as many as the budget says
  int64_t cache = 0;                    // tokens' worth of cache that a converted layer may hold; 0: any
  int64_t calibration_tokens = 4096, plan_tokens = 2048, eval_tokens = 16384, fit_tokens = 1'000'000;
  int64_t rounds = 1;        // of refinement
  double keep_recall = 0.1;  // nats that the loss of a passage repeated from far back may rise; < 0: not looked at
  bool zero_shot = false, dry_run = false, keep_work = false, baseline = false, speed = true, recall = true;
  std::vector<int64_t> recall_lengths = {512, 2048};
  std::vector<std::string> fit;  // arguments for python -m linnet.convert fit
};

struct PlannedLayer {
  ConvertedLayer layer;
  double cost = 1, damage = 0, alone = 0;  // share of its softmax cost; predicted; measured damage of the reference window
  std::string kept = {};                   // its mixer, where that is no softmax attention and stays as it is
  std::string label() const { return kept.empty() ? layer.label() : kept; }
};

// A plan that was tried so that the model still finds what stands far back.
struct RecallTry {
  double weight = 0, kl = 0, recall_kl = 0, loss = 0;  // of recall in the damage; of text; of the repeated passages
};

struct ConvertResult {
  std::string family;
  int64_t length = 0, parameters = 0;
  double cost = 1, predicted = 0, measured = -1;  // share of the attention cost; damage: sum and joint, -1: not measured
  std::string unit;                               // of damage
  bool reliable = true;                           // a text was given
  std::vector<PlannedLayer> layers;
  double recall_teacher = -1,
         recall_plain = -1;  // the teacher's loss on repeated passages and on the text before; -1: not measured
  std::vector<RecallTry> recall;
  std::vector<std::pair<std::string, double>> seconds;  // of each stage
  std::string report;                                   // path of report.html
  std::string headline;                                 // what the report begins with
};

Status convert_model(const ConvertOptions& options, const Told& told, ConvertResult& result);

// ---- parts that the command `linnet analyze` and the tests use
// -----------------------------------------------------------------

// Texts cut at blank lines or headings into parts that share no document; each part's bytes in order.
struct TextParts {
  std::string calibration, plan, fit, evaluation;
};
// Beside a fit, which gets the rest, no part has more than `most` bytes.
Status split_text(const std::string& text, bool with_evaluation, bool with_fit, TextParts& out, size_t most = SIZE_MAX);
// Sequences of `length` tokens, at most `tokens` in all; encoders get their special tokens around each.
std::vector<Sample> samples_of(const Model& model, const std::string& text, int64_t length, int64_t tokens);
// The text with some of its passages once more at the end: what continues them stands far back. `from` is where they begin.
Sample repeated_passages(const std::vector<int32_t>& text, int64_t length);
std::vector<Sample> random_samples(const Model& model, int64_t length, int64_t count, uint64_t seed);

// report.cc: the parts of report.json as pages.
std::string report_markdown(const std::string& json);
std::string report_page(const std::string& json);

}  // namespace linnet::convert
