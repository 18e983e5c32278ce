#include "concerto/data/tokenizer.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "concerto/base/files.h"
#include "concerto/data/sentencepiece_model.h"
#include "concerto/data/tokenizer_config.h"
#include "concerto/data/utf8.h"

namespace concerto {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr std::string_view kSpace = "\xe2\x96\x81";        // U+2581, how SentencePiece writes a space

// The chat template of ERNIE 4.5's text models (no thinking).
constexpr std::string_view kErnieNoThink =
    R"({%- if not add_generation_prompt is defined -%}
    {%- set add_generation_prompt = true -%}
{%- endif -%}
{%- if not cls_token is defined -%}
    {%- set cls_token = "<|begin_of_sentence|>" -%}
{%- endif -%}
{%- if not sep_token is defined -%}
    {%- set sep_token = "<|end_of_sentence|>" -%}
{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}
        {{- "User: " + message["content"] + "
" -}}
    {%- elif message["role"] == "assistant" -%}
        {{- "Assistant: " + message["content"] + sep_token -}}
    {%- elif message["role"] == "system" -%}
        {{- message["content"] + "
" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "Assistant: " -}}
{%- endif -%})";

constexpr std::string_view kChatml =
    R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %})"
    R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})";

// Without blanks, line ends (also written as \n), dashes of trimming and kind of quotes: what copies of one template
// differ in.
std::string template_key(std::string_view text) {
  std::string key;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ' ' || c == '\n' || c == '\r' || c == '\t') continue;
    if (c == '\\' && i + 1 < text.size() && text[i + 1] == 'n') {
      ++i;
      continue;
    }
    if (c == '-' && ((i > 0 && (text[i - 1] == '%' || text[i - 1] == '{')) ||
                     (i + 1 < text.size() && (text[i + 1] == '%' || text[i + 1] == '}'))))
      continue;
    key.push_back(c == '\'' ? '"' : c);
  }
  return key;
}

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace

const std::vector<ChatTemplate>& known_chat_templates() {
  static const std::vector<ChatTemplate> known = {
      {.name = "ernie_nothink",
       .begin = "<|begin_of_sentence|>",
       .system_prefix = "",
       .system_suffix = "\n",
       .user_prefix = "User: ",
       .user_suffix = "\n",
       .assistant_prefix = "Assistant: ",
       .assistant_suffix = "<|end_of_sentence|>",
       .final_suffix = "</s>"},
      {.name = "chatml",
       .begin = "",
       .system_prefix = "<|im_start|>system\n",
       .system_suffix = "<|im_end|>\n",
       .user_prefix = "<|im_start|>user\n",
       .user_suffix = "<|im_end|>\n",
       .assistant_prefix = "<|im_start|>assistant\n",
       .assistant_suffix = "<|im_end|>\n",
       .final_suffix = "<|im_end|>"},
  };
  return known;
}

struct Tokenizer::State {
  std::string name;  // where it came from, for errors
  std::string serialized;
  SentencePieceModel model;
  sentencepiece::SentencePieceProcessor processor;
  std::map<std::string, std::string> files, names;
  std::unordered_map<std::string, AddedToken> added;     // by text: matched whole before SentencePiece sees the text
  std::unordered_map<int32_t, std::string> added_by_id;  // those that are not pieces of the model, or rename one
  std::vector<size_t> lengths[256];                      // of added tokens, by first byte, longest first
  std::vector<bool> special;                             // by id
  std::string chat_text;
  const ChatTemplate* chat = nullptr;
  int64_t vocab_size = 0;
  int32_t bos = -1, eos = -1, pad = -1;

