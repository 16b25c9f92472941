#include "linnet_c_runtime.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "capi/report.h"
#include "runtime.h"
#include "runtime/evaluate.h"
#include "runtime/files/dequantize.h"
#include "runtime/files/gguf.h"
#include "runtime/tokenizer/tokenizer.h"

using namespace linnet;
using capi::report;

struct linnet_tokenizer {
  std::unique_ptr<Tokenizer> own;
  const Tokenizer* tokenizer = nullptr;
};
struct linnet_model {
  Model model;
  linnet_tokenizer tokenizer;
};
struct linnet_session {
  Session session;
};
struct linnet_sampler {
  Sampler sampler;
};

namespace {

bool ends_with(const std::string& text, const char* end) {
  const size_t n = std::strlen(end);
  return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

Status open_tokenizer(std::string path, std::unique_ptr<Tokenizer>& out) {
  if (ends_with(path, ".gguf")) {
    GgufFile file;
    LINNET_TRY(GgufFile::open(path, file));
    return Tokenizer::from_gguf(file, out);
  }
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) path += "/tokenizer.json";
  return Tokenizer::from_json(path, out);
}

template <class T, class U>
int64_t copy_out(const T& all, U* out, int64_t capacity) {
  const int64_t size = static_cast<int64_t>(all.size());
  if (out != nullptr) std::copy_n(all.data(), std::min(size, std::max<int64_t>(capacity, 0)), out);
  return size;
}

std::vector<int32_t> tokens_of(const int32_t* ids, int64_t count) {
  return count > 0 ? std::vector<int32_t>(ids, ids + count) : std::vector<int32_t>();
}

// Runs f(values) and copies what it gave to `out`, whole or not at all.
template <class F>
int report_values(float* out, char* message, size_t message_bytes, const F& f) {
  return report(message, message_bytes, [&]() -> Status {
    std::vector<float> values;
    LINNET_TRY(f(values));
    std::copy(values.begin(), values.end(), out);
    return {};
  });
}

}  // namespace

linnet_tokenizer* linnet_tokenizer_open(const char* path, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_tokenizer> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    if (path == nullptr) return bad_input("linnet_tokenizer_open: path is NULL");
    made = std::make_unique<linnet_tokenizer>();
    LINNET_TRY(open_tokenizer(path, made->own));
    made->tokenizer = made->own.get();
    return {};
  });
  return code == LINNET_OK ? made.release() : nullptr;
}

void linnet_tokenizer_free(linnet_tokenizer* tokenizer) { delete tokenizer; }

int64_t linnet_tokenizer_size(const linnet_tokenizer* tokenizer) { return tokenizer->tokenizer->size(); }

int64_t linnet_tokenizer_encode(const linnet_tokenizer* tokenizer, const char* text, int64_t bytes, int flags, int32_t* ids,
                                int64_t capacity) {
  const std::string_view view(text, static_cast<size_t>(std::max<int64_t>(bytes, 0)));
  const Tokenizer::EncodeOptions options{(flags & LINNET_ADD_SPECIAL) != 0, (flags & LINNET_PARSE_SPECIAL) != 0};
  return copy_out(tokenizer->tokenizer->encode(view, options), ids, capacity);
}

int64_t linnet_tokenizer_decode(const linnet_tokenizer* tokenizer, const int32_t* ids, int64_t count, int flags, char* text,
                                int64_t capacity) {
  const std::vector<int32_t> all(ids, ids + std::max<int64_t>(count, 0));
  return copy_out(tokenizer->tokenizer->decode(all, {(flags & LINNET_SKIP_SPECIAL) != 0}), text, capacity);
}

