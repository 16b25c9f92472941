#include "runtime/tokenizer/unigram.h"

#include <algorithm>
#include <cstring>

#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

constexpr double kUnknownCosts = 10;  // more than the worst piece
constexpr int32_t kManyChildren = 8;  // from here on a table is asked
constexpr size_t kLongestWhole = 6;   // bytes of a cluster that is looked up as one

uint64_t key_of(int32_t node, unsigned char byte) { return static_cast<uint64_t>(node) << 8 | byte; }

}  // namespace

int32_t Unigram::child(int32_t node, unsigned char byte) const {
  if (children_[static_cast<size_t>(node)] >= kManyChildren) {
    const auto at = wide_.find(key_of(node, byte));
    return at == wide_.end() ? -1 : at->second;
  }
  int32_t at = nodes_[static_cast<size_t>(node)].first;
  while (at >= 0 && nodes_[static_cast<size_t>(at)].byte != byte) at = nodes_[static_cast<size_t>(at)].next;
  return at;
}

void Unigram::add(std::string_view piece, double score, int32_t id) {
  if (scores_.size() <= static_cast<size_t>(id)) scores_.resize(static_cast<size_t>(id) + 1);
  scores_[static_cast<size_t>(id)] = score;
  least_ = any_ ? std::min(least_, score) : score;
  any_ = true;
  int32_t node = 0;
  for (const char c : piece) {
    const unsigned char byte = static_cast<unsigned char>(c);
    int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({-1, nodes_[static_cast<size_t>(node)].first, -1, byte});
      nodes_[static_cast<size_t>(node)].first = next;
      children_.push_back(0);
      if (++children_[static_cast<size_t>(node)] == kManyChildren) {
        for (int32_t at = next; at >= 0; at = nodes_[static_cast<size_t>(at)].next)
          wide_.emplace(key_of(node, nodes_[static_cast<size_t>(at)].byte), at);
      } else if (children_[static_cast<size_t>(node)] > kManyChildren) {
        wide_.emplace(key_of(node, byte), next);
      }
    }
    node = next;
  }
  if (node != 0) nodes_[static_cast<size_t>(node)].id = id;
}

void Unigram::encode(std::string_view text, std::vector<int32_t>& out) const {
  struct Best {  // of the ways that end here
    double score = 0;
    int32_t id = 0, begin = -1;
  };
  std::vector<Best> best(text.size() + 1);
  const auto offer = [&](size_t begin, size_t end, double score, int32_t id) {
    if (best[end].begin < 0 || score > best[end].score) best[end] = {score, id, static_cast<int32_t>(begin)};
  };
  for (size_t begin = 0; begin < text.size();) {
    int bytes;
    unicode::decode(text, begin, bytes);
    const size_t one = begin + static_cast<size_t>(bytes);
    const double before = best[begin].score;
    bool known = false;  // the character alone is a piece
    int32_t node = 0;
    for (size_t end = begin; end < text.size();) {
      node = child(node, static_cast<unsigned char>(text[end++]));
      if (node < 0) break;
      const int32_t id = nodes_[static_cast<size_t>(node)].id;
      if (id < 0) continue;
      offer(begin, end, scores_[static_cast<size_t>(id)] + before, id);
      known |= end == one;
    }
    if (!known) offer(begin, one, least_ - kUnknownCosts + before, unknown);
    begin = one;
  }
  // From the end to the beginning; neighbouring unknown pieces are one.
  std::vector<std::pair<int32_t, int32_t>> spans;  // begin, end
  bool joins = false;
  for (int32_t end = static_cast<int32_t>(text.size()); end > 0;) {
    const Best& b = best[static_cast<size_t>(end)];
    const bool lost = b.id == unknown;
    if (lost && joins) {
      spans.back().first = b.begin;
    } else {
      spans.emplace_back(b.begin, end);
    }
    joins = lost;
    end = b.begin;
  }
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    const std::string_view piece =
        text.substr(static_cast<size_t>(span->first), static_cast<size_t>(span->second - span->first));
    int32_t node = 0;  // what was joined may be a piece after all
    for (size_t i = 0; node >= 0 && i < piece.size(); ++i) node = child(node, static_cast<unsigned char>(piece[i]));
    if (node >= 0 && nodes_[static_cast<size_t>(node)].id >= 0) {
      out.push_back(nodes_[static_cast<size_t>(node)].id);
      continue;
    }
    const bool spelled = byte_fallback && std::all_of(piece.begin(), piece.end(),
                                                      [&](char c) { return bytes_[static_cast<unsigned char>(c)] >= 0; });
    if (spelled) {
      for (const char c : piece) out.push_back(bytes_[static_cast<unsigned char>(c)]);
    } else if (unknown >= 0) {
      out.push_back(unknown);
    }
  }
}

// ---- the normaliser

Status CharacterMap::parse(std::string_view base64, CharacterMap& out) {
  std::string bytes;
  bytes.reserve(base64.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : base64) {
    if (c == '=') break;
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                                             : -1;
    if (value < 0) return bad_input("its precompiled_charsmap is not in base 64");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (count++ % 4 != 0) bytes += static_cast<char>(bits >> (6 - 2 * ((count - 1) % 4)));
  }
  uint32_t size = 0;
  if (bytes.size() >= 4) std::memcpy(&size, bytes.data(), 4);
  if (bytes.size() < 4 || size % 4 != 0 || size > bytes.size() - 4) {
    return bad_input("its precompiled_charsmap has a double array of " + std::to_string(size) + " bytes in " +
                     std::to_string(bytes.size()));
  }
  out.units_.resize(size / 4);
  std::memcpy(out.units_.data(), bytes.data() + 4, size);
  out.texts_ = bytes.substr(4 + size);
  return {};
}

// The text of the shortest sequence that `piece` begins with.
bool CharacterMap::find(std::string_view piece, std::string_view& text) const {
  const auto step = [](uint32_t unit) { return static_cast<size_t>(unit >> 10) << ((unit & 1u << 9) >> 6); };
  if (units_.empty()) return false;
  size_t at = step(units_[0]);
  for (const char c : piece) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte == 0) return false;
    at ^= byte;
    if (at >= units_.size() || (units_[at] & (1u << 31 | 0xff)) != byte) return false;
    const uint32_t unit = units_[at];
    at ^= step(unit);
    if ((unit >> 8 & 1) == 0) continue;
    if (at >= units_.size()) return false;
    const size_t begin = units_[at] & ((1u << 31) - 1);
    if (begin > texts_.size()) return false;
    text = std::string_view(texts_).substr(begin);
    text = text.substr(0, text.find('\0'));
    return true;
  }
  return false;
}

std::string CharacterMap::normalize(std::string_view text) const {
  std::string out;
  std::string_view found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = unicode::cluster_end(text, begin);
    if (end - begin < kLongestWhole && find(text.substr(begin, end - begin), found)) {
      out += found;
      begin = end;
      continue;
    }
    while (begin < end) {
      int bytes;
      unicode::decode(text, begin, bytes);
      const std::string_view one = text.substr(begin, static_cast<size_t>(bytes));
      out += find(one, found) ? found : one;
      begin += one.size();
    }
  }
  return out;
}

}  // namespace linnet
