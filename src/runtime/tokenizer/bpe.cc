#include "runtime/tokenizer/bpe.h"

#include <algorithm>
#include <climits>
#include <queue>

namespace linnet {

namespace {
constexpr size_t kShort = 40;  // up to here a scan for the best pair beats a heap
}

Bpe::Bpe() {
  std::fill(bytes_, bytes_ + 256, -1);
  slots_.resize(2);
}

void Bpe::reserve(size_t merges) {
  int bits = 1;
  while ((size_t{1} << bits) < merges * 2) ++bits;
  std::vector<Slot> old(size_t{1} << bits);
  old.swap(slots_);
  shift_ = 64 - bits;
  used_ = 0;
  for (const Slot& slot : old) {
    if (slot.pair != kEmpty) {
      add_merge(static_cast<int32_t>(slot.pair >> 32), static_cast<int32_t>(slot.pair & 0xffffffff), slot.rank, slot.merged);
    }
  }
}

void Bpe::add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged) {
  if ((used_ + 1) * 2 > slots_.size()) reserve(slots_.size());
  const uint64_t pair = key(left, right);
  size_t at = place(pair);
  while (slots_[at].pair != kEmpty && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
  if (slots_[at].pair == kEmpty) ++used_;
  slots_[at] = {pair, rank, merged};
}

const Bpe::Slot* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = key(left, right);
  for (size_t at = place(pair);; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].pair == pair) return &slots_[at];
    if (slots_[at].pair == kEmpty) return nullptr;
  }
}

void Bpe::encode(std::string_view word, std::vector<int32_t>& out) const {
  if (!whole_.empty()) {
    if (const auto at = whole_.find(std::string(word)); at != whole_.end()) {
      out.push_back(at->second);
      return;
    }
  }
  if (!characters_ && word.size() <= kShort) {  // the usual case, without memory of its own
    int32_t ids[kShort];
    int n = 0;
    for (const char c : word) {
      if (const int32_t id = bytes_[static_cast<unsigned char>(c)]; id >= 0) ids[n++] = id;
    }
    return merge_short(ids, n, out);
  }
  std::vector<int32_t> ids;
  begin(word, ids);
  ids.size() <= kShort ? merge_short(ids.data(), static_cast<int>(ids.size()), out) : merge_long(ids, out);
}

void Bpe::begin(std::string_view word, std::vector<int32_t>& symbols) const {
  const auto byte_id = [&](size_t at) { return bytes_[static_cast<unsigned char>(word[at])]; };
  symbols.reserve(word.size());
  bool unknown = false;  // the symbol before is one
  for (size_t at = 0, next; at < word.size(); at = next) {
    next = at + 1;
    if (!characters_) {
      if (byte_id(at) >= 0) symbols.push_back(byte_id(at));
      continue;
    }
    while (next < word.size() && (static_cast<unsigned char>(word[next]) & 0xc0) == 0x80) ++next;
    bool known = true;
    if (const auto found = character_.find(std::string(word.substr(at, next - at))); found != character_.end()) {
      symbols.push_back(found->second);
    } else {
      for (size_t i = at; i < next; ++i) known &= byte_id(i) >= 0;
      for (size_t i = at; i < next && known; ++i) symbols.push_back(byte_id(i));
      if (!known && unknown_ >= 0 && !(fused_ && unknown)) symbols.push_back(unknown_);
    }
    unknown = !known;
  }
}

void Bpe::merge_short(int32_t* ids, int n, std::vector<int32_t>& out) const {
  const Slot* pairs[kShort];  // the merge of ids[i] and ids[i + 1], null: none
  for (int i = 0; i + 1 < n; ++i) pairs[i] = find(ids[i], ids[i + 1]);
  while (n > 1) {
    int best = -1, rank = INT_MAX;
    for (int i = 0; i + 1 < n; ++i) {
      if (pairs[i] != nullptr && pairs[i]->rank < rank) {
        best = i;
        rank = pairs[i]->rank;
      }
    }
    if (best < 0) break;
    ids[best] = pairs[best]->merged;
    for (int i = best + 1; i + 1 < n; ++i) {
      ids[i] = ids[i + 1];
      pairs[i] = pairs[i + 1];
    }
    --n;
    if (best > 0) pairs[best - 1] = find(ids[best - 1], ids[best]);
    if (best + 1 < n) pairs[best] = find(ids[best], ids[best + 1]);
  }
  out.insert(out.end(), ids, ids + n);
}

void Bpe::merge_long(const std::vector<int32_t>& ids, std::vector<int32_t>& out) const {
  struct Symbol {
    int32_t id;
    int64_t previous, next;  // -1: none
  };
  struct Candidate {
    int32_t rank;
    int64_t at;
    int32_t left, right, merged;
    bool operator<(const Candidate& other) const {  // a max heap: the best is the smallest rank, then the leftmost
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  std::vector<Symbol> symbols;
  symbols.reserve(ids.size());
  for (const int32_t id : ids) {
    const int64_t i = static_cast<int64_t>(symbols.size());
    symbols.push_back({id, i - 1, i + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  std::priority_queue<Candidate> queue;
  const auto offer = [&](int64_t at) {
    if (at < 0 || symbols[static_cast<size_t>(at)].next < 0) return;
    const int32_t left = symbols[static_cast<size_t>(at)].id;
    const int32_t right = symbols[static_cast<size_t>(symbols[static_cast<size_t>(at)].next)].id;
    if (const Slot* slot = find(left, right)) queue.push({slot->rank, at, left, right, slot->merged});
  };
  for (size_t i = 0; i < symbols.size(); ++i) offer(static_cast<int64_t>(i));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<size_t>(best.at)];
    // Merged away, or its neighbour is another by now: the pair that stands there was offered again.
    if (left.id != best.left || left.next < 0 || symbols[static_cast<size_t>(left.next)].id != best.right) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = best.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.at;
    offer(left.previous);
    offer(best.at);
  }
  for (int64_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].next) out.push_back(symbols[static_cast<size_t>(i)].id);
}

}  // namespace linnet
