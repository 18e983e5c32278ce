#include "concerto/checkpoint/store_tensors.h"

#include <algorithm>

namespace concerto {

std::vector<std::string> load_hf_weights(const std::string& dir, const ModelConfig& config, ParameterStore& store) {
  const HfWeights weights(dir);
  std::vector<std::string> notes = weights.check(config);
  std::vector<float> values;
  bool unused_bias = false;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    const bool is_bias = s.role == TensorRole::kCorrectionBias;
    if (is_bias && !weights.find(s.name)) continue;  // stays zero; checked above
    values.resize(static_cast<size_t>(s.shape.elements()));
    weights.read(s.name, View(values.data(), s.shape, DType::kF32));
    store.set(i, values.data());
    unused_bias = unused_bias || (is_bias && !config.moe_use_aux_free &&
                                  std::any_of(values.begin(), values.end(), [](float b) { return b != 0; }));
  }
  if (unused_bias)
    notes.push_back(dir +
                    ": WARNING: holds a correction bias, but moe_use_aux_free is false, so that the router does not "
                    "look at it; if the model was trained with it, set moe_use_aux_free: true");
  return notes;
}

std::unique_ptr<ParameterStore> load_hf_store(const std::string& dir, const ModelConfig& config, DType compute,
                                              StoreUse use) {
  auto store = std::make_unique<ParameterStore>(tensor_specs(config), compute, use);
  for (const std::string& line : load_hf_weights(dir, config, *store)) fmt::print(stderr, "{}\n", line);
  return store;
}

void export_hf_store(const std::string& dir, const ModelConfig& config, const ParameterStore& store,
                     const HfExport& options) {
  std::vector<float> values;
  const auto source = [&](const TensorSpec& spec) {
    values.resize(static_cast<size_t>(spec.shape.elements()));
    store.get(store.find(spec.name), values.data());
    return View(values.data(), spec.shape, DType::kF32);
  };
  write_hf_folder(dir, config, source, options);
}

std::vector<NamedTensor> checkpoint_tensors(const ParameterStore& store) {
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    tensors.push_back({std::string(kWeightPrefix) + s.name, store.master(i), s.expert});
    if (!store.trains() || !s.trainable) continue;
    tensors.push_back({std::string(kMoment1Prefix) + s.name, store.moment1(i), s.expert});
    tensors.push_back({std::string(kMoment2Prefix) + s.name, store.moment2(i), s.expert});
  }
  return tensors;
}

DType compute_dtype(const std::string& name) {
  if (name == "bf16") return DType::kBF16;
  if (name == "f32") return DType::kF32;
  if (name == "f64") return DType::kF64;
  throw Error(ErrorCode::kConfig, "training.dtype", fmt::format("'{}' is not a type", name), "Use bf16 or f32.");
}

}  // namespace concerto
