#include "concerto/config/model_config.h"

#include <gtest/gtest.h>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/config/model_fields.h"

namespace concerto {
namespace {

ModelConfig load(const std::string& json) {
  const TestFolder folder;
  return load_model_config(folder.write("config.json", json));
}
std::string fault_of(const std::string& json) {
  return error_of(ErrorCode::kModel, [&] { load(json); });
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(LoadModelConfig, DenseDefaults) {
  const ModelConfig c = load(R"({"model_type": "ernie4_5"})");
  EXPECT_EQ(c.model_type, ModelType::kErnie45);
  EXPECT_EQ(c.vocab_size, 103424);
  EXPECT_EQ(c.hidden_size, 1024);
  EXPECT_EQ(c.intermediate_size, 3072);
  EXPECT_EQ(c.num_hidden_layers, 18);
  EXPECT_EQ(c.num_attention_heads, 16);
  EXPECT_EQ(c.num_key_value_heads, 2);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.num_moe_layers(), 0);
}

TEST(LoadModelConfig, MoeDefaults) {
  const ModelConfig c = load(R"({"model_type": "ernie4_5_moe", "head_dim": null})");
  EXPECT_EQ(c.hidden_size, 2560);
  EXPECT_EQ(c.head_dim, 128);  // 2560 / 20
  EXPECT_EQ(c.moe_num_experts, 64);
  EXPECT_EQ(c.moe_k, 6);
  EXPECT_EQ(c.num_moe_layers(), 27);
  EXPECT_EQ(load(R"({"model_type": "ernie4_5_moe", "head_dim": 64})").head_dim, 64);
}

TEST(LoadModelConfig, Goldens) {
  const ModelConfig dense = load_model_config("tests/golden/dense-tiny");
  EXPECT_EQ(dense.model_type, ModelType::kErnie45);
  EXPECT_EQ(dense.head_dim, 16);
  const ModelConfig tiny = load_model_config("tests/golden/moe-tiny/config.json");
  EXPECT_EQ(tiny.moe_num_experts, 16);
  EXPECT_EQ(tiny.moe_k, 4);
  EXPECT_EQ(tiny.num_moe_layers(), 2);
  const ModelConfig interval = load_model_config("tests/golden/moe-interval2");
  EXPECT_TRUE(interval.is_moe_layer(1) && interval.is_moe_layer(3) && !interval.is_moe_layer(0) &&
              !interval.is_moe_layer(2));
  EXPECT_TRUE(interval.lm_head_bias());
  EXPECT_EQ(interval.router_aux_loss_coef, 0.05);
  EXPECT_EQ(load_model_config("tests/golden/moe-packed").rope_theta, 10000);
  EXPECT_TRUE(load_model_config("tests/golden/moe-padded").output_router_logits);
  for (const char* name : {"vl-tiny", "vl-text-only"})
    EXPECT_TRUE(has(error_of(ErrorCode::kModel, [&] { load_model_config(std::string("tests/golden/") + name); }),
                    "Multimodal"));
}

TEST(LoadModelConfig, OlderSpellings) {
  const ModelConfig c =
      load(R"({"model_type": "ernie4_5_moe", "num_experts": 8, "num_experts_per_tok": 3, "rope_theta": 10000,
    "rope_scaling": null, "multi_token_pred_lambda": 0.5, "num_nextn_predict_layers": 1, "moe_aux_loss_lambda": 0.25,
    "torch_dtype": "bfloat16", "transformers_version": "4.5", "pad_token_id": null, "bos_token_id": null, "eos_token_id": null,
    "num_key_value_heads": null})");
  EXPECT_EQ(c.moe_num_experts, 8);
  EXPECT_EQ(c.moe_k, 3);
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_EQ(c.mtp_loss_scaling_factor, 0.5);
  EXPECT_EQ(c.router_aux_loss_coef, 0.25);
  EXPECT_EQ(c.pad_token_id, -1);
  EXPECT_EQ(c.bos_token_id, -1);
  EXPECT_EQ(c.eos_token_id, -1);
  EXPECT_EQ(c.num_key_value_heads, 20);
}

TEST(LoadModelConfig, OldGenerationTakesOldDefaults) {
  const ModelConfig c = load(
      R"({"model_type": "ernie4_5_moe", "moe_gate": "topk", "moe_capacity": [64, 64, 64], "moe_use_aux_free": true})");
  EXPECT_EQ(c.vocab_size, 32000);
  EXPECT_EQ(c.hidden_size, 768);
  EXPECT_EQ(c.num_key_value_heads, 2);
  EXPECT_EQ(c.head_dim, 384);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_EQ(c.moe_k, 2);
  EXPECT_EQ(c.moe_layer_interval, 2);
  EXPECT_EQ(c.moe_num_shared_experts, 0);
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_EQ(
      load(R"({"model_type": "ernie4_5_moe", "moe_gate": "topk", "moe_capacity": [], "sinkhorn_2gate": true})").moe_k,
      2);
}

// The configuration that the older remote code stands for, as its file spells it, and as its defaults fill it in.
TEST(LoadModelConfig, OldConfigurationAsItStands) {
  for (const char* text : {R"({"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 2, "moe_layer_interval": 2,
                               "moe_capacity": [64, 64, 64], "moe_gate": "top2", "sinkhorn_2gate": true,
                               "sinkhorn_temp": 0.03, "moe_intermediate_size": 3584, "use_moe": true})",
                           R"({"model_type": "ernie4_5_moe", "sinkhorn_2gate": true})",
                           R"({"model_type": "ernie4_5_moe", "moe_gate": null})"}) {
    const ModelConfig c = load(text);
    EXPECT_EQ(c.moe_num_experts, 64);
    EXPECT_EQ(c.moe_k, 2);
    EXPECT_EQ(c.moe_layer_interval, 2);
    EXPECT_EQ(c.moe_gate, RouterGate::kTop2);
    EXPECT_TRUE(c.sinkhorn_2gate);
    EXPECT_EQ(c.sinkhorn_temp, 0.03);
    // Without capacity nothing is dropped: the remote code's default of 64 would drop where there are more experts.
    EXPECT_EQ(c.moe_capacity, has(text, "capacity") ? (std::vector<double>{64, 64, 64}) : std::vector<double>{});
    EXPECT_FALSE(c.moe_use_aux_free);
    EXPECT_EQ(c.moe_norm_min, 1e-6);  // reference 4.1, step 6
  }
  EXPECT_EQ(load(R"({"model_type": "ernie4_5_moe", "sinkhorn_2gate": true, "moe_norm_min": 0.5})").moe_norm_min, 0.5);
  EXPECT_EQ(load(R"({"model_type": "ernie4_5_moe"})").moe_norm_min, 1e-12);
  const std::string grouped = R"({"model_type": "ernie4_5_moe", "moe_group_experts": true, "moe_k": 4)";
  EXPECT_TRUE(load(grouped + R"(, "vision_config": null})").moe_group_experts);
  EXPECT_EQ(load(R"({"model_type": "ernie4_5_moe"})").moe_gate, RouterGate::kTopK);
  EXPECT_TRUE(load(R"({"model_type": "ernie4_5_moe"})").moe_use_aux_free);
  EXPECT_TRUE(load(R"({"model_type": "ernie4_5_moe", "moe_capacity": null})").moe_capacity.empty());
}

