// Over many random schedules the executor gives the same sums in each.
#include <gtest/gtest.h>

#include <algorithm>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

// A legal order of F, I and W (or F and B) of every micro-batch, at most `slots` of them in flight.
PipelineSchedule random_schedule(int64_t micro_batches, int64_t slots, bool split, uint64_t seed) {
  PipelineSchedule s{
      .name = "random", .micro_batches = micro_batches, .split = split, .ranks = {{}}, .slots = {{slots}}};
  const Rng rng(seed, "schedule");
  std::vector<int> done(static_cast<size_t>(micro_batches), 0);
  const int last = split ? 3 : 2;
  for (uint64_t draw = 0; static_cast<int64_t>(s.ranks[0].size()) < micro_batches * last;) {
    const auto m = static_cast<size_t>(rng.below(draw++, static_cast<uint64_t>(micro_batches)));
    const auto alive = std::count_if(done.begin(), done.end(), [&](int d) { return d > 0 && d < last; });
    if (done[m] == last || (done[m] == 0 && alive >= slots)) continue;
    const ActionKind kinds[] = {ActionKind::kForward, split ? ActionKind::kBackwardInput : ActionKind::kBackward,
                                ActionKind::kBackwardWeight};
    s.ranks[0].push_back({kinds[done[m]++], static_cast<int32_t>(m)});
  }
  return s;
}

// In f64 only the order of sums differs between orders.
TEST(ScheduleProperty, EveryOrderGivesTheSameGradients) {
  ThreadPool pool(1);
  ModelConfig config = tiny_moe();
  config.num_nextn_predict_layers = 1;
  std::vector<MicroBatch> batches;
  for (uint64_t i = 0; i < 5; ++i) batches.push_back(random_batch(config, {{3 + static_cast<int>(i)}, {4, 2}}, 60 + i));
  TinyRun plain(config, backend_by_name("ref"), pool, DType::kF64);
  plain.step(batches);
  const Tensors want = plain.gradients();
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
    for (const bool split : {false, true}) {
      TinyRun run(config, backend_by_name("ref"), pool, DType::kF64,
                  {.schedule = split ? "zero_bubble" : "1f1b", .recompute = recompute, .slots = 4});
      for (uint64_t seed = 0; seed < 10; ++seed) {
        const PipelineSchedule s = random_schedule(5, 1 + static_cast<int64_t>(seed % 4), split, seed);
        ASSERT_NO_THROW(validate_pipeline(s)) << list_text(s.ranks[0]);
        run.step(s, batches);
        const Distance d = distance(run.gradients(), want);
        EXPECT_LT(d.value, 1e-12) << d.name << " in " << list_text(s.ranks[0]);
        EXPECT_NEAR(run.output.loss(), plain.output.loss(), 1e-12);
        EXPECT_NEAR(run.output.aux_loss(), plain.output.aux_loss(), 1e-12);
        EXPECT_EQ(run.output.tokens_per_expert, plain.output.tokens_per_expert);
      }
    }
  }
}

}  // namespace
}  // namespace concerto::test
