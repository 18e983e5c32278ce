#include "concerto/ops/cpu/isa.h"

#include <gtest/gtest.h>

#include "concerto/base/error.h"

namespace concerto::cpu {
namespace {

TEST(Isa, CapLowersAndNeverRaises) {
  EXPECT_EQ(isa_from_cap("", Isa::kAvx512), Isa::kAvx512);
  EXPECT_EQ(isa_from_cap("avx2", Isa::kAvx512Bf16), Isa::kAvx2);
  EXPECT_EQ(isa_from_cap("avx512_bf16", Isa::kAmxBf16), Isa::kAvx512Bf16);
  EXPECT_EQ(isa_from_cap("amx", Isa::kAmxBf16), Isa::kAmxBf16);
  EXPECT_EQ(isa_from_cap("generic", Isa::kGeneric), Isa::kGeneric);
  try {
    isa_from_cap("avx512_bf16", Isa::kAvx2);
    FAIL() << "a level above the machine's was taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kUnsupported);
    EXPECT_NE(std::string(e.what()).find("avx2"), std::string::npos);
  }
}

TEST(Isa, UnknownCapIsAnError) {
  EXPECT_THROW(isa_from_cap("avx1024", Isa::kAvx512), Error);
  EXPECT_THROW(isa_from_cap("AVX2", Isa::kAvx512), Error);
}

TEST(Isa, DetectedAgreesWithTheCompiler) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  EXPECT_EQ(detected_isa() >= Isa::kAvx2, avx2);
  EXPECT_EQ(detected_isa() >= Isa::kAvx512,
            avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(detected_isa() >= Isa::kAvx512Bf16, avx2 && __builtin_cpu_supports("avx512bf16") != 0);
  const bool tiles = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
  EXPECT_TRUE(tiles || detected_isa() < Isa::kAmxBf16);  // not the other way round: the operating system may refuse
}

}  // namespace
}  // namespace concerto::cpu