TEST(LoadModelConfig, RouterNamesOfEveryGeneration) {
  const ModelConfig older = load(R"({"model_type": "ernie4_5_moe", "moe_gate": "top2_fused", "moe_k": 8,
    "moe_capacity": [8, 8.5, 8], "moe_gate_act": "sigmoid", "moe_use_aux_free": true, "moe_z_loss_lambda": 0.5,
    "moe_use_aux_free_update_coef": 0.25, "moe_orthogonal_loss_lambda": 0.125, "moe_reverse_token_drop": true,
    "moe_norm_gate_logits": false, "moe_norm_min": 1e-6})");
  const ModelConfig newer = load(R"({"model_type": "ernie4_5_moe", "moe_gate": "topk", "num_experts_per_tok": 8,
    "moe_capacity": [8, 8.5, 8], "scoring_func": "sigmoid", "moe_use_aux_free": true, "router_z_loss_coef": 0.5,
    "moe_router_bias_update_rate": 0.25, "moe_orthogonal_loss_lambda": 0.125, "enable_reverse_token_drop": true,
    "moe_norm_gate_logits": false, "moe_norm_min": 1e-6})");
  for (const ModelConfig& c : {older, newer}) {
    EXPECT_EQ(c.moe_gate, RouterGate::kTopK);
    EXPECT_EQ(c.moe_k, 8);
    EXPECT_EQ(c.moe_capacity, (std::vector<double>{8, 8.5, 8}));
    EXPECT_EQ(c.scoring_func, RouterScoring::kSigmoid);
    EXPECT_EQ(c.router_z_loss_coef, 0.5);
    EXPECT_EQ(c.moe_router_bias_update_rate, 0.25);
    EXPECT_EQ(c.moe_orthogonal_loss_lambda, 0.125);
    EXPECT_TRUE(c.moe_reverse_token_drop);
    EXPECT_FALSE(c.moe_norm_gate_logits);
  }
  EXPECT_EQ(model_config_json(older, "bfloat16"), model_config_json(newer, "bfloat16"));
}

