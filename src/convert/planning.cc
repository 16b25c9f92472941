// The damage that replacements do, the plan, and its refinement.
#include <cmath>

#include "convert/job.h"
#include "core/files/file.h"
#include "layers/layer.h"
#include "linnet.h"

namespace linnet::convert {

namespace {

// Lists whose heads are all alike, or of one kind, as the layers without these lists. `own`: the window of the source.
void simplify(ConvertedLayer& layer, int64_t own) {
  if (layer.windows.empty()) return;
  const auto alike = [](const std::vector<int64_t>& list) {
    return std::all_of(list.begin(), list.end(), [&](int64_t each) { return each == list[0]; });
  };
  const bool same = alike(layer.windows) && alike(layer.blocks) && alike(layer.updates);
  if (alike(layer.blocks) && (layer.blocks.empty() || layer.blocks[0] == 0)) layer.blocks.clear(), layer.updates.clear();
  if (!same) return;
  ConvertedLayer one;
  one.index = layer.index;
  if (!layer.blocks.empty()) {
    one.mechanism = "monarch", one.block = layer.blocks[0], one.steps = layer.updates[0];
  } else if (layer.windows[0] != own) {
    one.mechanism = "window", one.window = layer.windows[0], one.sinks = layer.sinks;
  }
  layer = one;
}

}  // namespace

std::vector<ConvertedLayer> Job::plain_layers() const {
  std::vector<ConvertedLayer> list(static_cast<size_t>(parts_->layers()));
  for (size_t i = 0; i < list.size(); ++i) list[i].index = static_cast<int64_t>(i);
  return list;
}

// What one layer's replacement alone does.
Status Job::alone(const ConvertedLayer& layer, double& kl) {
  std::vector<ConvertedLayer> list = plain_layers();
  const size_t i = static_cast<size_t>(layer.index);
  list[i] = layer;
  std::vector<std::vector<float>> found(plan_.size());
  for (size_t s = 0; s < plan_.size(); ++s) LINNET_TRY(run_from(*parts_, list, i, traced_.inputs[i][s], nullptr, found[s]));
  return distance(*parts_, traced_.last, found, false, kl);
}

ConvertedLayer Job::reference_layer(size_t i) const {
  ConvertedLayer layer;
  layer.index = static_cast<int64_t>(i), layer.mechanism = "window", layer.window = windows_[reference(i)],
  layer.sinks = o_.sinks;
  return layer;
}

Status Job::joint(const std::vector<ConvertedLayer>& list, double& kl) {
  size_t first = 0;
  while (first + 1 < list.size() && list[first].mechanism == "softmax") ++first;
  std::vector<std::vector<float>> found(plan_.size());
  for (size_t s = 0; s < plan_.size(); ++s)
    LINNET_TRY(run_from(*parts_, list, first, traced_.inputs[first][s], nullptr, found[s]));
  return distance(*parts_, traced_.last, found, false, kl);
}

Status Job::traced() {
  if (!traced_.last.empty()) return {};
  return trace(*parts_, plan_, true, told_, traced_);
}

// A list of numbers that grows one by one, each saved as soon as it is known.
Status Job::read_list(const char* file, std::vector<double>& out) const {
  out.clear();
  if (!exists(at(file))) return {};
  std::string text;
  JsonValue root;
  LINNET_TRY(read_file(at(file), kMaxStageBytes, text));
  LINNET_TRY(parse_json(text, at(file), {}, root));
  out = numbers(root.find("kl"));
  return {};
}

Status Job::write_list(const char* file, const std::vector<double>& list) const {
  JsonWriter w;
  w.begin_object();
  write_numbers(w, "kl", list);
  return write_file(at(file), w.end_object().text());
}

// Stage 5, the first half.
Status Job::damage() {
  const size_t layers = static_cast<size_t>(parts_->layers());
  LINNET_TRY(read_list("damage.json", alone_));
  while (alone_.size() < layers) {
    const size_t i = alone_.size();
    tell("damage", static_cast<int64_t>(i), static_cast<int64_t>(layers));
    double kl = 0;
    if (parts_->converts(static_cast<int64_t>(i)) && reference_error(i) > 0) {
      LINNET_TRY(traced());
      LINNET_TRY(alone(reference_layer(i), kl));
    }
    alone_.push_back(std::max(kl, 0.0));
    LINNET_TRY(write_list("damage.json", alone_));
  }
  scale_.assign(layers, 0);
  for (size_t i = 0; i < layers; ++i) {
    if (parts_->converts(static_cast<int64_t>(i)) && reference_error(i) > 0) scale_[i] = alone_[i] / reference_error(i);
  }
  return {};
}

// Features of each layer: the mean is the number of channels, shared out by the degrees of freedom of the layers' heads in
// multiples of 16.
std::vector<int64_t> Job::feature_widths() const {
  std::vector<int64_t> widths;
  std::vector<double> dof;
  std::vector<size_t> at;
  size_t most = 1;
  for (size_t i = 0; i < errors_.size(); ++i) {
    widths.push_back(parts_->converts(static_cast<int64_t>(i)) ? parts_->key(static_cast<int64_t>(i)) : 0);
    if (widths.back() > 0 && !errors_[i].heads.empty()) at.push_back(i), most = std::max(most, errors_[i].heads.size());
  }
  for (const size_t i : at) {
    for (size_t h = 0; h < most; ++h) dof.push_back(h < errors_[i].heads.size() ? errors_[i].heads[h].dof : 0);
    if (!(*std::max_element(dof.end() - static_cast<ptrdiff_t>(most), dof.end()) > 0)) return widths;  // not measured
  }
  if (at.empty()) return widths;
  const int64_t S = static_cast<int64_t>(at.size()), K = widths[at[0]];
  std::vector<int64_t> dims(at.size());
  DistillAllocArgs args;
  args.dof = View::dense(dof.data(), Dtype::f64, {S, static_cast<int64_t>(most)});
  args.cost = static_cast<double>(K), args.low = 16, args.high = 4 * K, args.multiple = 16;
  DistillAllocOut out;
  out.dims_exact = View::dense(dims.data(), Dtype::i64, {S});
  std::vector<char> memory(static_cast<size_t>(distill_alloc_workspace(args, {})) + 128);
  Context context;
  context.workspace = memory.data(), context.workspace_bytes = static_cast<int64_t>(memory.size());
  if (!distill_alloc(args, out, context).ok()) return widths;
  for (size_t n = 0; n < at.size(); ++n) widths[at[n]] = std::max<int64_t>(dims[n], 16);
  return widths;
}

std::vector<std::vector<LayerOption>> Job::options(double recall) const {
  std::vector<std::vector<LayerOption>> all;
  const std::vector<int64_t> widths = feature_widths();
  const bool causal = parts_->causal(), any = o_.mechanisms.empty();
  for (int64_t i = 0; i < parts_->layers(); ++i) {
    const LayerErrors& e = errors_[static_cast<size_t>(i)];
    std::vector<LayerOption> list(1);
    list[0].layer.index = i;
    list[0].cost = 1;
    const bool kept = std::find(o_.keep.begin(), o_.keep.end(), i) != o_.keep.end();
    if (!parts_->converts(i) || kept) {
      all.push_back(std::move(list));
      continue;
    }
    const double scale = scale_[static_cast<size_t>(i)], far = recall > 0 ? recall * recall_scale_[static_cast<size_t>(i)] : 0;
    const auto add = [&](ConvertedLayer layer, double cost, double error, double passages = 0) {
      layer.index = i;
      LayerOption option;
      option.layer = std::move(layer), option.cost = cost, option.error = error, option.recall = far * passages;
      option.damage = error * scale + option.recall;
      list.push_back(std::move(option));
    };
    if (any || contains(o_.mechanisms, "window")) {
      // Those that are cheaper than what the layer has, and for single heads that itself.
      const size_t count = usable(static_cast<size_t>(i));
      std::vector<int64_t> widths_of(windows_.begin(), windows_.begin() + static_cast<ptrdiff_t>(count));
      // Of text and passages together, in nats; without a scale in the layer's own units, which order its windows as well.
      std::vector<std::vector<double>> error;
      const double unit = scale > 0 || far > 0 ? scale : 1;
      for (size_t h = 0; h < e.window.size(); ++h) {
        error.emplace_back();
        for (size_t w = 0; w < count; ++w)
          error[h].push_back(unit * e.window[h][w] + (h < e.recall.size() ? far * e.recall[h][w] : 0));
      }
      // One window for each head of keys, or none; in encoders single heads may be Monarch instead.
      std::vector<size_t> monarchs;
      if (error.size() > 1 && error.size() <= static_cast<size_t>(Sizes::kMax) && parts_->parts_heads(i)) {
        widths_of.push_back(parts_->own_window(i));
        for (std::vector<double>& head : error) head.push_back(0);
        for (size_t o = 0; o < whole_.size() && !causal && parts_->replaces(i); ++o) {
          if (whole_[o].mechanism != "monarch") continue;
          monarchs.push_back(o);
          for (size_t h = 0; h < error.size(); ++h) error[h].push_back(unit * e.single[h][o]);
        }
      } else {
        for (size_t h = 1; h < error.size(); ++h) {
          for (size_t w = 0; w < count; ++w) error[0][w] += error[h][w];
        }
        error.resize(1);
      }
      std::vector<double> cost;
      for (const int64_t w : widths_of)
        cost.push_back(window_cost(w, o_.sinks, length_, causal) / own_cost(static_cast<size_t>(i)));
      for (const size_t o : monarchs) cost.push_back(monarch_cost(whole_[o].block, whole_[o].steps, length_));
      for (const HeadWindows& point : combine_heads(error, cost, kMostPoints)) {
        if (point.window.empty()) continue;
        ConvertedLayer layer;
        layer.mechanism = "window";
        layer.sinks = o_.sinks;
        bool same = true, full = true;
        for (const size_t w : point.window) {
          const bool window = w < widths_of.size();
          layer.windows.push_back(window ? widths_of[w] : 0);
          layer.blocks.push_back(window ? 0 : whole_[monarchs[w - widths_of.size()]].block);
          layer.updates.push_back(window ? 0 : whole_[monarchs[w - widths_of.size()]].steps);
          same &= w == point.window[0];
          full &= w == count;
        }
        if (full || (same && layer.blocks[0] > 0)) continue;  // Monarch in all heads is an option below
        simplify(layer, 0);
        double text = 0, passages = 0;
        for (size_t h = 0; h < e.window.size(); ++h) {
          const size_t w = point.window[point.window.size() > 1 ? h : 0];
          text += w < count ? e.window[h][w] : w >= widths_of.size() ? e.single[h][monarchs[w - widths_of.size()]] : 0;
          passages += w < count && h < e.recall.size() ? e.recall[h][w] : 0;
        }
        add(std::move(layer), point.cost, text, passages);
      }
    }
    for (size_t o = 0; o < whole_.size() && parts_->replaces(i); ++o) {
      add(whole_[o], mechanism_cost(whole_[o], length_, parts_->key(i), parts_->value(i), causal), e.whole[o]);
    }
    // Before a fit nobody knows what a trained mechanism will do: half the harm of its window is the guess.
    for (const char* name : {"gdn", "gla", "hybrid", "hybrid-exact", "distill", "hedgehog", "t2r"}) {
      if (!contains(o_.mechanisms, name) || !causal || !parts_->replaces(i)) continue;
      ConvertedLayer layer;
      layer.mechanism = name;
      const std::string& m = layer.mechanism;
      const bool alone = m == "distill" || m == "hedgehog" || m == "t2r", recurrent = m == "gdn" || m == "gla";
      layer.window = alone ? 0 : std::min<int64_t>(64, windows_[0]);
      layer.sinks = recurrent || m == "hybrid-exact" ? o_.sinks : 0;
      if (!recurrent)
        layer.features = m == "hybrid" || m == "hedgehog" ? (parts_->key(i) + 1) / 2
                         : m == "t2r"                     ? parts_->key(i)
                                                          : widths[static_cast<size_t>(i)];
      double error = 0;
      for (const std::vector<double>& head : e.window) error += head[0];
      add(layer, mechanism_cost(layer, length_, parts_->key(i), parts_->value(i), causal), error / 2);
    }
    if (o_.cache > 0) {
      const auto large = [&](const LayerOption& o) {
        return o.layer.mechanism != "softmax" && cache_tokens(o.layer, length_, parts_->heads(i), parts_->kv_heads(i),
                                                              parts_->key(i), parts_->value(i)) > static_cast<double>(o_.cache);
      };
      list.erase(std::remove_if(list.begin(), list.end(), large), list.end());
    }
    all.push_back(std::move(list));
  }
  return all;
}

size_t Job::least_harm(const std::vector<LayerOption>& list) {
  size_t best = 1;
  for (size_t o = 2; o < list.size(); ++o) best = list[o].damage < list[best].damage ? o : best;
  return best;
}

Status Job::pick(const std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) const {
  if (o_.keep_count < 0) return choose(all, weights_, o_.budget, chosen);
  std::vector<bool> stays = stays_;
  if (stays.empty()) {  // nothing was measured: by the damage of the best that a layer could become
    std::vector<std::pair<double, size_t>> harm;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].size() > 1) harm.emplace_back(-all[i][least_harm(all[i])].damage, i);
    }
    std::sort(harm.begin(), harm.end());
    stays.assign(all.size(), true);
    for (size_t n = static_cast<size_t>(o_.keep_count); n < harm.size(); ++n) stays[harm[n].second] = false;
  }
  std::vector<std::vector<LayerOption>> rest = all;  // without what is not open to choice; softmax stands first
  for (size_t i = 0; i < all.size(); ++i) {
    if (stays[i]) rest[i].resize(1);
    if (!stays[i]) rest[i].erase(rest[i].begin());
  }
  LINNET_TRY(choose(rest, weights_, o_.budget, chosen));
  for (size_t i = 0; i < all.size(); ++i) chosen[i] += stays[i] ? 0 : 1;
  return {};
}

