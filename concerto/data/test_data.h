// What the tests of this folder share: a folder that vanishes, small token files, a small tokenizer.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "concerto/base/error.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/data/tokenizer.h"

namespace concerto {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int number = 0;
    path_ = std::filesystem::temp_directory_path() / fmt::format("concerto_data_{}_{}", ::getpid(), number++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return *this / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Runs `action`, which must throw an Error of `code` whose text holds every one of `parts`.
template <class Action>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Action&& action) {
  try {
    action();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, code) << error.what();
    for (const auto& part : parts) EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

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
    const TemporaryFolder folder;
    return train_tokenizer({.inputs = {folder.write("text.txt", sample_text())}, .vocab_size = 420});
  }();
  return tokenizer;
}

}  // namespace concerto
