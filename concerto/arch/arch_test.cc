#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "concerto/arch/model_spec.h"

namespace concerto {
namespace {

ModelConfig model_21b() {
  ModelConfig c;  // the defaults are the 21B model
  c.head_dim = 128;
  return c;
}

TEST(ModelSpec, ParameterCountsOfThePublishedModels) {  // reference section 1
  EXPECT_NEAR(static_cast<double>(parameter_count(model_21b())), 21.825e9, 0.001e9);
  ModelConfig dense;
  dense.model_type = ModelType::kErnie45;
  dense.hidden_size = 1024;
  dense.intermediate_size = 3072;
  dense.num_hidden_layers = 18;
  dense.num_attention_heads = 16;
  dense.num_key_value_heads = 2;
  dense.head_dim = 128;
  EXPECT_NEAR(static_cast<double>(parameter_count(dense)), 0.3607e9, 0.0001e9);
  ModelConfig big = model_21b();
  big.hidden_size = 8192;
  big.num_hidden_layers = 54;
  big.num_attention_heads = 64;
  big.num_key_value_heads = 8;
  big.intermediate_size = 28672;
  big.moe_k = 8;
  big.moe_intermediate_size = 3584;
  big.moe_num_shared_experts = 0;
  big.moe_layer_start_index = 3;
  EXPECT_NEAR(static_cast<double>(parameter_count(big)), 298.64e9, 0.01e9);
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
