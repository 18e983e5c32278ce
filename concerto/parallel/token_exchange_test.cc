#include "concerto/parallel/token_exchange.h"

#include <gtest/gtest.h>

#include "concerto/base/part.h"
#include "concerto/comm/local/local_world.h"

namespace concerto {
namespace {

// Row t, column c of rank r's matrix.
double value(int64_t t, int64_t c, int64_t r) { return static_cast<double>(1000 * r + 10 * t + c); }

View matrix(std::vector<float>& memory, int64_t rows, int64_t cols) {
  memory.assign(static_cast<size_t>(rows * cols), -1.0f);
  return View(memory.data(), {rows, cols}, DType::kF32);
}

TEST(TokenExchange, RaggedRowsAndEmptyShards) {
  for (const int ranks : {1, 2, 3, 4})
    for (const int64_t tokens : {0, 1, 5, 7, 8})
      run_local_ranks(ranks, [&](Communicator& world) {
        const GroupTokenExchange exchange(world);
        const Context ctx;
        const int64_t cols = 3;
        const Part own = part_of(tokens, ranks, world.rank());
        std::vector<float> a, b, c, d;
        const View local = matrix(a, own.count, cols), all = matrix(b, tokens, cols), partial = matrix(c, tokens, cols),
                   sum = matrix(d, own.count, cols);
        for (int64_t i = 0; i < own.count * cols; ++i)
          a[static_cast<size_t>(i)] = static_cast<float>(value(own.begin + i / cols, i % cols, 0));
        for (int64_t i = 0; i < tokens * cols; ++i)
          c[static_cast<size_t>(i)] = static_cast<float>(value(i / cols, i % cols, world.rank()));
        exchange.gather(ctx, local, all);
        exchange.reduce_scatter(ctx, partial, sum);
        for (int64_t i = 0; i < tokens * cols; ++i)
          ASSERT_EQ(b[static_cast<size_t>(i)], value(i / cols, i % cols, 0)) << i;
        for (int64_t i = 0; i < own.count * cols; ++i) {
          double want = 0;
          for (int r = 0; r < ranks; ++r) want += value(own.begin + i / cols, i % cols, r);
          ASSERT_EQ(d[static_cast<size_t>(i)], want) << i;
        }
      });
}

TEST(TokenExchange, PartsLieRankAfterRank) {
  run_local_ranks(3, [](Communicator& world) {
    const GroupTokenExchange exchange(world);
    double mine[4], all[12];
    for (int i = 0; i < 4; ++i) mine[i] = value(i, 0, world.rank());
    exchange.gather_parts({}, View(mine, {2, 2}, DType::kF64), View(all, {6, 2}, DType::kF64));
    for (int i = 0; i < 12; ++i) EXPECT_EQ(all[i], value(i % 4, 0, i / 4));
  });
}

TEST(TokenExchange, UnitsHaveAnyNumberOfRowsARank) {
  run_local_ranks(3, [](Communicator& world) {
    DataRowExchange exchange(world);
    for (const auto& counts : {std::vector<int64_t>{2, 0, 3}, std::vector<int64_t>{0, 4, 1}}) {
      const int64_t own = counts[static_cast<size_t>(world.rank())];
      exchange.share_counts(own);
      ASSERT_EQ(exchange.total(), 5);
      int64_t first = 0;
      for (int r = 0; r < world.rank(); ++r) first += counts[static_cast<size_t>(r)];
      EXPECT_EQ(exchange.begin(), first);
      std::vector<float> a, b;
      const View mine = matrix(a, own, 2), all = matrix(b, 5, 2);
      for (int64_t i = 0; i < own * 2; ++i)
        a[static_cast<size_t>(i)] = static_cast<float>(value(first + i / 2, i % 2, 0));
      exchange.gather({}, mine, all);
      for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(b[static_cast<size_t>(i)], value(i / 2, i % 2, 0));
    }
    EXPECT_EQ(exchange.first(), world.rank() == 0);
  });
}

TEST(TokenExchange, SendsNothingInADryRun) {
  run_local_ranks(2, [](Communicator& world) {
    const GroupTokenExchange exchange(world);
    const Context dry{.dry_run = true};
    if (world.rank() == 0) exchange.gather(dry, View(nullptr, {1, 4}, DType::kF32), View(nullptr, {2, 4}, DType::kF32));
    EXPECT_EQ(world.traffic().operations, 0);
  });
}

}  // namespace
}  // namespace concerto
