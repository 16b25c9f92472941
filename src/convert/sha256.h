// SHA-256 (FIPS 180-4) of files and texts: reports name their sources by it, and a resumed conversion compares it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace linnet::convert {

class Sha256 {
 public:
  void add(const void* data, uint64_t bytes);
  std::string hex();  // ends the message

 private:
  void block(const unsigned char* p);
  uint32_t h_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char rest_[64] = {};
  uint64_t total_ = 0;
};

std::string sha256_of(std::string_view text);
Status sha256_of_file(const std::string& path, std::string& hex);

}  // namespace linnet::convert
