// tokenizer.json, the format of the `tokenizers` package: the parts that Linnet's tokenisers have, each checked; whatever asks
// for something else is refused with a sentence.
#include "core/files/json.h"

#include <algorithm>
#include <utility>

#include "core/files/file.h"
#include "runtime/tokenizer/tokenizer.h"
#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

using Kind = JsonValue::Kind;

// The bytes that a byte-level token stands for; false when it has a character that stands for none.
bool byte_level_bytes(std::string_view token, std::string& out) {
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

}  // namespace

class TokenizerJson {
 public:
  explicit TokenizerJson(std::string path) : path_(std::move(path)), made_(new Tokenizer) {}

  Status read(std::unique_ptr<Tokenizer>& out) {
    std::string text;
    LINNET_TRY(read_file(path_, kMaxTokenizerBytes, text));
    JsonValue root;
    JsonLimits limits;
    limits.max_bytes = kMaxTokenizerBytes;
    limits.max_members = static_cast<size_t>(kMaxVocabulary);
    LINNET_TRY(parse_json(text, path_, limits, root));
    if (!root.is(Kind::object)) return fail("is not an object");
    const JsonValue model = root.find("model");
    const std::string type = model.find("type").string();
    if (type == "WordPiece") {
      made_->wordpiece_ = true;
    } else if (type == "Unigram" || (type.empty() && model.find("vocab").is(Kind::array))) {
      made_->unigram_ = true;
    } else if (type != "BPE" && !(type.empty() && model.has("merges"))) {
      return fail("has a model of type " + json_show_short(model.find("type")) + ", expected BPE, Unigram or WordPiece");
    }
    made_->spaces_.used = made_->unigram_ || (!made_->wordpiece_ && is_of_characters(root, model));
    LINNET_TRY(made_->unigram_ ? read_changes(root.find("normalizer")) : read_normalizer(root.find("normalizer")));
    LINNET_TRY(made_->wordpiece_ ? read_wordpiece(root, model)
               : made_->unigram_ ? read_unigram(root, model)
                                 : read_bpe(root, model));
    LINNET_TRY(read_added(root.find("added_tokens")));
    made_->finish(std::move(added_));
    LINNET_TRY(read_post_processor(root.find("post_processor")));
    out = std::move(made_);
    return {};
  }

 private:
  Status fail(const std::string& reason) const { return bad_input(path_ + ": " + reason); }

  Status read_vocabulary(const JsonValue& vocabulary, bool byte_level) {
    if (!vocabulary.is(Kind::object)) return fail("its model has no vocabulary");
    std::vector<std::pair<int64_t, std::string>> entries;
    int64_t most = -1;
    for (JsonItems items(vocabulary); items.next();) {
      int64_t id = 0;
      const char* why = items.value().count(id);
      if (why == nullptr && id >= kMaxVocabulary) why = "is too large";
      if (why != nullptr) return fail("the number of token " + json_show_short(items.key()) + " " + why);
      entries.emplace_back(id, items.key().string());
      most = std::max(most, id);
    }
    // Twice as many numbers as tokens: a hostile file could otherwise ask for 2^24 empty ones.
    if (most >= 2 * static_cast<int64_t>(entries.size()) + 1024) {
      return fail("numbers its " + std::to_string(entries.size()) + " tokens up to " + std::to_string(most));
    }
    std::vector<std::string> pieces(static_cast<size_t>(most + 1));
    std::string bytes;
    for (auto& [id, token] : entries) {
      std::string& piece = pieces[static_cast<size_t>(id)];
      if (!piece.empty()) return fail("token number " + std::to_string(id) + " is given twice");
      piece = byte_level && byte_level_bytes(token, bytes) ? bytes : made_->spaces_.used ? with_spaces(token) : token;
    }
    return made_->add_pieces(std::move(pieces));
  }

