// Turns text into token files: what `concerto data pack` does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "concerto/data/tokenizer.h"

namespace concerto {

enum class SplitText {
  kFile,
  kParagraph,
  kLine,
  kPage
};  // documents of a text file: all of it; between blank lines; lines; between form feeds

struct PackOptions {
  std::vector<std::string> inputs;  // *.jsonl and *.json hold a record a line (records.h); any other is UTF-8 text
  std::string output;               // prefix of .bin, .idx and, for conversations, .lsm
  SplitText split = SplitText::kFile;
  int threads = 2;  // does not change the result
};

struct PackSummary {
  int64_t documents = 0, tokens = 0, trained_tokens = 0, bytes = 0;
  int64_t empty_documents = 0;  // left out
  bool with_mask = false;
};

// `progress` is called with what is done so far and the bytes of all inputs. Documents keep the order of the inputs.
// Error(kData, "FILE:LINE", ...) for a broken record, for text that is not UTF-8, and when plain and conversation
// records are mixed; then no file is left or changed.
PackSummary pack(const Tokenizer& tokenizer, const PackOptions& options,
                 const std::function<void(const PackSummary&, int64_t total_bytes)>& progress = {});

}  // namespace concerto
