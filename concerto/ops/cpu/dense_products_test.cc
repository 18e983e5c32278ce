#include "concerto/ops/cpu/dense_products.h"

#include <gtest/gtest.h>

#include "concerto/ops/cpu/onednn_linear.h"
#include "concerto/ops/cpu/product_test_support.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto::cpu {
namespace {

TEST(DenseChoice, FollowsTheWish) {
  for (const char* own : {"", "own"}) {
    EXPECT_FALSE(choose_dense(own, Isa::kAmxBf16, true).onednn_bf16);
    EXPECT_FALSE(choose_dense(own, Isa::kAmxBf16, true).onednn_f32);
  }
  EXPECT_TRUE(choose_dense("onednn", Isa::kAmxBf16, true).onednn_bf16);
  EXPECT_TRUE(choose_dense("onednn", Isa::kAvx512Bf16, true).onednn_bf16);
  EXPECT_TRUE(choose_dense("onednn", Isa::kAvx2, true).onednn_f32);
  EXPECT_FALSE(choose_dense("onednn", Isa::kAvx2, true).onednn_bf16) << "oneDNN has no bf16 below AVX-512-BF16";
}

TEST(DenseChoice, ErrorsSayWhatToDo) {
  for (const char* wish : {"onednn", "fastest"}) {
    try {
      choose_dense(wish, Isa::kAvx2, false);
      FAIL() << wish;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kUnsupported);
      EXPECT_FALSE(e.fix.empty());
    }
  }
}

class OneDnn : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!onednn_built()) GTEST_SKIP() << "built without oneDNN";
    if (GetParam() == DType::kBF16 && detected_isa() < Isa::kAvx512Bf16) GTEST_SKIP() << "oneDNN has no bf16 here";
    backend.linear = onednn_linear_kernels();
  }
  Backend backend;
};

TEST_P(OneDnn, AgreesWithRef) {
  const DType type = GetParam();
  const Backend* both[] = {&backend, &ref_backend()};
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 5, 7}, {70, 33, 50}, {130, 64, 200}})
    for (const bool stat_out : {false, true})
      for (const bool extra : {false, true}) {  // bias, accumulate, bias gradient
        const DType out = stat_out ? DType::kF32 : type;
        const Tensor x = Tensor::random({m, k}, type, 1, 3), w = Tensor::random({n, k}, type, 2),
                     b = Tensor::random({n}, DType::kF32, 3);
        const Tensor dy = Tensor::random({m, n}, type, 4, 2);
        Tensor y[2] = {Tensor({m, n}, out, 1), Tensor({m, n}, out, 1)};
        Tensor dx[2] = {Tensor::random({m, k}, out, 5, 4), Tensor::random({m, k}, out, 5, 4)};
        Tensor dw[2] = {Tensor::random({n, k}, DType::kF32, 6), Tensor::random({n, k}, DType::kF32, 6)};
        Tensor db[2] = {Tensor::random({n}, DType::kF32, 7), Tensor::random({n}, DType::kF32, 7)};
        for (int i = 0; i < 2; ++i)
          run(*both[i], 2, [&](const Context& ctx) {
            linear_forward(ctx, {.x = x.view(), .w = w.view(), .bias = extra ? b.view() : View(), .y = y[i].view()});
            linear_backward_input(ctx, {.dy = dy.view(), .w = w.view(), .dx = dx[i].view(), .accumulate = extra});
            linear_backward_weight(ctx, {.x = x.view(),
                                         .dy = dy.view(),
                                         .dw = dw[i].view(),
                                         .db = extra ? db[i].view() : View(),
                                         .accumulate = extra});
          });
        expect_near(y[0], y[1], k, "y");
        expect_near(dx[0], dx[1], n, "dx");
        expect_near(dw[0], dw[1], m, "dw");
        expect_near(db[0], db[1], m, "db");
      }
}

TEST_P(OneDnn, KeepsPrimitivesUpToABound) {
  const DType type = GetParam();
  const Tensor x = Tensor::random({300, 8}, type, 1), w = Tensor::random({4, 8}, type, 2);
  Tensor y({300, 4}, type);
  ThreadPool pool(1);
  Arena arena(1 << 20);
  const Context ctx = context_of(backend, pool, arena);
  const auto forward = [&](int64_t m) {
    linear_forward(ctx, {.x = x.view().rows_range(0, m), .w = w.view(), .bias = {}, .y = y.view().rows_range(0, m)});
  };
  forward(1);
  const int before = onednn_cached_primitives();
  for (int i = 0; i < 5; ++i) forward(1);
  EXPECT_EQ(onednn_cached_primitives(), before) << "a known shape made a new primitive";
  for (int64_t m = 1; m <= kMaxPrimitives + 20; ++m) forward(m);
  EXPECT_EQ(onednn_cached_primitives(), kMaxPrimitives);
}

INSTANTIATE_TEST_SUITE_P(Types, OneDnn, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace concerto::cpu
