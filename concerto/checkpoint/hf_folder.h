// Model folders exactly as Hugging Face has them: config.json, model.safetensors or shards with
// model.safetensors.index.json, tokenizer files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "concerto/arch/model_spec.h"
#include "concerto/checkpoint/safetensors.h"
#include "concerto/checkpoint/save_plan.h"
#include "concerto/comm/communicator.h"

namespace concerto {

constexpr const char* kHfWeightsFile = "model.safetensors";
constexpr const char* kHfIndexFile = "model.safetensors.index.json";
constexpr int64_t kDefaultShardBytes = 5'000'000'000;

// The weights of a folder, opened and checked as files: the index and the shards name the same tensors, each once.
// Error(kModel) otherwise.
class HfWeights {
 public:
  explicit HfWeights(const std::string& dir);

  // Compares with the tensors that the config asks for. Everything missing, extra, of the wrong shape or not a float is
  // named in one Error(kModel). Returns what a user should know but need not act on, one line each: MTP tensors that
  // the config does not ask for, a second copy of a tied head.
  std::vector<std::string> check(const ModelConfig& config) const;

  // Copies a tensor under its spec's name into a dense view of a float type. Error(kModel) if it is missing or has
  // another shape.
  void read(const std::string& name, const View& target) const;
  // Copies the spec's part of a tensor; `target` has the spec's shape. Reads no byte outside.
  void read_part(const TensorSpec& spec, const View& target) const;

  // Null if absent. The correction bias is also found under transformers' in-memory name (mlp.gate.moe_statics...).
  const SafetensorsEntry* find(const std::string& name) const;
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::string& dir() const { return dir_; }
  int64_t tensor_count() const { return static_cast<int64_t>(index_.size()); }

 private:
  void open_sharded(const std::string& index_path);
  const SafetensorsEntry& require(const std::string& name, const Shape& shape) const;

  std::string dir_;
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string_view, const SafetensorsEntry*> index_;
};

// The files of `path` (a folder, or a tokenizer.model whose folder is meant) that belong to a tokenizer; with
// generation_config.json, what is copied beside exported weights.
std::vector<std::string> tokenizer_files(const std::string& path);
std::vector<std::string> files_beside_weights(const std::string& path);

struct HfExport {
  DType dtype = DType::kBF16;                    // kBF16 or kF32; router weight and correction bias are F32 always
  int64_t max_shard_bytes = kDefaultShardBytes;  // a tensor larger than this has a shard to itself
  std::vector<std::string> copy_files;           // paths, copied under their own names
  TensorProgress progress;                       // may be empty
  bool replace = false;  // an existing folder is replaced at the end; otherwise it is an Error(kIo)
};

// A dense view of a spec's values, valid until the next call.
using TensorSource = std::function<View(const TensorSpec& spec)>;

// Writes the whole folder under a temporary name (StagedDirectory) and renames it: it is there complete or not at all.
// Memory: one conversion buffer.
void write_hf_folder(const std::string& dir, const ModelConfig& config, const TensorSource& source,
                     const HfExport& options);

// The values of a rank's part of a weight, dense and valid until the next call.
using SliceSource = std::function<View(const NamedTensor& weight)>;

// The same folder, byte for byte, from all ranks of `world` together: each writes the slices of the weights that it owns
// into their places in the final files. No rank holds the model, and nothing is sent. Names have kWeightPrefix; their
// views need no memory. Error(kCheckpoint) as save_checkpoint's if the owned slices are not the model.
void write_hf_slices(const std::string& dir, const ModelConfig& config, std::span<const NamedTensor> weights,
                     const SliceSource& source, const HfExport& options, Communicator* world);

// Cuts a list of tensors into runs of at most max_bytes each (or one tensor each); the number of tensors of every run.
// Empty list: one empty run.
std::vector<size_t> plan_shards(const std::vector<TensorInfo>& tensors, int64_t max_bytes);

}  // namespace concerto
