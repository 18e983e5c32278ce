// What one rank of a parallel job holds of the model: which layers (pipeline), which slices of matrices (tensor
// parallel, reference 7.5), which experts (expert parallel). A rank's tensors keep their global names and expert ids.
#pragma once

#include <vector>

#include "concerto/arch/model_spec.h"

namespace concerto {

// Layers [first_layer, last_layer) of a virtual pipeline stage; may be none. The head comes with final norm, loss and
// multi-token prediction.
struct StageSpan {
  int64_t first_layer = 0, last_layer = 0;
  bool embedding = false, head = false;
};

struct ShardPlan {
  int tp = 1, tp_rank = 0;
  int etp = 1, etp_rank = 0;
  int ep = 1, ep_rank = 0;
  std::vector<StageSpan> stages;    // virtual stages of this rank, in the order of the model; empty: the whole model
  std::vector<int> rank_of_expert;  // [E] which ep rank holds expert e; empty: contiguous blocks (part_of)
};

// The ids of the experts that ep rank `rank` holds, ascending.
std::vector<int> local_experts(const ModelConfig& config, const ShardPlan& plan, int rank);
// The ep rank that holds an expert.
int expert_owner(const ModelConfig& config, const ShardPlan& plan, int expert);

// The rank's tensors in the order of tensor_specs(config): names and roles are the model's, shapes the rank's, and
// `full_shape`, `cut_dim`, `cut_begin`, `replicas` say which part of the whole they are.
std::vector<TensorSpec> tensor_specs(const ModelConfig& config, const ShardPlan& plan);

// Query and key/value heads of a tp rank: with fewer key/value heads than ranks, neighbours hold the same one.
struct HeadRange {
  int64_t q_begin = 0, q_count = 0, kv_begin = 0, kv_count = 0;
};
HeadRange local_heads(const ModelConfig& config, int tp, int tp_rank);

}  // namespace concerto
