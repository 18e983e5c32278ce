// Reads the few fields of a serialized SentencePiece model (a protobuf message) that the library's interface does not
// show, and writes the tokenizers-library form of such a model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace concerto {

struct SentencePieceModel {
  enum class Type { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  struct Piece {
    std::string text;
    float score = 0;
    Type type = Type::kNormal;
  };
  std::vector<Piece> pieces;  // by id
  bool bpe = false;           // else unigram, word or char
  bool byte_fallback = false;
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
  bool normalizes = false;  // changes characters (NFKC, ...)
};

// Error(kData) when the bytes are no such message.
SentencePieceModel parse_sentencepiece_model(std::string_view serialized, const std::string& name);

// The model with one more piece at the end that no text can give.
std::string with_unused_piece(std::string serialized, std::string_view piece);

// A tokenizer.json that gives the same ids; empty when the model is of a kind that it cannot express (not BPE with byte
// fallback, normalizing, or with user-defined pieces).
std::string tokenizers_json(const SentencePieceModel& model);

}  // namespace concerto
