#include "bench/neighbours.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "bench/work.h"
#include "core/call/call.h"

namespace linnet::bench {
namespace {

constexpr int64_t kWidths[] = {32, 48, 64, 80, 96, 128, 192, 256};
constexpr int64_t kBatches[] = {1, 4, 16, 64, 256};  // of single tokens
constexpr int64_t kFewer = 4;                        // heads that share a key or value head
constexpr int64_t kShorter = 16;                     // sequences, and so many times more of them
constexpr int64_t kLonger = 4;                       // where the batch is one already

bool contains(const std::vector<std::string>& list, std::string_view item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}
bool has_letter(const Case& c, std::string_view name) {
  return std::any_of(c.letters.begin(), c.letters.end(), [&](const auto& letter) { return letter.first == name; });
}
void set_letter(Case* c, std::string_view name, int64_t value) {
  for (auto& [letter, old] : c->letters) {
    if (letter == name) {
      old = value;
      return;
    }
  }
  c->letters.emplace_back(name, value);
}
void set_option(Case* c, const std::string& name, const std::string& text) {
  std::erase_if(c->options, [&](const auto& option) { return option.first == name; });
  c->options.emplace_back(name, text);
}
void scale_lengths(Case* c, const std::function<int64_t(int64_t)>& scaled) {
  for (auto& [letter, value] : c->letters) value = is_length(letter) ? scaled(value) : value;
}
bool has_single_tokens(const Case& c) { return std::max(c.letter("T"), c.letter("Tq")) == 1; }

// Letters of tensors that the case did not have before take the width of the keys.
void complete(Case* c) {
  const int64_t width = std::max(c->letter("K"), c->letter("V"));
  for (const std::string& letter : letters_of(*c->op)) {
    const bool ruled = std::any_of(c->op->letters.begin(), c->op->letters.end(),
                                   [&](const LetterRule& rule) { return rule.letter == letter; });
    if (!ruled && !has_letter(*c, letter)) set_letter(c, letter, width > 0 ? width : 64);
  }
}
// Whether the operator takes this call, tried on short sequences.
bool is_accepted(const Case& c) {
  Context context;
  context.impl = "ref";
  std::unique_ptr<Work> work;
  Case small = shortened(c, 64);
  if (has_letter(small, "B")) set_letter(&small, "B", std::min<int64_t>(small.letter("B"), 2));
  return Work::make(small, context, &work).ok();
}

class Neighbours {
 public:
  explicit Neighbours(const Case& base) : base_(base) {}

  void add(const std::string& changed, const std::function<void(Case*)>& change) {
    Case c = base_;
    change(&c);
    if (c.line() == base_.line()) return;
    if (!is_accepted(c)) {
      complete(&c);
      if (!is_accepted(c)) return;
    }
    const std::string line = c.line();
    for (const Neighbour& known : all_) {
      if (known.what.line() == line) return;
    }
    all_.push_back({changed, std::move(c)});
  }

  void options() {
    Call defaults(*base_.op);
    for (const auto& [name, text] : base_.options) (void)defaults.set_option(name, text);
    for (const OptionDecl& option : base_.op->options) {
      std::vector<std::string> values;
      if (option.kind == OptionKind::boolean) values = {"0", "1"};
      if (option.kind == OptionKind::choice) values = option.choices;
      const std::string now = option_text(option, defaults.args());
      for (const std::string& value : values) {
        const bool is_now = value == now || (value == "1" && now == "true") || (value == "0" && now == "false");
        if (!is_now) choose(option, value);
      }
    }
  }
  // A choice may bring its tensors along, or ask for another optional one or for a permission.
  void choose(const OptionDecl& option, const std::string& value) {
    const std::string name = option.name + "=" + value;
    const auto change = [&](Case* c) {
      set_option(c, option.name, value);
      for (const TensorDecl& input : base_.op->inputs) {
        if (input.needed_by != option.name) continue;
        std::erase(c->with, input.name);
        if (contains(input.needed_for, value)) c->with.push_back(input.name);
      }
    };
    const size_t before = all_.size();
    add(name, change);
    for (const TensorDecl& input : base_.op->inputs) {
      if (all_.size() > before) return;
      if (!input.optional || !input.needed_by.empty() || contains(base_.with, input.name)) continue;
      add(name + " with " + input.name, [&](Case* c) {
        change(c);
        c->with.push_back(input.name);
        complete(c);
      });
    }
    for (const OptionDecl& other : base_.op->options) {
      if (all_.size() > before) return;
      if (other.kind != OptionKind::boolean || other.name == option.name) continue;
      add(name + " " + other.name + "=1", [&](Case* c) {
        change(c);
        set_option(c, other.name, "1");
      });
    }
  }

