#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "tasks/forecast.h"
#include "tasks/inflate.h"
#include "tasks/listops.h"
#include "tasks/mad.h"
#include "tasks/regbench.h"
#include "tasks/task.h"

namespace linnet::tasks {
namespace {

namespace fs = std::filesystem;

std::vector<TaskTensor> made(const std::string& name, const Words& words) {
  std::vector<TaskTensor> tensors;
  const Status status = make_task(name, words, &tensors);
  EXPECT_TRUE(status.ok()) << status.message();
  return tensors;
}

const std::vector<int64_t>& integers(const std::vector<TaskTensor>& tensors, const char* name) {
  const TaskTensor* tensor = find_tensor(tensors, name);
  EXPECT_NE(tensor, nullptr) << name;
  return tensor->integers;
}

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("linnet-tasks-" + std::to_string(getpid()))) { fs::create_directory(path_); }
  ~Folder() { fs::remove_all(path_); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return (path_ / name).string();
  }

 private:
  fs::path path_;
};

// The published outputs of SplitMix64 for seed 1234567.
TEST(Stream, KnownOutputs) {
  Stream stream(1234567);
  for (const uint64_t want : {6457827717110365317ULL, 3203168211198807973ULL, 9817491932198370423ULL, 4593380528125082431ULL}) {
    EXPECT_EQ(stream.next(), want);
  }
}

TEST(Stream, DistinctDrawsAreTheShuffle) {
  Stream a(3), b(3);
  DistinctDraws draws;
  draws.resize(50);
  for (const int64_t m : {0, 1, 7, 50, 3}) {
    std::vector<int64_t> got(static_cast<size_t>(m));
    draws.draw(a, m, got.data());
    EXPECT_EQ(got, b.distinct(50, m));
  }
}

// Against the definition: all weights summed for every draw.
TEST(Stream, WeightedDraws) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<double> weights(24), sums(24);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = std::pow(static_cast<double>(i + 1), -0.99);
    std::partial_sum(weights.begin(), weights.end(), sums.begin());
    Stream a(seed), b(seed);
    WeightedDraws draws;
    draws.reset(weights, sums);
    for (int draw = 0; draw < 24; ++draw) {
      double sum = 0;
      for (const double w : weights) sum += w;
      const double u = b.uniform() * sum;
      double running = 0;
      size_t want = 0;
      for (; want < weights.size(); ++want) {
        running += weights[want];
        if (running > u) break;
      }
      ASSERT_EQ(draws.draw(a), static_cast<int64_t>(want)) << seed;
      weights[want] = 0;
    }
  }
}

// Same options, same numbers; another seed, other numbers; independent streams do not depend on the number of examples.
TEST(Tasks, SeedsDecide) {
  for (const Task* task : all_tasks()) {
    bool drawn = false;
    for (const TaskOption& option : task->options) drawn |= option.name == "independent";
    if (!drawn || task->name == "documents") continue;
    Words small = {{"examples", "5"}};
    if (task->name == "listops") small.insert(small.end(), {{"min_length", "5"}, {"max_length", "60"}});
    const auto with = [&](const char* name, const char* value) {
      Words words = small;
      words.emplace_back(name, value);
      return made(task->name, words);
    };
    const auto first = made(task->name, small), again = made(task->name, small);
    const auto values = [](const TaskTensor& t) { return std::pair(t.integers, t.bytes); };
    EXPECT_EQ(values(first[0]), values(again[0])) << task->name;
    EXPECT_NE(values(first[0]), values(with("seed", "1")[0])) << task->name;
    if (task->name != "fuzzy_recall" && task->name != "memorisation") {  // which treat their splits differently
      EXPECT_EQ(values(with("split", "test")[0]), values(with("seed", "2")[0])) << task->name;
    }
    Words ten = {{"examples", "40"}, {"independent", "1"}}, five = {{"examples", "20"}, {"independent", "1"}};
    if (task->name == "listops" || task->name == "regbench") continue;  // rows are as long as the longest
    const auto all = made(task->name, ten), some = made(task->name, five);
    for (int64_t i = 0; i < some[0].count(); ++i) ASSERT_EQ(all[0].get(i), some[0].get(i)) << task->name;
  }
}

