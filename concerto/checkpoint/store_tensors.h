// Between a parameter store and files: Hugging Face folders in and out, and the named tensors of a checkpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/hf_folder.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

// Fills the store, which may hold any rank's part of the model, from DIR. Error(kModel) names what is missing, extra or misshapen. Returns what a user should know, a
// line each.
std::vector<std::string> load_hf_weights(const std::string& dir, const ModelConfig& config, ParameterStore& store);
std::unique_ptr<ParameterStore> load_hf_store(const std::string& dir, const ModelConfig& config, DType compute,
                                              StoreUse use);
// `owned`, by spec: whether this rank is the one that writes its part of the tensor; empty: of all.
void export_hf_store(const std::string& dir, const ModelConfig& config, const ParameterStore& store,
                     const HfExport& options, Communicator* world = nullptr, const std::vector<uint8_t>& owned = {});

// Master weights and, of a training store, the moments that it has: views into the store.
std::vector<NamedTensor> checkpoint_tensors(const ParameterStore& store, const std::vector<uint8_t>& owned = {});

DType compute_dtype(const std::string& name);  // training.dtype: "bf16" | "f32" | "f64"

}  // namespace concerto
