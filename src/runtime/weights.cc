#include "runtime/weights.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>

#include "core/files/json.h"
#include "core/half.h"
#include "mechanisms/dense/dense_pack.h"
#include "runtime/files/dequantize.h"

namespace linnet {

namespace {

constexpr int64_t kPieceElements = 1 << 18;  // of a matrix on its way

std::string shape_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool plain(GgufType type) { return type == GgufType::f32 || type == GgufType::f16 || type == GgufType::bf16; }

// All values of a tensor as floats.
void read_floats(const FileTensor& t, float* out) {
  if (!t.f64) return dequantize(t.type, t.data, t.elements(), out);
  for (int64_t i = 0; i < t.elements(); ++i) {
    double x;
    std::memcpy(&x, t.data + i * 8, 8);
    out[i] = static_cast<float>(x);
  }
}

uint64_t hash(uint64_t h, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

}  // namespace

int64_t source_rows(const NameRule& rule, int64_t rows) {
  return (rule.total > 0 ? rule.total : rows * rule.parts) * std::max<int64_t>(rule.stacked, 1);
}

int64_t source_row(const NameRule& rule, int64_t row, int64_t rows, int64_t expert) {
  if (rule.stacked > 0) {
    const int64_t before = expert * (source_rows(rule, rows) / rule.stacked);
    return before + (rule.total > 0 ? rule.first : rule.part * rows) + row;
  }
  if (rule.joined_heads > 0) {
    const int64_t width = rows / rule.joined_heads;
    if (rule.total > 0) return row / width * (rule.total / rule.joined_heads) + rule.first + row % width;
    return (row / width * rule.parts + rule.part) * width + row % width;
  }
  const int64_t first = rule.total > 0 ? rule.first : rule.part * rows;
  if (rule.permuted_heads == 0) return first + row;
  const int64_t width = rows / rule.permuted_heads, head = row / width, i = row % width, half = width / 2;
  return first + head * width + (i < half ? 2 * i : 2 * (i - half) + 1);
}

int64_t FileTensor::elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

Status WeightFiles::open(const std::string& path, WeightFiles& out) {
  WeightFiles made;
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return bad_input(path + ": there is no such file or folder");
  if (!S_ISDIR(info.st_mode)) {
    made.gguf_ = std::make_unique<GgufFile>();
    LINNET_TRY(GgufFile::open(path, *made.gguf_));
    for (const GgufTensor& t : made.gguf_->tensors()) {
      FileTensor& tensor = made.tensors_[std::string(t.name)];
      tensor = {std::string(t.name), path, {t.shape, t.shape + t.rank}, t.type, false, t.data, t.bytes};
    }
    out = std::move(made);
    return {};
  }
  SafetensorsModel model;
  LINNET_TRY(SafetensorsModel::open(path, model));
  for (const SafetensorsFile& file : model.files()) {
    made.files_.emplace_back();
    MappedFile& mapped = made.files_.back();
    LINNET_TRY(MappedFile::open(file.path(), mapped));
    uint64_t header = 0;
    if (mapped.size() < 8) return bad_input(file.path() + ": changed while it was opened");
    std::memcpy(&header, mapped.data(), 8);
    for (size_t i = 0; i < file.size(); ++i) {
      const SafetensorsEntry entry = file.entry(i);
      FileTensor t{entry.name, file.path(), entry.shape};
      t.f64 = entry.dtype == "F64";
      if (entry.dtype == "BF16") t.type = GgufType::bf16;
      if (entry.dtype == "F16") t.type = GgufType::f16;
      t.bytes = entry.bytes();
      if (header > mapped.size() - 8 || entry.end > mapped.size() - 8 - header) {
        return bad_input(file.path() + ": changed while it was opened");
      }
      t.data = mapped.data() + 8 + header + entry.begin;
      const bool floats = entry.dtype == "F32" || entry.dtype == "F64" || entry.dtype == "BF16" || entry.dtype == "F16";
      if (floats) made.tensors_[entry.name] = std::move(t);  // buffers of integers are no weights
    }
  }
  out = std::move(made);
  return {};
}

const FileTensor* WeightFiles::find(const std::string& name) const {
  const auto at = tensors_.find(name);
  return at == tensors_.end() ? nullptr : &at->second;
}

uint64_t WeightFiles::bytes() const {
  uint64_t total = gguf_ ? gguf_->bytes() : 0;
  for (const MappedFile& file : files_) total += file.size();
  return total;
}

struct Weights::Bound {
  View view;
  bool quantised = false;
  layers::Quantised packed;
  std::vector<Memory> memory;
  int64_t bytes = 0;
  uint64_t fingerprint = 0xcbf29ce484222325ull;
  std::string kind;
  const FileTensor* converted = nullptr;  // where the numbers were read, if they are not used there

