#include "concerto/arch/shard.h"

#include <algorithm>

#include "concerto/base/error.h"
#include "concerto/base/part.h"

namespace concerto {
namespace {

bool ends_with(const std::string& name, const char* end) { return name.ends_with(end); }

class Sharder {
 public:
  Sharder(const ModelConfig& config, const ShardPlan& plan) : c_(config), plan_(plan) {
    if (plan_.stages.empty()) plan_.stages = {{0, c_.num_hidden_layers, true, true}};
    for (const StageSpan& s : plan_.stages) {
      embedding_ = embedding_ || s.embedding;
      head_ = head_ || s.head;
    }
  }

  bool holds(const TensorSpec& s) const {
    if (s.expert >= 0 && expert_owner(c_, plan_, s.expert) != plan_.ep_rank) return false;
    if (s.role == TensorRole::kEmbedding) return embedding_ || (head_ && head_reads_embedding());
    if (s.layer < 0 || s.layer >= c_.num_hidden_layers) return head_;
    return std::any_of(plan_.stages.begin(), plan_.stages.end(),
                       [&](const StageSpan& span) { return s.layer >= span.first_layer && s.layer < span.last_layer; });
  }

  void cut(TensorSpec& s) const {
    const Part width_tp = part_of(s.shape[s.role == TensorRole::kMlpDown || s.role == TensorRole::kSharedDown ? 1 : 0],
                                  plan_.tp, plan_.tp_rank);
    switch (s.role) {
      case TensorRole::kEmbedding:
        slice(s, 0, width_tp, embedding_ != head_ && head_reads_embedding() ? Replicas::kEmbedding : Replicas::kDp);
        break;
      case TensorRole::kHead:
      case TensorRole::kMlpIn:
      case TensorRole::kSharedIn:
        slice(s, 0, width_tp, Replicas::kDp);
        break;
      case TensorRole::kMlpDown:
      case TensorRole::kSharedDown:
        slice(s, 1, width_tp, Replicas::kDp);
        break;
      case TensorRole::kAttentionIn:
        cut_heads(s);
        break;
      case TensorRole::kAttentionOut:
        slice(s, 1, query_rows(), Replicas::kDp);
        break;
      case TensorRole::kExpertIn:
        slice(s, 0, part_of(s.shape[0], plan_.etp, plan_.etp_rank), Replicas::kEdp);
        break;
      case TensorRole::kExpertDown:
        slice(s, 1, part_of(s.shape[1], plan_.etp, plan_.etp_rank), Replicas::kEdp);
        break;
      case TensorRole::kBias:
        cut_bias(s, width_tp);
        break;
      case TensorRole::kNorm:
      case TensorRole::kRouter:
      case TensorRole::kCorrectionBias:
      case TensorRole::kMtpProjection:
        s.replicas = Replicas::kStage;
        break;
    }
  }

 private:
  bool head_reads_embedding() const { return c_.tie_word_embeddings || c_.num_nextn_predict_layers > 0; }

  Part query_rows() const {
    const HeadRange h = local_heads(c_, plan_.tp, plan_.tp_rank);
    return {h.q_begin * c_.head_dim, h.q_count * c_.head_dim};
  }

  void cut_heads(TensorSpec& s) const {
    if (s.name.find(".q_proj.") != std::string::npos) return slice(s, 0, query_rows(), Replicas::kDp);
    const HeadRange h = local_heads(c_, plan_.tp, plan_.tp_rank);
    slice(s, 0, {h.kv_begin * c_.head_dim, h.kv_count * c_.head_dim},
          c_.num_key_value_heads < plan_.tp ? Replicas::kKv : Replicas::kDp);
  }

  // Biases of products that are summed over tp are added once, after the sum, and belong to everybody.
  void cut_bias(TensorSpec& s, Part width_tp) const {
    if (ends_with(s.name, "q_proj.bias") || ends_with(s.name, "k_proj.bias") || ends_with(s.name, "v_proj.bias"))
      return cut_heads(s);
    if (ends_with(s.name, "gate_proj.bias") || ends_with(s.name, "up_proj.bias") || s.name == "lm_head.bias")
      return slice(s, 0, width_tp, Replicas::kDp);
    s.replicas = Replicas::kStage;
  }

  void slice(TensorSpec& s, int dim, Part part, Replicas replicas) const {
    s.replicas = replicas;
    if (part.begin == 0 && part.count == s.shape[dim]) return;
    s.full_shape = s.shape;
    s.cut_dim = dim;
    s.cut_begin = part.begin;
    s.shape = s.shape.rank() == 1 ? Shape{part.count}
              : dim == 0          ? Shape{part.count, s.full_shape[1]}
                                  : Shape{s.full_shape[0], part.count};
  }

  const ModelConfig& c_;
  ShardPlan plan_;
  bool embedding_ = false, head_ = false;
};

}  // namespace

int expert_owner(const ModelConfig& config, const ShardPlan& plan, int expert) {
  if (!plan.rank_of_expert.empty()) return plan.rank_of_expert[static_cast<size_t>(expert)];
  // The greatest rank whose block begins at the expert or before it.
  const int64_t experts = config.moe_num_experts;
  int64_t rank = (static_cast<int64_t>(expert) * plan.ep + plan.ep - 1) / experts;
  while (rank > 0 && part_begin(experts, plan.ep, rank) > expert) --rank;
  while (rank + 1 < plan.ep && part_begin(experts, plan.ep, rank + 1) <= expert) ++rank;
  return static_cast<int>(rank);
}

std::vector<int> local_experts(const ModelConfig& config, const ShardPlan& plan, int rank) {
  std::vector<int> experts;
  for (int e = 0; e < config.moe_num_experts; ++e)
    if (expert_owner(config, plan, e) == rank) experts.push_back(e);
  return experts;
}

HeadRange local_heads(const ModelConfig& c, int tp, int tp_rank) {
  const int64_t q = c.num_attention_heads, kv = c.num_key_value_heads;
  CHECK(q % tp == 0 && (kv % tp == 0 || tp % kv == 0), "{} query and {} key/value heads on {} ranks", q, kv, tp);
  HeadRange h;
  h.q_count = q / tp;
  h.q_begin = h.q_count * tp_rank;
  h.kv_count = std::max<int64_t>(1, kv / tp);
  h.kv_begin = kv >= tp ? h.kv_count * tp_rank : tp_rank * kv / tp;
  return h;
}

std::vector<TensorSpec> tensor_specs(const ModelConfig& config, const ShardPlan& plan) {
  const Sharder sharder(config, plan);
  std::vector<TensorSpec> specs;
  for (TensorSpec& s : tensor_specs(config)) {
    if (!sharder.holds(s)) continue;
    sharder.cut(s);
    specs.push_back(std::move(s));
  }
  return specs;
}

}  // namespace concerto
