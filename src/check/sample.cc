#include "check/sample.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "check/plan.h"
#include "core/letters.h"

namespace linnet::check {
namespace {

Counts counts_of(const std::string& letter) { return letter_named(letter).counts; }

int64_t draw_tokens(Random& random) {
  const double kind = random.uniform();
  if (kind < 0.03) return 0;
  if (kind < 0.10) return 1;
  if (kind < 0.30) return random.between(2, 20);
  if (kind < 0.62) return random.pick({15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129});
  if (kind < 0.75) return random.pick({7, 37, 61, 97, 101, 127, 211});
  if (kind < 0.92) return random.between(66, 300);
  return random.between(300, 4500);
}

int64_t draw_size(Counts kind, Random& random) {
  switch (kind) {
    case Counts::batch: return random.chance(0.02) ? 0 : random.pick({1, 1, 2, 3});
    case Counts::tokens: return draw_tokens(random);
    case Counts::heads: return random.pick({1, 1, 2, 3, 4, 6, 8});
    case Counts::channels:
      return random.pick({1, 2, 3, 4, 5, 7, 8, 12, 16, 16, 17, 24, 31, 32, 32, 33, 40, 48, 64, 64, 65, 80, 96, 128});
    case Counts::sequences: return random.between(1, 6);
    case Counts::entries: return random.chance(0.02) ? 0 : random.pick({1, 2, 3, 4, 5, 8, 16, 17});
  }
  return 1;
}

bool has_state(const Op& op) {
  return std::any_of(op.inputs.begin(), op.inputs.end(), [](const TensorDecl& decl) { return decl.mutated; });
}

void draw_letters(Case* c, Random& random) {
  const Op& op = *c->op;
  c->letters.clear();
  const bool same_tokens = random.chance(0.6), same_channels = random.chance(0.4);
  const int64_t tokens = draw_tokens(random), channels = draw_size(Counts::channels, random);
  for (const std::string& letter : free_letters(op, c->with)) {
    const Counts kind = counts_of(letter);
    int64_t value = draw_size(kind, random);
    if (kind == Counts::tokens && same_tokens) value = tokens;
    if (kind == Counts::channels && same_channels) value = channels;
    // A state in place is continued by few tokens.
    if (letter == "T" && has_state(op)) value = random.pick({1, 1, 1, 2, 3, 4, 8, 0});
    if (letter == "capacity") value = draw_tokens(random) + 4;
    if (kind == Counts::batch && is_packed(op, c->with)) value = 1;
    // Nodes of a tree: its leaves (the tokens, drawn before) and some more.
    for (const TensorDecl& decl : op.inputs) {
      if (decl.values != Values::tree || decl.shape != letter) continue;
      for (const auto& [name, leaves] : c->letters) {
        if (name == decl.of) value = leaves == 0 ? 0 : leaves + random.between(1, leaves);
      }
    }
    c->letters.emplace_back(letter, value);
  }
  const auto find = [&](const std::string& letter) -> int64_t* {
    for (auto& [name, value] : c->letters) {
      if (name == letter) return &value;
    }
    return nullptr;
  };
  // A divisor is drawn and its multiple made from it; a multiple that follows from a rule (the largest of the divisors) gets
  // divisors of one number.
  const int64_t whole = random.pick({1, 2, 4, 6, 8});
  for (const auto& [letter, divisor] : op.multiples) {
    int64_t* part = find(divisor);
    if (part == nullptr) continue;
    if (int64_t* multiple = find(letter)) {
      *multiple = *part * random.pick({1, 1, 2, 3, 4, 8});
    } else {
      while (whole % (*part = random.between(1, whole)) != 0) continue;
      if (random.chance(0.5)) *part = whole;
    }
  }
}

// An error relative to a tensor's RMS says something about the kernel only if the tensor holds several independent numbers: one
// dot product of random rows may come out as near to 0 as chance has it, and keeps as few digits. So a result has at least
// kIndependent of them: one token, tokens that repeat, and narrow states have one or few for each batch row and head, the
// gradient of a parameter one for each head.
// Tokens that repeat reflect nothing and forget nothing for good: what many equal corrections leave of a state is a product of
// as many factors, so every result has its incoming gradient then.
constexpr int64_t kIndependent = 8;
void draw_enough(Case* c) {
  const Op& op = *c->op;
  const bool packed = is_packed(op, c->with);
  const auto chosen = [&](const std::string& name, const char* value) {
    return std::count(c->options.begin(), c->options.end(), std::pair<std::string, std::string>(name, value)) > 0;
  };
  // Normalised weights of one token, or of equal ones, average what they read: dq and dk are then what rounding leaves. So is
  // dq where a query has one feature, which divides out (LeastSize).
  const OptionDecl* averages = op.find_option(Effect::averages);
  const bool normalised = averages != nullptr && chosen(averages->name, "1");
  // A state [.., F, V] without its sums of features [.., F] has no part in the denominator: where all keys are masked it would
  // be divided by eps.
  for (const TensorDecl& sums : op.inputs) {
    if (!normalised || sums.values != Values::feature_sums || !sums.optional || contains(c->with, sums.name)) continue;
    const auto is_state = [&](const TensorDecl& decl) {
      return decl.shape == sums.shape + " V" && contains(c->with, decl.name);
    };
    if (std::any_of(op.inputs.begin(), op.inputs.end(), is_state)) c->with.push_back(sums.name);
  }
  if (c->backward && normalised) {
    std::erase(c->values, "repeated");
    for (auto& [letter, value] : c->letters) {
      if (counts_of(letter) == Counts::tokens && value == 1) value = 2;
      for (const LeastSize& size : op.least_sizes) {
        if (letter == size.letter && chosen(size.option, size.choice.c_str())) value = std::max(value, size.least);
      }
    }
  }
  int64_t most = 0, heads = 0, width = kIndependent, *batch = nullptr, *tokens = nullptr;
  for (auto& [letter, value] : c->letters) {
    if (letter == "B") batch = &value;
    if (letter == "T" || letter == "Tq") tokens = &value;
    if (counts_of(letter) == Counts::channels) width = std::min(width, value);
    if (counts_of(letter) != Counts::heads && letter != "G") continue;  // groups of heads
    heads = heads == 0 ? value : std::min(heads, value);
    most = std::max(most, value);
  }
  if (packed && heads < kIndependent) std::erase(c->values, "repeated");
  const bool repeated = c->has_value("repeated");
  if (repeated) {
    for (const TensorDecl& decl : op.outputs) std::erase(c->skip, "d" + decl.name);
    std::erase_if(c->options, [&](const auto& option) {
      return op.find_option(option.first)->effect == Effect::doubles_strength ||
             (option.first == "scale" && option.second == "0");
    });
  }
  const bool parameter = std::any_of(op.inputs.begin(), op.inputs.end(), [&](const TensorDecl& decl) {
    const bool few = decl.shape == "H" || (width < kIndependent && (decl.shape == "H K" || decl.shape == "H V"));
    return decl.differentiable && (!decl.optional || contains(c->with, decl.name)) && few;
  });
  if (c->backward && parameter && most > 0) {
    for (auto& [letter, value] : c->letters) {
      if (counts_of(letter) == Counts::heads) value *= (kIndependent + most - 1) / most;
    }
  }
  if (batch == nullptr || *batch == 0 || tokens == nullptr || *tokens == 0) return;
  const int64_t each = std::min(repeated ? 1 : *tokens, width * width) * std::max<int64_t>(heads, 1);
  int64_t* more = packed ? tokens : batch;
  if (each > 0) *more *= (kIndependent + each - 1) / each;
}

std::string number_text(double x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x, std::chars_format::general, 6).ptr};
}

