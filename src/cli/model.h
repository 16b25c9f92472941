// What generate, eval, embed, bench and info share: loading a model with the options of the command line.
#pragma once

#include <string>

#include "cli/command.h"
#include "runtime.h"

namespace linnet::cli {

inline const OptionHelp kWeightsOption = {"weights", "KIND",
                                          "hold the matrices in f32, bf16, q8 or q4 (default: as in the file)"};
inline const OptionHelp kAttentionOption = {"attention", "KIND",
                                            "softmax attention and its cache in f32 or bf16 (default: f32 with f32 matrices)"};
inline const OptionHelp kThreadsOption = {"threads", "N",
                                          "threads (default: LINNET_THREADS, else one per core); never changes a result"};

inline const OptionHelp kDeviceOption = {"device", "NAME", "where the model runs: cpu (default) or cuda"};

// The model that the first argument names. `command` opens the sentences.
Status load_model(const std::string& command, const Arguments& args, Model& model);
// Whether a word of the command line is a model: a folder or a GGUF file.
bool is_model_path(const std::string& word);
int model_info(const Arguments& args);
int model_bench(const Arguments& args);
// All of standard input.
std::string read_input();

}  // namespace linnet::cli
