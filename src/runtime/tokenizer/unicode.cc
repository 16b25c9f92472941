#include "runtime/tokenizer/unicode.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include "runtime/tokenizer/unicode_tables.h"

namespace linnet::unicode {

namespace {

// Hangul syllables are composed by arithmetic (Unicode standard, section 3.12).
constexpr uint32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7;
constexpr uint32_t kLeads = 19, kVowels = 21, kTails = 28;

const unsigned char* make_flags() {
  auto* table = new unsigned char[kPoints];  // lives as long as the process
  for (int i = 0; i < kRuns_count; ++i) {
    const uint32_t first = kRuns[i] & 0xffffff, end = i + 1 < kRuns_count ? kRuns[i + 1] & 0xffffff : kPoints;
    std::fill(table + first, table + end, static_cast<unsigned char>(kRuns[i] >> 24));
  }
  return table;
}

int combining_class(uint32_t point) {
  const uint32_t* at = std::upper_bound(kClasses, kClasses + kClasses_count, point,
                                        [](uint32_t p, uint32_t run) { return p < (run & 0xffffff); });
  return at == kClasses ? 0 : static_cast<int>(*(at - 1) >> 24);
}

const Decomposition* find_decomposition(uint32_t point) {
  const Decomposition* end = kDecompositions + kDecompositions_count;
  const Decomposition* at =
      std::lower_bound(kDecompositions, end, point, [](const Decomposition& d, uint32_t p) { return d.point < p; });
  return at != end && at->point == point ? at : nullptr;
}

void decompose(uint32_t point, std::vector<uint32_t>& out) {
  if (point >= kSyllable && point < kSyllable + kLeads * kVowels * kTails) {
    const uint32_t s = point - kSyllable;
    out.push_back(kLead + s / (kVowels * kTails));
    out.push_back(kVowel + s % (kVowels * kTails) / kTails);
    if (s % kTails != 0) out.push_back(kTail + s % kTails);
  } else if (const Decomposition* d = point < 0xc0 ? nullptr : find_decomposition(point)) {
    decompose(d->first, out);
    if (d->second != 0) decompose(d->second, out);
  } else {
    out.push_back(point);
  }
}

// Decomposed, marks in the order of their classes.
std::vector<uint32_t> decomposed(std::string_view text) {
  std::vector<uint32_t> points;
  points.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    int bytes;
    decompose(decode(text, at, bytes), points);
    at += static_cast<size_t>(bytes);
  }
  std::vector<std::pair<int, uint32_t>> marks;
  for (size_t i = 0; i < points.size();) {
    if (points[i] < 0x300 || combining_class(points[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    marks.clear();
    for (int c; end < points.size() && (c = combining_class(points[end])) != 0; ++end) marks.emplace_back(c, points[end]);
    std::stable_sort(marks.begin(), marks.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t j = i; j < end; ++j) points[j] = marks[j - i].second;
    i = end;
  }
  return points;
}

// The composition of a pair, 0 when there is none.
uint32_t compose(uint32_t a, uint32_t b) {
  if (a >= kLead && a < kLead + kLeads && b >= kVowel && b < kVowel + kVowels) {
    return kSyllable + ((a - kLead) * kVowels + (b - kVowel)) * kTails;
  }
  if (a >= kSyllable && a < kSyllable + kLeads * kVowels * kTails && (a - kSyllable) % kTails == 0 && b > kTail &&
      b < kTail + kTails) {
    return a + (b - kTail);
  }
  static const auto* const pairs = [] {
    auto* map = new std::unordered_map<uint64_t, uint32_t>;
    for (int i = 0; i < kDecompositions_count; ++i) {
      const Decomposition& d = kDecompositions[i];
      if (d.composes) map->emplace(uint64_t{d.first} << 32 | d.second, d.point);
    }
    return map;
  }();
  const auto at = pairs->find(uint64_t{a} << 32 | b);
  return at == pairs->end() ? 0 : at->second;
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// The bytes of the sequence that begins at text[at], 0 when it is none; `whole` says whether all of it is there.
size_t sequence(std::string_view text, size_t at, bool& whole) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned char b = byte(0);
  whole = true;
  if (b < 0x80) return 1;
  if (b < 0xc2 || b > 0xf4) return 0;
  const size_t length = b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
  const unsigned char low = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;   // no longer form than needed
  const unsigned char high = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;  // no surrogate, nothing above 0x10ffff
  size_t i = 1;
  for (; i < length && at + i < text.size(); ++i) {
    const unsigned char c = byte(i);
    if (i == 1 ? c < low || c > high : c < 0x80 || c > 0xbf) break;
  }
  whole = i == length;
  return i;
}

}  // namespace

const unsigned char* flags() {
  static const unsigned char* const table = make_flags();
  return table;
}

uint32_t lower(uint32_t point) {
  const LowerRun* end = kLower + kLower_count;
  const LowerRun* at = std::upper_bound(kLower, end, point, [](uint32_t p, const LowerRun& run) { return p < run.first; });
  if (at == kLower) return point;
  --at;
  if (point > at->last || (point - at->first) % at->step != 0) return point;
  return static_cast<uint32_t>(static_cast<int32_t>(point) + at->delta);
}

void append(std::string& out, uint32_t point) {
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xc0 | point >> 6);
    out += static_cast<char>(0x80 | (point & 63));
  } else if (point < 0x10000) {
    out += static_cast<char>(0xe0 | point >> 12);
    out += static_cast<char>(0x80 | (point >> 6 & 63));
    out += static_cast<char>(0x80 | (point & 63));
  } else {
    out += static_cast<char>(0xf0 | point >> 18);
    out += static_cast<char>(0x80 | (point >> 12 & 63));
    out += static_cast<char>(0x80 | (point >> 6 & 63));
    out += static_cast<char>(0x80 | (point & 63));
  }
}

std::string nfd(std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  std::string out;
  for (const uint32_t point : decomposed(text)) append(out, point);
  return out;
}

std::string nfc(std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  const std::vector<uint32_t> points = decomposed(text);
  std::vector<uint32_t> out;
  size_t starter = 0;  // the last starter in `out`
  bool has_starter = false;
  int last_class = 0;  // of the last mark behind it, 0: none
  for (const uint32_t point : points) {
    const int c = combining_class(point);
    if (has_starter) {
      const bool adjacent = starter + 1 == out.size();
      const bool blocked = !adjacent && (last_class >= c || last_class == 0);
      if (!blocked) {
        if (const uint32_t whole = compose(out[starter], point)) {
          out[starter] = whole;
          continue;
        }
      }
    }
    out.push_back(point);
    if (c == 0) {
      starter = out.size() - 1;
      has_starter = true;
    }
    last_class = c;
  }
  std::string result;
  for (const uint32_t point : out) append(result, point);
  return result;
}

std::string to_valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    bool whole;
    const size_t n = sequence(bytes, at, whole);
    if (n > 0 && whole) {
      out.append(bytes.substr(at, n));
    } else {
      out += "\xef\xbf\xbd";
    }
    at += std::max<size_t>(n, 1);
  }
  return out;
}

