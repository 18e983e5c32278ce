// Weights that are packed once, and gradients that are written and not added to: both give the bits of the plain way.
// Run on every instruction set and on emulated tiles, as product_test.cc.
#include <gtest/gtest.h>

#include <limits>

#include "concerto/ops/cpu/own_products.h"
#include "concerto/ops/cpu/product_test_support.h"
#include "concerto/ops/cpu/weight_packing.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto::cpu {
namespace {

class Packing : public testing::TestWithParam<Isa> {
 protected:
  Packing() {
    backend.name = isa_name(GetParam());
    backend.f32 = backend.bf16 = true;
    backend.linear = own_linear_kernels(GetParam());
    backend.grouped_linear = grouped_linear_kernels(GetParam());
  }
  Backend backend;
};

// A weight in guarded memory that held something else before.
class Packed {
 public:
  Packed(const WeightPacking& packing, const Tensor& w, int64_t groups, int threads)
      : forward_(packed_forward_bytes(packing, groups, w.view().rows() / groups, w.view().cols()) + kGuard),
        backward_(packed_backward_bytes(packing, groups, w.view().rows() / groups, w.view().cols()) + kGuard) {
    for (Buffer* b : {&forward_, &backward_}) std::memset(b->data(), 0x7f, static_cast<size_t>(b->bytes()));
    place_ = {&packing, groups, w.view().rows() / groups, w.view().cols(), forward_.data(), backward_.data()};
    run(ref_backend(), threads, [&](const Context& ctx) { pack_weight(ctx, {.from = w.view(), .to = place_}); });
  }
  const PackedWeight& place() const { return place_; }
  bool guards_whole() const {
    for (const Buffer* b : {&forward_, &backward_})
      for (int64_t i = b->bytes() - kGuard; i < b->bytes(); ++i)
        if (b->data()[i] != 0x7f) return false;
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;
  Buffer forward_, backward_;
  PackedWeight place_;
};

struct Case {
  int64_t rows, n, k;
};
const Case kCases[] = {{1, 1, 1},     {7, 5, 3},      {13, 32, 64},   {40, 33, 65},
                       {97, 100, 70}, {30, 72, 1300}, {25, 1300, 90}, {12, 40, 2600}};

View without_memory(View w) {
  w.data = nullptr;
  return w;
}

TEST_P(Packing, OnlyPairsArePacked) {
  EXPECT_EQ(backend.linear.packing != nullptr, GetParam() >= Isa::kAvx512Bf16);
  EXPECT_EQ(backend.linear.packing, backend.grouped_linear.packing);
}

TEST_P(Packing, DenseProductsAreThePlainOnes) {
  const WeightPacking* packing = backend.linear.packing;
  if (!packing) return;
  for (const Case c : kCases)
    for (const bool stat_out : {false, true}) {
      const DType type = DType::kBF16, out = stat_out ? DType::kF32 : type;
      const Tensor x = Tensor::random({c.rows, c.k}, type, 1, 3), w = Tensor::random({c.n, c.k}, type, 2),
                   dy = Tensor::random({c.rows, c.n}, type, 3), bias = Tensor::random({c.n}, DType::kF32, 4);
      const Packed packed(*packing, w, 1, 3);
      Tensor y({c.rows, c.n}, out, 2), dx = Tensor::random({c.rows, c.k}, out, 5);
      Tensor want_y = y, want_dx = dx;
      run(backend, 2, [&](const Context& ctx) {
        linear_forward(ctx, {.x = x.view(), .w = w.view(), .bias = bias.view(), .y = want_y.view()});
        linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .dx = want_dx.view(), .accumulate = stat_out});
      });
      const View shape = without_memory(w.view());
      run(backend, 3, [&](const Context& ctx) {
        linear_forward(ctx, {.x = x.view(), .w = shape, .bias = bias.view(), .y = y.view(), .packed = packed.place()});
        linear_backward_input(
            ctx, {.dy = dy.view(), .w = shape, .dx = dx.view(), .accumulate = stat_out, .packed = packed.place()});
      });
      const std::string what = fmt::format("{} rows of {} x {}, {}", c.rows, c.n, c.k, dtype_name(out));
      EXPECT_TRUE(y == want_y) << what;
      EXPECT_TRUE(dx == want_dx) << what;
      EXPECT_TRUE(packed.guards_whole()) << what;
    }
}

