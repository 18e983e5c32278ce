#include "concerto/ops/backend.h"

#include <cstdlib>

#include "concerto/ops/cpu/cpu_backend.h"
#include "concerto/ops/cuda/cuda_backend.h"
#include "concerto/ops/op_test.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto::test {
namespace {

TEST(Backend, RefHasEverything) {
  for (DType type : {DType::kF32, DType::kBF16, DType::kF64}) EXPECT_NO_THROW(check_backend(ref_backend(), type));
}

TEST(Backend, EveryCaseIsWhole) {
  for (const BackendCase& c : backend_cases()) EXPECT_NO_THROW(check_backend(find_backend(c.backend), c.type));
}

TEST(Backend, MissingTypeAndMissingKernelAreNamed) {
  Backend half = ref_backend();
  half.name = "half";
  half.bf16 = false;
  half.attention.cached = nullptr;
  const auto problem = [&](DType type) {
    try {
      check_backend(half, type);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kUnsupported);
      return e.problem;
    }
    return std::string();
  };
  EXPECT_NE(problem(DType::kBF16).find("half has no bf16"), std::string::npos);
  EXPECT_NE(problem(DType::kF32).find("attention_cached"), std::string::npos);
  EXPECT_NE(problem(DType::kI32).find("i32"), std::string::npos);
}

TEST(Backend, CudaSaysThatItIsPlanned) {
  try {
    cuda_backend();
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kUnsupported);
    EXPECT_NE(std::string(e.what()).find("planned, not built"), std::string::npos);
  }
}

// The outermost op counts: a head is a head, not two products and a loss.
TEST(Profile, OutermostOpCounts) {
  OpProfile profile;
  run_f64([&](OpRun& r) {
    Context ctx = r.context();
    ctx.profile = r.dry() ? nullptr : &profile;
    const View w = r.in(Kind::kCompute, {3, 2}, Values(6)), x = r.in(Kind::kCompute, {1, 2}, Values(2));
    head_loss(ctx, {.x = x,
                    .w = w,
                    .bias = {},
                    .targets = r.in(Kind::kI32, {1}, {0}),
                    .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {0}),
                    .dx = {},
                    .dw = {},
                    .db = {},
                    .token_loss = {}});
    linear_forward(ctx, {.x = x, .w = w, .bias = {}, .y = r.out("y", Kind::kCompute, {1, 3})});
  });
  for (int i = 0; i < static_cast<int>(OpFamily::kCount); ++i) {
    const auto family = static_cast<OpFamily>(i);
    EXPECT_EQ(profile.calls[i], family == OpFamily::kHead || family == OpFamily::kDense) << op_family_name(family);
    EXPECT_STRNE(op_family_name(family), "?");
  }
}

// CTest runs this with each CONCERTO_ISA and counts the run as skipped where the level is not there.
TEST(CpuBackend, HasTheLevelThatIsAskedFor) {
  try {
    EXPECT_STREQ(cpu_backend().name, "cpu");
  } catch (const Error& e) {
    ASSERT_EQ(e.code, ErrorCode::kUnsupported) << e.what();
    GTEST_SKIP() << "the processor lacks this: " << e.what();
  }
}

}  // namespace
}  // namespace concerto::test