void draw_options(Case* c, Random& random) {
  const Op& op = *c->op;
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  op.construct(args, out, grads);
  c->options.clear();
  for (const OptionDecl& option : op.options) {
    if (!option.sampled || (option.kind != OptionKind::choice && random.chance(0.5))) continue;
    const std::string standard = option_text(option, args);
    const double high = std::min(option.high, option.sampled_high);
    std::string text;
    switch (option.kind) {
      case OptionKind::boolean: text = standard == "1" ? "0" : "1"; break;
      case OptionKind::choice: text = random.pick(option.choices); break;
      case OptionKind::sizes: {
        for (int64_t i = random.between(0, 4); i > 0; --i)
          text += (text.empty() ? "" : ",") + std::to_string(random.pick({1, 2, 3, 4, 7, 16}));
        if (text.empty()) text = "none";
        break;
      }
      case OptionKind::window:
        text = std::to_string(random.pick({-1, 0, 1, 3, 16, 50})) + "," + std::to_string(random.pick({-1, -1, 0, 2, 17}));
        break;
      case OptionKind::integer: {
        const double x = option.low + static_cast<double>(random.pick({0, 1, 2, 3, 5, 16, 17, 64, 100}));
        text = std::to_string(static_cast<int64_t>(std::min(x, std::min(high, option.low + 100))));
        break;
      }
      case OptionKind::maybe_real: {  // exponential weights: also logits of 1e4
        const bool logits = op.largest_logit != nullptr;
        const double x = logits ? random.pick({0.0, 0.1, -0.5, 1.0, 20.0, 1000.0}) : random.pick({0.0, 0.1, -0.5, 1.0});
        text = number_text(std::clamp(x, option.low, high));
        break;
      }
      case OptionKind::real: {
        double x = 0;
        std::from_chars(standard.data(), standard.data() + standard.size(), x);
        x = x == 0 ? random.pick({0.5, 5.0, 30.0}) : x * random.pick({0.1, 10.0, 1000.0});
        text = number_text(std::clamp(x, option.low, high));
        break;
      }
    }
    if (text != standard) c->options.emplace_back(option.name, text);
  }
}

