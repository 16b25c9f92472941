// Initial values of new parameters, the fit, and the written folder.
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "convert/checkpoint.h"
#include "convert/job.h"
#include "convert/sha256.h"
#include "core/files/file.h"

namespace linnet::convert {

// Stage 6: values of new parameters from the statistics of the heads.
Status Job::initial() {
  if (exists(at("initial.safetensors"))) return {};
  NewTensors tensors;
  LINNET_TRY(initial_values(planned(), tensors));
  std::vector<SafetensorsTensor> out;
  for (const auto& [name, t] : tensors) out.push_back({name, "F32", t.shape, t.values.data()});
  return write_safetensors(at("initial.safetensors"), out);
}

Status Job::initial_values(const std::vector<ConvertedLayer>& layers, NewTensors& tensors) const {
  for (const ConvertedLayer& layer : layers) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> list;
    if (layer.mechanism == "softmax") continue;
    LINNET_TRY(parts_->parameters(layer, list));
    for (const auto& [ours, shape] : list) {
      // layers.<i>.self_attn.<mechanism>.<name> -> linnet.layers.<i>.<mechanism>.<name>
      const std::string key = "self_attn.";
      const size_t cut = ours.find(key);
      const std::string theirs = "linnet." + ours.substr(0, cut) + ours.substr(cut + key.size());
      NewTensor& t = tensors[theirs];
      t.shape = shape;
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      t.values.assign(static_cast<size_t>(count), 0);
      fill(ours.substr(ours.rfind('.', ours.rfind(".weight") == ours.size() - 7 ? ours.size() - 8 : std::string::npos) + 1),
           layer, shape, t.values, theirs);
    }
  }
  return {};
}

void Job::fill(const std::string& name, const ConvertedLayer& layer, const std::vector<int64_t>& shape,
               std::vector<float>& values, const std::string& full) const {
  const size_t i = static_cast<size_t>(layer.index);
  const std::vector<analysis::HeadStatistics> none, &heads = i < errors_.size() ? errors_[i].heads : none;
  if (name == "v_scale" || name == "balance") std::fill(values.begin(), values.end(), 1.0f);
  const bool map = name.find("feature_map") != std::string::npos && shape.size() == 3;
  // [H, K, K]: the identity, until the fit has seen the head; a good start of feature maps too.
  const bool identity = name == "A" || name == "A_inverse" || (map && shape[1] == shape[2] && layer.mechanism != "t2r");
  if (identity) {
    for (size_t n = 0; n < values.size(); ++n) {
      const size_t K = static_cast<size_t>(shape[2]);
      values[n] = n / K % K == n % K ? 1.0f : 0.0f;
    }
  }
  if (name == "window_factor") std::fill(values.begin(), values.end(), layer.mechanism == "hybrid" ? -2.1972246f : 0.0f);
  double low = INFINITY, high = -INFINITY;
  for (const auto& h : heads) low = std::min(low, h.entropy), high = std::max(high, h.entropy);
  for (size_t h = 0; h < values.size() && h < heads.size(); ++h) {
    if (name == "dt_bias") {
      const double target = std::clamp(std::log(2.0) / std::max(heads[h].distance, 0.5), 0.001, 5.0);
      values[h] = static_cast<float>(target + std::log(-std::expm1(-target)));
    } else if (name == "bias" && full.find(".b_proj.") != std::string::npos) {
      const double beta = 0.3 + 0.4 * (1 - (heads[h].entropy - low) / std::max(high - low, 1e-3));
      values[h] = static_cast<float>(std::log(beta / (1 - beta)));
    }
  }
  if (name == "z" || (name.find("feature_map") != std::string::npos && !identity)) {
    uint64_t random = static_cast<uint64_t>(o_.seed) * 1000003 + std::hash<std::string>{}(full);
    const double bound = name == "z" ? 1 : 1 / std::sqrt(static_cast<double>(shape[1]));
    const auto unit = [&] { return (static_cast<double>(mix(random) >> 11) + 0.5) / 9007199254740992.0; };
    for (float& x : values) {
      x = static_cast<float>(name == "z" ? std::sqrt(-2 * std::log(unit())) * std::cos(6.283185307179586 * unit())
                                         : bound * (2 * unit() - 1));
    }
  }
}

