// Products of the cpu backend against ref. Three programs run these tests: on every instruction set that the machine
// has (product_test_levels.cc), on emulated tiles (product_test_emulated.cc), and on tile instructions that trap
// (product_test_trapped.cc).
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "concerto/ops/cpu/own_products.h"
#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/product_test_support.h"
#include "concerto/ops/ref/ref_backend.h"

namespace {
std::atomic<int64_t> news{0};
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  news.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace concerto::cpu {
namespace {

Backend products_of(Isa isa) {
  Backend b;
  b.name = isa_name(isa);
  b.f32 = b.bf16 = true;
  b.linear = own_linear_kernels(isa);
  b.grouped_linear = grouped_linear_kernels(isa);
  fill_router_products(b.router, isa);
  return b;
}

struct Shape3 {
  int64_t m, n, k;
};
const Shape3 kShapes[] = {{1, 1, 1},    {5, 17, 3},   {13, 32, 33},   {67, 100, 64}, {26, 300, 129},
                          {200, 96, 7}, {3, 50, 700}, {20, 40, 3000}, {60, 140, 520}};

class Products : public testing::TestWithParam<Isa> {
 protected:
  Backend backend = products_of(GetParam());
};

TEST_P(Products, LinearForwardAgreesWithRef) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Shape3 s : kShapes)
      for (const bool stat_out : {false, true})
        for (const bool with_bias : {false, true}) {
          const Tensor x = Tensor::random({s.m, s.k}, type, 1, 3), w = Tensor::random({s.n, s.k}, type, 2),
                       b = Tensor::random({s.n}, DType::kF32, 3);
          Tensor y({s.m, s.n}, stat_out ? DType::kF32 : type, 5), want = y;
          for (const auto& [table, out] : {std::pair<const Backend*, Tensor*>{&backend, &y},
                                           std::pair<const Backend*, Tensor*>{&ref_backend(), &want}})
            run(*table, 2, [&, out = out](const Context& ctx) {
              linear_forward(ctx,
                             {.x = x.view(), .w = w.view(), .bias = with_bias ? b.view() : View(), .y = out->view()});
            });
          expect_near(y, want, s.k, fmt::format("{} {}x{}x{}", dtype_name(type), s.m, s.n, s.k));
        }
}

TEST_P(Products, LinearBackwardInputAgreesWithRef) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Shape3 s : kShapes)
      for (const bool stat_out : {false, true})
        for (const bool accumulate : {false, true}) {
          const Tensor dy = Tensor::random({s.m, s.k}, type, 4, 1), w = Tensor::random({s.k, s.n}, type, 5);
          Tensor dx = Tensor::random({s.m, s.n}, stat_out ? DType::kF32 : type, 6, 2), want = dx;
          for (const auto& [table, out] : {std::pair<const Backend*, Tensor*>{&backend, &dx},
                                           std::pair<const Backend*, Tensor*>{&ref_backend(), &want}})
            run(*table, 2, [&, out = out](const Context& ctx) {
              linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .dx = out->view(), .accumulate = accumulate});
            });
          expect_near(dx, want, s.k, fmt::format("{} {}x{}x{}", dtype_name(type), s.m, s.n, s.k));
        }
}

TEST_P(Products, LinearBackwardWeightAgreesWithRef) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Shape3 s : kShapes) {
      const Tensor x = Tensor::random({s.k, s.n}, type, 7, 4), dy = Tensor::random({s.k, s.m}, type, 8, 1);
      Tensor dw = Tensor::random({s.m, s.n}, DType::kF32, 9), want = dw, db = Tensor::random({s.m}, DType::kF32, 10),
             want_db = db;
      run(backend, 2, [&](const Context& ctx) {
        linear_backward_weight(ctx, {.x = x.view(), .dy = dy.view(), .dw = dw.view(), .db = db.view()});
      });
      run(ref_backend(), 1, [&](const Context& ctx) {
        linear_backward_weight(ctx, {.x = x.view(), .dy = dy.view(), .dw = want.view(), .db = want_db.view()});
      });
      expect_near(dw, want, s.k, fmt::format("dw {} {}x{}x{}", dtype_name(type), s.m, s.n, s.k));
      expect_near(db, want_db, s.k, "db");
    }
}

// Ragged, empty first and last, one takes all, one row each, and rows beyond the last offset.
const std::vector<std::vector<int32_t>> kOffsets = {
    {0, 0, 7, 7, 100, 230, 230}, {0, 0, 0, 240, 240, 240, 240}, {0, 1, 2, 3, 4, 5, 6}, {0, 40, 80, 120, 160, 200, 240}};

