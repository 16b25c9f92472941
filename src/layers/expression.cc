#include "layers/expression.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <memory>
#include <utility>

namespace linnet::layers {
namespace {

constexpr std::pair<std::string_view, MapCode> kFunctions[] = {
    {"exp", MapCode::exp},
    {"expm1", MapCode::expm1},
    {"log", MapCode::log},
    {"log1p", MapCode::log1p},
    {"sqrt", MapCode::sqrt},
    {"rsqrt", MapCode::rsqrt},
    {"abs", MapCode::abs},
    {"square", MapCode::square},
    {"tanh", MapCode::tanh},
    {"erf", MapCode::erf},
    {"sin", MapCode::sin},
    {"cos", MapCode::cos},
    {"sigmoid", MapCode::sigmoid},
    {"silu", MapCode::silu},
    {"softplus", MapCode::softplus},
    {"logsigmoid", MapCode::logsigmoid},
    {"relu", MapCode::relu},
    {"gelu", MapCode::gelu},
    {"gelu_tanh", MapCode::gelu_tanh},
    {"sum", MapCode::sum},
    {"mean", MapCode::mean},
    {"amax", MapCode::amax},
    {"min", MapCode::min},
    {"max", MapCode::max},
};

struct Node {
  MapCode code = MapCode::constant;
  int input = -1;
  double value = 0;
  std::unique_ptr<Node> a, b;
  bool number() const { return code == MapCode::constant; }
};
using NodePtr = std::unique_ptr<Node>;

bool is_reduction(MapCode code) { return code == MapCode::sum || code == MapCode::mean || code == MapCode::amax; }

// sum := product (('+' | '-') product)*;  product := signed (('*' | '/') signed)*;  signed := '-' signed | factor
// factor := number | name | name '(' sum (',' sum)* ')' | '(' sum ')'
class Parser {
 public:
  Parser(std::string_view text, const std::vector<std::string>& names) : text_(text), names_(names) {}
  Status run(NodePtr* root) {
    NodePtr node = sum();
    skip();
    if (error_.empty() && at_ < text_.size()) fail("expected an operator");
    if (!error_.empty()) return bad_input("map \"" + std::string(text_) + "\": " + error_);
    *root = std::move(node);
    return {};
  }

 private:
  void fail(const std::string& what) {
    if (error_.empty()) error_ = what + " at character " + std::to_string(at_ + 1);
  }
  void skip() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  static NodePtr make(MapCode code, NodePtr a, NodePtr b = nullptr) {
    NodePtr node = std::make_unique<Node>();
    node->code = code;
    node->a = std::move(a);
    node->b = std::move(b);
    return node;
  }
  static NodePtr make_number(double value) {
    NodePtr node = std::make_unique<Node>();
    node->value = value;
    return node;
  }
  NodePtr sum() {
    if (++depth_ > 64) fail("it is nested too deeply");
    NodePtr left = product();
    while (error_.empty()) {
      if (take('+')) {
        left = make(MapCode::add, std::move(left), product());
      } else if (take('-')) {
        left = make(MapCode::sub, std::move(left), product());
      } else {
        break;
      }
    }
    --depth_;
    return left;
  }
  NodePtr product() {
    NodePtr left = with_sign();
    while (error_.empty()) {
      if (take('*')) {
        left = make(MapCode::mul, std::move(left), with_sign());
      } else if (take('/')) {
        left = make(MapCode::div, std::move(left), with_sign());
      } else {
        break;
      }
    }
    return left;
  }
  NodePtr with_sign() {
    if (!take('-')) return factor();
    NodePtr node = with_sign();
    if (node->number()) return make_number(-node->value);
    return make(MapCode::neg, std::move(node));
  }
  NodePtr factor() {
    skip();
    if (!error_.empty()) return make_number(0);
    if (take('(')) {
      NodePtr node = sum();
      if (!take(')')) fail("expected ')'");
      return node;
    }
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '.') {
      double value = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
      if (error != std::errc()) return fail("expected a number"), make_number(0);
      at_ = static_cast<size_t>(end - text_.data());
      return make_number(value);
    }
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_')) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) return fail("expected a number, a name or '('"), make_number(0);
    if (take('(')) return function(word, begin);
    NodePtr node = std::make_unique<Node>();
    node->code = MapCode::load;
    const auto found = std::find(names_.begin(), names_.end(), word);
    node->input = static_cast<int>(found - names_.begin());
    if (found == names_.end() && word != "position") {
      at_ = begin;
      fail("there is no tensor '" + std::string(word) + "'");
    }
    return node;
  }
  NodePtr function(std::string_view word, size_t begin) {
    std::vector<NodePtr> arguments;
    do arguments.push_back(sum());
    while (error_.empty() && take(','));
    if (!take(')')) fail("expected ')'");
    const auto want = [&](size_t count) {
      if (arguments.size() == count) return true;
      fail(std::string(word) + " has " + std::to_string(arguments.size()) + " arguments, expected " + std::to_string(count));
      return false;
    };
    if (word == "clip") {
      if (!want(3)) return make_number(0);
      return make(MapCode::min, make(MapCode::max, std::move(arguments[0]), std::move(arguments[1])), std::move(arguments[2]));
    }
    for (const auto& [name, code] : kFunctions) {
      if (name != word) continue;
      const bool two = code == MapCode::min || code == MapCode::max;
      if (!want(two ? 2 : 1)) return make_number(0);
      return make(code, std::move(arguments[0]), two ? std::move(arguments[1]) : nullptr);
    }
    at_ = begin;
    fail("there is no function '" + std::string(word) + "'");
    return make_number(0);
  }

