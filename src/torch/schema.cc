#include "schema.h"

namespace linnet {
namespace {

class List {
 public:
  List& add(const std::string& item) { return text_ += (text_.empty() ? "" : ", ") + item, *this; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Dispatchers of torch pass an argument of their own named mode, and lambda is a word of Python.
std::string torch_name(const std::string& name) { return name == "mode" || name == "lambda" ? name + "_" : name; }

// Defaults are only legal behind the last argument without one.
void add_inputs(List& list, const Op& op, bool with_defaults) {
  size_t first_default = op.inputs.size();
  while (with_defaults && first_default > 0 && op.inputs[first_default - 1].optional) --first_default;
  char alias = 'a';
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const TensorDecl& decl = op.inputs[i];
    std::string type = "Tensor";
    if (decl.mutated) type += std::string("(") + alias++ + "!)";
    if (decl.optional) type += "?";
    list.add(type + " " + torch_name(decl.name) + (i >= first_default ? "=None" : ""));
  }
}

void add_options(List& list, const Op& op) {
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  op.construct(args, out, grads);
  for (const OptionDecl& option : op.options) {
    const std::string name = torch_name(option.name);
    std::string text = option_text(option, args);
    if (text.find_first_of(".en") == std::string::npos &&
        (option.kind == OptionKind::real || option.kind == OptionKind::maybe_real))
      text += ".0";
    switch (option.kind) {
      case OptionKind::real: list.add("float " + name + "=" + text); break;
      case OptionKind::maybe_real: list.add("float? " + name + "=" + (text == "none" ? "None" : text)); break;
      case OptionKind::integer: list.add("int " + name + "=" + text); break;
      case OptionKind::boolean: list.add("bool " + name + "=" + (text == "1" ? "True" : "False")); break;
      case OptionKind::choice: list.add("str " + name + "=\"" + text + "\""); break;
      case OptionKind::sizes: list.add("int[] " + name + "=[" + (text == "none" ? "" : text) + "]"); break;
      case OptionKind::window: list.add("int[2] " + name + "=[" + text.insert(text.find(',') + 1, " ") + "]"); break;
    }
  }
}

}  // namespace

std::string forward_schema(const Op& op) {
  List arguments, results;
  add_inputs(arguments, op, true);
  List keywords;
  add_options(keywords, op);
  for (const TensorDecl& decl : op.outputs) {
    if (on_request(decl)) keywords.add("bool return_" + decl.name + "=False");
    results.add("Tensor " + decl.name);
  }
  if (!keywords.text().empty()) arguments.add("*").add(keywords.text());
  return op.name + "(" + arguments.text() + ") -> (" + results.text() + ")";
}

std::string backward_schema(const Op& op) {
  List arguments, results;
  for (const TensorDecl& decl : op.outputs) {
    if (decl.differentiable) arguments.add("Tensor? d" + decl.name);
  }
  add_inputs(arguments, op, false);
  for (const TensorDecl& decl : op.outputs) {
    if (decl.saved) arguments.add("Tensor " + decl.name);
  }
  arguments.add("*");
  add_options(arguments, op);
  arguments.add("bool[] wanted");
  for (const TensorDecl& decl : op.inputs) {
    if (decl.differentiable) results.add("Tensor d" + decl.name);
  }
  return op.name + "_backward(" + arguments.text() + ") -> (" + results.text() + ")";
}

}  // namespace linnet