void Job::take(const std::vector<std::vector<LayerOption>>& all, const std::vector<size_t>& chosen) {
  r_.layers.clear();
  r_.cost = r_.predicted = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const LayerOption& o = all[i][chosen[i]];
    const double damage = std::max(0.0, o.damage - o.recall);  // what is told is the damage to the text
    r_.layers.push_back({o.layer, o.cost, damage, alone_.empty() ? 0 : alone_[i]});
    r_.cost += o.cost * weights_[i];
    r_.predicted += damage;
  }
}

std::vector<ConvertedLayer> Job::planned() const {
  std::vector<ConvertedLayer> list;
  for (const PlannedLayer& p : r_.layers) list.push_back(p.layer);
  return list;
}

// Stage 5, the second half: the knapsack, then the scale of each layer measured again where the plan stands, and again.
Status Job::plan() {
  if (exists(at("plan.json"))) return read_plan(at("plan.json"));
  if (!o_.plan.empty()) {
    const Status status = read_plan(o_.plan);
    no_plan_ = !status.ok();
    LINNET_TRY(status);
  } else if (keeps_all()) {
    for (const ConvertedLayer& layer : plain_layers()) r_.layers.push_back({layer});
    r_.cost = 1;
  } else {
    const bool counted = o_.keep_count >= 0 && parts_->causal();
    if (!recall_.empty()) LINNET_TRY(recall_damage());
    std::vector<std::vector<LayerOption>> all = options(counted && finds_ ? 1 : 0);
    std::vector<size_t> chosen;
    const Status status = pick(all, chosen);
    no_plan_ = !status.ok();
    LINNET_TRY(status);
    take(all, chosen);
    // What is still to be trained cannot be measured.
    const auto trained = [](const LayerOption& option) { return is_trained(option.layer.mechanism); };
    const bool untrained = std::any_of(all.begin(), all.end(), [&](const std::vector<LayerOption>& list) {
      return std::any_of(list.begin(), list.end(), trained);
    });
    if (!o_.dry_run && !untrained && counted) LINNET_TRY(choose_kept(all));
    if (!o_.dry_run && !untrained && !counted) LINNET_TRY(refine(all, chosen));
    if (!untrained && finds_ && !counted) LINNET_TRY(keep_recall());
  }
  JsonWriter w(1);
  w.begin_object().member("format", 1).member("model", fs::path(o_.model).filename().string()).member("family", r_.family);
  w.member("seed", o_.seed).member("length", length_).member("budget", o_.budget).member("cost", r_.cost);
  w.member("predicted_kl", r_.predicted)
      .member("measured_kl", r_.measured)
      .member("unit", r_.unit)
      .member("reliable", r_.reliable);
  w.member("recall_teacher", r_.recall_teacher).member("recall_plain", r_.recall_plain).key("recall").begin_array();
  for (const RecallTry& each : r_.recall) {
    w.begin_object().member("weight", each.weight).member("kl", each.kl).member("recall_kl", each.recall_kl);
    w.member("loss", each.loss).end_object();
  }
  w.end_array();
  if (!parts_->causal() && !plan_.empty()) w.member("sequence", plan_.front().tokens.size());
  w.member("tokens", "tokens.safetensors").member("initial", "initial.safetensors").key("layers").begin_array();
  for (const PlannedLayer& p : r_.layers) {
    JsonWriter one;
    p.layer.write(one);
    std::string text = one.text();
    text.pop_back();
    JsonWriter extra;
    extra.begin_object().member("cost", p.cost).member("damage", p.damage).member("alone", p.alone).end_object();
    raw_.push_back(text + ", " + extra.text().substr(1));
    w.value("@" + std::to_string(raw_.size() - 1));
  }
  std::string text = w.end_array().end_object().text();
  for (size_t i = 0; i < raw_.size(); ++i) {
    const std::string mark = "\"@" + std::to_string(i) + "\"";
    text.replace(text.find(mark), mark.size(), raw_[i]);
  }
  raw_.clear();
  return write_file(at("plan.json"), text);
}

