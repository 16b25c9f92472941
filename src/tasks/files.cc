// Tasks on files of the user: images by the pixel, text by the byte, which of two documents a piece comes from.
#include "tasks/forecast.h"
#include "tasks/inflate.h"
#include "tasks/task.h"

namespace linnet::tasks {
namespace {

constexpr uint64_t kMaxFile = uint64_t{1} << 33;

// An idx file (MNIST): two zeros, the type 8 (bytes), the number of dimensions, each as a big-endian word, the bytes.
Status read_idx(const std::string& path, std::vector<int64_t>* shape, std::vector<uint8_t>* values) {
  std::vector<uint8_t> bytes;
  LINNET_TRY(read_bytes(path, kMaxFile, &bytes));
  if (bytes.size() < 4 || bytes[0] != 0 || bytes[1] != 0 || bytes[2] != 8 || bytes[3] == 0 || bytes[3] > 4) {
    return bad_input(path + ": it is no idx file of bytes: it does not begin with 0 0 8 and 1 to 4 dimensions");
  }
  const size_t header = 4 + 4 * static_cast<size_t>(bytes[3]);
  if (bytes.size() < header) return bad_input(path + ": its header breaks off");
  uint64_t count = 1;
  shape->clear();
  for (size_t at = 4; at < header; at += 4) {
    const uint64_t size =
        uint64_t{bytes[at]} << 24 | uint64_t{bytes[at + 1]} << 16 | uint64_t{bytes[at + 2]} << 8 | bytes[at + 3];
    if (size != 0 && count > kMaxFile / size) return bad_input(path + ": its header says more than 8 GiB");
    count *= size;
    shape->push_back(static_cast<int64_t>(size));
  }
  if (bytes.size() - header != count) {
    return bad_input(path + ": it has " + std::to_string(bytes.size() - header) + " values, its header says " +
                     std::to_string(count));
  }
  values->assign(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end());
  return {};
}

Status make_images(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const std::string& path = o.text("path");
  if (path.empty())
    return o.error("path is missing, expected an idx file (MNIST, Fashion-MNIST) or a CSV file (pixels, label)");
  int64_t N = 0, P = 0;
  std::vector<uint8_t> pixels, labels;
  if (path.ends_with(".csv") || path.ends_with(".csv.gz")) {
    Series series;
    LINNET_TRY(read_series(path, &series));
    N = series.rows;
    P = series.channels - 1;
    for (size_t i = 0; i < series.values.size(); ++i) {
      const double x = series.values[i];
      const auto channel = static_cast<int64_t>(i) % series.channels;
      if (!(x >= 0 && x <= 255) || x != static_cast<uint8_t>(x)) {
        return bad_input(path + ": row " + std::to_string(static_cast<int64_t>(i) / series.channels) + ", column " +
                         std::to_string(channel) + " is no whole number from 0 to 255");
      }
      (channel < P ? pixels : labels).push_back(static_cast<uint8_t>(x));
    }
  } else {
    std::vector<int64_t> shape, label_shape;
    LINNET_TRY(read_idx(path, &shape, &pixels));
    N = shape.front();
    P = 1;
    for (size_t i = 1; i < shape.size(); ++i) P *= shape[i];
    if (!o.text("labels").empty()) {
      LINNET_TRY(read_idx(o.text("labels"), &label_shape, &labels));
      if (static_cast<int64_t>(labels.size()) != N) {
        return o.error("labels has " + std::to_string(labels.size()) + " entries, expected " + std::to_string(N) +
                       " (same as path)");
      }
    }
  }
  if (o.flag("permute")) {
    const std::vector<int64_t> order = Stream(static_cast<uint64_t>(o.integer("seed"))).distinct(P, P);
    std::vector<uint8_t> row(static_cast<size_t>(P));
    for (int64_t i = 0; i < N; ++i) {
      uint8_t* const own = pixels.data() + i * P;
      std::copy(own, own + P, row.begin());
      for (int64_t p = 0; p < P; ++p) own[p] = row[static_cast<size_t>(order[static_cast<size_t>(p)])];
    }
  }
  *tensors = {byte_tensor("pixels", {N, P}, std::move(pixels))};
  if (!labels.empty()) tensors->push_back(byte_tensor("label", {N}, std::move(labels)));
  return {};
}

// Rows of the contiguous parts of a file, 90, 5 and 5 %.
void part_of(const std::string& split, int64_t bytes, int64_t* begin, int64_t* end) {
  const int64_t train = bytes * 90 / 100, valid = bytes * 95 / 100;
  *begin = split == "train" ? 0 : split == "valid" ? train : valid;
  *end = split == "train" ? train : split == "valid" ? valid : bytes;
}

Status make_text(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  if (o.text("path").empty()) return o.error("path is missing, expected a file");
  std::vector<uint8_t> bytes;
  LINNET_TRY(read_bytes(o.text("path"), kMaxFile, &bytes));
  const int64_t T = o.integer("length"), stride = o.integer("stride") == 0 ? T : o.integer("stride");
  int64_t begin = 0, end = static_cast<int64_t>(bytes.size());
  if (o.text("split") != "all") part_of(o.text("split"), end, &begin, &end);
  if (end - begin < T + 1) {
    return o.error("the part " + o.text("split") + " of " + o.text("path") + " has " + std::to_string(end - begin) +
                   " bytes, expected at least length + 1 (" + std::to_string(T + 1) + ")");
  }
  const int64_t N = (end - begin - T - 1) / stride + 1;
  if (N > kMaxElements / T) return o.error("the windows hold more than 2^34 bytes");
  TaskTensor inputs = byte_tensor("inputs", {N, T}), targets = byte_tensor("targets", {N, T});
  for (int64_t i = 0; i < N; ++i) {
    const uint8_t* const from = bytes.data() + begin + i * stride;
    std::copy(from, from + T, inputs.bytes.data() + i * T);
    std::copy(from + 1, from + T + 1, targets.bytes.data() + i * T);
  }
  *tensors = {std::move(inputs), std::move(targets)};
  return {};
}

Status make_documents(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  std::vector<uint8_t> bytes[2];
  int64_t begin[2] = {}, room[2] = {};
  const int64_t T = o.integer("length"), N = o.integer("examples");
  for (int i = 0; i < 2; ++i) {
    const std::string name = i == 0 ? "first" : "second";
    if (o.text(name).empty()) return o.error(name + " is missing, expected a file");
    LINNET_TRY(read_bytes(o.text(name), kMaxFile, &bytes[i]));
    int64_t end = 0;
    part_of(o.text("split"), static_cast<int64_t>(bytes[i].size()), &begin[i], &end);
    room[i] = end - begin[i] - T + 1;
    if (room[i] < 1) {
      return o.error("the part " + o.text("split") + " of " + o.text(name) + " has " + std::to_string(end - begin[i]) +
                     " bytes, expected at least length (" + std::to_string(T) + ")");
    }
  }
  if (N > kMaxElements / T) return o.error("examples x length is above 2^34 bytes");
  TaskTensor inputs = byte_tensor("inputs", {N, T}), labels = integer_tensor("label", {N});
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    const int64_t label = labels.integers[static_cast<size_t>(i)] = stream.below(2);
    const uint8_t* const from = bytes[label].data() + begin[label] + stream.below(room[label]);
    std::copy(from, from + T, inputs.bytes.data() + i * T);
  });
  *tensors = {std::move(inputs), std::move(labels)};
  return {};
}

}  // namespace

