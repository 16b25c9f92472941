// Series and the forecasting protocol of ETT (LTSF-Linear, arXiv 2205.13504).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace linnet::tasks {

struct Series {
  int64_t rows = 0, channels = 0;
  std::vector<std::string> names;  // of the channels, where the file has a heading
  std::vector<double> values;      // [rows, channels]
};
// A CSV file, gzipped or not: a heading (a first line that holds a word), a first column that is no number (the date), then
// numbers. An empty or malformed field is refused with its line.
Status read_series(const std::string& path, Series* series);
Status parse_series(std::string_view text, const std::string& source, Series* series);

struct Forecast {
  int64_t lookback = 96, horizon = 96;
  int64_t train = 0, valid = 0, test = 0;  // rows of the parts
  std::vector<double> mean, deviation;     // of the training rows, the population's; 1 for a constant channel
  std::vector<double> scaled;              // [rows, channels]
  int64_t begin[3] = {}, end[3] = {};      // rows of each part: valid and test start `lookback` rows early
  int64_t windows[3] = {};
  double mse = 0, mae = 0;  // of repeating the last value, over all windows of the test part
};
// Fills the rest from the sizes above.
Status prepare_forecast(const Series& series, Forecast* forecast);

}  // namespace linnet::tasks
