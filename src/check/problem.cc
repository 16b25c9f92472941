#include "check/problem.h"

#include <unistd.h>

#include <algorithm>

#include "check/draw.h"
#include "core/half.h"

namespace linnet::check {

std::vector<std::string> words_of(const std::string& shape) {
  std::vector<std::string> words;
  for (size_t start = 0; start < shape.size();) {
    const size_t end = std::min(shape.find(' ', start), shape.size());
    words.push_back(shape.substr(start, end - start));
    start = end + 1;
  }
  return words;
}

int64_t product(const std::vector<int64_t>& size, size_t from) {
  int64_t n = 1;
  for (size_t i = from; i < size.size(); ++i) n *= size[i];
  return n;
}

void round_values(Array* array) {
  if (array->dtype == Dtype::f64 || !is_float(array->dtype)) return;
  alignas(8) char cell[8];
  for (double& x : array->values) {
    store_f64(cell, array->dtype, 0, x);
    x = load_f64(cell, array->dtype, 0);
  }
}

// Shapes say B; states of sequences that are not packed say N.
int batch_dimension(const Op& op, const Array& array, int64_t batch) {
  const TensorDecl* decl = op.find_input(array.name);
  if (decl == nullptr) decl = op.find_output(array.name);
  if (decl == nullptr) decl = op.find_input(array.name.substr(1));  // gradients
  if (decl == nullptr) decl = op.find_output(array.name.substr(1));
  std::vector<std::string> words = words_of(decl->shape);
  if (const std::vector<std::string> other = words_of(decl->other_shape); other.size() == array.size.size()) words = other;
  const size_t missing = words.size() - array.size.size();
  for (size_t d = missing; d < words.size(); ++d) {
    if ((words[d] == "B" || words[d] == "N") && array.size[d - missing] == batch) return static_cast<int>(d - missing);
  }
  return -1;
}

Array batch_row(const Array& array, int dimension, int64_t row) {
  if (dimension < 0) return array;
  Array part = array;
  const auto d = static_cast<size_t>(dimension);
  const int64_t inner = product(array.size, d + 1), batch = array.size[d],
                outer = product(array.size) / std::max<int64_t>(1, inner * batch);
  part.size[d] = 1;
  part.values.clear();
  for (int64_t i = 0; i < outer; ++i) {
    const auto from = array.values.begin() + (i * batch + row) * inner;
    part.values.insert(part.values.end(), from, from + inner);
  }
  return part;
}

bool take_batch_row(const Problem& problem, int64_t row, Problem* alone, int64_t* batch) {
  const Op& op = *problem.op;
  *batch = 0;
  for (const Array& array : problem.inputs) {
    const TensorDecl& decl = *op.find_input(array.name);
    if (decl.values == Values::offsets) return false;
    const std::vector<std::string> words = words_of(decl.shape);
    for (size_t d = 0; d < words.size() && !decl.broadcast; ++d) {
      if (words[d] == "B") *batch = array.size[d];
    }
  }
  if (*batch < 2) return false;
  *alone = problem;
  for (auto* list : {&alone->inputs, &alone->incoming}) {
    for (Array& array : *list) array = batch_row(array, batch_dimension(op, array, *batch), row % *batch);
  }
  return true;
}

const Array* find_array(const std::vector<Array>& arrays, std::string_view name) {
  const auto at = std::find_if(arrays.begin(), arrays.end(), [&](const Array& array) { return array.name == name; });
  return at == arrays.end() ? nullptr : &*at;
}

Status make_problem(const Case& c, Problem* problem) {
  *problem = Problem();
  Drawing drawing(c, problem);
  LINNET_TRY(drawing.outline());
  // Inputs as doubles, twice in each of two executions, results alike: some ten copies of the inputs in double.
  double bytes = 0;
  for (const Array& array : problem->inputs) bytes += 80 * static_cast<double>(product(array.size));
  if (bytes > static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE))) {
    return impossible("case " + c.op->name + ": it does not fit into the memory of this machine");
  }
  drawing.fill();
  return drawing.results();
}

}  // namespace linnet::check
