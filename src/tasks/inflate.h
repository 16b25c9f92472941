// inflate: the contents of a gzip file (RFC 1952, 1951), for data sets that are shipped compressed. Never allocates more than
// `limit` bytes; a damaged file is refused with what is wrong, its CRC included.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace linnet::tasks {

bool is_gzip(const std::vector<uint8_t>& bytes);
Status gunzip(const std::vector<uint8_t>& bytes, uint64_t limit, std::vector<uint8_t>* out);

// The bytes of a file, of what is in it when it is a gzip file. `limit`: of either.
Status read_bytes(const std::string& path, uint64_t limit, std::vector<uint8_t>* out);

}  // namespace linnet::tasks
