// The speed of the vector layer on one core of this machine, as the tables of docs/simd.md.
//
//   cmake --build build --target simd_bench && build/simd_bench
//
// Times are minima over rounds, so that what else runs on the machine counts little.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "bench/ceiling_loops.h"
#include "simd/simd.h"

namespace linnet {
namespace {

// Nanoseconds per call: the least over rounds of at least 50 us each, so that the clock counts for nothing.
template <class F>
double best_of(F f, int rounds = 400) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  int64_t calls = 1;
  for (int round = 0; round < rounds;) {
    const auto begin = Clock::now();
    for (int64_t i = 0; i < calls; ++i) f();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (seconds < 50e-6) {
      calls *= 2;
      continue;
    }
    best = std::min(best, seconds * 1e9 / static_cast<double>(calls));
    ++round;
  }
  return best;
}

struct Shape {
  int m, n, k;
};
const Shape kShapes[] = {{64, 64, 64}, {64, 128, 64}, {64, 64, 128}, {128, 128, 64},
                         {32, 64, 64}, {32, 32, 128}, {4, 64, 64},   {1, 64, 64}};

void bench_products(const std::vector<Isa>& isas) {
  std::vector<float> a(128 * 128, 0.5f), b(128 * 128, 0.25f), c(128 * 128);
  std::printf("\n| M x N x K |");
  for (const Isa isa : isas) std::printf(" %s, A as it lies | transposed |", isa_name(isa));
  if (simd_has_bf16_products()) std::printf(" bf16 pairs | transposed |");
  std::printf("\n|---|");
  for (size_t i = 0; i < 2 * (isas.size() + (simd_has_bf16_products() ? 1 : 0)); ++i) std::printf("---|");
  std::vector<double> peak;
  for (const Isa isa : isas) {
    peak.push_back(ceiling_loops(isa).multiply_add_f32(10000) /
                   best_of([&] { ceiling_loops(isa).multiply_add_f32(10000); }, 100));
  }
  std::printf("\n| peak, GFLOP/s |");
  for (const double p : peak) std::printf(" %.0f | |", p);
  double pair_peak = 0;
  if (simd_has_bf16_products()) {
    const auto work = ceiling_loops(Isa::avx512).multiply_add_bf16;
    pair_peak = work(10000) / best_of([&] { work(10000); }, 100);
    std::printf(" %.0f | |", pair_peak);
  }
  for (const Shape& s : kShapes) {
    std::printf("\n| %d x %d x %d |", s.m, s.n, s.k);
    const double flops = 2.0 * s.m * s.n * s.k;
    for (size_t i = 0; i < isas.size(); ++i) {
      for (const bool transposed : {false, true}) {
        const GemmCall<float> call{s.m,
                                   s.n,
                                   s.k,
                                   a.data(),
                                   transposed ? 1 : s.k,
                                   transposed ? s.m : 1,
                                   b.data(),
                                   s.n,
                                   c.data(),
                                   s.n,
                                   GemmEpilogue::store,
                                   1,
                                   nullptr,
                                   GemmBounds::full,
                                   0,
                                   false};
        const double rate = flops / best_of([&] { simd_table(isas[i]).gemm_f32(call); });
        std::printf(" %.0f (%.0f %%) |", rate, 100 * rate / peak[i]);
      }
    }
    if (const PairFunctions* pairs = simd_pairs()) {
      std::vector<uint32_t> pa(64 * 128, 0x3e803f00u), pb(64 * 128, 0x3e803f00u);
      for (const bool transposed : {false, true}) {
        const double rate = flops / best_of([&] {
                              pairs->gemm(s.m, s.n, s.k, pa.data(), transposed ? s.m : s.k / 2, transposed, pb.data(), s.n,
                                          c.data(), s.n, GemmEpilogue::store, GemmBounds::full);
                            });
        std::printf(" %.0f (%.0f %%) |", rate, 100 * rate / pair_peak);
      }
    }
  }
  std::printf("\n");
}

void bench_functions(const std::vector<Isa>& isas) {
  constexpr int kCount = 1024;
  std::vector<float> x(kCount), y(kCount);
  std::vector<double> xd(kCount), yd(kCount);
  std::printf("\n| elements/ns |");
  for (const Isa isa : isas) std::printf(" %s f32 | f64 |", isa_name(isa));
  std::printf("\n|---|");
  for (size_t i = 0; i < 2 * isas.size(); ++i) std::printf("---|");
  for (int f = 0; std::string(simd_table(Isa::portable).functions[f].name) != "round"; ++f) {
    const std::string name = simd_table(Isa::portable).functions[f].name;
    const float sign = name.rfind("log", 0) == 0 ? 1.0f : -1.0f;
    for (int i = 0; i < kCount; ++i) xd[i] = x[i] = sign * (static_cast<float>(i) * 0.0078f + 0.01f);
    std::printf("\n| %s |", name.c_str());
    for (const Isa isa : isas) {
      const VectorFunction& function = simd_table(isa).functions[f];
      std::printf(" %.1f |", kCount / best_of([&] { function.f32(x.data(), y.data(), kCount); }));
      std::printf(" %.2f |", kCount / best_of([&] { function.f64(xd.data(), yd.data(), kCount); }));
    }
  }
  std::printf("\n");
}

template <class T, class S>
void bench_tile(const char* name, const std::vector<Isa>& isas, TileFunctions<T, S> SimdTable::*member) {
  constexpr int kRows = 64, kStride = 72;  // no power of two: rows do not collide in L1
  std::vector<S> s(kRows * kStride, round_to<S>(0.5));
  std::vector<T> t(kRows * kStride, T(0.5));
  std::printf("\n| %s |", name);
  for (const Isa isa : isas) {
    const TileFunctions<T, S>& f = simd_table(isa).*member;
    const double count = kRows * 64;
    std::printf(" %.0f |", count / best_of([&] { f.load(s.data(), kStride, kRows, 64, t.data(), kStride, 1); }));
    std::printf(" %.0f |", count / best_of([&] { f.load_transposed(s.data(), kStride, kRows, 64, t.data(), kStride, 1); }));
    std::printf(" %.0f |", count / best_of([&] { f.store(t.data(), kStride, kRows, 64, s.data(), kStride, nullptr); }));
    std::printf(" %.0f |",
                count / best_of([&] { f.store_transposed(t.data(), kStride, kRows, 64, s.data(), kStride, nullptr); }));
  }
}

void bench_tiles(const std::vector<Isa>& isas) {
  std::printf("\n| 64 x 64, elements/ns |");
  for (const Isa isa : isas) std::printf(" %s load | transposed | store | transposed |", isa_name(isa));
  std::printf("\n|---|");
  for (size_t i = 0; i < 4 * isas.size(); ++i) std::printf("---|");
  bench_tile("f32", isas, &SimdTable::tile_f32);
  bench_tile("bf16", isas, &SimdTable::tile_bf16);
  bench_tile("f16", isas, &SimdTable::tile_f16);
  bench_tile("f64", isas, &SimdTable::tile_f64);
  std::printf("\n");
}

void bench_update(Isa isa) {
  std::printf("\n| update in place, %s |", isa_name(isa));
  const int64_t sizes[] = {16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 128 << 20};
  for (const int64_t bytes : sizes) {
    std::vector<float> x(static_cast<size_t>(bytes / 4), 1.0f);
    const double moved = ceiling_loops(isa).update_f32(x.data(), bytes / 4, 1);
    const double ns = best_of([&] { ceiling_loops(isa).update_f32(x.data(), bytes / 4, 1); }, bytes > (8 << 20) ? 10 : 100);
    std::printf(" %lld KB: %.0f GB/s |", static_cast<long long>(bytes >> 10), moved / ns);
  }
  std::printf("\n");
}

}  // namespace
}  // namespace linnet

int main() {
  using namespace linnet;
  std::vector<Isa> isas;
  for (auto isa = std::rbegin(kIsas); isa != std::rend(kIsas); ++isa)
    if (*isa_missing(*isa) == '\0') isas.push_back(*isa);
  bench_products(isas);
  bench_functions(isas);
  bench_tiles(isas);
  bench_update(isas.front());
  return 0;
}
