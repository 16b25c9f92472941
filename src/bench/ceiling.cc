#include "bench/ceiling.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "bench/ceiling_loops.h"
#include "bench/timing.h"
#include "core/cuda/driver.h"

LINNET_USES_IMAGES(bench)

namespace linnet::bench {
namespace {

// Runs work(thread) on all threads at once; returns the seconds from the common start to the end of the last.
template <class Work>
double together(int threads, const Work& work) {
  std::atomic<int> ready{0};
  std::vector<double> start(static_cast<size_t>(threads)), end(static_cast<size_t>(threads));
  const auto one = [&](int thread) {
    work(thread, true);
    ready.fetch_add(1);
    while (ready.load(std::memory_order_acquire) < threads) {
    }
    start[static_cast<size_t>(thread)] = now();
    work(thread, false);
    end[static_cast<size_t>(thread)] = now();
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(one, thread);
  one(0);
  for (std::thread& other : others) other.join();
  return *std::max_element(end.begin(), end.end()) - *std::min_element(start.begin(), start.end());
}

}  // namespace

Status Ceilings::choose(const std::string& impl) {
  LINNET_TRY(isa_choice(&isa_));
  for (const Isa isa : kIsas) {
    if (impl.substr(0, impl.find('_')) == isa_name(isa)) isa_ = isa;
  }
  bf16_products_ = impl.ends_with("_bf16");
  return {};
}

double Ceilings::flops(Dtype dtype) {
  const int kind = dtype == Dtype::f64 ? 1 : dtype == Dtype::bf16 && bf16_products_ ? 2 : 0;
  double& best = best_flops_[static_cast<int>(isa_)][kind];
  // The first time more patiently: the clock rate has to settle.
  for (int i = 0, n = best == 0 ? 50 : 5; i < n; ++i) best = std::max(best, flops_once(kind));
  return best;
}

double Ceilings::flops_once(int kind) const {
  const CeilingLoops& kernels = ceiling_loops(isa_);
  const auto loop = kind == 2 ? kernels.multiply_add_bf16 : kind == 1 ? kernels.multiply_add_f64 : kernels.multiply_add_f32;
  constexpr int64_t kIterations = 4096;  // some 20 us: looking at the clock costs nothing
  std::vector<double> done(static_cast<size_t>(threads_));
  const double elapsed = together(threads_, [&](int thread, bool warm_up) {
    double operations = 0;
    for (const double end = now() + (warm_up ? 0.0002 : 0.002); now() < end;) operations += loop(kIterations);
    done[static_cast<size_t>(thread)] = operations;
  });
  return std::accumulate(done.begin(), done.end(), 0.0) / elapsed;
}

double Ceilings::bytes(int64_t working_set) {
  constexpr int64_t kGrain = 4096;  // parts of whole pages
  const int64_t part = std::max(std::min(working_set, kLargestUpdate) / threads_ / kGrain, int64_t{1}) * kGrain;
  if (memory_bytes_ < part * threads_) {
    memory_ = Memory();  // free the old one first
    memory_ = Memory(part * threads_);
    memory_bytes_ = part * threads_;
  }
  double best = 0;
  for (const double end = now() + 0.01; best == 0 || now() < end;) best = std::max(best, bytes_once(part));
  return best;
}

double Ceilings::bytes_once(int64_t part) {
  const auto loop = ceiling_loops(isa_).update_f32;
  const int64_t rounds = std::max<int64_t>((int64_t{1} << 20) / part, 1);
  std::vector<double> done(static_cast<size_t>(threads_));
  const double elapsed = together(threads_, [&](int thread, bool warm_up) {
    float* mine = static_cast<float*>(memory_.data()) + thread * (part / 4);
    double moved = 0;
    for (const double end = now() + (warm_up ? 0 : 0.002); moved == 0 || now() < end;) moved += loop(mine, part / 4, rounds);
    done[static_cast<size_t>(thread)] = moved;
  });
  return std::accumulate(done.begin(), done.end(), 0.0) / elapsed;
}

Status GpuCeilings::measure(Dtype dtype) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  void *from, *to;
  LINNET_TRY(cuda::allocate(kBytes, &from));
  const Status second = cuda::allocate(kBytes, &to);
  if (!second.ok()) return cuda::release(from), second;
  const char* error = nullptr;
  Launch launch;
  launch.error = &error;
  // 2^15 products 64 x 128 x 16 for each of 4 warps in f16, 2^18 multiply-adds for each of 256 threads in f32.
  const bool matrix = dtype != Dtype::f32;
  const int64_t blocks = int64_t{4} * cuda::multiprocessor_count();
  const double operations = static_cast<double>(blocks) * (matrix ? 2.0 * 64 * 128 * 16 * (1 << 15) : 2.0 * 256 * (1 << 18));
  const cuda::Kernel kernel = {"bench/ceiling_cuda", matrix ? "products" : "multiply_adds", matrix ? 128 : 256,
                               matrix ? 32768 : 0};
  for (int i = 0; i < 5; ++i) {
    cuda::Event start, middle, end;
    start.record();
    (void)cuda::copy_on_device(to, from, kBytes);
    middle.record();
    cuda::enqueue(launch, kernel, {blocks}, to);
    end.record();
    best_bytes_ = std::max(best_bytes_, 2.0 * kBytes / middle.seconds_since(start));
    double& best = best_flops_[matrix ? 1 : 0];
    best = std::max(best, operations / end.seconds_since(middle));
  }
  cuda::release(from);
  cuda::release(to);
  return error == nullptr ? Status() : impossible(std::string("bench: the GPU's ceilings: ") + error);
}

}  // namespace linnet::bench