  char* allocate(int64_t count) {
    Memory m;
    m.bytes.reset(new char[static_cast<size_t>(count) + 64]);
    m.at = m.bytes.get() + (64 - reinterpret_cast<uintptr_t>(m.bytes.get()) % 64) % 64;
    bytes += count;
    memory.push_back(std::move(m));
    return memory.back().at;
  }
};

Status Weights::load_one(const WeightFiles& files, const Description& d, const std::string& prefix,
                         const layers::Parameter& parameter, const std::string& kind, Bound& bound) const {
  std::string theirs;
  const NameRule* rule = find_name(d, parameter.name, &theirs);
  while (rule != nullptr && rule->or_next && files.find(prefix + theirs) == nullptr) {
    rule = find_name(d, parameter.name, &theirs, rule);
  }
  if (rule == nullptr) return bad_input(d.family + ": there is no name in files for " + parameter.name);
  const bool added = theirs.rfind("linnet.", 0) == 0;  // by a conversion: no family's prefix, and never quantised
  const FileTensor* t = files.find(added ? theirs : prefix + theirs);
  if (t == nullptr && added) return bad_input(d.family + ": tensor " + json_quote_short(theirs) + " is missing");
  if (t == nullptr && ends_with(theirs, ".weight")) t = files.find(prefix + theirs.substr(0, theirs.size() - 7) + ".gamma");
  if (t == nullptr && ends_with(theirs, ".bias")) t = files.find(prefix + theirs.substr(0, theirs.size() - 5) + ".beta");
  const bool of_head = parameter.name.rfind("lm_head.", 0) == 0 || parameter.name.find("classifier.") != std::string::npos;
  if (t == nullptr && of_head) t = files.find(theirs);                      // heads stand outside the prefix of the body
  if (t == nullptr && of_head) t = files.find("language_model." + theirs);  // as composite models were published
  if (t == nullptr && !parameter.trained && parameter.init.rule == layers::Init::Rule::retention) {
    // Decays that follow from the number of heads: files of others leave them out.
    const std::vector<double> values = layers::initial_values(parameter.init, parameter.shape, parameter.name, 0);
    auto* made = reinterpret_cast<float*>(bound.allocate(static_cast<int64_t>(values.size()) * 4));
    for (size_t i = 0; i < values.size(); ++i) made[i] = static_cast<float>(values[i]);
    bound.view = View::dense(made, Dtype::f32, parameter.shape.data(), static_cast<int>(parameter.shape.size()));
    return {};
  }
  if (t == nullptr) return bad_input(d.family + ": tensor " + json_quote_short(prefix + theirs) + " is missing");
  const std::string where = t->path + ": tensor " + json_quote_short(t->name);
  bound.fingerprint = hash(bound.fingerprint, parameter.name.data(), parameter.name.size());
  bound.fingerprint = hash(bound.fingerprint, t->data, static_cast<size_t>(std::min<uint64_t>(t->bytes, 256)));

  // Sizes: ones in front (position_embeddings [1, N, C]) and between (conv1d [C, 1, taps]) do not count, patches [C, 3, P, P]
  // are a matrix, and a vector may be one of heads (dt_bias [H K]).
  const std::vector<int64_t>& wanted = parameter.shape;
  const int64_t rows = wanted.empty() ? 1 : wanted[0], elements = [&] {
    int64_t n = 1;
    for (const int64_t size : wanted) n *= size;
    return n;
  }();
  std::vector<int64_t> found = t->shape;
  while (found.size() > wanted.size() && found.front() == 1) found.erase(found.begin());
  if (found.size() == 3 && wanted.size() == 2 && found[1] == 1) found.erase(found.begin() + 1);
  if (rule->stacked > 0 && found.size() == 3 && found[0] == rule->stacked) found = {found[0] * found[1], found[2]};
  if (parameter.name == "patches.weight" && found.size() == 4) found = {found[0], found[1] * found[2] * found[3]};
  if (found.size() == 1 && wanted.size() == 2 && found[0] == elements && rule->parts == 1 && rule->total == 0) found = wanted;
  std::vector<int64_t> expected = wanted;
  expected[0] = source_rows(*rule, rows);
  const bool turn = rule->transposed && wanted.size() == 2;
  if (turn) std::swap(expected[0], expected[1]);
  if (found != expected) return bad_input(where + " is " + shape_of(t->shape) + ", expected " + shape_of(expected));
  if (rule->permuted_heads != 0 && (rows % (2 * rule->permuted_heads) != 0)) {
    return bad_input(where + " has " + std::to_string(rows) + " rows, which are no pairs of " +
                     std::to_string(rule->permuted_heads) + " heads");
  }
  if (rule->joined_heads != 0 && rows % rule->joined_heads != 0) {
    return bad_input(where + " has " + std::to_string(rows) + " rows, which are no " + std::to_string(rule->joined_heads) +
                     " heads");
  }

  const bool class_row = d.image > 0 && parameter.name == "embed_positions.weight";
  // A router's scores decide which experts run: it stays in f32, as other runtimes have it.
  const bool router =
      ends_with(parameter.name, ".mlp.router.weight") || ends_with(parameter.name, ".mlp.shared_expert_gate.weight");
  const bool matrix = parameter.dense_only && wanted.size() == 2 && !class_row && !router;
  const int64_t expert = expert_of(parameter.name);
  const int64_t columns = wanted.size() == 2 ? wanted[1] : 1;
  const bool table = parameter.name == "embed_tokens.weight" || parameter.name == "lm_head.weight";
  std::string held = matrix && !added ? kind : "f32";
  if (held.empty()) {
    held = t->f64 || t->type == GgufType::f32                       ? "f32"
           : t->type == GgufType::f16                               ? "f16"
           : t->type == GgufType::bf16                              ? "bf16"
           : t->type == GgufType::q4_0 || t->type == GgufType::q4_1 ? "q4"
                                                                    : "q8";
  }
  if (held == "q4" && table && t->type != GgufType::q4_0 && t->type != GgufType::q4_1) held = "q8";
  if ((held == "q8" || held == "q4") && columns % kGroup != 0) held = "bf16";
  if (matrix && !added) bound.kind = held;

  // As it lies, in the mapped file.
  const bool in_order = rule->permuted_heads == 0 && rule->joined_heads == 0;
  const int64_t first_row = in_order ? source_row(*rule, 0, rows, expert) : 0;
  const int64_t element = t->type == GgufType::f32 ? 4 : 2;
  const bool same = matrix && plain(t->type) && !t->f64 && !turn && in_order &&
                    held == (t->type == GgufType::f32   ? "f32"
                             : t->type == GgufType::f16 ? "f16"
                                                        : "bf16") &&
                    reinterpret_cast<uintptr_t>(t->data) % static_cast<uintptr_t>(element) == 0;
  const Dtype dtype = held == "bf16" ? Dtype::bf16 : held == "f16" ? Dtype::f16 : Dtype::f32;
  if (same) {
    const unsigned char* data = t->data + first_row * columns * element;
    // Infinite and NaN alike have all bits of the exponent set.
    bool finite = true;
    if (t->type == GgufType::f32) {
      const auto* words = reinterpret_cast<const uint32_t*>(data);
      for (int64_t i = 0; i < elements; ++i) finite &= (words[i] & 0x7f800000u) != 0x7f800000u;
    } else {
      const uint32_t mask = t->type == GgufType::bf16 ? 0x7f80u : 0x7c00u;
      const auto* words = reinterpret_cast<const uint16_t*>(data);
      for (int64_t i = 0; i < elements; ++i) finite &= (words[i] & mask) != mask;
    }
    if (!finite) return bad_input(where + " holds a value that is not finite");
    bound.view = View::dense(data, dtype, wanted.data(), static_cast<int>(wanted.size()));
    bound.bytes = elements * element;
    return {};
  }

  bound.converted = t;

  // Blocks that only change their place.
  const bool eight = t->type == GgufType::q8_0, four = t->type == GgufType::q4_0 || t->type == GgufType::q4_1;
  if (matrix && !turn && ((held == "q8" && eight) || (held == "q4" && four))) {
    const GgufTypeInfo& info = *gguf_type_info(static_cast<uint32_t>(t->type));
    const int64_t groups = columns / kGroup, row_bytes = groups * info.block_bytes, panels = dense_panels(rows);
    const QuantisedBits bits = eight ? QuantisedBits::eight : QuantisedBits::four;
    const unsigned char* blocks = t->data + first_row * row_bytes;
    std::unique_ptr<unsigned char[]> ordered;
    if (!in_order) {
      ordered.reset(new unsigned char[static_cast<size_t>(rows * row_bytes)]);
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(ordered.get() + r * row_bytes, blocks + source_row(*rule, r, rows, expert) * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
      blocks = ordered.get();
    }
    const int64_t scale_bytes = t->type == GgufType::q4_1 ? 4 : 2;
    for (int64_t i = 0; i < rows * groups; ++i) {
      for (int64_t s = 0; s < scale_bytes; s += 2) {
        uint16_t half;
        std::memcpy(&half, blocks + i * info.block_bytes + s, 2);
        if ((half & 0x7c00) == 0x7c00) return bad_input(where + " holds a scale that is not finite");
      }
    }
    char* codes = bound.allocate(panels * groups * dense_block_bytes(bits));
    char* scale = bound.allocate(panels * groups * kPanel * 2);
    dense_pack_codes(bits, blocks + scale_bytes, row_bytes, info.block_bytes, rows, groups, reinterpret_cast<uint8_t*>(codes));
    dense_pack_scales(Dtype::f16, blocks, row_bytes, info.block_bytes, rows, groups, scale);
    bound.quantised = true;
    bound.packed.bits = eight ? 8 : 4;
    bound.packed.codes = View::dense(codes, Dtype::u8, {panels, groups, dense_block_bytes(bits)});
    bound.packed.scale = View::dense(scale, Dtype::f16, {panels, groups, kPanel});
    if (t->type == GgufType::q4_1) {
      char* offset = bound.allocate(panels * groups * kPanel * 2);
      dense_pack_scales(Dtype::f16, blocks + 2, row_bytes, info.block_bytes, rows, groups, offset);
      bound.packed.offset = View::dense(offset, Dtype::f16, {panels, groups, kPanel});
    }
    return {};
  }

  // Where the numbers go: codes, or floats of `dtype`.
  char* memory = nullptr;
  const auto make_room = [&] {
    if (held != "q8" && held != "q4") {
      memory = bound.allocate(elements * dtype_size(dtype));
      bound.view = View::dense(memory, dtype, wanted.data(), static_cast<int>(wanted.size()));
      return;
    }
    const QuantisedBits bits = held == "q8" ? QuantisedBits::eight : QuantisedBits::four;
    const int64_t groups = columns / kGroup, panels = dense_panels(rows);
    bound.quantised = true;
    bound.packed.bits = held == "q8" ? 8 : 4;
    char* codes = bound.allocate(panels * groups * dense_block_bytes(bits));
    char* scale = bound.allocate(panels * groups * kPanel * 2);
    bound.packed.codes = View::dense(codes, Dtype::u8, {panels, groups, dense_block_bytes(bits)});
    bound.packed.scale = View::dense(scale, Dtype::f16, {panels, groups, kPanel});
    char* offset = bound.allocate(panels * groups * kPanel * 2);
    bound.packed.offset = View::dense(offset, Dtype::f16, {panels, groups, kPanel});
  };
  // Rows from `first` on, a multiple of the panel's.
  const auto hold = [&](const float* from, int64_t first, int64_t count, int64_t width) -> Status {
    if (memory != nullptr && dtype == Dtype::f32) {
      std::memcpy(memory + first * width * 4, from, static_cast<size_t>(count * width) * 4);
    } else if (memory != nullptr) {
      for (int64_t i = 0; i < count * width; ++i) store_f64(memory, dtype, first * width + i, from[i]);
    } else {
      const auto part = [&](View view) {
        if (!view.given()) return view;
        view.data = static_cast<char*>(view.data) + first / kPanel * view.stride[0] * dtype_size(view.dtype);
        view.size[0] = dense_panels(count);
        return view;
      };
      return dense_quantise(View::dense(from, Dtype::f32, {count, width}),
                            held == "q8" ? QuantisedBits::eight : QuantisedBits::four, part(bound.packed.codes),
                            part(bound.packed.scale), part(bound.packed.offset));
    }
    return {};
  };

  // A matrix goes by pieces of rows, so that loading needs little more memory than the model does.
  if (matrix && !turn) {
    const int64_t all_rows = source_rows(*rule, rows),
                  row_bytes = static_cast<int64_t>(t->bytes) / std::max<int64_t>(all_rows, 1);
    const int64_t most = std::max(kPanel, kPieceElements / std::max<int64_t>(columns, 1) / kPanel * kPanel);
    std::vector<float> piece(static_cast<size_t>(std::min(most, rows) * columns));
    FileTensor row = *t;
    row.shape = {columns};
    make_room();
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first);
      for (int64_t i = 0; i < count; ++i) {
        row.data = t->data + source_row(*rule, first + i, rows, expert) * row_bytes;
        read_floats(row, piece.data() + i * columns);
      }
      for (int64_t i = 0; i < count * columns; ++i) {
        if (!std::isfinite(piece[static_cast<size_t>(i)])) return bad_input(where + " holds a value that is not finite");
      }
      LINNET_TRY(hold(piece.data(), first, count, columns));
    }
    return {};
  }