// Every field of reference 3.1, in the words and with the defaults of the four generations.
TEST(LoadModelConfig, EveryFieldOfFourGenerations) {
  const std::string sizes = R"({"model_type": "ernie4_5_moe", "vocab_size": 103424, "hidden_size": 2560,
    "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    "rope_theta": 500000, "tie_word_embeddings": true, )";
  const ModelConfig hf = load(sizes + R"("max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts": 64,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_norm_min": 1e-12, "router_aux_loss_coef": 0.001,
    "output_router_logits": false})");
  EXPECT_EQ(hf.moe_k, 6);
  EXPECT_TRUE(hf.moe_use_aux_free);
  EXPECT_FALSE(hf.moe_aux_loss_per_layer);
  EXPECT_EQ(hf.moe_router_bias_update_rate, 0);
  const ModelConfig hub = load(sizes + R"("max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "moe_num_experts": 64,
    "use_moe": true, "moe_k": 2, "moe_intermediate_size": 3584, "moe_layer_interval": 2, "moe_layer_start_index": 0,
    "moe_layer_end_index": -1, "moe_capacity": [64, 64, 64], "moe_gate": "top2", "moe_gate_act": "softmax",
    "moe_use_aux_free": false, "sinkhorn_2gate": true, "sinkhorn_temp": 0.03, "num_nextn_predict_layers": 0,
    "multi_token_pred_lambda": 1.0})");
  EXPECT_TRUE(hub.uses_sinkhorn());
  EXPECT_FALSE(hub.moe_aux_loss_per_layer);  // it knows no balance loss
  EXPECT_EQ(hub.moe_router_bias_update_rate, 0);
  EXPECT_EQ(hub.mtp_loss_scaling_factor, 1);
  const ModelConfig formers = load(sizes + R"("max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 0, "moe_num_shared_experts": 2, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
    "scoring_func": "softmax", "moe_norm_gate_logits": true, "moe_norm_min": 1e-12, "moe_use_aux_free": true,
    "sinkhorn_2gate": true, "sinkhorn_temp": 0.03, "router_aux_loss_coef": 0.01, "router_z_loss_coef": 1e-4,
    "moe_orthogonal_loss_lambda": 0.01, "moe_group_experts": false, "moe_group_orthogonal_loss": true,
    "global_aux_loss": false, "moe_group": "mp", "num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.1})");
  EXPECT_EQ(formers.moe_intermediate_size, 12288);  // 0: the dense width
  EXPECT_EQ(formers.shared_intermediate_size(), 2 * 12288);
  EXPECT_EQ(formers.router_aux_loss_coef, 0.01);
  EXPECT_TRUE(formers.moe_aux_loss_per_layer);
  EXPECT_EQ(formers.router_z_loss_coef, 1e-4);
  EXPECT_EQ(formers.moe_orthogonal_loss_lambda, 0.01);
  EXPECT_EQ(formers.moe_router_bias_update_rate, 0.001);
  EXPECT_EQ(formers.mtp_loss_scaling_factor, 0.1);
  EXPECT_FALSE(formers.uses_sinkhorn());  // of gate top2 only
  const ModelConfig pre = load(sizes + R"("max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "moe_num_experts": 64,
    "moe_k": 6, "moe_intermediate_size": 0, "moe_num_shared_experts": 0, "moe_layer_interval": 2,
    "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_capacity": [6, 6, 6], "moe_gate": "top2_fused",
    "moe_gate_act": "sigmoid", "moe_norm_gate_logits": true, "moe_norm_min": 1e-12, "moe_use_aux_free": true,
    "sinkhorn_2gate": true, "sinkhorn_temp": 0.03, "moe_aux_loss_lambda": 1e-5, "moe_z_loss_lambda": 1e-4,
    "moe_orthogonal_loss_lambda": 0.001, "moe_group_experts": false, "moe_group_orthogonal_loss": true,
    "moe_use_hard_gate": false, "moe_dense_experts_token_type_id": 3, "global_aux_loss": false, "moe_group": "world",
    "num_nextn_predict_layers": 0, "multi_token_pred_lambda": 0.1})");
  EXPECT_EQ(pre.moe_gate, RouterGate::kTopK);
  EXPECT_EQ(pre.moe_intermediate_size, 12288);
  EXPECT_EQ(pre.scoring_func, RouterScoring::kSigmoid);
  EXPECT_EQ(pre.router_aux_loss_coef, 1e-5);
  EXPECT_TRUE(pre.moe_aux_loss_per_layer);
  EXPECT_EQ(pre.moe_router_bias_update_rate, 0.001);
  for (const ModelConfig& c : {hf, hub, formers, pre})
    EXPECT_EQ(model_config_json(load(model_config_json(c, "bfloat16")), "bfloat16"), model_config_json(c, "bfloat16"));
}

