// From a run checkpoint to a Hugging Face folder and back.
#pragma once

#include <string>
#include <vector>

#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/hf_folder.h"

namespace concerto {

// The model of a checkpoint. Error(kModel) if this version cannot read its config.json.
ModelConfig checkpoint_model(const CheckpointReader& checkpoint);

// Compares the "weight.*" tensors with those the model has: what is missing, extra, misshapen or under another expert's
// id is named in one Error(kCheckpoint).
void check_checkpoint_weights(const CheckpointReader& checkpoint, const ModelConfig& model);

// Writes the master weights as a Hugging Face folder; hashes are checked on the way. Needs memory for the largest
// tensor.
void export_checkpoint(const CheckpointReader& checkpoint, const std::string& dir, const HfExport& options);

// Makes run_dir, which must not exist, with the same checkpoint written as one rank writes it: whole tensors, in files
// of at most max_shard_bytes (or one tensor each). All or nothing; hashes are checked on the way. Needs memory for the
// largest tensor. Returns the path of the new checkpoint.
std::string reshard_checkpoint(const CheckpointReader& checkpoint, const std::string& run_dir, int64_t max_shard_bytes,
                               const TensorProgress& progress = {});

struct ImportResult {
  std::string checkpoint;          // path of the new checkpoint-0
  std::vector<std::string> notes;  // of HfWeights::check
};

// Makes run_dir, which must not exist, with a checkpoint of step 0 that holds the folder's weights as f32 and no
// optimizer state. All or nothing; streams from the mapped files.
ImportResult import_hf_folder(const std::string& hf_dir, const std::string& run_dir,
                              const TensorProgress& progress = {});

}  // namespace concerto
