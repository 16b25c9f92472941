// Unigram: SentencePiece's language model of pieces (XLM-RoBERTa, T5), and the normaliser that its files hold.
//
//   Unigram model;
//   model.add(" linnet", -9.1, 17); ...
//   model.encode(" linnets", ids);                        // appends: the most likely pieces
//
// Of all ways to cut a text into pieces the one whose scores have the largest sum; a character that is no piece costs 10 more
// than the worst piece, and neighbouring unknown ones are one token. Sums run in double from the front, and the first of equal
// ways wins, as in the `tokenizers` package.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../../core/status.h"

namespace linnet {

class Unigram {
 public:
  int32_t unknown = -1;  // -1: such characters are left out
  bool byte_fallback = false;
  void add(std::string_view piece, double score, int32_t id);
  void set_byte(unsigned char byte, int32_t id) { bytes_[byte] = id; }
  void encode(std::string_view text, std::vector<int32_t>& out) const;

 private:
  struct Node {
    int32_t first = -1, next = -1;  // first child; the next child of the same parent
    int32_t id = -1;                // of the piece that ends here
    unsigned char byte = 0;
  };
  int32_t child(int32_t node, unsigned char byte) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::unordered_map<uint64_t, int32_t> wide_;  // children of the nodes that have many
  std::vector<int32_t> children_ = {0};         // of each node
  std::vector<double> scores_;                  // by token
  double least_ = 0;
  bool any_ = false;
  std::vector<int32_t> bytes_ = std::vector<int32_t>(256, -1);
};

// `precompiled_charsmap`: a double array of UTF-8 sequences and the texts that stand for them.
class CharacterMap {
 public:
  static Status parse(std::string_view base64, CharacterMap& out);
  std::string normalize(std::string_view text) const;

 private:
  bool find(std::string_view piece, std::string_view& text) const;
  std::vector<uint32_t> units_;
  std::string texts_;
};

}  // namespace linnet