const Task& images_task() {
  static const Task task = {
      .name = "images",
      .summary = "images of a file by the pixel: MNIST, Fashion-MNIST (idx), the 8 x 8 digits (CSV)",
      .details =
          "path=train-images-idx3-ubyte(.gz) labels=train-labels-idx1-ubyte(.gz), or a CSV file of pixels with the label "
          "behind\n"
          "them. permute=1 puts the pixels of every image in one random order of the seed.",
      .options = {text_option("path", "an idx or CSV file, gzipped or not"),
                  text_option("labels", "the idx file of the classes"),
                  flag_option("permute", false, "one fixed random order of the pixels"),
                  integer_option("seed", 0, 0, static_cast<int64_t>(kMaxInteger), "of that order")},
      .results = {{"pixels", "images pixels", "0 to 255, row by row"}, {"label", "images", "the class"}},
      .make = make_images,
  };
  return task;
}

const Task& text_task() {
  static const Task task = {
      .name = "text",
      .summary = "windows of a file by the byte, each with the next byte as target",
      .details = "The file's first 90 % are for training, then 5 % and 5 %. stride 0: windows that do not overlap.",
      .options = {text_option("path", "a file, gzipped or not"),
                  choice_option("split", {"train", "valid", "test", "all"}, "the part of the file"),
                  integer_option("length", 512, 1, int64_t{1} << 30, "bytes of a window"),
                  integer_option("stride", 0, 0, int64_t{1} << 30, "bytes between the beginnings of windows; 0: length")},
      .results = {{"inputs", "windows length", "bytes"}, {"targets", "windows length", "the byte behind each"}},
      .make = make_text,
  };
  return task;
}

const Task& documents_task() {
  static const Task task = {
      .name = "documents",
      .summary = "which of two files a piece of bytes comes from",
      .details =
          "A byte-level binary task on the user's texts, in the place of LRA's movie reviews. Pieces start anywhere in the "
          "part\n"
          "of the split (90, 5 and 5 % of each file).",
      .options =
          drawn_options(64, {text_option("first", "a file, gzipped or not: class 0"), text_option("second", "another: class 1"),
                             integer_option("length", 1000, 1, int64_t{1} << 30, "bytes of a piece")}),
      .results = {{"inputs", "examples length", "bytes"}, {"label", "examples", "0: first, 1: second"}},
      .make = make_documents,
  };
  return task;
}

}  // namespace linnet::tasks
