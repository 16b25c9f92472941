#include "compare/compare.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "bench/machine.h"
#include "bench/work.h"
#include "compare/binding.h"
#include "core/call/call.h"
#include "core/executor.h"

namespace linnet::compare {
namespace {

constexpr int64_t kFarLength = int64_t{1} << 17;  // where the growth of the cost is read off

// One tensor of a call, with memory of its own.
struct Tensor {
  View view;
  bench::Memory memory;
  Tensor() = default;
  Tensor(const View& shape, Dtype dtype) : view(View::dense(nullptr, dtype, shape.size, shape.rank)) {
    memory = bench::Memory(view.elements() * dtype_size(dtype));
    view.data = memory.data();
  }
};

// q, k, v of one length, a place for the output, and a workspace: all variants share them. Of grouped heads there is a second
// k and v with every head repeated, for operators that take as many key heads as query heads.
struct Tensors {
  Tensor q, k, v, repeated_k, repeated_v, out;
  bench::Memory workspace;
  int64_t workspace_bytes = 0;

  Tensors(const Input& in, Dtype dtype)
      : q(shape_of({in.B, in.T, in.H, in.K}), dtype),
        k(shape_of({in.B, in.T, in.Hkv, in.K}), dtype),
        v(shape_of({in.B, in.T, in.Hkv, in.V}), dtype),
        out(shape_of({in.B, in.T, in.H, in.V}), dtype) {
    if (in.H == in.Hkv) return;
    repeated_k = Tensor(shape_of({in.B, in.T, in.H, in.K}), dtype);
    repeated_v = Tensor(shape_of({in.B, in.T, in.H, in.V}), dtype);
  }
  void load(const Layer& layer) {
    bench::write_values(q.view, 0, q.view.elements(), layer.q.data());
    bench::write_values(k.view, 0, k.view.elements(), layer.k.data());
    bench::write_values(v.view, 0, v.view.elements(), layer.v.data());
    if (repeated_k.view.given()) repeat(layer.k, k.view.size[2], repeated_k.view);
    if (repeated_v.view.given()) repeat(layer.v, v.view.size[2], repeated_v.view);
  }
  Sources sources(bool repeated) const {
    return {q.view, repeated ? repeated_k.view : k.view, repeated ? repeated_v.view : v.view};
  }
  std::vector<double> output() const {
    std::vector<double> values(static_cast<size_t>(out.view.elements()));
    bench::read_values(out.view, 0, out.view.elements(), values.data());
    return values;
  }

 private:
  static View shape_of(std::initializer_list<int64_t> sizes) { return View::dense(nullptr, Dtype::f64, sizes); }
  static void repeat(const std::vector<double>& values, int64_t heads, const View& to) {
    const int64_t width = to.size[3], all = to.size[2];
    for (int64_t row = 0; row < to.size[0] * to.size[1] * all; ++row) {  // query head h reads key head h / (H / Hkv)
      const int64_t from = row / all * heads + row % all / (all / heads);
      bench::write_values(to, row * width, width, values.data() + from * width);
    }
  }
};

// A variant bound to tensors.
class Attention {
 public:
  static Status make(const Op& op, const std::string& words, bool causal, bool repeated, const Context& context,
                     Tensors* tensors, std::unique_ptr<Attention>* attention) {
    attention->reset(new Attention(op, words, context, tensors));
    return (*attention)->prepare(causal, repeated);
  }
  void load() { binding_.fill(); }  // what is made from q, k and v
  Status run() {
    context_.workspace = tensors_->workspace.data();
    return call_.run(Pass::forward, context_);
  }
  double flops() const {
    return call_.op().cost == nullptr ? 0 : call_.op().cost(call_.prepared_args(), call_.dims(), Pass::forward).flops;
  }
  int64_t workspace_bytes() const { return context_.workspace_bytes; }

 private:
  Attention(const Op& op, const std::string& words, const Context& context, Tensors* tensors)
      : binding_(op, words), call_(op), context_(context), tensors_(tensors) {}
  Status prepare(bool causal, bool repeated) {
    Dims dims;
    LINNET_TRY(binding_.bind(tensors_->sources(repeated), causal, false, &call_, &dims));
    LINNET_TRY(call_.prepare());
    View out;
    LINNET_TRY(call_.output_view("out", &out));
    out.data = tensors_->out.view.data;  // [B, T, H, V] or [B, T, H V]
    LINNET_TRY(call_.set("out", out));
    LINNET_TRY(call_.workspace(Pass::forward, context_, &context_.workspace_bytes));
    if (tensors_->workspace_bytes < context_.workspace_bytes) {
      tensors_->workspace = bench::Memory(context_.workspace_bytes);
      tensors_->workspace_bytes = context_.workspace_bytes;
    }
    binding_.fill();
    return {};
  }

