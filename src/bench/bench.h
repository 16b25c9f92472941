// bench: measures cases, with the machine's ceilings and the peers in the same rounds.
#pragma once

#include <cmath>
#include <memory>
#include <string>

#include "bench/cases.h"
#include "bench/ceiling.h"
#include "bench/peer.h"
#include "bench/timing.h"
#include "bench/work.h"
#include "core/executor.h"

namespace linnet::bench {

struct Result {
  Case what;
  std::string impl;
  Spread ours, peer;
  std::string peer_name;  // empty: none
  double ratio = 0;       // of the medians, peer / ours; 0 without a peer
  double flops = 0, bytes = 0;
  int64_t tensor_bytes = 0, workspace_bytes = 0;
  double fma_ceiling = 0, update_ceiling = 0;  // FLOP/s, the best of the run so far; bytes/s, the best of this case's rounds
  double share = 0;                            // of the nearer ceiling: the least time it allows / the median
  bool memory_bound = false;                   // which one is nearer
  double error = NAN;                          // against the reference in double, on the same inputs; NaN: not measured
  std::string error_case;  // where that was measured, when the case itself would take the reference too long
};

struct Settings {
  double seconds = 1;  // of our calls per case, about; the peer gets as much
  int rounds = 5;
  std::string impl;  // empty: the best
  Device device = Device::cpu;
  bool error = true;  // measured too
  Peer* peer = nullptr;
};

class Bench {
 public:
  Bench(int threads, const Settings& settings);
  Status measure(const Case& c, Result* result);

 private:
  Status measure_error(const Case& c, Result* result);
  Status sample_gpu(double seconds, Work* work, std::vector<double>* samples) const;
  Context context();

  Settings settings_;
  ThreadPool pool_;
  Ceilings ceilings_;
  GpuCeilings gpu_;
};

}  // namespace linnet::bench
