// runs: the folders that `linnet train` writes, as one page: curves, tables, and what a state of so many bytes recalls.
//
//   std::vector<TrainingRun> runs(1);
//   LINNET_TRY(read_run("runs/mqar-gated_deltanet", &runs[0]));
//   write_file("report.html", runs_page(runs));
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace linnet::report {

struct TrainingRun {
  std::string folder, name;  // the name is what tells the runs of one page apart
  std::string task, layer;
  std::string score;  // accuracy, bits_per_byte, mse
  std::map<std::string, std::string> settings;
  // By "train loss", "valid accuracy", ...: (step, value).
  std::map<std::string, std::vector<std::pair<double, double>>> curves;
  std::vector<std::pair<std::string, double>> parts;  // of the last evaluation: its label, the score
  int64_t steps = 0, parameters = 0, state_bytes = -1;
  double seconds = 0, tokens = 0;
  double last = 0, best = 0, test = 0;  // the score: last and best evaluation, test where it is finished
  bool evaluated = false, finished = false;
  std::string device;

  bool falls() const { return score != "accuracy"; }  // the lower the better
  double result() const { return finished ? test : last; }
};

// A sentence where the folder is no run or a file of it is damaged. A line that is not finished yet is passed over.
Status read_run(const std::string& folder, TrainingRun* run);
// Names that tell the runs apart: the layer alone, with the settings that differ, or the folder.
void name_runs(std::vector<TrainingRun>* runs);

std::vector<std::string> runs_heading(const std::vector<TrainingRun>& runs);
std::vector<std::string> runs_row(const TrainingRun& run);
std::string runs_page(const std::vector<TrainingRun>& runs);

}  // namespace linnet::report
