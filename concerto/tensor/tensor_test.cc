#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "concerto/base/test_errors.h"
#include "concerto/tensor/arena.h"
#include "concerto/tensor/first_touch.h"
#include "concerto/tensor/values.h"

namespace concerto {
namespace {

TEST(Arena, CountsTheSameAsItTakes) {
  Arena count, real(1 << 16);
  for (Arena* a : {&count, &real}) {
    a->take({3, 5}, DType::kF32);
    ArenaScope scope(*a);
    a->take({100}, DType::kBF16);
  }
  EXPECT_EQ(count.high_water(), real.high_water());
  EXPECT_EQ(count.mark(), real.mark());
}

TEST(Arena, FullIsAnError) {
  Arena a(128);
  EXPECT_THROW(a.take({1000}, DType::kF32), Error);
  EXPECT_NO_THROW(a.take({32}, DType::kF32));
}

TEST(Buffer, SaysWhatIsTooLargeAndHowToNeedLess) {
  const int64_t too_much = int64_t{1} << 60;
  const auto error = [](auto&& f) { return error_of(ErrorCode::kMemory, f); };
  EXPECT_EQ(error([&] {
              Buffer b(too_much, {"weights", "Use a smaller model."});
            }),
            "weights: cannot get 1152921504606846976 bytes (1073741824.0 GiB) of memory. Use a smaller model.");
  EXPECT_EQ(error([&] { Buffer b(too_much); }).find("batch"), std::string::npos);
  EXPECT_NE(error([&] { Arena a(too_much); }).find("training.micro_batch_size"), std::string::npos);
}

TEST(Buffer, ANegativeSizeIsAMistakeOfOurs) {
  EXPECT_THROW(Buffer(-1), Bug);
  EXPECT_EQ(Buffer(0).data(), nullptr);
}

TEST(Arena, PoisonFillsReleasedMemory) {
  Arena a(4096);
  a.poison();
  EXPECT_TRUE(std::isnan(a.take({4}, DType::kF32).as<float>()[3]));
}

TEST(Arena, EmptyArenasArePoisonedToo) {  // found by the undefined-behaviour sanitizer
  Arena a(0);
  a.poison();
  ArenaScope scope(a);
  EXPECT_EQ(a.take({0}, DType::kF32).elements(), 0);
}

TEST(View, RowAndColumnRanges) {
  float x[6] = {0, 1, 2, 3, 4, 5};
  const View v(x, {2, 3}, DType::kF32);
  EXPECT_EQ(v.rows_range(1, 1).as<float>()[0], 3);
  const View c = v.cols_range(1, 2);
  EXPECT_EQ(c.as<float>()[c.row_stride], 4);
  EXPECT_FALSE(c.dense());
}

TEST(Values, SkipTheGapsAndReadEveryType) {
  float x[6] = {0, 1, NAN, 3, 4, INFINITY};
  const View v(x, {2, 3}, DType::kF32);
  EXPECT_EQ(to_doubles(v.cols_range(0, 2)), (std::vector<double>{0, 1, 3, 4}));
  EXPECT_TRUE(all_finite(v.cols_range(0, 2)));
  EXPECT_FALSE(all_finite(v.rows_range(0, 1)));
  EXPECT_FALSE(all_finite(v.rows_range(1, 1)));
  bf16 b[2] = {bf16(1.5f), bf16(-2.0f)};
  EXPECT_EQ(to_doubles(View(b, {2}, DType::kBF16)), (std::vector<double>{1.5, -2}));
  int32_t i[1] = {-7};
  EXPECT_EQ(to_doubles(View(i, {1}, DType::kI32)), std::vector<double>{-7});
  EXPECT_TRUE(all_finite(View(i, {1}, DType::kI32)));
  int64_t n[1] = {40840};
  EXPECT_EQ(to_doubles(View(n, {1}, DType::kI64)), std::vector<double>{40840});
}

// Pages of [p, p + bytes) that are in memory.
int64_t resident_pages(char* p, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(p) / 4096 * 4096;
  const size_t length = reinterpret_cast<uintptr_t>(p) + static_cast<size_t>(bytes) - begin;
  std::vector<unsigned char> pages((length + 4095) / 4096);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), length, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char c) { return (c & 1) != 0; });
}

TEST(FirstTouch, MakesWhatIsFreshAndNothingElse) {
  constexpr int64_t kPages = 500;  // below the size that asks for huge pages
  for (const int threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    const Buffer buffer(kPages * 4096);
    EXPECT_EQ(resident_pages(buffer.data(), buffer.bytes()), 0);
    std::memset(buffer.data() + 100 * 4096, 7, 50 * 4096);
    char* const p = buffer.data();
    first_touch(pool, std::vector<Extent>{{p, p + 100 * 4096 - 64, p},                           // up to the written
                                          {p + 100 * 4096, p + 300 * 4096 + 1, p + 150 * 4096},  // written, then fresh
                                          {p + 350 * 4096 - 1, p + 350 * 4096, p + 350 * 4096 - 1},  // one byte
                                          {p + 400 * 4096, p + 400 * 4096, p + 400 * 4096}});        // nothing
    EXPECT_EQ(resident_pages(p, 301 * 4096), 301) << threads;
    EXPECT_EQ(resident_pages(p + 301 * 4096, 199 * 4096), 1) << threads;
    for (int64_t i = 0; i < kPages * 4096; ++i) {
      const bool written = i >= 100 * 4096 && i < 150 * 4096;
      if (p[i] != (written ? 7 : 0)) FAIL() << "byte " << i;
    }
  }
}

TEST(Arena, ACountingOneNotesWhatReachesBeyondAllBefore) {
  Arena arena;
  const int64_t mark = arena.mark();
  arena.take_bytes(1000);  // 1024 with the padding
  arena.release(mark);
  arena.take_bytes(640);  // within what was there
  arena.take_bytes(640);
  ASSERT_EQ(arena.growth().size(), 2u);
  EXPECT_EQ(arena.growth()[0].begin, 0);
  EXPECT_EQ(arena.growth()[0].end, 1024);
  EXPECT_EQ(arena.growth()[0].fresh, 0);
  EXPECT_EQ(arena.growth()[1].begin, 640);
  EXPECT_EQ(arena.growth()[1].end, 1280);
  EXPECT_EQ(arena.growth()[1].fresh, 1024);
  Arena real(4096);
  real.take_bytes(100);
  EXPECT_TRUE(real.growth().empty());
}

}  // namespace
}  // namespace concerto
