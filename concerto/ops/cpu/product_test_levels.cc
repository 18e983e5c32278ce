#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/product_test_support.h"

namespace concerto::cpu {

std::vector<Isa> levels_under_test() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmxBf16})
    if (isa <= detected_isa()) all.push_back(isa);
  return all;
}

namespace {

TEST(ProductKernels, EveryLevelIsBuilt) {
  EXPECT_NE(product_kernels_avx2(), nullptr);
  EXPECT_NE(product_kernels_amx_bf16(), nullptr);
  EXPECT_EQ(&product_kernels(Isa::kAmxBf16, true), product_kernels_amx_bf16());
  EXPECT_EQ(&product_kernels(Isa::kAmxBf16, false), product_kernels_avx512());
  EXPECT_EQ(&product_kernels(Isa::kAvx512Bf16, true), product_kernels_avx512_bf16());
  EXPECT_EQ(&product_kernels(Isa::kAvx512Bf16, false), product_kernels_avx512());
  EXPECT_EQ(&product_kernels(Isa::kAvx2, true), product_kernels_avx2());
}

}  // namespace
}  // namespace concerto::cpu
