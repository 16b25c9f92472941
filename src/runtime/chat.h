// chat: how a model wants a conversation written. A model's files hold a template in a programming language (Jinja); Linnet
// runs no code from a model's files, but knows the six common forms by their marks and writes them itself.
//
//   ChatTemplate chat;
//   LINNET_TRY(ChatTemplate::recognize(template_text, chat));         // "<|im_start|>" -> ChatML, ...
//   parts = chat.begin(system, "What is a linnet?");                  // the whole prompt, up to where the answer begins
//   parts = chat.next("And what does it eat?");                       // ends the answer, and the next question
//
//   ChatML   <|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n
//   Llama 2  <s>[INST] <<SYS>>\n ... \n<</SYS>>\n\n ... [/INST]  answer </s>
//   Llama 3  <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n ... <|eot_id|>
//   Zephyr   <|user|>\n ... </s>\n<|assistant|>\n
//   Gemma    <bos><start_of_turn>user\n ... <end_of_turn>\n<start_of_turn>model\n
//   Phi      <|user|>\n ... <|end|>\n<|assistant|>\n
// Only the marks may be special tokens: what a user types cannot close its own turn.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../core/status.h"
#include "tokenizer/tokenizer.h"

namespace linnet {

enum class ChatForm { chatml, llama2, llama3, zephyr, gemma, phi };
const char* chat_form_name(ChatForm form);

class ChatTemplate {
 public:
  // By the template's text; a sentence when it is none of the six. Reads the default system message out of a ChatML template.
  static Status recognize(std::string_view text, ChatTemplate& out);

  ChatForm form() const { return form_; }
  const std::string& default_system() const { return default_system_; }
  // An empty system message means the template's own, if it has one.
  std::vector<Tokenizer::Part> begin(std::string_view system, std::string_view user) const;
  std::vector<Tokenizer::Part> next(std::string_view user) const;
  // The tokens that end an answer, beside the model's own end token.
  std::vector<std::string> ends() const;

 private:
  std::vector<Tokenizer::Part> turn(std::string_view user) const;

  ChatForm form_ = ChatForm::chatml;
  std::string default_system_;
};

}  // namespace linnet
