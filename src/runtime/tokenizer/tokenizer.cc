#include "runtime/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>

#include "core/files/json.h"
#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

// Printable bytes stand for themselves, the others for 256, 257, ... in order.
struct ByteLevel {
  std::array<uint32_t, 256> character;
  std::array<int, 324> byte;
  ByteLevel() {
    byte.fill(-1);
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
      character[b] = printable ? b : next++;
      byte[character[b]] = static_cast<int>(b);
    }
  }
};
const ByteLevel& byte_level() {
  static const ByteLevel table;
  return table;
}

// Words seen before in the same call: their tokens are copied from the result. One slot per hash; a collision overwrites.
class SeenWords {
 public:
  explicit SeenWords(size_t text_bytes) {
    size_t slots = 16;
    while (slots < text_bytes / 8 && slots < 16384) slots *= 2;
    slots_.resize(slots);
  }
  struct Slot {
    std::string_view word;
    size_t begin = 0, count = 0;
  };
  Slot& slot(std::string_view word) {
    uint64_t h = word.size();
    for (const char c : word) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    return slots_[(h ^ h >> 29) & (slots_.size() - 1)];
  }

 private:
  std::vector<Slot> slots_;
};

template <class Encode>
void encode_seen(SeenWords& seen, std::string_view word, std::vector<int32_t>& out, const Encode& encode) {
  SeenWords::Slot& slot = seen.slot(word);
  const size_t begin = out.size();
  if (slot.word == word) {
    out.resize(begin + slot.count);
    std::copy_n(out.begin() + static_cast<ptrdiff_t>(slot.begin), slot.count, out.begin() + static_cast<ptrdiff_t>(begin));
    return;
  }
  encode(word);
  slot = {word, begin, out.size() - begin};
}

// The byte of <0x0A>; -1: it is no such token.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
  const int high = digit(token[3]), low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

bool is_word_character(uint32_t c) { return (unicode::flags()[c] & unicode::kWord) != 0; }

}  // namespace

std::string with_spaces(std::string_view text) {
  constexpr std::string_view kMark = "\xe2\x96\x81";
  std::string out;
  for (size_t at = 0, next; at < text.size(); at = next) {
    next = std::min(text.find(kMark, at), text.size());
    out += text.substr(at, next - at);
    if (next < text.size()) {
      out += ' ';
      next += kMark.size();
    }
  }
  return out;
}

uint32_t byte_level_character(unsigned char byte) { return byte_level().character[byte]; }
int byte_level_byte(uint32_t point) { return point < byte_level().byte.size() ? byte_level().byte[point] : -1; }

struct Tokenizer::Segment {
  std::string_view text;
  int32_t id = -1;  // an added token; otherwise plain text
};

// Cuts a text at its added tokens: at each place the longest counts, and none overlap.
void Tokenizer::split(std::string_view text, bool normalized, const unsigned char* first, std::vector<Segment>& out) const {
  size_t plain = 0;
  const auto flush = [&](size_t end) {
    if (end > plain) out.push_back({text.substr(plain, end - plain)});
  };
  for (size_t at = 0; at < text.size();) {
    const AddedToken* match = nullptr;
    if (first[static_cast<unsigned char>(text[at])]) {
      for (const AddedToken& token : added_) {  // longest first
        if (token.normalized == normalized && text.substr(at, token.content.size()) == token.content) {
          match = &token;
          break;
        }
      }
    }
    if (match == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + match->content.size();
    at = end;
    if (match->single_word) {
      int bytes;
      size_t before = begin;
      while (before > 0 && (static_cast<unsigned char>(text[--before]) & 0xc0) == 0x80) {
      }
      if (begin > 0 && is_word_character(unicode::decode(text, before, bytes))) continue;
      if (end < text.size() && is_word_character(unicode::decode(text, end, bytes))) continue;
    }
    size_t next;
    if (match->strip_left) {
      while (begin > plain) {
        size_t before = begin - 1;
        while (before > plain && (static_cast<unsigned char>(text[before]) & 0xc0) == 0x80) --before;
        if (!bert_space_at(text, before, next)) break;
        begin = before;
      }
    }
    if (match->strip_right) {
      while (end < text.size() && bert_space_at(text, end, next)) end = next;
    }
    flush(begin);
    out.push_back({{}, match->id});
    plain = at = end;
  }
  flush(text.size());
}

namespace {

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = 0;;) {
    const size_t next = text.find(from, at);
    out += text.substr(at, next - at);
    if (next == std::string_view::npos) return out;
    out += to;
    at = next + from.size();
  }
}
// Two spaces and more as `to`.
std::string squeezed(std::string_view text, std::string_view to) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_not_of(' ', at), text.size());
    if (end > at + 1) {
      out += to;
    } else if (end > at) {
      out += ' ';
    }
    at = end;
    const size_t next = std::min(text.find(' ', at), text.size());
    out += text.substr(at, next - at);
    at = next;
  }
  return out;
}
std::string_view stripped(std::string_view text, bool left, bool right) {
  int bytes;
  while (left && !text.empty() && unicode::is_white(unicode::decode(text, 0, bytes)))
    text.remove_prefix(static_cast<size_t>(bytes));
  while (right && !text.empty()) {
    size_t at = text.size() - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
    if (!unicode::is_white(unicode::decode(text, at, bytes))) break;
    text = text.substr(0, at);
  }
  return text;
}

}  // namespace

