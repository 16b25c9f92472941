// The tokeniser that a GGUF file carries in its metadata: tokenizer.ggml.tokens, .merges, .token_type, and in .pre the name of
// the word rule.
#include "runtime/files/gguf.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/files/json.h"
#include "runtime/files/gguf_config.h"
#include "runtime/tokenizer/tokenizer.h"
#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

struct NamedRule {
  const char* name;
  Pretokenizer rules;
  bool whole_words;
  bool nfc;
};
constexpr NamedRule kRules[] = {
    {"gpt-2", {WordRule::gpt2, false, false}, false, false},      {"gpt2", {WordRule::gpt2, false, false}, false, false},
    {"llama-bpe", {WordRule::llama3, false, false}, true, false}, {"llama3", {WordRule::llama3, false, false}, true, false},
    {"llama-v3", {WordRule::llama3, false, false}, true, false},  {"qwen2", {WordRule::qwen2, false, false}, false, true},
    {"smollm", {WordRule::gpt2, true, false}, false, false},
};
enum TokenType { kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6 };  // the format's; the others are plain or unused

// The pre-tokeniser of byte-level pairs.
template <class F>
void write_words(JsonWriter& w, const NamedRule& rule, bool own_words, const F& byte_level) {
  w.begin_object().member("type", "Sequence").key("pretokenizers").begin_array();
  if (rule.rules.single_digits) w.begin_object().member("type", "Digits").member("individual_digits", true).end_object();
  if (!own_words) {
    w.begin_object()
        .member("type", "Split")
        .key("pattern")
        .begin_object()
        .member("Regex", pattern_of(rule.rules.rule))
        .end_object();
    w.member("behavior", "Isolated").member("invert", false).end_object();
  }
  byte_level(own_words);
  w.end_array().end_object();
}

// The merges that scores stand for: of the best token first, all ways to make it.
std::vector<std::string> scored_merges(const std::vector<std::string_view>& tokens, const std::vector<double>& scores,
                                       const std::vector<int64_t>& types) {
  std::unordered_set<std::string_view> known;
  std::vector<size_t> order;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == kByte || types[i] == kControl || types[i] == kUnknown || tokens[i].empty()) continue;
    known.insert(tokens[i]);
    order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  std::vector<std::string> merges;
  for (const size_t i : order) {
    const std::string_view token = tokens[i];
    for (size_t at = 1; at < token.size(); ++at) {
      if ((static_cast<unsigned char>(token[at]) & 0xc0) == 0x80) continue;
      if (known.count(token.substr(0, at)) != 0 && known.count(token.substr(at)) != 0)
        merges.push_back(std::string(token.substr(0, at)) + " " + std::string(token.substr(at)));
    }
  }
  return merges;
}

}  // namespace