// What Baidu's trainers do by themselves: a file of theirs says nothing of it.
TEST(LoadModelConfig, OlderFilesTrainWhatTheirTrainersDid) {
  const auto with = [](const std::string& more) { return load(R"({"model_type": "ernie4_5_moe")" + more + "}"); };
  const std::string old = R"(, "moe_gate": "topk")";
  EXPECT_FALSE(with(R"(, "router_aux_loss_coef": 0.5)").moe_aux_loss_per_layer);  // Hugging Face's
  EXPECT_TRUE(with(R"(, "moe_aux_loss_lambda": 0.5)").moe_aux_loss_per_layer);    // by its name
  EXPECT_TRUE(with(old + R"(, "router_aux_loss_coef": 0.5)").moe_aux_loss_per_layer);
  EXPECT_FALSE(with(old + R"(, "router_aux_loss_coef": 0)").moe_aux_loss_per_layer);
  EXPECT_FALSE(with(old).moe_aux_loss_per_layer);
  EXPECT_FALSE(with(R"(, "moe_aux_loss_lambda": 0.5, "moe_aux_loss_per_layer": false)").moe_aux_loss_per_layer);
  EXPECT_TRUE(with(R"(, "moe_aux_loss_lambda": 0.5, "moe_aux_loss_per_layer": null)").moe_aux_loss_per_layer);
  const std::string bias = old + R"(, "moe_use_aux_free": true)";
  EXPECT_EQ(with(R"(, "moe_use_aux_free": true)").moe_router_bias_update_rate, 0);
  EXPECT_EQ(with(old).moe_router_bias_update_rate, 0);
  EXPECT_EQ(with(bias).moe_router_bias_update_rate, 0.001);
  EXPECT_EQ(with(bias + R"(, "moe_use_aux_free_update_coef": 0.0)").moe_router_bias_update_rate, 0);
  EXPECT_EQ(with(bias + R"(, "moe_router_bias_update_rate": null)").moe_router_bias_update_rate, 0.001);
  EXPECT_EQ(with(old + R"(, "moe_num_experts": null)").num_moe_layers(), 0);
}

