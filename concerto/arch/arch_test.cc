#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "concerto/arch/model_spec.h"
#include "concerto/base/rng.h"
#include "concerto/config/model_fields.h"

namespace concerto {
namespace {

ModelConfig model_21b() {
  ModelConfig c;  // the defaults are the 21B model
  c.head_dim = 128;
  return c;
}

ModelConfig model_300b() {
  ModelConfig c = model_21b();
  c.hidden_size = 8192;
  c.num_hidden_layers = 54;
  c.num_attention_heads = 64;
  c.num_key_value_heads = 8;
  c.intermediate_size = 28672;
  c.moe_k = 8;
  c.moe_intermediate_size = 3584;
  c.moe_num_shared_experts = 0;
  c.moe_layer_start_index = 3;
  return c;
}

ModelConfig model_dense() {
  ModelConfig c;
  c.model_type = ModelType::kErnie45;
  c.hidden_size = 1024;
  c.intermediate_size = 3072;
  c.num_hidden_layers = 18;
  c.num_attention_heads = 16;
  c.num_key_value_heads = 2;
  c.head_dim = 128;
  return c;
}

TEST(ModelSpec, ParameterCountsOfThePublishedModels) {  // reference section 1
  EXPECT_NEAR(static_cast<double>(parameter_count(model_21b())), 21.825e9, 0.001e9);
  EXPECT_NEAR(static_cast<double>(parameter_count(model_dense())), 0.3607e9, 0.0001e9);
  EXPECT_NEAR(static_cast<double>(parameter_count(model_300b())), 298.64e9, 0.01e9);
}

TEST(ModelSpec, ActiveParametersOfThePublishedModels) {  // reference section 1
  const auto matrices = [](const ModelConfig& c) {       // the reference leaves out routers and norms
    int64_t n = active_parameter_count(c);
    for (const TensorSpec& s : tensor_specs(c))
      if (s.role == TensorRole::kRouter || s.role == TensorRole::kNorm) n -= s.shape.elements();
    return static_cast<double>(n);
  };
  EXPECT_NEAR(matrices(model_21b()), 3.35e9, 0.005e9);
  EXPECT_NEAR(matrices(model_300b()), 47.05e9, 0.005e9);
  // All of a dense model is active; the embedding counts once, as the head, tied or not.
  EXPECT_EQ(active_parameter_count(model_dense()), parameter_count(model_dense()));
  ModelConfig untied = model_300b();
  untied.tie_word_embeddings = false;
  EXPECT_EQ(active_parameter_count(untied), active_parameter_count(model_300b()));
}

TEST(ModelSpec, FlopsAreThoseOfEveryProduct) {
  // Counted product by product: forward 2 a weight, backward twice that; scores and values 2 each over half the
  // positions.
  const double h = 1024, f = 3072, q = 2048, kv = 256, vocab = 103424, seq = 4096;
  const double norms = (2 * 18 + 1) * h, block = h * (2 * q + 2 * kv) + 3 * h * f, attention = seq * q;
  EXPECT_DOUBLE_EQ(flops_per_token(model_dense(), 4096), 6 * (18 * (block + attention) + norms + vocab * h));
  ModelConfig mtp = model_dense();
  mtp.num_nextn_predict_layers = 2;
  const double depth = 2 * h * h + 4 * h + block + attention + vocab * h;  // its own pass through the head
  EXPECT_DOUBLE_EQ(flops_per_token(mtp, 4096), flops_per_token(model_dense(), 4096) + 6 * 2 * depth);
}

// Sums of sizes are taken in 64 bits: whatever the rules of a config let through must fit, in all arrays of a store.
TEST(ModelSpec, WhatTheRulesAcceptFits64Bits) {
  const std::vector<int64_t> widths = {1, 2, 64, 4096, 1 << 24}, few = {1, 2, 16};
  const auto sound = [](const ModelConfig& c) {
    const auto& rules = model_rules();
    return std::all_of(rules.begin(), rules.end(), [&](const Rule<ModelConfig>& rule) { return rule.holds(c); });
  };
  int accepted = 0, refused = 0;
  for (uint64_t i = 0; i < 1500; ++i) {
    const Rng rng(i, "sizes");
    auto one_of = [&, at = uint64_t{0}](const std::vector<int64_t>& list) mutable {
      return list[static_cast<size_t>(rng.below(at++, list.size()))];
    };
    ModelConfig c;
    c.pad_token_id = c.bos_token_id = c.eos_token_id = -1;
    c.vocab_size = one_of(widths), c.hidden_size = one_of(widths), c.intermediate_size = one_of(widths);
    c.num_attention_heads = one_of(widths), c.num_key_value_heads = one_of(widths);
    c.head_dim = one_of({0, 0, 2, 1 << 24});
    c.num_hidden_layers = one_of(few), c.num_nextn_predict_layers = one_of({0, 1, 64});
    c.moe_num_experts = one_of({0, 2, 16}), c.moe_k = 1, c.moe_num_shared_experts = one_of({0, 1, 1 << 16});
    c.moe_intermediate_size = one_of(widths);
    c.use_bias = one_of({0, 1}) == 1, c.tie_word_embeddings = one_of({0, 1}) == 1;
    if (!sound(c)) {
      ++refused;
      continue;
    }
    ++accepted;
    if (c.head_dim == 0) c.head_dim = c.hidden_size / c.num_attention_heads;
    double elements = 0;
    for (const TensorSpec& s : tensor_specs(c)) {
      double n = 1;
      for (int d = 0; d < s.shape.rank(); ++d) n *= static_cast<double>(s.shape[d]);
      elements += n + 64;  // each may start on a line of its own
    }
    EXPECT_LT(elements, 0x1p52) << "hidden " << c.hidden_size << ", layers " << c.num_hidden_layers;
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(refused, 50);
}

TEST(ModelSpec, NamesAreUniqueAndMtpIsThere) {
  ModelConfig c = model_21b();
  c.num_nextn_predict_layers = 1;
  std::set<std::string> names;
  for (const TensorSpec& s : tensor_specs(c)) EXPECT_TRUE(names.insert(s.name).second) << s.name;
  EXPECT_TRUE(names.count("model.mtp_block.0.mlp.gate_proj.weight"));
  EXPECT_TRUE(names.count("model.layers.1.mlp.moe_statics.e_score_correction_bias"));
  EXPECT_NEAR(static_cast<double>(parameter_count(c) - parameter_count(model_21b())), 0.123e9, 0.001e9);
}

TEST(ModelSpec, FusedTensorsFollowEachOther) {
  const auto specs = tensor_specs(model_21b());
  std::set<int> closed;
  for (size_t i = 1; i < specs.size(); ++i)
    if (specs[i].fused != specs[i - 1].fused) {
      if (specs[i - 1].fused >= 0) {
        EXPECT_TRUE(closed.insert(specs[i - 1].fused).second);
      }
      EXPECT_FALSE(closed.count(specs[i].fused));
    }
}

TEST(ModelSpec, LayersAreMoeByIntervalAndRange) {
  ModelConfig c = model_21b();
  c.moe_layer_interval = 2;
  c.moe_layer_start_index = 0;
  EXPECT_FALSE(c.is_moe_layer(0));
  EXPECT_TRUE(c.is_moe_layer(1));
  c.moe_layer_end_index = 99;  // beyond the last layer is legal
  EXPECT_TRUE(c.is_moe_layer(27));
}

TEST(ModelSpec, PretrainingInitScalesOutputs) {
  const ModelConfig c = model_21b();
  for (const TensorSpec& s : tensor_specs(c)) {
    double wanted = -1;
    if (s.name == "model.layers.0.self_attn.q_proj.weight" || s.role == TensorRole::kSharedDown) wanted = 0.01141;
    if (s.name == "model.layers.0.self_attn.o_proj.weight") wanted = 0.01141 / std::sqrt(56.0);
    if (wanted >= 0) {
      EXPECT_NEAR(init_std(c, s, Init::kPretrain), wanted, 1e-5) << s.name;
    }
  }
}

}  // namespace
}  // namespace concerto
