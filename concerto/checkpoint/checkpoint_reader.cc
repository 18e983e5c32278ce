#include <algorithm>

#include "concerto/base/hash.h"
#include "concerto/base/json.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {
namespace {

constexpr const char* kUseOlder = "Resume from an older checkpoint (run.resume: PATH).";

Error fault(const std::string& where, const std::string& what) {
  return Error(ErrorCode::kCheckpoint, where, what, kUseOlder);
}

// Runs f; what it finds wrong with a model file is a fault of this checkpoint.
template <class F>
auto as_checkpoint_error(F&& f) {
  try {
    return f();
  } catch (const Error& e) {
    if (e.code != ErrorCode::kModel) throw;
    throw fault(e.where, e.problem);
  }
}

std::string slice_name(const CheckpointTensor& tensor, const StoredSlice& slice) {
  return "tensor " + json_quote(tensor.name) + (tensor.slices.size() > 1 ? " " + slice.box.str() : "");
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path) : path_(path) {
  const std::string manifest_path = path + "/" + kManifestFile;
  if (!path_exists(manifest_path))
    throw Error(ErrorCode::kCheckpoint, path, fmt::format("holds no {}: not a checkpoint", kManifestFile),
                "Name a folder checkpoint-N of a run.");
  const std::string text = read_text_file(manifest_path, int64_t{1} << 32);
  manifest_hash_ = hash64(text);
  Manifest manifest = parse_manifest(text, manifest_path);
  sequence_ = manifest.sequence;
  meta_ = std::move(manifest.meta);

  const std::string config_path = path + "/" + kModelConfigFile;
  if (!path_exists(config_path)) throw fault(config_path, "is missing");
  meta_.model_config = read_text_file(config_path);
  if (hash64(meta_.model_config) != manifest.model_config_hash)
    throw fault(config_path, "is damaged: its hash does not match the manifest");

  TensorFaults faults("the manifest");
  tensors_ = join_slices(manifest.tensors, faults, [&](size_t file) { return manifest.files[file].name; });
  if (!faults.empty()) throw fault(manifest_path, faults.text("its slices are not whole tensors") + "\n");
  for (ManifestFile& file : manifest.files) files_.push_back({file.name, file.bytes, file.header_hash, {}, {}});
  for (size_t i = 0; i < tensors_.size(); ++i) {
    index_.emplace(tensors_[i].name, i);
    for (size_t s = 0; s < tensors_[i].slices.size(); ++s) files_[tensors_[i].slices[s].file].slices.emplace_back(i, s);
  }
}

const SafetensorsFile& CheckpointReader::open_file(size_t number) const {
  const File& file = files_[number];
  if (file.open) return *file.open;
  const std::string path = path_ + "/" + file.name;
  if (!path_exists(path)) throw fault(path, "is missing");
  auto open = as_checkpoint_error([&] { return std::make_unique<SafetensorsFile>(path); });
  const auto step = open->metadata().find(kStepKey);
  if (step != open->metadata().end() && step->second != std::to_string(meta_.step))
    throw fault(path,
                fmt::format("is of another checkpoint: of step {}, where this one is of {}", step->second, meta_.step));
  if (open->bytes() != file.bytes || open->header_hash() != file.header_hash)
    throw fault(path, "is damaged or of another checkpoint: its size or header does not match the manifest");
  for (const auto& [t, s] : file.slices) {
    const CheckpointTensor& tensor = tensors_[t];
    const SafetensorsEntry* entry = open->find(tensor.name);
    if (!entry || !(entry->shape == tensor.slices[s].box.size) || entry->dtype != tensor.dtype)
      throw fault(path, slice_name(tensor, tensor.slices[s]) + " is not there as the manifest says");
  }
  if (open->entries().size() != file.slices.size())
    throw fault(path, fmt::format("holds {} tensors, {} by the manifest", open->entries().size(), file.slices.size()));
  file.open = std::move(open);
  return *file.open;
}

void CheckpointReader::check_files() const {
  for (size_t i = 0; i < files_.size(); ++i) open_file(i);
}

const CheckpointTensor* CheckpointReader::find(const std::string& name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

void CheckpointReader::read(const std::string& name, const View& target) const {
  const CheckpointTensor* tensor = find(name);
  if (!tensor) throw Error(ErrorCode::kCheckpoint, path_, "tensor " + json_quote(name) + " is missing");
  if (!(tensor->shape == target.shape))
    throw Error(ErrorCode::kCheckpoint, path_,
                fmt::format("tensor {} has shape {}, {} was expected", json_quote(name), tensor->shape.str(),
                            target.shape.str()));
  read_part(*tensor, whole_box(tensor->shape), target);
}

void CheckpointReader::read_part(const CheckpointTensor& tensor, const Box& box, const View& target) const {
  CHECK(target.dense() && target.shape == box.size, "{} into {}", box.str(), target.shape.str());
  for (const StoredSlice& slice : tensor.slices) {
    const Box part = intersection(slice.box, box);
    if (part.empty()) continue;
    const SafetensorsFile& file = open_file(slice.file);
    const SafetensorsEntry& entry = *file.find(tensor.name);
    if (!can_convert(entry.dtype, target.dtype))
      throw Error(ErrorCode::kCheckpoint, file.path(),
                  fmt::format("tensor {} has dtype {}, {} was expected", json_quote(tensor.name),
                              dtype_name(entry.dtype), dtype_name(target.dtype)));
    const bool covered = part == slice.box;
    Hash64 hash;
    copy_box(entry.data, entry.dtype, slice.box, target.data, target.dtype, box, part, covered ? &hash : nullptr);
    if (covered && hash.digest() != slice.hash) throw damaged(tensor, slice);
  }
}

Error CheckpointReader::damaged(const CheckpointTensor& tensor, const StoredSlice& slice) const {
  return fault(path_ + "/" + files_[slice.file].name,
               slice_name(tensor, slice) + " is damaged: its hash does not match the manifest");
}

void CheckpointReader::verify_slice(const CheckpointTensor& tensor, const StoredSlice& slice) const {
  const SafetensorsEntry& entry = *open_file(slice.file).find(tensor.name);
  if (hash64(entry.data, static_cast<size_t>(entry.bytes)) != slice.hash) throw damaged(tensor, slice);
}

void CheckpointReader::verify(const TensorProgress& progress, int rank, int ranks) const {
  for (size_t i = static_cast<size_t>(rank); i < files_.size(); i += static_cast<size_t>(ranks)) open_file(i);
  std::vector<int64_t> bytes;
  for (const CheckpointTensor& tensor : tensors_)
    for (const StoredSlice& slice : tensor.slices) bytes.push_back(slice.box.elements() * dtype_bytes(tensor.dtype));
  const std::vector<int> owners = deal(bytes, ranks);
  int64_t done = 0;
  size_t number = 0;
  for (const CheckpointTensor& tensor : tensors_) {
    for (const StoredSlice& slice : tensor.slices)
      if (owners[number++] == rank) verify_slice(tensor, slice);
    if (progress) progress(++done, static_cast<int64_t>(tensors_.size()));
  }
}

uint64_t CheckpointReader::tensor_hash(const CheckpointTensor& tensor) const {
  if (tensor.slices.size() == 1) return tensor.slices[0].hash;
  std::vector<std::byte> values(static_cast<size_t>(tensor.bytes()));
  read_part(tensor, whole_box(tensor.shape), View(values.data(), tensor.shape, tensor.dtype));
  return hash64(values.data(), values.size());
}

}  // namespace concerto
