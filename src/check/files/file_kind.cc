#include "check/files/file_kind.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace linnet::check {

#define LINNET_FILE_KIND(name) const FileKind& name##_files();
#include "check/files/file_kinds.h"
#undef LINNET_FILE_KIND

namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

Comparison wrong(std::string note) {
  Comparison comparison;
  comparison.ok = false;
  comparison.note = std::move(note);
  return comparison;
}

template <class T>
bool parse(const std::string& text, T* value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && stop == text.data() + text.size();
}

}  // namespace

const FileKind* find_file_kind(std::string_view mechanism, std::string_view operation) {
  static const std::vector<const FileKind*> kinds = {
#define LINNET_FILE_KIND(name) &name##_files(),
#include "check/files/file_kinds.h"
#undef LINNET_FILE_KIND
  };
  for (const FileKind* kind : kinds) {
    if (kind->takes(mechanism, operation)) return kind;
  }
  return nullptr;
}

Status Stored::numbers(const std::string& name, std::vector<double>* values, std::vector<int64_t>* shape) {
  if (!file_.has(name)) return error("it has no tensor " + name);
  SafetensorsEntry entry;
  LINNET_TRY(file_.find(name, entry));
  if (shape != nullptr) *shape = entry.shape;
  used_.push_back(name);
  return file_.read_f64(name, *values, ReadValues::any);
}

Status Stored::integers(const std::string& name, std::vector<int64_t>* values, std::vector<int64_t>* shape) {
  if (!file_.has(name)) return error("it has no tensor " + name);
  SafetensorsEntry entry;
  LINNET_TRY(file_.find(name, entry));
  if (shape != nullptr) *shape = entry.shape;
  used_.push_back(name);
  return file_.read_i64(name, *values);
}

Status Stored::real(const std::string& key, double* value) const {
  const std::string text = file_.metadata(key);
  double parsed = 0;
  if (text.empty()) return {};
  if (!parse(text, &parsed) || !std::isfinite(parsed)) return error(key + " is '" + text + "', expected a number");
  *value = parsed;
  return {};
}

Status Stored::integer(const std::string& key, int64_t low, int64_t high, int64_t* value) const {
  const std::string text = file_.metadata(key);
  int64_t parsed = 0;
  if (text.empty()) return {};
  if (!parse(text, &parsed) || parsed < low || parsed > high) {
    return error(key + " is '" + text + "', expected " + std::to_string(low) + " to " + std::to_string(high));
  }
  *value = parsed;
  return {};
}

void Stored::add(const std::string& name, Pass pass, Comparison comparison) {
  result_->tensors.push_back({name, pass, std::move(comparison)});
}

Status Stored::expect(const std::string& name, const std::vector<double>& got, const std::vector<int64_t>& shape, double gate,
                      Pass pass) {
  if (!file_.has(name)) return {};
  std::vector<double> want;
  std::vector<int64_t> stored;
  LINNET_TRY(numbers(name, &want, &stored));
  if (stored != shape || got.size() != want.size()) {
    add(name, pass, wrong("has the shape " + shape_text(shape) + ", expected " + shape_text(stored)));
    return {};
  }
  if (gate == 0) {
    add(name, pass, compare_exact(got, want, shape));
  } else {
    add(name, pass, compare(got, want, shape, {.rms = gate, .epsilon = epsilon(Dtype::f64)}));
  }
  return {};
}

Status Stored::expect(const std::string& name, const std::vector<int64_t>& got, const std::vector<int64_t>& shape) {
  return expect(name, std::vector<double>(got.begin(), got.end()), shape, 0);
}

Status Stored::expect_real(const std::string& key, double got, double gate) {
  if (file_.metadata(key).empty()) return {};
  double want = 0;
  LINNET_TRY(real(key, &want));
  add(key, Pass::forward,
      gate == 0 ? compare_exact({got}, {want}, {1})
                : compare({got}, {want}, {1}, {.rms = gate, .epsilon = epsilon(Dtype::f64)}));
  return {};
}

void Stored::expect_text(const std::string& key, const std::string& got) {
  const std::string want = file_.metadata(key);
  if (want.empty()) return;
  add(key, Pass::forward, want == got ? Comparison() : wrong("is '" + got + "', expected '" + want + "'"));
}

Status Stored::finish() {
  for (const std::string& name : file_.names()) {
    if (std::find(used_.begin(), used_.end(), name) == used_.end()) result_->unchecked.push_back(name);
  }
  return result_->tensors.empty() ? error("it holds nothing to compare") : Status();
}

}  // namespace linnet::check
