// A conversation with a model, without torch or Python: chat MODEL. Each line you type is a turn.
#include <linnet/runtime.h>

#include <cstdio>
#include <iostream>
#include <string>

namespace {

linnet::Status chat(const char* path) {
  linnet::Model model;
  LINNET_TRY(linnet::Model::load(path, {}, model));
  linnet::ChatTemplate form;
  LINNET_TRY(model.chat(form));  // how the model wants a conversation written
  linnet::Session session;
  LINNET_TRY(model.start(session));
  linnet::Sampler sampler({.temperature = 0.7, .top_p = 0.9, .seed = 1});

  const auto ends = [&](int32_t token) {
    for (const std::string& name : form.ends()) {
      if (token == model.tokenizer().find(name)) return true;
    }
    return model.is_end(token);
  };
  std::string line;
  while (std::cout << "> " << std::flush && std::getline(std::cin, line)) {
    if (line.empty()) continue;
    const auto turn = session.position() == 0 ? form.begin("", line) : form.next(line);
    std::vector<float> logits;
    LINNET_TRY(session.prefill(model.tokenizer().encode(turn, false), logits));
    linnet::TextStream text(model.tokenizer());
    for (int i = 0; i < 256; ++i) {
      const int32_t token = sampler.next(logits.data(), model.vocabulary());
      if (ends(token)) break;
      std::cout << text.next(token) << std::flush;
      LINNET_TRY(session.decode(token, logits));
    }
    std::cout << text.finish() << "\n";
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: chat MODEL\n");
    return 2;
  }
  const linnet::Status status = chat(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "chat: %s\n", status.message().c_str());
  return static_cast<int>(status.code());
}