TEST_P(Packing, GroupedProductsAreThePlainOnes) {
  const WeightPacking* packing = backend.grouped_linear.packing;
  if (!packing) return;
  const Tensor offsets = Tensor::i32({0, 0, 100, 103, 103, 240});
  for (const auto& [n, k] : {std::pair{72, 90}, {31, 1030}, {1030, 31}}) {
    const Tensor x = Tensor::random({250, k}, DType::kBF16, 1), w = Tensor::random({5, n, k}, DType::kBF16, 2),
                 dy = Tensor::random({250, n}, DType::kBF16, 3);
    const Packed packed(*packing, w, 5, 2);
    Tensor y = Tensor::random({250, n}, DType::kBF16, 4), dx = Tensor::random({250, k}, DType::kBF16, 5);
    Tensor want_y = y, want_dx = dx;
    run(backend, 2, [&](const Context& ctx) {
      grouped_linear_forward(ctx, {.x = x.view(), .w = w.view(), .offsets = offsets.view(), .y = want_y.view()});
      grouped_linear_backward_input(ctx,
                                    {.dy = dy.view(), .w = w.view(), .offsets = offsets.view(), .dx = want_dx.view()});
    });
    const View shape = without_memory(w.view());
    run(backend, 3, [&](const Context& ctx) {
      grouped_linear_forward(
          ctx, {.x = x.view(), .w = shape, .offsets = offsets.view(), .y = y.view(), .packed = packed.place()});
      grouped_linear_backward_input(
          ctx, {.dy = dy.view(), .w = shape, .offsets = offsets.view(), .dx = dx.view(), .packed = packed.place()});
    });
    EXPECT_TRUE(y == want_y) << n << " x " << k;
    EXPECT_TRUE(dx == want_dx) << n << " x " << k;
  }
}

TEST_P(Packing, FromF32IsRoundedOnce) {
  const WeightPacking* packing = backend.linear.packing;
  if (!packing) return;
  const Tensor w = Tensor::random({70, 600}, DType::kF32, 1);
  Tensor rounded({70, 600}, DType::kBF16);
  for (int64_t i = 0; i < 70 * 600; ++i) rounded.set(i, w.get(i));
  const Packed from_f32(*packing, w, 2, 3), from_bf16(*packing, rounded, 2, 1);
  const auto bytes = [&](char* PackedWeight::*side, int64_t size) {
    return std::memcmp(from_f32.place().*side, from_bf16.place().*side, static_cast<size_t>(size));
  };
  EXPECT_EQ(bytes(&PackedWeight::forward, packed_forward_bytes(*packing, 2, 35, 600)), 0);
  EXPECT_EQ(bytes(&PackedWeight::backward, packed_backward_bytes(*packing, 2, 35, 600)), 0);
}

TEST_P(Packing, OtherShapesAreABug) {
  const WeightPacking* packing = backend.linear.packing;
  if (!packing) return;
  const Tensor w = Tensor::random({32, 16}, DType::kBF16, 1), x = Tensor::random({4, 32}, DType::kBF16, 2),
               other = Tensor::random({16, 32}, DType::kBF16, 3);
  const Packed packed(*packing, w, 1, 1);
  Tensor y({4, 16}, DType::kBF16);
  EXPECT_THROW(run(backend, 1,
                   [&](const Context& ctx) {
                     linear_forward(
                         ctx, {.x = x.view(), .w = other.view(), .bias = {}, .y = y.view(), .packed = packed.place()});
                   }),
               Bug);
}

