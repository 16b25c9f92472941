// machine: where and with what a number was measured.
#pragma once

#include <string>

namespace linnet::bench {

struct Machine {
  std::string cpu;     // model name
  int cores = 1;       // usable by this process
  std::string caches;  // "L1d 32 KiB, L2 1 MiB, L3 32 MiB": of one core, of the group that shares it
};
Machine this_machine();

// How much of the machine others use while this lives: numbers measured beside them are too low.
class OtherLoad {
 public:
  OtherLoad();
  // The part of all cores' time that went to other processes than this one and `child` (0: none).
  double share(int child = 0) const;

 private:
  double start_, busy_, own_;
};

std::string today();   // "2026-01-31"
std::string commit();  // of the sources of this build, "unknown" outside a checkout; "+" when files were changed

}  // namespace linnet::bench