  void add(AddedToken token) {
    const int32_t piece = find_piece(token.text);
    if (token.id < 0) token.id = piece;
    if (token.id < 0) {  // named without an id and unknown to the model, or already added with one
      if (const auto it = added.find(token.text); it != added.end() && token.special) mark_special(it->second.id);
      return;
    }
    if (token.special) mark_special(token.id);
    vocab_size = std::max<int64_t>(vocab_size, token.id + 1);
    if (token.id != piece) added_by_id[token.id] = token.text;
    const auto [it, is_new] = added.try_emplace(token.text, token);
    if (!is_new) {
      token.special |= it->second.special;
      if (token.id == it->second.id) token.lstrip |= it->second.lstrip, token.rstrip |= it->second.rstrip;
      it->second = token;
    }
  }
  void mark_special(int32_t id) {
    if (static_cast<size_t>(id) >= special.size()) special.resize(id + 1);
    special[id] = true;
  }
  int32_t find_piece(const std::string& text) const {
    const int id = processor.PieceToId(text);
    return id >= 0 && id < processor.GetPieceSize() && processor.IdToPiece(id) == text ? id : -1;
  }
  int32_t named(const char* key, int32_t otherwise) const {
    const auto it = names.find(key);
    if (it == names.end()) return otherwise;
    if (const auto token = added.find(it->second); token != added.end()) return token->second.id;
    return find_piece(it->second);
  }
  void encode_plain(std::string_view text, std::vector<int32_t>& out) const {
    if (text.empty()) return;
    std::vector<int> ids;
    if (const auto status = processor.Encode(text, &ids); !status.ok())
      throw Error(ErrorCode::kData, name, "SentencePiece cannot encode: " + status.ToString(), "Check tokenizer.model");
    out.insert(out.end(), ids.begin(), ids.end());
  }
  // The added token at the front of `text`, the longest one.
  const AddedToken* match(std::string_view text) const {
    for (const size_t length : lengths[static_cast<uint8_t>(text.front())])
      if (length <= text.size())
        if (const auto it = added.find(std::string(text.substr(0, length))); it != added.end()) return &it->second;
    return nullptr;
  }
  void finish() {
    for (const auto& [text, token] : added) lengths[static_cast<uint8_t>(text.front())].push_back(text.size());
    for (auto& list : lengths) {
      std::sort(list.begin(), list.end(), std::greater<>());
      list.erase(std::unique(list.begin(), list.end()), list.end());
    }
    special.resize(vocab_size);
    bos = named("bos_token", processor.bos_id());
    eos = named("eos_token", processor.eos_id());
    pad = named("pad_token", processor.pad_id());
    const std::string key = template_key(chat_text);
    if (key == template_key(kErnieNoThink)) chat = &known_chat_templates()[0];
    if (key == template_key(kChatml)) chat = &known_chat_templates()[1];
  }
};

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

namespace {

void load_model(Tokenizer::State& state, std::string serialized, const std::string& name) {
  state.name = name;
  state.model = parse_sentencepiece_model(serialized, name);
  if (const auto status = state.processor.LoadFromSerializedProto(serialized); !status.ok())
    throw Error(ErrorCode::kData, name, "SentencePiece cannot load it: " + status.ToString(), "Copy the file again");
  state.serialized = std::move(serialized);
  state.vocab_size = static_cast<int64_t>(state.model.pieces.size());
  using Type = SentencePieceModel::Type;
  for (size_t i = 0; i < state.model.pieces.size(); ++i)
    if (const auto type = state.model.pieces[i].type; type == Type::kControl || type == Type::kUnknown)
      state.mark_special(static_cast<int32_t>(i));
}

}  // namespace

Tokenizer Tokenizer::from_model(std::string serialized, const std::string& name) {
  auto state = std::make_unique<State>();
  load_model(*state, std::move(serialized), name);
  const auto& pieces = state->model.pieces;
  std::vector<AddedToken> special;
  for (size_t i = 0; i < pieces.size(); ++i)
    if (state->special.size() > i && state->special[i] && !pieces[i].text.empty())
      special.push_back({.text = pieces[i].text, .id = static_cast<int32_t>(i), .special = true});
  for (const auto& token : special) state->add(token);
  const auto name_it = [&](const char* key, int id) {
    if (id >= 0) state->names[key] = pieces[id].text;
  };
  const auto& processor = state->processor;
  name_it("bos_token", processor.bos_id());
  name_it("eos_token", processor.eos_id());
  name_it("unk_token", processor.unk_id());
  name_it("pad_token", processor.pad_id() >= 0 ? processor.pad_id() : processor.unk_id());  // as ERNIE does
  name_it("cls_token", state->find_piece("<|begin_of_sentence|>"));
  name_it("sep_token", state->find_piece("<|end_of_sentence|>"));
  if (state->names.contains("cls_token") && state->names.contains("sep_token")) state->chat_text = kErnieNoThink;
  state->files = default_tokenizer_files(state->names, special, state->chat_text, state->model.add_dummy_prefix);
  state->finish();
  return Tokenizer(std::move(state));
}

