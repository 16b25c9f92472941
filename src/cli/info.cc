// linnet info OP: the declaration of an operator, its equation, and which implementation a call runs and why. Layers and models
// are described by layer_info.h and model.h.
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "check/plan.h"
#include "cli/command.h"
#include "cli/layer_info.h"
#include "cli/model.h"
#include "cli/print.h"
#include "core/call/describe.h"
#include "core/files/json.h"
#include "core/isa.h"
#include "core/letters.h"
#include "core/op.h"

namespace linnet::cli {
namespace {

std::string bracketed(const std::string& shape) {
  std::string text = "[";
  for (const char c : shape) {
    if (c == ' ') {
      text += ", ";
    } else {
      text += c;
    }
  }
  return text + "]";
}

std::string element_text(const TensorDecl& decl) {
  switch (decl.element) {
    case Element::io: return "io";
    case Element::acc: return "acc";
    case Element::param: return "io or acc";
    case Element::weight: return "f32, bf16 or f16";
    case Element::index: return "i32 or i64";
    case Element::mask:
    case Element::code: return "u8";
  }
  return "";
}

std::string remarks(const TensorDecl& decl, bool input) {
  std::string text;
  const auto add = [&](bool on, const char* word) {
    if (on) text += (text.empty() ? "" : ", ") + std::string(word);
  };
  add(decl.optional, "optional");
  add(decl.broadcast, "broadcast");
  add(decl.mutated, "overwritten");
  add(decl.differentiable, input ? "gradient" : "takes a gradient");
  add(decl.saved, "kept for the backward");
  return text;
}

std::string kind_text(const OptionDecl& option) {
  const auto bound = [](double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.15g", x);
    return std::string(text);
  };
  switch (option.kind) {
    case OptionKind::boolean: return "0 or 1";
    case OptionKind::window: return "left,right";
    case OptionKind::sizes: return "whole numbers >= " + bound(option.low) + ", or none";
    case OptionKind::choice: {
      std::string text;
      for (const std::string& choice : option.choices) text += (text.empty() ? "" : " ") + choice;
      return text;
    }
    case OptionKind::real:
    case OptionKind::maybe_real:
    case OptionKind::integer: break;
  }
  const std::string kind = option.kind == OptionKind::integer ? "whole number" : "number";
  const bool open_above = option.high >= static_cast<double>(kAnyCount), open_below = option.low <= -kAnyReal;
  if (open_above && open_below) return kind;
  if (open_above) return kind + " >= " + bound(option.low);
  return kind + " " + bound(option.low) + " to " + bound(option.high);
}

void print_tensors(const char* title, const std::vector<TensorDecl>& tensors, bool inputs) {
  Table table({{title}, {"shape"}, {"type"}, {""}, {""}});
  for (const TensorDecl& decl : tensors) {
    const std::string other = decl.other_shape.empty() ? "" : " or " + bracketed(decl.other_shape);
    table.row({"  " + decl.name, bracketed(decl.shape) + other, element_text(decl), decl.doc, remarks(decl, inputs)});
  }
  table.print(stdout);
  std::printf("\n");
}

// What the letters of this operator's shapes count; those that mean another thing elsewhere are left to the tensors' lines.
std::string letters_text(const Op& op) {
  std::string shapes, text;
  bool packs = false;
  for (const auto* tensors : {&op.inputs, &op.outputs}) {
    for (const TensorDecl& decl : *tensors) {
      shapes += " " + decl.shape + " " + decl.other_shape + " ";
      packs |= decl.values == Values::offsets;
    }
  }
  const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (const Letter& letter : known_letters()) {
    if (letter.meaning.empty() || (letter.counts == Counts::sequences && !packs)) continue;
    for (size_t at = shapes.find(letter.name); at != std::string::npos; at = shapes.find(letter.name, at + 1)) {
      if (is_part(shapes[at - 1]) || is_part(shapes[at + letter.name.size()])) continue;
      text += (text.empty() ? "" : ", ") + std::string(letter.name) + " " + std::string(letter.meaning);
      break;
    }
  }
  return text;
}

void print_text(const Op& op, const Impl& chosen) {
  std::printf("%s: %s\n\n  %s\n\n", op.name.c_str(), op.summary.c_str(), op.equation.c_str());
  print_tensors("inputs", op.inputs, true);
  print_tensors("outputs", op.outputs, false);
  std::printf("  io: f64, f32, bf16 or f16, that of %s; acc: f32, f64 in an f64 call; the last dimension is contiguous\n",
              op.inputs.front().name.c_str());
  std::printf("  %s\n\n", letters_text(op).c_str());
  if (!op.options.empty()) {
    alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
    op.construct(args, out, grads);
    Table table({{"options"}, {"default"}, {"values"}, {""}});
    for (const OptionDecl& option : op.options) {
      table.row({"  " + option.name, option_text(option, args), kind_text(option), option.doc});
    }
    table.print(stdout);
    std::printf("\n");
  }
  if (!op.letters.empty() || !op.multiples.empty()) {
    std::printf("sizes\n");
    for (const LetterRule& rule : op.letters) {
      std::printf("  %s = ", rule.letter.c_str());
      if (rule.by.empty()) std::printf("%s unless a tensor shows it", rule.cases.front().second.c_str());
      std::vector<std::string> seen;  // maps of the same size stand together
      for (size_t i = 0; !rule.by.empty() && i < rule.cases.size(); ++i) {
        const std::string& expression = rule.cases[i].second;
        if (std::find(seen.begin(), seen.end(), expression) != seen.end()) continue;
        std::string names;
        for (const auto& [name, other] : rule.cases) {
          if (other == expression) names += (names.empty() ? "" : " ") + name;
        }
        std::printf("%s%s (%s)", seen.empty() ? "" : ", ", expression.c_str(), names.c_str());
        seen.push_back(expression);
      }
      std::printf("\n");
    }
    for (const auto& [whole, part] : op.multiples) std::printf("  %s divides %s\n", part.c_str(), whole.c_str());
    std::printf("\n");
  }
  Table table({{"implementations"}, {"passes"}, {"here"}});
  for (const Impl& impl : op.impls) {
    const std::string reason = impl.missing();
    const bool row = impl.name.find('.') != std::string::npos;
    const std::string usable = impl.device == Device::cpu ? "usable"
                               : row                      ? "usable for CUDA tensors"
                                                          : "chosen for CUDA tensors";
    const std::string here = &impl == &chosen ? "chosen" : reason.empty() ? usable : "no: " + reason;
    table.row({"  " + impl.name, impl.backward == nullptr ? "fwd" : "fwd bwd", here});
  }
  table.print(stdout);
  const char* isa = std::getenv("LINNET_ISA");
  const char* impl = std::getenv("LINNET_IMPL");
  if (impl != nullptr && *impl != '\0') {
    std::printf("  LINNET_IMPL=%s is set\n", impl);
  } else if (isa != nullptr && *isa != '\0') {
    std::printf("  the best one within LINNET_ISA=%s is chosen\n", isa);
  } else {
    std::printf("  the last usable one is chosen; LINNET_ISA=portable|avx2|avx512 limits the instruction set,\n");
    std::printf("  LINNET_IMPL=%s:%s forces an implementation\n", op.name.c_str(), op.impls.front().name.c_str());
  }
  const auto is_row = [](const Impl& each) { return each.name.find('.') != std::string::npos; };
  if (std::any_of(op.impls.begin(), op.impls.end(), is_row)) {
    std::printf("  CUDA tensors: the last row that takes a call runs it; linnet info %s --case '...' says which one and why,\n",
                op.name.c_str());
    std::printf("  LINNET_IMPL=%s:%s forces one\n", op.name.c_str(),
                std::find_if(op.impls.begin(), op.impls.end(), is_row)->name.c_str());
  }
  if (!has_impl_on(op, Device::cuda)) std::printf("  CUDA tensors: %s has no CUDA kernels\n", op.name.c_str());
  if (!op.decode.empty()) std::printf("\nlinnet info %s: the same, continued token by token\n", op.decode.c_str());
}

// The operators of a mechanism; none when there is no mechanism of that name.
std::vector<const Op*> operators_of(const std::string& mechanism) {
  std::vector<const Op*> ops;
  for (const Op* op : all_ops()) {
    if (op->mechanism == mechanism) ops.push_back(op);
  }
  return ops;
}

int print_mechanism(const std::string& name, const std::vector<const Op*>& ops, bool json) {
  if (json) {
    std::string all;
    for (const Op* op : ops) all += (all.empty() ? "" : ",\n") + describe_json(*op, 2);
    std::printf("{\"mechanism\": \"%s\", \"operators\": [\n%s\n]}\n", name.c_str(), all.c_str());
    return kDone;
  }
  std::printf("%s is a mechanism of %zu operator%s; linnet info OPERATOR has its shapes and options\n\n", name.c_str(),
              ops.size(), ops.size() == 1 ? "" : "s");
  Table table({{"operator"}, {"passes"}, {"summary"}});
  for (const Op* op : ops) table.row({op->name, op->differentiable() ? "fwd bwd" : "fwd", op->summary});
  table.print(stdout);
  return kDone;
}

// Which implementation the call of a case takes, and why others do not.
int explain(const Op& op, const std::string& line, bool json) {
  const bool named = line.substr(0, line.find(' ')) == op.name;
  check::Case c;
  if (const Status status = check::parse_case(named ? line : op.name + " " + line, &c); !status.ok()) return fail(status);
  std::vector<check::Choice> list;
  if (const Status status = check::choices(c, &list); !status.ok()) return fail(status);
  JsonWriter writer(2);
  writer.begin_object().member("case", check::to_text(c)).key("choices").begin_array();
  for (const check::Choice& choice : list) {
    const std::string missing = choice.impl->missing();
    writer.begin_object().member("name", choice.impl->name).member("pass", choice.pass == Pass::forward ? "fwd" : "bwd");
    writer.member("device", choice.impl->device == Device::cuda ? "cuda" : "cpu").member("takes", choice.reason.empty());
    writer.member("reason", choice.reason).member("chosen", choice.chosen).member("usable", missing.empty());
    writer.member("missing", missing).member("workspace", choice.workspace).end_object();
  }
  writer.end_array().end_object();
  if (json) return std::printf("%s\n", writer.text().c_str()), kDone;
  std::printf("%s\n", check::to_text(c).c_str());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !c.backward) continue;
    std::printf("\n");
    Table table({{pass == Pass::forward ? "forward" : "backward"}, {"takes it"}, {""}});
    bool on_gpu = false;
    for (const check::Choice& choice : list) {
      if (choice.pass != pass) continue;
      const bool gpu = choice.impl->device == Device::cuda;
      on_gpu = on_gpu || gpu;
      const std::string takes = choice.reason.empty() ? "yes" : "no: " + choice.reason;
      table.row({"  " + choice.impl->name, takes, !choice.chosen ? "" : gpu ? "chosen on a GPU" : "chosen on the CPU"});
    }
    table.print(stdout);
    if (!on_gpu) std::printf("  CUDA tensors: %s has no CUDA kernels\n", op.name.c_str());
  }
  return kDone;
}

