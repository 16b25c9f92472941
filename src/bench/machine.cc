#include "bench/machine.h"

#include <ctime>
#include <fstream>
#include <thread>

namespace linnet::bench {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32K" and "1024K" as the kernel writes them.
std::string cache_size(const std::string& text) {
  if (text.empty() || text.back() != 'K') return text;
  const long kib = std::strtol(text.c_str(), nullptr, 10);
  return kib >= 1024 && kib % 1024 == 0 ? std::to_string(kib / 1024) + " MiB" : std::to_string(kib) + " KiB";
}

}  // namespace

Machine this_machine() {
  Machine machine;
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line) && machine.cpu.empty();) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && (line.rfind("model name", 0) == 0 || line.rfind("Model", 0) == 0)) {
      machine.cpu = line.substr(colon + 2);
    }
  }
  if (machine.cpu.empty()) machine.cpu = "unknown CPU";
  const unsigned cores = std::thread::hardware_concurrency();
  machine.cores = cores == 0 ? 1 : static_cast<int>(cores);
  for (int i = 0; i < 8; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string level = first_line(folder + "level"), type = first_line(folder + "type");
    if (level.empty() || type == "Instruction") continue;
    machine.caches +=
        (machine.caches.empty() ? "L" : ", L") + level + (level == "1" ? "d " : " ") + cache_size(first_line(folder + "size"));
  }
  return machine;
}

std::string today() {
  const std::time_t time = std::time(nullptr);
  std::tm parts{};
  char text[32];
  gmtime_r(&time, &parts);
  std::strftime(text, sizeof text, "%Y-%m-%d", &parts);
  return text;
}

}  // namespace linnet::bench
