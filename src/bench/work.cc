#include "bench/work.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <random>

#include "core/half.h"

namespace linnet::bench {
namespace {

constexpr int64_t kAlignment = 128;
constexpr int64_t kPoolElements = 1 << 16;  // random numbers drawn per tensor; larger tensors repeat them

Dtype dtype_of(Element element, Dtype io) {
  switch (element) {
    case Element::io:
    case Element::param: return io;
    case Element::acc: return io == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    case Element::weight: return io;
    case Element::index: return Dtype::i64;
    case Element::mask:
    case Element::code: return Dtype::u8;
  }
  return io;
}

// One row of random numbers of the kind that the declaration names.
void draw_row(Values kind, std::mt19937_64& random, double* row, int64_t count) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    switch (kind) {
      case Values::feature_sums:
      case Values::weights:
      case Values::write_strength:
      case Values::unit_interval: row[i] = uniform(random); break;
      case Values::gain: row[i] = 1 + uniform(random); break;
      case Values::rounding: row[i] = 0; break;
      case Values::positive: row[i] = std::exp2(normal(random) / 4) * 1.95; break;
      case Values::log_decay: row[i] = -0.1 * std::exp(normal(random)); break;
      default: row[i] = normal(random);
    }
    squares += row[i] * row[i];
  }
  if (kind != Values::unit_rows || squares == 0) return;
  for (int64_t i = 0; i < count; ++i) row[i] /= std::sqrt(squares);
}

void fill_random(Values kind, const std::string& name, const View& view) {
  std::mt19937_64 random(std::hash<std::string>()(name));
  const int64_t elements = view.elements(), width = view.rank > 0 ? std::max<int64_t>(view.size[view.rank - 1], 1) : 1;
  // An odd number of rows, so that neighbouring heads and tokens do not repeat each other.
  const int64_t rows = std::max<int64_t>(kPoolElements / width, 1) | 1;
  const int64_t pool = std::min(rows * width, elements);
  std::vector<double> row(static_cast<size_t>(width));
  for (int64_t first = 0; first < pool; first += width) {
    draw_row(kind, random, row.data(), width);
    write_values(view, first, std::min(width, pool - first), row.data());
  }
  const int64_t size = dtype_size(view.dtype);
  char* bytes = static_cast<char*>(view.data);
  for (int64_t first = pool; first < elements; first += pool) {
    std::memcpy(bytes + first * size, bytes, static_cast<size_t>(std::min(pool, elements - first) * size));
  }
}

}  // namespace

Memory::Memory(int64_t bytes) {
  const int64_t rounded = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, static_cast<size_t>(rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, static_cast<size_t>(rounded));
}

void read_values(const View& view, int64_t first, int64_t count, double* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = load_f64(view.data, view.dtype, first + i);
}
void write_values(const View& view, int64_t first, int64_t count, const double* values) {
  for (int64_t i = 0; i < count; ++i) store_f64(view.data, view.dtype, first + i, values[i]);
}

Status Work::make(const Case& c, const Context& context, std::unique_ptr<Work>* work, Device device) {
  work->reset(new Work(c, context, device));
  LINNET_TRY((*work)->prepare());
  return device == Device::cuda ? (*work)->to_device() : Status();
}

// Copies until they are several times the second-level cache of a large GPU.
Status Work::to_device() {
  constexpr int64_t kEnough = int64_t{256} << 20, kMost = 16;
  const int64_t copies = std::clamp<int64_t>(kEnough / std::max<int64_t>(tensor_bytes_, 1), 1, kMost);
  for (int64_t copy = 0; copy < copies; ++copy) {
    Call call = call_;
    for (const Tensor& tensor : tensors_) {
      const int64_t bytes = tensor.view.elements() * dtype_size(tensor.view.dtype);
      View view = tensor.view;
      view.device = Device::cuda;
      LINNET_TRY(cuda::allocate(bytes, &view.data));
      device_memory_.emplace_back(view.data);
      LINNET_TRY(cuda::copy_to_device(view.data, tensor.view.data, bytes));
      LINNET_TRY(call.set(tensor.name, view));
    }
    device_calls_.push_back(call);
  }
  const auto choose = [&](Pass pass, const Impl** impl) {
    return choose_impl(*case_.op, pass, context_, Device::cuda, call_.prepared_args(), nullptr, impl);
  };
  const Impl *impl, *backward;
  LINNET_TRY(choose(case_.backward ? Pass::backward : Pass::forward, &backward));
  LINNET_TRY(choose(Pass::forward, &impl));
  impl_ = impl->name;
  if (case_.backward && backward != impl) impl_ += ", " + backward->name;
  workspace_bytes_ = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    int64_t bytes = 0;
    if (pass == Pass::forward || case_.backward) LINNET_TRY(device_calls_.front().workspace(pass, context_, &bytes));
    workspace_bytes_ = std::max(workspace_bytes_, bytes);
  }
  void* memory;
  LINNET_TRY(cuda::allocate(workspace_bytes_, &memory));
  device_memory_.emplace_back(memory);
  context_.workspace = memory;
  context_.workspace_bytes = workspace_bytes_;
  return {};
}

