// A launch on the emulated GPU (machine.h).
#pragma once

#include "emulate/machine.h"

namespace linnet::emulate {

struct LaunchOf {
  const char* name;
  void (*call)(void** parameters);  // one thread of the kernel
  void (*touch)();                  // makes the image's thread-local variables, which are its shared memory
  void** parameters;
  Index grid, threads;
  int shared_bytes;
};
void run(const LaunchOf& launch);

}  // namespace linnet::emulate
