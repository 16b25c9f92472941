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

// Blocks of a GGUF tensor as floats. `type` is the format's name ("Q4_K"), `elements` a whole number of blocks.
LINNET_API int linnet_gguf_dequantize(const char* type, const void* data, int64_t elements, float* out, char* message,
                                      size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
