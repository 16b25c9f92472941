#include "linnet_c_runtime.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "capi/report.h"
#include "runtime/dequantize.h"
#include "runtime/tokenizer.h"

using namespace linnet;
using capi::report;

struct linnet_tokenizer {
  std::unique_ptr<Tokenizer> tokenizer;
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

}  // namespace

linnet_tokenizer* linnet_tokenizer_open(const char* path, char* message, size_t message_bytes) {
  std::unique_ptr<linnet_tokenizer> made;
  const int code = report(message, message_bytes, [&]() -> Status {
    if (path == nullptr) return bad_input("linnet_tokenizer_open: path is NULL");
    made.reset(new linnet_tokenizer);
    return open_tokenizer(path, made->tokenizer);
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
