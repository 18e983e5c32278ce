#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

#include "concerto/infer/sampler.h"
#include "concerto/infer/session.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto {
namespace {

TEST(Sampler, GreedyTakesTheFirstLargest) {
  float logits[] = {1, 3, 3, 2};
  EXPECT_EQ(Sampler({.temperature = 0}).choose(View(logits, {4}, DType::kF32), 0), 1);
}

TEST(Sampler, FrequenciesFollowTheProbabilitiesInsideTopP) {
  float logits[] = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  Sampler sampler({.temperature = 1, .top_p = 0.9, .seed = 5});
  int counts[4] = {};
  for (int i = 0; i < 20000; ++i) ++counts[sampler.choose(View(logits, {4}, DType::kF32), i)];
  EXPECT_EQ(counts[3], 0);  // 0.5 + 0.3 + 0.15 reaches 0.9
  EXPECT_NEAR(counts[0] / 20000.0, 0.5 / 0.95, 0.02);
  EXPECT_NEAR(counts[2] / 20000.0, 0.15 / 0.95, 0.02);
}

TEST(Sampler, LogitsThatAreNoNumbersAreAnError) {
  const float nan = std::nanf(""), inf = HUGE_VALF;
  for (double temperature : {0.0, 1.0})
    for (std::array<float, 3> logits :
         {std::array{1.0f, nan, 2.0f}, {nan, 1.0f, 2.0f}, {1.0f, inf, 2.0f}, {-inf, -inf, -inf}}) {
      try {
        Sampler({.temperature = temperature}).choose(View(logits.data(), {3}, DType::kF32), 7);
        ADD_FAILURE() << logits[0] << " " << logits[1];
      } catch (const Error& e) {
        EXPECT_EQ(e.code, ErrorCode::kNumeric);
        EXPECT_NE(std::string(e.what()).find("position 7"), std::string::npos) << e.what();
      }
    }
  float masked[] = {-inf, 1, -inf};
  EXPECT_EQ(Sampler({.temperature = 1}).choose(View(masked, {3}, DType::kF32), 0), 1);
}

TEST(InferenceSession, ChunksAndSingleTokensGiveTheSameLogits) {
  ModelConfig c;
  c.vocab_size = 50;
  c.hidden_size = 16;
  c.intermediate_size = 24;
  c.num_hidden_layers = 3;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.moe_num_experts = 4;
  c.moe_k = 2;
  c.moe_intermediate_size = 8;
  c.initializer_range = 0.2;
  ThreadPool pool(2);
  ParameterStore store(tensor_specs(c), DType::kF32, StoreUse::kInfer);
  store.initialize(c, Init::kHuggingFace, 3, pool);
  const Stage stage(c, store, Recompute::kNone, 64);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 21; ++i) tokens.push_back(3 + (i * 17) % 47);

  const auto last = [&](int64_t chunk, bool one_by_one) {
    InferenceSession session(stage, store, ref_backend(), pool, 24, chunk);
    View logits;
    if (one_by_one) {
      for (int32_t t : tokens) logits = session.extend({&t, 1});
    } else {
      logits = session.extend(tokens);
    }
    return std::vector<float>(logits.as<float>(), logits.as<float>() + logits.elements());
  };
  const auto whole = last(21, false);
  for (const auto& other : {last(4, false), last(21, true)})
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(other[i], whole[i], 1e-5);
}

}  // namespace
}  // namespace concerto