Tokenizer Tokenizer::load(const std::string& path) {
  if (!path_exists(path))
    throw Error(ErrorCode::kIo, path, "there is no such folder or file",
                "Name a folder with a tokenizer.model, or train one: concerto data tokenizer train");
  if (!is_directory(path)) return from_model(read_text_file(path), path);
  const std::string file = path + "/tokenizer.model";
  if (!path_exists(file))
    throw Error(ErrorCode::kData, path, "has no tokenizer.model (a SentencePiece model)",
                "Name a folder that has one, or train one: concerto data tokenizer train");
  TokenizerConfig config = read_tokenizer_config(path);
  if (!config.files.contains("tokenizer_config.json")) return from_model(read_text_file(file), file);
  auto state = std::make_unique<State>();
  load_model(*state, read_text_file(file), file);
  for (auto& token : config.added) state->add(std::move(token));
  state->files = std::move(config.files);
  state->names = std::move(config.names);
  state->chat_text = std::move(config.chat_template);
  state->finish();
  return Tokenizer(std::move(state));
}

int64_t Tokenizer::vocab_size() const { return state_->vocab_size; }
int32_t Tokenizer::bos_id() const { return state_->bos; }
int32_t Tokenizer::eos_id() const { return state_->eos; }
int32_t Tokenizer::pad_id() const { return state_->pad; }

int32_t Tokenizer::token_id(std::string_view token) const {
  const std::string text(token);
  const auto it = state_->added.find(text);
  return it != state_->added.end() ? it->second.id : state_->find_piece(text);
}

std::string Tokenizer::token(int32_t id) const {
  if (const auto it = state_->added_by_id.find(id); it != state_->added_by_id.end()) return it->second;
  const auto& pieces = state_->model.pieces;
  return id >= 0 && static_cast<size_t>(id) < pieces.size() ? pieces[id].text : std::string();
}

bool Tokenizer::is_special(int32_t id) const { return id >= 0 && id < state_->vocab_size && state_->special[id]; }

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialText special) const {
  const TextPart part{text, special};
  return encode({&part, 1});
}

