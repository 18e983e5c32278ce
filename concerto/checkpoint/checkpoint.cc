#include "concerto/checkpoint/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "concerto/base/json.h"
#include "concerto/checkpoint/hf_folder.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {
namespace {

constexpr const char* kManifest = "manifest.json";
constexpr const char* kModelConfig = "config.json";
constexpr const char* kUseOlder = "Resume from an older checkpoint (run.resume: PATH).";

struct Candidate {
  std::string path;
  int64_t step, sequence;
};

// Folders named checkpoint-<digits>, the last saved first.
std::vector<Candidate> candidates(const std::string& run_dir) {
  constexpr std::string_view prefix = "checkpoint-";
  std::vector<Candidate> found;
  for (const std::string& name : list_directory(run_dir)) {
    if (!name.starts_with(prefix) || name.size() == prefix.size() || name.size() > prefix.size() + 18) continue;
    const std::string digits = name.substr(prefix.size());
    if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string path = run_dir + "/" + name;
    if (is_directory(path)) found.push_back({path, std::stoll(digits), peek_sequence(path + "/" + kManifest)});
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.sequence, a.step) > std::pair(b.sequence, b.step);
  });
  return found;
}

// Writes one kind of tensors as shards and adds them to the manifest.
void write_shards(const std::string& dir, const std::string& kind, const std::vector<const NamedTensor*>& tensors,
                  const SaveOptions& options, Manifest& manifest) {
  if (tensors.empty()) return;
  std::vector<TensorInfo> infos;
  std::unordered_map<std::string_view, const NamedTensor*> by_name;
  for (const NamedTensor* tensor : tensors) {
    infos.push_back({tensor->name, tensor->view.shape, options.dtype.value_or(tensor->view.dtype)});
    by_name[tensor->name] = tensor;
  }
  const std::vector<size_t> shards = plan_shards(infos, options.max_shard_bytes);
  auto begin = infos.begin();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto end = begin + static_cast<std::ptrdiff_t>(shards[i]);
    const std::string name = fmt::format("{}-{:05}-of-{:05}.safetensors", kind, i + 1, shards.size());
    SafetensorsWriter writer(dir + "/" + name, std::vector<TensorInfo>(begin, end));
    for (const TensorInfo& info : writer.tensors()) {
      const NamedTensor& tensor = *by_name.at(info.name);
      manifest.tensors.push_back(
          {info.name, info.shape, info.dtype, tensor.expert, manifest.files.size(), writer.write(tensor.view)});
    }
    writer.finish();
    manifest.files.push_back({name, writer.bytes(), writer.header_hash()});
    begin = end;
  }
}

// Runs f; what it finds wrong with a model file is a fault of this checkpoint.
template <class F>
void as_checkpoint_error(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    if (e.code != ErrorCode::kModel) throw;
    throw Error(ErrorCode::kCheckpoint, e.where, e.problem, kUseOlder);
  }
}

}  // namespace

std::string follow_latest(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash);
  if (path.substr(slash == std::string::npos ? 0 : slash + 1) != "latest" || is_directory(path) || !path_exists(path))
    return path;
  std::string name = read_text_file(path, 256);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
  return folder + "/" + name;
}

std::string checkpoint_path(const std::string& run_dir, int64_t step) {
  return fmt::format("{}/checkpoint-{}", run_dir, step);
}

std::string save_checkpoint(const std::string& run_dir, const CheckpointMeta& meta,
                            std::span<const NamedTensor> tensors, const SaveOptions& options) {
  std::vector<const NamedTensor*> weights, others;
  std::unordered_set<std::string_view> names;
  for (const NamedTensor& tensor : tensors) {
    CHECK(names.insert(tensor.name).second, "{} twice", tensor.name);
    (tensor.name.starts_with(kWeightPrefix) ? weights : others).push_back(&tensor);
  }
  make_directories(run_dir);
  Manifest manifest;
  manifest.meta = meta;
  manifest.model_config_hash = hash64(meta.model_config);
  manifest.sequence = 1;
  for (const Candidate& other : candidates(run_dir))
    manifest.sequence = std::max(manifest.sequence, other.sequence + 1);

  const std::string path = checkpoint_path(run_dir, meta.step);
  StagedDirectory staged(path);
  write_shards(staged.path(), "weights", weights, options, manifest);
  write_shards(staged.path(), "optimizer", others, options, manifest);
  write_file(staged.path() + "/" + kModelConfig, meta.model_config);
  write_file(staged.path() + "/" + kManifest, manifest_text(manifest));
  staged.commit(true);
  write_file_atomic(run_dir + "/latest", file_name(path) + "\n");
  return path;
}

