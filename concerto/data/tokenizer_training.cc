#include <sentencepiece_trainer.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <unordered_map>

#include "concerto/base/error.h"
#include "concerto/data/sentencepiece_model.h"
#include "concerto/data/tokenizer.h"
#include "concerto/data/utf8.h"

namespace concerto {
namespace {

constexpr int64_t kReserved = 5 + 256;  // control pieces and bytes
constexpr size_t kMaxSentence = 4000;   // bytes; SentencePiece passes over longer ones

// Hands every `stride`-th line of the files to SentencePiece, long ones in parts.
class LineIterator : public sentencepiece::SentenceIterator {
 public:
  LineIterator(const std::vector<std::string>& files, int64_t stride) : files_(files), stride_(stride) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    if (part_ >= line_.size()) {
      do {
        if (!read_line()) {
          done_ = true;
          return;
        }
      } while (line_.empty());
      part_ = 0;
    }
    size_t end = std::min(part_ + kMaxSentence, line_.size());
    while (end < line_.size() && (static_cast<uint8_t>(line_[end]) & 0xc0) == 0x80) --end;
    value_ = line_.substr(part_, end - part_);
    part_ = end;
  }

 private:
  bool read_line() {
    for (;;) {
      if (!in_.is_open()) {
        if (file_ == files_.size()) return false;
        in_.open(files_[file_++], std::ios::binary);
        if (!in_) throw Error(ErrorCode::kIo, files_[file_ - 1], "cannot be read", "Check the path");
        number_ = 0;
      }
      while (std::getline(in_, line_)) {
        ++number_;
        if (count_++ % stride_ != 0) continue;
        if (find_invalid_utf8(line_) != std::string::npos)
          throw Error(ErrorCode::kData, fmt::format("{}:{}", files_[file_ - 1], number_), "not UTF-8",
                      "Convert the file: iconv -f OLD -t UTF-8");
        line_.erase(std::remove(line_.begin(), line_.end(), '\0'), line_.end());
        return true;
      }
      in_.close();
      in_.clear();
    }
  }

  const std::vector<std::string>& files_;
  int64_t stride_, count_ = 0, number_ = 0;
  size_t file_ = 0, part_ = 0;
  std::ifstream in_;
  std::string line_, value_;
  bool done_ = false;
};

}  // namespace

Tokenizer train_tokenizer(const TokenizerTraining& options) {
  if (options.vocab_size <= kReserved || options.vocab_size > 1 << 20)
    throw Error(ErrorCode::kUsage, "--vocab-size",
                fmt::format("{} is not from {} to {}", options.vocab_size, kReserved + 1, 1 << 20),
                "8192 is a good size for a toy");
  int64_t bytes = 0;
  for (const auto& file : options.inputs) {
    std::error_code error;
    const auto size = std::filesystem::file_size(file, error);
    if (error) throw Error(ErrorCode::kIo, file, "cannot be read: " + error.message(), "Check the path");
    bytes += static_cast<int64_t>(size);
  }
  const int64_t stride =
      std::max<int64_t>(1, (bytes + options.max_bytes - 1) / std::max<int64_t>(1, options.max_bytes));
  const auto train = [&](int64_t vocab_size, std::string& serialized) {
    LineIterator lines(options.inputs, stride);
    if (lines.done()) throw Error(ErrorCode::kData, "--input", "the files hold no text", "Name files with text");
    const std::unordered_map<std::string, std::string> arguments = {
        {"model_type", "bpe"},
        {"vocab_size", std::to_string(vocab_size)},
        {"byte_fallback", "true"},
        {"character_coverage", "0.9995"},
        {"normalization_rule_name", "identity"},
        {"add_dummy_prefix", "false"},
        {"remove_extra_whitespaces", "false"},
        {"allow_whitespace_only_pieces", "true"},
        {"split_digits", "true"},
        {"unk_id", "0"},
        {"bos_id", "1"},
        {"eos_id", "2"},
        {"pad_id", "-1"},
        {"control_symbols", "<|begin_of_sentence|>,<|end_of_sentence|>"},
        {"input_sentence_size", "0"},
        {"shuffle_input_sentence", "false"},
        {"max_sentence_length", std::to_string(kMaxSentence + 8)},
        {"num_threads", "2"},  // written into the model, so the same everywhere
        {"minloglevel", "3"},
    };
    return sentencepiece::SentencePieceTrainer::Train(arguments, &lines, &serialized);
  };
  // A small text has no use for so many pieces. The library then refuses and names the number that it has in words
  // only, so halve the distance.
  std::string serialized;
  int64_t size = options.vocab_size;
  auto status = train(size, serialized);
  if (!status.ok()) {
    int64_t low = kReserved, high = size;  // low: too small or unknown, high: too large
    std::string best;
    while (high - low > 1) {
      size = low + (high - low) / 2;
      serialized.clear();
      const auto trial = train(size, serialized);
      const bool too_large = !trial.ok() && trial.ToString().find("too high") != std::string::npos;
      if (trial.ok()) best = serialized;
      (too_large ? high : low) = size;
    }
    if (best.empty())
      throw Error(ErrorCode::kData, "--vocab-size",
                  fmt::format("{}: SentencePiece cannot train: {}", options.vocab_size, status.ToString()),
                  "Use more text or another size");
    serialized = best;
  }
  int64_t pieces = static_cast<int64_t>(parse_sentencepiece_model(serialized, "trained model").pieces.size());
  for (; pieces < options.vocab_size; ++pieces)
    serialized = with_unused_piece(std::move(serialized), fmt::format("<|unused_{}|>", pieces));
  return Tokenizer::from_model(std::move(serialized), "trained model");
}

}  // namespace concerto
