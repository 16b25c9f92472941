// WordPiece: BERT's tokeniser. The text is cleaned (control characters dropped, spaces made equal, Chinese characters set
// apart, accents stripped, lower case), cut at spaces and punctuation, and each word is read greedily as the longest pieces of
// the vocabulary; pieces that continue a word stand there with a prefix (##). A word that cannot be read is one unknown token.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace linnet {

struct BertRules {
  bool clean = true, chinese = true, strip_accents = true, lower = true;
};

// The cleaned text. `text` is valid UTF-8.
std::string bert_normalize(const BertRules& rules, std::string_view text);
// The end of the word that begins at text[at], which is no space.
size_t bert_word_end(std::string_view text, size_t at);
bool bert_space_at(std::string_view text, size_t at, size_t& next);

class WordPiece {
 public:
  // Words of more code points than this are unknown.
  int64_t most_characters = 100;
  int32_t unknown = -1;

  void add(std::string_view piece, bool continues, int32_t id);
  void encode(std::string_view word, std::vector<int32_t>& out) const;  // appends

 private:
  std::unordered_map<std::string, int32_t> begin_, continue_;
  size_t longest_begin_ = 0, longest_continue_ = 0;  // in bytes
};

}  // namespace linnet
