#include "runtime/chat.h"

#include <utility>

#include "core/files/json.h"

namespace linnet {

namespace {

using Parts = std::vector<Tokenizer::Part>;

bool has(std::string_view text, std::string_view mark) { return text.find(mark) != std::string_view::npos; }

std::string trimmed(std::string_view text) {
  const char* const space = " \t\n\r\v\f";
  const size_t first = text.find_first_not_of(space);
  return first == std::string_view::npos ? "" : std::string(text.substr(first, text.find_last_not_of(space) - first + 1));
}

// The text between `open` and `close` when it is a literal of the template, with \n for line ends; otherwise nothing.
std::string literal_between(std::string_view text, std::string_view open, std::string_view close) {
  const size_t at = text.find(open);
  if (at == std::string_view::npos) return "";
  std::string_view rest = text.substr(at + open.size());
  if (rest.substr(0, 2) == "\\n") {
    rest.remove_prefix(2);
  } else if (rest.substr(0, 1) == "\n") {
    rest.remove_prefix(1);
  } else {
    return "";
  }
  const std::string_view found = rest.substr(0, rest.find(close));
  if (found.size() == rest.size() || found.find_first_of("'\"{}+") != std::string_view::npos) return "";
  std::string out;
  for (size_t i = 0; i < found.size(); ++i) {
    const bool line = found.substr(i, 2) == "\\n";
    out += line ? '\n' : found[i];
    i += line;
  }
  return out;
}

}  // namespace

const char* chat_form_name(ChatForm form) {
  switch (form) {
    case ChatForm::chatml: return "ChatML";
    case ChatForm::llama2: return "Llama 2";
    case ChatForm::llama3: return "Llama 3";
    case ChatForm::zephyr: return "Zephyr";
    case ChatForm::gemma: return "Gemma";
    case ChatForm::phi: return "Phi";
  }
  return "";
}

Status ChatTemplate::recognize(std::string_view text, ChatTemplate& out) {
  ChatTemplate made;
  if (has(text, "<|im_start|>")) {
    made.form_ = ChatForm::chatml;
    made.default_system_ = literal_between(text, "<|im_start|>system", "<|im_end|>");
  } else if (has(text, "<|start_header_id|>")) {
    made.form_ = ChatForm::llama3;
  } else if (has(text, "<start_of_turn>")) {
    made.form_ = ChatForm::gemma;
  } else if (has(text, "[INST]")) {
    made.form_ = ChatForm::llama2;
  } else if (has(text, "<|user|>") && has(text, "<|end|>")) {
    made.form_ = ChatForm::phi;
  } else if (has(text, "<|user|>")) {
    made.form_ = ChatForm::zephyr;
  } else if (text.empty()) {
    return bad_input("the model has no chat template; give a plain prompt instead");
  } else {
    return bad_input("the model's chat template is none of ChatML, Llama 2, Llama 3, Zephyr, Gemma and Phi: it begins " +
                     json_quote_short(text));
  }
  out = std::move(made);
  return {};
}

Parts ChatTemplate::turn(std::string_view user) const {
  switch (form_) {
    case ChatForm::chatml:
      return {{"<|im_start|>user\n", true}, {std::string(user)}, {"<|im_end|>\n<|im_start|>assistant\n", true}};
    case ChatForm::llama3:
      return {{"<|start_header_id|>user<|end_header_id|>\n\n", true},
              {trimmed(user)},
              {"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", true}};
    case ChatForm::llama2: return {{"[INST] ", true}, {trimmed(user)}, {" [/INST]", true}};
    case ChatForm::zephyr: return {{"<|user|>\n", true}, {std::string(user)}, {"</s>\n<|assistant|>\n", true}};
    case ChatForm::phi: return {{"<|user|>\n", true}, {std::string(user)}, {"<|end|>\n<|assistant|>\n", true}};
    case ChatForm::gemma:
      return {{"<start_of_turn>user\n", true}, {trimmed(user)}, {"<end_of_turn>\n<start_of_turn>model\n", true}};
  }
  return {};
}

Parts ChatTemplate::begin(std::string_view given, std::string_view user) const {
  const std::string system = given.empty() ? default_system_ : std::string(given);
  Parts parts;
  if (form_ == ChatForm::llama3) parts.push_back({"<|begin_of_text|>", true});
  if (form_ == ChatForm::llama2) parts.push_back({"<s>", true});
  if (form_ == ChatForm::gemma) parts.push_back({"<bos>", true});
  std::string asked(user);
  if (!system.empty()) {
    const auto add = [&](const char* open, const std::string& text, const char* close) {
      parts.push_back({open, true});
      parts.push_back({text});
      parts.push_back({close, true});
    };
    switch (form_) {
      case ChatForm::chatml: add("<|im_start|>system\n", system, "<|im_end|>\n"); break;
      case ChatForm::llama3: add("<|start_header_id|>system<|end_header_id|>\n\n", trimmed(system), "<|eot_id|>"); break;
      case ChatForm::zephyr: add("<|system|>\n", system, "</s>\n"); break;
      case ChatForm::phi: add("<|system|>\n", system, "<|end|>\n"); break;
      // These two have no turn for it: it stands before the first question.
      case ChatForm::llama2: asked = "<<SYS>>\n" + system + "\n<</SYS>>\n\n" + trimmed(user); break;
      case ChatForm::gemma: asked = system + "\n\n" + trimmed(user); break;
    }
  }
  for (Tokenizer::Part& part : turn(asked)) parts.push_back(std::move(part));
  return parts;
}

Parts ChatTemplate::next(std::string_view user) const {
  Parts parts;
  switch (form_) {
    case ChatForm::chatml: parts.push_back({"<|im_end|>\n", true}); break;
    case ChatForm::llama3: parts.push_back({"<|eot_id|>", true}); break;
    case ChatForm::llama2: parts.push_back({" </s><s>", true}); break;
    case ChatForm::zephyr: parts.push_back({"</s>\n", true}); break;
    case ChatForm::phi: parts.push_back({"<|end|>\n", true}); break;
    case ChatForm::gemma: parts.push_back({"<end_of_turn>\n", true}); break;
  }
  for (Tokenizer::Part& part : turn(user)) parts.push_back(std::move(part));
  return parts;
}

std::vector<std::string> ChatTemplate::ends() const {
  switch (form_) {
    case ChatForm::chatml: return {"<|im_end|>", "<|endoftext|>"};
    case ChatForm::llama3: return {"<|eot_id|>", "<|end_of_text|>"};
    case ChatForm::llama2:
    case ChatForm::zephyr: return {"</s>"};
    case ChatForm::phi: return {"<|end|>", "<|endoftext|>"};
    case ChatForm::gemma: return {"<end_of_turn>", "<eos>"};
  }
  return {};
}

}  // namespace linnet
