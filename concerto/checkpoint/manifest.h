// The text of manifest.json. It begins with its own hash, taken over the text with the hash's digits as zeros.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {

constexpr const char* kManifestFile = "manifest.json";
constexpr const char* kModelConfigFile = "config.json";
constexpr const char* kStepKey = "step";  // in the metadata of every safetensors file of a checkpoint

// 1: every tensor is whole. 2: tensors may be cut into slices, in several files. A manifest has the lowest format that
// can say what it says.
constexpr int kCheckpointFormat = 2;

// A slice of a tensor in a file.
struct ManifestTensor {
  std::string name;
  Shape shape;  // of the whole tensor
  DType dtype = DType::kF32;
  int expert = -1;
  Box box;            // what is here of it
  size_t file = 0;    // index into Manifest::files
  uint64_t hash = 0;  // of its bytes
};

struct ManifestFile {
  std::string name;  // beside the manifest
  int64_t bytes = 0;
  uint64_t header_hash = 0;
};

struct Manifest {
  int64_t sequence = 0;  // counts the saves of a run folder: which of two checkpoints is newer, whatever their steps
  CheckpointMeta meta;   // without model_config, which is a file of its own
  uint64_t model_config_hash = 0;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
};

std::string manifest_text(const Manifest& manifest);
// The sequence number from the first bytes of a manifest, unchecked: an ordering of candidates costs no parse. 0 if
// there is none.
int64_t peek_sequence(const std::string& manifest_path);
// Error(kCheckpoint) for anything but a manifest that manifest_text wrote; `path` is for messages.
Manifest parse_manifest(const std::string& text, const std::string& path);

// Puts the slices of every tensor together, in the order of their first ones. Slices that overlap, leave a hole, are of
// other dtypes, shapes or expert ids or cut in two dims are told to `faults`; `place` says where a slice is.
std::vector<CheckpointTensor> join_slices(const std::vector<ManifestTensor>& slices, TensorFaults& faults,
                                          const std::function<std::string(size_t file)>& place);

}  // namespace concerto
