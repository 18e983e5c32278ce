// config.json files of the four generations as they stand (reference 3.1), small: trained, evaluated, exported, read
// again. What a generation's trainers did by themselves acts here too, and the start of the run says so.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "concerto/base/files.h"
#include "concerto/cli/eval_command.h"
#include "concerto/cli/test_command.h"
#include "concerto/cli/train_command.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

using nlohmann::json;

struct Generation {
  const char* name;
  const char* fields;
  const char* router;  // as the start of a run says it
  std::vector<int> moe_layers;
  bool losses, bias_moves, drops;
};
void PrintTo(const Generation& g, std::ostream* out) { *out << g.name; }

constexpr const char* kSizes = R"("architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
  "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "use_cache": false, "use_bias": false, "torch_dtype": "bfloat16",)";

const Generation kOldConfiguration = {
    "remote_code",
    R"("use_rmsnorm": true, "use_moe": true, "moe_num_experts": 64, "moe_k": 2, "moe_capacity": [64, 64, 64],
       "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_gate": "top2",
       "sinkhorn_2gate": true, "sinkhorn_temp": 0.03, "moe_intermediate_size": 12, "moe_gate_act": "softmax",
       "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_nextn_predict_layers": 0, "multi_token_pred_lambda": 1.0)",
    "top-2 of 64 experts, Sinkhorn-2Gate, no balance loss",
    {1, 3},
    false,
    false,
    false};

std::vector<Generation> generations() {
  return {
      {"hugging_face",
       R"("num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 12, "moe_num_shared_experts": 2,
          "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_norm_min": 1e-12,
          "router_aux_loss_coef": 0.001, "output_router_logits": false, "tie_word_embeddings": true,
          "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0})",
       "top-6 of 64 experts, softmax, no balance loss, correction bias as it is",
       {1, 2, 3},
       false,
       false,
       false},
      kOldConfiguration,
      {"paddleformers",
       R"("moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 0, "moe_num_shared_experts": 2,
          "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_capacity": [64, 64, 64],
          "moe_gate": "topk", "scoring_func": "softmax", "moe_norm_gate_logits": true, "moe_norm_min": 1e-12,
          "moe_use_aux_free": true, "sinkhorn_2gate": true, "sinkhorn_temp": 0.03, "router_aux_loss_coef": 0.01,
          "router_z_loss_coef": 1e-4, "moe_orthogonal_loss_lambda": 0.01, "moe_group_experts": false,
          "moe_group_orthogonal_loss": true, "global_aux_loss": false, "moe_group": "mp",
          "num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.1, "rms_norm_eps": 1e-6)",
       "top-2 of 16 experts, softmax, balance loss per layer x 0.01, z loss x 0.0001, orthogonal loss x 0.01, "
       "correction bias +-0.001 a step",
       {1, 2, 3},
       true,
       true,
       false},
      {"pretraining",
       R"("moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 12, "moe_num_shared_experts": 1,
          "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 7, "moe_capacity": [6, 6, 6],
          "moe_gate": "top2_fused", "moe_gate_act": "sigmoid", "moe_use_aux_free": true, "moe_aux_loss_lambda": 1e-5,
          "moe_orthogonal_loss_lambda": 0.001, "moe_group_experts": false, "moe_use_hard_gate": false,
          "moe_dense_experts_token_type_id": 3, "moe_group": "world", "moe_reverse_token_drop": false)",
       "top-6 of 64 experts, sigmoid, balance loss per layer x 1e-05, orthogonal loss x 0.001, correction bias +-0.001 "
       "a step, capacity 6 (6 in evaluation, 6 of few tokens)",
       {1, 2, 3},
       true,
       true,
       true},
      {"older_pretraining",
       R"("moe_num_experts": 64, "moe_k": 2, "moe_intermediate_size": 0, "moe_num_shared_experts": 0,
          "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_capacity": [2, 4, 8],
          "moe_gate": "top2", "moe_gate_act": "softmax", "moe_use_aux_free": false, "sinkhorn_2gate": true,
          "sinkhorn_temp": 0.03, "moe_aux_loss_lambda": 0.01, "moe_z_loss_lambda": 1e-4,
          "moe_orthogonal_loss_lambda": 0.01, "multi_token_pred_lambda": 0.1)",
       "top-2 of 64 experts, Sinkhorn-2Gate, balance loss per layer x 0.01, z loss x 0.0001, orthogonal loss x 0.01, "
       "capacity 2 (4 in evaluation, 8 of few tokens)",
       {1, 3},
       true,
       false,
       true},
  };
}

class OlderModels : public ::testing::TestWithParam<Generation> {
 protected:
  OlderModels() {
    work_.write_data("train", 60, 1);
    work_.write_data("valid", 9, 2);
  }

