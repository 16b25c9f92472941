// linnet embed: texts as vectors, by an encoder.
#include <cstdio>
#include <sstream>

#include "cli/model.h"
#include "cli/print.h"
#include "core/files/json.h"

namespace linnet::cli {

namespace {

Status run(const Arguments& args) {
  std::vector<std::string> texts(args.rest().begin() + (args.rest().empty() ? 0 : 1), args.rest().end());
  if (texts.empty() && !args.rest().empty()) {
    std::istringstream input(read_input());
    for (std::string line; std::getline(input, line);) texts.push_back(line);
    if (texts.empty()) return bad_input("embed: which texts? give them as arguments, or one per line on standard input");
  }
  Model model;
  LINNET_TRY(load_model("embed", args, model));
  if (!model.has_tokenizer()) return bad_input("embed: " + model.summary().path + " has no tokenizer.json");
  std::vector<std::vector<float>> all(texts.size());
  Progress progress("embed", static_cast<int64_t>(texts.size()), "texts");
  for (size_t i = 0; i < texts.size(); ++i) {
    LINNET_TRY(model.embed(model.tokenizer().encode(texts[i], {true, false}), all[i]));
    progress.at(static_cast<int64_t>(i + 1));
  }
  progress.clear();
  if (args.has("similarity")) {
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = 0; j < all.size(); ++j) {
        double dot = 0;
        for (size_t c = 0; c < all[i].size(); ++c) dot += static_cast<double>(all[i][c]) * all[j][c];
        std::printf("%s%.4f", j ? " " : "", dot);
      }
      std::printf("\n");
    }
    return {};
  }
  for (const std::vector<float>& vector : all) {
    JsonWriter w;
    w.begin_array();
    for (const float x : vector) w.value(static_cast<double>(x));
    w.end_array();
    std::printf("%s\n", w.text().c_str());
  }
  return {};
}

int embed_main(const Arguments& args) {
  const Status status = run(args);
  return status.ok() ? kDone : fail(status);
}

}  // namespace

const Command& embed_command() {
  static const Command command = {
      .name = "embed",
      .summary = "texts as vectors, by an encoder (BERT, MiniLM)",
      .usage = "MODEL [TEXT ...]",
      .details =
          "Prints for each text, or each line of standard input, the mean of the encoder's last states, of length one, as a "
          "JSON\n"
          "array in a line.\n\nexample: linnet embed all-MiniLM-L6-v2 \"a small finch\" \"a kind of bird\" --similarity",
      .options = {{"similarity", "", "print the cosines between the texts instead"},
                  kWeightsOption,
                  kAttentionOption,
                  kThreadsOption,
                  kDeviceOption},
      .run = embed_main,
  };
  return command;
}

}  // namespace linnet::cli