Status Work::fetch_results() {
  LINNET_TRY(cuda::synchronize());
  const size_t last = (turn_ + device_calls_.size() - 1) % device_calls_.size();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const View& view = tensors_[i].view;
    if (!tensors_[i].result) continue;
    LINNET_TRY(cuda::copy_to_host(view.data, device_memory_[last * tensors_.size() + i].get(),
                                  view.elements() * dtype_size(view.dtype)));
  }
  return {};
}

Status Work::check_memory(const TensorDecl& decl, const std::vector<int64_t>& size, Dtype dtype) const {
  double bytes = static_cast<double>(dtype_size(dtype));
  for (const int64_t n : size) bytes *= static_cast<double>(n);
  const double room = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (bytes + static_cast<double>(tensor_bytes_) < 0.9 * room) return {};
  return impossible("bench: " + case_.op->name + " " + case_.line() + ": " + decl.name +
                    " does not fit into the memory of this machine");
}

Status Work::add(const std::string& name, View view, bool result) {
  const int64_t bytes = view.elements() * dtype_size(view.dtype);
  tensors_.push_back({.name = name, .view = view, .memory = Memory(bytes), .result = result});
  tensors_.back().view.data = tensors_.back().memory.data();
  tensor_bytes_ += bytes;
  return call_.set(name, tensors_.back().view);
}

Status Work::fill_index(const TensorDecl& decl, Tensor* tensor) {
  const View& view = tensor->view;
  int64_t* values = static_cast<int64_t*>(view.data);
  const int64_t elements = view.elements();
  Dims dims;
  for (const auto& [letter, value] : case_.letters) dims.set(letter, value, "");
  int64_t bound = 0;
  evaluate(decl.of, *case_.op, call_.args(), dims, &bound);
  switch (decl.values) {
    case Values::offsets:  // sequences of equal length
      for (int64_t i = 0; i < elements; ++i) values[i] = elements > 1 ? bound * i / (elements - 1) : 0;
      break;
    case Values::below:
    case Values::page_table:  // pages in an order that is no order: 7919 is a prime
      for (int64_t i = 0; i < elements; ++i) values[i] = bound > 0 ? i * 7919 % bound : 0;
      break;
    default: {
      int64_t count = bound;
      for (const auto& [name, value] : case_.counts) count = name == decl.name ? value : count;
      std::fill(values, values + elements, count);
    }
  }
  if (decl.mutated) tensor->counts.assign(values, values + elements);
  return {};
}

Status Work::add_input(const TensorDecl& decl, const Dims& dims) {
  const Op& op = *case_.op;
  std::vector<int64_t> size;
  const bool other = std::find(case_.other.begin(), case_.other.end(), decl.name) != case_.other.end();
  std::string_view shape = other ? decl.other_shape : decl.shape;
  while (!shape.empty()) {
    const std::string_view word = shape.substr(0, shape.find(' '));
    shape.remove_prefix(std::min(word.size() + 1, shape.size()));
    size.push_back(0);
    if (!evaluate(word, op, call_.args(), dims, &size.back())) {
      return bad_input("bench: " + op.name + ": the case does not say " + std::string(word));
    }
  }
  const Dtype dtype = dtype_of(decl.element, case_.dtype);
  LINNET_TRY(check_memory(decl, size, dtype));
  LINNET_TRY(add(decl.name, View::dense(nullptr, dtype, size.data(), static_cast<int>(size.size())), false));
  Tensor& tensor = tensors_.back();
  if (decl.element == Element::index) return fill_index(decl, &tensor);
  if (decl.element == Element::code) {
    uint8_t* bytes = static_cast<uint8_t*>(tensor.view.data);
    for (int64_t i = 0; i < tensor.view.elements(); ++i) bytes[i] = static_cast<uint8_t>(i * 7919 >> 4);
  } else if (decl.element == Element::mask) {
    std::memset(tensor.view.data, 1, static_cast<size_t>(tensor.view.elements()));
  } else {
    fill_random(decl.values, decl.name, tensor.view);
  }
  return {};
}