TEST(LoadModelConfig, RefusesRoutersThatContradictThemselves) {
  const auto with = [](const std::string& more) { return fault_of(R"({"model_type": "ernie4_5_moe", )" + more + "}"); };
  EXPECT_TRUE(
      has(with(R"("sinkhorn_2gate": true, "moe_k": 6)"), "top2 chooses 2 experts, but moe_k = 6. Set moe_gate"));
  EXPECT_TRUE(has(with(R"("moe_gate": "top2", "scoring_func": "sigmoid")"), "sigmoid, but moe_gate is top2"));
  EXPECT_TRUE(has(with(R"("moe_gate": "top2", "moe_group_experts": true)"), "true, but moe_gate is top2"));
  EXPECT_TRUE(
      has(with(R"("moe_group_experts": true, "scoring_func": "sigmoid")"), "true, but scoring_func is sigmoid"));
  EXPECT_TRUE(has(with(R"("moe_group_experts": true)"), "64 experts do not make 6 equal groups"));
  EXPECT_TRUE(has(with(R"("moe_group_experts": true, "moe_num_experts": [64, 64])"), "of several modalities"));
  EXPECT_TRUE(has(with(R"("moe_gate": "topk", "moe_capacity": [6, 6])"), "2 numbers, wanted three"));
  EXPECT_TRUE(has(with(R"("moe_gate": "topk", "moe_capacity": [6, 0, 6])"), "0 is out of range"));
  EXPECT_TRUE(has(with(R"("moe_gate": "topk", "moe_capacity": ["x"])"), "expected a number"));
  EXPECT_TRUE(has(with(R"("moe_use_aux_free": false, "moe_router_bias_update_rate": 0.5)"),
                  "0.5, but moe_use_aux_free is false"));
  EXPECT_TRUE(has(with(R"("moe_gate": "best")"), "is not one of topk, top2"));
  // All at once.
  const std::string all = with(R"("moe_gate": "top2", "moe_k": 3, "scoring_func": "sigmoid", "moe_capacity": [1])");
  EXPECT_TRUE(has(all, "moe_k = 3") && has(all, "sigmoid, but") && has(all, "wanted three")) << all;
}

