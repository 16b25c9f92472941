// MAD's fuzzy recall: keys and values are tuples of one to three tokens.
#include "tasks/task.h"

namespace linnet::tasks {
namespace {

constexpr int64_t kMostMotif = 8;

struct Motif {
  int64_t size = 0;
  int64_t token[kMostMotif] = {};
  bool operator==(const Motif& other) const { return size == other.size && std::equal(token, token + size, other.token); }
};

// Uniform over all ordered choices of `size` different ids from first .. first + count - 1.
Motif draw_motif(Stream& stream, int64_t first, int64_t count, int64_t size) {
  thread_local std::vector<int64_t> order;
  stream.distinct(count, size, &order);
  Motif motif{size, {}};
  for (int64_t i = 0; i < size; ++i) motif.token[i] = first + order[static_cast<size_t>(i)];
  return motif;
}

// The order of the draws: the probe's key (size, tokens) and value (size, tokens); the position from which it may stand; then
// pair after pair: the key, and for a new key its value.
void draw(Stream& stream, int64_t V, int64_t T, int64_t motif, bool training, int64_t* inputs, int64_t* next, int64_t* probe) {
  const int64_t keys = (V - 1) / 2, values = V - 1 - keys;
  thread_local std::vector<std::pair<Motif, Motif>> table;
  thread_local std::vector<int64_t> tokens, targets;
  table.clear();
  tokens.clear();
  targets.clear();
  const auto size_of = [&](bool key) { return key && !training ? motif : 1 + stream.below(motif); };
  const auto put = [&](const Motif& key, bool may_repeat) {
    size_t found = 0;
    while (found < table.size() && !(table[found].first == key)) ++found;
    const bool repeated = found < table.size();
    if (!repeated) {
      const int64_t size = size_of(false);
      table.emplace_back(key, draw_motif(stream, keys, values, size));
    }
    const Motif& value = table[found].second;
    for (int64_t i = 0; i < key.size; ++i) {
      tokens.push_back(key.token[i]);
      targets.push_back(kIgnored);
    }
    for (int64_t i = 0; i < value.size; ++i) {
      tokens.push_back(value.token[i]);
      targets.push_back(repeated && may_repeat ? value.token[i] : kIgnored);
    }
  };
  const int64_t key_size = size_of(true);
  const Motif probe_key = draw_motif(stream, 0, keys, key_size);
  const int64_t value_size = size_of(false);
  const Motif probe_value = draw_motif(stream, keys, values, value_size);
  table.emplace_back(probe_key, probe_value);
  const int64_t probe_size = key_size + value_size, room = std::max<int64_t>(0, T - probe_size - 2 * motif);
  // Early enough that the pair before it and the probe itself end before `room`.
  const int64_t position = stream.below(std::max<int64_t>(1, room - probe_size - 2 * motif));
  bool inserted = false;
  while (!inserted || static_cast<int64_t>(tokens.size()) < room) {
    if (!inserted && static_cast<int64_t>(tokens.size()) >= position) {
      put(probe_key, false);
      inserted = true;
      continue;
    }
    const int64_t size = size_of(true);
    const Motif key = draw_motif(stream, 0, keys, size);
    if (!inserted && key == probe_key) continue;  // the probe is shown where it belongs
    put(key, true);
  }
  put(probe_key, true);
  const int64_t pad = V - 1, length = static_cast<int64_t>(tokens.size()), left = T + 1 - length;
  const auto at = [&](const std::vector<int64_t>& list, int64_t t, int64_t otherwise) {
    return t < left ? otherwise : list[static_cast<size_t>(t - left)];
  };
  for (int64_t t = 0; t < T; ++t) {
    inputs[t] = at(tokens, t, pad);
    next[t] = t + 1 < left ? kIgnored : at(tokens, t + 1, pad);
    probe[t] = at(targets, t + 1, kIgnored);
  }
}

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t N = o.integer("examples"), T = o.integer("length"), V = o.integer("vocab"), motif = o.integer("motif");
  const auto text = [](int64_t x) { return std::to_string(x); };
  if ((V - 1) / 2 < motif) {
    return o.error("vocab is " + text(V) + ", expected at least " + text(2 * motif + 1) + " for motifs of " + text(motif));
  }
  if ((V - 1) / 2 == 1) return o.error("vocab is " + text(V) + ", expected at least 5: with one key there is only the probe");
  if (T < 6 * motif)
    return o.error("length is " + text(T) + ", expected at least " + text(6 * motif) + " for motifs of " + text(motif));
  if (N > kMaxElements / T) return o.error("examples x length is above 2^34 tokens");
  TaskTensor inputs = integer_tensor("inputs", {N, T}), next = integer_tensor("next", {N, T});
  TaskTensor probe = integer_tensor("probe", {N, T});
  const bool training = o.text("split") == "train";
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    const int64_t at = i * T;
    draw(stream, V, T, motif, training, inputs.integers.data() + at, next.integers.data() + at, probe.integers.data() + at);
  });
  *tensors = {std::move(inputs), std::move(next), std::move(probe)};
  return {};
}

}  // namespace

const Task& fuzzy_recall_task() {
  static const Task task = {
      .name = "fuzzy_recall",
      .summary = "MAD: in-context recall where keys and values are tuples of tokens",
      .details =
          "Ids 0 .. (vocab-1)/2 - 1 make keys, the rest values, vocab - 1 pads on the left. Keys and values are 1 to motif\n"
          "different tokens; keys of the splits valid and test always have motif. One pair, the probe, is shown once at a\n"
          "random place and asked at the end.",
      .options = drawn_options(12800, {integer_option("vocab", 16, 3, int64_t{1} << 20, "size of the vocabulary"),
                                       integer_option("length", 128, 1, int64_t{1} << 24, "tokens of a sequence"),
                                       integer_option("motif", 3, 1, kMostMotif, "most tokens of a key or value")}),
      .results = {{"inputs", "examples length", "tokens"},
                  {"next", "examples length", "the next token, -100 under the padding: the targets of training"},
                  {"probe", "examples length", "the tokens of a value whose key was shown before, else -100: of testing"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
