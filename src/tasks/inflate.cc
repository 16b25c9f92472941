#include "tasks/inflate.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/files/file.h"

namespace linnet::tasks {
namespace {

class Bits {
 public:
  explicit Bits(const std::vector<uint8_t>& bytes, size_t at) : bytes_(bytes), at_(at) {}
  // n <= 16 bits, the lowest first. Behind the end zeros, and `ended` is set.
  uint32_t take(int n) {
    while (count_ < n) {
      if (at_ >= bytes_.size()) ended = true;
      hold_ |= static_cast<uint64_t>(at_ < bytes_.size() ? bytes_[at_] : 0) << count_;
      ++at_;
      count_ += 8;
    }
    const auto bits = static_cast<uint32_t>(hold_ & ((uint64_t{1} << n) - 1));
    hold_ >>= n;
    count_ -= n;
    return bits;
  }
  void align() { take(count_ % 8); }
  // Where the next whole byte stands; only after align().
  size_t byte_position() const { return at_ - static_cast<size_t>(count_ / 8); }
  bool ended = false;

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_;
  uint64_t hold_ = 0;
  int count_ = 0;
};

// Canonical Huffman codes, decoded length by length.
class Huffman {
 public:
  // False when the lengths are no code.
  bool build(const uint8_t* lengths, int n) {
    counts_.fill(0);
    for (int i = 0; i < n; ++i) ++counts_[lengths[i]];
    counts_[0] = 0;
    int left = 1;
    for (int length = 1; length < 16; ++length) {
      left = 2 * left - counts_[static_cast<size_t>(length)];
      if (left < 0) return false;
    }
    std::array<int, 16> begin = {};
    for (size_t length = 1; length < 15; ++length) begin[length + 1] = begin[length] + counts_[length];
    for (int i = 0; i < n; ++i) {
      if (lengths[i] != 0) symbols_[static_cast<size_t>(begin[lengths[i]]++)] = static_cast<uint16_t>(i);
    }
    return true;
  }
  int decode(Bits& bits) const {  // -1: no such code
    int code = 0, first = 0, index = 0;
    for (size_t length = 1; length < 16; ++length) {
      code |= static_cast<int>(bits.take(1));
      const int count = counts_[length];
      if (code - count < first) return symbols_[static_cast<size_t>(index + code - first)];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    return -1;
  }

 private:
  std::array<int, 16> counts_ = {};
  std::array<uint16_t, 288> symbols_ = {};
};

constexpr int kLengthBase[] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                               31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr int kLengthExtra[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr int kDistanceBase[] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr int kDistanceExtra[] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                  6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
constexpr int kLengthOrder[] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

Status damaged(const char* what) { return bad_input(std::string("it is damaged: ") + what); }

Status read_codes(Bits& bits, Huffman* literals, Huffman* distances) {
  const int literal_count = static_cast<int>(bits.take(5)) + 257, distance_count = static_cast<int>(bits.take(5)) + 1;
  const int length_count = static_cast<int>(bits.take(4)) + 4;
  if (literal_count > 286 || distance_count > 30) return damaged("a block has too many codes");
  uint8_t lengths[320] = {};
  for (int i = 0; i < length_count; ++i) lengths[kLengthOrder[i]] = static_cast<uint8_t>(bits.take(3));
  Huffman code;
  if (!code.build(lengths, 19)) return damaged("the lengths of its codes are no code");
  std::fill(std::begin(lengths), std::end(lengths), uint8_t{0});
  for (int i = 0; i < literal_count + distance_count;) {
    const int symbol = code.decode(bits);
    if (symbol < 0 || bits.ended) return damaged("a block's codes break off");
    if (symbol < 16) {
      lengths[i++] = static_cast<uint8_t>(symbol);
      continue;
    }
    if (symbol == 16 && i == 0) return damaged("a length repeats nothing");
    const uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
    int repeat = symbol == 16   ? 3 + static_cast<int>(bits.take(2))
                 : symbol == 17 ? 3 + static_cast<int>(bits.take(3))
                                : 11 + static_cast<int>(bits.take(7));
    if (i + repeat > literal_count + distance_count) return damaged("a block has too many lengths");
    while (repeat-- > 0) lengths[i++] = value;
  }
  if (!literals->build(lengths, literal_count) || !distances->build(lengths + literal_count, distance_count)) {
    return damaged("its codes are over-subscribed");
  }
  return {};
}

void fixed_codes(Huffman* literals, Huffman* distances) {
  uint8_t lengths[288];
  for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
  literals->build(lengths, 288);
  std::fill(lengths, lengths + 30, uint8_t{5});
  distances->build(lengths, 30);
}

Status inflate(Bits& bits, uint64_t limit, const std::vector<uint8_t>& in, std::vector<uint8_t>* out) {
  const auto too_large = [&] { return bad_input("it holds more than " + std::to_string(limit) + " bytes"); };
  for (bool last = false; !last;) {
    last = bits.take(1) == 1;
    const uint32_t type = bits.take(2);
    if (type == 0) {
      bits.align();
      const uint32_t length = bits.take(16), complement = bits.take(16);
      if (length != (complement ^ 0xffff)) return damaged("a stored block has the wrong length");
      const size_t at = bits.byte_position();
      if (at + length > in.size()) return damaged("it breaks off");
      if (out->size() + length > limit) return too_large();
      for (uint32_t i = 0; i < length; ++i) out->push_back(static_cast<uint8_t>(bits.take(8)));
      continue;
    }
    if (type == 3) return damaged("a block has no type");
    Huffman literals, distances;
    if (type == 1) {
      fixed_codes(&literals, &distances);
    } else {
      LINNET_TRY(read_codes(bits, &literals, &distances));
    }
    for (;;) {
      const int symbol = literals.decode(bits);
      if (bits.ended) return damaged("it breaks off");
      if (symbol == 256) break;
      if (symbol < 0 || symbol > 285) return damaged("an unknown code");
      if (symbol < 256) {
        if (out->size() >= limit) return too_large();
        out->push_back(static_cast<uint8_t>(symbol));
        continue;
      }
      const size_t length = static_cast<size_t>(kLengthBase[symbol - 257]) + bits.take(kLengthExtra[symbol - 257]);
      const int code = distances.decode(bits);
      if (code < 0 || code > 29) return damaged("an unknown distance");
      const size_t distance = static_cast<size_t>(kDistanceBase[code]) + bits.take(kDistanceExtra[code]);
      if (distance > out->size()) return damaged("a distance before the beginning");
      if (out->size() + length > limit) return too_large();
      for (size_t i = 0; i < length; ++i) out->push_back((*out)[out->size() - distance]);
    }
  }
  return {};
}

uint32_t crc_of(const std::vector<uint8_t>& bytes, size_t begin) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made = {};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? 0xEDB88320 ^ (c >> 1) : c >> 1;
      made[i] = c;
    }
    return made;
  }();
  uint32_t crc = 0xffffffff;
  for (size_t i = begin; i < bytes.size(); ++i) crc = table[(crc ^ bytes[i]) & 0xff] ^ (crc >> 8);
  return ~crc;
}

}  // namespace