  // Others: to floats in our order, then to what they are held in.
  std::vector<float> whole(static_cast<size_t>(t->elements())), values;
  read_floats(*t, whole.data());
  for (const float x : whole) {
    if (!std::isfinite(x)) return bad_input(where + " holds a value that is not finite");
  }
  if (turn) {
    const int64_t all_rows = source_rows(*rule, rows);
    values.resize(static_cast<size_t>(elements));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        values[static_cast<size_t>(r * columns + c)] =
            whole[static_cast<size_t>(c * all_rows + source_row(*rule, r, rows, expert))];
      }
    }
  } else if (source_rows(*rule, rows) != rows || !in_order) {
    const int64_t width = elements / std::max<int64_t>(rows, 1);
    values.resize(static_cast<size_t>(elements));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(whole.data() + source_row(*rule, r, rows, expert) * width, width, values.data() + r * width);
    }
  } else {
    values = std::move(whole);
  }
  if (class_row) {
    // The class token's row of the input is zero, and the product adds its bias to it: the table makes up for both.
    const FileTensor* token = files.find(prefix + "embeddings.cls_token");
    const FileTensor* bias = files.find(prefix + "embeddings.patch_embeddings.projection.bias");
    if (token == nullptr || bias == nullptr || token->elements() != d.hidden || bias->elements() != d.hidden) {
      return bad_input(d.family + ": embeddings.cls_token or the bias of the patches is missing or has another size");
    }
    std::vector<float> a(static_cast<size_t>(d.hidden)), b(a.size());
    read_floats(*token, a.data());
    read_floats(*bias, b.data());
    for (size_t i = 0; i < a.size(); ++i) values[i] += a[i] - b[i];
    if (d.class_tokens == 2) {
      const FileTensor* second = files.find(prefix + "embeddings.distillation_token");
      if (second == nullptr || second->elements() != d.hidden) {
        return bad_input(d.family + ": embeddings.distillation_token is missing or has another size");
      }
      read_floats(*second, a.data());
      for (size_t i = 0; i < a.size(); ++i) values[a.size() + i] += a[i] - b[i];
    }
  }
  make_room();
  return hold(values.data(), 0, rows, elements / std::max<int64_t>(rows, 1));
}

