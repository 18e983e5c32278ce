// Choices of a routing unit that ranks share: what is dropped and whom Sinkhorn moves is decided over the whole unit,
// whoever holds its rows.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "tests/support/parallel_run.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

class RoutingUnitOverRanks : public ::testing::TestWithParam<TinyRouter> {};

TEST_P(RoutingUnitOverRanks, EqualsOneRank) {
  constexpr int kMicroBatches = 5;  // do not divide by the ranks
  for (const RoutingUnit unit : {RoutingUnit::kGlobal, RoutingUnit::kSequence}) {
    RunConfig config = parallel_config(GetParam().config, "f64", kMicroBatches, 2, 6);
    config.training.routing_unit = unit;
    config.training.balance_loss = GetParam().options.balance_loss;
    config.training.balance_counts = GetParam().options.balance_counts;
    std::vector<std::vector<MicroBatch>> steps(2);
    for (size_t s = 0; s < steps.size(); ++s)
      for (int m = 0; m < kMicroBatches; ++m)
        steps[s].push_back(
            random_batch(GetParam().config, {{6}, {m % 2 == 0 ? 6 : 2}}, 100 * s + static_cast<uint64_t>(m)));
    const RunTrace one = run_alone(config, steps, backend_by_name("ref"));
    for (const MeshSizes& mesh :
         {MeshSizes{.dp = 2}, MeshSizes{.dp = 3}, MeshSizes{.tp = 2}, MeshSizes{.tp = 2, .dp = 2},
          MeshSizes{.dp = 2, .pp = 2}, MeshSizes{.tp = 2, .dp = 2, .ep = 4}}) {
      const Layout layout{.mesh = mesh, .vpp = 1, .zero = 1, .schedule = "1f1b"};
      SCOPED_TRACE(std::string(unit == RoutingUnit::kGlobal ? "global " : "sequence ") + layout.name());
      const RunTrace got = run_layout(config, steps, layout, backend_by_name("ref"));
      ASSERT_EQ(got.steps.size(), one.steps.size());
      for (size_t s = 0; s < one.steps.size(); ++s) {
        EXPECT_EQ(got.steps[s].tokens_per_expert, one.steps[s].tokens_per_expert);
        EXPECT_EQ(got.steps[s].dropped_per_expert, one.steps[s].dropped_per_expert);
        EXPECT_NEAR(got.steps[s].loss, one.steps[s].loss, 1e-11);
        EXPECT_NEAR(got.steps[s].aux_loss, one.steps[s].aux_loss, 1e-11);
        EXPECT_NEAR(got.steps[s].z_loss, one.steps[s].z_loss, 1e-10);
        EXPECT_NEAR(got.steps[s].grad_norm, one.steps[s].grad_norm, 1e-11 * (1 + one.steps[s].grad_norm));
      }
      const Distance off = distance(got.first_gradients, one.first_gradients);
      EXPECT_LE(off.value, 1e-10) << off.name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Routers, RoutingUnitOverRanks, ::testing::ValuesIn(tiny_routers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