  Binding binding_;
  Call call_;
  Context context_;
  Tensors* tensors_;
};

// What the declaration says of a length, without tensors of that length.
Sources pretended_sources(const Input& in, int64_t B, int64_t T, Dtype dtype) {
  const int64_t q[] = {B, T, in.H, in.K}, k[] = {B, T, in.Hkv, in.K}, v[] = {B, T, in.Hkv, in.V};
  return {pretended(dtype, q, 4), pretended(dtype, k, 4), pretended(dtype, v, 4)};
}

// Operations of a call at the input's width and some length.
Status flops_at(const Op& op, const std::string& words, const Input& in, bool causal, Dtype dtype, int64_t T, double* flops) {
  Call call(op);
  Dims dims;
  LINNET_TRY(Binding(op, words).bind(pretended_sources(in, in.B, T, dtype), causal, true, &call, &dims));
  LINNET_TRY(call.prepare());
  *flops = op.cost == nullptr ? 0 : op.cost(call.prepared_args(), call.dims(), Pass::forward).flops;
  return {};
}

// Bytes of the state with which the variant continues one sequence of T tokens: the tensors its decode operator overwrites, of
// the optional ones as few as it accepts. -1 when it has no such operator or that one lacks an option of the variant.
int64_t state_bytes(const Op& op, const std::string& words, const Input& in, Dtype dtype, int64_t T) {
  const Op* decode = op.decode.empty() ? nullptr : find_op(op.decode);
  if (decode == nullptr) return -1;
  Call call(*decode);
  Dims dims;
  Binding binding(*decode, words);
  if (!binding.bind(pretended_sources(in, 1, 1, dtype), true, true, &call, &dims).ok()) return -1;
  binding.show_state(T, &dims);
  std::vector<std::vector<int64_t>> zeros;  // values of index tensors
  double bytes = 0;
  const auto give = [&](const TensorDecl& decl) {
    int64_t sizes[kMaxRank];
    int rank = 0;
    for (const std::string_view word : words_of(decl.shape)) {
      if (!evaluate(word, *decode, call.args(), dims, &sizes[rank])) {  // the letter that only the state shows is its room
        dims.set(word, T, decl.name);
        sizes[rank] = T;
      }
      ++rank;
    }
    const bool index = decl.element == Element::index;
    const Dtype type = index ? Dtype::i64 : decl.element == Element::acc && dtype != Dtype::f64 ? Dtype::f32 : dtype;
    View view = pretended(type, sizes, rank);
    if (index) view.data = zeros.emplace_back(static_cast<size_t>(view.elements())).data();
    if (!index) bytes += static_cast<double>(view.elements() * dtype_size(type));
    (void)call.set(decl.name, view);
  };
  for (const TensorDecl& decl : decode->inputs) {
    if (decl.mutated && !decl.optional) give(decl);
  }
  for (const TensorDecl& decl : decode->inputs) {
    if (call.prepare().ok()) break;
    if (decl.mutated && decl.optional) give(decl);
  }
  return call.prepare().ok() ? static_cast<int64_t>(bytes) : -1;
}

// Sums over tokens and channels of one head.
struct HeadError {
  double squares = 0, errors = 0, cosines = 0;
  double relative() const {
    return errors == 0 ? 0 : std::sqrt(errors / squares);
  }  // of a head that gives nothing: 0 or infinite
};

std::vector<HeadError> head_errors(const Input& in, const std::vector<double>& got, const std::vector<double>& exact) {
  std::vector<HeadError> heads(static_cast<size_t>(in.H));
  for (int64_t row = 0; row < in.B * in.T; ++row) {
    for (int64_t h = 0; h < in.H; ++h) {
      const double* g = got.data() + (row * in.H + h) * in.V;
      const double* e = exact.data() + (row * in.H + h) * in.V;
      double gg = 0, ee = 0, ge = 0, dd = 0;
      for (int64_t c = 0; c < in.V; ++c) {
        gg += g[c] * g[c];
        ee += e[c] * e[c];
        ge += g[c] * e[c];
        dd += (g[c] - e[c]) * (g[c] - e[c]);
      }
      HeadError& head = heads[static_cast<size_t>(h)];
      head.squares += ee;
      head.errors += dd;
      head.cosines += gg > 0 && ee > 0 ? ge / std::sqrt(gg * ee) : gg == ee ? 1 : 0;
    }
  }
  return heads;
}

// The plain average of the values that a token sees, [B, T, H, V].
std::vector<double> averages(const Input& in, const Layer& layer, bool causal) {
  std::vector<double> out(static_cast<size_t>(in.B * in.T * in.H * in.V));
  for (int64_t b = 0; b < in.B; ++b) {
    for (int64_t h = 0; h < in.H; ++h) {
      for (int64_t c = 0; c < in.V; ++c) {
        const double* v = layer.v.data() + (b * in.T * in.Hkv + h / (in.H / in.Hkv)) * in.V + c;
        double* o = out.data() + (b * in.T * in.H + h) * in.V + c;
        double sum = 0;
        for (int64_t t = 0; t < in.T; ++t) {
          sum += v[t * in.Hkv * in.V];
          o[t * in.H * in.V] = sum / static_cast<double>(t + 1);
        }
        if (causal) continue;
        for (int64_t t = 0; t < in.T; ++t) o[t * in.H * in.V] = sum / static_cast<double>(in.T);
      }
    }
  }
  return out;
}

Status measure_errors(const Comparison& c, const std::vector<std::vector<double>>& exact, Tensors* tensors,
                      Attention* attention, VariantResult* result) {
  HeadError all;
  for (size_t l = 0; l < c.input.layers.size(); ++l) {
    tensors->load(c.input.layers[l]);
    attention->load();
    LINNET_TRY(attention->run());
    result->head_errors.emplace_back();
    for (const HeadError& head : head_errors(c.input, tensors->output(), exact[l])) {
      result->head_errors.back().push_back(head.relative());
      all.squares += head.squares;
      all.errors += head.errors;
      all.cosines += head.cosines;
    }
  }
  result->error = all.relative();
  result->cosine =
      all.cosines / static_cast<double>(c.input.B * c.input.T * c.input.H) / static_cast<double>(c.input.layers.size());
  return {};
}

}  // namespace

std::string growth_text(double exponent) {
  if (exponent < 0.05) return "constant";
  const double rounded = std::round(exponent * 10) / 10;
  if (rounded == 1) return "T";
  char text[32];
  std::snprintf(text, sizeof text, "T^%g", rounded);
  return text;
}

Status compare(Input input, const Settings& settings, Comparison* result) {
  const bench::OtherLoad others;
  // Every mechanism's own default is K^-0.5: another scale goes into the queries.
  const double factor = input.scale * std::sqrt(static_cast<double>(input.K));
  for (Layer& layer : input.layers) {
    for (double& x : layer.q) x *= factor;
  }
  result->input = std::move(input);
  result->settings = settings;
  const Input& in = result->input;
  ThreadPool pool(settings.threads);
  Context context;
  context.executor = &pool;

  // Exact attention in double, without and with the causal mask: what every output is compared with.
  std::vector<std::vector<double>> exact[2];
  for (const bool causal : {false, true}) {
    HeadError average;
    Tensors tensors(in, Dtype::f64);
    std::unique_ptr<Attention> attention;
    LINNET_TRY(Attention::make(*find_op("softmax"), "", causal, false, context, &tensors, &attention));
    for (const Layer& layer : in.layers) {
      tensors.load(layer);
      LINNET_TRY(attention->run());
      exact[causal].push_back(tensors.output());
      for (const HeadError& head : head_errors(in, averages(in, layer, causal), exact[causal].back())) {
        average.errors += head.errors;
        average.squares += head.squares;
      }
    }
    if (average.squares == 0) {
      return bad_input("compare: " + in.source + ": exact attention gives 0 everywhere, there is nothing to compare with");
    }
    if (causal == in.causal) result->average_error = average.relative();
  }

  Input repeated = in;  // its sizes, for operators without grouped heads
  repeated.Hkv = in.H;
  for (const Op* op : all_ops()) {
    for (const Variant& variant : op->variants) {
      const std::string name = op->name + (variant.name.empty() ? "" : " " + variant.name);
      const Binding binding(*op, variant.options);
      if (in.causal && variant.options == "causal=1") continue;  // the input is: the row before says it
      VariantResult v;
      v.op = op;
      v.variant = variant.name;
      v.name = name;
      v.options = variant.options;
      v.causal = binding.causal(in.causal);
      double near = 0, far = 0;
      Status refused = flops_at(*op, variant.options, in, v.causal, settings.dtype, kFarLength, &near);
      v.repeated_heads = !refused.ok() && in.Hkv != in.H;
      const Input& taken = v.repeated_heads ? repeated : in;
      if (v.repeated_heads) refused = flops_at(*op, variant.options, taken, v.causal, settings.dtype, kFarLength, &near);
      if (!refused.ok()) {
        const std::string& reason = refused.message();  // "monarch: steps is 3, expected 1 when causal"
        result->left_out.push_back(name + reason.substr(reason.find(':')));
        continue;
      }
      LINNET_TRY(flops_at(*op, variant.options, taken, v.causal, settings.dtype, 2 * kFarLength, &far));
      v.exponent = near > 0 ? std::log2(far / near) : 0;
      v.state_bytes = state_bytes(*op, variant.options, taken, settings.dtype, in.T);
      v.state_grows = state_bytes(*op, variant.options, taken, settings.dtype, 2 * in.T) != v.state_bytes;
      const Impl* impl;
      LINNET_TRY(choose_impl(*op, Pass::forward, context, &impl));
      v.impl = impl->name;
      result->variants.push_back(std::move(v));
    }
  }

  // Those that see as much as the model did come first.
  std::stable_partition(result->variants.begin(), result->variants.end(),
                        [&](const VariantResult& v) { return v.causal == in.causal; });

  for (int64_t T = in.T; T <= std::max(settings.longest_length, in.T); T *= 2) result->lengths.push_back(T);
  const int64_t steps = static_cast<int64_t>(result->lengths.size() * result->variants.size());
  int64_t done = 0;
  for (const int64_t T : result->lengths) {
    const bool first = T == in.T;
    Input longer = in;
    if (!first) {
      longer.layers.resize(1);
      set_length(T, &longer);
    }
    Tensors tensors(longer, settings.dtype);
    tensors.load(longer.layers[0]);
    std::vector<std::unique_ptr<Attention>> ready(result->variants.size());
    std::vector<std::vector<double>> samples(result->variants.size());
    for (size_t i = 0; i < result->variants.size(); ++i, ++done) {
      if (settings.progress) settings.progress(done, steps);
      VariantResult& v = result->variants[i];
      // A call that would take too long, by the two lengths before (or the square, when there was one), is left out.
      if (!first && v.times.empty()) continue;
      if (!first) {
        const size_t n = v.times.size();
        const double growth = n < 2 ? 4 : v.times[n - 1].second / v.times[n - 2].second;
        if (v.times.back().first * 2 != T || v.times.back().second * growth > settings.longest_seconds) continue;
      }
      LINNET_TRY(Attention::make(*v.op, v.options, v.causal, v.repeated_heads, context, &tensors, &ready[i]));
      if (first) {
        LINNET_TRY(measure_errors(*result, exact[v.causal], &tensors, ready[i].get(), &v));
        v.flops = ready[i]->flops();
        v.workspace_bytes = ready[i]->workspace_bytes();
      } else {
        LINNET_TRY(ready[i]->run());
      }
    }
    // In rounds, so that a disturbance of the machine meets all alike.
    constexpr int kRounds = 3;
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ready.size(); ++i) {
        if (ready[i] == nullptr) continue;
        (void)ready[i]->run();
        bench::sample(settings.seconds / kRounds, &samples[i], [&] { (void)ready[i]->run(); });
      }
    }
    for (size_t i = 0; i < ready.size(); ++i) {
      if (ready[i] == nullptr) continue;
      const bench::Spread spread = bench::spread(samples[i]);
      result->variants[i].times.emplace_back(T, spread.median);
      if (first) result->variants[i].time = spread;
    }
  }
  // Lengths that nobody reached in time are not told.
  const auto reached = [&](int64_t T) {
    return std::any_of(result->variants.begin(), result->variants.end(),
                       [&](const VariantResult& v) { return v.times.back().first == T; });
  };
  while (!reached(result->lengths.back())) result->lengths.pop_back();
  result->other_load = others.share();
  return {};
}

}  // namespace linnet::compare
