#include "tasks/forecast.h"

#include <charconv>
#include <cmath>

#include "tasks/inflate.h"
#include "tasks/task.h"

namespace linnet::tasks {
namespace {

constexpr uint64_t kMaxSeriesBytes = uint64_t{1} << 32;

bool parse_number(std::string_view field, double* value) {
  while (!field.empty() && (field.front() == ' ' || field.front() == '"')) field.remove_prefix(1);
  while (!field.empty() && (field.back() == ' ' || field.back() == '"' || field.back() == '\r')) field.remove_suffix(1);
  if (!field.empty() && field.front() == '+') field.remove_prefix(1);
  const auto [stop, error] = std::from_chars(field.data(), field.data() + field.size(), *value);
  return !field.empty() && error == std::errc() && stop == field.data() + field.size();
}

std::vector<std::string_view> fields_of(std::string_view line) {
  std::vector<std::string_view> fields;
  size_t begin = 0;
  bool quoted = false;
  for (size_t i = 0; i <= line.size(); ++i) {
    if (i < line.size() && line[i] == '"') quoted = !quoted;
    if (i < line.size() && (line[i] != ',' || quoted)) continue;
    fields.push_back(line.substr(begin, i - begin));
    begin = i + 1;
  }
  return fields;
}

}  // namespace

Status parse_series(std::string_view text, const std::string& source, Series* series) {
  *series = Series();
  bool dated = false;
  int64_t number = 0;
  double x = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    const std::vector<std::string_view> fields = fields_of(line);
    if (series->channels == 0 && series->names.empty()) {  // a heading holds a word behind its first field
      bool heading = fields.size() == 1 && !parse_number(fields[0], &x);
      for (size_t i = 1; i < fields.size(); ++i) heading |= !parse_number(fields[i], &x);
      if (heading) {
        for (const std::string_view field : fields) series->names.emplace_back(field);
        continue;
      }
    }
    if (series->channels == 0) {
      dated = !parse_number(fields[0], &x);
      series->channels = static_cast<int64_t>(fields.size()) - (dated ? 1 : 0);
      if (series->channels < 1) return bad_input(source + ": line " + std::to_string(number) + " has no numbers");
      if (dated && !series->names.empty()) series->names.erase(series->names.begin());
    }
    const auto columns = static_cast<size_t>(series->channels + (dated ? 1 : 0));
    if (fields.size() != columns) {
      return bad_input(source + ": line " + std::to_string(number) + " has " + std::to_string(fields.size()) +
                       " fields, expected " + std::to_string(columns));
    }
    for (size_t i = dated ? 1 : 0; i < columns; ++i) {
      if (!parse_number(fields[i], &x) || !std::isfinite(x)) {
        return bad_input(source + ": line " + std::to_string(number) + ", field " + std::to_string(i + 1) + " is '" +
                         std::string(fields[i].substr(0, 40)) + "', expected a number");
      }
      series->values.push_back(x);
    }
    ++series->rows;
  }
  if (series->rows == 0) return bad_input(source + ": it has no rows of numbers");
  return {};
}