  Status read_bpe(const JsonValue& root, const JsonValue& model) {
    if (!model.find("dropout").is(Kind::null)) return fail("asks for dropout, which belongs to training");
    if (is_of_characters(root, model)) return read_characters(root, model);
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (!model.find(name).string().empty()) return fail("is BPE with a " + std::string(name) + ", expected byte-level BPE");
    }
    bool byte_level = false, has_rule = false;
    LINNET_TRY(read_words(root.find("pre_tokenizer"), byte_level, has_rule));
    if (!byte_level || !has_rule) return fail("is BPE without byte-level words, which is not supported");
    LINNET_TRY(read_vocabulary(model.find("vocab"), true));
    LINNET_TRY(read_merges(model.find("merges")));
    if (model.find("ignore_merges").boolean()) {
      for (size_t i = 0; i < made_->pieces_.size(); ++i) made_->bpe_.add_whole(made_->pieces_[i], static_cast<int32_t>(i));
    }
    return {};
  }

  Status read_merges(const JsonValue& merges) {
    if (!merges.is(Kind::array)) return fail("its model has no merges");
    std::string left, right;
    int32_t rank = 0;
    for (JsonItems items(merges); items.next(); ++rank) {
      std::string a, b;
      if (items.value().is(Kind::string)) {
        const std::string both = items.value().string();
        const size_t space = both.find(' ');
        if (space != std::string::npos && both.find(' ', space + 1) == std::string::npos) {
          a = both.substr(0, space);
          b = both.substr(space + 1);
        }
      } else if (items.value().is(Kind::array)) {
        JsonItems pair(items.value());
        if (pair.next()) a = pair.value().string();
        if (pair.next()) b = pair.value().string();
        if (pair.next()) a.clear();
      }
      const bool characters = made_->spaces_.used;
      if (characters) {
        left = with_spaces(a);
        right = with_spaces(b);
      }
      if (characters ? left.empty() || right.empty() : !byte_level_bytes(a, left) || !byte_level_bytes(b, right)) {
        return fail("merge " + std::to_string(rank) + " is " + json_show_short(items.value()) + ", expected two " +
                    (characters ? "tokens" : "byte-level tokens"));
      }
      if (const Status status = made_->add_merge(left, right, rank); !status.ok()) return fail(status.message());
    }
    return {};
  }

  // Whether words are made of characters, as SentencePiece has them, and not of bytes.
  static bool is_of_characters(const JsonValue& root, const JsonValue& model) {
    return model.find("byte_fallback").boolean() || root.find("pre_tokenizer").find("type").equals("Metaspace");
  }

  Status read_characters(const JsonValue& root, const JsonValue& model) {
    Tokenizer& t = *made_;
    const JsonValue pre = root.find("pre_tokenizer"), type = pre.find("type");
    if (type.equals("Metaspace")) {
      LINNET_TRY(read_metaspace(pre));
    } else if (type.equals("Split") && pre.find("pattern").find("String").equals(" ")) {
      // Gemma: its normaliser has left no space to split at.
    } else if (!pre.is(Kind::null)) {
      return fail("has the pre-tokeniser " + json_show_short(type) + ", expected none or Metaspace");
    }
    LINNET_TRY(read_strip(root.find("decoder")));
    t.fallback_ = model.find("byte_fallback").boolean();
    LINNET_TRY(read_vocabulary(model.find("vocab"), false));
    t.bpe_.use_characters(model.has("unk_token") ? t.find(model.find("unk_token").string()) : -1,
                          model.find("fuse_unk").boolean());
    LINNET_TRY(read_merges(model.find("merges")));
    if (model.find("ignore_merges").boolean()) {
      for (size_t i = 0; i < t.pieces_.size(); ++i) t.bpe_.add_whole(t.pieces_[i], static_cast<int32_t>(i));
    }
    return {};
  }

  Status read_metaspace(const JsonValue& pre) {
    using Prepend = Tokenizer::Spaces::Prepend;
    Tokenizer::Spaces& spaces = made_->spaces_;
    if (!pre.find("replacement").equals("\xe2\x96\x81")) return fail("writes spaces as another character than U+2581");
    const std::string scheme = pre.has("prepend_scheme") ? pre.find("prepend_scheme").string()
                               : pre.has("add_prefix_space") && !pre.find("add_prefix_space").boolean() ? "never"
                                                                                                        : "always";
    spaces.prepend = scheme == "never" ? Prepend::never : scheme == "first" ? Prepend::first : Prepend::always;
    spaces.unless_there = true;
    spaces.split = !pre.has("split") || pre.find("split").boolean();
    return {};
  }

  Status read_unigram(const JsonValue& root, const JsonValue& model) {
    Tokenizer& t = *made_;
    LINNET_TRY(read_unigram_words(root.find("pre_tokenizer")));
    LINNET_TRY(read_strip(root.find("decoder")));
    const JsonValue vocabulary = model.find("vocab");
    if (!vocabulary.is(Kind::array)) return fail("its model has no vocabulary");
    t.fallback_ = t.pieces_of_text_.byte_fallback = model.find("byte_fallback").boolean();
    std::vector<std::string> pieces;
    for (JsonItems items(vocabulary); items.next();) {
      JsonItems pair(items.value());
      std::string piece;
      double score = 0;
      const bool named = pair.next() && pair.value().is(Kind::string);
      if (named) piece = with_spaces(pair.value().string());
      if (!named || !pair.next() || !pair.value().number(score) || static_cast<int64_t>(pieces.size()) >= kMaxVocabulary) {
        return fail("token " + std::to_string(pieces.size()) + " is " + json_show_short(items.value()) +
                    ", expected a piece and its score");
      }
      t.pieces_of_text_.add(piece, score, static_cast<int32_t>(pieces.size()));
      pieces.push_back(std::move(piece));
    }
    if (const JsonValue unknown = model.find("unk_id"); !unknown.is(Kind::null)) {
      int64_t id = 0;
      if (unknown.count(id) != nullptr || id >= static_cast<int64_t>(pieces.size())) {
        return fail("unk_id is " + json_show_short(unknown) + ", expected a token");
      }
      t.pieces_of_text_.unknown = static_cast<int32_t>(id);
    }
    return t.add_pieces(std::move(pieces));
  }

  Status read_unigram_words(const JsonValue& value) {
    const JsonValue type = value.find("type");
    if (type.equals("Sequence")) {
      for (JsonItems items(value.find("pretokenizers")); items.next();) LINNET_TRY(read_unigram_words(items.value()));
      return {};
    }
    if (type.equals("WhitespaceSplit") && made_->spaces_.prepend == Tokenizer::Spaces::Prepend::never) {
      made_->white_split_ = true;
      return {};
    }
    if (type.equals("Metaspace")) return read_metaspace(value);
    if (value.is(Kind::null)) return {};
    return fail("has the pre-tokeniser " + json_show_short(type) + ", expected Metaspace, behind WhitespaceSplit or alone");
  }

  // The normaliser of Unigram.
  Status read_changes(const JsonValue& value) {
    using Change = Tokenizer::Change;
    const JsonValue type = value.find("type");
    if (value.is(Kind::null)) return {};
    if (type.equals("Sequence")) {
      for (JsonItems items(value.find("normalizers")); items.next();) LINNET_TRY(read_changes(items.value()));
      return {};
    }
    Change change{};
    const JsonValue pattern = value.find("pattern");
    if (type.equals("Precompiled")) {
      if (value.find("precompiled_charsmap").string().empty()) return {};
      change.kind = Change::Kind::characters;
      const Status status = CharacterMap::parse(value.find("precompiled_charsmap").string(), change.map);
      if (!status.ok()) return fail(status.message());
    } else if (type.equals("Replace") && !pattern.find("String").string().empty()) {
      change.kind = Change::Kind::replace;
      change.from = pattern.find("String").string();
      change.to = value.find("content").string();
    } else if (type.equals("Replace") && pattern.find("Regex").equals(" {2,}")) {
      change.kind = Change::Kind::squeeze;
      change.to = value.find("content").string();
    } else if (type.equals("Strip")) {
      change.kind = Change::Kind::strip;
      change.left = !value.has("strip_left") || value.find("strip_left").boolean();
      change.right = !value.has("strip_right") || value.find("strip_right").boolean();
    } else if (type.equals("Prepend")) {
      change.kind = Change::Kind::prepend;
      change.to = value.find("prepend").string();
    } else if (type.equals("Lowercase")) {
      change.kind = Change::Kind::lower;
    } else if (type.equals("NFC") || type.equals("NFD")) {
      change.kind = type.equals("NFC") ? Change::Kind::nfc : Change::Kind::nfd;
    } else {
      return fail("has the normaliser " + json_show_short(type) +
                  ", expected Precompiled, Replace (a text, or several spaces), Strip, Prepend, Lowercase, NFC or NFD");
    }
    made_->changes_.push_back(std::move(change));
    return {};
  }

  // Whether decoding takes a space off the beginning; the other decoders are what a token's bytes already say.
  Status read_strip(const JsonValue& decoder) {
    const JsonValue type = decoder.find("type");
    if (type.equals("Sequence")) {
      for (JsonItems items(decoder.find("decoders")); items.next();) LINNET_TRY(read_strip(items.value()));
    } else if (type.equals("Metaspace")) {
      made_->spaces_.strip = !decoder.find("prepend_scheme").equals("never");
    } else if (type.equals("Strip")) {
      int64_t start = 0, stop = 0;
      if (decoder.find("start").count(start) != nullptr || start > 1 || decoder.find("stop").count(stop) != nullptr ||
          stop != 0) {
        return fail("strips more than one space when it decodes, which is not supported");
      }
      made_->spaces_.strip = start == 1;
    }
    return {};
  }

  Status read_wordpiece(const JsonValue& root, const JsonValue& model) {
    const JsonValue pre = root.find("pre_tokenizer");
    if (!pre.find("type").equals("BertPreTokenizer")) {
      return fail("has the pre-tokeniser " + json_show_short(pre.find("type")) + ", expected BertPreTokenizer");
    }
    LINNET_TRY(read_vocabulary(model.find("vocab"), false));
    Tokenizer& t = *made_;
    if (model.has("continuing_subword_prefix")) t.continues_ = model.find("continuing_subword_prefix").string();
    if (t.continues_.empty()) return fail("is WordPiece without a prefix for pieces that continue a word");
    int64_t most = 100;
    if (model.has("max_input_chars_per_word") && model.find("max_input_chars_per_word").count(most) != nullptr) {
      return fail("max_input_chars_per_word is " + json_show_short(model.find("max_input_chars_per_word")));
    }
    t.pieces_of_words_.most_characters = most;
    t.pieces_of_words_.unknown = t.find(model.has("unk_token") ? model.find("unk_token").string() : "[UNK]");
    if (t.pieces_of_words_.unknown < 0) return fail("its unknown token is not in the vocabulary");
    for (size_t i = 0; i < t.pieces_.size(); ++i) {
      std::string_view piece = t.pieces_[i];
      if (piece.empty()) continue;
      t.pieces_of_words_.add(piece, false, static_cast<int32_t>(i));
      if (piece.size() > t.continues_.size() && piece.substr(0, t.continues_.size()) == t.continues_) {
        t.pieces_of_words_.add(piece.substr(t.continues_.size()), true, static_cast<int32_t>(i));
      }
    }
    return {};
  }

  Status read_normalizer(const JsonValue& value) {
    if (value.is(Kind::null)) {
      made_->bert_ = {false, false, false, false};
      return {};
    }
    const JsonValue type = value.find("type");
    if (made_->spaces_.used && type.equals("Prepend") && value.find("prepend").equals("\xe2\x96\x81")) {
      made_->spaces_.before = true;
      return {};
    }
    if (made_->spaces_.used && type.equals("Replace") && value.find("pattern").find("String").equals(" ") &&
        value.find("content").equals("\xe2\x96\x81")) {
      return {};  // here a space stays a space
    }
    if (!made_->wordpiece_ && !made_->spaces_.used && type.equals("NFC")) return made_->nfc_ = true, Status();
    if (!made_->wordpiece_ && type.equals("Sequence")) {
      for (JsonItems items(value.find("normalizers")); items.next();) LINNET_TRY(read_normalizer(items.value()));
      return {};
    }
    if (made_->wordpiece_ && type.equals("BertNormalizer")) {
      BertRules& rules = made_->bert_;
      rules.clean = !value.has("clean_text") || value.find("clean_text").boolean();
      rules.chinese = !value.has("handle_chinese_chars") || value.find("handle_chinese_chars").boolean();
      rules.lower = !value.has("lowercase") || value.find("lowercase").boolean();
      const JsonValue strip = value.find("strip_accents");
      rules.strip_accents = strip.is(Kind::null) ? rules.lower : strip.boolean();
      return {};
    }
    return fail("has the normaliser " + json_show_short(type) + ", expected " +
                (made_->wordpiece_ ? "BertNormalizer" : "none, NFC or U+2581 for spaces"));
  }

  Status read_words(const JsonValue& value, bool& byte_level, bool& has_rule) {
    const JsonValue type = value.find("type");
    Pretokenizer& words = made_->words_;
    if (type.equals("Sequence")) {
      for (JsonItems items(value.find("pretokenizers")); items.next();)
        LINNET_TRY(read_words(items.value(), byte_level, has_rule));
      return {};
    }
    if (byte_level) return fail("has a pre-tokeniser behind ByteLevel, which is not supported");
    if (type.equals("ByteLevel")) {
      byte_level = true;
      words.prefix_space = !value.has("add_prefix_space") || value.find("add_prefix_space").boolean();
      const bool own = !value.has("use_regex") || value.find("use_regex").boolean();
      if (own && has_rule) return fail("splits by a pattern and by ByteLevel's own, which is not supported");
      if (own) words.rule = WordRule::gpt2;
      has_rule |= own;
      if (words.prefix_space && (!own || words.single_digits)) {
        return fail("adds a space before each piece of a split text, which is not supported");
      }
      return {};
    }
    if (type.equals("Digits") && value.find("individual_digits").boolean() && !has_rule) {
      words.single_digits = true;
      return {};
    }
    if (type.equals("Split")) {
      if (has_rule || words.single_digits) return fail("splits by two patterns, which is not supported");
      if (!value.find("behavior").equals("Isolated") || value.find("invert").boolean()) {
        return fail("splits with behavior " + json_show_short(value.find("behavior")) + ", expected Isolated");
      }
      const Status status = word_rule_of_pattern(value.find("pattern").find("Regex").string(), words.rule);
      if (!status.ok()) return fail(status.message());
      has_rule = true;
      return {};
    }
    return fail("has the pre-tokeniser " + json_show_short(type) + ", expected ByteLevel, Split by a known pattern or Digits");
  }

  Status read_added(const JsonValue& list) {
    if (list.is(Kind::null)) return {};
    if (!list.is(Kind::array)) return fail("added_tokens is not a list");
    for (JsonItems items(list); items.next();) {
      const JsonValue& entry = items.value();
      AddedToken token;
      int64_t id = 0;
      token.content = entry.find("content").string();
      if (token.content.empty() || entry.find("id").count(id) != nullptr || id >= kMaxVocabulary ||
          id > static_cast<int64_t>(made_->pieces_.size() + 65536)) {
        return fail("the added token " + json_show_short(entry) + " has no content or no usable number");
      }
      token.id = static_cast<int32_t>(id);
      token.special = entry.find("special").boolean();
      token.normalized = entry.find("normalized").boolean();
      token.single_word = entry.find("single_word").boolean();
      token.strip_left = entry.find("lstrip").boolean();
      token.strip_right = entry.find("rstrip").boolean();
      added_.push_back(std::move(token));
    }
    return {};
  }

  // Which tokens stand around a single text.
  Status read_post_processor(const JsonValue& value) {
    if (value.is(Kind::null)) return {};
    const JsonValue type = value.find("type");
    if (type.equals("ByteLevel")) return {};
    if (type.equals("Sequence")) {
      for (JsonItems items(value.find("processors")); items.next();) LINNET_TRY(read_post_processor(items.value()));
      return {};
    }
    if (type.equals("BertProcessing") || type.equals("RobertaProcessing")) {
      LINNET_TRY(add_pair(value.find("cls"), made_->prefix_));
      return add_pair(value.find("sep"), made_->suffix_);
    }
    if (!type.equals("TemplateProcessing")) {
      return fail("has the post-processor " + json_show_short(type) +
                  ", expected TemplateProcessing, BertProcessing or ByteLevel");
    }
    bool behind = false;
    for (JsonItems items(value.find("single")); items.next();) {
      if (items.value().has("Sequence")) {
        behind = true;
        continue;
      }
      const std::string name = items.value().find("SpecialToken").find("id").string();
      const JsonValue ids = value.find("special_tokens").find(name).find("ids");
      if (!ids.is(Kind::array)) return fail("its template names " + json_quote_short(name) + ", which it does not describe");
      for (JsonItems each(ids); each.next();) {
        int64_t id = 0;
        if (each.value().count(id) != nullptr || id >= made_->size()) return fail("its template has a token out of range");
        (behind ? made_->suffix_ : made_->prefix_).push_back(static_cast<int32_t>(id));
      }
    }
    return {};
  }

  Status add_pair(const JsonValue& pair, std::vector<int32_t>& out) {  // ["[CLS]", 101]
    JsonItems items(pair);
    int64_t id = 0;
    if (!items.next() || !items.next() || items.value().count(id) != nullptr || id >= made_->size()) {
      return fail("its post-processor has the token " + json_show_short(pair) + ", expected a name and a number");
    }
    out.push_back(static_cast<int32_t>(id));
    return {};
  }

  std::string path_;
  std::unique_ptr<Tokenizer> made_;
  std::vector<AddedToken> added_;
};

Status Tokenizer::from_json(const std::string& path, std::unique_ptr<Tokenizer>& out) { return TokenizerJson(path).read(out); }

}  // namespace linnet
