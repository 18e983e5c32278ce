// `bench step` is train's own step: at the same seed, data and shape it prints the losses that train writes.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "concerto/checkpoint/hf_folder.h"
#include "concerto/cli/program.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

using nlohmann::json;

struct Shape {
  const char* name;
  const char* dtype;
  const char* moments;
  const char* schedule;
  const char* recompute;
  bool moe;
  int train_threads, bench_threads;
};
void PrintTo(const Shape& s, std::ostream* out) { *out << s.name; }

class BenchStep : public ::testing::TestWithParam<Shape> {};

std::vector<json> bench_step(const std::vector<std::string>& options) {
  std::vector<std::string> words = {"concerto", "bench", "step", "--json"};
  words.insert(words.end(), options.begin(), options.end());
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  ::testing::internal::CaptureStdout();
  const int code = run_program(static_cast<int>(argv.size()), argv.data());
  const std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0);
  std::vector<json> lines;
  for (size_t at = 0; at < out.size();) {
    const size_t end = std::min(out.find('\n', at), out.size());
    lines.push_back(json::parse(out.substr(at, end - at)));
    at = end + 1;
  }
  return lines;
}

TEST_P(BenchStep, PrintsTheLossesOfTrain) {
  const Shape& shape = GetParam();
  constexpr int64_t kSteps = 6;
  const Workplace work;
  work.write_data("train", 60, 1);
  RunConfig c;  // what bench step does not say stays at its default, as in a config that does not name it
  c.run.dir = work / "run";
  c.run.seed = 5;
  c.model.config = shape.moe ? tiny_moe() : tiny_dense();
  if (shape.moe) c.model.config.num_nextn_predict_layers = 1;
  c.data.train = {{work / "train", 1.0}};
  c.training.steps = kSteps;
  c.training.global_batch_size = c.training.micro_batch_size = 4;
  c.training.seq_length = 32;
  c.training.dtype = shape.dtype;
  c.optimizer.moments_dtype = shape.moments;
  c.parallel.schedule = shape.schedule;
  c.parallel.recompute = std::string(shape.recompute) == "full" ? Recompute::kFull : Recompute::kNone;
  c.monitor.log_every_steps = 1000;
  c.checkpoint.export_model = false;
  train(c, shape.train_threads);

  std::filesystem::create_directories(work / "model");
  write_file(work / "model/config.json", model_config_json(c.model.config, "float32"));
  const std::vector<json> lines = bench_step({"--model",         work / "model",
                                              "--data",          work / "train",
                                              "--batch",         "4",
                                              "--seq",           "32",
                                              "--steps",         "6",
                                              "--seed",          "5",
                                              "--dtype",         shape.dtype,
                                              "--moments-dtype", shape.moments,
                                              "--schedule",      shape.schedule,
                                              "--recompute",     shape.recompute,
                                              "--threads",       std::to_string(shape.bench_threads)});
  const std::vector<double> loss = metrics_values(c.run.dir, "loss"), norm = metrics_values(c.run.dir, "grad_norm");
  ASSERT_EQ(lines.size(), static_cast<size_t>(kSteps) + 1);
  ASSERT_EQ(loss.size(), static_cast<size_t>(kSteps));
  bool clipped = false;
  for (size_t i = 0; i < loss.size(); ++i) {
    EXPECT_EQ(lines[i]["loss"].get<double>(), loss[i]) << "step " << i + 1;
    EXPECT_EQ(lines[i]["grad_norm"].get<double>(), norm[i]) << "step " << i + 1;
    clipped = clipped || norm[i] > c.optimizer.clip_norm;
  }
  EXPECT_TRUE(clipped) << "no step was clipped, so this says nothing about clipping";
  EXPECT_NE(loss.front(), loss.back());
  if (shape.moe) {  // and what the router adds is in the gradients
    const std::vector<double> total = metrics_values(c.run.dir, "total_loss");
    ASSERT_EQ(total.size(), loss.size());
    for (size_t i = 0; i < loss.size(); ++i) EXPECT_GT(total[i], loss[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BenchStep,
                         ::testing::Values(Shape{"moe_bf16", "bf16", "f32", "1f1b", "none", true, 1, 2},
                                           Shape{"moe_bf16_moments", "bf16", "bf16", "1f1b", "none", true, 2, 1},
                                           Shape{"moe_f32_zero_bubble", "f32", "f32", "zero_bubble", "full", true, 2,
                                                 3},
                                           Shape{"dense_bf16", "bf16", "f32", "1f1b", "none", false, 2, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