TEST(LoadModelConfig, RefusesWhatIsNotBuilt) {
  const auto with = [](const std::string& more) { return fault_of(R"({"model_type": "ernie4_5_moe", )" + more + "}"); };
  EXPECT_TRUE(has(with(R"("moe_use_hard_gate": true)"), "hard gate"));
  EXPECT_TRUE(has(with(R"("global_aux_loss": true)"), "training.routing_unit: global"));
  EXPECT_TRUE(has(with(R"("quantization_config": {"bits": 4})"), "quantised"));
  EXPECT_TRUE(has(with(R"("rope_scaling": {"type": "linear", "factor": 2})"), "only rope_type default"));
  EXPECT_TRUE(has(with(R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 1})"), "only rope_type default"));
  EXPECT_TRUE(has(with(R"("rope_parameters": {"mrope_section": [1, 2, 3]})"), "\"mrope_section\" is not supported"));
  EXPECT_TRUE(has(with(R"("rope_parameters": 3)"), "expected {rope_type"));
  // Every such key has a value that passes and one that does not.
  for (const LimitedKey& key : limited_model_keys()) {
    EXPECT_TRUE(key.passes(Value{})) << key.name;
    EXPECT_FALSE(key.passes(scalar("7"))) << key.name;
  }
}

TEST(LoadModelConfig, RefusesTheImpossible) {
  const auto moe = [](const std::string& more) { return fault_of(R"({"model_type": "ernie4_5_moe", )" + more + "}"); };
  EXPECT_TRUE(has(moe(R"("num_attention_heads": 7)"), "7 heads do not divide hidden_size = 2560"));
  EXPECT_TRUE(has(moe(R"("num_key_value_heads": 3)"), "3 does not divide num_attention_heads = 20"));
  EXPECT_TRUE(has(moe(R"("head_dim": 15)"), "head_dim = 15 is odd"));
  EXPECT_TRUE(has(moe(R"("hidden_size": 60)"), "head_dim = 3 is odd"));
  EXPECT_TRUE(has(moe(R"("moe_k": 65)"), "65 is more than moe_num_experts = 64"));
  EXPECT_TRUE(has(moe(R"("pad_token_id": 200000)"), "pad_token_id: 200000 is not below vocab_size"));
  EXPECT_TRUE(has(moe(R"("bos_token_id": 200000)"), "bos_token_id: 200000 is not below vocab_size"));
  EXPECT_TRUE(has(moe(R"("eos_token_id": 200000)"), "eos_token_id: 200000 is not below vocab_size"));
  EXPECT_TRUE(has(moe(R"("hidden_act": "gelu")"), "\"gelu\" is not one of silu"));
  EXPECT_TRUE(has(moe(R"("vocab_size": "big")"), "expected a whole number, got \"big\""));
  EXPECT_TRUE(has(moe(R"("vocab_size": 0)"), "out of range"));
  EXPECT_TRUE(has(moe(R"("vocab_size": 1e30)"), "expected a whole number"));
  EXPECT_TRUE(has(moe(R"("use_bias": 1)"), "expected true or false"));
  const auto with_mtp = [](int64_t n) { return fmt::format(R"("num_nextn_predict_layers": {})", n); };
  EXPECT_TRUE(has(moe(with_mtp(kMostMtpLayers + 1)), "num_nextn_predict_layers: 9 is out of range"));
  EXPECT_EQ(load(R"({"model_type": "ernie4_5_moe", )" + with_mtp(kMostMtpLayers) + "}").num_nextn_predict_layers, 8);
  EXPECT_TRUE(has(moe(R"("num_hidden_layers": 65536, "moe_num_experts": 65536)"),
                  "65536 experts in 65536 layers are more than 4194304"));
  EXPECT_TRUE(has(moe(R"("hidden_size": 16777216, "num_attention_heads": 16, "num_hidden_layers": 1000)"),
                  "the model would have "));
  EXPECT_TRUE(has(moe(R"("moe_norm_min": 0)"), "moe_norm_min: 0 is out of range"));
  EXPECT_TRUE(has(moe(R"("moe_k": 2, "num_experts_per_tok": 3)"), "given twice, also as moe_k"));
  EXPECT_EQ(
      load(R"({"model_type": "ernie4_5_moe", "rope_theta": 7, "rope_parameters": {"rope_theta": 7.0}})").rope_theta, 7);
  EXPECT_TRUE(has(fault_of(R"({"model_type": "ernie4_5", "moe_k": 2})"), "no meaning in a dense model"));
  EXPECT_TRUE(has(fault_of(R"({"model_type": "llama", "x": 1})"), "\"llama\" is not one of ernie4_5, ernie4_5_moe"));
  EXPECT_TRUE(has(fault_of("{}"), "model_type: missing"));
  EXPECT_TRUE(has(fault_of("[]"), "expected an object"));
  EXPECT_TRUE(has(fault_of("{"), "JSON syntax: "));
  EXPECT_FALSE(has(fault_of("{"), "json.exception"));
  EXPECT_TRUE(has(error_of(ErrorCode::kModel, [] { load_model_config("no/such/folder"); }), "no such file"));
  EXPECT_TRUE(has(error_of(ErrorCode::kModel, [] { load_model_config("/dev/null"); }), "is not a regular file"));
}

// Each size that only the product of others bounds: the head width that the others give, the projection of MTP.
TEST(LoadModelConfig, RefusesMoreParametersThanCanBeCounted) {
  const std::string small =
      R"({"model_type": "ernie4_5_moe", "vocab_size": 8, "intermediate_size": 1, "moe_num_experts": 0, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16777216, )";
  EXPECT_TRUE(has(fault_of(small + R"("num_hidden_layers": 2048})"), "the model would have 2.3e+18 parameters"));
  EXPECT_TRUE(has(fault_of(small + R"("num_hidden_layers": 2048, "head_dim": null})"), "the model would have 2.3e+18"));
  EXPECT_TRUE(has(fault_of(small + R"("num_hidden_layers": 1, "head_dim": 2, "num_nextn_predict_layers": 1})"),
                  "the model would have 5.6e+14"));
  EXPECT_EQ(load(small + R"("num_hidden_layers": 1, "head_dim": 2})").head_dim, 2);
}

TEST(LoadModelConfig, ReportsAllAtOnceWithTheNearestName) {
  const std::string text =
      fault_of(R"({"model_type": "ernie4_5_moe", "hiden_size": 3, "vocab_size": true, "moe_k": 100, "moe_gate": "x"})");
  EXPECT_TRUE(has(text, "config.json: hiden_size: unknown setting. Did you mean hidden_size?")) << text;
  EXPECT_TRUE(has(text, "config.json: vocab_size: expected a whole number, got true")) << text;
  EXPECT_TRUE(has(text, "config.json: moe_k: 100 is more than")) << text;
  EXPECT_TRUE(has(text, "config.json: moe_gate: ")) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
}

TEST(ModelConfigJson, LoadsBack) {
  for (const char* name : {"dense-tiny", "moe-tiny", "moe-interval2", "moe-packed", "moe-padded"}) {
    const ModelConfig first = load_model_config(std::string("tests/golden/") + name);
    const std::string json = model_config_json(first, "bfloat16");
    EXPECT_EQ(model_config_json(load(json), "bfloat16"), json) << name;
    EXPECT_TRUE(has(json, "\"dtype\": \"bfloat16\"") && has(json, "ForCausalLM\"\n  ]")) << json;
  }
  // Of another router all fields are written, so that the older generation's defaults fill in none.
  ModelConfig router;
  EXPECT_FALSE(has(model_config_json(router, "bfloat16"), "moe_gate"));
  router.moe_capacity = {2, 4, 8};
  const ModelConfig read = load(model_config_json(router, "bfloat16"));
  EXPECT_EQ(read.moe_capacity, router.moe_capacity);
  EXPECT_EQ(read.moe_gate, RouterGate::kTopK);
  EXPECT_TRUE(read.moe_use_aux_free);
  EXPECT_EQ(model_config_json(read, "bfloat16"), model_config_json(router, "bfloat16"));
  ModelConfig c;
  c.num_nextn_predict_layers = 2;
  c.mtp_hidden = MtpHidden::kPostNorm;
  c.mtp_positions = MtpPositions::kShifted;
  c.mtp_loss_scaling_factor = 0.1;
  c.pad_token_id = -1;
  c.rms_norm_eps = 1.0 / 3;
  const ModelConfig back = load(model_config_json(c, "float32"));
  EXPECT_EQ(back.num_nextn_predict_layers, 2);
  EXPECT_EQ(back.mtp_hidden, MtpHidden::kPostNorm);
  EXPECT_EQ(back.mtp_positions, MtpPositions::kShifted);
  EXPECT_EQ(back.mtp_loss_scaling_factor, 0.1);
  EXPECT_EQ(back.pad_token_id, -1);
  EXPECT_EQ(back.rms_norm_eps, 1.0 / 3);
  EXPECT_EQ(back.head_dim, 128);
  EXPECT_THROW(model_config_json(c, "int8"), Bug);
}

}  // namespace
}  // namespace concerto
