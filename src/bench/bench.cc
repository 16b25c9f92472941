#include "bench/bench.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "bench/work.h"
#include "core/cuda/driver.h"
#include "core/files/json.h"

namespace linnet::bench {
namespace {

// Idle workers of an OpenMP region spin for a while and would take our cores; so would ours take the peer's.
constexpr int kPauseMicroseconds = 40000;
constexpr double kReferenceFlops = 3e8;  // what the reference does in less than a second

// The case as the peers' side reads it (src/bench/peers.py).
std::string peer_json(const Work& work, bool on_gpu) {
  const Case& c = work.what();
  JsonWriter writer;
  writer.begin_object().member("op", c.op->name).member("dtype", dtype_name(c.dtype));
  writer.member("pass", c.backward ? "fwd+bwd" : "fwd").member("device", on_gpu ? "cuda" : "cpu").key("letters").begin_object();
  for (const auto& [name, value] : work.letters()) writer.member(name, value);
  writer.end_object().key("other").begin_array();
  for (const std::string& name : c.other) writer.value(name);
  writer.end_array().key("lengths").begin_object();
  for (const auto& [name, value] : c.counts) writer.member(name, value);
  writer.end_object().key("options").begin_object();
  for (const OptionDecl& option : c.op->options) writer.member(option.name, option_text(option, work.call().args()));
  return writer.end_object().end_object().text();
}

}  // namespace

Bench::Bench(int threads, const Settings& settings) : settings_(settings), pool_(threads), ceilings_(threads) {}

Context Bench::context() {
  Context context;
  context.executor = &pool_;
  context.impl = settings_.impl.empty() ? nullptr : settings_.impl.c_str();
  return context;
}

Status Bench::measure_error(const Case& c, Result* result) {
  Case measured = c;
  std::unique_ptr<Work> work, reference;
  if (result->flops <= kReferenceFlops) {
    LINNET_TRY(Work::make(c, context(), &work, settings_.device));
  } else {
    for (int64_t longest = 1024; longest >= 16; longest /= 2) {
      measured = shortened(c, longest);
      LINNET_TRY(Work::make(measured, context(), &work, settings_.device));
      if (work->forward_cost().flops + work->backward_cost().flops <= kReferenceFlops) break;
    }
  }
  Case in_double = measured;
  in_double.dtype = Dtype::f64;
  Context plain = context();
  plain.impl = "ref";
  LINNET_TRY(Work::make(in_double, plain, &reference));
  reference->take_inputs(*work);
  LINNET_TRY(work->run());
  if (settings_.device == Device::cuda) LINNET_TRY(work->fetch_results());
  LINNET_TRY(reference->run());
  result->error = work->error(*reference);
  if (measured.line() != c.line()) result->error_case = measured.line();
  return {};
}

// Calls enqueued one behind the other, a moment taken between them: what the GPU took for each. A moment holds the GPU up for
// some microseconds, so short calls share one.
Status Bench::sample_gpu(double seconds, Work* work, std::vector<double>* samples) const {
  constexpr int kBatch = 20, kMostCalls = 16;
  constexpr double kApart = 1e-4;
  const auto batch = [work](int calls, std::vector<double>* times) -> Status {
    cuda::Event moments[kBatch + 1];
    moments[0].record();
    for (int i = 0; i < kBatch; ++i) {
      for (int call = 0; call < calls; ++call) LINNET_TRY(work->run());
      moments[i + 1].record();
    }
    for (int i = 1; i < kBatch; ++i) {  // the first waits for us
      times->push_back(moments[i + 1].seconds_since(moments[i]) / calls);
    }
    return {};
  };
  LINNET_TRY(cuda::synchronize());
  std::vector<double> first;
  LINNET_TRY(batch(1, &first));
  const double shortest = *std::min_element(first.begin(), first.end());
  const int calls = shortest * kMostCalls < kApart ? kMostCalls : static_cast<int>(kApart / shortest) + 1;
  for (const double end = now() + seconds; now() < end;) LINNET_TRY(batch(calls, samples));
  return cuda::synchronize();
}

Status Bench::measure(const Case& c, Result* result) {
  result->what = c;
  std::vector<double> ours, theirs;
  {
    std::unique_ptr<Work> work;
    const bool on_gpu = settings_.device == Device::cuda;
    LINNET_TRY(Work::make(c, context(), &work, settings_.device));
    result->impl = work->impl();
    result->flops = work->forward_cost().flops + work->backward_cost().flops;
    result->bytes = work->forward_cost().bytes + work->backward_cost().bytes;
    result->tensor_bytes = work->tensor_bytes();
    result->workspace_bytes = work->workspace_bytes();
    LINNET_TRY(ceilings_.choose(result->impl));
    if (settings_.peer != nullptr) LINNET_TRY(settings_.peer->open(peer_json(*work, on_gpu), &result->peer_name));
    LINNET_TRY(work->run());  // checks the call, touches the caches
    for (int round = 0; round < settings_.rounds; ++round) {
      const double slice = settings_.seconds / settings_.rounds;
      if (!result->peer_name.empty()) {
        LINNET_TRY(settings_.peer->round(slice, &theirs));
        usleep(kPauseMicroseconds);
      }
      if (on_gpu) {
        LINNET_TRY(gpu_.measure(c.dtype));
        result->fma_ceiling = gpu_.flops(c.dtype);
        result->update_ceiling = gpu_.bytes();
        LINNET_TRY(work->run());
        LINNET_TRY(sample_gpu(slice, work.get(), &ours));
        continue;
      }
      result->fma_ceiling = ceilings_.flops(c.dtype);
      result->update_ceiling = std::max(result->update_ceiling, ceilings_.bytes(result->tensor_bytes));
      LINNET_TRY(work->run());
      sample(slice, &ours, [&] { (void)work->run(); });
    }
    const auto least = [&](const Cost& cost, bool* memory) {
      const double fma = cost.flops / result->fma_ceiling, move = cost.bytes / result->update_ceiling;
      *memory = move > fma;
      return std::max(fma, move);
    };
    bool unused;
    result->ours = spread(std::move(ours));
    const double bound = least(work->forward_cost(), &result->memory_bound) + least(work->backward_cost(), &unused);
    result->share = bound / result->ours.median;
  }
  if (!result->peer_name.empty()) {
    result->peer = spread(std::move(theirs));
    result->ratio = result->peer.median / result->ours.median;
  }
  return settings_.error ? measure_error(c, result) : Status();
}

}  // namespace linnet::bench