// Encoders are small: every option that is worth its cost is measured, and the plan made again.
Status Job::measure_options(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) {
  std::vector<double> found;
  LINNET_TRY(read_list("damage_all.json", found));
  size_t n = 0, total = 0;
  for (const auto& list : all) total += list.size();
  for (std::vector<LayerOption>& list : all) {
    for (LayerOption& o : list) {
      bool worth = o.layer.mechanism != "softmax";
      for (const LayerOption& other : list) worth &= !(other.cost <= o.cost && other.error < 0.7 * o.error);
      if (n == found.size()) {
        tell("options", static_cast<int64_t>(n), static_cast<int64_t>(total));
        double kl = -1;
        if (worth) LINNET_TRY(alone(o.layer, kl));
        found.push_back(kl);
        LINNET_TRY(write_list("damage_all.json", found));
      }
      if (worth) o.damage = std::max(found[n], 0.0);
      if (!worth && o.layer.mechanism != "softmax") o.damage = 1;  // something cheaper is better
      ++n;
    }
  }
  LINNET_TRY(pick(all, chosen));
  take(all, chosen);
  return {};
}

// What an option does depends on what stands in the other layers: each is measured once more in its place in the plan, and the
// plan is made again while it gets better.
Status Job::measure_together(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) {
  LINNET_TRY(joint(planned(), r_.measured));
  size_t total = 0;
  for (const auto& list : all) total += list.size();
  for (int64_t round = 0; round < o_.rounds; ++round) {
    const std::string file = "damage_together_" + std::to_string(round + 1) + ".json";
    std::vector<double> found;
    LINNET_TRY(read_list(file.c_str(), found));
    const std::vector<ConvertedLayer> now_planned = planned();
    std::vector<std::vector<float>> x(plan_.size()), y(plan_.size()), last(plan_.size());
    for (size_t s = 0; s < plan_.size(); ++s) LINNET_TRY(embed(*parts_, plan_[s], x[s]));
    size_t n = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<double> damage;
      for (size_t o = 0; o < all[i].size(); ++o, ++n) {
        const LayerOption& option = all[i][o];
        bool worth = true;
        for (const LayerOption& other : all[i]) worth &= !(other.cost <= option.cost && other.damage < option.damage);
        if (n == found.size()) {
          tell("options together", static_cast<int64_t>(n), static_cast<int64_t>(total));
          double kl = 1;
          if (o == chosen[i]) {
            kl = r_.measured;
          } else if (worth) {
            std::vector<ConvertedLayer> list = now_planned;
            list[i] = option.layer;
            for (size_t s = 0; s < plan_.size(); ++s) LINNET_TRY(run_from(*parts_, list, i, x[s], nullptr, last[s]));
            LINNET_TRY(distance(*parts_, traced_.last, last, false, kl));
          }
          found.push_back(kl);
          LINNET_TRY(write_list(file.c_str(), found));
        }
        damage.push_back(std::max(found[n], 0.0));
      }
      for (size_t o = 0; o < damage.size(); ++o) all[i][o].damage = damage[o];
      for (size_t s = 0; s < plan_.size(); ++s) LINNET_TRY(parts_->block(now_planned[i], x[s], y[s]));
      x.swap(y);
    }
    std::vector<size_t> next;
    LINNET_TRY(pick(all, next));
    if (next == chosen) break;
    const ConvertResult before = r_;
    take(all, next);
    LINNET_TRY(joint(planned(), r_.measured));
    if (r_.measured >= before.measured) {
      r_ = before;
      break;
    }
    chosen = next;
  }
  // The sum of damages measured in the plan counts the plan itself for every layer.
  r_.predicted = r_.measured;
  return {};
}