bool Job::needs_fit() const {
  if (o_.zero_shot) return false;
  for (const PlannedLayer& p : r_.layers) {
    if (is_trained(p.layer.mechanism)) return true;
  }
  const auto end_to_end = std::find(o_.fit.begin(), o_.fit.end(), "--finetune");
  return !keeps_all() && end_to_end != o_.fit.end() && *(end_to_end + 1) != "none";
}

// Stages 7 and 8 are Python.
Status Job::fit() {
  if (exists(at("fit.safetensors"))) return {};
  const char* python = std::getenv("LINNET_PYTHON");
  std::vector<std::string> words = {
      python != nullptr && *python != '\0' ? python : "python3", "-m", "linnet.convert", "fit", "--work", work_};
  words.insert(words.end(), o_.fit.begin(), o_.fit.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) return impossible(std::string("python cannot be started: ") + std::strerror(errno));
  if (child == 0) {
    execvp(pointers[0], pointers.data());
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 3;
  if (code == 127)
    return impossible(words[0] + ": cannot be started; the fit needs Python with linnet and torch (or --zero-shot)");
  if (code == 2) return bad_input("the fit was refused (see above); the plan stays in " + work_);
  if (code != 0)
    return impossible("the fit ended with code " + std::to_string(code) + " (torch missing? see above); the plan stays in " +
                      work_);
  if (!exists(at("fit.safetensors"))) return impossible(work_ + ": the fit left no fit.safetensors");
  return {};
}

// Stage 10: the folder in the making.
Status Job::write() {
  const std::string made = at("out");
  if (exists(at("written.json"))) return {};
  struct statvfs disk;
  if (statvfs(work_.c_str(), &disk) == 0 && static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize < checkpoint_bytes(*parts_)) {
    return impossible(work_ + ": the disk has " + std::to_string(static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize >> 20) +
                      " MiB left, the converted model needs " + std::to_string(checkpoint_bytes(*parts_) >> 20));
  }
  std::error_code error;
  fs::remove_all(made, error);
  fs::create_directory(made, error);
  if (error) return impossible(made + ": cannot be made: " + error.message());
  NewTensors tensors;
  const std::string values = exists(at("fit.safetensors")) ? at("fit.safetensors") : at("initial.safetensors");
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(values, file));
  for (const std::string& name : file.names()) {
    SafetensorsEntry entry;
    std::vector<double> numbers_in;
    LINNET_TRY(file.find(name, entry));
    LINNET_TRY(file.read_f64(name, numbers_in));
    tensors[name] = {entry.shape, {numbers_in.begin(), numbers_in.end()}};
  }
  CheckpointFacts facts;
  std::string plan_text;
  LINNET_TRY(read_file(at("plan.json"), kMaxStageBytes, plan_text));
  facts.plan_sha256 = sha256_of(plan_text);
  facts.sources = sources_;
  facts.seed = o_.seed;
  tell("writing", 0, 1);
  LINNET_TRY(write_checkpoint(*parts_, o_.model, section_layers(), tensors, facts, made));
  return write_file(at("written.json"), "{}");
}

// The layers of the section: of the plan, and what an earlier conversion left.
std::vector<ConvertedLayer> Job::section_layers() const {
  std::vector<ConvertedLayer> list = planned();
  if (parts_->files().is_gguf()) return list;
  std::string text;
  JsonValue root;
  std::vector<ConvertedLayer> before;
  if (!read_file(o_.model + "/config.json", kMaxStageBytes, text).ok() || !parse_json(text, "config.json", {}, root).ok())
    return list;
  if (!root.has("linnet") || !read_conversion(root.find("linnet"), "config.json", before).ok()) return list;
  for (const ConvertedLayer& layer : before) {
    if (list[static_cast<size_t>(layer.index)].mechanism == "softmax") list[static_cast<size_t>(layer.index)] = layer;
  }
  return list;
}

}  // namespace linnet::convert