// An oracle that looks a key up scores 1; each key is asked once.
TEST(Mqar, LabelsAreTheValuesOfTheKeys) {
  for (const char* filler : {"0", "1"}) {
    const auto tensors = made(
        "mqar",
        {{"examples", "50"}, {"vocab", "300"}, {"length", "256"}, {"pairs", "64"}, {"power", "1"}, {"random_filler", filler}});
    const auto &inputs = integers(tensors, "inputs"), &labels = integers(tensors, "labels");
    for (size_t row = 0; row < 50; ++row) {
      std::map<int64_t, int64_t> value_of;
      std::set<int64_t> asked;
      for (size_t j = 0; j < 64; ++j) value_of[inputs[row * 256 + 2 * j]] = inputs[row * 256 + 2 * j + 1];
      ASSERT_EQ(value_of.size(), 64U);
      for (size_t t = 0; t < 256; ++t) {
        const int64_t label = labels[row * 256 + t];
        if (label == kIgnored) continue;
        ASSERT_GE(t, 128U);
        EXPECT_EQ(label, value_of.at(inputs[row * 256 + t]));
        EXPECT_TRUE(asked.insert(inputs[row * 256 + t]).second);
      }
      EXPECT_EQ(asked.size(), 64U);
    }
  }
}

// Noise 0 without a noise vocabulary is recall; the probe asks only for values of keys shown before.
TEST(Mad, Recall) {
  const auto plain = made("recall", {{"examples", "20"}, {"length", "64"}});
  const auto noisy = made("noisy_recall", {{"examples", "20"}, {"length", "64"}, {"vocab", "16"}, {"noise_vocab", "0"}});
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(plain[i].integers, noisy[i].integers);
  const auto all = made("noisy_recall", {{"examples", "200"}, {"length", "32"}, {"noise", "1"}});  // hardly a key to ask for
  const auto &inputs = integers(all, "inputs"), &probe = integers(all, "probe");
  for (size_t row = 0; row < 200; ++row) {
    std::map<int64_t, int64_t> value_of;
    for (size_t t = 0; t < 31; t += 2) {
      const int64_t key = inputs[row * 31 + t];
      const bool shown = value_of.count(key) > 0;
      if (t + 1 < 31 && key < 8) value_of[key] = inputs[row * 31 + t + 1];
      if (shown) {
        EXPECT_EQ(probe[row * 31 + t], value_of[key]);
      } else {
        EXPECT_EQ(probe[row * 31 + t], kIgnored);
      }
    }
  }
}

TEST(Mad, FuzzyRecallEndsWithItsProbe) {
  for (const char* split : {"train", "test"}) {
    for (const char* length : {"18", "40", "128"}) {
      const auto tensors = made("fuzzy_recall", {{"examples", "300"}, {"length", length}, {"split", split}});
      const auto &inputs = integers(tensors, "inputs"), &next = integers(tensors, "next"), &probe = integers(tensors, "probe");
      const size_t T = inputs.size() / 300;
      for (size_t row = 0; row < 300; ++row) {
        bool padded = true;
        for (size_t t = 0; t < T; ++t) {
          const int64_t token = inputs[row * T + t];
          padded &= token == 15;
          EXPECT_TRUE(padded || token < 15);
          if (t + 1 < T && next[row * T + t] != kIgnored) {
            EXPECT_EQ(next[row * T + t], inputs[row * T + t + 1]);
          }
          if (probe[row * T + t] != kIgnored) {
            EXPECT_EQ(probe[row * T + t], next[row * T + t]);
          }
        }
        EXPECT_NE(probe[row * T + T - 1], kIgnored);
      }
    }
  }
}

TEST(Mad, SelectiveCopyAndMemorisation) {
  const auto copy = made("selective_copy", {{"examples", "20"}, {"length", "33"}, {"items", "16"}});  // no room for blanks
  const auto &inputs = integers(copy, "inputs"), &targets = integers(copy, "targets");
  for (size_t row = 0; row < 20; ++row) {
    for (size_t i = 0; i < 16; ++i) EXPECT_EQ(inputs[row * 33 + i], targets[row * 33 + 17 + i]);
  }
  const auto train = made("memorisation", {{"examples", "9"}, {"length", "7"}}),
             test = made("memorisation", {{"split", "test"}});
  EXPECT_EQ(integers(train, "map"), integers(test, "map"));
  EXPECT_NE(integers(train, "inputs"), integers(test, "inputs"));
}

