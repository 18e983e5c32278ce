#include "concerto/ops/cpu/isa.h"

#include <cstdlib>
#include <string>

#include "concerto/base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace concerto::cpu {
namespace {

constexpr Isa kLevels[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

#if defined(__x86_64__)
struct CpuidWords {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

CpuidWords cpuid(unsigned leaf, unsigned subleaf) {
  CpuidWords r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// Which register files the operating system saves (XCR0); zero if it does not use xsave at all.
unsigned saved_state() {
  if (!(cpuid(1, 0).c & (1u << 27))) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

constexpr bool all(unsigned word, unsigned mask) { return (word & mask) == mask; }
#endif

Isa probe_isa() {
#if defined(__x86_64__)
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
  const unsigned state = saved_state();
  const CpuidWords one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const bool avx2 =
      all(state, kYmm) && all(one.c, (1u << 12) | (1u << 28) | (1u << 29)) && (seven.b & (1u << 5));  // fma, avx, f16c
  const bool avx512 =
      avx2 && all(state, kZmm) && all(seven.b, (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31));  // f, dq, bw, vl
  if (avx512 && (seven_one.a & (1u << 5))) return Isa::kAvx512Bf16;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa choose_isa() {
  const char* cap = std::getenv("CONCERTO_ISA");
  return isa_from_cap(cap ? cap : "", detected_isa());
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return "generic";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "?";
}

Isa isa_from_cap(std::string_view cap, Isa detected) {
  if (cap.empty()) return detected;
  for (const Isa isa : kLevels) {
    if (cap != isa_name(isa)) continue;
    if (isa > detected)
      throw Error(ErrorCode::kUnsupported, "CONCERTO_ISA",
                  fmt::format("{}, but this processor has {}", cap, isa_name(detected)),
                  "Unset CONCERTO_ISA, or set it to a lower level.");
    return isa;
  }
  throw Error(ErrorCode::kUnsupported, "CONCERTO_ISA", fmt::format("'{}' is no instruction set", cap),
              "Use generic, avx2, avx512 or avx512_bf16, or unset it.");
}

Isa detected_isa() {
  static const Isa isa = probe_isa();
  return isa;
}

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

bool has_amx_bf16() {
#if defined(__x86_64__)
  constexpr unsigned kTiles = (1u << 17) | (1u << 18);
  return all(saved_state(), kTiles) && all(cpuid(7, 0).d, (1u << 24) | (1u << 22));  // tiles, bf16 products on them
#else
  return false;
#endif
}

}  // namespace concerto::cpu
