// A GGUF file's metadata as the config.json of the same model, and the names of its tensors.
#pragma once

#include <string>

#include "core/status.h"
#include "runtime/description.h"
#include "runtime/files/gguf.h"

namespace linnet {

// llama, qwen2, qwen3 and gpt2; a sentence for any other architecture.
Status gguf_config(const GgufFile& file, std::string& json);
// The tokeniser as a tokenizer.json, which reads texts in the same tokens; and its tokenizer_config.json with the chat
// template.
Status gguf_tokenizer(const GgufFile& file, std::string& tokenizer, std::string& config);
// Replaces the names of the family by those of GGUF. Rows of llama's q and k are permuted there.
void use_gguf_names(const GgufFile& file, Description& d);

}  // namespace linnet
