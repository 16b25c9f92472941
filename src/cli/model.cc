#include "cli/model.h"

#include <sys/stat.h>

#include <cstdio>

#include "cli/print.h"
#include "core/op.h"
#include "runtime/evaluate.h"

namespace linnet::cli {

Status load_model(const std::string& command, const Arguments& args, Model& model) {
  if (args.rest().empty())
    return bad_input(command + ": which model? a folder with config.json and safetensors, or a GGUF file");
  if (args.rest().size() > 1 && command != "embed" && command != "analyze") {  // texts, mixers
    return bad_input(command + ": what is '" + args.rest()[1] + "'? expected one MODEL");
  }
  ModelOptions options;
  options.weights = args.text("weights");
  options.attention = args.text("attention");
  options.device = args.text("device");
  int64_t threads = 0;
  LINNET_TRY(args.integer("threads", 1, 1024, &threads));
  options.threads = static_cast<int>(threads);
  LINNET_TRY(Model::load(args.rest().front(), options, model));
  for (const std::string& warning : model.summary().warnings) std::fprintf(stderr, "linnet: %s\n", warning.c_str());
  return {};
}

bool is_model_path(const std::string& word) {
  struct stat info;
  if (stat(word.c_str(), &info) != 0) return word.find('/') != std::string::npos || word.ends_with(".gguf");
  return true;
}

std::string read_input() {
  std::string text;
  char buffer[65536];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, stdin)) > 0;) text.append(buffer, n);
  return text;
}

int model_info(const Arguments& args) {
  Model model;
  if (const Status status = load_model("info", args, model); !status.ok()) return fail(status);
  const ModelSummary& s = model.summary();
  // Neighbouring blocks that are alike stand in one line.
  struct Run {
    size_t first, count;
  };
  std::vector<Run> runs;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    const auto same = [&](const ModelSummary::Block& a, const ModelSummary::Block& b) {
      return a.mixer == b.mixer && a.mlp == b.mlp && a.parameters == b.parameters;
    };
    if (!runs.empty() && same(s.blocks[runs.back().first], s.blocks[i])) {
      ++runs.back().count;
    } else {
      runs.push_back({i, 1});
    }
  }
  ChatTemplate chat;
  const std::string form = model.chat(chat).ok() ? chat_form_name(chat.form()) : "none that is known";
  const Impl* impl = nullptr;
  const Op* dense = find_op("dense");
  const std::string here = dense != nullptr && choose_impl(*dense, Pass::forward, {}, &impl).ok() ? impl->name : "";
  if (args.has("json")) {
    std::printf("%s\n", model_json(model).c_str());
    return kDone;
  }
  std::printf("%s: a %s model, %s\n\n", s.path.c_str(), s.family.c_str(), s.format.c_str());
  Table table({{"blocks"}, {"order"}, {"mixer"}, {"mlp"}, {"parameters each", Align::right}});
  for (const Run& run : runs) {
    const ModelSummary::Block& block = s.blocks[run.first];
    const std::string which = run.count == 1 ? std::to_string(run.first)
                                             : std::to_string(run.first) + ".." + std::to_string(run.first + run.count - 1);
    table.row({"  " + which, block.order, block.mixer, block.mlp, std::to_string(block.parameters)});
  }
  table.print(stdout);
  std::printf("\n  parameters   %lld, held in %s: %s\n", static_cast<long long>(s.parameters), s.weights.c_str(),
              bytes_text(static_cast<double>(s.weight_bytes)).c_str());
  if (s.images) {
    std::printf("  images       %lld classes\n", static_cast<long long>(s.classes));
  } else {
    std::printf("  vocabulary   %lld, %s\n", static_cast<long long>(s.vocabulary),
                model.has_tokenizer() ? model.tokenizer().kind() : "no tokeniser");
    if (s.context >= int64_t{1} << 40) {
      std::printf("  context      not limited\n");
    } else {
      std::printf("  context      %lld tokens\n", static_cast<long long>(s.context));
    }
  }
  if (s.causal) {
    const bool grows = s.state_per_token > 0;
    std::printf(
        "  state        %s%s\n", bytes_text(static_cast<double>(s.state_bytes)).c_str(),
        grows ? (", and " + bytes_text(s.state_per_token) + " for each token; softmax attention in " + s.attention).c_str()
              : ", however long the text");
    std::printf("  chat         %s\n", form.c_str());
  }
  std::printf("  runs on      CPU, kernels %s\n", here.c_str());
  return kDone;
}

}  // namespace linnet::cli