TEST_P(Products, GroupedAgreesWithRef) {
  const int64_t rows = 240, n = 72, k = 90, experts = 6;
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const auto& offsets : kOffsets) {
      const Tensor x = Tensor::random({rows, k}, type, 11, 2), w = Tensor::random({experts, n, k}, type, 12),
                   o = Tensor::i32(offsets);
      const Tensor dy = Tensor::random({rows, n}, type, 13);
      Tensor y = Tensor::random({rows, n}, type, 14, 1), dx = Tensor::random({rows, k}, type, 15),
             dw = Tensor::random({experts, n, k}, DType::kF32, 16);
      Tensor want_y = y, want_dx = dx, want_dw = dw;
      run(backend, 3, [&](const Context& ctx) {
        grouped_linear_forward(ctx, {.x = x.view(), .w = w.view(), .offsets = o.view(), .y = y.view()});
        grouped_linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .offsets = o.view(), .dx = dx.view()});
        grouped_linear_backward_weight(ctx, {.x = x.view(), .dy = dy.view(), .offsets = o.view(), .dw = dw.view()});
      });
      run(ref_backend(), 1, [&](const Context& ctx) {
        grouped_linear_forward(ctx, {.x = x.view(), .w = w.view(), .offsets = o.view(), .y = want_y.view()});
        grouped_linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .offsets = o.view(), .dx = want_dx.view()});
        grouped_linear_backward_weight(ctx,
                                       {.x = x.view(), .dy = dy.view(), .offsets = o.view(), .dw = want_dw.view()});
      });
      expect_near(y, want_y, k, "y");
      expect_near(dx, want_dx, n, "dx");
      expect_near(dw, want_dw, rows, "dw");
      for (int64_t r = offsets.back(); r < rows; ++r)
        for (int64_t i = 0; i < n; ++i)
          ASSERT_EQ(y.get(r * n + i), want_y.get(r * n + i)) << "row beyond the offsets was written";
    }
}

TEST_P(Products, BrokenOffsetsAreABug) {
  const Tensor x = Tensor::random({8, 4}, DType::kF32, 1), w = Tensor::random({2, 3, 4}, DType::kF32, 2);
  Tensor y({8, 3}, DType::kF32);
  ThreadPool pool(1);
  Arena arena(4 << 20);
  const Context ctx = context_of(backend, pool, arena);
  for (const auto& offsets : {std::vector<int32_t>{0, 5, 4}, {1, 2, 8}, {0, 4, 9}}) {
    const Tensor o = Tensor::i32(offsets);
    EXPECT_THROW(grouped_linear_forward(ctx, {.x = x.view(), .w = w.view(), .offsets = o.view(), .y = y.view()}), Bug);
  }
}

TEST_P(Products, RouterProductsAgreeWithRef) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Shape3 s : {Shape3{130, 8, 96}, Shape3{33, 64, 200}, Shape3{1, 5, 7}}) {
      const Tensor x = Tensor::random({s.m, s.k}, type, 17, 8), w = Tensor::random({s.n, s.k}, DType::kF32, 18);
      const Tensor dlogits = Tensor::random({s.m, s.n}, DType::kF32, 19);
      Tensor logits({s.m, s.n}, DType::kF32), dx = Tensor::random({s.m, s.k}, type, 20),
                                              dw = Tensor::random({s.n, s.k}, DType::kF32, 21);
      Tensor want_logits = logits, want_dx = dx, want_dw = dw;
      const auto all = [&](const Tensor& l, const Tensor& i, const Tensor& g) {
        return [&](const Context& ctx) {
          router_logits(ctx, {.x = x.view(), .w = w.view(), .logits = l.view()});
          router_logits_backward_input(ctx, {.dlogits = dlogits.view(), .w = w.view(), .dx = i.view()});
          router_logits_backward_weight(ctx, {.dlogits = dlogits.view(), .x = x.view(), .dw = g.view()});
        };
      };
      run(backend, 2, all(logits, dx, dw));
      run(ref_backend(), 1, all(want_logits, want_dx, want_dw));
      expect_near(logits, want_logits, s.k, "logits");
      expect_near(dx, want_dx, s.n, "dx");
      expect_near(dw, want_dw, s.m, "dw");
    }
}