linnet_model* linnet_model_open(const char* path, const char* weights, int threads, char* message, size_t message_bytes) {
  const linnet_model_options options = {weights, nullptr, threads};
  return linnet_model_load(path, &options, message, message_bytes);
}
linnet_model* linnet_model_load(const char* path, const linnet_model_options* options, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_model> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    if (path == nullptr) return bad_input("linnet_model_load: path is NULL");
    ModelOptions own;
    if (options != nullptr && options->weights != nullptr) own.weights = options->weights;
    if (options != nullptr && options->attention != nullptr) own.attention = options->attention;
    if (options != nullptr) own.threads = options->threads;
    made = std::make_unique<linnet_model>();
    LINNET_TRY(Model::load(path, own, made->model));
    if (made->model.has_tokenizer()) made->tokenizer.tokenizer = &made->model.tokenizer();
    return {};
  });
  return code == LINNET_OK ? made.release() : nullptr;
}
int64_t linnet_model_json(const linnet_model* model, char* text, int64_t capacity) {
  return copy_out(model_json(model->model), text, capacity);
}
int linnet_model_score(const linnet_model* model, const char* text, int64_t bytes, int64_t length, int64_t stride,
                       int64_t limit, linnet_text_score* score, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    if (text == nullptr) return bad_input("linnet_model_score: text is NULL");
    if (!model->model.summary().causal) return bad_input("linnet_model_score: the model predicts no next token");
    TextOptions options;
    options.length = length > 0 ? length : std::min<int64_t>(1024, model->model.context());
    options.stride = stride;
    options.limit = limit;
    TextScore found;
    LINNET_TRY(score_text(model->model, {text, static_cast<size_t>(std::max<int64_t>(bytes, 0))}, options, {}, found));
    *score = {found.tokens, found.scored, found.bytes, found.windows, found.loss, found.perplexity, found.bits_per_byte};
    return {};
  });
}
int linnet_model_recall(const linnet_model* model, int64_t length, int64_t trials, uint64_t seed, int64_t* passkeys,
                        int64_t* associations, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    if (!model->model.summary().causal) return bad_input("linnet_model_recall: the model predicts no next token");
    std::vector<RecallScore> found;
    LINNET_TRY(score_recall(model->model, {length}, trials, seed, {}, found));
    *passkeys = *associations = 0;
    for (const RecallScore& score : found) *(score.task == "passkey" ? passkeys : associations) += score.right;
    return {};
  });
}

void linnet_model_free(linnet_model* model) { delete model; }
int64_t linnet_model_vocabulary(const linnet_model* model) { return model->model.vocabulary(); }
int64_t linnet_model_context(const linnet_model* model) { return model->model.context(); }
int64_t linnet_model_hidden(const linnet_model* model) { return model->model.summary().hidden; }
int64_t linnet_model_classes(const linnet_model* model) { return model->model.summary().classes; }
int linnet_model_is_end(const linnet_model* model, int32_t token) { return model->model.is_end(token); }
const linnet_tokenizer* linnet_model_tokenizer(const linnet_model* model) {
  return model->tokenizer.tokenizer == nullptr ? nullptr : &model->tokenizer;
}

int64_t linnet_model_chat(const linnet_model* model, const char* system, const char* user, int first, int32_t* ids,
                          int64_t capacity, char* message, size_t message_bytes) {
  int64_t count = -1;
  report(message, message_bytes, [&]() -> Status {
    if (user == nullptr) return bad_input("linnet_model_chat: user is NULL");
    if (!model->model.has_tokenizer()) return bad_input("linnet_model_chat: the model has no tokeniser");
    ChatTemplate chat;
    LINNET_TRY(model->model.chat(chat));
    const std::vector<Tokenizer::Part> parts = first ? chat.begin(system == nullptr ? "" : system, user) : chat.next(user);
    count = copy_out(model->model.tokenizer().encode(parts, false), ids, capacity);
    return {};
  });
  return count;
}

