// The text of manifest.json. It begins with its own hash, taken over the text with the hash's digits as zeros.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "concerto/checkpoint/checkpoint.h"

namespace concerto {

constexpr int kCheckpointFormat = 1;

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
  std::vector<CheckpointTensor> tensors;
};

std::string manifest_text(const Manifest& manifest);
// The sequence number from the first bytes of a manifest, unchecked: an ordering of candidates costs no parse. 0 if
// there is none.
int64_t peek_sequence(const std::string& manifest_path);
// Error(kCheckpoint) for anything but a manifest that manifest_text wrote; `path` is for messages.
Manifest parse_manifest(const std::string& text, const std::string& path);

}  // namespace concerto