TEST(Listops, Values) {
  const struct {
    const char* text;
    int64_t value;
  } table[] = {
      {"[MAX 2 9 [MIN 4 7 ] 0 ]", 9}, {"[SM 9 9 9 ]", 7},        {"[MED 1 2 ]", 1}, {"[MED 3 1 8 ]", 3}, {"[MED 9 8 1 0 ]", 4},
      {"( ( ( [MAX 2 ) 9 ) ] )", 9},  {"[MIN [SM 5 6 ] 2 ]", 1}, {"7", 7}};
  for (const auto& row : table) {
    Expression e, again;
    ASSERT_TRUE(parse_expression(row.text, &e).ok()) << row.text;
    EXPECT_EQ(e.value(), row.value) << row.text;
    ASSERT_TRUE(parse_expression(e.nested(), &again).ok());  // either notation is the same tree
    EXPECT_EQ(again.tokens, e.tokens);
  }
  const std::pair<const char*, const char*> bad[] = {{"", "the expression is empty"},
                                                     {"[MAX 2", "not closed by ']'"},
                                                     {"2 ]", "stands behind the end"},
                                                     {"]", "']' without an operator"},
                                                     {"[AVG 2 ]", "the token '[AVG' is unknown"},
                                                     {"[MAX ]", "no arguments"},
                                                     {"( [MAX 2 ]", "'(' without ')'"},
                                                     {") [MAX 2 ]", "')' without '('"},
                                                     {"1 2", "stands behind the end"}};
  for (const auto& [text, says] : bad) {
    Expression e;
    const Status status = parse_expression(text, &e);
    EXPECT_EQ(status.code(), Code::bad_input) << text;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }
  // MIN <= MED <= MAX, in any order of the arguments.
  Stream stream(5);
  for (int i = 0; i < 200; ++i) {
    std::string digits, reversed;
    for (int64_t j = 2 + stream.below(9); j > 0; --j) {
      const std::string digit = std::to_string(stream.below(10)) + " ";
      digits += digit;
      reversed = digit + reversed;
    }
    int64_t value[4] = {};
    for (int op = 0; op < 4; ++op) {
      Expression a, b;
      ASSERT_TRUE(parse_expression(kListopsTokens[kMin + op] + (" " + digits) + "]", &a).ok());
      ASSERT_TRUE(parse_expression(kListopsTokens[kMin + op] + (" " + reversed) + "]", &b).ok());
      EXPECT_EQ(a.value(), b.value());
      value[op] = a.value();
    }
    EXPECT_LE(value[0], value[2]);
    EXPECT_LE(value[2], value[1]);
  }
}

TEST(Listops, LengthsLieBetweenTheLimits) {
  const auto tensors =
      made("listops", {{"examples", "100"}, {"min_length", "5"}, {"max_length", "60"}, {"max_depth", "5"}, {"max_args", "5"}});
  const TaskTensor& ids = *find_tensor(tensors, "ids");
  std::set<std::vector<int64_t>> seen;
  for (int64_t row = 0; row < 100; ++row) {
    const auto begin = ids.integers.begin() + row * ids.shape[1];
    const int64_t length = std::find(begin, begin + ids.shape[1], kEnd) - begin;
    EXPECT_GT(length, 5);
    EXPECT_LT(length, 60);
    EXPECT_TRUE(seen.insert({begin, begin + length}).second);
  }
}

