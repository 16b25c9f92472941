// RegBench (Akyurek et al., 2024, arXiv 2401.12973): words of a random regular language, whose automaton must be found in
// context.
#include "tasks/regbench.h"

#include "tasks/task.h"

namespace linnet::tasks {

Automaton draw_automaton(Stream& stream) {
  Automaton automaton;
  automaton.nodes = 4 + stream.below(9);
  const int64_t size = 4 + stream.below(15);
  const std::vector<int64_t> alphabet = stream.distinct(kSymbols, size);
  automaton.next.assign(static_cast<size_t>(automaton.nodes * kSymbols), -1);
  for (int64_t node = 0; node < automaton.nodes; ++node) {
    const int64_t edges = 1 + stream.below(3);
    const std::vector<int64_t> letters = stream.distinct(size, edges);
    const std::vector<int64_t> targets = stream.distinct(automaton.nodes - 1, edges);
    for (size_t e = 0; e < letters.size(); ++e) {
      const int64_t target = targets[e] + (targets[e] >= node ? 1 : 0);  // the nodes but this one, in order
      automaton.next[static_cast<size_t>(node * kSymbols + alphabet[static_cast<size_t>(letters[e])])] = target;
    }
  }
  return automaton;
}

void draw_words(Stream& stream, const Automaton& automaton, int64_t words, int64_t max_word, std::vector<int64_t>* sequence,
                std::vector<int64_t>* legal) {
  for (int64_t word = 0; word < words; ++word) {
    if (word > 0) {
      sequence->push_back(kSeparator);
      legal->insert(legal->end(), kSymbols, 0);
    }
    const int64_t length = 1 + stream.below(max_word - 1);
    int64_t node = 0;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t* const edges = automaton.next.data() + node * kSymbols;
      int64_t count = 0;
      for (int64_t s = 0; s < kSymbols; ++s) {
        const bool edge = edges[s] >= 0;
        legal->push_back(edge ? 1 : 0);
        count += edge ? 1 : 0;
      }
      int64_t chosen = stream.below(count), symbol = 0;
      while (edges[symbol] < 0 || chosen-- > 0) ++symbol;
      sequence->push_back(symbol);
      node = edges[symbol];
    }
  }
}

namespace {

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t N = o.integer("examples"), words = o.integer("words"), max_word = o.integer("max_word");
  struct Drawn {
    Automaton automaton;
    std::vector<int64_t> sequence, legal;
  };
  if (N > (int64_t{1} << 28) / std::max<int64_t>(1, (words == 0 ? 19 : words) * max_word)) {
    return o.error("examples x words x max_word is above 2^28 symbols");
  }
  std::vector<Drawn> drawn(static_cast<size_t>(N));
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    Drawn& own = drawn[static_cast<size_t>(i)];
    own.automaton = draw_automaton(stream);
    const int64_t count = words > 0 ? words : 10 + stream.below(10);
    draw_words(stream, own.automaton, count, max_word, &own.sequence, &own.legal);
  });
  int64_t longest = 0, nodes = 0;
  for (const Drawn& own : drawn) {
    longest = std::max(longest, static_cast<int64_t>(own.sequence.size()));
    nodes = std::max(nodes, own.automaton.nodes);
  }
  TaskTensor inputs = integer_tensor("inputs", {N, longest}, kSeparator + 1),
             targets = integer_tensor("targets", {N, longest}, kIgnored);
  TaskTensor legal = integer_tensor("legal", {N, longest, kSymbols}), table = integer_tensor("table", {N, nodes, kSymbols}, -1);
  for (int64_t i = 0; i < N; ++i) {
    const Drawn& own = drawn[static_cast<size_t>(i)];
    const auto length = static_cast<int64_t>(own.sequence.size());
    for (int64_t t = 0; t < length; ++t) {
      inputs.integers[static_cast<size_t>(i * longest + t)] = own.sequence[static_cast<size_t>(t)];
      if (t + 1 < length && own.sequence[static_cast<size_t>(t + 1)] != kSeparator) {
        targets.integers[static_cast<size_t>(i * longest + t)] = own.sequence[static_cast<size_t>(t + 1)];
      }
    }
    std::copy(own.legal.begin(), own.legal.end(), legal.integers.begin() + i * longest * kSymbols);
    std::copy(own.automaton.next.begin(), own.automaton.next.end(), table.integers.begin() + i * nodes * kSymbols);
  }
  *tensors = {std::move(inputs), std::move(targets), std::move(legal), std::move(table)};
  return {};
}

}  // namespace

const Task& regbench_task() {
  static const Task task = {
      .name = "regbench",
      .summary = "words of a random regular language, to be continued by its rules",
      .details =
          "Each sequence has an automaton of its own: 4 to 12 nodes, 4 to 18 of 18 symbols, 1 to 3 edges a node. Words are "
          "uniform\n"
          "walks from node 0, joined by the separator 18; 19 pads. A model is judged by the share of greedy predictions that "
          "are\n"
          "legal, and by the distance of its distribution from the uniform one over the legal symbols.",
      .options = drawn_options(64, {integer_option("words", 0, 0, 100'000, "words of a sequence; 0: 10 to 19, drawn"),
                                    integer_option("max_word", 50, 2, 100'000, "words have fewer symbols than this")}),
      .results = {{"inputs", "examples longest", "symbols, 18 between words, 19 behind the end"},
                  {"targets", "examples longest", "the next symbol; -100 before a separator and in the padding"},
                  {"legal", "examples longest 18", "the symbols that may stand at the position: zeros at a separator"},
                  {"table", "examples nodes 18", "the next node, -1 without an edge"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
