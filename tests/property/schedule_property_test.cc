// Over many random schedules: the validator takes every legal order and no broken one, and the executor gives the same
// sums in each.
#include <gtest/gtest.h>

#include <algorithm>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

// A legal order of F, I and W (or F and B) of every micro-batch, at most `slots` of them in flight.
Schedule random_schedule(int64_t micro_batches, int64_t slots, bool split, uint64_t seed) {
  Schedule s{.name = "random", .micro_batches = micro_batches, .slots = slots, .split = split, .actions = {}};
  const Rng rng(seed, "schedule");
  std::vector<int> done(static_cast<size_t>(micro_batches), 0);
  const int last = split ? 3 : 2;
  for (uint64_t draw = 0; static_cast<int64_t>(s.actions.size()) < micro_batches * last;) {
    const auto m = static_cast<size_t>(rng.below(draw++, static_cast<uint64_t>(micro_batches)));
    const auto alive = std::count_if(done.begin(), done.end(), [&](int d) { return d > 0 && d < last; });
    if (done[m] == last || (done[m] == 0 && alive >= slots)) continue;
    const ActionKind kinds[] = {ActionKind::kForward, split ? ActionKind::kBackwardInput : ActionKind::kBackward,
                                ActionKind::kBackwardWeight};
    s.actions.push_back({kinds[done[m]++], static_cast<int32_t>(m)});
  }
  return s;
}

TEST(ScheduleProperty, LegalOrdersPassAndBrokenOnesDoNot) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Rng rng(seed, "change");
    const int64_t micro_batches = 1 + static_cast<int64_t>(rng.below(0, 6)),
                  slots = 1 + static_cast<int64_t>(rng.below(1, 4));
    const bool split = rng.below(2, 2) == 1;
    const Schedule s = random_schedule(micro_batches, slots, split, seed);
    ASSERT_NO_THROW(validate_schedule(s)) << schedule_text(s);
    const auto at = static_cast<size_t>(rng.below(3, s.actions.size()));
    const auto place = [&](Schedule& x) { return x.actions.begin() + static_cast<std::ptrdiff_t>(at); };
    Schedule without = s, twice = s, foreign = s, reversed = s, tight = s;
    without.actions.erase(place(without));
    twice.actions.insert(place(twice), s.actions[at]);
    foreign.actions[at].micro_batch = static_cast<int32_t>(micro_batches);
    std::reverse(reversed.actions.begin(), reversed.actions.end());
    tight.slots = 0;
    for (const Schedule& broken : {without, twice, foreign, reversed, tight})
      EXPECT_THROW(validate_schedule(broken), Bug) << schedule_text(broken);
    Schedule other = s;  // B and W apart in a schedule that says they are not, and the other way round
    other.split = !split;
    EXPECT_THROW(validate_schedule(other), Bug);
  }
}

TEST(ScheduleProperty, EveryBuiltScheduleIsLegal) {
  for (const char* name : {"1f1b", "zero_bubble"})
    for (int64_t m = 0; m < 40; ++m) {
      const Schedule s = build_schedule(name, m);
      ASSERT_NO_THROW(validate_schedule(s)) << schedule_text(s);
      EXPECT_EQ(static_cast<int64_t>(s.actions.size()), m * (s.split ? 3 : 2));
    }
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
        const Schedule s = random_schedule(5, 1 + static_cast<int64_t>(seed % 4), split, seed);
        run.step(s, batches);
        const Distance d = distance(run.gradients(), want);
        EXPECT_LT(d.value, 1e-12) << d.name << " in " << schedule_text(s);
        EXPECT_NEAR(run.output.loss(), plain.output.loss(), 1e-12);
        EXPECT_NEAR(run.output.aux_loss(), plain.output.aux_loss(), 1e-12);
        EXPECT_EQ(run.output.tokens_per_expert, plain.output.tokens_per_expert);
      }
    }
  }
}

}  // namespace
}  // namespace concerto::test
