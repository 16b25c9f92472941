// Bpe: byte-pair encoding of one word. Symbols begin as bytes, or as characters where the vocabulary has them and as bytes
// where it has not; again and again the pair that was learned first is merged, the leftmost where it occurs twice.
//
//   Bpe bpe;
//   bpe.set_byte('a', 64); ...
//   bpe.add_merge(left, right, rank, merged); ...
//   bpe.finish();
//   bpe.encode("hello", ids);                                       // appends
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace linnet {

class Bpe {
 public:
  Bpe();
  void set_byte(unsigned char byte, int32_t id) { bytes_[byte] = id; }
  int32_t byte(unsigned char b) const { return bytes_[b]; }  // -1: the vocabulary lacks it, and it is left out of the result
  void reserve(size_t merges);
  void add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged);
  // From now on symbols begin as characters. One that has no token becomes its bytes, or `unknown` (-1: it is left out) where
  // not all of these have one; `fused`: neighbouring unknown characters are one token.
  void use_characters(int32_t unknown, bool fused) {
    characters_ = true;
    unknown_ = unknown;
    fused_ = fused;
  }
  void set_character(std::string_view character, int32_t id) { character_.emplace(character, id); }
  // Words that are tokens are taken whole, whatever the merges say (Llama 3).
  void add_whole(std::string_view word, int32_t id) { whole_.emplace(word, id); }

  void encode(std::string_view word, std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair = kEmpty;
    int32_t rank = 0, merged = 0;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t place(uint64_t pair) const { return (pair * 0x9e3779b97f4a7c15ull) >> shift_; }
  const Slot* find(int32_t left, int32_t right) const;
  void begin(std::string_view word, std::vector<int32_t>& symbols) const;
  void merge_short(int32_t* ids, int n, std::vector<int32_t>& out) const;
  void merge_long(const std::vector<int32_t>& ids, std::vector<int32_t>& out) const;

  int32_t bytes_[256];
  bool characters_ = false, fused_ = false;
  int32_t unknown_ = -1;
  std::unordered_map<std::string, int32_t> character_;
  std::vector<Slot> slots_;  // open addressing, at most half full
  int shift_ = 63;
  size_t used_ = 0;
  std::unordered_map<std::string, int32_t> whole_;
};

}  // namespace linnet
