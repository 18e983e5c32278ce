// The recorded side of a golden comparison: the file's tensors, which of them were used, and the tolerances of
// case.json.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "concerto/checkpoint/safetensors.h"
#include "concerto/cli/golden.h"
#include "concerto/data/micro_batch.h"

namespace concerto {

// A batch of the file: micro-batches without padding, and where each of their tokens stood in the [B, S] arrays.
struct GoldenBatch {
  std::vector<MicroBatch> micro_batches;
  std::vector<int64_t> rows;  // [tokens] index b * S + s of every token, in order
};

class GoldenCase {
 public:
  explicit GoldenCase(const std::string& dir);

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  std::vector<double> values(const std::string& name) const;  // as doubles, any type
  Shape shape(const std::string& name) const { return file_.require(name).shape; }
  std::vector<std::string> names(const std::string& prefix) const;
  void fed(const std::string& name);

  // prefix "": the batch of the forward and backward pass; "train.": step `step` of the training batches.
  GoldenBatch batch(const std::string& prefix, int64_t step, int64_t micro_batches, const ModelConfig& config);

  // Compares `got` with the tensor; `rows` picks rows of the recorded tensor (padding is skipped), empty: all.
  void compare(const std::string& name, const std::vector<double>& got, const std::vector<int64_t>& rows = {});
  void compare_values(const std::string& name, const std::vector<double>& got, std::vector<double> want);

  OptimizerSection optimizer() const;
  int64_t train_steps() const;
  bool aux_loss_in_loss() const;
  GoldenReport finish();

 private:
  std::pair<double, double> tolerance(const std::string& name) const;
  std::vector<int64_t> slice(const std::string& name, int64_t step, int64_t count);

  SafetensorsFile file_;
  std::map<std::string, std::pair<double, double>> tolerance_;
  OptimizerSection optimizer_;
  int64_t steps_ = 0;
  bool aux_in_loss_ = false;
  std::set<std::string> used_;
  GoldenReport report_;
};

}  // namespace concerto