CheckpointReader::CheckpointReader(const std::string& path) : path_(path) {
  const std::string manifest_path = path + "/" + kManifest;
  if (!path_exists(manifest_path))
    throw Error(ErrorCode::kCheckpoint, path, fmt::format("holds no {}: not a checkpoint", kManifest),
                "Name a folder checkpoint-N of a run.");
  Manifest manifest = parse_manifest(read_text_file(manifest_path, int64_t{1} << 32), manifest_path);
  sequence_ = manifest.sequence;
  meta_ = std::move(manifest.meta);
  tensors_ = std::move(manifest.tensors);

  const auto missing = [](const std::string& file) {
    return Error(ErrorCode::kCheckpoint, file, "is missing", kUseOlder);
  };
  const std::string config_path = path + "/" + kModelConfig;
  if (!path_exists(config_path)) throw missing(config_path);
  meta_.model_config = read_text_file(config_path);
  if (hash64(meta_.model_config) != manifest.model_config_hash)
    throw Error(ErrorCode::kCheckpoint, config_path, "is damaged: its hash does not match the manifest", kUseOlder);

  size_t entries = 0;
  for (const ManifestFile& file : manifest.files) {
    const std::string file_path = path + "/" + file.name;
    if (!path_exists(file_path)) throw missing(file_path);
    as_checkpoint_error([&] { files_.emplace_back(file_path); });
    if (files_.back().bytes() != file.bytes || files_.back().header_hash() != file.header_hash)
      throw Error(ErrorCode::kCheckpoint, file_path, "is damaged: its size or header does not match the manifest",
                  kUseOlder);
    entries += files_.back().entries().size();
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const CheckpointTensor& tensor = tensors_[i];
    const SafetensorsFile& file = files_[tensor.file];
    const SafetensorsEntry* entry = file.find(tensor.name);
    if (!entry || !(entry->shape == tensor.shape) || entry->dtype != tensor.dtype)
      throw Error(ErrorCode::kCheckpoint, file.path(),
                  "tensor " + json_quote(tensor.name) + " is not there as the manifest says", kUseOlder);
    index_.emplace(tensor.name, i);
  }
  if (entries != tensors_.size())
    throw Error(ErrorCode::kCheckpoint, path,
                fmt::format("its files hold {} tensors, its manifest {}", entries, tensors_.size()), kUseOlder);
}