TEST(Regbench, EverySymbolIsLegal) {
  const auto tensors = made("regbench", {{"examples", "30"}});
  const TaskTensor &inputs = *find_tensor(tensors, "inputs"), &legal = *find_tensor(tensors, "legal");
  const TaskTensor &targets = *find_tensor(tensors, "targets"), &table = *find_tensor(tensors, "table");
  const int64_t T = inputs.shape[1], nodes = table.shape[1];
  for (int64_t row = 0; row < 30; ++row) {
    int64_t node = 0, words = 1;
    for (int64_t t = 0; t < T; ++t) {
      const auto symbol = static_cast<int64_t>(inputs.get(row * T + t));
      if (symbol > kSeparator) break;
      if (t > 0 && targets.get(row * T + t - 1) != kIgnored) {
        EXPECT_EQ(targets.get(row * T + t - 1), symbol);
      }
      if (symbol == kSeparator) {
        node = 0;
        ++words;
        continue;
      }
      EXPECT_EQ(legal.get((row * T + t) * kSymbols + symbol), 1);
      node = static_cast<int64_t>(table.get((row * nodes + node) * kSymbols + symbol));
      EXPECT_GE(node, 0);
    }
    EXPECT_GE(words, 10);
    EXPECT_LE(words, 19);
  }
}

// Both classes, two dots that are filled, and pixels that are not all one grey.
TEST(Pathfinder, Draws) {
  for (const char* size : {"32", "64"}) {
    const auto tensors = made("pathfinder", {{"examples", "40"}, {"size", size}, {"seed", "3"}});
    const TaskTensor& pixels = *find_tensor(tensors, "pixels");
    const auto& label = integers(tensors, "label");
    const int64_t positive = std::count(label.begin(), label.end(), 1);
    EXPECT_GT(positive, 8);
    EXPECT_LT(positive, 32);
    for (int64_t i = 0; i < 40; ++i) {
      int64_t lit = 0;
      for (int64_t p = 0; p < pixels.shape[1]; ++p) lit += pixels.get(i * pixels.shape[1] + p) > 0;
      EXPECT_GT(lit, 100);
      EXPECT_LT(lit, 600);
    }
  }
}

TEST(Forecast, WindowsOfTheEttProtocol) {
  Series series{17420, 2, {}, std::vector<double>(2 * 17420)};
  for (size_t i = 0; i < series.values.size(); i += 2) {
    series.values[i] = std::sin(static_cast<double>(i));
    series.values[i + 1] = 3;  // a constant channel
  }
  Forecast f = {.lookback = 96, .horizon = 96, .train = 8640, .valid = 2880, .test = 2880};
  ASSERT_TRUE(prepare_forecast(series, &f).ok());
  EXPECT_EQ(f.windows[0], 8449);
  EXPECT_EQ(f.windows[1], 2785);
  EXPECT_EQ(f.windows[2], 2785);
  EXPECT_EQ(f.deviation[1], 1);
  EXPECT_EQ(f.scaled[1], 0);
  const auto cut = made("forecast", {{"rows", "300"}, {"lookback", "20"}, {"horizon", "5"}, {"cut", "1"}, {"split", "test"}});
  const TaskTensor &scaled = *find_tensor(cut, "scaled"), &inputs = *find_tensor(cut, "inputs"),
                   &targets = *find_tensor(cut, "targets");
  const auto& parts = integers(cut, "parts");
  EXPECT_EQ(inputs.shape[0], integers(cut, "windows")[2]);
  EXPECT_EQ(targets.get(0), scaled.get((parts[4] + 20) * 7));
  EXPECT_EQ(targets.get(targets.count() - 1), scaled.get(scaled.count() - 1));
}

