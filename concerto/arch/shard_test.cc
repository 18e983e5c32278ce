// The shards of all ranks of a layout cover every tensor of the model exactly once a replica.
#include "concerto/arch/shard.h"

#include <gtest/gtest.h>

#include <map>

#include "concerto/base/part.h"

namespace concerto {
namespace {

ModelConfig model() {
  ModelConfig c;
  c.vocab_size = 101;
  c.hidden_size = 24;
  c.intermediate_size = 37;
  c.num_hidden_layers = 5;
  c.num_attention_heads = 6;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.moe_num_experts = 7;
  c.moe_k = 2;
  c.moe_intermediate_size = 11;
  c.moe_num_shared_experts = 1;
  c.moe_layer_start_index = 1;
  c.moe_layer_end_index = 4;
  c.moe_layer_interval = 1;
  c.use_bias = true;
  c.num_nextn_predict_layers = 1;
  return c;
}

// How often each element of each tensor is held, summed over `plans`.
std::map<std::string, std::vector<int>> coverage(const ModelConfig& c, const std::vector<ShardPlan>& plans) {
  std::map<std::string, std::vector<int>> held;
  for (const TensorSpec& s : tensor_specs(c)) held[s.name].resize(static_cast<size_t>(s.shape.elements()));
  for (const ShardPlan& plan : plans)
    for (const TensorSpec& s : tensor_specs(c, plan)) {
      const Shape whole = s.whole();
      const int64_t cols = whole.rank() == 2 ? whole[1] : 1, own_cols = s.shape.rank() == 2 ? s.shape[1] : 1;
      const int64_t row0 = s.cut_dim == 0 ? s.cut_begin : 0, col0 = s.cut_dim == 1 ? s.cut_begin : 0;
      for (int64_t i = 0; i < s.shape[0]; ++i)
        for (int64_t j = 0; j < own_cols; ++j) ++held.at(s.name)[static_cast<size_t>((row0 + i) * cols + col0 + j)];
    }
  return held;
}

TEST(Shard, OneRankHoldsTheModel) {
  const ModelConfig c = model();
  const auto whole = tensor_specs(c), own = tensor_specs(c, ShardPlan{});
  ASSERT_EQ(own.size(), whole.size());
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_EQ(own[i].name, whole[i].name);
    EXPECT_TRUE(own[i].shape == whole[i].shape);
    EXPECT_EQ(own[i].cut_dim, -1);
  }
}

TEST(Shard, TensorParallelRanksHoldEveryElement) {
  const ModelConfig c = model();
  for (const int tp : {1, 2, 3, 6}) {
    std::vector<ShardPlan> plans;
    for (int r = 0; r < tp; ++r) plans.push_back({.tp = tp, .tp_rank = r});
    std::map<std::string, Replicas> replicas;
    bool fits = c.num_key_value_heads % tp == 0 || tp % c.num_key_value_heads == 0;
    if (!fits) {
      EXPECT_THROW(coverage(c, plans), std::exception);
      continue;
    }
    for (const TensorSpec& s : tensor_specs(c, plans[0])) replicas[s.name] = s.replicas;
    for (const auto& [name, held] : coverage(c, plans))
      for (const int n : held) {
        const int wanted = replicas.at(name) == Replicas::kDp   ? 1
                           : replicas.at(name) == Replicas::kKv ? tp / static_cast<int>(c.num_key_value_heads)
                                                                : tp;
        ASSERT_EQ(n, wanted) << name << " tp " << tp;
      }
  }
}

TEST(Shard, ExpertsLieOnTheirRank) {
  ModelConfig c = model();
  for (const int ep : {1, 2, 3, 5, 7})
    for (const int etp : {1, 2}) {
      std::vector<ShardPlan> plans;
      for (int e = 0; e < ep; ++e)
        for (int t = 0; t < etp; ++t) plans.push_back({.etp = etp, .etp_rank = t, .ep = ep, .ep_rank = e});
      for (const auto& [name, held] : coverage(c, plans))
        for (const int n : held)
          ASSERT_EQ(n, name.find(".experts.") != std::string::npos ? 1 : ep * etp) << name << ep << etp;
      for (int e = 0; e < c.moe_num_experts; ++e) {
        const int owner = expert_owner(c, plans[0], e);
        EXPECT_LE(part_begin(c.moe_num_experts, ep, owner), e);
        EXPECT_GT(part_begin(c.moe_num_experts, ep, owner + 1), e);
      }
    }
  const ShardPlan placed{.ep = 2, .ep_rank = 1, .rank_of_expert = {1, 0, 0, 1, 1, 0, 1}};
  EXPECT_EQ(local_experts(c, placed, 1), (std::vector<int>{0, 3, 4, 6}));
}

TEST(Shard, StagesShareLayersAndTheEmbeddingOfATiedHead) {
  ModelConfig c = model();
  const std::vector<StageSpan> spans{{0, 2, true, false}, {2, 2, false, false}, {2, 5, false, true}};
  for (const bool tied : {false, true}) {
    c.tie_word_embeddings = tied;
    c.num_nextn_predict_layers = 0;
    std::vector<ShardPlan> plans;
    for (const StageSpan& s : spans) plans.push_back({.stages = {s}});
    for (const auto& [name, held] : coverage(c, plans))
      for (const int n : held) ASSERT_EQ(n, tied && name == "model.embed_tokens.weight" ? 2 : 1) << name;
    EXPECT_EQ(tensor_specs(c, plans[0])[0].replicas, tied ? Replicas::kEmbedding : Replicas::kDp);
    EXPECT_TRUE(tensor_specs(c, plans[1]).empty());
    const ShardPlan v{.stages = {spans[0], spans[2]}};  // first and last on one rank: nothing is held twice
    EXPECT_EQ(tensor_specs(c, v)[0].replicas, Replicas::kDp);
  }
}

}  // namespace
}  // namespace concerto
