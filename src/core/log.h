// What the library has to say beside its results: a call that runs, but on slow kernels, says so once and why. The library
// prints nothing: sentences go to the hook that a program sets, and nowhere without one. `linnet` sets one that prints where
// LINNET_LOG=1, the Python package one that warns.
//
//   set_log_hook([](const char* sentence, void*) { std::fprintf(stderr, "%s\n", sentence); }, nullptr);
#pragma once

#include <string>

#include "core/op.h"

namespace linnet {

// Called with whole sentences, from any thread. Null: silence.
using LogHook = void (*)(const char* sentence, void* user);
void set_log_hook(LogHook hook, void* user);

// Says once for each operator, row and pass that this prepared call runs on a slow row, and why the better ones refuse it.
void log_slow(const Op& op, const Impl& row, Pass pass, const void* args, const void* out);
// Says a sentence once.
void log_once(const std::string& sentence);

}  // namespace linnet