// printf 'hello hello hello hello\n' | gzip -9n: fixed codes. seq 1 80 | gzip -9n: codes of its own.
TEST(Inflate, Gzip) {
  const std::vector<uint8_t> packed = {0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xcb, 0x48, 0xcd, 0xc9, 0xc9,
                                       0x57, 0xc8, 0x40, 0x27, 0xb9, 0x00, 0x00, 0x88, 0x59, 0x0b, 0x18, 0x00, 0x00, 0x00};
  const std::vector<uint8_t> numbers = {
      0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x0d, 0x8f, 0x47, 0x01, 0xc0, 0x30, 0x10, 0xc3, 0xfe,
      0x42, 0x13, 0xfb, 0x36, 0x7f, 0x62, 0x2d, 0x01, 0x0d, 0x61, 0x82, 0xa4, 0x68, 0x86, 0xe5, 0xd0, 0x43, 0x42, 0x46,
      0x81, 0x12, 0x15, 0x6a, 0x34, 0x68, 0xd1, 0xe1, 0x87, 0x85, 0x8d, 0x03, 0x27, 0x2e, 0xdc, 0x78, 0xf0, 0xe2, 0x23,
      0x1e, 0x21, 0xe2, 0x47, 0x06, 0x91, 0x44, 0x11, 0x4d, 0x0c, 0xb1, 0xc4, 0x91, 0x8f, 0x14, 0x69, 0xf2, 0x37, 0x26,
      0x59, 0x64, 0x93, 0x43, 0x2e, 0x79, 0xd4, 0xa3, 0x44, 0x99, 0x0a, 0xea, 0x0f, 0x2a, 0xaa, 0xa9, 0xa1, 0x96, 0x3a,
      0xfa, 0xd1, 0xa2, 0x4d, 0x07, 0x9d, 0xf4, 0xdf, 0xdb, 0xf4, 0xd0, 0x4b, 0x1f, 0xf3, 0x18, 0x31, 0x66, 0x82, 0x49,
      0xa6, 0x98, 0x7f, 0x67, 0x98, 0x65, 0x8e, 0x7d, 0x7c, 0x78, 0x3c, 0xa4, 0xa6, 0xe7, 0x00, 0x00, 0x00};
  std::vector<uint8_t> out;
  ASSERT_EQ(gunzip(packed, 1000, &out).message(), "");
  EXPECT_EQ(std::string(out.begin(), out.end()), "hello hello hello hello\n");
  ASSERT_EQ(gunzip(numbers, 1000, &out).message(), "");
  std::string want;
  for (int i = 1; i <= 80; ++i) want += std::to_string(i) + "\n";
  EXPECT_EQ(std::string(out.begin(), out.end()), want);
  // Every prefix and every changed byte is refused or gives something: never a crash, never more than the limit.
  for (size_t i = 0; i < packed.size(); ++i) {
    std::vector<uint8_t> cut(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_FALSE(gunzip(cut, 1000, &out).ok());
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<uint8_t> changed = packed;
      changed[i] ^= static_cast<uint8_t>(1 << bit);
      (void)gunzip(changed, 1000, &out);
      EXPECT_LE(out.size(), 1000U);
    }
  }
  EXPECT_FALSE(gunzip(packed, 10, &out).ok());
}

TEST(Files, ImagesTextAndSeries) {
  const Folder folder;
  const std::string images =
      folder.write("images", std::string("\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x03", 16) + "abcdefghijkl");
  const std::string labels = folder.write("labels", std::string("\0\0\x08\x01\0\0\0\x02", 8) + "\x07\x03");
  const auto tensors = made("images", {{"path", images}, {"labels", labels}});
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(tensors[0].get(7), 'h');
  EXPECT_EQ(tensors[1].get(0), 7);
  const auto permuted = made("images", {{"path", images}, {"permute", "1"}});
  std::set<uint8_t> row(permuted[0].bytes.begin(), permuted[0].bytes.begin() + 6);
  EXPECT_EQ(row.size(), 6U);
  for (size_t p = 0; p < 6; ++p) EXPECT_EQ(permuted[0].bytes[6 + p], permuted[0].bytes[p] + 6);  // the same order in each image

  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>('a' + i % 26);
  const std::string file = folder.write("text", text);
  const auto windows = made("text", {{"path", file}, {"length", "100"}});
  EXPECT_EQ(windows[0].shape, (std::vector<int64_t>{8, 100}));  // 900 bytes of training, a target for the last
  EXPECT_EQ(windows[1].get(0), 'b');
  EXPECT_EQ(made("text", {{"path", file}, {"length", "20"}, {"split", "test"}})[0].shape[0], 2);
  const auto documents =
      made("documents",
           {{"first", file}, {"second", folder.write("other", std::string(500, '-'))}, {"length", "10"}, {"examples", "30"}});
  for (int64_t i = 0; i < 30; ++i) EXPECT_EQ(documents[0].get(10 * i) == '-', documents[1].get(i) == 1);

  Series series;
  ASSERT_TRUE(parse_series("date,HUFL,OT\n2016-07-01 00:00:00,5.8,-2e1\r\n2016-07-01 01:00:00,5.7,3\n", "x.csv", &series).ok());
  EXPECT_EQ(series.rows, 2);
  EXPECT_EQ(series.names, (std::vector<std::string>{"HUFL", "OT"}));
  EXPECT_EQ(series.values, (std::vector<double>{5.8, -20, 5.7, 3}));
  ASSERT_TRUE(parse_series("1,2\n3,4", "x.csv", &series).ok());
  EXPECT_EQ(series.channels, 2);
}