int info_main(const Arguments& args) {
  std::vector<std::string> names;
  for (const Op* op : all_ops()) {
    names.push_back(op->name);
    if (std::find(names.begin(), names.end(), op->mechanism) == names.end()) names.push_back(op->mechanism);
  }
  for (const layers::Layer* layer : layers::all_layers()) names.push_back(layer->name());
  if (args.rest().empty()) return fail(bad_input("info: which operator or layer? linnet list shows them"));
  if (const layers::Layer* layer = layers::find_layer(args.rest().front()); layer != nullptr) {
    return layer_info(*layer, {args.rest().begin() + 1, args.rest().end()}, args.has("json"));
  }
  if (args.rest().size() > 1) {
    return fail(bad_input("info: one operator at a time, " + std::to_string(args.rest().size()) + " were given"));
  }
  const std::string& name = args.rest().front();
  const Op* op = find_op(name);
  if (op == nullptr) {
    if (const std::vector<const Op*> ops = operators_of(name); !ops.empty())
      return print_mechanism(name, ops, args.has("json"));
    if (is_model_path(name)) return model_info(args);
    const std::string hint = did_you_mean(name, names);
    return fail(
        bad_input("info: there is no operator or layer '" + name + "'" + (hint.empty() ? "; linnet list shows them" : hint)));
  }
  if (args.has("case")) return explain(*op, args.text("case"), args.has("json"));
  const Impl* chosen;
  if (const Status status = choose_impl(*op, Pass::forward, {}, &chosen); !status.ok()) return fail(status);
  if (args.has("json")) {
    std::printf("%s\n", describe_json(*op, 2).c_str());
  } else {
    print_text(*op, *chosen);
  }
  return kDone;
}

}  // namespace

const Command& info_command() {
  static const Command command = {
      .name = "info",
      .summary =
          "an operator's declaration, equation and implementations; a layer's options, parameters, state and cost; a model",
      .usage = "OP | MECHANISM [--case LINE] | LAYER [OPTION=VALUE ...] | MODEL [--json]",
      .details =
          "A mechanism's name that is no operator's lists its operators. MODEL is a folder with config.json and safetensors, "
          "or a\n"
          "GGUF file: its layers, parameters, state and memory.\n\n"
          "A case is a line as linnet check prints it; strided=1 stands for rows that do not lie at multiples of 16 bytes.\n\n"
          "examples: linnet info softmax, linnet info mamba\n"
          "          linnet info delta --case 'B=1 T=2048 Hq=16 Hk=16 Hv=16 K=128 V=128 dtype=bf16 pass=bwd'\n"
          "          linnet info gated_deltanet hidden=1024 heads=4\n          linnet info model.gguf",
      .options = {{"case", "LINE", "which implementation this call takes, and why others do not"},
                  {"json", "", "print JSON"},
                  kWeightsOption,
                  kAttentionOption,
                  kThreadsOption},
      .run = info_main,
  };
  return command;
}

}  // namespace linnet::cli
