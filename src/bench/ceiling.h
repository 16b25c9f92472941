// Ceilings: what this machine can do at most, measured: fused multiply-adds on registers alone, and updates of memory in place
// (read, change, write back) at the size of the data that a case works on.
//
//   Ceilings ceilings(2);                                   // threads
//   LINNET_TRY(ceilings.choose("avx512"));                  // the instruction set of an implementation
//   double peak = ceilings.flops(Dtype::f32);               // FLOP/s
//   double rate = ceilings.bytes(64 << 20);                 // bytes/s read plus written, over 64 MiB shared by the threads
//
// Threads are started for each measurement and begin together; each has its own part of the memory. A measurement takes about
// 10 ms: the best of a few short ones, since all that can happen to a machine makes it slower.
#pragma once

#include <cstdint>
#include <string>

#include "bench/work.h"
#include "core/isa.h"

namespace linnet::bench {

inline constexpr int64_t kLargestUpdate = int64_t{256} << 20;  // larger sets are measured at this size

class Ceilings {
 public:
  explicit Ceilings(int threads) : threads_(threads) {}
  // The instruction set in whose terms to measure: that of the implementation's name, else the one a call would use now.
  Status choose(const std::string& impl);
  Isa isa() const { return isa_; }
  double flops(Dtype dtype);  // never less than in an earlier call
  double bytes(int64_t working_set);

 private:
  double flops_once(int kind) const;
  double bytes_once(int64_t part);

  int threads_;
  Isa isa_ = Isa::portable;
  bool bf16_products_ = false;    // the implementation multiplies bf16 pairs (its name ends in _bf16)
  double best_flops_[3][3] = {};  // [instruction set][f32, f64, bf16 pairs]
  Memory memory_;
  int64_t memory_bytes_ = 0;
};

// The same of the GPU: large copies (read plus written), and products on its matrix units (16-bit) or in f32.
class GpuCeilings {
 public:
  Status measure(Dtype dtype);  // again and again: the best counts
  double flops(Dtype dtype) const { return best_flops_[dtype == Dtype::f32 ? 0 : 1]; }
  double bytes() const { return best_bytes_; }

 private:
  double best_flops_[2] = {}, best_bytes_ = 0;
};

}  // namespace linnet::bench
