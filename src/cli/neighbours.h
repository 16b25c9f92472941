// neighbours: linnet bench --neighbours, the cases one step beside others.
#pragma once

#include <string>
#include <vector>

#include "bench/bench.h"
#include "cli/command.h"

namespace linnet::cli {

// Measures each case and its neighbours (bench/neighbours.h) and prints them, worst first; the exit code says whether any is
// less efficient by more than --limit.
int bench_neighbours(const Arguments& args, const std::vector<bench::Case>& bases, int threads, const bench::Settings& settings,
                     const std::string& heading);

}  // namespace linnet::cli
