// What Hopper has beside older GPUs (machine.h, hopper.cc): the machine's side of it.
#pragma once

#include <string>

namespace linnet::emulate {

void begin_hopper_block();
void end_hopper_thread();    // of the thread that runs: nothing of its own may be under way
void end_hopper_block();     // nothing may be on its way into its shared memory
std::string hopper_waits();  // which barriers threads wait at, for the sentence about threads that wait for each other

}  // namespace linnet::emulate