// What was there before, NaN or not, is gone; a group without rows gives zeros.
TEST_P(Packing, WrittenGradientsAreThoseAddedToZeros) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const auto& [m, n, rows] : {std::tuple{40, 72, 700}, {13, 33, 3}, {100, 600, 1100}, {5, 7, 0}}) {
      const Tensor x = Tensor::random({rows, n}, type, 1), dy = Tensor::random({rows, m}, type, 2),
                   offsets = Tensor::i32({0, 0, rows / 3, rows, rows});
      Tensor dw({m, n}, DType::kF32), grouped({4, m, n}, DType::kF32);
      for (Tensor* t : {&dw, &grouped})
        for (int64_t i = 0; i < t->view().elements(); ++i) t->set(i, 0);
      Tensor written = dw, written_groups = grouped;
      for (const Backend* b : {static_cast<const Backend*>(&backend), &ref_backend()}) {
        for (Tensor* t : {&written, &written_groups})
          for (int64_t i = 0; i < t->view().elements(); ++i) t->set(i, nan);
        for (const bool accumulate : {true, false})
          run(*b, 2, [&](const Context& ctx) {
            linear_backward_weight(ctx, {.x = x.view(),
                                         .dy = dy.view(),
                                         .dw = (accumulate ? dw : written).view(),
                                         .db = {},
                                         .accumulate = accumulate});
            grouped_linear_backward_weight(ctx, {.x = x.view(),
                                                 .dy = dy.view(),
                                                 .offsets = offsets.view(),
                                                 .dw = (accumulate ? grouped : written_groups).view(),
                                                 .accumulate = accumulate});
          });
        for (int64_t i = 0; i < m * n; ++i) ASSERT_EQ(written.get(i), dw.get(i)) << b->name << " " << i;
        for (int64_t i = 0; i < 4 * m * n; ++i) ASSERT_EQ(written_groups.get(i), grouped.get(i)) << b->name << " " << i;
        for (Tensor* t : {&dw, &grouped})
          for (int64_t i = 0; i < t->view().elements(); ++i) t->set(i, 0);
      }
      EXPECT_TRUE(written.guards_whole() && written_groups.guards_whole());
    }
}

// Results that are larger than the caches are stored past them; sums over more than one block of rows wait till then.
TEST_P(Packing, LargeGradientsAreWrittenWhole) {
  constexpr int64_t kGroups = 5, kM = 300, kN = 1520, kRows = 2700;
  static_assert(kGroups * kM * kN * 4 > 8 << 20);
  const Tensor x = Tensor::random({kRows, kN}, DType::kBF16, 1), dy = Tensor::random({kRows, kM}, DType::kBF16, 2),
               offsets = Tensor::i32({0, 520, 520, 533, 1633, 2700});
  Buffer added(kGroups * kM * kN * 4), written(kGroups * kM * kN * 4);
  std::memset(added.data(), 0, static_cast<size_t>(added.bytes()));
  std::memset(written.data(), 0xff, static_cast<size_t>(written.bytes()));
  for (const bool accumulate : {true, false})
    run(backend, 2, [&](const Context& ctx) {
      grouped_linear_backward_weight(ctx,
                                     {.x = x.view(),
                                      .dy = dy.view(),
                                      .offsets = offsets.view(),
                                      .dw = View((accumulate ? added : written).data(), {kGroups, kM, kN}, DType::kF32),
                                      .accumulate = accumulate});
    });
  const auto *a = reinterpret_cast<const float*>(added.data()), *b = reinterpret_cast<const float*>(written.data());
  for (int64_t i = 0; i < kGroups * kM * kN; ++i) ASSERT_EQ(a[i], b[i]) << i;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Packing);
INSTANTIATE_TEST_SUITE_P(Levels, Packing, testing::ValuesIn(levels_under_test()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace concerto::cpu