Status read_series(const std::string& path, Series* series) {
  std::vector<uint8_t> bytes;
  LINNET_TRY(read_bytes(path, kMaxSeriesBytes, &bytes));
  return parse_series({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path, series);
}

Status prepare_forecast(const Series& series, Forecast* f) {
  const int64_t C = series.channels, L = f->lookback, H = f->horizon;
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (f->train + f->valid + f->test > series.rows) {
    return bad_input("forecast: train + valid + test is " + text(f->train + f->valid + f->test) + ", expected at most the " +
                     text(series.rows) + " rows of the series");
  }
  if (L + H > f->train) {
    return bad_input("forecast: lookback + horizon is " + text(L + H) + ", expected at most the " + text(f->train) +
                     " rows of the training part");
  }
  f->begin[0] = 0;
  f->end[0] = f->train;
  f->begin[1] = f->train - L;
  f->end[1] = f->train + f->valid;
  f->begin[2] = f->train + f->valid - L;
  f->end[2] = f->train + f->valid + f->test;
  for (int part = 0; part < 3; ++part) {
    f->windows[part] = std::max<int64_t>(0, f->end[part] - f->begin[part] - L - H + 1);
  }
  f->mean.assign(static_cast<size_t>(C), 0);
  f->deviation.assign(static_cast<size_t>(C), 0);
  const auto at = [&](int64_t row, int64_t c) { return series.values[static_cast<size_t>(row * C + c)]; };
  f->scaled.resize(series.values.size());
  for (int64_t c = 0; c < C; ++c) {
    double& mean = f->mean[static_cast<size_t>(c)];
    double& deviation = f->deviation[static_cast<size_t>(c)];
    for (int64_t row = 0; row < f->train; ++row) mean += at(row, c);
    mean /= static_cast<double>(f->train);
    for (int64_t row = 0; row < f->train; ++row) deviation += (at(row, c) - mean) * (at(row, c) - mean);
    deviation = std::sqrt(deviation / static_cast<double>(f->train));
    if (deviation == 0) deviation = 1;
    for (int64_t row = 0; row < series.rows; ++row)
      f->scaled[static_cast<size_t>(row * C + c)] = (at(row, c) - mean) / deviation;
  }
  double squares = 0, sizes = 0;
  for (int64_t w = 0; w < f->windows[2]; ++w) {
    const int64_t last = f->begin[2] + w + L - 1;
    for (int64_t h = 1; h <= H; ++h) {
      for (int64_t c = 0; c < C; ++c) {
        const double error = f->scaled[static_cast<size_t>((last + h) * C + c)] - f->scaled[static_cast<size_t>(last * C + c)];
        squares += error * error;
        sizes += std::abs(error);
      }
    }
  }
  const auto terms = static_cast<double>(f->windows[2] * H * C);
  f->mse = terms > 0 ? squares / terms : 0;
  f->mae = terms > 0 ? sizes / terms : 0;
  return {};
}

namespace {

// Daily and weekly waves with drifting level and noise: a series to try things on without a file.
Series synthetic_series(uint64_t seed, int64_t rows, int64_t channels) {
  Series series{rows, channels, {}, std::vector<double>(static_cast<size_t>(rows * channels))};
  Stream stream(seed);
  constexpr double kPi = 3.14159265358979323846;
  std::vector<double> phase(static_cast<size_t>(2 * channels)), level(static_cast<size_t>(channels), 0);
  for (double& each : phase) each = 2 * kPi * stream.uniform();
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t c = 0; c < channels; ++c) {
      const auto i = static_cast<size_t>(c);
      const double hour = 2 * kPi * static_cast<double>(t);
      level[i] += 0.05 * (stream.uniform() - 0.5);
      series.values[static_cast<size_t>(t * channels + c)] = std::sin(hour / 24 + phase[2 * i]) +
                                                             0.5 * std::sin(hour / 168 + phase[2 * i + 1]) + level[i] +
                                                             0.2 * (stream.uniform() - 0.5);
    }
  }
  return series;
}

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  Series series;
  if (o.text("path").empty()) {
    series = synthetic_series(static_cast<uint64_t>(o.integer("seed")), o.integer("rows"), o.integer("channels"));
  } else {
    LINNET_TRY(read_series(o.text("path"), &series));
  }
  Forecast f = {.lookback = o.integer("lookback"), .horizon = o.integer("horizon")};
  const std::string& protocol = o.text("protocol");
  if (o.given("train") || o.given("valid") || o.given("test")) {
    f.train = o.integer("train");
    f.valid = o.integer("valid");
    f.test = o.integer("test");
  } else if (protocol == "share") {
    f.train = series.rows * 7 / 10;
    f.test = series.rows * 2 / 10;
    f.valid = series.rows - f.train - f.test;
  } else {
    const int64_t month = 30 * 24 * (protocol == "ett_minute" ? 4 : 1);
    f.train = 12 * month;
    f.valid = f.test = 4 * month;
  }
  LINNET_TRY(prepare_forecast(series, &f));
  const int64_t C = series.channels, L = f.lookback, H = f.horizon;
  *tensors = {real_tensor("series", {series.rows, C}, series.values),
              real_tensor("scaled", {series.rows, C}, f.scaled),
              real_tensor("mean", {C}, f.mean),
              real_tensor("std", {C}, f.deviation),
              integer_tensor("parts", {3, 2}),
              integer_tensor("windows", {3}),
              real_tensor("mse", {}, {f.mse}),
              real_tensor("mae", {}, {f.mae})};
  for (size_t part = 0; part < 3; ++part) {
    (*tensors)[4].integers[2 * part] = f.begin[part];
    (*tensors)[4].integers[2 * part + 1] = f.end[part];
    (*tensors)[5].integers[part] = f.windows[part];
  }
  if (!o.flag("cut")) return {};
  const int part = o.text("split") == "train" ? 0 : o.text("split") == "valid" ? 1 : 2;
  const int64_t W = f.windows[part];
  if (W > kMaxElements / ((L + H) * C))
    return o.error("the windows hold more than 2^34 numbers; cut them yourself from scaled");
  TaskTensor inputs = real_tensor("inputs", {W, L, C}), targets = real_tensor("targets", {W, H, C});
  for (int64_t w = 0; w < W; ++w) {
    const double* const from = f.scaled.data() + (f.begin[part] + w) * C;
    std::copy(from, from + L * C, inputs.numbers.data() + w * L * C);
    std::copy(from + L * C, from + (L + H) * C, targets.numbers.data() + w * H * C);
  }
  tensors->push_back(std::move(inputs));
  tensors->push_back(std::move(targets));
  return {};
}

}  // namespace

