// Texts cut into parts that share no document, and their tokens.
#include "convert/job.h"
#include "core/files/file.h"
#include "core/files/safetensors.h"

namespace linnet::convert {

Status split_text(const std::string& text, bool with_evaluation, bool with_fit, TextParts& out, size_t most) {
  // Where documents end: a blank line, or a line that is no sentence of the one before it.
  const auto cut_near = [&](size_t at) {
    const size_t end = text.find("\n\n", at), spaced = text.find("\n \n", at);
    const size_t cut =
        std::min(end == std::string::npos ? text.size() : end + 2, spaced == std::string::npos ? text.size() : spaced + 3);
    if (cut < text.size() && cut < at + text.size() / 10 + 4096) return cut;
    const size_t line = text.find('\n', at);
    return line == std::string::npos ? text.size() : line + 1;
  };
  double shares[4] = {0.3, 0.2, with_fit ? 0.2 : 0, with_evaluation ? 0.3 : 0};
  const double cap = static_cast<double>(most) / std::max(static_cast<double>(text.size()), 1.0);
  for (double& share : shares) share = std::min(share, with_fit ? cap : 1);
  if (with_fit) shares[2] = 1 - shares[0] - shares[1] - shares[3];  // a fit needs much text, the others little
  const double total = shares[0] + shares[1] + shares[2] + shares[3];
  std::string* parts[4] = {&out.calibration, &out.plan, &out.fit, &out.evaluation};
  size_t begin = 0;
  double sum = 0;
  int last = 3;
  while (shares[last] == 0) --last;
  for (int i = 0; i < 4; ++i) {
    sum += shares[i] / total;
    if (shares[i] == 0) continue;
    const size_t end =
        i == last ? text.size() : std::max(begin, cut_near(static_cast<size_t>(sum * static_cast<double>(text.size()))));
    *parts[i] = text.substr(begin, end - begin);
    begin = end;
    if (parts[i]->empty()) {
      return bad_input("the text is too short: it has " + std::to_string(text.size()) +
                       " bytes, of which one part would be empty");
    }
  }
  return {};
}

std::vector<Sample> samples_of(const Model& model, const std::string& text, int64_t length, int64_t tokens) {
  // A token has about 4 bytes; no more is encoded than can be used.
  const std::string head = text.substr(0, std::min<size_t>(text.size(), static_cast<size_t>(tokens) * 12 + 4096));
  const std::vector<int32_t> ids = model.tokenizer().encode(head, {false, false});
  const bool encoder = !model.summary().causal;
  const std::vector<int32_t> before = encoder ? model.tokenizer().prefix() : std::vector<int32_t>{},
                             after = encoder ? model.tokenizer().suffix() : std::vector<int32_t>{};
  const size_t around = before.size() + after.size(),
               own = static_cast<size_t>(length) > around ? static_cast<size_t>(length) - around : 1;
  std::vector<Sample> list;
  for (size_t at = 0; at < ids.size() && static_cast<int64_t>(list.size() * static_cast<size_t>(length)) < tokens; at += own) {
    const size_t end = std::min(ids.size(), at + own);
    if (end - at < own && !list.empty()) break;
    Sample sample;
    sample.tokens = before;
    sample.tokens.insert(sample.tokens.end(), ids.begin() + static_cast<ptrdiff_t>(at),
                         ids.begin() + static_cast<ptrdiff_t>(end));
    sample.tokens.insert(sample.tokens.end(), after.begin(), after.end());
    list.push_back(std::move(sample));
  }
  return list;
}

Sample repeated_passages(const std::vector<int32_t>& text, int64_t length) {
  constexpr int64_t kPassages = 4;
  Sample sample;
  const int64_t own = std::min<int64_t>(48, length / 16),
                T = std::min(length - kPassages * own, static_cast<int64_t>(text.size()));
  if (own < 8 || T < 4 * kPassages * own) return sample;
  sample.tokens.assign(text.begin(), text.begin() + T);
  sample.from = T;
  for (int64_t i = 0; i < kPassages; ++i) {
    const auto begin = text.begin() + T * (4 * i + 1) / (5 * kPassages);  // at 5, 25, 45 and 65 % of the text
    sample.tokens.insert(sample.tokens.end(), begin, begin + own);
  }
  return sample;
}

std::vector<Sample> random_samples(const Model& model, int64_t length, int64_t count, uint64_t seed) {
  std::vector<Sample> list(static_cast<size_t>(count));
  uint64_t random = seed + 1;
  const ModelSummary& s = model.summary();
  for (Sample& sample : list) {
    if (!s.images) {
      for (int64_t i = 0; i < length; ++i)
        sample.tokens.push_back(static_cast<int32_t>(mix(random) % static_cast<uint64_t>(s.vocabulary)));
      continue;
    }
    // A few waves in random directions: smooth, as pictures are.
    const LayeredModel parts(model);
    const int64_t side = parts.description().image, channels = parts.description().channels;
    sample.pixels.assign(static_cast<size_t>(channels * side * side), 0);
    for (int wave = 0; wave < 12; ++wave) {
      const auto unit = [&] { return static_cast<double>(mix(random) >> 11) / 9007199254740992.0; };
      const double fx = 20 * (unit() - 0.5) / static_cast<double>(side), fy = 20 * (unit() - 0.5) / static_cast<double>(side),
                   phase = 7 * unit();
      const int64_t channel = static_cast<int64_t>(mix(random) % static_cast<uint64_t>(channels));
      for (int64_t y = 0; y < side; ++y) {
        for (int64_t x = 0; x < side; ++x) {
          sample.pixels[static_cast<size_t>((channel * side + y) * side + x)] +=
              static_cast<float>(std::sin(6.2831853 * (fx * static_cast<double>(x) + fy * static_cast<double>(y)) + phase));
        }
      }
    }
  }
  return list;
}

// Stage 2.
Status Job::data() {
  const ModelSummary& s = teacher_.summary();
  const int64_t calibration = std::min({length_, o_.calibration_tokens, s.context}),
                planned = std::min({length_, o_.plan_tokens, s.context});
  if (o_.text.empty() || s.images) {
    r_.reliable = false;
    const int64_t count = s.causal ? 1 : 4;
    calibration_ = random_samples(teacher_, calibration, count, static_cast<uint64_t>(o_.seed));
    plan_ = random_samples(teacher_, planned, count, static_cast<uint64_t>(o_.seed) + 1000);
    evaluation_ =
        random_samples(teacher_, s.causal ? o_.eval_tokens : length_, s.causal ? 1 : 8, static_cast<uint64_t>(o_.seed) + 2000);
    return {};
  }
  std::string text, other;
  LINNET_TRY(read_file(o_.text, kMaxTextBytes, text));
  if (!o_.eval_text.empty()) LINNET_TRY(read_file(o_.eval_text, kMaxTextBytes, other));
  for (const auto& [name, content] : {std::pair(&o_.text, &text), std::pair(&o_.eval_text, &other)}) {
    if (const size_t bad = find_invalid_utf8(*content); bad != content->size()) {
      return bad_input(*name + ": is not UTF-8 at byte " + std::to_string(bad) + "; convert it first");
    }
  }
  TextParts parts;
  const int64_t asked = std::max({o_.calibration_tokens, o_.plan_tokens, o_.eval_tokens});
  LINNET_TRY(split_text(text, o_.eval_text.empty(), !o_.zero_shot, parts, static_cast<size_t>(asked) * 12 * 8 + 65536));
  if (!o_.eval_text.empty()) parts.evaluation = std::move(other);
  const int64_t more = s.causal ? 1 : 8;
  calibration_ = samples_of(teacher_, parts.calibration, calibration, calibration * more);
  plan_ = samples_of(teacher_, parts.plan, planned, planned * more);
  if (s.causal && o_.keep_recall >= 0 && !keeps_all() && o_.plan.empty()) {
    const std::vector<Sample> longest = samples_of(teacher_, parts.plan, calibration, calibration);
    if (!longest.empty()) {
      Sample sample = repeated_passages(longest.front().tokens, calibration);
      if (!sample.tokens.empty()) recall_.push_back(std::move(sample));
    }
  }
  const int64_t eval = s.causal ? o_.eval_tokens : length_ * std::max<int64_t>(1, o_.eval_tokens / length_);
  evaluation_ = samples_of(teacher_, parts.evaluation, s.causal ? eval : length_, eval);
  for (const auto& [name, list] :
       {std::pair("measuring", &calibration_), std::pair("planning", &plan_), std::pair("evaluating", &evaluation_)}) {
    if (list->empty() || list->front().tokens.size() < 16) {
      return bad_input(o_.text + ": is too short: the part for " + name + " has " +
                       std::to_string(list->empty() ? 0 : list->front().tokens.size()) + " tokens, expected at least 16");
    }
  }
  if (exists(at("tokens.safetensors"))) return {};
  const auto joined = [](const std::vector<Sample>& list) {
    std::vector<int32_t> all;
    for (const Sample& sample : list) all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
    return all;
  };
  const std::vector<int32_t> a = joined(calibration_), b = joined(plan_), d = joined(evaluation_);
  std::vector<int32_t> c;
  if (!o_.zero_shot) {
    const size_t most = static_cast<size_t>(o_.fit_tokens) * 8;
    if (!s.causal) c = joined(samples_of(teacher_, parts.fit, planned, o_.fit_tokens));
    if (s.causal)
      c = teacher_.tokenizer().encode(std::string_view(parts.fit).substr(0, std::min(parts.fit.size(), most)), {false, false});
  }
  const auto tensor = [](const char* name, const std::vector<int32_t>& ids) {
    return SafetensorsTensor{name, "I32", {static_cast<int64_t>(ids.size())}, ids.data()};
  };
  return write_safetensors(at("tokens.safetensors"),
                           {tensor("calibration", a), tensor("plan", b), tensor("fit", c), tensor("evaluation", d)});
}

}  // namespace linnet::convert
