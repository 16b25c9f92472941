#include "convert/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/files/file.h"

namespace linnet::convert {

namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::block(const unsigned char* p) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{p[4 * i]} << 24 | uint32_t{p[4 * i + 1]} << 16 | uint32_t{p[4 * i + 2]} << 8 | p[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t b = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  uint32_t s[8];
  std::copy_n(h_, 8, s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t e = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
    const uint32_t t = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRound[i] + w[i];
    const uint32_t a = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
    const uint32_t u = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    for (int j = 7; j > 0; --j) s[j] = s[j - 1];
    s[4] += t;
    s[0] = t + u;
  }
  for (int i = 0; i < 8; ++i) h_[i] += s[i];
}

void Sha256::add(const void* data, uint64_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t held = total_ % 64;
  total_ += bytes;
  if (held > 0) {
    const uint64_t part = std::min(bytes, 64 - held);
    std::memcpy(rest_ + held, p, part);
    p += part, bytes -= part, held += part;
    if (held < 64) return;
    block(rest_);
  }
  for (; bytes >= 64; p += 64, bytes -= 64) block(p);
  std::memcpy(rest_, p, bytes);
}

std::string Sha256::hex() {
  const uint64_t bits = total_ * 8;
  const unsigned char one = 0x80, zero = 0;
  add(&one, 1);
  while (total_ % 64 != 56) add(&zero, 1);
  unsigned char size[8];
  for (int i = 0; i < 8; ++i) size[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  add(size, 8);
  std::string text;
  for (const uint32_t word : h_) {
    for (int i = 28; i >= 0; i -= 4) text += "0123456789abcdef"[word >> i & 15];
  }
  return text;
}

std::string sha256_of(std::string_view text) {
  Sha256 hash;
  hash.add(text.data(), text.size());
  return hash.hex();
}

Status sha256_of_file(const std::string& path, std::string& hex) {
  InputFile file;
  LINNET_TRY(InputFile::open(path, file));
  Sha256 hash;
  std::vector<char> buffer(size_t{1} << 20);
  for (uint64_t at = 0; at < file.size(); at += buffer.size()) {
    const uint64_t part = std::min<uint64_t>(buffer.size(), file.size() - at);
    LINNET_TRY(file.read(at, part, buffer.data()));
    hash.add(buffer.data(), part);
  }
  hex = hash.hex();
  return {};
}

}  // namespace linnet::convert
