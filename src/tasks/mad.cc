#include "tasks/mad.h"

#include "tasks/task.h"

namespace linnet::tasks {

void draw_recall(Stream& stream, const RecallSize& size, int64_t* inputs, int64_t* next, int64_t* probe) {
  const int64_t pairs = size.length / 2, usable = size.vocab - size.noise_vocab, keys = usable / 2;
  thread_local std::vector<int64_t> value_of, shown, tokens, targets;
  value_of.assign(static_cast<size_t>(keys), -1);
  shown.clear();
  tokens.clear();
  targets.clear();
  const auto put_pair = [&](int64_t key) {
    int64_t& value = value_of[static_cast<size_t>(key)];
    const bool repeated = value >= 0;
    if (!repeated) {
      value = keys + stream.below(usable - keys);
      shown.push_back(key);
    }
    tokens.push_back(key);
    tokens.push_back(value);
    targets.push_back(kIgnored);
    targets.push_back(repeated ? value : kIgnored);
  };
  const int64_t kept = stream.below(pairs);  // never noise, so that there is a key to ask for
  for (int64_t i = 0; i + 1 < pairs; ++i) {
    if (i != kept && size.noise_vocab > 0 && stream.uniform() < size.noise) {
      for (int j = 0; j < 2; ++j) {
        tokens.push_back(usable + stream.below(size.noise_vocab));
        targets.push_back(kIgnored);
      }
    } else {
      put_pair(stream.below(keys));
    }
  }
  // Noise everywhere, and the protected pair was this last one: there is nothing to repeat, a new pair ends the sequence.
  put_pair(shown.empty() ? stream.below(keys) : shown[static_cast<size_t>(stream.below(static_cast<int64_t>(shown.size())))]);
  for (size_t t = 0; t + 1 < tokens.size(); ++t) {
    inputs[t] = tokens[t];
    next[t] = tokens[t + 1];
    probe[t] = targets[t + 1];
  }
}

void draw_selective_copy(Stream& stream, int64_t vocab, int64_t length, int64_t items, int64_t* inputs, int64_t* targets) {
  const int64_t blank = vocab - 2, copy = vocab - 1;
  thread_local std::vector<int64_t> item, before;  // before[i]: blanks directly before item i
  item.resize(static_cast<size_t>(items));
  before.assign(static_cast<size_t>(items), 0);
  for (int64_t& each : item) each = stream.below(vocab - 2);
  for (int64_t i = 0; i < length - 2 * items - 1; ++i) ++before[static_cast<size_t>(stream.below(items))];
  int64_t t = 0;
  for (size_t i = 0; i < item.size(); ++i) {
    for (int64_t j = 0; j < before[i]; ++j) inputs[t++] = blank;
    inputs[t++] = item[i];
  }
  for (int64_t i = 0; i <= t; ++i) targets[i] = kIgnored;
  inputs[t++] = copy;
  for (const int64_t each : item) {
    inputs[t] = blank;
    targets[t++] = each;
  }
}

std::vector<int64_t> memorisation_table(uint64_t seed, int64_t vocab) {
  Stream stream(seed);
  const int64_t half = (vocab - 1) / 2;
  std::vector<int64_t> values = stream.distinct(vocab - 1 - half, half);
  for (int64_t& value : values) value += half;
  return values;
}

void draw_memorisation(Stream& stream, const std::vector<int64_t>& table, int64_t vocab, int64_t length, int64_t* inputs,
                       int64_t* targets) {
  for (int64_t t = 0; t < length; t += 2) {
    const int64_t key = stream.below(static_cast<int64_t>(table.size()));
    inputs[t] = key;
    targets[t] = kIgnored;
    if (t + 1 == length) break;
    inputs[t + 1] = vocab - 1;
    targets[t + 1] = table[static_cast<size_t>(key)];
  }
}

void draw_compression(Stream& stream, int64_t vocab, int64_t length, int64_t* inputs) {
  for (int64_t t = 0; t + 1 < length; ++t) inputs[t] = stream.below(vocab - 1);
  if (length > 0) inputs[length - 1] = vocab - 1;
}

namespace {

std::string text(int64_t x) { return std::to_string(x); }

Status check_tokens(const TaskOptions& o) {
  if (o.integer("examples") > kMaxElements / std::max<int64_t>(1, o.integer("length"))) {
    return o.error("examples x length is above 2^34 tokens");
  }
  return {};
}

Status make_recall(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  RecallSize size = {.vocab = o.integer("vocab"), .length = o.integer("length")};
  const bool noisy = o.task().name == "noisy_recall";
  if (noisy) {
    size.noise_vocab = o.integer("noise_vocab");
    size.noise = o.real("noise");
  }
  const int64_t N = o.integer("examples"), T = size.length;
  if (T % 2 != 0) return o.error("length is " + text(T) + ", expected an even number");
  if (size.vocab - size.noise_vocab < 2) {
    return o.error("vocab is " + text(size.vocab) + ", expected at least 2 more than noise_vocab (" + text(size.noise_vocab) +
                   ")");
  }
  LINNET_TRY(check_tokens(o));
  TaskTensor inputs = integer_tensor("inputs", {N, T - 1}), next = integer_tensor("next", {N, T - 1});
  TaskTensor probe = integer_tensor("probe", {N, T - 1});
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    const int64_t at = i * (T - 1);
    draw_recall(stream, size, inputs.integers.data() + at, next.integers.data() + at, probe.integers.data() + at);
  });
  *tensors = {std::move(inputs), std::move(next), std::move(probe)};
  return {};
}

