#include "compare/binding.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <random>

namespace linnet::compare {
namespace {

double number(std::string_view text) { return std::strtod(std::string(text).c_str(), nullptr); }

// [B, T, H D] where the operator has heads and channels in one dimension.
View in_rank(const View& view, size_t rank) {
  if (rank != 3 || view.rank != 4) return view;
  const int64_t sizes[] = {view.size[0], view.size[1], view.size[2] * view.size[3]};
  return View::dense(view.data, view.dtype, sizes, 3);
}

void show(std::string_view letter, int64_t size, std::string_view from, Dims* dims) {
  if (dims->find(letter) == nullptr) dims->set(letter, size, from);
}

}  // namespace

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

View pretended(Dtype dtype, const int64_t* sizes, int rank) {
  alignas(64) static char anything[64];
  return View::dense(anything, dtype, sizes, rank);
}

const View* Sources::find(std::string_view name) const {
  return name == "q" ? &q : name == "k" ? &k : name == "v" ? &v : nullptr;
}

Binding::Binding(const Op& op, std::string_view words) : op_(op) {
  for (const std::string_view word : words_of(words)) {
    const size_t equals = std::min(word.find('='), word.size() - 1);
    words_.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  }
}

const std::string_view* Binding::find(std::string_view name) const {
  for (const auto& [word, text] : words_) {
    if (word == name) return &text;
  }
  return nullptr;
}

bool Binding::causal(bool input_is) const {
  if (op_.find_option("causal") == nullptr) return true;
  const std::string_view* said = find("causal");
  return said == nullptr ? input_is : *said == "1";
}

Status Binding::give(const TensorDecl& decl, const View& shape, const View& source, bool pretend, Call* call) {
  const Dtype type = decl.element == Element::acc && dtype_ != Dtype::f64 ? Dtype::f32 : dtype_;
  if (pretend) return call->set(decl.name, pretended(type, shape.size, shape.rank));
  auto filled = std::make_unique<Filled>();
  filled->how = *find(decl.name);
  filled->source = source;
  filled->view = View::dense(nullptr, type, shape.size, shape.rank);
  filled->memory = bench::Memory(filled->view.elements() * dtype_size(type));
  filled->view.data = filled->memory.data();
  filled_.push_back(std::move(filled));
  return call->set(decl.name, filled_.back()->view);
}

Status Binding::bind(const Sources& from, bool causal, bool pretend, Call* call, Dims* dims) {
  dtype_ = from.q.dtype;
  if (op_.find_option("causal") != nullptr) LINNET_TRY(call->set_option("causal", causal ? "1" : "0"));
  for (const auto& [name, text] : words_) {
    if (name == "causal" || name == "other" || name.rfind("state.", 0) == 0 || op_.find_input(name) != nullptr) continue;
    if (op_.find_option(name) == nullptr && std::isupper(static_cast<unsigned char>(name[0])) != 0) {
      const int64_t size = text == "H"    ? from.q.size[2]
                           : text == "K"  ? from.q.size[3]
                           : text == "V"  ? from.v.size[3]
                           : text == "HK" ? from.q.size[2] * from.q.size[3]
                                          : static_cast<int64_t>(number(text));
      show(name, size, "the variant", dims);
      continue;
    }
    LINNET_TRY(call->set_option(name, text));
  }
  const auto shape_of = [&](const TensorDecl& decl) {
    const std::string_view* other = find("other");
    return words_of(other != nullptr && *other == decl.name ? decl.other_shape : decl.shape);
  };
  // First what q, k and v are, which shows the sizes; then what is made from numbers.
  for (const TensorDecl& decl : op_.inputs) {
    const std::string_view* said = find(decl.name);
    const size_t at = said == nullptr ? std::string_view::npos : said->find('@');
    if (said != nullptr && at == std::string_view::npos) continue;
    const View* source = from.find(said == nullptr ? decl.name : said->substr(at + 1));
    if (source == nullptr) continue;
    const std::vector<std::string_view> shape = shape_of(decl);
    const View view = in_rank(*source, shape.size());
    for (size_t i = 0; i < std::min(shape.size(), static_cast<size_t>(view.rank)); ++i) {
      show(shape[i], view.size[i], decl.name, dims);
    }
    LINNET_TRY(said == nullptr || at == 0 ? call->set(decl.name, view) : give(decl, view, view, pretend, call));
  }
  for (const TensorDecl& decl : op_.inputs) {
    const std::string_view* said = find(decl.name);
    if (said == nullptr || said->find('@') != std::string_view::npos) continue;
    int64_t sizes[kMaxRank];
    int rank = 0;
    for (const std::string_view word : shape_of(decl)) {
      if (!evaluate(word, op_, call->args(), *dims, &sizes[rank++])) {
        return bad_input(op_.name + ": the size " + std::string(word) + " of " + decl.name + " is unknown");
      }
    }
    LINNET_TRY(give(decl, pretended(dtype_, sizes, rank), {}, pretend, call));
  }
  return {};
}

void Binding::show_state(int64_t tokens, Dims* dims) const {
  const double n = static_cast<double>(tokens);
  for (const auto& [name, text] : words_) {
    if (name.rfind("state.", 0) != 0) continue;
    const double size = text == "sqrt"              ? std::sqrt(n)
                        : text.rfind("log", 0) == 0 ? std::log(n) / std::log(number(text.substr(3))) - 1e-9
                                                    : number(text);
    show(name.substr(6), static_cast<int64_t>(std::ceil(size)), "the variant", dims);
  }
}

void Binding::fill() {
  for (const std::unique_ptr<Filled>& filled : filled_) {
    const View& view = filled->view;
    const int64_t columns = view.rank == 0 ? 1 : view.size[view.rank - 1];
    std::vector<double> values(static_cast<size_t>(view.elements()));
    if (filled->source.given()) bench::read_values(filled->source, 0, view.elements(), values.data());
    if (filled->how.substr(0, 5) == "unit@") {
      for (auto row = values.begin(); row < values.end(); row += columns) {
        double squares = 0;
        for (auto x = row; x < row + columns; ++x) squares += *x * *x;
        for (auto x = row; x < row + columns; ++x) *x /= squares > 0 ? std::sqrt(squares) : 1;
      }
    } else if (filled->how.substr(0, 11) == "logsigmoid@") {
      for (double& x : values) x = std::min(x, 0.0) - std::log1p(std::exp(-std::fabs(x)));
    } else if (filled->how == "normal") {
      std::mt19937_64 random(1);
      std::normal_distribution<double> normal;
      for (double& x : values) x = normal(random);
    } else if (filled->how == "identity") {
      const int64_t rows = view.size[view.rank - 2];
      for (size_t i = 0; i < values.size(); ++i) {
        const auto at = static_cast<int64_t>(i);
        values[i] = at / columns % rows == at % columns ? 1 : 0;
      }
    } else if (filled->how == "first") {
      for (size_t i = 0; i < values.size(); i += static_cast<size_t>(columns)) values[i] = 1;
    } else {
      std::fill(values.begin(), values.end(), number(filled->how));
    }
    bench::write_values(view, 0, view.elements(), values.data());
  }
}

}  // namespace linnet::compare
