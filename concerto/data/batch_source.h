// Which tokens a training step sees: a pure function of (data, seed, sample number), so that a run resumes from the
// number of the next sample alone.
//
// Several sources are mixed by weight. Sources without a loss mask are pre-training text: each epoch shuffles the
// documents, lays them end to end and cuts the stream every seq_length tokens; the cut that an epoch's end leaves open
// goes on with the next epoch, so no token is lost or seen twice. Sources with a mask
// (.lsm) are fine-tuning records: whole documents are packed into rows of at most seq_length tokens, longer ones are
// left out and counted; the rows are shuffled each epoch. Rows are never padded: a row may hold fewer tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/data/micro_batch.h"

namespace concerto {

struct BatchSourceOptions {
  std::vector<DataSource> sources;
  int64_t vocab_size = 0;
  int64_t seq_length = 0;
  int64_t mtp_depth = 0;
  int32_t pad_id = 0;  // stands in for an MTP token beyond the end of a document
  uint64_t seed = 0;
  bool document_mask = true;  // false: rows are one document each; attention and targets cross the borders
  bool shuffle = true;
  bool one_pass = false;  // validation: every source once, one after the other, in file order, weights unused
};

struct SourceInfo {
  std::string path;
  int64_t documents = 0, tokens = 0;
  int64_t dropped_documents = 0;  // fine-tuning records longer than seq_length, left out
  int64_t rows = 0;               // in one epoch; of pre-training text: rounded up
};

class BatchSource {
 public:
  // Error(kData): a file is missing or wrong, holds ids outside the vocabulary, or nothing to train on. Error(kConfig):
  // no source, a weight that is not positive.
  explicit BatchSource(const BatchSourceOptions& options);
  ~BatchSource();
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;

  // Samples [first_sample, first_sample + count), in order, as ceil(count / rows_per_micro_batch) micro-batches. Reuses
  // what `out` holds: no allocation once the sizes have been seen. One thread at a time.
  void fill(int64_t first_sample, int64_t count, int64_t rows_per_micro_batch, std::vector<MicroBatch>& out);

  // Rows of one pass over everything (one_pass: how many samples there are).
  int64_t rows_per_pass() const;
  const std::vector<SourceInfo>& sources() const { return info_; }

 private:
  struct Row;
  class Source;
  class TextSource;
  class RecordSource;

  std::pair<size_t, int64_t> locate(int64_t sample) const;  // which row of which source
  void start(int64_t rows, MicroBatch& batch);
  void append_row(MicroBatch& batch);
  void append_mtp(MicroBatch& batch);

  BatchSourceOptions options_;
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<uint64_t> share_;  // of source s among sources s.., in units of 2^-32
  std::vector<SourceInfo> info_;
  std::unique_ptr<Row> row_;
  std::vector<int32_t> ahead_ids_, ahead_targets_;  // [T, mtp_depth]
};

}  // namespace concerto
