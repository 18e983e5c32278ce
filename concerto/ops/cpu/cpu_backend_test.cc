#include "concerto/ops/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include "concerto/base/error.h"

namespace concerto {
namespace {

TEST(CpuBackend, HasEveryKernelOfItsTypes) {
  EXPECT_NO_THROW(check_backend(cpu_backend(), DType::kF32));
  EXPECT_NO_THROW(check_backend(cpu_backend(), DType::kBF16));
  EXPECT_THROW(check_backend(cpu_backend(), DType::kF64), Error);
}

}  // namespace
}  // namespace concerto
