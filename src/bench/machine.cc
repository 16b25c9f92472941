#include "bench/machine.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>

#include "bench/timing.h"

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

// Seconds that all cores were busy since the machine started, those taken by other guests of its host included.
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  file >> word;
  double busy = 0;
  for (int field = 0; field < 8; ++field) {  // user nice system idle iowait irq softirq steal
    double ticks = 0;
    file >> ticks;
    if (field != 3 && field != 4) busy += ticks;
  }
  return busy / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double process_seconds(int process) {
  std::string line = first_line("/proc/" + std::to_string(process) + "/stat");
  std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 1)));  // a name may hold spaces
  std::string word;
  double ticks = 0, total = 0;
  for (int field = 3; field <= 15 && fields >> word; ++field) {
    if (field >= 14 && std::istringstream(word) >> ticks) total += ticks;  // utime, stime
  }
  return total / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

OtherLoad::OtherLoad() : start_(now()), busy_(busy_seconds()), own_(own_seconds()) {}

double OtherLoad::share(int child) const {
  const double mine = own_seconds() - own_ + (child > 0 ? process_seconds(child) : 0);
  const double all = (now() - start_) * static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
  return all > 0 ? std::clamp((busy_seconds() - busy_ - mine) / all, 0.0, 1.0) : 0;
}

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