bool is_gzip(const std::vector<uint8_t>& bytes) { return bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b; }

Status gunzip(const std::vector<uint8_t>& bytes, uint64_t limit, std::vector<uint8_t>* out) {
  out->clear();
  size_t at = 0;
  do {  // members one after another
    if (bytes.size() - at < 18 || bytes[at] != 0x1f || bytes[at + 1] != 0x8b || bytes[at + 2] != 8) {
      return damaged("no gzip header");
    }
    const uint8_t flags = bytes[at + 3];
    at += 10;
    if ((flags & 4) != 0) at += 2 + bytes[at] + 256 * static_cast<size_t>(bytes[at + 1]);
    for (const int flag : {8, 16}) {  // name, comment: up to a zero
      if ((flags & flag) == 0) continue;
      while (at < bytes.size() && bytes[at] != 0) ++at;
      ++at;
    }
    if ((flags & 2) != 0) at += 2;
    if (at >= bytes.size()) return damaged("its header breaks off");
    const size_t begin = out->size();
    Bits bits(bytes, at);
    LINNET_TRY(inflate(bits, limit, bytes, out));
    bits.align();
    at = bits.byte_position();
    if (at + 8 > bytes.size()) return damaged("it breaks off");
    const auto word = [&](size_t i) {
      return bytes[i] | uint32_t{bytes[i + 1]} << 8 | uint32_t{bytes[i + 2]} << 16 | uint32_t{bytes[i + 3]} << 24;
    };
    if (word(at) != crc_of(*out, begin)) return damaged("its contents do not have its CRC");
    if (word(at + 4) != static_cast<uint32_t>(out->size() - begin)) return damaged("its contents do not have its length");
    at += 8;
  } while (at < bytes.size());
  return {};
}

Status read_bytes(const std::string& path, uint64_t limit, std::vector<uint8_t>* out) {
  InputFile file;
  LINNET_TRY(InputFile::open(path, file));
  if (file.size() > limit)
    return bad_input(path + ": it has " + std::to_string(file.size()) + " bytes, expected at most " + std::to_string(limit));
  std::vector<uint8_t> bytes(file.size());
  LINNET_TRY(file.read(0, bytes.size(), bytes.data()));
  if (!is_gzip(bytes)) {
    *out = std::move(bytes);
    return {};
  }
  const Status status = gunzip(bytes, limit, out);
  return status.ok() ? status : bad_input(path + ": " + status.message());
}

}  // namespace linnet::tasks
