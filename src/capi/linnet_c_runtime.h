// Models from C: the runtime's part of linnet_c.h, which includes this file.
//
//   char message[256];
//   linnet_tokenizer* tokenizer = linnet_tokenizer_open("model.gguf", message, sizeof message);
//   int32_t ids[64];
//   int64_t count = linnet_tokenizer_encode(tokenizer, "Hello", 5, LINNET_ADD_SPECIAL, ids, 64);
//
// Handles are made by *_open and freed by *_free, which accepts NULL. A failing *_open gives NULL and a sentence. A tokeniser
// may be used by many threads at once.
#ifndef LINNET_C_RUNTIME_H_
#define LINNET_C_RUNTIME_H_

#include "linnet_c.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LINNET_ADD_SPECIAL = 1, LINNET_PARSE_SPECIAL = 2, LINNET_SKIP_SPECIAL = 4 };

typedef struct linnet_tokenizer linnet_tokenizer;
// A tokenizer.json, a model's folder that holds one, or a GGUF file.
LINNET_API linnet_tokenizer* linnet_tokenizer_open(const char* path, char* message, size_t message_bytes);
LINNET_API void linnet_tokenizer_free(linnet_tokenizer* tokenizer);
LINNET_API int64_t linnet_tokenizer_size(const linnet_tokenizer* tokenizer);
// The number of tokens; at most `capacity` of them are written. Flags: LINNET_ADD_SPECIAL, LINNET_PARSE_SPECIAL.
LINNET_API int64_t linnet_tokenizer_encode(const linnet_tokenizer* tokenizer, const char* text, int64_t bytes, int flags,
                                           int32_t* ids, int64_t capacity);
// The number of bytes of UTF-8; at most `capacity` of them are written, without a zero at the end. Flag: LINNET_SKIP_SPECIAL.
LINNET_API int64_t linnet_tokenizer_decode(const linnet_tokenizer* tokenizer, const int32_t* ids, int64_t count, int flags,
                                           char* text, int64_t capacity);

typedef struct linnet_model linnet_model;
// A folder with config.json and safetensors, or a GGUF file. weights: "f32", "bf16", "q8", "q4", or NULL: as in the file.
LINNET_API linnet_model* linnet_model_open(const char* path, const char* weights, int threads, char* message,
                                           size_t message_bytes);
typedef struct {
  const char* weights;    // as in linnet_model_open
  const char* attention;  // "f32", "bf16": what softmax attention computes in and its cache holds; NULL: f32 with f32 matrices
  int threads;            // 0: LINNET_THREADS, else one per core
} linnet_model_options;
// The same with every option; options NULL: the defaults.
LINNET_API linnet_model* linnet_model_load(const char* path, const linnet_model_options* options, char* message,
                                           size_t message_bytes);
LINNET_API void linnet_model_free(linnet_model* model);
// What `linnet info MODEL --json` prints. The number of bytes; at most `capacity` of them are written, without a zero at the
// end.
LINNET_API int64_t linnet_model_json(const linnet_model* model, char* text, int64_t capacity);
LINNET_API int64_t linnet_model_vocabulary(const linnet_model* model);
LINNET_API int64_t linnet_model_context(const linnet_model* model);
LINNET_API int64_t linnet_model_hidden(const linnet_model* model);
LINNET_API int64_t linnet_model_classes(const linnet_model* model);
LINNET_API int linnet_model_is_end(const linnet_model* model, int32_t token);
// The model's own, NULL where it has none; not to be freed.
LINNET_API const linnet_tokenizer* linnet_model_tokenizer(const linnet_model* model);
// The tokens of a question in the model's chat form: with the system message (NULL: the model's own) when `first` is not 0,
// otherwise behind an answer. Gives their number, -1 with a sentence on failure; at most `capacity` are written.
LINNET_API int64_t linnet_model_chat(const linnet_model* model, const char* system, const char* user, int first, int32_t* ids,
                                     int64_t capacity, char* message, size_t message_bytes);
// Logits of every token [count, vocabulary]; states of every token [count, hidden]; losses of all but the first token
// [count - 1]; an encoder's pooled vector [hidden]; logits of an image's classes (the class token's state where there are
// none).
LINNET_API int linnet_model_logits(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                                   size_t message_bytes);
LINNET_API int linnet_model_states(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                                   size_t message_bytes);
LINNET_API int linnet_model_losses(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                                   size_t message_bytes);
LINNET_API int linnet_model_embed(const linnet_model* model, const int32_t* ids, int64_t count, float* out, char* message,
                                  size_t message_bytes);
LINNET_API int linnet_model_classify(const linnet_model* model, const float* pixels, int64_t count, float* out, char* message,
                                     size_t message_bytes);

// What `linnet eval MODEL --text` prints: windows of `length` tokens (0: 1024, at most the context), each `stride` behind the
// last (0: length), of the first `limit` tokens (0: all).
typedef struct {
  int64_t tokens, scored, bytes, windows;
  double loss, perplexity, bits_per_byte;
} linnet_text_score;
LINNET_API int linnet_model_score(const linnet_model* model, const char* text, int64_t bytes, int64_t length, int64_t stride,
                                  int64_t limit, linnet_text_score* score, char* message, size_t message_bytes);
// What `linnet eval MODEL --recall --length N` prints: how many of `trials` pass keys and associations were found again.
LINNET_API int linnet_model_recall(const linnet_model* model, int64_t length, int64_t trials, uint64_t seed, int64_t* passkeys,
                                   int64_t* associations, char* message, size_t message_bytes);

typedef struct linnet_session linnet_session;
LINNET_API linnet_session* linnet_session_start(const linnet_model* model, char* message, size_t message_bytes);
LINNET_API linnet_session* linnet_session_copy(const linnet_session* session, char* message, size_t message_bytes);
LINNET_API void linnet_session_free(linnet_session* session);
LINNET_API int64_t linnet_session_position(const linnet_session* session);
LINNET_API int64_t linnet_session_state_bytes(const linnet_session* session);
// Feeds tokens; logits [vocabulary] are those behind the last one.
LINNET_API int linnet_session_prefill(linnet_session* session, const int32_t* ids, int64_t count, float* logits, char* message,
                                      size_t message_bytes);
// One token for each of several sessions of one model: logits [count, vocabulary].
LINNET_API int linnet_session_decode(linnet_session* const* sessions, const int32_t* tokens, int64_t count, float* logits,
                                     char* message, size_t message_bytes);
LINNET_API int linnet_session_save(const linnet_session* session, const char* path, char* message, size_t message_bytes);
LINNET_API int linnet_session_restore(linnet_session* session, const char* path, char* message, size_t message_bytes);

typedef struct linnet_sampler linnet_sampler;
typedef struct {
  double temperature, top_p, min_p, repeat_penalty;  // 0, 1, 0, 1: the most likely token
  int64_t top_k;                                     // 0: all
  uint64_t seed;
} linnet_sampling;
LINNET_API linnet_sampler* linnet_sampler_new(const linnet_sampling* options, char* message, size_t message_bytes);
LINNET_API void linnet_sampler_free(linnet_sampler* sampler);
LINNET_API void linnet_sampler_accept(linnet_sampler* sampler, int32_t token);
LINNET_API int32_t linnet_sampler_next(linnet_sampler* sampler, const float* logits, int64_t vocabulary);

// Blocks of a GGUF tensor as floats. `type` is the format's name ("Q4_K"), `elements` a whole number of blocks.
LINNET_API int linnet_gguf_dequantize(const char* type, const void* data, int64_t elements, float* out, char* message,
                                      size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
