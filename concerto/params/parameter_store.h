// All parameters of a stage in one store, laid out from arch::tensor_specs and keyed by name: compute copies, master
// weights, gradients and the two optimizer moments are flat buffers with the same layout, so a tensor is the same slice
// of each. Lends views to layers, optimizer and checkpoint.
//
// Matrices exist in the compute type C for the products; norms, biases, the router and its correction bias are read in
// the stat type, straight from the master weights. When C is the stat type there is no second copy. Weights for
// inference have neither gradients nor moments.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "concerto/arch/model_spec.h"
#include "concerto/base/thread_pool.h"
#include "concerto/tensor/arena.h"

namespace concerto {

// A run of specs that lie without a gap, seen as one tensor.
struct ParamRef {
  int first = -1, count = 0;
  Shape shape;
  explicit operator bool() const { return first >= 0; }
};

enum class StoreUse { kTrain, kInfer };

class ParameterStore {
 public:
  // `moments`: bf16, or f32 for the stat type.
  ParameterStore(std::vector<TensorSpec> specs, DType compute, StoreUse use, DType moments = DType::kF32);

  const std::vector<TensorSpec>& specs() const { return specs_; }
  int size() const { return static_cast<int>(specs_.size()); }
  DType compute() const { return compute_; }
  DType stat() const { return stat_; }
  bool trains() const { return use_ == StoreUse::kTrain; }
  int find(const std::string& name) const;      // -1 if absent
  ParamRef ref(const std::string& name) const;  // one tensor; empty if absent
  ParamRef ref(const std::string& name, Shape as) const;
  ParamRef fused(const std::string& first_name, int count, Shape shape) const;

  // What a layer reads: compute type for matrices, stat type for the rest.
  View weight(ParamRef r) const;
  View grad(ParamRef r) const;  // stat type
  // By spec index, for optimizer and checkpoint.
  View master(int i) const;  // stat type; Bug in an inference store whose compute type is narrower
  View copy(int i) const;    // compute copy that must follow the master; null if none
  View gradient(int i) const;
  View moment1(int i) const;  // moments' type
  View moment2(int i) const;

  // Sets tensor i from f32 values (rounds to the compute type as well).
  void set(int i, const float* values);
  void get(int i, float* values) const;  // as f32, from the master if there is one
  void refresh_copies();                 // compute copies from masters
  void zero_gradients(ThreadPool& pool);
  // Normal draws by (seed, name, element): independent of layout and of other tensors. Norms become one, biases zero.
  void initialize(const ModelConfig& config, Init method, uint64_t seed, ThreadPool& pool);

  int64_t elements() const { return elements_; }
  static int64_t predicted_bytes(const std::vector<TensorSpec>& specs, DType compute, StoreUse use,
                                 DType moments = DType::kF32);
  int64_t bytes() const { return predicted_bytes(specs_, compute_, use_, moments_); }

 private:
  View slice(const Buffer& buffer, int64_t offset, DType dtype, const Shape& shape) const;
  bool has_copy(int i) const;

  std::vector<TensorSpec> specs_;
  DType compute_, stat_, moments_;
  StoreUse use_;
  std::vector<int64_t> offsets_;       // elements, in masters, gradients, moments
  std::vector<int64_t> copy_offsets_;  // elements, in compute copies; -1: none
  std::unordered_map<std::string, int> index_;
  int64_t elements_ = 0, copy_elements_ = 0;
  Buffer master_, copies_, gradients_, moment1_, moment2_;
};

}  // namespace concerto
