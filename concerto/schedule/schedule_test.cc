#include <gtest/gtest.h>

#include "concerto/base/error.h"
#include "concerto/schedule/action.h"

namespace concerto {
namespace {

TEST(Schedule, BuildersPassTheValidator) {
  for (const char* name : {"1f1b", "zero_bubble"})
    for (int64_t m : {0, 1, 2, 7}) EXPECT_NO_THROW(validate_schedule(build_schedule(name, m)));
  EXPECT_EQ(schedule_text(build_schedule("1f1b", 2)), "F0 B0 F1 B1");
  EXPECT_EQ(schedule_text(build_schedule("zero_bubble", 2)), "F0 I0 W0 F1 I1 W1");
}

TEST(Schedule, UnknownNameIsAnError) { EXPECT_THROW(build_schedule("fastest", 1), Error); }

TEST(Schedule, ValidatorFindsEveryBrokenRule) {
  const Schedule good = build_schedule("zero_bubble", 2);
  for (size_t i = 0; i < good.actions.size(); ++i) {
    Schedule missing = good;
    missing.actions.erase(missing.actions.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_THROW(validate_schedule(missing), Bug) << i;
    Schedule twice = good;
    twice.actions.push_back(good.actions[i]);
    EXPECT_THROW(validate_schedule(twice), Bug) << i;
  }
  Schedule early = good;
  std::swap(early.actions[0], early.actions[1]);
  EXPECT_THROW(validate_schedule(early), Bug);
  Schedule crowded = good;  // F0 F1 ... needs two slots
  crowded.actions = {{ActionKind::kForward, 0},        {ActionKind::kForward, 1},
                     {ActionKind::kBackwardInput, 0},  {ActionKind::kBackwardInput, 1},
                     {ActionKind::kBackwardWeight, 1}, {ActionKind::kBackwardWeight, 0}};
  EXPECT_THROW(validate_schedule(crowded), Bug);
  crowded.slots = 2;
  EXPECT_NO_THROW(validate_schedule(crowded));
  for (const int32_t nobody : {-1, 2}) {
    Schedule stray = good;
    stray.actions.push_back({ActionKind::kForward, nobody});
    EXPECT_THROW(validate_schedule(stray), Bug) << nobody;
  }
  Schedule joined = good;  // I and W are there, but it says that it does not use them
  joined.split = false;
  EXPECT_THROW(validate_schedule(joined), Bug);
}

}  // namespace
}  // namespace concerto
