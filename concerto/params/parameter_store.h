// All parameters of a stage in one store, laid out from arch::tensor_specs and keyed by name: compute copies, master
// weights, gradients and the two optimizer moments are flat buffers with the same layout, so a tensor is the same slice
// of each. Lends views to layers, optimizer and checkpoint.
//
// Matrices exist in the compute type C for the products; norms, biases, the router and its correction bias are read in
// the stat type, straight from the master weights. When C is the stat type there is no second copy. Weights for
// inference have neither gradients nor moments.
//
// Where the backend packs weights of products (ops/packed_weight.h), a training store keeps their compute copies packed
// and in no other form: `weight` then has a shape and no memory, and `packed` says where they lie. Embeddings are then
// looked up in the master weights.
//
// Gradients of products need no zeros to be added to: after `clear_gradients` the first product of a step writes, later
// ones add (`product_gradient`). `settle_gradients` zeroes what no product has written.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "concerto/arch/model_spec.h"
#include "concerto/ops/backend.h"

namespace concerto {

// A run of specs that lie without a gap, seen as one tensor.
struct ParamRef {
  int first = -1, count = 0;
  Shape shape;
  explicit operator bool() const { return first >= 0; }
};

enum class StoreUse { kTrain, kInfer };

// kAll: a step's gradients of all tensors. kUpdated (ZeRO-2): those of updated tensors; backward works in memory that
// holds one layer at a time (all others, the embedding and the head, have theirs), which is summed over ranks and given
// back (`add_layer`) before the next layer's.
enum class GradientsOf { kAll, kUpdated };
constexpr int kOutsideLayers = -1;  // as a layer: embedding, head, multi-token prediction

struct ProductGradient {
  View view;
  bool accumulate = true;
};

class ParameterStore {
 public:
  // `packs_for`: whose packing a training store uses, or null. `moments`: bf16, or f32 for the stat type. `updated`: by
  // spec, whether this rank updates it and so has its moments; empty: all. `gradients`: of which tensors sums are kept.
  ParameterStore(std::vector<TensorSpec> specs, DType compute, StoreUse use, const Backend* packs_for = nullptr,
                 DType moments = DType::kF32, const std::vector<uint8_t>& updated = {},
                 GradientsOf gradients = GradientsOf::kAll);

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
  View table(ParamRef r) const;  // for look-ups: of the compute or the stat type
  // The weight packed, all of a fused run; null if it is not. Packs first what was set since the last time.
  PackedWeight packed(const Context& ctx, ParamRef r) const;
  View grad(ParamRef r) const;  // stat type; zeros or sums, to be added to
  // For the product whose result is the gradient of r in one micro-batch. Asking counts as writing, but in a dry run.
  ProductGradient product_gradient(const Context& ctx, ParamRef r) const;
  // By spec index, for optimizer and checkpoint.
  View master(int i) const;  // stat type; Bug in an inference store whose compute type is narrower
  View copy(int i) const;    // compute copy that must follow the master; null if there is none or it is packed
  PackedWeight packed_from(int i) const;  // of the fused run that begins with tensor i; null if none
  View gradient(int i) const;             // with kUpdated: Bug unless updates(i)
  View working_gradient(int i) const;     // what backward writes: the same with kAll
  // Backward has written all that it will of a layer: what no product wrote is zero.
  void settle_layer(ThreadPool& pool, int layer) const;
  // kUpdated: adds what lies in the working memory to the gradients of updated tensors, and clears it.
  void add_layer(const Context& ctx, int layer) const;
  GradientsOf gradients_of() const { return gradients_of_; }
  int layer_of(int i) const;  // kOutsideLayers, or a decoder layer
  bool updates(int i) const { return moment_offsets_[i] >= 0; }
  View moment1(int i) const;  // moments' type; Bug unless updates(i)
  View moment2(int i) const;

  // Sets tensor i from f32 values (rounds to the compute type as well).
  void set(int i, const float* values);
  void get(int i, float* values) const;  // as f32, from the master if there is one
  void refresh_copies();                 // compute copies from masters, packed ones when they are next read
  void packed_copies_changed();          // the masters have changed, their packed copies have not
  void packed_copy_changed(int i);       // likewise, of the run that tensor i is in; none: nothing happens
  void refresh_copy(int i);              // of one tensor
  void clear_gradients(ThreadPool& pool);
  void settle_gradients(ThreadPool& pool) const;
  // Normal draws by (seed, name, element): independent of layout and of other tensors. Norms become one, biases zero.
  void initialize(const ModelConfig& config, Init method, uint64_t seed, ThreadPool& pool);

  int64_t elements() const { return elements_; }
  int64_t bytes() const;

 private:
  // A fused run of products' weights as [groups, n, k], packed in packs_.
  struct PackedRun {
    int first = 0, count = 0;
    PackedWeight place;
  };

  View slice(const Buffer& buffer, int64_t offset, DType dtype, const Shape& shape) const;
  bool has_copy(int i) const;
  bool wants_copy(int i) const;
  void find_packed_runs(const Backend& backend);
  void pack_stale(const Context& ctx) const;
  void zero(ThreadPool& pool, int first, int count) const;
  void lay_out_work();
  View working(int first, const Shape& shape) const;

  std::vector<TensorSpec> specs_;
  DType compute_, stat_, moments_;
  StoreUse use_;
  GradientsOf gradients_of_;
  std::vector<int64_t> work_offsets_;    // kUpdated: elements, in work_
  std::vector<int64_t> offsets_;         // elements, in masters and gradients
  std::vector<int64_t> copy_offsets_;    // elements, in compute copies; -1: none
  std::vector<int64_t> moment_offsets_;  // elements, in moments; -1: none
  std::unordered_map<std::string, int> index_;
  int64_t elements_ = 0, copy_elements_ = 0, moment_elements_ = 0;
  int64_t work_elements_ = 0, layer_elements_ = 0;  // of which the first are those of one layer
  Buffer work_;
  Buffer master_, copies_, gradients_, moment1_, moment2_, packs_;
  std::vector<PackedRun> packed_runs_;
  bool tied_head_ = false;          // products read the embedding too
  std::vector<int> packed_run_of_;  // by spec; -1: not packed
  mutable bool stale_ = true;       // whether packed copies must be made from the masters: of which runs
  mutable std::vector<uint8_t> stale_runs_;
  mutable std::vector<uint8_t> unwritten_;  // by spec: whether its gradient is still that of the last step
};

}  // namespace concerto
