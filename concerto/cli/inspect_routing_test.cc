#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "concerto/base/rng.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/program.h"
#include "concerto/ops/test_routing_model.h"

namespace concerto {
namespace {

struct Outcome {
  int code;
  std::string out, error;
};

Outcome inspect(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), {"concerto", "inspect", "routing", "--threads", "1"});
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_program(static_cast<int>(arguments.size()), arguments.data());
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

constexpr const char* kModel = "tests/golden/moe-tiny";

using Parts = std::map<std::string, nlohmann::json>;

Parts parts_of(const std::string& out, std::vector<std::string>* order = nullptr) {
  Parts parts;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json part = nlohmann::json::parse(line);
    if (order) order->push_back(part["part"]);
    parts[part["part"]] = part;
  }
  return parts;
}

TEST(InspectRouting, ShowsTheSevenPartsAndWhatFollows) {
  const Outcome json = inspect({"--model", kModel, "--ids", "5,17,3,9,9", "--json", "--values"});
  ASSERT_EQ(json.code, 0) << json.error;
  std::vector<std::string> order;
  Parts parts = parts_of(json.out, &order);
  EXPECT_EQ(order, (std::vector<std::string>{"dispatched_input", "combine_weights", "dispatch_mask", "scatter_index",
                                             "router_loss", "gate_logits", "gate_prob", "forward_experts",
                                             "combine_expert_output"}));
  const auto shape = [&](const char* name) { return parts[name]["shape"].get<std::vector<int64_t>>(); };
  EXPECT_EQ(shape("combine_weights")[0], 5);
  EXPECT_EQ(shape("forward_experts"), shape("dispatched_input"));
  EXPECT_EQ(shape("combine_expert_output")[0], 5);
  int64_t tokens = 0;
  for (const double n : parts["dispatch_mask"]["values"]) tokens += static_cast<int64_t>(n);
  const int64_t k = shape("combine_weights")[1];
  EXPECT_EQ(tokens, 5 * k);
  const auto weights = parts["combine_weights"]["values"].get<std::vector<double>>();
  double sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += weights[static_cast<size_t>(j)];
  EXPECT_NEAR(sum, 1, 1e-6);
  const Outcome text = inspect({"--model", kModel, "--ids", "5,17,3"});
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("expert:weight"), std::string::npos) << text.out;
}

// ---- What training decides otherwise: capacity and Sinkhorn.

class InspectTraining : public ::testing::Test {
 protected:
  InspectTraining() {
    config_.vocab_size = 40;
    config_.hidden_size = config_.intermediate_size = config_.moe_intermediate_size = 8;
    config_.num_hidden_layers = 2;
    config_.num_attention_heads = config_.num_key_value_heads = 2;
    config_.head_dim = 4;
    config_.moe_num_experts = 4;
    config_.moe_k = 2;
    config_.moe_num_shared_experts = 0;
    config_.moe_capacity = {1, 2, 4};
  }

  void write_model() {
    dir_ = folder_ / fmt::format("model-{}", models_++);
    ParameterStore store(tensor_specs(config_), DType::kF32, StoreUse::kInfer);
    for (int i = 0; i < store.size(); ++i) {
      const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
      const Rng rng(7, spec.name);
      std::vector<float> values;
      for (int64_t j = 0; j < spec.shape.elements(); ++j)
        values.push_back(static_cast<float>(rng.normal(static_cast<uint64_t>(j))));
      store.set(i, values.data());
    }
    export_hf_store(dir_, config_, store, {.dtype = DType::kF32});
  }

