// unicode: what the tokenisers ask about code points, and UTF-8.
//
//   const unsigned char* flag = unicode::flags();
//   if (flag[point] & unicode::kLetter) ...                        // \p{L}
//   std::string composed = unicode::nfc(text);
//
// Texts given to the tokenisers are valid UTF-8 (to_valid_utf8 makes them so); decode() relies on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace linnet::unicode {

enum : unsigned char {
  kLetter = 1,        // \p{L}
  kNumber = 2,        // \p{N}
  kDigit = 4,         // a number to the `Digits` rule, which knows a few code points more
  kSpace = 8,         // \s
  kMark = 16,         // stripped as an accent by BERT
  kRemoved = 32,      // dropped by BERT's cleaning
  kPunctuation = 64,  // split off by BERT
  kWord = 128,        // \w
};
inline constexpr uint32_t kPoints = 0x110000;

const unsigned char* flags();  // one byte for each of kPoints, made on first use
uint32_t lower(uint32_t point);

// The code point at text[at], and its number of bytes.
inline uint32_t decode(std::string_view text, size_t at, int& bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[at + i])); };
  const uint32_t b = byte(0);
  if (b < 0x80) return bytes = 1, b;
  if (b < 0xe0) return bytes = 2, (b & 31) << 6 | (byte(1) & 63);
  if (b < 0xf0) return bytes = 3, (b & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
  return bytes = 4, (b & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
}
void append(std::string& out, uint32_t point);

// The end of the cluster (what a reader takes for one character) that begins at text[at]. Clusters of Hangul, flags and emoji
// come in their parts.
size_t cluster_end(std::string_view text, size_t at);
bool is_white(uint32_t point);  // White_Space

std::string nfd(std::string_view text);
std::string nfc(std::string_view text);

// Bytes that are no UTF-8 become U+FFFD, one for each maximal piece of a sequence, as the web's decoders do.
std::string to_valid_utf8(std::string_view bytes);
// How many bytes at the end begin a sequence that later bytes could complete: 0 to 3.
size_t incomplete_tail(std::string_view bytes);

}  // namespace linnet::unicode
