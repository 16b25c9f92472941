#include "layers/experts.h"

#include <algorithm>
#include <cstring>

#include "core/half.h"

namespace linnet::layers {
namespace {

constexpr int64_t kRowsOfTask = 16;

// body(row) for each of `count` rows, on all threads.
template <class Body>
void each_row(const Launch& launch, int64_t count, const Body& body) {
  struct Work {
    const Body& body;
    int64_t count;
  } work{body, count};
  launch.executor->run((count + kRowsOfTask - 1) / kRowsOfTask,
                       [](void* context, int64_t task, int) {
                         const Work& w = *static_cast<const Work*>(context);
                         const int64_t end = std::min((task + 1) * kRowsOfTask, w.count);
                         for (int64_t row = task * kRowsOfTask; row < end; ++row) w.body(row);
                       },
                       &work);
}

char* row_of(const View& view, int64_t row) {  // of [B, T, C], whose rows are dense
  const int64_t at = row / view.size[1] * view.stride[0] + row % view.size[1] * view.stride[1];
  return static_cast<char*>(view.data) + at * dtype_size(view.dtype);
}

bool wide(Dtype dtype) { return dtype == Dtype::f64 || dtype == Dtype::f32; }

template <class T>
void add_times(const T* from, double weight, int64_t count, T* to) {
  const T w = static_cast<T>(weight);
  for (int64_t c = 0; c < count; ++c) to[c] += w * from[c];
}

// Which call of a product serves both.
bool held_alike(const Weight& a, const Weight& b) {
  if (a.quantised != b.quantised) return false;
  if (!a.quantised) return a.view.dtype == b.view.dtype;
  const Quantised &p = a.packed, &q = b.packed;
  return p.bits == q.bits && p.rounding == q.rounding && p.scale.dtype == q.scale.dtype && p.offset.dtype == q.offset.dtype;
}

}  // namespace

Experts::Room Experts::cut(Arena& arena, int64_t rows, int64_t channels, int64_t inner, Dtype dtype) {
  const int64_t size = dtype_size(dtype);
  Room room;
  room.x = arena.take<char>(rows * channels * size);
  room.gate = arena.take<char>(rows * inner * size);
  room.up = arena.take<char>(rows * inner * size);
  room.inner = arena.take<char>(rows * inner * size);
  room.y = arena.take<char>(rows * channels * size);
  room.sums = arena.take<char>(wide(dtype) ? 0 : rows * channels * 4);
  return room;
}

int64_t Experts::room_bytes(int64_t rows, int64_t channels, int64_t inner, Dtype dtype) {
  Arena arena;
  cut(arena, rows, channels, inner, dtype);
  return arena.used();
}

Status Experts::make(const Step& step, const std::vector<Parts>& list, int64_t inner, const RunnerOptions& options,
                     Executor& executor, char* room, int64_t* workspace) {
  top_ = step.top;
  normalised_ = step.normalised;
  experts_ = static_cast<int64_t>(list.size());
  single_ = x.size[1] == 1;
  const int64_t channels = x.size[2];
  Arena arena(room);
  room_ = cut(arena, rows(), channels, inner, x.dtype);
  const auto between = [&](char* data, int64_t width) {
    return single_ ? View::dense(data, x.dtype, {rows(), 1, width}) : View::dense(data, x.dtype, {1, rows(), width});
  };
  const View gathered = between(room_.x, channels), gate = between(room_.gate, inner), up = between(room_.up, inner),
             product = between(room_.inner, inner), y = between(room_.y, channels);
  const Context context{.executor = &executor, .impl = options.impl.empty() ? nullptr : options.impl.c_str()};
  std::vector<const Weight*> gates, ups, downs;
  for (const Parts& parts : list) {
    gates.push_back(parts.gate);
    ups.push_back(parts.up);
    downs.push_back(parts.down);
  }
  LINNET_TRY(make_product(std::move(gates), gathered, gate, options, context, &gate_));
  LINNET_TRY(make_product(std::move(ups), gathered, up, options, context, &up_));
  LINNET_TRY(make_product(std::move(downs), product, y, options, context, &down_));
  Call call(*find_op("glu"));
  for (const Setting& option : step.options) LINNET_TRY(call.set_option(option.name, option.text));
  LINNET_TRY(call.set("gate", gate));
  LINNET_TRY(call.set("up", up));
  LINNET_TRY(call.set("out", product));
  LINNET_TRY(call.prepare());
  LINNET_TRY(ReadyOp::make(call, context, Device::cpu, &glu_));
  // The workspace of a product grows with its rows: that of all rows is enough for any share of them.
  std::vector<const ReadyOp*> all = {glu_.get()};
  for (const Product* each : {&gate_, &up_, &down_}) {
    for (const std::unique_ptr<ReadyOp>& ready : each->calls) all.push_back(ready.get());
  }
  for (const ReadyOp* ready : all) {
    *workspace = std::max(*workspace, ready->impl->workspace(ready->args(), Pass::forward, executor.workers()));
  }
  chosen_.resize(static_cast<size_t>(rows() * top_));
  chosen_weights_.resize(chosen_.size());
  choices_.resize(chosen_.size());
  begin_.resize(static_cast<size_t>(experts_) + 1);
  return {};
}

Status Experts::make_product(std::vector<const Weight*> list, const View& from, const View& to, const RunnerOptions& options,
                             const Context& context, Product* product) {
  for (const Weight* weight : list) {
    size_t form = 0;
    while (form < product->calls.size()) {
      const auto first = std::find(product->forms.begin(), product->forms.end(), static_cast<int>(form));
      if (held_alike(*list[static_cast<size_t>(first - product->forms.begin())], *weight)) break;
      ++form;
    }
    product->forms.push_back(static_cast<int>(form));
    if (form < product->calls.size()) continue;
    Call call(*find_op(weight->quantised ? "dense_quantised" : "dense"));
    LINNET_TRY(call.set("x", from));
    if (weight->quantised) {
      LINNET_TRY(set_packed(weight->packed, to.size[2], &call));
    } else {
      LINNET_TRY(call.set("weight", weight->view));
      LINNET_TRY(call.set_option("rounding", options.rounding));
    }
    LINNET_TRY(call.set("out", to));
    LINNET_TRY(call.prepare());
    product->calls.emplace_back();
    LINNET_TRY(ReadyOp::make(call, context, Device::cpu, &product->calls.back()));
  }
  product->weights = std::move(list);
  return {};
}

// The experts of every token, largest weight first, ties by number; then the choices in the order of the experts.
void Experts::choose(const Launch& launch) {
  each_row(launch, rows(), [this](int64_t row) {
    const char* own = row_of(weights, row);
    int32_t* chosen = chosen_.data() + row * top_;
    double* best = chosen_weights_.data() + row * top_;
    int64_t held = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      const double w = load_f64(own, weights.dtype, e);
      if (held == top_ && !(w > best[held - 1])) continue;
      int64_t at = held < top_ ? held++ : held - 1;
      for (; at > 0 && w > best[at - 1]; --at) {
        best[at] = best[at - 1];
        chosen[at] = chosen[at - 1];
      }
      best[at] = w;
      chosen[at] = static_cast<int32_t>(e);
    }
    if (!normalised_) return;
    double sum = 0;
    for (int64_t i = 0; i < top_; ++i) sum += best[i];
    for (int64_t i = 0; i < top_; ++i) best[i] /= sum;
  });
  std::fill(begin_.begin(), begin_.end(), 0);
  for (const int32_t expert : chosen_) ++begin_[static_cast<size_t>(expert) + 1];
  for (size_t e = 1; e < begin_.size(); ++e) begin_[e] += begin_[e - 1];
  // Each choice to its expert's next place; then the places are beginnings again.
  for (size_t i = 0; i < chosen_.size(); ++i) {
    const int64_t place = begin_[static_cast<size_t>(chosen_[i])]++;
    choices_[static_cast<size_t>(place)] = {static_cast<int64_t>(i) / top_, chosen_weights_[i]};
  }
  std::copy_backward(begin_.begin(), begin_.end() - 1, begin_.end());
  begin_[0] = 0;
}