bool Job::chooses_heads() const {
  if (o_.keep_count >= 0) return false;  // whole layers stay
  if (!o_.mechanisms.empty() && !contains(o_.mechanisms, "window")) return false;
  for (int64_t i = 0; i < parts_->layers(); ++i) {
    if (!parts_->converts(i)) continue;
    if (!parts_->parts_heads(i) || parts_->kv_heads(i) < 2 || parts_->kv_heads(i) > Sizes::kMax) return false;
  }
  return true;
}

// Heads of one layer differ in what they need, and pooled states forgive errors that differ from token to token. So the change
// of the pooled states is measured for every head and kind; such changes add up almost linearly.
Status Job::measure_heads() {
  LINNET_TRY(joint(planned(), r_.measured));
  const size_t texts = std::min<size_t>(plan_.size(), 6);
  std::vector<std::vector<LayerOption>> all;  // of each head of keys, one after another
  std::vector<double> weights;
  std::vector<std::pair<size_t, size_t>> heads;
  for (int64_t i = 0; i < parts_->layers(); ++i) {
    if (!parts_->converts(i) || std::find(o_.keep.begin(), o_.keep.end(), i) != o_.keep.end()) continue;
    const size_t layer = static_cast<size_t>(i), H = static_cast<size_t>(parts_->kv_heads(i));
    const LayerErrors& e = errors_[layer];
    for (size_t h = 0; h < H; ++h) {
      std::vector<LayerOption> list(1);
      LayerOption& plain = list[0];
      plain.layer.index = i, plain.layer.mechanism = "window", plain.layer.sinks = o_.sinks, plain.cost = 1;
      plain.layer.windows.assign(H, parts_->own_window(i));
      const LayerOption as_it_is = plain;
      for (size_t w = 0; w < usable(layer); ++w) {
        LayerOption option = as_it_is;
        option.layer.windows[h] = windows_[w], option.error = e.window[h][w];
        option.cost = window_cost(windows_[w], o_.sinks, length_, false) / own_cost(layer);
        list.push_back(std::move(option));
      }
      for (size_t o = 0; o < whole_.size() && parts_->replaces(i); ++o) {
        const ConvertedLayer& candidate = whole_[o];
        // A few are enough where heads differ: the sizes in between bring less than another head's choice.
        const bool power = candidate.block == 8 || candidate.block == 16 || candidate.block == 32;
        if (candidate.mechanism != "monarch" || !power || candidate.steps > 2) continue;
        LayerOption option = as_it_is;
        option.layer.blocks.assign(H, 0), option.layer.updates.assign(H, 0);
        option.layer.blocks[h] = candidate.block, option.layer.updates[h] = candidate.steps;
        option.error = e.single[h][o], option.cost = monarch_cost(candidate.block, candidate.steps, length_);
        list.push_back(std::move(option));
      }
      std::vector<LayerOption> kept;
      for (const LayerOption& option : list) {
        bool worth = option.cost <= 1;
        for (const LayerOption& other : list) worth &= !(other.cost <= option.cost && other.error < 0.5 * option.error);
        if (worth) kept.push_back(option);
      }
      all.push_back(std::move(kept));
      weights.push_back(weights_[layer] / static_cast<double>(H));
      heads.emplace_back(layer, h);
    }
  }
  const auto set_head = [&](ConvertedLayer& layer, size_t n, size_t o) {
    const ConvertedLayer& option = all[n][o].layer;
    const size_t h = heads[n].second;
    layer.windows[h] = option.windows[h];
    layer.blocks[h] = option.blocks.empty() ? 0 : option.blocks[h];
    layer.updates[h] = option.updates.empty() ? 0 : option.updates[h];
  };
  // Layers with a list entry for each head.
  const auto combined = [&](const std::vector<size_t>& chosen) {
    std::vector<ConvertedLayer> list = plain_layers();
    for (size_t n = 0; n < all.size(); ++n) {
      ConvertedLayer& layer = list[heads[n].first];
      const size_t H = all[n][0].layer.windows.size();
      layer.mechanism = "window", layer.sinks = o_.sinks;
      layer.windows.resize(H), layer.blocks.resize(H), layer.updates.resize(H);
      set_head(layer, n, chosen[n]);
    }
    return list;
  };
  const auto simple = [&](std::vector<ConvertedLayer> list) {
    for (size_t i = 0; i < list.size(); ++i) simplify(list[i], parts_->own_window(static_cast<int64_t>(i)));
    return list;
  };
  // The choice as the plan, if it is better on all texts of the plan.
  bool better = false;
  const auto adopt = [&](const std::vector<size_t>& chosen) -> Status {
    const ConvertResult before = r_;
    const std::vector<ConvertedLayer> list = simple(combined(chosen));
    r_.cost = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      PlannedLayer& p = r_.layers[i];
      p.layer = list[i], p.cost = layer_cost(list[i], i), p.damage = 0;
      r_.cost += p.cost * weights_[i];
    }
    for (size_t n = 0; n < all.size(); ++n) r_.layers[heads[n].first].damage += all[n][chosen[n]].damage;
    LINNET_TRY(joint(list, r_.measured));
    better = r_.measured < before.measured;
    if (!better) r_ = before;
    return {};
  };
  size_t total = 0;
  for (const auto& list : all) total += list.size();
  std::vector<std::vector<float>> teacher(texts), reference(texts);
  for (size_t s = 0; s < texts; ++s) teacher[s] = pooled(*parts_, traced_.last[s]);
  const float share = static_cast<float>(1 / std::sqrt(2 * static_cast<double>(texts)));  // half the square is 1 - cosine
  const auto add_change = [&](size_t s, const std::vector<float>& from, const std::vector<float>& to, std::vector<float>& row) {
    for (size_t c = 0; c < from.size(); ++c) row[s * from.size() + c] = share * (to[c] - from[c]);
  };
  std::vector<size_t> chosen(all.size(), 0);
  for (int64_t round = 0; round < std::max<int64_t>(o_.rounds, 1); ++round) {
    // Changes around the teacher first, then around what was chosen.
    const std::vector<ConvertedLayer> lists = combined(chosen), now_planned = simple(lists);
    std::vector<std::vector<float>> x(texts), y(texts), changes;
    std::vector<float> row(texts * teacher[0].size(), 0), distant = row, last;
    for (size_t s = 0; s < texts; ++s) {
      LINNET_TRY(embed(*parts_, plan_[s], x[s]));
      LINNET_TRY(run_from(*parts_, now_planned, 0, x[s], nullptr, last));
      reference[s] = pooled(*parts_, last);
      add_change(s, teacher[s], reference[s], distant);
    }
    size_t at = 0;
    for (size_t n = 0; n < all.size(); ++n) {
      const size_t i = heads[n].first;
      for (; at < i; ++at) {
        for (size_t s = 0; s < texts; ++s) LINNET_TRY(parts_->block(now_planned[at], x[s], y[s]));
        x.swap(y);
      }
      for (size_t o = 0; o < all[n].size(); ++o) {
        tell("heads", static_cast<int64_t>(changes.size()), static_cast<int64_t>(total));
        std::fill(row.begin(), row.end(), 0.0f);
        std::vector<ConvertedLayer> list = now_planned;
        list[i] = lists[i];
        set_head(list[i], n, o);
        simplify(list[i], parts_->own_window(static_cast<int64_t>(i)));
        for (size_t s = 0; s < texts && o != chosen[n]; ++s) {
          LINNET_TRY(run_from(*parts_, list, i, x[s], nullptr, last));
          add_change(s, reference[s], pooled(*parts_, last), row);
        }
        for (size_t c = 0; c < row.size() && round == 0; ++c) all[n][o].damage += std::pow(static_cast<double>(row[c]), 2);
        changes.push_back(row);
      }
    }
    if (round == 0) {
      if (!choose(all, weights, o_.budget, chosen).ok()) return {};  // what whole layers can do stays
      LINNET_TRY(adopt(chosen));
    }
    // What the plan does already is one more slot, without a choice.
    changes.push_back(distant);
    std::vector<std::vector<float>> product(changes.size(), std::vector<float>(changes.size()));
    for (size_t a = 0; a < changes.size(); ++a) {
      for (size_t b = 0; b <= a; ++b) {
        float sum = 0;
        for (size_t c = 0; c < row.size(); ++c) sum += changes[a][c] * changes[b][c];
        product[a][b] = product[b][a] = sum;
      }
    }
    std::vector<std::vector<LayerOption>> slots = all;
    std::vector<double> shares = weights;
    std::vector<size_t> next = chosen;
    slots.emplace_back(1), shares.push_back(0), next.push_back(0);
    choose_together(slots, shares, o_.budget, product, next);
    next.pop_back();
    LINNET_TRY(adopt(next));
    if (round > 0 && !better) break;
    if (better) chosen = next;
  }
  r_.predicted = r_.measured;
  return {};
}