  std::string_view text_;
  const std::vector<std::string>& names_;
  size_t at_ = 0;
  int depth_ = 0;
  std::string error_;
};

// Registers are a stack: a node leaves its result in the lowest one it may use.
class Compiler {
 public:
  explicit Compiler(MapProgram* program) : program_(program) {}
  bool fits() const { return fits_; }
  void emit(const Node& node, int to) {
    if (to >= kMapRegisters || program_->steps >= kMapSteps - 1) {
      fits_ = false;
      return;
    }
    program_->registers = std::max(program_->registers, to + 1);
    MapStep step{.code = node.code, .to = to, .a = to, .b = -1, .value = node.value};
    program_->reduces |= is_reduction(node.code);
    if (node.code == MapCode::load) {
      step.a = node.input;
    } else if (node.b != nullptr) {
      if (node.b->number()) {
        emit(*node.a, to);
        step.value = node.b->value;
      } else if (node.a->number()) {
        emit(*node.b, to);
        step = {.code = node.code, .to = to, .a = -1, .b = to, .value = node.a->value};
      } else {
        emit(*node.a, to);
        emit(*node.b, to + 1);
        step.b = to + 1;
      }
    } else if (node.a != nullptr) {
      emit(*node.a, to);
    }
    if (fits_) program_->step[program_->steps++] = step;
  }

 private:
  MapProgram* program_;
  bool fits_ = true;
};

}  // namespace

Status parse_map(std::string_view text, const std::vector<std::string>& names, MapProgram* program) {
  NodePtr root;
  LINNET_TRY(Parser(text, names).run(&root));
  *program = MapProgram();
  program->inputs = static_cast<int32_t>(names.size()) + (map_uses_position(text) ? 1 : 0);
  program->drops = is_reduction(root->code);
  Compiler compiler(program);
  compiler.emit(*root, 0);
  if (!compiler.fits() || program->inputs > kMapInputs) {
    return bad_input("map \"" + std::string(text) + "\": it is too long, expected at most " + std::to_string(kMapSteps) +
                     " operations, " + std::to_string(kMapRegisters) + " of them open, and " + std::to_string(kMapInputs) +
                     " tensors");
  }
  return {};
}

bool map_uses_position(std::string_view text) {
  constexpr std::string_view kName = "position";
  const auto is_word = [&](size_t i) {
    return i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) != 0 || text[i] == '_');
  };
  for (size_t at = text.find(kName); at != std::string_view::npos; at = text.find(kName, at + 1)) {
    if ((at == 0 || !is_word(at - 1)) && !is_word(at + kName.size())) return true;
  }
  return false;
}

}  // namespace linnet::layers