void Experts::resize(View* view, int64_t count) const {
  view->size[single_ ? 0 : 1] = count;
  if (!single_) view->stride[0] = count * view->stride[1];
}

void Experts::multiply(const Product& product, size_t expert, int64_t count, const Launch& launch) const {
  const ReadyOp& call = *product.calls[static_cast<size_t>(product.forms[expert])];
  const Weight& weight = *product.weights[expert];
  resize(call.tensor("x"), count);
  resize(call.tensor("out"), count);
  if (weight.quantised) {
    *call.tensor("codes") = weight.packed.codes;
    *call.tensor("scale") = weight.packed.scale;
    *call.tensor("offset") = weight.packed.offset;
  } else {
    *call.tensor("weight") = weight.view;
  }
  call.run(launch);
}

void Experts::run(const Launch& launch) {
  const int64_t channels = x.size[2], bytes = channels * dtype_size(x.dtype);
  const Dtype acc = x.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const View sums = wide(x.dtype) ? out : View::dense(room_.sums, acc, {x.size[0], x.size[1], channels});
  choose(launch);
  each_row(launch, rows(),
           [&](int64_t row) { std::memset(row_of(sums, row), 0, static_cast<size_t>(channels * dtype_size(acc))); });
  for (size_t e = 0; e + 1 < begin_.size(); ++e) {
    const int64_t count = begin_[e + 1] - begin_[e];
    if (count == 0) continue;
    const Choice* choices = choices_.data() + begin_[e];
    each_row(launch, count,
             [&](int64_t i) { std::memcpy(room_.x + i * bytes, row_of(x, choices[i].row), static_cast<size_t>(bytes)); });
    multiply(gate_, e, count, launch);
    multiply(up_, e, count, launch);
    for (const char* name : {"gate", "up", "out"}) resize(glu_->tensor(name), count);
    glu_->run(launch);
    multiply(down_, e, count, launch);
    each_row(launch, count, [&](int64_t i) {
      const char* y = room_.y + i * bytes;
      char* to = row_of(sums, choices[i].row);
      if (acc == Dtype::f64) {
        add_times(reinterpret_cast<const double*>(y), choices[i].weight, channels, reinterpret_cast<double*>(to));
      } else if (wide(x.dtype)) {
        add_times(reinterpret_cast<const float*>(y), choices[i].weight, channels, reinterpret_cast<float*>(to));
      } else {
        auto* row = reinterpret_cast<float*>(to);
        for (int64_t c = 0; c < channels; ++c) row[c] += static_cast<float>(choices[i].weight * load_f64(y, x.dtype, c));
      }
    });
  }
  if (wide(x.dtype)) return;
  each_row(launch, rows(), [&](int64_t row) {
    const auto* from = reinterpret_cast<const float*>(row_of(sums, row));
    for (int64_t c = 0; c < channels; ++c) store_f64(row_of(out, row), x.dtype, c, static_cast<double>(from[c]));
  });
}

}  // namespace linnet::layers