class TokenizerGguf {
 public:
  static Status read(const GgufFile& file, std::unique_ptr<Tokenizer>& out) {
    const auto fail = [&](const std::string& reason) { return bad_input(file.path() + ": " + reason); };
    std::string_view model, pre;
    if (!file.find("tokenizer.ggml.model").text(model)) return fail("has no tokeniser (tokenizer.ggml.model)");
    if (model == "llama") return read_scored(file, out);
    if (model != "gpt2") {
      return fail("has a tokeniser of model " + json_quote_short(model) + ", expected \"gpt2\" (byte-level BPE) or \"llama\"");
    }
    if (!file.find("tokenizer.ggml.pre").text(pre)) return fail("does not name its pre-tokeniser (tokenizer.ggml.pre)");
    const NamedRule* rule = nullptr;
    for (const NamedRule& candidate : kRules) {
      if (pre == candidate.name) rule = &candidate;
    }
    if (rule == nullptr) {
      return fail("has the pre-tokeniser " + json_quote_short(pre) + ", expected gpt-2, llama-bpe, qwen2 or smollm");
    }
    std::vector<std::string_view> tokens, merges;
    std::vector<int64_t> types;
    if (!file.find("tokenizer.ggml.tokens").texts(tokens) || !file.find("tokenizer.ggml.merges").texts(merges)) {
      return fail("lacks its tokens or merges (tokenizer.ggml.tokens, tokenizer.ggml.merges)");
    }
    if (static_cast<int64_t>(tokens.size()) > kMaxVocabulary) return fail("has more tokens than 2^24");
    const GgufValue type_list = file.find("tokenizer.ggml.token_type");
    if (type_list.given() && (!type_list.integers(types) || types.size() != tokens.size())) {
      return fail("tokenizer.ggml.token_type does not fit its tokens");
    }
    types.resize(tokens.size(), 1);

    std::unique_ptr<Tokenizer> made(new Tokenizer);
    made->words_ = rule->rules;
    made->nfc_ = rule->nfc;
    std::vector<std::string> pieces(tokens.size());
    std::vector<AddedToken> added;
    std::string bytes;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (find_invalid_utf8(tokens[i]) != tokens[i].size()) return fail("token " + std::to_string(i) + " is not UTF-8");
      const bool plain = types[i] != kControl && types[i] != kUserDefined;
      if (!plain && !tokens[i].empty()) {
        added.push_back({std::string(tokens[i]), static_cast<int32_t>(i), types[i] == kControl});
      } else {
        pieces[i] = byte_level(tokens[i], bytes) ? bytes : std::string(tokens[i]);
      }
    }
    LINNET_TRY(made->add_pieces(std::move(pieces)));
    std::string left, right;
    for (size_t i = 0; i < merges.size(); ++i) {
      const size_t space = merges[i].find(' ', 1);
      if (find_invalid_utf8(merges[i]) != merges[i].size() || space == std::string_view::npos ||
          !byte_level(merges[i].substr(0, space), left) || !byte_level(merges[i].substr(space + 1), right)) {
        return fail("merge " + std::to_string(i) + " is " + json_quote_short(merges[i]) + ", expected two byte-level tokens");
      }
      const Status status = made->add_merge(left, right, static_cast<int32_t>(i));
      if (!status.ok()) return fail(status.message());
    }
    if (rule->whole_words) {
      for (size_t i = 0; i < made->pieces_.size(); ++i) {
        if (!made->pieces_[i].empty()) made->bpe_.add_whole(made->pieces_[i], static_cast<int32_t>(i));
      }
    }
    made->finish(std::move(added));
    LINNET_TRY(add_around(file, "bos", made->prefix_, made->size()));
    LINNET_TRY(add_around(file, "eos", made->suffix_, made->size()));
    out = std::move(made);
    return {};
  }

 private:
  // SentencePiece's pairs: no list of merges, but a score for each token. Of all neighbours that make a token those with the
  // best one merge first, which is a list of merges with equal ranks for the ways to make one token.
  static Status read_scored(const GgufFile& file, std::unique_ptr<Tokenizer>& out) {
    const auto fail = [&](const std::string& reason) { return bad_input(file.path() + ": " + reason); };
    std::vector<std::string_view> tokens;
    std::vector<double> scores;
    std::vector<int64_t> types;
    if (!file.find("tokenizer.ggml.tokens").texts(tokens) || !file.find("tokenizer.ggml.scores").reals(scores) ||
        !file.find("tokenizer.ggml.token_type").integers(types) || scores.size() != tokens.size() ||
        types.size() != tokens.size() || static_cast<int64_t>(tokens.size()) > kMaxVocabulary) {
      return fail("lacks its tokens, scores or types (tokenizer.ggml.tokens, .scores, .token_type)");
    }
    std::unique_ptr<Tokenizer> made(new Tokenizer);
    Tokenizer::Spaces& spaces = made->spaces_;
    spaces.used = spaces.strip = made->fallback_ = true;
    bool prefix = true;
    file.find("tokenizer.ggml.add_space_prefix").boolean(prefix);
    spaces.prepend = prefix ? Tokenizer::Spaces::Prepend::first : Tokenizer::Spaces::Prepend::never;
    spaces.strip = prefix;
    std::vector<std::string> pieces(tokens.size());
    std::vector<AddedToken> added;
    int32_t unknown = -1;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (find_invalid_utf8(tokens[i]) != tokens[i].size()) return fail("token " + std::to_string(i) + " is not UTF-8");
      if (types[i] == kUnknown) unknown = static_cast<int32_t>(i);
      if ((types[i] == kControl || types[i] == kUserDefined || types[i] == kUnknown) && !tokens[i].empty()) {
        added.push_back({std::string(tokens[i]), static_cast<int32_t>(i), types[i] != kUserDefined});
      } else {
        pieces[i] = types[i] == kByte ? std::string(tokens[i]) : with_spaces(tokens[i]);
      }
    }
    LINNET_TRY(made->add_pieces(std::move(pieces)));
    made->bpe_.use_characters(unknown, true);
    std::vector<size_t> order(tokens.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    for (size_t rank = 0; rank < order.size(); ++rank) {
      if (types[order[rank]] == kByte) continue;
      const std::string_view piece = made->pieces_[order[rank]];
      for (size_t at = 1; at < piece.size(); ++at) {
        if ((static_cast<unsigned char>(piece[at]) & 0xc0) == 0x80) continue;
        const int32_t left = made->find(piece.substr(0, at)), right = made->find(piece.substr(at));
        if (left >= 0 && right >= 0) made->bpe_.add_merge(left, right, static_cast<int32_t>(rank), made->find(piece));
      }
    }
    made->finish(std::move(added));
    LINNET_TRY(add_around(file, "bos", made->prefix_, made->size(), true));
    LINNET_TRY(add_around(file, "eos", made->suffix_, made->size()));
    out = std::move(made);
    return {};
  }

  static bool byte_level(std::string_view token, std::string& out) {
    out.clear();
    for (size_t at = 0; at < token.size();) {
      int bytes;
      const int b = byte_level_byte(unicode::decode(token, at, bytes));
      if (b < 0) return false;
      out += static_cast<char>(b);
      at += static_cast<size_t>(bytes);
    }
    return !out.empty();
  }

  static Status add_around(const GgufFile& file, const std::string& name, std::vector<int32_t>& out, int64_t size,
                           bool otherwise = false) {
    bool add = otherwise;
    file.find("tokenizer.ggml.add_" + name + "_token").boolean(add);
    if (!add) return {};
    int64_t id = -1;
    if (!file.find("tokenizer.ggml." + name + "_token_id").integer(id) || id < 0 || id >= size) {
      return bad_input(file.path() + ": adds a " + name + " token, whose number is missing or out of range");
    }
    out.push_back(static_cast<int32_t>(id));
    return {};
  }
};