Status Job::refine(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) {
  LINNET_TRY(traced());
  if (!parts_->causal() && chooses_heads()) return measure_heads();
  if (!parts_->causal()) {
    LINNET_TRY(measure_options(all, chosen));
    return measure_together(all, chosen);
  }
  double best = 0;
  LINNET_TRY(joint(planned(), best));
  r_.measured = best;
  std::vector<double> again;
  for (int64_t round = 0; round < o_.rounds; ++round) {
    const std::vector<double> scale = scale_;
    const std::string file = "damage_" + std::to_string(round + 1) + ".json";
    LINNET_TRY(read_list(file.c_str(), again));
    while (again.size() < all.size()) {
      const size_t i = again.size();
      tell("refinement", static_cast<int64_t>(i), static_cast<int64_t>(all.size()));
      double kl = 0;
      if (all[i][chosen[i]].layer.mechanism != "softmax" && all[i][chosen[i]].error > 0)
        LINNET_TRY(alone(all[i][chosen[i]].layer, kl));
      again.push_back(std::max(kl, 0.0));
      LINNET_TRY(write_list(file.c_str(), again));
    }
    for (size_t i = 0; i < all.size(); ++i) {
      const LayerOption& o = all[i][chosen[i]];
      if (o.layer.mechanism == "softmax" || !(o.error > 0)) continue;
      // Both points count. A window as long as the text of the plan does nothing to it, which says nothing of smaller ones.
      const double measured = std::clamp(again[i] / o.error, scale_[i] / 4, scale_[i] * 4);
      scale_[i] = std::sqrt(scale_[i] * measured);
      for (LayerOption& each : all[i]) each.damage = each.error * scale_[i];
    }
    std::vector<size_t> next;
    LINNET_TRY(pick(all, next));
    const ConvertResult before = r_;
    take(all, next);
    if (next == chosen) {
      r_.measured = best;
      break;
    }
    double kl = 0;
    LINNET_TRY(joint(planned(), kl));
    if (kl >= best) {
      r_ = before, scale_ = scale;
      break;
    }
    best = r_.measured = kl;
    chosen = next;
  }
  return {};
}