  // Of the first MoE layer, checked against the f64 model of the reference by the logits that were printed.
  void expect_as_the_model(bool training, long capacity) {
    write_model();
    std::vector<const char*> arguments = {"--model", dir_.c_str(), "--ids", kIds};
    if (training) arguments.push_back("--training");
    const Outcome text = inspect(arguments);
    EXPECT_NE(
        text.out.find(fmt::format("room for {} rows an expert ({})", capacity, training ? "training" : "evaluation")),
        std::string::npos)
        << text.out << text.error;
    arguments.insert(arguments.end(), {"--json", "--values"});
    const Outcome json = inspect(arguments);
    ASSERT_EQ(json.code, 0) << json.error;
    Parts parts = parts_of(json.out);
    const auto values = [&](const char* name) { return parts[name]["values"].get<std::vector<double>>(); };
    namespace model = test::model;
    model::Matrix z, p;
    model::Ids ids;
    std::vector<int> first;
    const std::vector<double> logits = values("gate_logits");
    for (auto row = logits.begin(); row != logits.end(); row += 4) {
      z.emplace_back(row, row + 4);
      p.push_back(model::softmax(z.back()));
      ids.push_back(model::best(p.back(), 2));
      first.push_back(ids.back()[0]);
    }
    ASSERT_EQ(z.size(), 12u);
    if (training && config_.uses_sinkhorn()) {
      const model::Matrix second = model::second_by_sinkhorn(z, first, config_.sinkhorn_temp, capacity, true);
      for (size_t t = 0; t < ids.size(); ++t) ids[t][1] = model::best(second[t], 1)[0];
    }
    const bool rank_major = config_.moe_drop_order == TokenDrop::kRankMajor;
    const model::Ids slots = model::slots(ids, capacity, rank_major, config_.moe_reverse_token_drop);
    std::vector<double> index, mask(4);
    const std::vector<double> got = values("combine_weights");
    dropped_ = 0;
    for (size_t t = 0; t < ids.size(); ++t) {
      const model::Row weights = model::weights(p[t], ids[t], slots[t], true, config_.moe_norm_min);
      for (size_t j = 0; j < 2; ++j) {
        EXPECT_NEAR(got[2 * t + j], weights[j], 1e-6) << t;
        ++mask[static_cast<size_t>(ids[t][j])];
        dropped_ += slots[t][j] < 0;
        index.push_back(slots[t][j] < 0 ? -1.0 : static_cast<double>(ids[t][j] * capacity + slots[t][j]));
      }
    }
    EXPECT_EQ(values("scatter_index"), index);
    EXPECT_EQ(values("dispatch_mask"), mask);
    EXPECT_EQ(std::count(text.out.begin(), text.out.end(), '*') - 1, dropped_);  // one explains it
    EXPECT_EQ(parts["dispatched_input"]["shape"], (nlohmann::json{4, capacity, 8}));
    seconds_.clear();
    for (const auto& choices : ids) seconds_.push_back(choices[1]);
  }

  static constexpr const char* kIds = "5,17,3,9,9,2,31,8,8,8,1,30";  // 12
  ModelConfig config_;
  TestFolder folder_;
  std::string dir_;
  int models_ = 0;
  int64_t dropped_ = 0;
  std::vector<int> seconds_;  // second choices
};

TEST_F(InspectTraining, CapacityInBothOrdersAndReverse) {
  for (const TokenDrop order : {TokenDrop::kRankMajor, TokenDrop::kTokenMajor})
    for (const bool reverse : {false, true}) {
      config_.moe_drop_order = order;
      config_.moe_reverse_token_drop = reverse;
      config_.moe_use_aux_free = false;
      expect_as_the_model(true, 3);
      EXPECT_GT(dropped_, 0);
    }
  expect_as_the_model(false, 6);
}

TEST_F(InspectTraining, SinkhornOfTheOldGate) {
  config_.moe_gate = RouterGate::kTop2;
  config_.sinkhorn_2gate = true;
  config_.sinkhorn_temp = 0.5;
  config_.moe_use_aux_free = false;
  expect_as_the_model(true, 3);
  const std::vector<int> training = seconds_;
  EXPECT_GT(dropped_, 0);
  expect_as_the_model(false, 6);
  EXPECT_NE(seconds_, training);  // greedy
}

TEST_F(InspectTraining, RoomThatNoMemoryHoldsIsRefused) {
  write_model();
  nlohmann::json j = nlohmann::json::parse(read_text(dir_ + "/config.json"));
  j["moe_capacity"] = {1, 1e9, 1};  // more rows than 32 bits number, whatever memory there is
  write_text(dir_ + "/config.json", j.dump());
  const Outcome refused = inspect({"--model", dir_.c_str(), "--ids", kIds});
  EXPECT_NE(refused.code, 0);
  EXPECT_NE(refused.error.find("of padded buffers. Lower it (nothing is dropped from 4 on)"), std::string::npos)
      << refused.error;
}

TEST(InspectRouting, SaysWhatIsWrong) {
  const auto fault = [](const std::vector<const char*>& arguments) { return inspect(arguments).error; };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(fault({"--model", kModel}), "wants --prompt or --ids, one of them"));
  EXPECT_TRUE(has(fault({"--model", kModel, "--ids", "1", "--layer", "0"}), "0 holds no experts. MoE layers: "));
  EXPECT_TRUE(has(fault({"--model", kModel, "--ids", "100000000"}), "is not one of the vocabulary's"));
  EXPECT_TRUE(has(fault({"--model", "tests/golden/dense-tiny", "--ids", "1"}), "has no MoE layer"));
}

}  // namespace
}  // namespace concerto
