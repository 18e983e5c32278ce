// The AMX kernel as it ships, on processors that lack AMX too: there each tile instruction traps, and the handler does
// its work on emulated tiles. So the machine code, its operands and the packing are tested, at a snail's pace. Where
// the processor has tiles nothing traps, and these are one more run of the real thing. Needs AVX-512 for the packing.
#include <signal.h>

#include <algorithm>
#include <cstring>

#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/product_test_support.h"
#include "concerto/ops/cpu/tile.h"

#if defined(__x86_64__) && defined(__linux__)
#include <ucontext.h>

namespace concerto::cpu {
namespace {

#include "concerto/ops/cpu/tile_emulated.h"

int64_t trapped = 0;

// One VEX instruction with a three-byte prefix, map 0F38: the form of all tile instructions.
struct Instruction {
  const uint8_t* at;
  const greg_t* registers;
  int prefix, opcode, reg, rm, other;  // other: the register in VEX.vvvv
  bool memory;
  const uint8_t* end;
  char* base = nullptr;  // of a memory operand, its displacement added
  int64_t index = 0;     // its index register, scaled

  greg_t value(int number) const {
    static constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                       REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[kOrder[number]];
  }

  bool decode() {
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return false;
    const int r = at[1] & 0x80 ? 0 : 8, x = at[1] & 0x40 ? 0 : 8, b = at[1] & 0x20 ? 0 : 8;  // stored inverted
    other = ~(at[2] >> 3) & 15;
    prefix = at[2] & 3;
    opcode = at[3];
    const uint8_t modrm = at[4];
    const int mode = modrm >> 6;
    reg = (modrm >> 3 & 7) + r;
    rm = (modrm & 7) + b;
    end = at + 5;
    memory = mode != 3;
    if (!memory) return true;
    int64_t address = 0;
    bool wide = mode == 2;
    if ((modrm & 7) == 4) {
      const uint8_t sib = *end++;
      const int number = (sib >> 3 & 7) + x;
      if (number != 4) index = value(number) << (sib >> 6);
      if ((sib & 7) == 5 && mode == 0)
        wide = true;
      else
        address = value((sib & 7) + b);
    } else if (mode == 0 && (modrm & 7) == 5) {
      int32_t offset;
      std::memcpy(&offset, end, 4);
      end += 4;
      base = reinterpret_cast<char*>(reinterpret_cast<int64_t>(end) + offset);
      return true;
    } else {
      address = value(rm);
    }
    if (wide) {
      int32_t offset;
      std::memcpy(&offset, end, 4);
      address += offset;
      end += 4;
    } else if (mode == 1) {
      address += static_cast<int8_t>(*end++);
    }
    base = reinterpret_cast<char*>(address);
    return true;
  }

  bool emulate() {
    enum Prefix { kNone, k66, kF3, kF2 };
    if (opcode == 0x49 && memory && reg == 0 && prefix == kNone) {
      TileConfig config;
      std::memcpy(&config, base + index, sizeof config);
      tile_configure(config);
    } else if (opcode == 0x49 && memory && reg == 0 && prefix == k66) {
      const TileConfig config = tile_configuration();
      std::memcpy(base + index, &config, sizeof config);
    } else if (opcode == 0x49 && !memory && prefix == kF2) {
      emulate_zero(reg);
    } else if (opcode == 0x4b && memory && prefix == kF2) {
      emulate_load(reg, base, index);
    } else if (opcode == 0x4b && memory && prefix == kF3) {
      emulate_store(reg, base, index);
    } else if (opcode == 0x5c && !memory && prefix == kF3) {
      emulate_multiply_add(reg, rm, other);
    } else {
      return false;
    }
    return true;
  }
};

void on_illegal_instruction(int, siginfo_t*, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction i{reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers};
  if (i.decode() && i.emulate()) {
    registers[REG_RIP] = reinterpret_cast<greg_t>(i.end);
    __atomic_fetch_add(&trapped, 1, __ATOMIC_RELAXED);
  } else {
    signal(SIGILL, SIG_DFL);  // once more, and the program ends as it would have
  }
}

}  // namespace

std::vector<Isa> levels_under_test() {
  if (detected_isa() < Isa::kAvx512) return {};
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  return {Isa::kAmxBf16};
}

namespace {

TEST(TrappedTiles, AreWhatRuns) {
  if (detected_isa() < Isa::kAvx512) GTEST_SKIP() << "packing needs AVX-512";
  const ProductKernels& k = *product_kernels_amx_bf16();
  const uint32_t one_two = 0x40003f80, three_four = 0x40804040;  // pairs of bf16
  std::vector<uint32_t> a(16 * 16, one_two), b(16 * 32, three_four);
  std::vector<float> c(16 * 32);
  const int64_t before = trapped;
  // Another library may release the tiles of a thread between two products, or give them other shapes.
  for (const uint8_t rows : {0, 7, 16}) {
    TileConfig other;
    if (rows > 0) {
      other = whole_tiles();
      for (auto& r : other.rows) r = r ? rows : 0;
    }
    tile_configure(other);
    k.tile(a.data(), 256, b.data(), 512, c.data(), 32, 16, 1, 16, true, Finish::kKeep, nullptr, 0, nullptr);
    for (const float x : c) ASSERT_EQ(x, 16 * (1 * 3 + 2 * 4));
    std::fill(c.begin(), c.end(), 0.0f);
  }
  EXPECT_EQ(trapped == before, detected_isa() >= Isa::kAmxBf16);
}

}  // namespace
}  // namespace concerto::cpu

#else

namespace concerto::cpu {
std::vector<Isa> levels_under_test() { return {}; }
}  // namespace concerto::cpu

#endif
