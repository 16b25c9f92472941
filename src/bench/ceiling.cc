#include "bench/ceiling.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "bench/timing.h"
#include "simd/ceiling.h"

namespace linnet::bench {
namespace {

struct Kernels {
  int64_t (*fma_f32)(int64_t steps, float* sink);
  int64_t (*fma_f64)(int64_t steps, double* sink);
  void (*update)(float* x, int64_t count);
};

Kernels kernels(Isa isa) {
#if defined(LINNET_HAS_avx512)
  if (isa == Isa::avx512) return {avx512::fma_loop_f32, avx512::fma_loop_f64, avx512::update_loop};
  if (isa == Isa::avx2) return {avx2::fma_loop_f32, avx2::fma_loop_f64, avx2::update_loop};
#else
  (void)isa;
#endif
  return {portable::fma_loop_f32, portable::fma_loop_f64, portable::update_loop};
}

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
  return {};
}

double Ceilings::flops(Dtype dtype, double seconds) const {
  const Kernels kernel = kernels(isa_);
  std::atomic<int64_t> done{0};
  constexpr int64_t kSteps = 4096;  // some 10 us
  const double elapsed = together(threads_, [&](int, bool warm_up) {
    float sink_f32 = 1;
    double sink_f64 = 1;
    int64_t operations = 0;
    for (const double end = now() + (warm_up ? seconds / 5 : seconds); now() < end;) {
      operations += dtype == Dtype::f64 ? kernel.fma_f64(kSteps, &sink_f64) : kernel.fma_f32(kSteps, &sink_f32);
    }
    if (!warm_up) done += operations;
  });
  return static_cast<double>(done.load()) / elapsed;
}

double Ceilings::bytes(int64_t working_set, double seconds) {
  const Kernels kernel = kernels(isa_);
  constexpr int64_t kGrain = 4096;  // parts of whole pages
  const int64_t part = std::max(std::min(working_set, kLargestUpdate) / threads_ / kGrain, int64_t{1}) * kGrain;
  if (memory_bytes_ < part * threads_) {
    memory_ = Memory();  // free the old one first
    memory_ = Memory(part * threads_);
    memory_bytes_ = part * threads_;
  }
  const int64_t repeat = std::max<int64_t>((int64_t{1} << 20) / part, 1);  // so that looking at the clock costs nothing
  std::atomic<int64_t> passes{0};
  const double elapsed = together(threads_, [&](int thread, bool warm_up) {
    float* mine = static_cast<float*>(memory_.data()) + thread * (part / 4);
    int64_t count = 0;
    for (const double end = now() + (warm_up ? 0 : seconds); count == 0 || now() < end; count += repeat) {
      for (int64_t i = 0; i < repeat; ++i) kernel.update(mine, part / 4);
    }
    if (!warm_up) passes += count;
  });
  return 2 * static_cast<double>(part) * static_cast<double>(passes.load()) / elapsed;
}

}  // namespace linnet::bench
