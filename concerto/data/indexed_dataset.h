// Token files in Megatron's memory-mapped layout: PREFIX.bin (token ids back to back), PREFIX.idx (lengths, offsets,
// documents) and, where only some tokens are trained, Baidu's PREFIX.lsm (one byte a token: 1 = trained).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "concerto/base/files.h"

namespace concerto {

enum class TokenType : uint8_t { kU8 = 1, kI8 = 2, kI16 = 3, kI32 = 4, kI64 = 5, kU16 = 8, kU32 = 9, kU64 = 10 };

// The checked content of an .idx file. Only views into `bytes`; nothing is allocated.
class TokenIndex {
 public:
  // Checks every field. Throws Error(kData) with `name` and the field when the file is truncated, corrupt, or points
  // outside a .bin of `bin_bytes`.
  TokenIndex(std::span<const uint8_t> bytes, int64_t bin_bytes, const std::string& name);

  TokenType type() const { return type_; }
  int64_t type_bytes() const { return type_bytes_; }
  int64_t documents() const { return documents_; }
  int64_t tokens() const { return tokens_; }  // over all documents
  struct Range {
    int64_t begin, count;  // in tokens of the .bin file
  };
  Range document(int64_t i) const;

 private:
  const uint8_t *lengths_, *offsets_, *document_index_;
  TokenType type_;
  int64_t type_bytes_, documents_, tokens_ = 0;
};

class IndexedDataset {
 public:
  // Opens and checks PREFIX.bin, .idx and, if it is there, .lsm. Error(kIo) for a file that cannot be read,
  // Error(kData) for one that is wrong.
  explicit IndexedDataset(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  TokenType type() const { return index_.type(); }
  int64_t documents() const { return index_.documents(); }
  int64_t tokens() const { return index_.tokens(); }
  int64_t document_tokens(int64_t document) const { return index_.document(document).count; }
  bool has_mask() const { return mask_file_.has_value(); }

  // Copies tokens [begin, begin + count) of a document. Error(kData) names the document when an id is not in [0,
  // vocab_size).
  void read(int64_t document, int64_t begin, int64_t count, int64_t vocab_size, int32_t* out) const;
  // Copies the loss mask of tokens [begin, begin + count) of a document, 0 or 1 each; only with has_mask().
  // Error(kData) names the document that holds something else.
  void read_mask(int64_t document, int64_t begin, int64_t count, uint8_t* out) const;
  // Reads every id.
  void check_vocabulary(int64_t vocab_size) const;
  // Reads the whole loss mask; how many tokens are trained.
  int64_t check_mask() const;
  bool any_trained() const;  // reads up to the first

 private:
  static std::span<const uint8_t> bytes_of(const MappedFile& file) {
    return {reinterpret_cast<const uint8_t*>(file.bytes().data()), file.bytes().size()};
  }

  std::string prefix_;
  MappedFile index_file_, token_file_;
  std::optional<MappedFile> mask_file_;
  TokenIndex index_;
};

// Writes under temporary names; finish() makes the files appear whole, the .idx last. Without finish() nothing is left
// behind.
class IndexedDatasetWriter {
 public:
  // 16 bits a token when the vocabulary allows it, else 32. with_mask: an .lsm as well.
  IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size, bool with_mask);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(const IndexedDatasetWriter&) = delete;
  IndexedDatasetWriter& operator=(const IndexedDatasetWriter&) = delete;

  // mask: empty, or one a token. Error(kIo) when the disk is full.
  void add_document(std::span<const int32_t> ids, std::span<const uint8_t> mask = {});
  void finish();

  int64_t documents() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t tokens() const { return tokens_; }

 private:
  // A file written in large pieces, under its temporary name.
  struct Output {
    explicit Output(const std::string& path) : path(path), file(path + ".tmp") {}
    void append(const void* data, size_t bytes);
    void finish();  // all on the disk, still under the temporary name
    std::string path;
    FileWriter file;
    std::vector<char> buffer;
  };

  std::string prefix_;
  int64_t vocab_size_, tokens_ = 0;
  std::optional<Output> token_file_, mask_file_;
  bool finished_ = false;
  std::vector<int32_t> lengths_;
  std::vector<uint16_t> narrow_;
};

}  // namespace concerto
