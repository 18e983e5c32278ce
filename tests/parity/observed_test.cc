// A step that is watched stays inside the memory that was planned without a watcher, and computes the same.
#include <gtest/gtest.h>

#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

class Watcher final : public Observer {
 public:
  bool wants_logits() const override { return true; }
  void record(const std::string& name, View value) override {
    std::vector<double>& all = values[name];
    const std::vector<double> block = to_doubles(value);
    all.insert(all.end(), block.begin(), block.end());
  }
  Tensors values;
};

struct Case {
  const char* name;
  bool moe;
  int64_t vocab, hidden;  // large: what is watched would not fit into what the plan has left over
  int tokens;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Observed : public ::testing::TestWithParam<Case> {};

TEST_P(Observed, StaysInsideThePlanAndChangesNothing) {
  const Case& p = GetParam();
  ModelConfig c = p.moe ? tiny_moe() : tiny_dense();
  c.vocab_size = p.vocab;
  c.hidden_size = p.hidden;
  c.num_hidden_layers = 2;
  c.moe_layer_start_index = 0;
  c.moe_k = 4;         // so that no other segment takes more scratch than the routed rows
  ThreadPool pool(1);  // each thread brings scratch, which could hide what is missing
  const std::vector<MicroBatch> batches = {random_batch(c, {{p.tokens - 70, 70}}, 1)};
  TinyRun run(c, backend_by_name("cpu"), pool, DType::kF32, {.max_tokens = p.tokens});
  const StepOutput plain = run.step(batches);
  const Tensors gradients = run.gradients();
  Watcher watcher;
  run.executor.set_observer(&watcher);
  run.step(batches);
  EXPECT_EQ(run.output.loss_sum, plain.loss_sum);
  EXPECT_EQ(run.gradients(), gradients);
  Watcher forward_only;
  run.executor.set_observer(&forward_only);
  StepOutput evaluated;
  run.executor.evaluate(batches[0], evaluated);
  EXPECT_EQ(forward_only.values, watcher.values);

  // Every tensor is there whole, and the layers add up: hidden, attention and MLP give the next hidden.
  const auto rows = static_cast<size_t>(p.tokens), width = static_cast<size_t>(p.hidden);
  ASSERT_EQ(watcher.values.at("logits").size(), rows * static_cast<size_t>(p.vocab));
  for (int layer = 0; layer < 2; ++layer) {
    std::vector<double> sum = watcher.values.at(fmt::format("hidden.{}", layer));
    ASSERT_EQ(sum.size(), rows * width);
    for (const char* name : {"attn_out", "mlp_out"}) {
      const std::vector<double>& part = watcher.values.at(fmt::format("{}.{}", name, layer));
      ASSERT_EQ(part.size(), sum.size()) << name;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    EXPECT_LT(distance(sum, watcher.values.at(fmt::format("hidden.{}", layer + 1))), 1e-6) << layer;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Observed,
                         ::testing::Values(Case{"moe_wide", true, 40, 512, 1024}, Case{"moe_short", true, 40, 16, 100},
                                           Case{"dense_large_vocabulary", false, 8000, 16, 400}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