Status Tokenizer::from_gguf(const GgufFile& file, std::unique_ptr<Tokenizer>& out) { return TokenizerGguf::read(file, out); }

Status gguf_tokenizer(const GgufFile& file, std::string& tokenizer, std::string& config) {
  std::unique_ptr<Tokenizer> checked;  // all that can be wrong is told here
  LINNET_TRY(Tokenizer::from_gguf(file, checked));
  std::string_view model, pre;
  file.find("tokenizer.ggml.model").text(model);
  file.find("tokenizer.ggml.pre").text(pre);
  const NamedRule* rule = nullptr;
  for (const NamedRule& candidate : kRules) {
    if (pre == candidate.name) rule = &candidate;
  }
  std::vector<std::string_view> tokens, merges;
  std::vector<int64_t> types;
  file.find("tokenizer.ggml.tokens").texts(tokens);
  file.find("tokenizer.ggml.merges").texts(merges);
  file.find("tokenizer.ggml.token_type").integers(types);
  types.resize(tokens.size(), 1);
  const bool scored = model == "llama";  // SentencePiece's pairs
  bool prefix = true;
  file.find("tokenizer.ggml.add_space_prefix").boolean(prefix);

  JsonWriter w;
  w.begin_object()
      .member("version", "1.0")
      .member("truncation", nullptr)
      .member("padding", nullptr)
      .key("added_tokens")
      .begin_array();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool unknown = scored && types[i] == kUnknown;
    if ((types[i] != kControl && types[i] != kUserDefined && !unknown) || tokens[i].empty()) continue;
    w.begin_object().member("id", i).member("content", tokens[i]).member("single_word", false).member("lstrip", false);
    w.member("rstrip", false).member("normalized", false).member("special", types[i] != kUserDefined).end_object();
  }
  w.end_array().key("normalizer");
  if (!scored && rule->nfc) {
    w.begin_object().member("type", "NFC").end_object();
  } else {
    w.value(nullptr);
  }
  const bool own_words = !scored && rule->rules.rule == WordRule::gpt2;
  const auto byte_level = [&](bool words) {
    w.begin_object().member("type", "ByteLevel").member("add_prefix_space", false).member("trim_offsets", true);
    w.member("use_regex", words).end_object();
  };
  w.key("pre_tokenizer");
  if (scored) {
    w.begin_object().member("type", "Metaspace").member("replacement", "\xe2\x96\x81");
    w.member("prepend_scheme", prefix ? "first" : "never").member("split", false).end_object();
  } else {
    write_words(w, *rule, own_words, byte_level);
  }
  w.key("post_processor");
  if (checked->prefix().empty() && checked->suffix().empty()) {
    if (scored) {
      w.value(nullptr);
    } else {
      byte_level(true);
    }
  } else {
    w.begin_object().member("type", "TemplateProcessing").key("single").begin_array();
    const auto special = [&](const std::vector<int32_t>& list) {
      for (const int32_t id : list) {
        w.begin_object().key("SpecialToken").begin_object().member("id", tokens[static_cast<size_t>(id)]).member("type_id", 0);
        w.end_object().end_object();
      }
    };
    special(checked->prefix());
    w.begin_object().key("Sequence").begin_object().member("id", "A").member("type_id", 0).end_object().end_object();
    special(checked->suffix());
    w.end_array().key("pair").begin_array().end_array().key("special_tokens").begin_object();
    std::vector<int32_t> around = checked->prefix();
    for (const int32_t id : checked->suffix()) {
      if (around.empty() || around.front() != id) around.push_back(id);
    }
    for (const int32_t id : around) {
      const std::string_view name = tokens[static_cast<size_t>(id)];
      w.key(name).begin_object().member("id", name).key("ids").begin_array().value(id).end_array();
      w.key("tokens").begin_array().value(name).end_array().end_object();
    }
    w.end_object().end_object();
  }
  w.key("decoder");
  std::string unknown;
  std::vector<std::string> pairs;
  if (scored) {
    w.begin_object().member("type", "Sequence").key("decoders").begin_array();
    w.begin_object().member("type", "Replace").key("pattern").begin_object().member("String", "\xe2\x96\x81").end_object();
    w.member("content", " ").end_object();
    w.begin_object().member("type", "ByteFallback").end_object().begin_object().member("type", "Fuse").end_object();
    if (prefix)
      w.begin_object().member("type", "Strip").member("content", " ").member("start", 1).member("stop", 0).end_object();
    w.end_array().end_object();
    std::vector<double> scores;
    file.find("tokenizer.ggml.scores").reals(scores);
    pairs = scored_merges(tokens, scores, types);
    merges.assign(pairs.begin(), pairs.end());
    for (size_t i = 0; i < tokens.size(); ++i) unknown = types[i] == kUnknown ? std::string(tokens[i]) : unknown;
  } else {
    byte_level(true);
  }
  w.key("model").begin_object().member("type", "BPE").member("dropout", nullptr).key("unk_token");
  if (unknown.empty()) {
    w.value(nullptr);
  } else {
    w.value(unknown);
  }
  w.member("continuing_subword_prefix", nullptr).member("end_of_word_suffix", nullptr).member("fuse_unk", scored);
  w.member("byte_fallback", scored).member("ignore_merges", !scored && rule->whole_words).key("vocab").begin_object();
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].empty()) w.member(tokens[i], i);
  }
  w.end_object().key("merges").begin_array();
  for (const std::string_view merge : merges) w.value(merge);
  w.end_array().end_object().end_object();
  tokenizer = w.text();

  JsonWriter c(2);
  c.begin_object().member("tokenizer_class", "PreTrainedTokenizerFast");
  for (const char* name : {"bos", "eos"}) {
    int64_t id = -1;
    if (file.find(std::string("tokenizer.ggml.") + name + "_token_id").integer(id) && id >= 0 && id < checked->size()) {
      c.member(std::string(name) + "_token", tokens[static_cast<size_t>(id)]);
    }
  }
  std::string_view chat;
  if (file.find("tokenizer.chat_template").text(chat)) c.member("chat_template", chat);
  config = c.end_object().text();
  return {};
}

}  // namespace linnet
