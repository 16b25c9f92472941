// Tokenizer: text to token numbers and back, equal to the `tokenizers` package token for token.
//
//   std::unique_ptr<Tokenizer> tokenizer;
//   LINNET_TRY(Tokenizer::from_json("model/tokenizer.json", tokenizer));     // or from_gguf(file, tokenizer)
//   std::vector<int32_t> ids = tokenizer->encode("Hello, world", {});
//   std::string text = tokenizer->decode(ids, {});
//
//   TextStream stream(*tokenizer);                                           // token by token, never half a character
//   for (int32_t id : ids) fputs(stream.next(id).c_str(), stdout);
//   fputs(stream.finish().c_str(), stdout);
//
// Four kinds: byte-level byte-pair encoding with the word rules of pretokenize.h; byte-pair encoding of characters with bytes
// for those that have no token (Llama 2, Mistral, Gemma); SentencePiece's Unigram (XLM-RoBERTa, T5); and WordPiece. Anything
// else a file asks for (another pattern, another normaliser) is refused with a sentence. A tokenizer does not change once
// loaded; every call may be made from many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../../core/status.h"
#include "bpe.h"
#include "pretokenize.h"
#include "unigram.h"
#include "wordpiece.h"

namespace linnet {

class GgufFile;

inline constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
inline constexpr uint64_t kMaxTokenizerBytes = uint64_t{64} << 20;

// A token that is found in the text before anything else happens to it: <|im_end|>, [MASK].
struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;      // control, not text: left out when decoding
  bool normalized = false;   // found in the normalised text instead
  bool single_word = false;  // only where no letter, digit or underscore touches it
  bool strip_left = false, strip_right = false;
};

class Tokenizer {
 public:
  static Status from_json(const std::string& path, std::unique_ptr<Tokenizer>& out);
  static Status from_gguf(const GgufFile& file, std::unique_ptr<Tokenizer>& out);

  struct EncodeOptions {
    bool add_special = true;    // what the model expects around a text: [CLS] ... [SEP], a first token
    bool parse_special = true;  // the names of special tokens in the text mean these tokens
  };
  // Bytes that are no UTF-8 are read as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const;
  // Texts of which only some may hold special tokens, encoded as if they were one: a chat template around what a user wrote.
  struct Part {
    std::string text;
    bool parse_special = false;
  };
  std::vector<int32_t> encode(const std::vector<Part>& parts, bool add_special) const;

  struct DecodeOptions {
    bool skip_special = true;
  };
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions& options) const;  // valid UTF-8
  // The bytes of one token as they stand in a text; empty for a number that is none.
  std::string_view bytes(int32_t id) const;

  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
  int32_t find(std::string_view content) const;  // the token with these bytes, or this special token; -1: none
  bool is_special(int32_t id) const;
  const char* kind() const {
    return wordpiece_ ? "WordPiece" : unigram_ ? "Unigram" : spaces_.used ? "BPE with byte fallback" : "byte-level BPE";
  }
  const std::vector<int32_t>& prefix() const { return prefix_; }  // what add_special puts first
  const std::vector<int32_t>& suffix() const { return suffix_; }

 private:
  friend class TokenizerJson;
  friend class TokenizerGguf;
  struct Segment;
  // Byte-pair encoding of characters, where a space is written as U+2581: here it stays a space in text and tokens.
  struct Spaces {
    bool used = false;
    bool before = false;  // the normaliser puts a space before every text between added tokens
    enum class Prepend {
      never,
      first,
      always
    } prepend = Prepend::never;  // a space before the text, or before each piece of it
    bool unless_there = false;   // not where the text begins with one
    bool split = false;          // at each space, which begins a word
    bool strip = false;          // one space at the beginning of a decoded text goes
  };

  // What Unigram does to a text before it is cut, in order.
  struct Change {
    enum class Kind { characters, replace, squeeze, strip, lower, nfc, nfd, prepend } kind;
    CharacterMap map = {};
    std::string from = {}, to = {};    // replace, prepend; squeeze: several spaces become `to`
    bool left = false, right = false;  // strip
  };

  // Finishing what a reader filled in.
  Status add_pieces(std::vector<std::string> pieces);
  Status add_merge(std::string_view left, std::string_view right, int32_t rank);
  void finish(std::vector<AddedToken> added);

  void split(std::string_view text, bool normalized, const unsigned char* first, std::vector<Segment>& out) const;
  void encode_plain(std::string_view text, bool first, std::vector<int32_t>& out) const;
  void encode_characters(std::string_view text, bool first, std::vector<int32_t>& out) const;
  void encode_words(std::string_view text, std::vector<int32_t>& out) const;
  void encode_pieces(std::string_view word, std::vector<int32_t>& out) const;  // of characters
  std::string normalize(std::string_view text) const;

  std::vector<std::string> pieces_;     // bytes of each token; WordPiece: with its prefix
  std::vector<unsigned char> special_;  // by token
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<AddedToken> added_;                                   // longest first
  unsigned char first_raw_[256] = {}, first_normalized_[256] = {};  // whether an added token begins with this byte
  std::vector<int32_t> prefix_, suffix_;

  bool wordpiece_ = false, unigram_ = false;
  Spaces spaces_;
  bool white_split_ = false;  // Unigram: words end at white space, which is left out
  std::vector<Change> changes_;
  Unigram pieces_of_text_;
  bool fallback_ = false;  // <0x0A> is a byte
  Bpe bpe_;
  Pretokenizer words_;
  bool nfc_ = false;
  WordPiece pieces_of_words_;
  BertRules bert_;
  std::string continues_ = "##";
};

// Decodes token by token. next() gives the text that is certain by now; the rest of a character waits for later tokens.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer, bool skip_special = true) : tokenizer_(tokenizer), skip_(skip_special) {}
  std::string next(int32_t id);
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skip_;
  std::string waiting_;
};

// U+2581 as the space that it stands for.
std::string with_spaces(std::string_view text);

// The byte-level alphabet: each byte as one printable character. Both directions; -1 where a code point stands for no byte.
uint32_t byte_level_character(unsigned char byte);
int byte_level_byte(uint32_t point);

}  // namespace linnet
