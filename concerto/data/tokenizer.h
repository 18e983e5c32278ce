// Text to token ids and back: a SentencePiece model (ERNIE's own kind) plus the added tokens of a Hugging Face folder
// and its chat template. Ids are the same as transformers' AutoTokenizer gives for the same folder. encode and decode
// may be called from many threads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace concerto {

struct ChatMessage {
  std::string role;  // system | user | assistant
  std::string content;
};

// What a template puts around the parts of a conversation. Control tokens are written by name and become one id each.
struct ChatTemplate {
  std::string name;
  std::string begin;                         // before everything
  std::string system_prefix, system_suffix;  // around the system text, if there is one
  std::string user_prefix, user_suffix;      // around a user turn
  std::string assistant_prefix;              // before an answer
  std::string assistant_suffix;              // after an answer that another turn follows
  std::string final_suffix;                  // after the last answer: the end that is trained
};
// The templates that can be rendered: ernie_nothink, chatml.
const std::vector<ChatTemplate>& known_chat_templates();

enum class SpecialText { kAsTokens, kAsText };  // what `</s>` in a text becomes: the control token, or the characters
struct TextPart {
  std::string_view text;
  SpecialText special = SpecialText::kAsTokens;
};

class Tokenizer {
 public:
  // A Hugging Face folder that holds tokenizer.model, or a SentencePiece model file. Error(kData) names the file and
  // field that is wrong.
  static Tokenizer load(const std::string& path);
  // From the bytes of a SentencePiece model alone.
  static Tokenizer from_model(std::string serialized, const std::string& name = "tokenizer.model");

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  int64_t vocab_size() const;  // largest id + 1, added tokens included
  int32_t bos_id() const;      // -1: none; so for the next two
  int32_t eos_id() const;
  int32_t pad_id() const;
  int32_t token_id(std::string_view token) const;  // of a whole token by its name; -1: none
  std::string token(int32_t id) const;             // its name, "" when the id names none
  bool is_special(int32_t id) const;               // control tokens: not part of a text

  // No bos or eos is added.
  std::vector<int32_t> encode(std::string_view text, SpecialText special = SpecialText::kAsTokens) const;
  // The ids of the joined text, in which control tokens count only where they stand inside a part kAsTokens.
  std::vector<int32_t> encode(std::span<const TextPart> parts) const;
  // Bytes that are no UTF-8 become U+FFFD. Ids that name no token give nothing.
  std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;

  // Error(kData) when the folder has no chat template or one that cannot be rendered here; the message lists the known
  // ones.
  const ChatTemplate& chat_template() const;
  // The text of a conversation; with `generate` it ends where the assistant is to speak. encode_chat gives its ids,
  // with control tokens from the template only: one spelt out in a message stays text.
  std::string render_chat(std::span<const ChatMessage> messages, bool generate = true) const;
  std::vector<int32_t> encode_chat(std::span<const ChatMessage> messages, bool generate = true) const;

  // Writes the tokenizer's files into a folder (made if missing): those it was read from byte for byte, or for a model
  // alone all that AutoTokenizer needs (tokenizer.model, tokenizer.json, tokenizer_config.json,
  // special_tokens_map.json).
  void save(const std::string& folder) const;

  struct State;

 private:
  std::vector<TextPart> chat_parts(std::span<const ChatMessage> messages, bool generate) const;
  friend class StreamDecoder;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Decodes one id after the other, as a generator speaks: push returns the text that is complete, never half a
// character.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true);
  std::string push(int32_t id);
  std::string finish();  // what is left over, as U+FFFD

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_, first_ = true;
  std::string pending_;
};

struct TokenizerTraining {
  std::vector<std::string> inputs;  // UTF-8 text files
  int64_t vocab_size = 8192;        // exactly; a text too small for it is filled up with unused pieces
  int64_t max_bytes = 32 << 20;     // of text used: above it, every n-th line of all files is taken
};
// Byte-pair encoding with byte fallback: every text can be encoded and comes back unchanged. Ids: 0 <unk> (also pad), 1
// <s>, 2 </s>, 3 <|begin_of_sentence|>, 4 <|end_of_sentence|>. Deterministic. Carries ERNIE's chat template.
Tokenizer train_tokenizer(const TokenizerTraining& options);

}  // namespace concerto