Status make_copy(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t N = o.integer("examples"), T = o.integer("length"), V = o.integer("vocab"), m = o.integer("items");
  if (2 * m + 1 > T) {
    return o.error("items is " + text(m) + ", but length " + text(T) + " has room for " + text((T - 1) / 2) +
                   ": the items, the copy token and as many blanks");
  }
  LINNET_TRY(check_tokens(o));
  TaskTensor inputs = integer_tensor("inputs", {N, T}), targets = integer_tensor("targets", {N, T});
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    draw_selective_copy(stream, V, T, m, inputs.integers.data() + i * T, targets.integers.data() + i * T);
  });
  *tensors = {std::move(inputs), std::move(targets)};
  return {};
}

Status make_memorisation(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t N = o.integer("examples"), T = o.integer("length"), V = o.integer("vocab");
  LINNET_TRY(check_tokens(o));
  const std::vector<int64_t> table = memorisation_table(static_cast<uint64_t>(o.integer("seed")), V);
  TaskTensor inputs = integer_tensor("inputs", {N, T}), targets = integer_tensor("targets", {N, T});
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    draw_memorisation(stream, table, V, T, inputs.integers.data() + i * T, targets.integers.data() + i * T);
  });
  TaskTensor map = integer_tensor("map", {static_cast<int64_t>(table.size())});
  map.integers = table;
  *tensors = {std::move(inputs), std::move(targets), std::move(map)};
  return {};
}

Status make_compression(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t N = o.integer("examples"), T = o.integer("length"), V = o.integer("vocab");
  LINNET_TRY(check_tokens(o));
  TaskTensor inputs = integer_tensor("inputs", {N, T});
  for_examples(o, N, [&](Stream& stream, int64_t i) { draw_compression(stream, V, T, inputs.integers.data() + i * T); });
  *tensors = {std::move(inputs)};
  return {};
}

constexpr int64_t kMostVocab = int64_t{1} << 30, kMostLength = int64_t{1} << 24;

TaskOption vocab_option(int64_t otherwise, int64_t low) {
  return integer_option("vocab", otherwise, low, kMostVocab, "size of the vocabulary");
}
TaskOption length_option(int64_t otherwise, int64_t low) {
  return integer_option("length", otherwise, low, kMostLength, "tokens of a sequence");
}
std::vector<TaskResult> recall_results() {
  return {{"inputs", "examples length-1", "tokens"},
          {"next", "examples length-1", "the next token: the targets of training"},
          {"probe", "examples length-1", "the next token where it is the value of a key shown before, else -100: of testing"}};
}

}  // namespace

const Task& recall_task() {
  static const Task task = {
      .name = "recall",
      .summary = "MAD: in-context recall of the value that followed a key",
      .details =
          "Ids 0 .. vocab/2 - 1 are keys, the rest values. length/2 pairs; a key that returns has the value it had, and the\n"
          "last pair repeats a key. MAD changes vocab to 32, 64, 128, length to 256, 512, 1024, one at a time.",
      .options = drawn_options(12800, {vocab_option(16, 2), length_option(128, 2)}),
      .results = recall_results(),
      .make = make_recall,
  };
  return task;
}

const Task& noisy_recall_task() {
  static const Task task = {
      .name = "noisy_recall",
      .summary = "MAD: in-context recall with noise tokens between the pairs",
      .details =
          "Like recall with the vocab - noise_vocab ids below the noise; each pair but one protected is replaced by two\n"
          "noise tokens with probability noise.",
      .options = drawn_options(12800, {vocab_option(32, 2), length_option(128, 2),
                                       integer_option("noise_vocab", 16, 0, kMostVocab, "ids at the end that are noise"),
                                       real_option("noise", "0.2", 0, 1, "probability that a pair is noise")}),
      .results = recall_results(),
      .make = make_recall,
  };
  return task;
}

const Task& memorisation_task() {
  static const Task task = {
      .name = "memorisation",
      .summary = "MAD: a fixed table of keys and values, learned by the weights",
      .details =
          "key, insert token vocab - 1, key, ...: the target at an insert token is the value of the key before it. The table\n"
          "depends on seed alone: train and test share it.",
      .options = drawn_options(256, {vocab_option(256, 3), length_option(32, 0)}),
      .results = {{"inputs", "examples length", "tokens"},
                  {"targets", "examples length", "the value at an insert token, -100 at a key"},
                  {"map", "(vocab-1)/2", "the value of each key"}},
      .make = make_memorisation,
  };
  return task;
}

const Task& compression_task() {
  static const Task task = {
      .name = "compression",
      .summary = "MAD: the whole sequence from the state at its last token",
      .details =
          "length - 1 random tokens below vocab - 1, then vocab - 1. The model reproduces all of them from the hidden state\n"
          "of the last position; the targets are the inputs.",
      .options = drawn_options(12800, {vocab_option(16, 2), length_option(32, 0)}),
      .results = {{"inputs", "examples length", "tokens, and the targets"}},
      .make = make_compression,
  };
  return task;
}

const Task& selective_copy_task() {
  static const Task task = {
      .name = "selective_copy",
      .summary = "MAD: copy the items of a sequence and leave the blanks out",
      .details =
          "items below vocab - 2 in order, blanks (vocab - 2) between them, the copy token vocab - 1, then a blank for each\n"
          "item, whose target is the item.",
      .options = drawn_options(12800, {vocab_option(16, 3), length_option(256, 3),
                                       integer_option("items", 16, 1, kMostLength / 2, "tokens to copy")}),
      .results = {{"inputs", "examples length", "tokens"},
                  {"targets", "examples length", "the items at the last blanks, else -100"}},
      .make = make_copy,
  };
  return task;
}

}  // namespace linnet::tasks
