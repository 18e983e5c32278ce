#include "concerto/data/pack.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "concerto/base/error.h"
#include "concerto/base/thread_pool.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/data/records.h"
#include "concerto/data/utf8.h"

namespace concerto {
namespace {

constexpr size_t kBatchBytes = 1 << 20;  // of text that is tokenized between two writes

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos; }

struct Item {
  std::string text;
  std::string file;
  int64_t line = 0;  // of its first line
  bool is_record = false;
  bool conversation = false;
  TokenizedRecord tokens;
  std::exception_ptr error;
  std::string where() const { return fmt::format("{}:{}", file, line); }
};

// Cuts one input into documents.
class DocumentReader {
 public:
  DocumentReader(const std::string& file, SplitText split)
      : file_(file),
        split_(split),
        records_(file.ends_with(".jsonl") || file.ends_with(".json")),
        in_(file, std::ios::binary) {
    std::error_code error;
    if (!in_ || std::filesystem::is_directory(file, error))
      throw Error(ErrorCode::kIo, file, "cannot be read as a file", "Check the path");
  }

  // The next document that is not blank.
  bool next(Item& item) {
    item.file = file_;
    item.is_record = records_;
    for (;;) {
      item.text.clear();
      item.line = line_ + 1;
      bool any = false, ended = false;
      while (!ended && get_line()) {
        any = true;
        if (records_ || split_ == SplitText::kLine) {
          item.text = current_;
          ended = true;
        } else if (split_ == SplitText::kParagraph && is_blank(current_)) {
          ended = true;
        } else if (const size_t feed = split_ == SplitText::kPage ? current_.find('\f') : std::string::npos;
                   feed != std::string::npos) {
          item.text += current_.substr(0, feed);
          if (feed + 1 < current_.size()) pushed_back_ = current_.substr(feed + 1);
          ended = true;
        } else {
          if (item.text.empty()) item.line = line_;
          item.text += current_;
          item.text += '\n';
        }
      }
      if (!any) return false;
      if (!is_blank(item.text)) break;
    }
    // The line end that closes a text is the file's, not the document's.
    while (!item.text.empty() && (item.text.back() == '\n' || item.text.back() == '\r')) item.text.pop_back();
    return true;
  }
  int64_t bytes() const { return bytes_; }

 private:
  bool get_line() {
    if (pushed_back_) {
      current_ = std::move(*pushed_back_);
      pushed_back_.reset();
      return true;
    }
    if (!std::getline(in_, current_)) {
      if (in_.bad()) throw Error(ErrorCode::kIo, file_, "reading failed", "Check the disk");
      return false;
    }
    ++line_;
    bytes_ += static_cast<int64_t>(current_.size()) + 1;
    if (line_ == 1 && current_.starts_with("\xef\xbb\xbf")) current_.erase(0, 3);  // a byte order mark is no text
    return true;
  }

  const std::string& file_;
  SplitText split_;
  bool records_;
  std::ifstream in_;
  std::string current_;
  std::optional<std::string> pushed_back_;
  int64_t line_ = 0, bytes_ = 0;
};

void tokenize(const Tokenizer& tokenizer, Item& item) {
  Record record;
  if (item.is_record) {
    record = parse_record(item.text, item.where());
  } else {
    if (const size_t bad = find_invalid_utf8(item.text); bad != std::string::npos) {
      const auto line = item.line + std::count(item.text.begin(), item.text.begin() + static_cast<int64_t>(bad), '\n');
      throw Error(ErrorCode::kData, fmt::format("{}:{}", item.file, line), "not UTF-8",
                  "Convert the file: iconv -f OLD -t UTF-8");
    }
    record.text = std::move(item.text);
  }
  item.conversation = record.conversation;
  tokenize_record(tokenizer, record, item.where(), item.tokens);
}

// Takes documents in groups, tokenizes a group on all threads and writes it in order.
class Packer {
 public:
  Packer(const Tokenizer& tokenizer, const PackOptions& options)
      : tokenizer_(tokenizer), options_(options), pool_(std::max(1, options.threads)) {}

  PackSummary run(const std::function<void(const PackSummary&, int64_t)>& progress) {
    int64_t total = 0, before = 0;
    for (const auto& file : options_.inputs) {
      std::error_code error;
      const auto size = std::filesystem::file_size(file, error);
      if (error) throw Error(ErrorCode::kIo, file, "cannot be read: " + error.message(), "Check the path");
      total += static_cast<int64_t>(size);
    }
    for (const auto& file : options_.inputs) {
      DocumentReader reader(file, options_.split);
      for (Item item; reader.next(item);) {
        summary_.bytes = before + reader.bytes();
        batch_bytes_ += item.text.size();
        batch_.push_back(std::move(item));
        if (batch_bytes_ < kBatchBytes) continue;
        flush();
        if (progress) progress(summary_, total);
      }
      before += reader.bytes();
      summary_.bytes = before;
    }
    flush();
    if (!writer_ || summary_.documents == 0)
      throw Error(ErrorCode::kData, options_.inputs.empty() ? "INPUT" : options_.inputs.front(),
                  "the inputs hold no text", "Name files with text");
    writer_->finish();
    if (progress) progress(summary_, total);
    return summary_;
  }

 private:
  void flush() {
    pool_.parallel_dynamic(static_cast<int64_t>(batch_.size()), [&](int64_t i, int) {
      try {
        tokenize(tokenizer_, batch_[i]);
      } catch (...) {
        batch_[i].error = std::current_exception();
      }
    });
    for (const auto& item : batch_) {
      if (item.error) std::rethrow_exception(item.error);
      if (!writer_) {
        summary_.with_mask = item.conversation;
        writer_ = std::make_unique<IndexedDatasetWriter>(options_.output, tokenizer_.vocab_size(), item.conversation);
      }
      if (item.conversation != summary_.with_mask)
        throw Error(ErrorCode::kData, item.where(),
                    item.conversation ? "a conversation among plain texts" : "plain text among conversations",
                    "Pack the two kinds into two outputs");
      if (item.tokens.ids.size() <= (item.conversation ? 0u : 1u)) {  // nothing but eos
        ++summary_.empty_documents;
        continue;
      }
      writer_->add_document(item.tokens.ids, item.tokens.trained);
      ++summary_.documents;
      summary_.tokens += static_cast<int64_t>(item.tokens.ids.size());
      summary_.trained_tokens += item.conversation
                                     ? std::count(item.tokens.trained.begin(), item.tokens.trained.end(), 1)
                                     : static_cast<int64_t>(item.tokens.ids.size());
    }
    batch_.clear();
    batch_bytes_ = 0;
  }

  const Tokenizer& tokenizer_;
  const PackOptions& options_;
  ThreadPool pool_;
  std::vector<Item> batch_;
  size_t batch_bytes_ = 0;
  PackSummary summary_;
  std::unique_ptr<IndexedDatasetWriter> writer_;
};

}  // namespace

PackSummary pack(const Tokenizer& tokenizer, const PackOptions& options,
                 const std::function<void(const PackSummary&, int64_t)>& progress) {
  return Packer(tokenizer, options).run(progress);
}

}  // namespace concerto
