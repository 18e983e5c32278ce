#include "concerto/data/sentencepiece_model.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "concerto/base/error.h"

namespace concerto {
namespace {

// One level of a protobuf message: fields come one by one; unknown ones are passed over.
class WireReader {
 public:
  WireReader(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  bool next() {
    if (bytes_.empty()) return false;
    const uint64_t key = varint();
    field = static_cast<int>(key >> 3 & 0x1fffffff);
    text = {};
    number = 0;
    switch (key & 7) {
      case 0:
        number = varint();
        break;
      case 1:
        fixed(8);
        break;
      case 2: {
        const uint64_t size = varint();
        if (size > bytes_.size()) fail();
        text = bytes_.substr(0, size);
        bytes_.remove_prefix(size);
        break;
      }
      case 5:
        fixed(4);
        break;
      default:
        fail();
    }
    return true;
  }

  int field = 0;
  uint64_t number = 0;
  std::string_view text;

 private:
  [[noreturn]] void fail() const {
    throw Error(ErrorCode::kData, name_, "not a SentencePiece model, or a truncated one", "Copy the file again");
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) fail();
      const auto byte = static_cast<uint8_t>(bytes_.front());
      bytes_.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }
  void fixed(size_t size) {
    if (bytes_.size() < size) fail();
    std::memcpy(&number, bytes_.data(), size);
    bytes_.remove_prefix(size);
  }

  std::string_view bytes_;
  const std::string& name_;
};

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

}  // namespace

SentencePieceModel parse_sentencepiece_model(std::string_view serialized, const std::string& name) {
  SentencePieceModel model;
  for (WireReader message(serialized, name); message.next();) {
    if (message.field == 1) {
      auto& piece = model.pieces.emplace_back();
      for (WireReader reader(message.text, name); reader.next();) {
        if (reader.field == 1) piece.text = reader.text;
        if (reader.field == 2) piece.score = std::bit_cast<float>(static_cast<uint32_t>(reader.number));
        if (reader.field == 3) piece.type = static_cast<SentencePieceModel::Type>(reader.number);
      }
    } else if (message.field == 2) {
      for (WireReader reader(message.text, name); reader.next();) {
        if (reader.field == 3) model.bpe = reader.number == 2;
        if (reader.field == 35) model.byte_fallback = reader.number != 0;
      }
    } else if (message.field == 3) {
      for (WireReader reader(message.text, name); reader.next();) {
        if (reader.field == 2) model.normalizes = !reader.text.empty();
        if (reader.field == 3) model.add_dummy_prefix = reader.number != 0;
        if (reader.field == 4) model.remove_extra_whitespaces = reader.number != 0;
        if (reader.field == 5) model.escape_whitespaces = reader.number != 0;
      }
    }
  }
  if (model.pieces.empty())
    throw Error(ErrorCode::kData, name, "a SentencePiece model without pieces", "Copy the file again");
  return model;
}

std::string with_unused_piece(std::string serialized, std::string_view piece) {
  std::string message = "\x0a";
  append_varint(message, piece.size());
  message += piece;
  message += std::string("\x15\0\0\0\0\x18\x05", 7);  // score 0, type unused
  serialized += "\x0a";
  append_varint(serialized, message.size());
  return serialized + message;
}

std::string tokenizers_json(const SentencePieceModel& model) {
  if (!model.bpe || !model.byte_fallback || model.normalizes || model.remove_extra_whitespaces ||
      !model.escape_whitespaces)
    return {};
  using Type = SentencePieceModel::Type;
  using nlohmann::ordered_json;
  ordered_json vocab = ordered_json::object(), added = ordered_json::array();
  std::unordered_map<std::string_view, int64_t> ids;
  std::string unknown;
  // ordered_json searches linearly; the keys here are new ones, so they are appended directly.
  auto& entries = vocab.get_ref<ordered_json::object_t&>();
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const auto& piece = model.pieces[i];
    if (!ids.emplace(piece.text, i).second) return {};
    entries.push_back({piece.text, i});
    if (piece.type == Type::kUserDefined) return {};
    if (piece.type == Type::kUnknown) unknown = piece.text;
    if (piece.type == Type::kControl || piece.type == Type::kUnknown)
      added.push_back({{"id", i},
                       {"content", piece.text},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
  }
  // SentencePiece joins the neighbours whose union is the best piece, whatever its parts; so every way to cut a piece
  // in two is a merge, ranked by the piece.
  const auto joins = [&](const auto& piece) { return piece.type == Type::kNormal; };
  std::vector<size_t> order;
  for (size_t i = 0; i < model.pieces.size(); ++i)
    if (joins(model.pieces[i])) order.push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return model.pieces[a].score > model.pieces[b].score; });
  ordered_json merges = ordered_json::array();
  for (const size_t i : order) {
    const std::string_view text = model.pieces[i].text;
    for (size_t cut = 1; cut < text.size(); ++cut) {
      if ((static_cast<uint8_t>(text[cut]) & 0xc0) == 0x80) continue;
      const auto left = ids.find(text.substr(0, cut)), right = ids.find(text.substr(cut));
      if (left != ids.end() && right != ids.end() && joins(model.pieces[left->second]) &&
          joins(model.pieces[right->second]))
        merges.push_back({left->first, right->first});
    }
  }
  ordered_json normalizers = ordered_json::array();
  ordered_json decoders = {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                           {{"type", "ByteFallback"}},
                           {{"type", "Fuse"}}};
  if (model.add_dummy_prefix) {
    normalizers.push_back({{"type", "Prepend"}, {"prepend", "▁"}});
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  normalizers.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}});
  const ordered_json root = {{"version", "1.0"},
                             {"truncation", nullptr},
                             {"padding", nullptr},
                             {"added_tokens", std::move(added)},
                             {"normalizer", {{"type", "Sequence"}, {"normalizers", std::move(normalizers)}}},
                             {"pre_tokenizer", nullptr},
                             {"post_processor", nullptr},
                             {"decoder", {{"type", "Sequence"}, {"decoders", std::move(decoders)}}},
                             {"model",
                              {{"type", "BPE"},
                               {"dropout", nullptr},
                               {"unk_token", unknown.empty() ? ordered_json(nullptr) : ordered_json(unknown)},
                               {"continuing_subword_prefix", nullptr},
                               {"end_of_word_suffix", nullptr},
                               {"fuse_unk", true},
                               {"byte_fallback", true},
                               {"ignore_merges", false},
                               {"vocab", std::move(vocab)},
                               {"merges", std::move(merges)}}}};
  return root.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace concerto
