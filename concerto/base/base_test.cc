#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "concerto/base/dtype.h"
#include "concerto/base/error.h"
#include "concerto/base/rng.h"
#include "concerto/base/thread_pool.h"

namespace concerto {
namespace {

TEST(DType, Bf16RoundsToNearestEven) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // half way, even stays
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // half way, odd goes up
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(NAN))));
}

TEST(DType, F16RoundTripsEveryValue) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = f16_to_float(static_cast<uint16_t>(h));
    if (std::isnan(f)) continue;
    EXPECT_EQ(float_to_f16(f), h);
  }
}

// The nearest of all f16 values, of two equally near ones that with the even mantissa; from half way above the largest
// on, infinity.
uint16_t nearest_f16(float x) {
  static const std::vector<double> values = [] {  // of the finite ones, ascending: their index is their bits
    std::vector<double> v;
    for (uint32_t h = 0; h < 0x7c00; ++h) v.push_back(f16_to_float(static_cast<uint16_t>(h)));
    return v;
  }();
  const double size = std::abs(static_cast<double>(x));
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (size >= 65520) return sign | 0x7c00;
  const auto above = static_cast<size_t>(std::lower_bound(values.begin(), values.end(), size) - values.begin());
  if (above == values.size()) return static_cast<uint16_t>(sign | (above - 1));
  if (above == 0) return sign;
  const double up = values[above] - size, down = size - values[above - 1];
  const size_t nearest = up < down ? above : down < up ? above - 1 : above % 2 == 0 ? above : above - 1;
  return static_cast<uint16_t>(sign | nearest);
}

TEST(DType, F16RoundsToNearestEven) {
  int64_t ties = 0;
  const auto check = [&](float x) { ASSERT_EQ(float_to_f16(x), nearest_f16(x)) << fmt::format("{:a}", x); };
  for (uint32_t h = 0; h < 0x7c00; ++h) {  // half way to the next, and just beside it
    const double low = f16_to_float(static_cast<uint16_t>(h)),
                 high = h == 0x7bff ? 65536 : f16_to_float(static_cast<uint16_t>(h + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    ties += middle == (low + high) / 2;
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) check(x), check(-x);
  }
  EXPECT_EQ(ties, 0x7c00);
  for (uint64_t i = 0; i < 200000; ++i) {  // anywhere, of every exponent
    const float x = std::bit_cast<float>(static_cast<uint32_t>(Rng(1, "f16").bits(i)));
    if (!std::isnan(x)) check(x);
  }
  EXPECT_EQ(float_to_f16(INFINITY), 0x7c00);
  EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(NAN))));
}

TEST(Error, SaysWhereWhatAndFix) {
  const Error e(ErrorCode::kConfig, "model.k", "is 0, wanted at least 1", "Set it to 2.");
  EXPECT_STREQ(e.what(), "model.k: is 0, wanted at least 1. Set it to 2.");
}

TEST(Error, CheckThrowsBugWithValuesAndThePathInTheProject) {
  try {
    CHECK(1 == 2, "got {}", 1);
    ADD_FAILURE();
  } catch (const Bug& e) {
    const std::string text = e.what();
    EXPECT_TRUE(text.starts_with("internal error at concerto/base/base_test.cc:")) << text;
    EXPECT_TRUE(text.ends_with("CHECK(1 == 2) failed: got 1")) << text;
  }
}

TEST(Rng, PhiloxKnownAnswer) {  // test vectors of the Random123 distribution
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

// Draws must stay what they were: recorded losses depend on them.
TEST(Rng, NamesKeepTheirStreams) {
  EXPECT_EQ(hash_name("data.order"), 0xcd032c0ed7f93d91u);
  EXPECT_EQ(Rng(1, "data.order").bits(0), 0x98f2a07acfa74fecu);
}

TEST(Rng, NormalHasUnitVariance) {
  const Rng rng(1, "test");
  double sum = 0, squares = 0;
  for (uint64_t i = 0; i < 100000; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 1e5, 0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1, 0.02);
}

TEST(ThreadPool, EveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 7, 64, 1000}) {
      std::vector<int> hits(static_cast<size_t>(n));
      pool.parallel_for(n, 16, [&](int64_t b, int64_t e, int) {
        for (int64_t i = b; i < e; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (int h : hits) EXPECT_EQ(h, 1);
    }
  }
}

TEST(ThreadPool, NestedCallsRunInline) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  pool.run([&](int) { pool.parallel_for(10, 1, [&](int64_t b, int64_t e, int) { sum += e - b; }); });
  EXPECT_EQ(sum, 40);
}

