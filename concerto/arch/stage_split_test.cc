#include "concerto/arch/stage_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "concerto/base/error.h"

namespace concerto {
namespace {

ModelConfig model() {
  ModelConfig c;
  c.vocab_size = 97;
  c.hidden_size = 16;
  c.intermediate_size = 40;
  c.num_hidden_layers = 7;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.moe_num_experts = 8;
  c.moe_k = 2;
  c.moe_intermediate_size = 24;
  c.moe_num_shared_experts = 1;
  c.moe_layer_interval = 2;
  return c;
}

std::vector<int64_t> counts(const std::vector<StageSpan>& spans) {
  std::vector<int64_t> n;
  for (const StageSpan& s : spans) n.push_back(s.last_layer - s.first_layer);
  return n;
}

std::vector<int64_t> costs(const ModelConfig& c, const std::vector<int64_t>& layers) {
  std::vector<int64_t> all;
  int64_t next = 0;
  for (const int64_t n : layers) {
    all.push_back(0);
    for (int64_t i = 0; i < n; ++i) all.back() += layer_forward_flops(c, next++);
  }
  all.back() += head_forward_flops(c);
  return all;
}

// (greatest cost, sum of squares, layers of each stage): what the split minimises, in this order.
using Rank = std::tuple<int64_t, double, std::vector<int64_t>>;
Rank rank_of(const ModelConfig& c, const std::vector<int64_t>& layers) {
  const auto all = costs(c, layers);
  double squares = 0;
  for (const int64_t x : all) squares += static_cast<double>(x) * static_cast<double>(x);  // exact below 2^53
  return {*std::max_element(all.begin(), all.end()), squares, layers};
}

// The best of all splits of `left` layers over the stages after those in `begun`.
Rank best_split(const ModelConfig& c, int stages, std::vector<int64_t> begun, int64_t left) {
  if (static_cast<int>(begun.size()) == stages - 1) {
    begun.push_back(left);
    return rank_of(c, begun);
  }
  Rank best{INT64_MAX, 0, {}};
  for (int64_t n = 0; n <= left; ++n) {
    auto next = begun;
    next.push_back(n);
    best = std::min(best, best_split(c, stages, next, left - n));
  }
  return best;
}

TEST(StageSplit, IsTheBestOfAllSplits) {
  for (int kind = 0; kind < 24; ++kind) {
    ModelConfig c = model();
    c.num_hidden_layers = 1 + kind % 8;
    c.vocab_size = kind % 3 ? 300 : 10;
    c.num_nextn_predict_layers = kind % 2;
    c.moe_layer_interval = 1 + kind % 3;
    c.moe_k = 1 + kind % 4;
    for (int stages = 1; stages <= 5; ++stages) {
      const auto layers = counts(split_stages(c, stages));
      EXPECT_EQ(layers, std::get<2>(best_split(c, stages, {}, c.num_hidden_layers))) << kind << " " << stages;
    }
  }
}

TEST(StageSplit, SpansFollowEachOtherFromEmbeddingToHead) {
  for (int stages = 1; stages <= 12; ++stages) {
    const auto spans = split_stages(model(), stages);
    ASSERT_EQ(spans.size(), static_cast<size_t>(stages));
    int64_t next = 0;
    for (size_t s = 0; s < spans.size(); ++s) {
      EXPECT_EQ(spans[s].first_layer, next);
      next = spans[s].last_layer;
      EXPECT_EQ(spans[s].embedding, s == 0);
      EXPECT_EQ(spans[s].head, s + 1 == spans.size());
    }
    EXPECT_EQ(next, 7);
  }
}

TEST(StageSplit, HeadAndMultiTokenPredictionTakeRoomFromTheLastStage) {
  ModelConfig c = model();
  c.moe_num_experts = 0;
  c.num_hidden_layers = 8;
  c.vocab_size = 1;
  EXPECT_EQ(counts(split_stages(c, 4)), (std::vector<int64_t>{2, 2, 2, 2}));
  c.vocab_size = layer_forward_flops(c, 0) / (2 * c.hidden_size);  // a head like a layer
  EXPECT_EQ(counts(split_stages(c, 3)), (std::vector<int64_t>{3, 3, 2}));
  c.num_nextn_predict_layers = 1;  // and now like more than three
  EXPECT_EQ(counts(split_stages(c, 3)), (std::vector<int64_t>{4, 4, 0}));
}

TEST(StageSplit, StagesMayBeEmpty) {
  ModelConfig c = model();
  c.moe_num_experts = 0;
  c.num_hidden_layers = 2;
  EXPECT_EQ(counts(split_stages(c, 5)), (std::vector<int64_t>{0, 0, 1, 1, 0}));
}

TEST(StageSplit, ByHand) {
  EXPECT_EQ(counts(split_stages(model(), 3, {4, 0, 3})), (std::vector<int64_t>{4, 0, 3}));
  EXPECT_THROW(split_stages(model(), 3, {4, 3}), Bug);
  EXPECT_THROW(split_stages(model(), 2, {4, 4}), Bug);
  EXPECT_THROW(split_stages(model(), 2, {8, -1}), Bug);
  EXPECT_THROW(split_stages(model(), 0), Bug);
}

TEST(StageSplit, CostsAgreeWithTheFlopsOfTheModel) {
  for (int64_t mtp = 0; mtp < 3; ++mtp) {
    ModelConfig c = model();
    c.num_nextn_predict_layers = mtp;
    int64_t sum = head_forward_flops(c), norms = 0;
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) sum += layer_forward_flops(c, i);
    for (const TensorSpec& s : tensor_specs(c)) norms += s.role == TensorRole::kNorm ? s.shape.elements() : 0;
    EXPECT_DOUBLE_EQ(3.0 * static_cast<double>(sum), flops_per_token(c, 0) - 6.0 * static_cast<double>(norms));
  }
}

TEST(StageSplit, OfTheLargestPublishedModel) {
  ModelConfig c = model();  // 300B: 54 layers, 12 stages
  c.vocab_size = 103424;
  c.hidden_size = 8192;
  c.intermediate_size = 28672;
  c.num_hidden_layers = 54;
  c.num_attention_heads = 64;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.moe_num_experts = 64;
  c.moe_k = 8;
  c.moe_intermediate_size = 3584;
  c.moe_num_shared_experts = 0;
  c.moe_layer_start_index = 3;
  c.moe_layer_interval = 1;
  const auto layers = counts(split_stages(c, 12));
  EXPECT_EQ(*std::max_element(layers.begin(), layers.end()), 5);
  EXPECT_EQ(*std::min_element(layers.begin(), layers.end()), 4);
}

TEST(StageSplit, PicksTheVirtualStagesOfARank) {
  const auto all = split_stages(model(), 4, {2, 2, 2, 1});
  const auto own = stages_of(all, {0, 3});
  ASSERT_EQ(own.size(), 2u);
  EXPECT_TRUE(own[0].embedding && own[1].head);
  EXPECT_EQ(own[1].first_layer, 6);
}

}  // namespace
}  // namespace concerto