TEST(Tasks, BadInput) {
  const Folder folder;
  const std::string nothing = folder.write("empty", ""), words = folder.write("words.csv", "a,b\n1,2\n3,x\n");
  const std::string ragged = folder.write("ragged.csv", "1,2\n3\n"),
                    cut = folder.write("cut", std::string("\0\0\x08\x01\0\0\0\x05", 8) + "ab");
  const struct {
    const char* task;
    Words words;
    const char* says;
  } table[] = {
      {"mqra", {}, "there is no task 'mqra'"},
      {"mqar", {{"lenght", "64"}}, "mqar: there is no option 'lenght'"},
      {"mqar", {{"length", "63"}}, "mqar: length is 63, expected an even number"},
      {"mqar", {{"length", "long"}}, "mqar: length is 'long', expected a whole number"},
      {"mqar", {{"pairs", "17"}}, "mqar: pairs is 17, expected at most a quarter of length (16)"},
      {"mqar", {{"vocab", "64"}}, "mqar: vocab is 64, expected more than length (64)"},
      {"mqar", {{"power", "-1"}}, "mqar: power is '-1', expected 0 to 100"},
      {"mqar", {{"random_filler", "2"}}, "mqar: random_filler is '2', expected 0 or 1"},
      {"mqar", {{"split", "dev"}}, "mqar: split is 'dev', expected one of train, valid, test"},
      {"mqar", {{"examples", "4294967296"}, {"length", "4096"}}, "mqar: examples x length is above 2^34 tokens"},
      {"recall", {{"length", "5"}}, "recall: length is 5, expected an even number"},
      {"noisy_recall", {{"vocab", "17"}}, "noisy_recall: vocab is 17, expected at least 2 more than noise_vocab (16)"},
      {"fuzzy_recall", {{"vocab", "6"}}, "fuzzy_recall: vocab is 6, expected at least 7"},
      {"fuzzy_recall", {{"length", "17"}}, "fuzzy_recall: length is 17, expected at least 18"},
      {"selective_copy", {{"length", "32"}}, "selective_copy: items is 16, but length 32 has room for 15"},
      {"listops",
       {{"min_length", "60"}, {"max_length", "61"}},
       "listops: min_length is 60, expected at most max_length - 2 (59)"},
      {"listops", {{"max_depth", "1"}}, "listops: no new expression longer than 500"},
      {"pathfinder", {{"size", "16"}, {"dashes", "40"}}, "pathfinder: two curves of 40 dashes"},
      {"forecast", {{"rows", "100"}}, "forecast: lookback + horizon is 192, expected at most the 70 rows of the training part"},
      {"forecast", {{"train", "5000"}}, "forecast: train + valid + test is 5000, expected at most the 2000 rows"},
      {"forecast", {{"path", words}}, "line 3, field 2 is 'x', expected a number"},
      {"forecast", {{"path", ragged}}, "line 2 has 1 fields, expected 2"},
      {"forecast", {{"path", nothing}}, "it has no rows of numbers"},
      {"forecast", {{"path", "/nonexistent.csv"}}, "/nonexistent.csv"},
      {"images", {}, "images: path is missing"},
      {"images", {{"path", nothing}}, "it is no idx file"},
      {"images", {{"path", cut}}, "it has 2 values, its header says 5"},
      {"text", {{"path", nothing}}, "has 0 bytes, expected at least length + 1 (513)"},
      {"documents", {{"first", nothing}, {"second", nothing}}, "expected at least length (1000)"},
  };
  for (const auto& row : table) {
    std::vector<TaskTensor> tensors;
    const Status status = make_task(row.task, row.words, &tensors);
    EXPECT_EQ(status.code(), Code::bad_input) << row.says;
    EXPECT_NE(status.message().find(row.says), std::string::npos) << status.message();
    EXPECT_TRUE(tensors.empty());
  }
}

}  // namespace
}  // namespace linnet::tasks
