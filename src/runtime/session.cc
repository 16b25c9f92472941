#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "core/files/safetensors.h"
#include "runtime/model.h"

namespace linnet {

namespace {

// Tokens of a prompt at a time: what lies between the layers stays below 48 MB, so that a long prompt needs no more.
constexpr int64_t kMostPiece = 2048, kLeastPiece = 128, kBetween = int64_t{48} << 20;
int64_t piece_of(const Description& d) {
  int64_t inner = 0;
  for (const BlockSpec& block : d.blocks) inner = std::max({inner, block.mlp.inner, block.mlp.shared});
  return std::clamp(kBetween / (4 * (3 * inner + 4 * d.hidden)) / 64 * 64, kLeastPiece, kMostPiece);
}
constexpr const char* kStateFormat = "linnet session 1";

}  // namespace

Session::Session() = default;
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

int64_t Session::position() const { return inner_->state.position(); }
int64_t Session::state_bytes() const { return inner_->state.bytes(); }

Status Session::prefill(const std::vector<int32_t>& tokens, std::vector<float>& logits,
                        const std::function<void(int64_t)>& progress) {
  Model::Inner& model = *inner_->model;
  LINNET_TRY(model.check_tokens(tokens, position()));
  const size_t width = static_cast<size_t>(model.d.hidden);
  logits.resize(static_cast<size_t>(model.d.vocabulary));
  std::vector<float> hidden;
  const std::lock_guard<std::mutex> lock(model.mutex);
  LINNET_TRY(model.body.reserve(&inner_->state, static_cast<int64_t>(tokens.size())));
  const size_t most = static_cast<size_t>(piece_of(model.d));
  for (size_t begin = 0; begin < tokens.size();) {
    if (progress) progress(static_cast<int64_t>(begin));
    const size_t end = std::min(tokens.size(), begin + most);
    hidden.resize((end - begin) * width);
    const std::vector<int32_t> piece(tokens.begin() + static_cast<ptrdiff_t>(begin),
                                     tokens.begin() + static_cast<ptrdiff_t>(end));
    LINNET_TRY(model.run_body(piece, 1, position(), {&inner_->state}, hidden.data()));
    begin = end;
  }
  return model.run_head(hidden.data() + hidden.size() - width, 1, logits.data());
}

Status Session::copy(Session& out) const {
  auto made = std::make_unique<Inner>();
  made->model = inner_->model;
  LINNET_TRY(inner_->state.copy(&made->state));
  out.inner_ = std::move(made);
  return {};
}

Status Session::save(const std::string& path) const {
  const layers::State& state = inner_->state;
  std::vector<SafetensorsTensor> tensors;
  std::vector<std::vector<char>> copies;  // of a state on the GPU
  for (const layers::StateTensor& t : state.tensors()) {
    const void* data = t.view.data;
    if (t.view.device == Device::cuda) {
      copies.emplace_back(static_cast<size_t>(t.view.elements() * dtype_size(t.view.dtype)));
      LINNET_TRY(layers::get_bytes(t.view, copies.back().data()));
      data = copies.back().data();
    }
    tensors.push_back({t.name, safetensors_name(t.view.dtype), {t.view.size, t.view.size + t.view.rank}, data});
  }
  return write_safetensors(path, tensors,
                           {{"format", kStateFormat},
                            {"model", std::to_string(inner_->model->weights.fingerprint())},
                            {"position", std::to_string(state.position())},
                            {"capacity", std::to_string(state.capacity())}});
}

Status Session::restore(const std::string& path) {
  Model::Inner& model = *inner_->model;
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  if (file.metadata("format") != kStateFormat) return bad_input(path + ": is no saved session");
  if (file.metadata("model") != std::to_string(model.weights.fingerprint())) {
    return bad_input(path + ": is a session of another model than " + model.summary.path);
  }
  const auto number = [&](const char* key, int64_t& out) {
    const std::string text = file.metadata(key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    return error == std::errc() && end == text.data() + text.size() && out >= 0;
  };
  int64_t position = 0, capacity = 0;
  if (!number("position", position) || !number("capacity", capacity) || position > model.d.context || position > capacity ||
      capacity > (int64_t{1} << 40)) {
    return bad_input(path + ": its position or capacity is missing or out of range");
  }
  // What the tensors would take must be in the file before anything of that size is allocated.
  int64_t bytes = 0;
  uint64_t stored = 0;
  LINNET_TRY(layers::state_bytes(model.body.record(), std::max<int64_t>(capacity, 1), Dtype::f32, &bytes, model.run.attention));
  for (size_t i = 0; i < file.size(); ++i) stored += file.entry(i).bytes();
  if (static_cast<uint64_t>(bytes) > 2 * stored + 65536) return bad_input(path + ": is too short for its capacity");
  layers::State state;
  LINNET_TRY(model.body.make_state(1, capacity, &state));
  for (const layers::StateTensor& t : state.tensors()) {
    SafetensorsEntry entry;
    LINNET_TRY(file.find(t.name, entry));
    const std::vector<int64_t> shape(t.view.size, t.view.size + t.view.rank);
    if (entry.dtype != safetensors_name(t.view.dtype) || entry.shape != shape) {
      return bad_input(path + ": tensor " + t.name + " has another type or shape than the model's state");
    }
    if (t.view.device == Device::cpu) {
      LINNET_TRY(file.read_bytes(entry, t.view.data));
      continue;
    }
    std::vector<char> host(static_cast<size_t>(t.view.elements() * dtype_size(t.view.dtype)));
    LINNET_TRY(file.read_bytes(entry, host.data()));
    LINNET_TRY(layers::put_bytes(t.view, host.data()));
  }
  state.set_position(position);
  inner_->state = std::move(state);
  return {};
}

Status decode(const std::vector<Session*>& sessions, const std::vector<int32_t>& tokens, std::vector<float>& logits) {
  if (sessions.empty() || sessions.size() != tokens.size()) {
    return bad_input("decode: " + std::to_string(sessions.size()) + " sessions and " + std::to_string(tokens.size()) +
                     " tokens, expected one token for each of at least one session");
  }
  Model::Inner& model = *sessions[0]->inner_->model;
  std::vector<layers::State*> states;
  for (size_t i = 0; i < sessions.size(); ++i) {
    Session::Inner& inner = *sessions[i]->inner_;
    if (inner.model.get() != &model) return bad_input("decode: the sessions belong to different models");
    if (std::find(states.begin(), states.end(), &inner.state) != states.end()) {
      return bad_input("decode: a session is given twice");
    }
    LINNET_TRY(model.check_tokens({tokens[i]}, inner.state.position()));
    states.push_back(&inner.state);
  }
  const int64_t rows = static_cast<int64_t>(sessions.size());
  std::vector<float> hidden(static_cast<size_t>(rows * model.d.hidden));
  logits.resize(static_cast<size_t>(rows * model.d.vocabulary));
  const std::lock_guard<std::mutex> lock(model.mutex);
  LINNET_TRY(model.run_body(tokens, rows, 0, states, hidden.data()));
  return model.run_head(hidden.data(), rows, logits.data());
}

}  // namespace linnet
