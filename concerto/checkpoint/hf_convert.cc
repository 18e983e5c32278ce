#include "concerto/checkpoint/hf_convert.h"

#include <unordered_set>

#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {

ModelConfig checkpoint_model(const CheckpointReader& checkpoint) {
  return load_model_config(checkpoint.path() + "/config.json");
}

void check_checkpoint_weights(const CheckpointReader& checkpoint, const ModelConfig& model) {
  TensorFaults faults("the model");
  std::unordered_set<std::string> known;
  for (const TensorSpec& spec : tensor_specs(model)) {
    const std::string name = std::string(kWeightPrefix) + spec.name;
    known.insert(name);
    const CheckpointTensor* tensor = checkpoint.find(name);
    if (!tensor)
      faults.missing(name, spec.shape);
    else if (!(tensor->shape == spec.shape))
      faults.wrong_shape(name, tensor->shape, spec.shape);
    else if (tensor->expert != spec.expert)
      faults.wrong_expert(name, tensor->expert, spec.expert);
  }
  for (const CheckpointTensor& tensor : checkpoint.tensors())
    if (tensor.name.starts_with(kWeightPrefix) && !known.contains(tensor.name)) faults.extra(tensor.name, tensor.shape);
  if (!faults.empty())
    throw Error(ErrorCode::kCheckpoint, checkpoint.path(), faults.text("the weights do not fit its config.json"));
}

void export_checkpoint(const CheckpointReader& checkpoint, const std::string& dir, const HfExport& options) {
  const ModelConfig model = checkpoint_model(checkpoint);
  check_checkpoint_weights(checkpoint, model);
  std::vector<float> values;
  write_hf_folder(
      dir, model,
      [&](const TensorSpec& spec) {
        values.resize(static_cast<size_t>(spec.shape.elements()));
        const View view(values.data(), spec.shape, DType::kF32);
        checkpoint.read(std::string(kWeightPrefix) + spec.name, view);
        return view;
      },
      options);
}

std::string reshard_checkpoint(const CheckpointReader& checkpoint, const std::string& run_dir, int64_t max_shard_bytes,
                               const TensorProgress& progress) {
  if (path_exists(run_dir))
    throw Error(ErrorCode::kIo, run_dir, "exists already", "Choose another folder or remove it.");
  std::vector<NamedTensor> tensors;
  for (const CheckpointTensor& tensor : checkpoint.tensors())
    tensors.push_back({tensor.name, View(nullptr, tensor.shape, tensor.dtype), tensor.expert});
  std::vector<std::byte> values;
  SaveOptions options;
  options.max_shard_bytes = max_shard_bytes;
  options.progress = progress;
  options.source = [&](const NamedTensor& tensor) {
    values.resize(static_cast<size_t>(tensor.view.bytes()));
    const View view(values.data(), tensor.view.shape, tensor.view.dtype);
    checkpoint.read(tensor.name, view);
    return view;
  };
  StagedDirectory staged(run_dir);
  save_checkpoint(staged.path(), checkpoint.meta(), tensors, options);
  staged.commit();
  return checkpoint_path(run_dir, checkpoint.meta().step);
}

ImportResult import_hf_folder(const std::string& hf_dir, const std::string& run_dir, const TensorProgress& progress) {
  if (path_exists(run_dir))
    throw Error(ErrorCode::kIo, run_dir, "exists already", "Choose another folder or remove it.");
  const ModelConfig model = load_model_config(hf_dir);
  const HfWeights weights(hf_dir);
  ImportResult result;
  result.notes = weights.check(model);
  std::vector<NamedTensor> tensors;
  for (const TensorSpec& spec : tensor_specs(model)) {
    const SafetensorsEntry* entry = weights.find(spec.name);
    CHECK(entry, "{}", spec.name);
    const View view(const_cast<std::byte*>(entry->data), entry->shape, entry->dtype);
    tensors.push_back({std::string(kWeightPrefix) + spec.name, view, spec.expert});
  }
  CheckpointMeta meta;
  meta.model_config = model_config_json(model, "float32");
  meta.weights_only = true;
  if (!tokenizer_files(hf_dir).empty()) meta.tokenizer = hf_dir;
  StagedDirectory staged(run_dir);
  save_checkpoint(staged.path(), meta, tensors, {.dtype = DType::kF32, .progress = progress, .model = &model});
  staged.commit();
  result.checkpoint = checkpoint_path(run_dir, 0);
  return result;
}

}  // namespace concerto