std::vector<int32_t> Tokenizer::encode(std::span<const TextPart> parts) const {
  std::vector<int32_t> ids;
  std::string joined;
  std::vector<size_t> ends;  // of the parts
  for (const TextPart& part : parts) ends.push_back((joined += part.text).size());
  const std::string_view text = joined;
  size_t begin = 0, at = 0;  // of what is not encoded yet; the part that i is in
  for (size_t i = 0; i < text.size();) {
    while (i >= ends[at]) ++at;
    if (parts[at].special == SpecialText::kAsText) {
      i = ends[at];
      continue;
    }
    const AddedToken* token = state_->match(text.substr(i, ends[at] - i));
    if (token == nullptr) {
      ++i;
      continue;
    }
    size_t end = i;
    if (token->lstrip)
      while (end > begin && is_blank(text[end - 1])) --end;
    state_->encode_plain(text.substr(begin, end - begin), ids);
    ids.push_back(token->id);
    i += token->text.size();
    if (token->rstrip)
      while (i < text.size() && is_blank(text[i])) ++i;
    begin = i;
  }
  state_->encode_plain(text.substr(begin), ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special);
  std::string text;
  for (const int32_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

const ChatTemplate& Tokenizer::chat_template() const {
  if (state_->chat != nullptr) return *state_->chat;
  std::string names;
  for (const auto& known : known_chat_templates()) names += (names.empty() ? "" : ", ") + known.name;
  throw Error(ErrorCode::kData, state_->name,
              state_->chat_text.empty() ? "the tokenizer has no chat template"
                                        : "the chat template is not one that can be rendered",
              "Put one of these into tokenizer_config.json: " + names);
}

std::vector<TextPart> Tokenizer::chat_parts(std::span<const ChatMessage> messages, bool generate) const {
  const ChatTemplate& chat = chat_template();
  std::vector<TextPart> parts = {{chat.begin}};
  const auto add = [&](const std::string& prefix, const std::string& content, const std::string& suffix) {
    parts.insert(parts.end(), {{prefix}, {content, SpecialText::kAsText}, {suffix}});
  };
  for (const auto& message : messages) {
    if (message.role == "system")
      add(chat.system_prefix, message.content, chat.system_suffix);
    else if (message.role == "user")
      add(chat.user_prefix, message.content, chat.user_suffix);
    else if (message.role == "assistant")
      add(chat.assistant_prefix, message.content, chat.assistant_suffix);
    else
      throw Error(ErrorCode::kData, "role",
                  fmt::format("'{}' is not a role of the template {}", message.role, chat.name),
                  "Use system, user or assistant");
  }
  if (generate) parts.push_back({chat.assistant_prefix});
  return parts;
}

std::string Tokenizer::render_chat(std::span<const ChatMessage> messages, bool generate) const {
  std::string text;
  for (const TextPart& part : chat_parts(messages, generate)) text += part.text;
  return text;
}

std::vector<int32_t> Tokenizer::encode_chat(std::span<const ChatMessage> messages, bool generate) const {
  return encode(chat_parts(messages, generate));
}

void Tokenizer::save(const std::string& folder) const {
  make_directories(folder);
  write_file_atomic(folder + "/tokenizer.model", state_->serialized);
  for (const auto& [name, content] : state_->files) write_file_atomic(folder + "/" + name, content);
  if (!state_->files.contains("tokenizer.json"))
    if (const std::string json = tokenizers_json(state_->model); !json.empty() && state_->added_by_id.empty())
      write_file_atomic(folder + "/tokenizer.json", json);
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(tokenizer), skip_special_(skip_special) {}

std::string StreamDecoder::push(int32_t id) {
  const auto& state = *tokenizer_.state_;
  const bool special = tokenizer_.is_special(id);
  if (special && skip_special_) return {};
  const std::string piece = tokenizer_.token(id);
  if (special || state.added_by_id.contains(id)) {
    std::string text = finish() + piece;
    first_ = false;
    return text;
  }
  using Type = SentencePieceModel::Type;
  const auto type =
      id >= 0 && static_cast<size_t>(id) < state.model.pieces.size() ? state.model.pieces[id].type : Type::kUnused;
  if (type == Type::kUnused) return {};
  if (unsigned byte = 0; type == Type::kByte && piece.size() == 6) {  // <0xAB>
    std::from_chars(piece.data() + 3, piece.data() + 5, byte, 16);
    pending_.push_back(static_cast<char>(byte));
  } else {
    for (size_t i = 0; i < piece.size();) {
      const bool space = state.model.escape_whitespaces && std::string_view(piece).substr(i, kSpace.size()) == kSpace;
      if (!(space && i == 0 && first_ && state.model.add_dummy_prefix)) pending_ += space ? ' ' : piece[i];
      i += space ? kSpace.size() : 1;
    }
  }
  first_ = false;
  std::string text;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const int length = utf8_length(rest);
    if (length < 0) break;
    text += length == 0 ? kReplacement : rest.substr(0, length);
    rest.remove_prefix(std::max(length, 1));
  }
  pending_.assign(rest.begin(), rest.end());
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  for (size_t i = 0; i < pending_.size(); ++i) text += kReplacement;
  pending_.clear();
  return text;
}

}  // namespace concerto