std::string Tokenizer::normalize(std::string_view text) const {
  if (wordpiece_) return bert_normalize(bert_, text);
  if (unigram_) {
    std::string changed(text);
    for (const Change& change : changes_) {
      switch (change.kind) {
        case Change::Kind::characters: changed = change.map.normalize(changed); break;
        case Change::Kind::replace: changed = replaced(changed, change.from, change.to); break;
        case Change::Kind::squeeze: changed = squeezed(changed, change.to); break;
        case Change::Kind::strip: changed = std::string(stripped(changed, change.left, change.right)); break;
        case Change::Kind::lower: changed = bert_normalize({false, false, false, true}, changed); break;
        case Change::Kind::nfc: changed = unicode::nfc(changed); break;
        case Change::Kind::nfd: changed = unicode::nfd(changed); break;
        case Change::Kind::prepend:
          if (!changed.empty()) changed = change.to + changed;
          break;
      }
    }
    return changed;
  }
  if (spaces_.used) return (spaces_.before && !text.empty() ? " " : "") + with_spaces(text);
  return nfc_ ? unicode::nfc(text) : std::string(text);
}

void Tokenizer::encode_plain(std::string_view text, bool first, std::vector<int32_t>& out) const {
  std::string changed;
  if (wordpiece_ || nfc_ || spaces_.used) {
    changed = normalize(text);
    text = changed;
  }
  std::vector<Segment> segments;
  split(text, true, first_normalized_, segments);
  for (const Segment& segment : segments) {
    if (segment.id >= 0) {
      out.push_back(segment.id);
    } else if (unigram_) {
      for (size_t at = 0; at < segment.text.size();) {
        size_t end = white_split_ ? at : segment.text.size();
        int bytes = 0;
        while (end < segment.text.size() && !unicode::is_white(unicode::decode(segment.text, end, bytes)))
          end += static_cast<size_t>(bytes);
        const std::string word = with_spaces(segment.text.substr(at, end - at));
        if (end > at) encode_characters(word, first && segment.text.data() + at == text.data(), out);
        at = end < segment.text.size() ? end + static_cast<size_t>(bytes) : end;
      }
    } else if (spaces_.used) {
      encode_characters(segment.text, first && segment.text.data() == text.data(), out);
    } else {
      encode_words(segment.text, out);
    }
  }
}

void Tokenizer::encode_pieces(std::string_view word, std::vector<int32_t>& out) const {
  if (unigram_) {
    pieces_of_text_.encode(word, out);
  } else {
    bpe_.encode(word, out);
  }
}

void Tokenizer::encode_characters(std::string_view text, bool first, std::vector<int32_t>& out) const {
  using Prepend = Spaces::Prepend;
  std::string spaced;
  const bool add = spaces_.prepend == Prepend::always || (spaces_.prepend == Prepend::first && first);
  if (add && !text.empty() && !(spaces_.unless_there && text[0] == ' ')) {
    spaced = " " + std::string(text);
    text = spaced;
  }
  if (!spaces_.split) return encode_pieces(text, out);
  SeenWords seen(text.size());
  const auto encode = [&](std::string_view word) { encode_pieces(word, out); };
  for (size_t at = 0, end; at < text.size(); at = end) {
    end = std::min(text.find(' ', at + 1), text.size());
    encode_seen(seen, text.substr(at, end - at), out, encode);
  }
}

