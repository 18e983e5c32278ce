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
    weights.read_part(s, View(values.data(), s.shape, DType::kF32));
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

namespace {

NamedTensor named(std::string_view prefix, const TensorSpec& s, View view, bool owned) {
  return {std::string(prefix) + s.name, view, s.expert, s.whole(), s.cut_dim, s.cut_begin, owned};
}

bool owns(const std::vector<uint8_t>& owned, int i) { return owned.empty() || owned[static_cast<size_t>(i)]; }

}  // namespace

void export_hf_store(const std::string& dir, const ModelConfig& config, const ParameterStore& store,
                     const HfExport& options, Communicator* world, const std::vector<uint8_t>& owned) {
  std::vector<NamedTensor> weights;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    weights.push_back(named(kWeightPrefix, s, View(nullptr, s.shape, DType::kF32), owns(owned, i)));
  }
  std::vector<float> values;
  const auto source = [&](const NamedTensor& weight) {
    values.resize(static_cast<size_t>(weight.view.elements()));
    store.get(store.find(weight.name.substr(kWeightPrefix.size())), values.data());
    return View(values.data(), weight.view.shape, DType::kF32);
  };
  write_hf_slices(dir, config, weights, source, options, world);
}

std::vector<NamedTensor> checkpoint_tensors(const ParameterStore& store, const std::vector<uint8_t>& owned) {
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    tensors.push_back(named(kWeightPrefix, s, store.master(i), owns(owned, i)));
    if (!store.trains() || !s.trainable || !store.updates(i)) continue;
    tensors.push_back(named(kMoment1Prefix, s, store.moment1(i), owns(owned, i)));
    tensors.push_back(named(kMoment2Prefix, s, store.moment2(i), owns(owned, i)));
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
