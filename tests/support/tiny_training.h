// A run folder with small data beside it, and what a finished run left there.
#pragma once

#include <signal.h>
#include <sys/resource.h>

#include <string>
#include <vector>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/trainer.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {

// A folder of its own with what training needs.
class Workplace : public TestFolder {
 public:
  // PREFIX.bin/.idx of documents in which each token mostly decides the next one; returns PREFIX.
  std::string write_data(const std::string& name, int documents, uint64_t seed, double noise = 0.1) const;
  // Documents of one token repeated, a row of 32 each, but those in [begin, end) are noise.
  std::string write_data_with_odd_documents(const std::string& name, int documents, int begin, int end) const;
  // A folder as a run that was killed after `step` leaves it: the checkpoints up to there, and rows beyond.
  void copy_killed_run(const std::string& from, const std::string& to, int64_t step) const;
};

// Inside its life no file of this process grows beyond `bytes`, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes);
  ~FileSizeLimit();

 private:
  rlimit before_{};
  sighandler_t handler_;
};

constexpr int64_t kDocumentTokens = 33;  // of write_data: a row of 32 tokens and the last one's target

// Run folder WORK/run; 12 steps of 4 rows in two micro-batches; a checkpoint every 3 steps, evaluation every 6.
RunConfig tiny_run_config(const Workplace& work, const std::string& dir = "run");

RunSummary train(const RunConfig& config, int threads = 1);

// metrics.jsonl without the fields that depend on the machine, a line each.
std::vector<std::string> metrics_rows(const std::string& run_dir);
// Field of every row that has it.
std::vector<double> metrics_values(const std::string& run_dir, const std::string& field);
// Name and hash of every tensor: weights and moments.
std::vector<std::string> checkpoint_contents(const std::string& path);

}  // namespace concerto::test