// The promise of the grouped product: a row's bits depend on the row, its matrix and K only.
TEST_P(Products, RowsDoNotDependOnRowCountThreadsOrGrouping) {
  const int64_t rows = 130, n = 72, k = 530;
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const Tensor x = Tensor::random({rows, k}, type, 22), one_w = Tensor::random({1, n, k}, type, 23),
                 dy = Tensor::random({rows, n}, type, 24);
    Tensor y({rows, n}, type), dx({rows, k}, type);
    const Tensor whole = Tensor::i32({0, static_cast<int32_t>(rows)});
    run(backend, 1, [&](const Context& ctx) {
      grouped_linear_forward(ctx, {.x = x.view(), .w = one_w.view(), .offsets = whole.view(), .y = y.view()});
      grouped_linear_backward_input(ctx,
                                    {.dy = dy.view(), .w = one_w.view(), .offsets = whole.view(), .dx = dx.view()});
    });
    // Three experts with the same matrix, so that only grouping differs.
    Tensor w({3, n, k}, type);
    for (int e = 0; e < 3; ++e)
      std::memcpy(static_cast<char*>(w.view().data) + e * one_w.view().bytes(), one_w.view().data,
                  static_cast<size_t>(one_w.view().bytes()));
    for (const int threads : {1, 2, 3, 4})
      for (const auto& offsets : {std::vector<int32_t>{0, 0, 130, 130}, {0, 1, 14, 130}, {0, 100, 101, 130}}) {
        const Tensor o = Tensor::i32(offsets);
        Tensor y2({rows, n}, type), dx2({rows, k}, type);
        run(backend, threads, [&](const Context& ctx) {
          grouped_linear_forward(ctx, {.x = x.view(), .w = w.view(), .offsets = o.view(), .y = y2.view()});
          grouped_linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .offsets = o.view(), .dx = dx2.view()});
        });
        EXPECT_TRUE(y2 == y) << "forward, threads " << threads;
        EXPECT_TRUE(dx2 == dx) << "backward_input, threads " << threads;
      }
    for (const int64_t m : {1, 2, 5, 11, 12, 13, 47, 48, 100, 127}) {
      Tensor y2({m, n}, type);
      run(backend, 2, [&](const Context& ctx) {
        linear_forward(ctx,
                       {.x = x.view().rows_range(3, m), .w = one_w.view().reshape({n, k}), .bias = {}, .y = y2.view()});
      });
      for (int64_t i = 0; i < m * n; ++i) ASSERT_EQ(y2.get(i), y.get(3 * n + i)) << "m " << m << " element " << i;
    }
  }
}

TEST_P(Products, WeightGradientsDoNotDependOnThreadsOrOtherGroups) {
  const int64_t rows = 1300, n = 100, k = 70;
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const Tensor x = Tensor::random({rows, k}, type, 25), dy = Tensor::random({rows, n}, type, 26);
    Tensor alone({n, k}, DType::kF32);
    std::memset(alone.view().data, 0, static_cast<size_t>(alone.view().bytes()));
    Tensor db({n}, DType::kF32);
    std::memset(db.view().data, 0, static_cast<size_t>(db.view().bytes()));
    const Tensor alone_zero = alone, db_zero = db;
    const auto group = [&](const View& v) { return v.rows_range(100, 1101); };
    run(backend, 1, [&](const Context& ctx) {
      linear_backward_weight(ctx, {.x = group(x.view()), .dy = group(dy.view()), .dw = alone.view(), .db = db.view()});
    });
    for (const int threads : {2, 3, 4}) {
      Tensor again = alone_zero, db_again = db_zero, grouped({3, n, k}, DType::kF32);
      std::memset(grouped.view().data, 0, static_cast<size_t>(grouped.view().bytes()));
      const Tensor o = Tensor::i32({0, 100, 1201, 1300});
      run(backend, threads, [&](const Context& ctx) {
        linear_backward_weight(
            ctx, {.x = group(x.view()), .dy = group(dy.view()), .dw = again.view(), .db = db_again.view()});
        grouped_linear_backward_weight(ctx,
                                       {.x = x.view(), .dy = dy.view(), .offsets = o.view(), .dw = grouped.view()});
      });
      EXPECT_TRUE(again == alone) << threads;
      EXPECT_TRUE(db_again == db) << threads;
      for (int64_t i = 0; i < n * k; ++i)
        ASSERT_EQ(grouped.get(n * k + i), alone.get(i)) << "threads " << threads << " element " << i;
    }
  }
}

TEST_P(Products, NoHeapAllocation) {
  const Tensor x = Tensor::random({100, 80}, DType::kBF16, 27), w = Tensor::random({60, 80}, DType::kBF16, 28),
               dy = Tensor::random({100, 60}, DType::kBF16, 29);
  Tensor y({100, 60}, DType::kBF16), dx({100, 80}, DType::kBF16), dw = Tensor::random({60, 80}, DType::kF32, 30);
  ThreadPool pool(2);
  Arena arena(16 << 20);
  const Context ctx = context_of(backend, pool, arena);
  const auto all = [&] {
    linear_forward(ctx, {.x = x.view(), .w = w.view(), .bias = {}, .y = y.view()});
    linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .dx = dx.view()});
    linear_backward_weight(ctx, {.x = x.view(), .dy = dy.view(), .dw = dw.view(), .db = {}});
  };
  all();
  const int64_t before = news.load();
  for (int i = 0; i < 3; ++i) all();
  EXPECT_EQ(news.load() - before, 0);
  EXPECT_EQ(arena.mark(), 0);
  ::operator delete(::operator new(8));  // the counter does count
  EXPECT_GT(news.load(), before);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Products);
INSTANTIATE_TEST_SUITE_P(Levels, Products, testing::ValuesIn(levels_under_test()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace concerto::cpu