void draw_tensors(Case* c, Random& random) {
  const Op& op = *c->op;
  c->with.clear();
  c->skip.clear();
  c->other.clear();
  const bool packed = random.chance(0.25);
  for (const TensorDecl& decl : op.inputs) {
    if (!decl.optional) continue;
    if (decl.values == Values::offsets ? packed : random.chance(0.35)) c->with.push_back(decl.name);
  }
  for (const TensorDecl& decl : op.inputs) {
    const bool given = !decl.optional || contains(c->with, decl.name);
    if (given && !decl.other_shape.empty() && random.chance(0.5)) c->other.push_back(decl.name);
  }
  for (const TensorDecl& decl : op.outputs) {
    if (decl.optional && !(decl.saved && c->backward) && random.chance(0.2)) c->skip.push_back(decl.name);
    if (decl.differentiable && c->backward && random.chance(0.1)) c->skip.push_back("d" + decl.name);
  }
  for (const TensorDecl& decl : op.inputs) {
    if (decl.differentiable && c->backward && random.chance(0.1)) c->skip.push_back("d" + decl.name);
  }
}

// Inputs that an option decides on are given or not as it says.
bool obey_options(Case* c) {
  const Op& op = *c->op;
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  op.construct(args, out, grads);
  bool changed = false;
  for (const TensorDecl& decl : op.inputs) {
    if (decl.needed_by.empty()) continue;
    std::string choice = option_text(*op.find_option(decl.needed_by), args);
    for (const auto& [name, text] : c->options) {
      if (name == decl.needed_by) choice = text;
    }
    const bool needed = contains(decl.needed_for, choice);
    if (needed == contains(c->with, decl.name)) continue;
    changed = true;
    if (needed) {
      c->with.push_back(decl.name);
    } else {
      std::erase(c->with, decl.name);
    }
  }
  return changed;
}

// Halves the largest size until the case costs no more than `limit`; false when it is no longer accepted.
bool fit(Case* c, const Cost& limit) {
  Cost cost;
  while (accepts(*c, &cost).ok()) {
    if (cost.flops <= limit.flops && cost.bytes <= limit.bytes) return true;
    int64_t most = 0;
    for (const auto& [letter, value] : c->letters) {
      if (counts_of(letter) != Counts::heads) most = std::max(most, value);
    }
    for (auto& [letter, value] : c->letters) {  // equal ones together: T and S of a causal call
      if (value == most && counts_of(letter) != Counts::heads) value /= 2;
    }
    if (most <= 1) return false;
  }
  return false;
}

}  // namespace

