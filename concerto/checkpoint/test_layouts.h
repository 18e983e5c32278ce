// For tests: a small model cut over the ranks of a layout, with values that say where they belong.
#pragma once

#include <string>
#include <vector>

#include "concerto/arch/shard.h"
#include "concerto/base/part.h"
#include "concerto/base/rng.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/topology/mesh.h"

namespace concerto {

inline ModelConfig layout_model() {
  ModelConfig c;
  c.vocab_size = 41;
  c.hidden_size = 24;
  c.intermediate_size = 17;
  c.num_hidden_layers = 4;
  c.num_attention_heads = 6;
  c.num_key_value_heads = 1;  // held by all tp ranks
  c.head_dim = 4;
  c.moe_num_experts = 7;
  c.moe_k = 2;
  c.moe_intermediate_size = 5;
  c.moe_num_shared_experts = 1;
  c.moe_layer_end_index = 3;
  c.use_bias = true;
  c.num_nextn_predict_layers = 1;  // the last stage has a copy of the embedding
  return c;
}

struct TestLayout {
  std::string name;
  MeshSizes mesh;
  std::vector<std::vector<StageSpan>> stages = {};  // by pp rank; empty: the whole model on each
  std::vector<int> rank_of_expert = {};
  bool zero = false;  // moments only where the tensor is owned

  ShardPlan plan(int rank) const {
    const MeshPlace at = Mesh(mesh).place(rank);
    ShardPlan plan{mesh.tp, at.tp, mesh.etp, at.etp, mesh.ep, at.ep, {}, rank_of_expert};
    if (!stages.empty()) plan.stages = stages[static_cast<size_t>(at.pp)];
    return plan;
  }
};

// tp, ep and pp alone and mixed, uneven everywhere.
inline std::vector<TestLayout> test_layouts() {
  const std::vector<std::vector<StageSpan>> two{{{0, 3, true, false}}, {{3, 4, false, true}}};
  const std::vector<std::vector<StageSpan>> three{{{0, 3, true, false}}, {{3, 3, false, false}}, {{3, 4, false, true}}};
  const std::vector<std::vector<StageSpan>> v_shape{{{0, 1, true, false}, {3, 4, false, true}}, {{1, 2}, {2, 3}}};
  return {{"one", {}},
          {"tp2", {.tp = 2}},
          {"tp3", {.tp = 3}},
          {"dp4-ep4-zero", {.dp = 4, .ep = 4}, {}, {}, true},
          {"pp3", {.pp = 3}, three},
          {"pp2-v-dp2-zero", {.dp = 2, .pp = 2}, v_shape, {}, true},
          {"tp2-dp2-ep2-etp2", {.tp = 2, .dp = 2, .ep = 2, .etp = 2}},
          {"tp2-dp2-pp2-ep4-moved-zero", {.tp = 2, .dp = 2, .pp = 2, .ep = 4}, two, {3, 0, 2, 2, 0, 2, 2}, true},
          {"tp3-pp2-etp3", {.tp = 3, .pp = 2, .etp = 3}, two}};
}

// What a tensor's element is, by its name and its place in the whole.
inline float element_of(const std::string& name, int64_t index) {
  return static_cast<float>(
             static_cast<int64_t>((fnv1a(name, kFnvBasis) + static_cast<uint64_t>(index) * 7919) % 9973) - 4000) /
         1024;
}

// A rank's tensors and their memory.
class RankState {
 public:
  RankState(const ModelConfig& model, const TestLayout& layout, int rank) {
    for (const TensorSpec& spec : tensor_specs(model, layout.plan(rank))) {
      const std::vector<int> holders = holders_of(model, layout, spec);
      const bool owned = rank == holders[fnv1a(spec.name, kFnvBasis) % holders.size()];
      add(kWeightPrefix, spec, owned);
      if (!spec.trainable || (layout.zero && !owned)) continue;
      add(kMoment1Prefix, spec, owned);
      add(kMoment2Prefix, spec, owned);
    }
  }

  std::vector<NamedTensor>& tensors() { return tensors_; }
  NamedTensor& find(const std::string& name) {
    for (NamedTensor& t : tensors_)
      if (t.name == name) return t;
    throw Bug(name + " is not here");
  }
  void fill() {
    each([](float& value, const std::string& name, int64_t at) { value = element_of(name, at); });
  }
  void poison() {
    each([](float& value, const std::string&, int64_t) { value = -12345; });
  }
  // The name of the first tensor with a wrong element; empty: none has.
  std::string wrong() const {
    std::string found;
    each([&](const float& value, const std::string& name, int64_t at) {
      if (found.empty() && value != element_of(name, at)) found = name;
    });
    return found;
  }

  // The ranks of a layout with the same part of a tensor.
  static std::vector<int> holders_of(const ModelConfig& model, const TestLayout& layout, const TensorSpec& spec) {
    static thread_local std::string key;
    static thread_local std::vector<std::vector<TensorSpec>> ranks;  // one layout is asked for again and again
    if (key != layout.name) {
      ranks.clear();
      for (int r = 0; r < layout.mesh.world(); ++r) ranks.push_back(tensor_specs(model, layout.plan(r)));
      key = layout.name;
    }
    std::vector<int> holders;
    for (int r = 0; r < layout.mesh.world(); ++r)
      for (const TensorSpec& s : ranks[static_cast<size_t>(r)])
        if (s.name == spec.name && s.cut_begin == spec.cut_begin && s.shape == spec.shape) holders.push_back(r);
    return holders;
  }

 private:
  void add(std::string_view prefix, const TensorSpec& spec, bool owned) {
    values_.emplace_back(static_cast<size_t>(spec.shape.elements()));
    tensors_.push_back({std::string(prefix) + spec.name, View(values_.back().data(), spec.shape, DType::kF32),
                        spec.expert, spec.whole(), spec.cut_dim, spec.cut_begin, owned});
  }
  template <class F>
  void each(F&& f) const {
    for (const NamedTensor& t : tensors_) {
      const Shape& whole = t.whole();
      const int64_t cols = whole.rank() == 2 ? whole[1] : 1, own_cols = whole.rank() == 2 ? t.view.shape[1] : 1;
      const int64_t row0 = t.cut_dim == 0 ? t.cut_begin : 0, col0 = t.cut_dim == 1 ? t.cut_begin : 0;
      auto* value = static_cast<float*>(t.view.data);
      for (int64_t i = 0; i < t.view.elements(); ++i)
        f(value[i], t.name, (row0 + i / own_cols) * cols + col0 + i % own_cols);
    }
  }

  std::vector<NamedTensor> tensors_;
  std::vector<std::vector<float>> values_;
};

}  // namespace concerto