const CheckpointTensor* CheckpointReader::find(const std::string& name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

static Error damaged(const SafetensorsFile& file, const std::string& name) {
  return Error(ErrorCode::kCheckpoint, file.path(),
               "tensor " + json_quote(name) + " is damaged: its hash does not match the manifest", kUseOlder);
}

void CheckpointReader::read(const std::string& name, const View& target) const {
  const CheckpointTensor* tensor = find(name);
  if (!tensor) throw Error(ErrorCode::kCheckpoint, path_, "tensor " + json_quote(name) + " is missing");
  if (!(tensor->shape == target.shape))
    throw Error(ErrorCode::kCheckpoint, path_,
                fmt::format("tensor {} has shape {}, {} was expected", json_quote(name), tensor->shape.str(),
                            target.shape.str()));
  const SafetensorsFile& file = files_[tensor->file];
  Hash64 hash;
  as_checkpoint_error([&] { copy_tensor(file.require(name), target, &hash); });
  if (hash.digest() != tensor->hash) throw damaged(file, name);
}

void CheckpointReader::verify() const {
  for (const CheckpointTensor& tensor : tensors_) {
    const SafetensorsFile& file = files_[tensor.file];
    const SafetensorsEntry& entry = file.require(tensor.name);
    if (hash64(entry.data, static_cast<size_t>(entry.bytes)) != tensor.hash) throw damaged(file, tensor.name);
  }
}

void load_checkpoint(const std::string& path, CheckpointMeta& meta, std::span<const NamedTensor> tensors) {
  const CheckpointReader reader(path);
  TensorFaults faults("the run");
  std::unordered_set<std::string_view> wanted;
  for (const NamedTensor& tensor : tensors) {
    CHECK(wanted.insert(tensor.name).second, "{} twice", tensor.name);
    const CheckpointTensor* have = reader.find(tensor.name);
    if (!have) {
      if (!reader.meta().weights_only || tensor.name.starts_with(kWeightPrefix))
        faults.missing(tensor.name, tensor.view.shape);
    } else if (!(have->shape == tensor.view.shape)) {
      faults.wrong_shape(tensor.name, have->shape, tensor.view.shape);
    } else if (have->dtype != tensor.view.dtype) {
      faults.wrong_dtype(tensor.name, dtype_name(have->dtype), dtype_name(tensor.view.dtype));
    } else if (have->expert != tensor.expert) {
      faults.wrong_expert(tensor.name, have->expert, tensor.expert);
    }
  }
  for (const CheckpointTensor& tensor : reader.tensors())
    if (!wanted.contains(tensor.name)) faults.extra(tensor.name, tensor.shape);
  if (!faults.empty())
    throw Error(ErrorCode::kCheckpoint, path, faults.text("does not fit this run"),
                "\nResume with the settings of the run that wrote it.");
  for (const NamedTensor& tensor : tensors) {
    if (reader.find(tensor.name)) {
      reader.read(tensor.name, tensor.view);
    } else {
      CHECK(tensor.view.dense());
      if (tensor.view.elements() > 0) std::memset(tensor.view.data, 0, static_cast<size_t>(tensor.view.bytes()));
    }
  }
  meta = reader.meta();
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& run_dir) {
  std::vector<CheckpointInfo> infos;
  for (const Candidate& candidate : candidates(run_dir)) {
    CheckpointInfo info{candidate.path, candidate.step, candidate.sequence, std::nullopt, ""};
    try {
      const CheckpointReader reader(candidate.path);
      info.valid_loss = reader.meta().valid_loss;
      if (reader.meta().step != candidate.step) info.fault = fmt::format("holds step {}", reader.meta().step);
    } catch (const Error& e) {
      info.fault = e.what();
    }
    infos.push_back(std::move(info));
  }
  std::sort(infos.begin(), infos.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return infos;
}

LatestCheckpoint find_latest(const std::string& run_dir) {
  LatestCheckpoint latest;
  for (const Candidate& candidate : candidates(run_dir)) {
    try {
      CheckpointReader(candidate.path).verify();
      latest.path = candidate.path;
      latest.step = candidate.step;
      return latest;
    } catch (const Error& e) {
      latest.skipped.push_back(fmt::format("{}: {}", file_name(candidate.path), e.what()));
    }
  }
  return latest;
}

std::vector<std::string> remove_old_checkpoints(const std::string& run_dir, int64_t keep, bool keep_best) {
  CHECK(keep >= 1, "keep {}", keep);
  std::vector<std::string> removed;
  for (const std::string& name : list_directory(run_dir))
    if (name.starts_with("checkpoint-") && name.ends_with(".tmp")) remove_tree(run_dir + "/" + name);
  std::vector<CheckpointInfo> infos = list_checkpoints(run_dir);
  std::erase_if(infos, [](const CheckpointInfo& info) { return !info.fault.empty(); });
  std::sort(infos.begin(), infos.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.sequence > b.sequence; });
  const CheckpointInfo* best = nullptr;
  for (const CheckpointInfo& info : infos)
    if (keep_best && info.valid_loss && !std::isnan(*info.valid_loss) &&
        (!best || *info.valid_loss < *best->valid_loss))
      best = &info;
  for (size_t i = static_cast<size_t>(keep); i < infos.size(); ++i) {
    if (&infos[i] == best) continue;
    // Half removed is not half a checkpoint: it loses its name first.
    rename_path(infos[i].path, infos[i].path + ".tmp");
    remove_tree(infos[i].path + ".tmp");
    removed.push_back(infos[i].path);
  }
  return removed;
}

}  // namespace concerto