void Tokenizer::encode_words(std::string_view text, std::vector<int32_t>& out) const {
  SeenWords seen(text.size());
  if (wordpiece_) {
    const auto encode = [&](std::string_view word) { pieces_of_words_.encode(word, out); };
    for (size_t at = 0, next; at < text.size();) {
      if (bert_space_at(text, at, next)) {
        at = next;
        continue;
      }
      const size_t end = bert_word_end(text, at);
      encode_seen(seen, text.substr(at, end - at), out, encode);
      at = end;
    }
    return;
  }
  const auto encode = [&](std::string_view word) { bpe_.encode(word, out); };
  const auto use = [&](std::string_view word) { encode_seen(seen, word, out, encode); };
  if (words_.prefix_space && !text.empty() && text[0] != ' ') {
    const std::string spaced = " " + std::string(text);
    for_each_word(words_, spaced, use);
  } else {
    for_each_word(words_, text, use);
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return encode(std::vector<Part>{{std::string(text), options.parse_special}}, options.add_special);
}

std::vector<int32_t> Tokenizer::encode(const std::vector<Part>& parts, bool add_special) const {
  std::vector<int32_t> out;
  if (add_special) out = prefix_;
  std::string plain;  // neighbouring plain texts are one text: words may reach across their seams
  bool first = true;
  const auto flush = [&] {
    encode_plain(plain, first, out);
    first = first && plain.empty();
    plain.clear();
  };
  for (const Part& part : parts) {
    const std::string text = find_invalid_utf8(part.text) == part.text.size() ? part.text : unicode::to_valid_utf8(part.text);
    if (!part.parse_special) {
      plain += text;
      continue;
    }
    std::vector<Segment> segments;
    split(text, false, first_raw_, segments);
    for (const Segment& segment : segments) {
      if (segment.id < 0) {
        plain += segment.text;
      } else {
        flush();
        out.push_back(segment.id);
        first = false;
      }
    }
  }
  flush();
  if (add_special) out.insert(out.end(), suffix_.begin(), suffix_.end());
  return out;
}

std::string_view Tokenizer::bytes(int32_t id) const {
  return id >= 0 && id < size() ? std::string_view(pieces_[static_cast<size_t>(id)]) : std::string_view();
}

int32_t Tokenizer::find(std::string_view content) const {
  const auto at = ids_.find(std::string(content));
  return at == ids_.end() ? -1 : at->second;
}

bool Tokenizer::is_special(int32_t id) const { return id >= 0 && id < size() && special_[static_cast<size_t>(id)]; }

std::string Tokenizer::decode(const std::vector<int32_t>& ids, const DecodeOptions& options) const {
  std::string out;
  bool first = true;
  for (const int32_t id : ids) {
    if (options.skip_special && is_special(id)) continue;
    std::string_view piece = bytes(id);
    if (wordpiece_) {
      if (piece.substr(0, continues_.size()) == continues_) {
        piece.remove_prefix(continues_.size());
      } else if (!first) {
        out += ' ';
      }
    }
    first = false;
    out += piece;
  }
  if (spaces_.strip && !out.empty() && out[0] == ' ') out.erase(0, 1);
  return unicode::to_valid_utf8(out);
}

Status Tokenizer::add_pieces(std::vector<std::string> pieces) {
  pieces_ = std::move(pieces);
  special_.assign(pieces_.size(), 0);
  ids_.reserve(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (!pieces_[i].empty()) ids_.emplace(pieces_[i], static_cast<int32_t>(i));
  }
  if (wordpiece_) return {};
  if (spaces_.used) {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      std::string& piece = pieces_[i];
      const int32_t id = static_cast<int32_t>(i);
      if (const int byte = fallback_ ? fallback_byte(piece) : -1; byte >= 0) {
        ids_.erase(piece);
        bpe_.set_byte(static_cast<unsigned char>(byte), id);
        pieces_of_text_.set_byte(static_cast<unsigned char>(byte), id);
        piece = std::string(1, static_cast<char>(byte));
      } else if (!piece.empty()) {
        int bytes;
        unicode::decode(piece, 0, bytes);
        if (static_cast<size_t>(bytes) == piece.size()) bpe_.set_character(piece, id);
      }
    }
    return {};
  }
  for (int b = 0; b < 256; ++b) {
    if (const auto at = ids_.find(std::string(1, static_cast<char>(b))); at != ids_.end()) {
      bpe_.set_byte(static_cast<unsigned char>(b), at->second);
    }
  }
  return {};
}

Status Tokenizer::add_merge(std::string_view left, std::string_view right, int32_t rank) {
  const int32_t a = find(left), b = find(right), merged = find(std::string(left) + std::string(right));
  if (a < 0 || b < 0 || merged < 0) {
    return bad_input("merge " + std::to_string(rank) + ": " + json_quote_short(left) + " and " + json_quote_short(right) +
                     (a < 0 || b < 0 ? " are not both in the vocabulary" : " make no token of the vocabulary"));
  }
  bpe_.add_merge(a, b, rank, merged);
  return {};
}

void Tokenizer::finish(std::vector<AddedToken> added) {
  for (AddedToken& token : added) {
    const size_t id = static_cast<size_t>(token.id);
    if (id >= pieces_.size()) {
      pieces_.resize(id + 1);
      special_.resize(id + 1, 0);
    }
    pieces_[id] = token.content;
    special_[id] = token.special;
    ids_[token.content] = token.id;
    if (token.normalized) token.content = normalize(token.content);
    if (token.content.empty()) continue;
    (token.normalized ? first_normalized_ : first_raw_)[static_cast<unsigned char>(token.content[0])] = 1;
    added_.push_back(std::move(token));
  }
  std::stable_sort(added_.begin(), added_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); });
}

std::string TextStream::next(int32_t id) {
  if (skip_ && tokenizer_.is_special(id)) return "";
  waiting_ += tokenizer_.bytes(id);
  const size_t keep = unicode::incomplete_tail(waiting_);
  std::string text = unicode::to_valid_utf8(std::string_view(waiting_).substr(0, waiting_.size() - keep));
  waiting_.erase(0, waiting_.size() - keep);
  return text;
}

std::string TextStream::finish() {
  std::string text = unicode::to_valid_utf8(waiting_);
  waiting_.clear();
  return text;
}

}  // namespace linnet