const Task& forecast_task() {
  constexpr int64_t kMost = int64_t{1} << 40;
  static const Task task = {
      .name = "forecast",
      .summary = "windows of a series, standardised by its training part (the ETT protocol)",
      .details =
          "path=FILE.csv (or .csv.gz): a date, then channels; without a file a synthetic series of the seed. Channels are "
          "standardised\n"
          "by the training rows; window w of a part is rows w .. w + lookback - 1 and, as target, the next horizon rows. "
          "Parts: 70,\n"
          "10 and 20 %, protocol=ett_hour (8640, 2880, 2880 rows), ett_minute (four times that), or train=, valid=, test=. mse "
          "and\n"
          "mae are those of repeating the last value on the test part.",
      .options = {text_option("path", "a CSV file"),
                  integer_option("seed", 0, 0, static_cast<int64_t>(kMaxInteger), "of the synthetic series"),
                  integer_option("rows", 2000, 1, 100'000'000, "of the synthetic series"),
                  integer_option("channels", 7, 1, 10'000, "of the synthetic series"),
                  choice_option("split", {"train", "valid", "test"}, "whose windows are cut"),
                  integer_option("lookback", 96, 1, kMost, "rows of an input"),
                  integer_option("horizon", 96, 1, kMost, "rows of a target"),
                  choice_option("protocol", {"share", "ett_hour", "ett_minute"}, "sizes of the parts"),
                  integer_option("train", 0, 0, kMost, "rows of the training part, instead of the protocol's"),
                  integer_option("valid", 0, 0, kMost, "rows of the validation part"),
                  integer_option("test", 0, 0, kMost, "rows of the test part"),
                  flag_option("cut", false, "the windows of the split as tensors too")},
      .results = {{"series", "rows channels", "the numbers"},
                  {"scaled", "rows channels", "standardised"},
                  {"mean", "channels", "of the training rows"},
                  {"std", "channels", "of the training rows; 1 where it would be 0"},
                  {"parts", "3 2", "first and behind the last row of training, validation, test"},
                  {"windows", "3", "of each part"},
                  {"mse", "", "of repeating the last value"},
                  {"mae", "", "of repeating the last value"},
                  {"inputs", "windows lookback channels", "with cut=1"},
                  {"targets", "windows horizon channels", "with cut=1"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
