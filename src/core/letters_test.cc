#include "letters.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/call/toy.h"
#include "op.h"

namespace linnet {
namespace {

TEST(Letters, WhatTheyCount) {
  struct Row {
    const char* letter;
    Counts counts;
    const char* noun;
  };
  const Row rows[] = {
      {"B", Counts::batch, "batch rows"},     {"T", Counts::tokens, "tokens"},        {"S", Counts::tokens, "tokens"},
      {"capacity", Counts::tokens, "tokens"}, {"Hkv", Counts::heads, "heads"},        {"K", Counts::channels, "channels"},
      {"N", Counts::sequences, "sequences"},  {"levels", Counts::entries, "entries"}, {"", Counts::entries, "entries"},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(letter_named(row.letter).counts, row.counts) << row.letter;
    EXPECT_EQ(letter_named(row.letter).noun, row.noun) << row.letter;
  }
}

TEST(Letters, StandOnceInTheList) {
  for (const Letter& letter : known_letters()) {
    EXPECT_EQ(&letter_named(letter.name), &letter) << letter.name;
    EXPECT_GT(letter.example, 0) << letter.name;
  }
}

// Letters that begin with T count tokens, with H heads: a new one that is not in the list would be drawn as something else.
TEST(Letters, OfAllOperatorsAreKnownWhereTheyCountTokensOrHeads) {
  for (const Op* op : all_ops()) {
    for (const TensorDecl& decl : op->inputs) {
      for (const std::string_view word : Words(decl.shape)) {
        if (!is_letter(word) || word.size() > 3) continue;
        const Counts counts = letter_named(word).counts;
        EXPECT_TRUE(word[0] != 'T' || counts == Counts::tokens) << op->name << " " << decl.name << " " << word;
        EXPECT_TRUE(word[0] != 'H' || counts == Counts::heads) << op->name << " " << decl.name << " " << word;
      }
    }
  }
}

TEST(Letters, ExpressionsAreEvaluated) {
  ToyArgs args;
  args.rolls = 3;
  Dims dims;
  dims.set("K", 7, "q");
  dims.set("H", 2, "q");
  dims.set("Hkv", 5, "k");
  dims.set("huge", int64_t{1} << 62, "q");
  const struct {
    const char* expression;
    bool known;
    int64_t value;
  } table[] = {
      {"K", true, 7},
      {"12", true, 12},
      {"K+1", true, 8},
      {"1+K*2", true, 15},
      {"(1+K)*2", true, 16},
      {"K*K//2", true, 24},
      {"K-H-1", true, 4},
      {"max(H,Hkv)", true, 5},
      {"max(H*9,K)", true, 18},
      {"max(1,max(2,3))", true, 3},
      {"K*rolls", true, 21},
      {"H*causal", true, 0},
      {"F", true, 7},
      {"F*2", true, 14},
      {"unknown", false, 0},
      {"K//causal", false, 0},
      {"K+", false, 0},
      {"(K", false, 0},
      {"K K", false, 0},
      {"", false, 0},
      {"huge*huge", false, 0},
      {"huge+huge", false, 0},
      {"99999999999999999999", false, 0},
      {"2x", false, 0},
      {"cap", false, 0},
  };
  for (const auto& row : table) {
    int64_t value = -1;
    EXPECT_EQ(evaluate(row.expression, toy_op(), &args, dims, &value), row.known) << row.expression;
    EXPECT_EQ(row.known ? value : 0, row.value) << row.expression;
  }
  args.width = Width::counted;
  int64_t value;
  ASSERT_TRUE(evaluate("F", toy_op(), &args, dims, &value));
  EXPECT_EQ(value, 10);  // 7 * 3 // 2
}

TEST(Letters, WordsOfAShape) {
  struct Row {
    const char* shape;
    std::vector<std::string> words;
    const char* text;
  };
  const Row rows[] = {
      {"", {}, "[]"},
      {"N+1", {"N+1"}, "[N+1]"},
      {"B T H*normalize", {"B", "T", "H*normalize"}, "[B, T, H*normalize]"},
  };
  for (const Row& row : rows) {
    const Words words(row.shape);
    EXPECT_EQ(std::vector<std::string>(words.begin(), words.end()), row.words) << row.shape;
    EXPECT_EQ(shape_text(row.shape), row.text);
  }
  EXPECT_TRUE(is_letter("Hkv"));
  for (const char* word : {"", "N+1", "2", "9*D", "max(Hq,Hk)"}) EXPECT_FALSE(is_letter(word)) << word;
}

}  // namespace
}  // namespace linnet