TEST(ThreadPool, ExceptionReachesTheCaller) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.run([](int t) {
    if (t == 1) throw Error(ErrorCode::kIo, "x", "y");
  }),
               Error);
  int calls = 0;
  pool.run([&](int t) {
    if (t == 0) ++calls;
  });
  EXPECT_EQ(calls, 1);
}

// The parts and what each is given depend on the size of the pool only, never on the machine.
TEST(ThreadPool, PartsAreThoseOfThePoolsSize) {
  for (const int threads : {1, 2, 5, 64, 1000}) {
    ThreadPool pool(threads);
    constexpr int64_t kItems = 12345;
    std::vector<std::pair<int64_t, int64_t>> ranges(static_cast<size_t>(threads));
    std::vector<int> calls(static_cast<size_t>(threads));
    for (int repeat = 0; repeat < 3; ++repeat)
      pool.parallel_for(kItems, 4, [&](int64_t b, int64_t e, int part) {
        ranges[static_cast<size_t>(part)] = {b, e};
        ++calls[static_cast<size_t>(part)];  // no atomic: a part is never run by two at once
      });
    const int64_t blocks = (kItems + 3) / 4;
    for (int part = 0; part < threads; ++part) {
      EXPECT_EQ(calls[static_cast<size_t>(part)], 3);
      EXPECT_EQ(ranges[static_cast<size_t>(part)].first, blocks * part / threads * 4);
      EXPECT_EQ(ranges[static_cast<size_t>(part)].second, std::min(kItems, blocks * (part + 1) / threads * 4));
    }
  }
}

int threads_of_this_process() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

TEST(ThreadPool, StartsNoMoreThreadsThanProcessors) {
  std::thread([] {}).join();  // the thread sanitizer starts one of its own with the first
  const int before = threads_of_this_process();
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  ThreadPool pool(1000);
  EXPECT_EQ(pool.size(), 1000);
  EXPECT_LE(threads_of_this_process() - before, std::max(2, CPU_COUNT(&set)) - 1);
}

// A worker that the system does not schedule holds nobody up: here it is kept busy with the part before.
TEST(ThreadPool, TheCallerRunsWhatNoWorkerHasBegun) {
  ThreadPool pool(4);
  std::atomic<int> begun{0}, others{0};
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> of_caller{0};
  pool.run([&](int) {
    if (std::this_thread::get_id() == caller) {
      ++of_caller;
    } else if (++others == 1) {  // the first part that a worker begins ends after all parts have begun
      while (begun.load() < 3) std::this_thread::yield();
    }
    ++begun;
  });
  EXPECT_EQ(begun, 4);
  EXPECT_GE(of_caller, 1);
}

TEST(ThreadPool, ManyShortCallsLoseNoPart) {
  ThreadPool pool(7);
  int64_t sums[7] = {};
  for (int call = 0; call < 3000; ++call) pool.run([&](int part) { sums[part] += call; });
  for (const int64_t sum : sums) EXPECT_EQ(sum, int64_t{3000} * 2999 / 2);
}

TEST(ThreadPool, AThreadThatTheSystemDoesNotGiveIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have no room for such a stack either, and end";
#endif
  pthread_attr_t before, huge;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(::pthread_attr_init(&huge), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, size_t{1} << 46), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  try {
    ThreadPool pool(2);
    ADD_FAILURE() << "a stack of 64 TiB";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kMemory);
    EXPECT_TRUE(std::string(e.what()).starts_with("threads: 2 wanted, 1 started: ")) << e.what();
  }
  ::pthread_setattr_default_np(&before);
}

}  // namespace
}  // namespace concerto