Status Work::prepare() {
  const Op& op = *case_.op;
  const auto wanted = [&](const std::string& name) {
    return std::find(case_.with.begin(), case_.with.end(), name) != case_.with.end();
  };
  for (const auto& [name, value] : case_.options) LINNET_TRY(call_.set_option(name, value));
  Dims dims;
  for (const auto& [letter, value] : case_.letters) dims.set(letter, value, "");
  for (const TensorDecl& decl : op.inputs) {
    if (!decl.optional || wanted(decl.name)) LINNET_TRY(add_input(decl, dims));
  }
  LINNET_TRY(call_.prepare());
  for (const TensorDecl& decl : op.outputs) {
    if (decl.optional && !(decl.saved && case_.backward) && !wanted(decl.name)) continue;
    View view;
    LINNET_TRY(call_.output_view(decl.name, &view));
    LINNET_TRY(add(decl.name, view, true));
  }
  if (case_.backward) {
    for (const TensorDecl& decl : op.outputs) {
      if (!decl.differentiable || (decl.optional && !wanted(decl.name))) continue;
      View view;
      LINNET_TRY(call_.output_view("d" + decl.name, &view));
      LINNET_TRY(add("d" + decl.name, view, false));
      fill_random(Values::normal, "d" + decl.name, tensors_.back().view);
    }
    for (const TensorDecl& decl : op.inputs) {
      View given, view;
      LINNET_TRY(call_.get(decl.name, &given));
      if (!decl.differentiable || !given.given()) continue;
      LINNET_TRY(call_.output_view("d" + decl.name, &view));
      LINNET_TRY(add("d" + decl.name, view, true));
    }
  }
  if (device_ == Device::cpu) {
    const Impl* impl;
    LINNET_TRY(choose_impl(op, case_.backward ? Pass::backward : Pass::forward, context_, &impl));
    impl_ = impl->name;
    LINNET_TRY(call_.workspace(Pass::forward, context_, &workspace_bytes_));
    if (case_.backward) {
      int64_t bytes;
      LINNET_TRY(call_.workspace(Pass::backward, context_, &bytes));
      workspace_bytes_ = std::max(workspace_bytes_, bytes);
    }
    workspace_ = Memory(workspace_bytes_);
    context_.workspace = workspace_.data();
    context_.workspace_bytes = workspace_bytes_;
  }
  if (op.cost != nullptr) {
    forward_cost_ = op.cost(call_.prepared_args(), call_.dims(), Pass::forward);
    if (case_.backward) backward_cost_ = op.cost(call_.prepared_args(), call_.dims(), Pass::backward);
  }
  return {};
}

std::vector<std::pair<std::string, int64_t>> Work::letters() const {
  std::vector<std::pair<std::string, int64_t>> all;
  all.reserve(static_cast<size_t>(call_.dims().count()));
  for (int i = 0; i < call_.dims().count(); ++i) {
    all.emplace_back(std::string(call_.dims().entry(i).letter), call_.dims().entry(i).value);
  }
  return all;
}

Status Work::run() {
  if (device_ == Device::cuda) {
    const Call& call = device_calls_[turn_];
    turn_ = (turn_ + 1) % device_calls_.size();
    LINNET_TRY(call.run(Pass::forward, context_));
    return case_.backward ? call.run(Pass::backward, context_) : Status();
  }
  for (Tensor& tensor : tensors_) {
    if (!tensor.counts.empty()) std::memcpy(tensor.view.data, tensor.counts.data(), tensor.counts.size() * sizeof(int64_t));
  }
  LINNET_TRY(call_.run(Pass::forward, context_));
  return case_.backward ? call_.run(Pass::backward, context_) : Status();
}

void Work::take_inputs(const Work& other) {
  std::vector<double> row(4096);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].result) continue;
    for (int64_t first = 0, all = tensors_[i].view.elements(); first < all; first += 4096) {
      const int64_t count = std::min<int64_t>(4096, all - first);
      read_values(other.tensors_[i].view, first, count, row.data());
      write_values(tensors_[i].view, first, count, row.data());
    }
  }
}

double Work::error(const Work& reference) const {
  double worst = 0;
  std::vector<double> got(4096), want(4096);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].result) continue;
    double errors = 0, squares = 0;
    for (int64_t first = 0, all = tensors_[i].view.elements(); first < all; first += 4096) {
      const int64_t count = std::min<int64_t>(4096, all - first);
      read_values(tensors_[i].view, first, count, got.data());
      read_values(reference.tensors_[i].view, first, count, want.data());
      for (size_t j = 0; j < static_cast<size_t>(count); ++j) {
        if (got[j] == want[j]) {  // infinities, such as the lse of a row that sees nothing
          squares += std::isfinite(want[j]) ? want[j] * want[j] : 0;
          continue;
        }
        errors += (got[j] - want[j]) * (got[j] - want[j]);
        squares += want[j] * want[j];
      }
    }
    const double rms = errors == 0 ? 0 : std::sqrt(errors / squares);
    worst = rms > worst || std::isnan(rms) ? rms : worst;
  }
  return worst;
}

}  // namespace linnet::bench