size_t incomplete_tail(std::string_view bytes) {
  for (size_t back = 1; back <= 3 && back <= bytes.size(); ++back) {
    const size_t at = bytes.size() - back;
    if ((static_cast<unsigned char>(bytes[at]) & 0xc0) == 0x80) continue;
    bool whole;
    const size_t n = sequence(bytes, at, whole);
    return n == back && !whole ? back : 0;
  }
  return 0;
}

size_t cluster_end(std::string_view text, size_t at) {
  enum { kPlain, kJoinsBefore, kJoinsBehind, kAlone };
  const auto kind = [](uint32_t point) -> uint32_t {
    const uint32_t* end = kClusters + kClusters_count;
    const uint32_t* run = std::upper_bound(kClusters, end, point, [](uint32_t p, uint32_t r) { return p < (r & 0xffffff); });
    return run == kClusters ? 0 : run[-1] >> 24;
  };
  int bytes;
  uint32_t point = decode(text, at, bytes), before = kind(point);
  at += static_cast<size_t>(bytes);
  while (at < text.size()) {
    const uint32_t next = decode(text, at, bytes), own = kind(next);
    const bool joins = point == '\r' && next == '\n' ? true
                       : before == kAlone            ? false
                                                     : own == kJoinsBefore || (before == kJoinsBehind && own != kAlone);
    if (!joins) break;
    at += static_cast<size_t>(bytes);
    point = next;
    before = own;
  }
  return at;
}

bool is_white(uint32_t point) {
  return (point >= 9 && point <= 13) || point == ' ' || point == 0x85 || point == 0xa0 || point == 0x1680 ||
         (point >= 0x2000 && point <= 0x200a) || point == 0x2028 || point == 0x2029 || point == 0x202f || point == 0x205f ||
         point == 0x3000;
}

}  // namespace linnet::unicode
