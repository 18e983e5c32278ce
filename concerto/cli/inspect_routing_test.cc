#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "concerto/cli/program.h"

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

TEST(InspectRouting, ShowsTheSevenPartsAndWhatFollows) {
  const Outcome json = inspect({"--model", kModel, "--ids", "5,17,3,9,9", "--json", "--values"});
  ASSERT_EQ(json.code, 0) << json.error;
  std::map<std::string, nlohmann::json> parts;
  std::vector<std::string> order;
  std::istringstream lines(json.out);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json part = nlohmann::json::parse(line);
    order.push_back(part["part"]);
    parts[order.back()] = part;
  }
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
