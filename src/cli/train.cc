// linnet train: starts python -m linnet.train, which says the same with --help of its own.
#include "cli/command.h"
#include "cli/python_job.h"

namespace linnet::cli {
namespace {

// --set takes one name=value; more of them may stand behind it or anywhere else, as words without --.
int train_main(const Arguments& args) {
  std::vector<std::string> words, settings = args.all("set");
  for (const std::string& word : args.rest()) {
    (word.find('=') == std::string::npos ? words : settings).push_back(word);
  }
  if (words.size() > 1) {
    return fail(bad_input("train: '" + words[1] + "' is one word too many, expected one task and name=value"));
  }
  for (const char* name : {"layer", "config", "out"}) {
    if (args.has(name)) words.insert(words.end(), {std::string("--") + name, args.text(name)});
  }
  for (const char* name : {"full", "json", "settings"}) {
    if (args.has(name)) words.push_back(std::string("--") + name);
  }
  for (const std::string& setting : settings) words.insert(words.end(), {"--set", setting});
  return run_python_job("train", args.text("python"), words);
}

}  // namespace

const Command& train_command() {
  static const Command command = {
      .name = "train",
      .summary = "a model of any layer learns a task: MQAR, MAD, ListOps, RegBench, text, images, series (needs torch)",
      .usage = "TASK [--layer LAYER] [--set NAME=VALUE ...] [options]",
      .details =
          "  linnet train mqar --layer gated_deltanet --set width=64 pairs=8\n"
          "  linnet train text --layer deltanet,softmax_attention --set path=enwik8.gz layers=6 steps=2000\n"
          "  linnet report runs/*                                   # the runs side by side\n\n"
          "A run is a folder, runs/TASK-LAYER: metrics.jsonl, checkpoints, result.json, report.html. The same command goes on\n"
          "where a killed one stopped, with the same numbers. Names behind --set are settings of the loop (--settings lists\n"
          "them), options of the task (linnet tasks show TASK) or of the layer (linnet info LAYER). Several processes:\n"
          "torchrun --nproc_per_node 2 -m linnet.train TASK ... --set parallel=ddp.",
      .options = {{"layer", "NAME", "the mixer of every block (linnet list); several with commas take turns"},
                  {"set", "NAME=VALUE", "one or more settings"},
                  {"config", "FILE", "a TOML file of settings, one name = value a line"},
                  {"full", "", "the paper's protocol instead of the small one"},
                  {"out", "RUN", "the run's folder; default runs/TASK-LAYER"},
                  {"settings", "", "list the settings and tasks"},
                  {"json", "", "print the result as JSON"},
                  {"python", "PATH", "the Python to take; default LINNET_PYTHON, the one beside this program, .venv, python3"}},
      .run = train_main,
  };
  return command;
}

}  // namespace linnet::cli
