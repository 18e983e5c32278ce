#include "concerto/ops/cpu/isa.h"

#include <cstdlib>
#include <string>

#include "concerto/base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace concerto::cpu {
namespace {

constexpr Isa kLevels[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmxBf16};

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

// Linux lets a process use the tile registers (8 KB a thread) only after it has asked; the leave holds for all its
// threads.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;  // asm/prctl.h and the processor's XCR0 bit
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}
#endif

Isa probe_isa() {
#if defined(__x86_64__)
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const unsigned state = saved_state();
  const CpuidWords one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const bool avx2 =
      all(state, kYmm) && all(one.c, (1u << 12) | (1u << 28) | (1u << 29)) && (seven.b & (1u << 5));  // fma, avx, f16c
  const bool avx512 =
      avx2 && all(state, kZmm) && all(seven.b, (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31));  // f, dq, bw, vl
  const bool avx512_bf16 = avx512 && (seven_one.a & (1u << 5));
  const bool amx = avx512_bf16 && all(state, kTiles) && all(seven.d, (1u << 22) | (1u << 24));  // bf16 products, tiles
  if (amx && tiles_permitted()) return Isa::kAmxBf16;
  if (avx512_bf16) return Isa::kAvx512Bf16;
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
    case Isa::kAmxBf16:
      return "amx";
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
              "Use generic, avx2, avx512, avx512_bf16 or amx, or unset it.");
}

Isa detected_isa() {
  static const Isa isa = probe_isa();
  return isa;
}

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

}  // namespace concerto::cpu
