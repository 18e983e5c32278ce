#include "concerto/data/prefetcher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "concerto/base/error.h"

namespace concerto {
namespace {

void fill_step(int64_t step, std::vector<MicroBatch>& out) {
  out.resize(2);
  for (auto& batch : out) batch.token_ids.assign(64, static_cast<int32_t>(step));
}

TEST(Prefetcher, GivesStepsInOrderAtAnyDepth) {
  for (const int depth : {0, 1, 2, 5}) {
    Prefetcher prefetcher(fill_step, 10, 60, depth);
    for (int64_t step = 10; step < 60; ++step) {
      const auto& batches = prefetcher.next();
      ASSERT_EQ(batches.size(), 2u);
      for (const auto& batch : batches)
        EXPECT_EQ(batch.token_ids, std::vector<int32_t>(64, static_cast<int32_t>(step))) << "depth " << depth;
    }
    EXPECT_THROW(prefetcher.next(), Bug);
  }
}

TEST(Prefetcher, NeverRunsFurtherAheadThanAskedNorTouchesWhatIsHeld) {
  std::atomic<int64_t> filled{0};
  Prefetcher prefetcher(
      [&](int64_t step, std::vector<MicroBatch>& out) {
        fill_step(step, out);
        ++filled;
      },
      0, 1000, 2);
  for (int64_t step = 0; step < 20; ++step) {
    const auto& batches = prefetcher.next();
    if (step % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_LE(filled.load(), step + 3);
    EXPECT_EQ(batches[1].token_ids.back(), step);
  }
}

TEST(Prefetcher, BuffersAreUsedAgain) {
  Prefetcher prefetcher(fill_step, 0, 100, 2);
  std::vector<const int32_t*> first;
  for (int64_t step = 0; step < 100; ++step) {
    const auto* data = prefetcher.next()[0].token_ids.data();
    if (step < 3)
      first.push_back(data);
    else
      EXPECT_EQ(data, first[step % 3]);
  }
}

TEST(Prefetcher, ForwardsExceptionsAtTheirStep) {
  for (const int depth : {0, 1, 3}) {
    Prefetcher prefetcher(
        [](int64_t step, std::vector<MicroBatch>& out) {
          if (step == 4) throw Error(ErrorCode::kData, "x.bin", "document 3 is broken");
          fill_step(step, out);
        },
        0, 10, depth);
    for (int64_t step = 0; step < 4; ++step) EXPECT_EQ(prefetcher.next()[0].token_ids[0], step);
    EXPECT_THROW(prefetcher.next(), Error);
    EXPECT_THROW(prefetcher.next(), Error);
  }
}

TEST(Prefetcher, StopsCleanlyWhileFullAndWhileEmpty) {
  { Prefetcher full(fill_step, 0, 1000, 3); }
  { Prefetcher none(fill_step, 5, 5, 3); }
  {
    Prefetcher taken(fill_step, 0, 1000, 3);
    taken.next();
  }
}

}  // namespace
}  // namespace concerto
