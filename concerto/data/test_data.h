// What the tests of this folder share: small token files, a small tokenizer.
#pragma once

#include <gtest/gtest.h>
#include <cstdint>
#include <string>
#include <vector>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/data/tokenizer.h"

namespace concerto {

using Documents = std::vector<std::vector<int32_t>>;

inline void write_documents(const std::string& prefix, const Documents& documents, int64_t vocab_size,
                            const std::vector<std::vector<uint8_t>>& masks = {}) {
  IndexedDatasetWriter writer(prefix, vocab_size, !masks.empty());
  for (size_t i = 0; i < documents.size(); ++i)
    writer.add_document(documents[i], masks.empty() ? std::vector<uint8_t>{} : masks[i]);
  writer.finish();
}

inline std::string sample_text() {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += fmt::format("The quick brown fox jumps over the lazy dog number {}.\n", i * 37);
    text += "快速的棕色狐狸跳过懒狗。中文和英文混在一起 with English words.\n";
    text += "    if (x == 0) {\n        return y + 1;\n    }\n";
  }
  return text;
}

// Trained once a process.
inline const Tokenizer& sample_tokenizer() {
  static const Tokenizer tokenizer = [] {
    const TestFolder folder;
    return train_tokenizer({.inputs = {folder.write("text.txt", sample_text())}, .vocab_size = 420});
  }();
  return tokenizer;
}

}  // namespace concerto