Status sample_case(const Op& op, Random& random, const Sampling& sampling, Case* c) {
  std::vector<std::string> impls = sampling.impls;
  if (impls.empty()) {
    const Impl* best;  // obeys LINNET_ISA and LINNET_IMPL, and so do the cases: none beyond it, none but the forced one
    LINNET_TRY(choose_impl(op, Pass::forward, {}, &best));
    bool forced = false;
    for (const ForcedImpl& each : forced_impls()) forced |= each.everywhere || each.op == op.name;
    for (const Impl& impl : op.impls) {
      const bool here = impl.device == Device::cpu && impl.missing().empty();
      const bool lesser = !forced && &impl < best && here && (impl.name != "ref" || random.chance(0.05));
      if (&impl == best || lesser) impls.push_back(impl.name);
    }
  }
  const Cost large = {10 * sampling.cost.flops, 10 * sampling.cost.bytes};
  Status refused;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    *c = Case();
    c->op = &op;
    c->seed = static_cast<uint64_t>(random.below(1'000'000));
    c->dtype = random.pick(sampling.dtypes);
    c->backward = op.differentiable() && sampling.backward && (!sampling.forward || random.chance(0.6));
    c->impl = random.pick(impls);
    c->threads = sampling.threads > 0 ? sampling.threads : random.pick({1, 2, 3, 4, 7, 8, 16});
    c->strided = random.chance(0.4);
    if (random.chance(0.3)) c->values.emplace_back("masked");
    if (random.chance(0.3)) c->values.emplace_back("garbage");
    if (random.chance(0.05)) c->values.emplace_back("repeated");
    if (random.chance(0.1)) c->values.emplace_back("mixed");
    draw_tensors(c, random);
    draw_letters(c, random);
    draw_options(c, random);
    if (obey_options(c)) draw_letters(c, random);
    draw_enough(c);
    Cost cost;
    refused = accepts(*c, &cost);
    if (refused.ok() && fit(c, random.chance(0.05) ? large : sampling.cost)) return {};
  }
  return bad_input(op.name + ": no random case was accepted; the last answer was: " + refused.message());
}

Case shrink(const Case& c, const std::function<bool(const Case&)>& fails, int tries) {
  Case best = c;
  const auto attempt = [&](const Case& smaller) {
    Cost cost;
    if (tries <= 0 || !accepts(smaller, &cost).ok()) return false;
    --tries;
    if (!fails(smaller)) return false;
    best = smaller;
    return true;
  };
  const auto drop_each = [&](std::vector<std::string> Case::*list) {
    for (size_t i = 0; i < (best.*list).size();) {
      Case smaller = best;
      (smaller.*list).erase((smaller.*list).begin() + static_cast<std::ptrdiff_t>(i));
      if (list == &Case::with) {  // letters that only this input showed go with it
        const std::vector<std::string> kept = free_letters(*smaller.op, smaller.with);
        std::erase_if(smaller.letters, [&](const auto& pair) { return !contains(kept, pair.first); });
      }
      if (!attempt(smaller)) ++i;
    }
  };
  for (bool changed = true; changed && tries > 0;) {
    const std::string before = to_text(best);
    drop_each(&Case::values);
    drop_each(&Case::with);
    drop_each(&Case::skip);
    drop_each(&Case::other);
    for (size_t i = 0; i < best.options.size();) {
      Case smaller = best;
      smaller.options.erase(smaller.options.begin() + static_cast<std::ptrdiff_t>(i));
      if (!attempt(smaller)) ++i;
    }
    Case plain = best;
    plain.strided = false;
    if (best.strided) attempt(plain);
    plain = best;
    plain.threads = 1;
    if (best.threads != 1) attempt(plain);
    plain = best;
    plain.backward = false;
    if (best.backward) attempt(plain);
    // Sizes: all of one value together, to 1, to the half, by one.
    std::vector<int64_t> sizes;
    for (const auto& [letter, value] : best.letters) {
      if (std::find(sizes.begin(), sizes.end(), value) == sizes.end()) sizes.push_back(value);
    }
    for (const int64_t size : sizes) {
      for (const int64_t smaller_size : {int64_t{1}, size / 2, size - 1}) {
        if (smaller_size >= size || smaller_size < 1) continue;
        Case together = best;
        for (auto& [letter, value] : together.letters) value = value == size ? smaller_size : value;
        if (attempt(together)) break;
      }
    }
    for (size_t i = 0; i < best.letters.size(); ++i) {
      for (const int64_t smaller_size : {int64_t{1}, best.letters[i].second / 2, best.letters[i].second - 1}) {
        if (smaller_size >= best.letters[i].second || smaller_size < 1) continue;
        Case one = best;
        one.letters[i].second = smaller_size;
        if (attempt(one)) break;
      }
    }
    changed = to_text(best) != before;
  }
  return best;
}

}  // namespace linnet::check