Status Job::read_plan(const std::string& path) {
  std::string text;
  JsonValue root;
  LINNET_TRY(read_file(path, kMaxStageBytes, text));
  LINNET_TRY(parse_json(text, path, {.max_bytes = kMaxStageBytes}, root));
  std::vector<ConvertedLayer> list;
  LINNET_TRY(read_conversion(root, path, list));
  r_.layers.assign(static_cast<size_t>(parts_->layers()), {});
  for (size_t i = 0; i < r_.layers.size(); ++i) r_.layers[i].layer.index = static_cast<int64_t>(i);
  size_t n = 0;
  for (JsonItems items(root.find("layers")); items.next(); ++n) {
    const ConvertedLayer& layer = list[n];
    if (layer.index >= parts_->layers())
      return bad_input(path + ": has layer " + std::to_string(layer.index) + ", the model has " +
                       std::to_string(parts_->layers()));
    if (layer.mechanism != "softmax" && !parts_->converts(layer.index)) {
      return bad_input(path + ": layer " + std::to_string(layer.index) + " is no softmax attention that could be converted");
    }
    PlannedLayer& p = r_.layers[static_cast<size_t>(layer.index)];
    p.layer = layer;
    p.damage = number_of(items.value().find("damage"));
    p.alone = number_of(items.value().find("alone"));
  }
  r_.cost = r_.predicted = 0;
  for (size_t i = 0; i < r_.layers.size(); ++i) {
    PlannedLayer& p = r_.layers[i];
    p.cost = layer_cost(p.layer, i);
    r_.cost += p.cost * weights_[i];
    r_.predicted += p.damage;
  }
  if (root.has("measured_kl")) r_.measured = number_of(root.find("measured_kl"));
  if (root.has("reliable")) r_.reliable = root.find("reliable").boolean();
  if (root.has("recall_teacher")) r_.recall_teacher = number_of(root.find("recall_teacher"));
  if (root.has("recall_plain")) r_.recall_plain = number_of(root.find("recall_plain"));
  for (JsonItems items(root.find("recall")); items.next();) {
    const JsonValue& v = items.value();
    r_.recall.push_back(
        {number_of(v.find("weight")), number_of(v.find("kl")), number_of(v.find("recall_kl")), number_of(v.find("loss"))});
  }
  if (r_.cost > o_.budget * (1 + 1e-9)) {
    return impossible(path + ": its plan costs " + layers::number_text(r_.cost) +
                      " of the attention, more than the budget of " + layers::number_text(o_.budget));
  }
  return {};
}

}  // namespace linnet::convert
