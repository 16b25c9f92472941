// Plans that keep what the model finds far back: weights of recall in the damage, and which layers stay as they are.
#include <limits>

#include "convert/job.h"
#include "core/files/file.h"

namespace linnet::convert {

namespace {

// Mean loss of the tokens behind rows `begin` to `end`.
Status row_loss(const LayeredModel& model, const std::vector<int32_t>& tokens, const std::vector<float>& states, int64_t begin,
                int64_t end, double& out) {
  const int64_t C = model.hidden();
  const std::vector<int32_t> part(tokens.begin() + begin, tokens.begin() + end);
  const std::vector<float> rows(states.begin() + begin * C, states.begin() + end * C);
  BlockScore score;
  LINNET_TRY(score_block(model, part, rows, rows, score));
  double sum = 0;
  for (const float x : score.teacher) sum += static_cast<double>(x);
  out = sum / static_cast<double>(std::max<size_t>(score.teacher.size(), 1));
  return {};
}

}  // namespace

Status Job::recall_damage() {
  const Sample& sample = recall_.front();
  const int64_t T = static_cast<int64_t>(sample.tokens.size()), from = sample.from;
  LINNET_TRY(trace(*parts_, recall_, true, told_, recalled_));
  LINNET_TRY(row_loss(*parts_, sample.tokens, recalled_.last[0], from, T, r_.recall_teacher));
  LINNET_TRY(row_loss(*parts_, sample.tokens, recalled_.last[0], std::max<int64_t>(0, from - 512), from, r_.recall_plain));
  finds_ = r_.recall_teacher < 0.7 * r_.recall_plain;
  if (!finds_) return {};  // nothing to keep
  const size_t layers = static_cast<size_t>(parts_->layers());
  std::vector<double> found;
  LINNET_TRY(read_list("recall_alone.json", found));
  recall_scale_.assign(layers, 0);
  for (size_t i = 0; i < layers; ++i) {
    double error = 0, loss = 0;
    for (const std::vector<double>& head : errors_[i].recall) error += usable(i) > 0 ? head[reference(i)] : 0;
    if (found.size() == i) {
      tell("damage to repeated passages", static_cast<int64_t>(i), static_cast<int64_t>(layers));
      found.push_back(0);
      std::vector<ConvertedLayer> list = plain_layers();
      list[i] = reference_layer(i);
      if (parts_->converts(static_cast<int64_t>(i)) && error > 0) LINNET_TRY(recall_of(list, found[i], loss));
      LINNET_TRY(write_list("recall_alone.json", found));
    }
    if (error > 0) recall_scale_[i] = std::max(found[i], 0.0) / error;
  }
  return {};
}

Status Job::recall_of(const std::vector<ConvertedLayer>& list, double& kl, double& loss) const {
  const Sample& sample = recall_.front();
  size_t first = 0;
  while (first + 1 < list.size() && list[first].mechanism == "softmax") ++first;
  std::vector<float> last;
  LINNET_TRY(run_from(*parts_, list, first, recalled_.inputs[first][0], nullptr, last));
  LINNET_TRY(distance(*parts_, recalled_.last, {last}, false, kl, sample.from));
  return row_loss(*parts_, sample.tokens, last, sample.from, static_cast<int64_t>(sample.tokens.size()), loss);
}

// Losses of texts hardly ask for keys far away; finding one sentence does. Heads that fetch a repeated passage from far back
// are weighed more and more until the plan finds what the teacher finds. Layers fetch one after another, and what single ones
// lose adds up to more than its sum: so weights below 1 are tried, too, and of all plans the measured best stays.
Status Job::keep_recall() {
  constexpr double kWeights[] = {0, 1.0 / 64, 1.0 / 16, 0.25, 1, 4, 16};
  LINNET_TRY(traced());
  std::vector<double> found;  // kl, recall_kl and loss of each try
  LINNET_TRY(read_list("recall.json", found));
  size_t best = 0, n = 0;
  std::vector<ConvertResult> tried;
  for (const double weight : kWeights) {
    tell("recall of plans", static_cast<int64_t>(n), static_cast<int64_t>(std::size(kWeights)));
    ConvertResult before = r_;
    if (weight > 0) {
      const std::vector<std::vector<LayerOption>> all = options(weight);
      std::vector<size_t> chosen;
      LINNET_TRY(pick(all, chosen));
      take(all, chosen);
    }
    if (found.size() < 3 * (n + 1)) {
      double kl = r_.measured, far = 0, loss = 0;
      if (weight > 0 || kl < 0) LINNET_TRY(joint(planned(), kl));
      LINNET_TRY(recall_of(planned(), far, loss));
      found.resize(3 * n);
      found.insert(found.end(), {kl, far, loss});
      LINNET_TRY(write_list("recall.json", found));
    }
    r_.measured = found[3 * n];
    const RecallTry now_tried{weight, found[3 * n], found[3 * n + 1], found[3 * n + 2]};
    before.recall.push_back(now_tried);
    r_.recall = before.recall;
    tried.push_back(r_);
    const RecallTry& least = tried[best].recall[best];
    if (now_tried.kl + now_tried.recall_kl < least.kl + least.recall_kl) best = n;
    if (now_tried.loss <= r_.recall_teacher + o_.keep_recall) {
      best = n;
      break;
    }
    ++n;
  }
  const std::vector<RecallTry> all_tried = r_.recall;
  r_ = tried[best];
  r_.recall = all_tried;
  return {};
}

// One layer after another gets the best that it could become, always the one that then does the least harm to text and
// repeated passages together, until so many are left as were asked for. Harm hardly falls while more layers change, so a layer
// whose last known harm is not the least is not measured again. Then layers that stay and layers that changed swap places
// while that helps.
Status Job::choose_kept(const std::vector<std::vector<LayerOption>>& all) {
  LINNET_TRY(traced());
  std::vector<double> known;  // text and passages of each trial, in order
  LINNET_TRY(read_list("kept.json", known));
  size_t trials = 0;
  const size_t candidates = static_cast<size_t>(
      std::count_if(all.begin(), all.end(), [](const std::vector<LayerOption>& list) { return list.size() > 1; }));
  const auto measured = [&](const std::vector<ConvertedLayer>& list, double& kl, double& far) -> Status {
    double loss = 0;
    if (known.size() < 2 * (trials + 1)) {
      tell("layers that stay", static_cast<int64_t>(trials), static_cast<int64_t>(4 * candidates));
      known.resize(2 * trials + 2);
      LINNET_TRY(joint(list, known[2 * trials]));
      if (finds_) LINNET_TRY(recall_of(list, known[2 * trials + 1], loss));
      LINNET_TRY(write_list("kept.json", known));
    }
    kl = known[2 * trials], far = known[2 * trials + 1];
    ++trials;
    return {};
  };
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const size_t stay = std::min(candidates, static_cast<size_t>(o_.keep_count));
  std::vector<ConvertedLayer> list = plain_layers();
  std::vector<double> harm(all.size(), kNever);
  std::vector<size_t> when(all.size(), 0);  // how many layers had changed
  double sum = 0, kl = 0, far = 0;
  const auto replaced = [&](size_t i) { return all[i][least_harm(all[i])].layer; };
  stays_.assign(all.size(), true);
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].size() < 2) continue;
    std::vector<ConvertedLayer> one = plain_layers();
    one[i] = replaced(i);
    LINNET_TRY(measured(one, kl, far));
    harm[i] = kl + far;
  }
  for (size_t changed = 0; changed < candidates - stay;) {
    const size_t i = static_cast<size_t>(std::min_element(harm.begin(), harm.end()) - harm.begin());
    const ConvertedLayer before = list[i];
    list[i] = replaced(i);
    if (when[i] < changed) {
      LINNET_TRY(measured(list, kl, far));
      harm[i] = kl + far - sum, when[i] = changed;
      if (harm[i] > *std::min_element(harm.begin(), harm.end())) {
        list[i] = before;
        continue;
      }
    }
    sum += harm[i], harm[i] = kNever, stays_[i] = false, ++changed;
  }
  // Swaps: each layer that stays, the least harmed first, with each that changed, the latest first.
  std::vector<size_t> kept;
  for (size_t i = 0; i < all.size(); ++i) {
    if (stays_[i] && all[i].size() > 1) kept.push_back(i);
  }
  std::stable_sort(kept.begin(), kept.end(), [&](size_t a, size_t b) { return harm[a] < harm[b]; });
  size_t left = candidates;
  for (const size_t k : kept) {
    std::vector<ConvertedLayer> trial = list;
    trial[k] = replaced(k);
    size_t best = k;
    for (size_t i = all.size(); i-- > 0 && left > 0;) {
      if (stays_[i]) continue;
      const ConvertedLayer changed = trial[i];
      trial[i] = plain_layers()[i];
      LINNET_TRY(measured(trial, kl, far));
      trial[i] = changed, --left;
      if (kl + far < sum) sum = kl + far, best = i;
    }
    if (best == k) continue;
    stays_[k] = false, stays_[best] = true;
    list = trial, list[best] = plain_layers()[best];
  }
  std::vector<size_t> chosen;
  LINNET_TRY(pick(all, chosen));
  take(all, chosen);
  LINNET_TRY(joint(planned(), r_.measured));
  if (!finds_) return {};
  RecallTry& found = r_.recall.emplace_back();
  found.weight = 1, found.kl = r_.measured;
  return recall_of(planned(), found.recall_kl, found.loss);
}

}  // namespace linnet::convert