int linnet_model_logits(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                        size_t message_bytes) {
  return report_values(out, message, message_bytes, [&](auto& v) { return model->model.logits(tokens_of(ids, count), v); });
}
int linnet_model_states(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                        size_t message_bytes) {
  return report_values(out, message, message_bytes, [&](auto& v) { return model->model.hidden(tokens_of(ids, count), v); });
}
int linnet_model_losses(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                        size_t message_bytes) {
  return report_values(out, message, message_bytes, [&](auto& v) { return model->model.losses(tokens_of(ids, count), v); });
}
int linnet_model_embed(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                       size_t message_bytes) {
  return report_values(out, message, message_bytes, [&](auto& v) { return model->model.embed(tokens_of(ids, count), v); });
}
int linnet_model_classify(const linnet_model* model, const float* pixels, int64_t count, float* out, char* message,
                          size_t message_bytes) {
  return report_values(out, message, message_bytes, [&](auto& v) {
    return model->model.classify(std::vector<float>(pixels, pixels + std::max<int64_t>(count, 0)), v);
  });
}

linnet_session* linnet_session_start(const linnet_model* model, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_session> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    made = std::make_unique<linnet_session>();
    return model->model.start(made->session);
  });
  return code == LINNET_OK ? made.release() : nullptr;
}
linnet_session* linnet_session_copy(const linnet_session* session, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_session> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    made = std::make_unique<linnet_session>();
    return session->session.copy(made->session);
  });
  return code == LINNET_OK ? made.release() : nullptr;
}
void linnet_session_free(linnet_session* session) { delete session; }
int64_t linnet_session_position(const linnet_session* session) { return session->session.position(); }
int64_t linnet_session_state_bytes(const linnet_session* session) { return session->session.state_bytes(); }
int linnet_session_prefill(linnet_session* session, const int32_t* ids, int64_t count, float* logits, char* message,
                           size_t message_bytes) {
  return report_values(logits, message, message_bytes,
                       [&](auto& v) { return session->session.prefill(tokens_of(ids, count), v); });
}
int linnet_session_decode(linnet_session* const* sessions, const int32_t* tokens, int64_t count, float* logits, char* message,
                          size_t message_bytes) {
  return report_values(logits, message, message_bytes, [&](auto& v) {
    std::vector<Session*> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(&sessions[i]->session);
    return decode(all, tokens_of(tokens, count), v);
  });
}
int linnet_session_save(const linnet_session* session, const char* path, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&] { return session->session.save(path); });
}
int linnet_session_restore(linnet_session* session, const char* path, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&] { return session->session.restore(path); });
}

linnet_sampler* linnet_sampler_new(const linnet_sampling* options, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_sampler> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    SamplerOptions o;
    if (options != nullptr) {
      o = {.temperature = options->temperature,
           .top_k = options->top_k,
           .top_p = options->top_p,
           .min_p = options->min_p,
           .repeat_penalty = options->repeat_penalty,
           .seed = options->seed};
    }
    LINNET_TRY(check_sampling(o));
    made = std::make_unique<linnet_sampler>(linnet_sampler{Sampler(o)});
    return {};
  });
  return code == LINNET_OK ? made.release() : nullptr;
}
void linnet_sampler_free(linnet_sampler* sampler) { delete sampler; }
void linnet_sampler_accept(linnet_sampler* sampler, int32_t token) { sampler->sampler.accept(token); }
int32_t linnet_sampler_next(linnet_sampler* sampler, const float* logits, int64_t vocabulary) {
  return sampler->sampler.next(logits, vocabulary);
}

int linnet_gguf_dequantize(const char* type, const void* data, int64_t elements, float* out, char* message,
                           size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const std::string name = type == nullptr ? "" : type;
    for (uint32_t number = 0; number < 64; ++number) {
      const GgufTypeInfo* info = gguf_type_info(number);
      if (info == nullptr || name != info->name) continue;
      if (elements < 0 || elements % info->block != 0) {
        return bad_input("linnet_gguf_dequantize: " + std::to_string(elements) + " elements, expected a multiple of " +
                         std::to_string(info->block) + " (" + name + ")");
      }
      dequantize(info->type, data, elements, out);
      return {};
    }
    return bad_input("linnet_gguf_dequantize: there is no type '" + name + "'");
  });
}