Status Weights::load(const WeightFiles& files, const Description& d, const std::vector<const layers::Record*>& records,
                     const std::string& kind, Executor& executor) {
  // Which of the family's prefixes the files use: the one under which the first tensor is found.
  std::string prefix = d.prefixes.front();
  for (const std::string& candidate : d.prefixes) {
    std::string theirs;
    if (find_name(d, d.image > 0 ? "patches.weight" : "embed_tokens.weight", &theirs) && files.find(candidate + theirs)) {
      prefix = candidate;
      break;
    }
  }
  std::vector<const layers::Parameter*> parameters;
  for (const layers::Record* record : records) {
    for (const layers::Parameter& parameter : record->parameters) {
      if (bound_.emplace(parameter.name, std::make_shared<Bound>()).second) parameters.push_back(&parameter);
    }
  }
  struct Work {
    const Weights* self;
    const WeightFiles* files;
    const Description* d;
    const std::string *prefix, *kind;
    const std::vector<const layers::Parameter*>* parameters;
    std::vector<Status> status;
  } work{this, &files, &d, &prefix, &kind, &parameters, std::vector<Status>(parameters.size())};
  executor.run(
      static_cast<int64_t>(parameters.size()),
      [](void* context, int64_t task, int) {
        Work& w = *static_cast<Work*>(context);
        const size_t i = static_cast<size_t>(task);
        const layers::Parameter& parameter = *(*w.parameters)[i];
        Bound& bound = *w.self->bound_.at(parameter.name);
        w.status[i] = w.self->load_one(*w.files, *w.d, *w.prefix, parameter, *w.kind, bound);
        if (bound.converted != nullptr) leave_memory(bound.converted->data, bound.converted->bytes);
      },
      &work);
  for (const Status& status : work.status) {
    if (!status.ok()) return status;
  }

  // A tensor that nobody reads is told: perhaps the model is another than its configuration says.
  std::set<std::string> used, kinds;
  for (const layers::Parameter* parameter : parameters) {
    std::string theirs;
    const NameRule* rule = find_name(d, parameter->name, &theirs);
    used.insert(theirs);
    used.insert(prefix + theirs);
    while (rule != nullptr && rule->or_next) {
      rule = find_name(d, parameter->name, &theirs, rule);
      used.insert(prefix + theirs);
    }
    const Bound& bound = *bound_.at(parameter->name);
    bytes_ += bound.bytes;
    fingerprint_ = hash(fingerprint_ ^ bound.fingerprint, &bound.fingerprint, 8);
    if (!bound.kind.empty()) kinds.insert(bound.kind);
  }
  for (const auto& [name, tensor] : files.all()) {
    if (used.count(name) != 0) continue;
    const bool legacy = ends_with(name, ".gamma") || ends_with(name, ".beta");
    const auto left_out = [&tensor_name = name](const std::string& end) {
      return end.back() == '*' ? tensor_name.rfind(end.substr(0, end.size() - 1), 0) == 0 : ends_with(tensor_name, end);
    };
    if (!legacy && std::none_of(d.ignored.begin(), d.ignored.end(), left_out)) {
      warnings_.push_back(tensor.path + ": tensor " + json_quote_short(name) + " belongs to no part of this " + d.family +
                          " model");
    }
  }
  for (const std::string& each : kinds) kinds_ += (kinds_.empty() ? "" : " + ") + each;
  return {};
}

Status Weights::bind(layers::Runner& runner, const std::string& name) const {
  const Bound& bound = *bound_.at(name);
  if (!bound.quantised) return runner.bind(name, bound.view);
  layers::Quantised packed = bound.packed;
  // 8-bit weights are kept for their accuracy, of which x in 8 bits would lose more than they do (docs/run-a-model.md).
  packed.rounding = packed.bits == 8 ? "int16" : "int8";
  return runner.bind(name, packed);
}

Status Weights::bind(layers::Runner& runner) const {
  for (const layers::Parameter& parameter : runner.record().parameters) LINNET_TRY(bind(runner, parameter.name));
  return {};
}

View Weights::view(const std::string& name) const {
  const auto at = bound_.find(name);
  return at == bound_.end() || at->second->quantised ? View() : at->second->view;
}

}  // namespace linnet