  void tensors() {
    const auto each = [&](const TensorDecl& decl) {
      if (!decl.other_shape.empty()) {
        add("other " + decl.name, [&](Case* c) {
          if (std::erase(c->other, decl.name) == 0) c->other.push_back(decl.name);
        });
      }
      if (!decl.optional || decl.values == Values::offsets) return;
      const bool given = contains(base_.with, decl.name);
      add((given ? "without " : "with ") + decl.name, [&](Case* c) {
        if (std::erase(c->with, decl.name) == 0) c->with.push_back(decl.name);
      });
    };
    for (const TensorDecl& input : base_.op->inputs) each(input);
    for (const TensorDecl& output : base_.op->outputs) each(output);
  }

  void types() {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      add(std::string("dtype=") + dtype_name(dtype), [&](Case* c) { c->dtype = dtype; });
    }
  }

  void widths() {
    const bool both = has_letter(base_, "K") && has_letter(base_, "V");
    for (const int64_t width : kWidths) {
      if (both) {
        add("K=V=" + std::to_string(width), [&](Case* c) { set_letter(c, "K", width), set_letter(c, "V", width); });
        continue;
      }
      for (const char* letter : {"K", "V", "D"}) {
        if (!has_letter(base_, letter)) continue;
        add(letter + ("=" + std::to_string(width)), [&](Case* c) { set_letter(c, letter, width); });
      }
    }
    if (!both) return;
    const int64_t K = base_.letter("K"), V = base_.letter("V");
    add("K=" + std::to_string(K / 2), [&](Case* c) { set_letter(c, "K", K / 2); });
    add("V=" + std::to_string(V / 2), [&](Case* c) { set_letter(c, "V", V / 2); });
  }

  void heads() {
    using Group = std::vector<const char*>;
    for (const Group& group :
         {Group{"Hq"}, Group{"Hk"}, Group{"Hv"}, Group{"Hkv"}, Group{"G"}, Group{"Hk", "Hv"}, Group{"Hq", "Hk"}}) {
      std::string name;
      bool all = true;
      for (const char* letter : group) {
        const int64_t fewer = base_.letter(letter) / kFewer;
        all = all && fewer > 0;
        name += (name.empty() ? "" : " ") + std::string(letter) + "=" + std::to_string(fewer);
      }
      if (!all) continue;
      add(name, [&](Case* c) {
        for (const char* letter : group) set_letter(c, letter, base_.letter(letter) / kFewer);
      });
    }
  }

  void lengths() {
    const int64_t B = base_.letter("B");
    if (has_single_tokens(base_)) {
      for (const int64_t batch : kBatches) add("B=" + std::to_string(batch), [&](Case* c) { set_letter(c, "B", batch); });
      return;
    }
    if (B == 0) return;
    add("B=1", [](Case* c) { set_letter(c, "B", 1); });
    add("one token less", [](Case* c) { scale_lengths(c, [](int64_t T) { return T - 1; }); });
    add("short, as many tokens", [&](Case* c) {
      scale_lengths(c, [](int64_t T) { return std::max<int64_t>(T / kShorter, 1); });
      set_letter(c, "B", B * kShorter);
    });
    add(B > 1 ? "one long sequence" : "long", [&](Case* c) {
      scale_lengths(c, [&](int64_t T) { return T * (B > 1 ? B : kLonger); });
      set_letter(c, "B", 1);
    });
    for (const TensorDecl& input : base_.op->inputs) {
      if (input.values != Values::offsets || contains(base_.with, input.name)) continue;
      add("packed", [&](Case* c) {
        const int64_t sequences = B > 1 ? B : 8;
        scale_lengths(c, [&](int64_t T) { return T * B; });
        set_letter(c, "B", 1);
        set_letter(c, "N", sequences);
        c->with.push_back(input.name);
      });
    }
  }

  std::vector<Neighbour> take() { return std::move(all_); }

 private:
  const Case& base_;
  std::vector<Neighbour> all_;
};

}  // namespace

std::vector<Neighbour> neighbours_of(const Case& base) {
  Neighbours all(base);
  all.options();
  all.tensors();
  all.types();
  all.widths();
  all.heads();
  all.lengths();
  return all.take();
}

}  // namespace linnet::bench