  // The run's folder; what the command printed is in out_.
  std::string train(const std::string& name, const std::string& model, int steps) {
    const std::string dir = work_ / name;
    work_.write(name + ".yaml",
                fmt::format(R"(
run: {{dir: "{}", threads: 1}}
model: {{path: "{}", init: {}}}
data: {{train: "{}", valid: "{}"}}
training: {{steps: {}, global_batch_size: 4, micro_batch_size: 2, seq_length: 32, dtype: f32, eval_every_steps: 3}}
optimizer: {{lr: 0.01, schedule: constant}}
checkpoint: {{every_steps: 0}}
)",
                            dir, model, std::filesystem::exists(model + "/model.safetensors") ? "pretrained" : "random",
                            work_ / "train", work_ / "valid", steps));
    out_ = run_command(add_train_command, {"train", work_ / name + ".yaml"});
    return dir;
  }

  std::string model(const Generation& g) {
    std::filesystem::create_directories(work_ / "files");
    work_.write("files/config.json", fmt::format("{{{}{}}}", kSizes, g.fields));
    return work_ / "files";
  }

  double eval(const std::string& model, int micro_batch_size, int micro_batches) const {
    return json::parse(
               run_command(add_eval_command, {"eval", "--model", model, "--data", work_ / "valid", "--seq-length", "32",
                                              "--micro-batch-size", std::to_string(micro_batch_size), "--max-batches",
                                              std::to_string(micro_batches), "--dtype", "f32", "--json"}))
        .at("loss");
  }

  static json row(const std::string& dir, size_t i) { return json::parse(metrics_rows(dir).at(i)); }

  Workplace work_;
  std::string out_;
};

TEST_P(OlderModels, TrainEvaluateExportAndComeBack) {
  const Generation& g = GetParam();
  const std::string files = model(g), dir = train("run", files, 6), exported = dir + "/model";
  const std::string router = std::string("router    ") + g.router + "\n";
  EXPECT_NE(out_.find(router), std::string::npos) << out_;
  const std::vector<double> loss = metrics_values(dir, "loss"), valid = metrics_values(dir, "valid_loss");
  ASSERT_EQ(loss.size(), 6u);
  EXPECT_NEAR(loss[0], std::log(40), 0.2);
  EXPECT_LT(loss[5], loss[0] - 0.02);
  const json last = row(dir, metrics_rows(dir).size() - 2);  // before the last evaluation
  const ModelConfig c = load_model_config(files);
  EXPECT_EQ(last["step"], 6);
  if (c.num_nextn_predict_layers == 0) {
    EXPECT_EQ(last["total_loss"].get<double>() > last["loss"].get<double>(), g.losses);
  }
  EXPECT_EQ(last.contains("expert_bias"), g.bias_moves);
  EXPECT_EQ(last.contains("expert_dropped"), g.drops);
  std::vector<int> layers;
  for (int i = 0; i < c.num_hidden_layers; ++i)
    if (c.is_moe_layer(i)) layers.push_back(i);
  EXPECT_EQ(layers, g.moe_layers);

  EXPECT_EQ(model_config_json(load_model_config(exported), "float32"), model_config_json(c, "float32"));
  EXPECT_NEAR(eval(exported, 2, 0), valid.back(), 1e-5);
  const std::string more = train("more", exported, 2);
  EXPECT_NE(out_.find(router), std::string::npos) << out_;
  EXPECT_LT(metrics_values(more, "loss")[0], loss[0] - 0.02);
}

INSTANTIATE_TEST_SUITE_P(Generations, OlderModels, ::testing::ValuesIn(generations()),
                         [](const auto& info) { return std::string(info.param.name); });

class OldConfiguration : public OlderModels {};

// A mixture without experts is a dense model (the default of the pre-training code).
TEST_P(OldConfiguration, WithoutExpertsIsDense) {
  for (const char* none : {"null", "0"}) {
    Generation dense = GetParam();
    std::string fields = dense.fields;
    const std::string experts = R"("moe_num_experts": 64)";
    ASSERT_NE(fields.find(experts), std::string::npos);
    fields.replace(fields.find(experts), experts.size(), fmt::format(R"("moe_num_experts": {})", none));
    dense.fields = fields.c_str();
    const std::string dir = train(none, model(dense), 2);
    EXPECT_EQ(out_.find("router    "), std::string::npos) << out_;
    EXPECT_NEAR(metrics_values(dir, "loss").at(1), std::log(40), 0.2);
    EXPECT_NEAR(eval(dir + "/model", 2, 0), metrics_values(dir, "valid_loss").back(), 1e-5);
  }
}

// The three numbers of moe_capacity: training, evaluation, and evaluation of fewer tokens than experts.
TEST_P(OldConfiguration, EachCapacityHoldsWhereItShould) {
  const std::string exported = train("run", model(GetParam()), 3) + "/model";
  const std::string file = exported + "/config.json";
  const auto with = [&](std::vector<double> factors) {
    json j = json::parse(read_text_file(file));
    j["moe_capacity"] = std::move(factors);
    write_text(file, j.dump());
    return exported;
  };
  const double full = eval(with({64, 64, 64}), 2, 4), few = eval(exported, 1, 8);  // 64 tokens, 32
  EXPECT_NEAR(full, few, 1e-5);
  EXPECT_EQ(eval(with({1, 64, 1}), 2, 4), full);
  EXPECT_GT(std::abs(eval(with({64, 1, 64}), 2, 4) - full), 1e-4);
  EXPECT_EQ(eval(with({2, 1, 64}), 1, 8), few);
  EXPECT_GT(std::abs(eval(with({64, 64, 2}), 1, 8) - few), 1e-4);
  const std::string free = train("free", with({64, 1, 2}), 1), tight = train("tight", with({1, 64, 64}), 1);
  EXPECT_EQ(row(free, 0)["expert_dropped"]["1"], 0.0);
  EXPECT_GT(row(tight, 0)["expert_dropped"]["1"].get<double>(), 0);
  EXPECT_NE(row(free, 0)["loss"], row(tight, 0)["loss"]);
}

INSTANTIATE_TEST_SUITE_P(Generations, OldConfiguration, ::testing::Values(kOldConfiguration),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
