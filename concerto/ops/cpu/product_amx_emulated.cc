// The AMX kernel on emulated tiles and plain loops, in the place of product_amx.cc: its tests run on every processor.
#include "concerto/base/error.h"
#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/tile.h"

namespace concerto::cpu {
namespace {

constexpr int kUnit = 2, kRows = 16, kVectors = 2;

#include "concerto/ops/cpu/tile_emulated.h"

struct Bits16;

struct Vec {
  static constexpr int64_t kLanes = 16;
  struct Sum {
    float lane[kLanes];
  };
  static Sum add(Sum a, const Sum& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static Sum load(const float* p) {
    Sum x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, const Sum& x) { __builtin_memcpy(p, &x, sizeof x); }
  static void stream(float* p, const Sum& x) { store(p, x); }
  static void settle() {}
  static void store_bf16(Bits16* p, const Sum& x);
};

template <class S>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);
void pack_row(const Bits16* from, int64_t n, uint32_t* to);
void pack_square(const Bits16* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
#include "concerto/ops/cpu/product_tile_body.h"

template <class S>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words) {
  pack_block_plain(from, stride, n, k, to, row_words);
}

template <class S, int64_t kWidth>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  pack_lines_plain<S, kWidth>(from, stride, n, k, to);
}

void pack_row(const Bits16* from, int64_t n, uint32_t* to) {
  for (int64_t w = 0; w < kTileWide; ++w)
    to[w] = 2 * w < n ? word_of(from[2 * w], 2 * w + 1 < n ? from[2 * w + 1] : Bits16{0}) : 0;
}

void pack_square(const Bits16* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  for (int64_t i = 0; i < kTileRows; ++i)
    for (int64_t w = 0; w < kTileWide; ++w) {
      const Bits16* low = from + 2 * w * stride + i;
      to[i * kTileWide + w] = i < n && 2 * w < k ? word_of(low[0], 2 * w + 1 < k ? low[stride] : Bits16{0}) : 0;
    }
}

inline void Vec::store_bf16(Bits16* p, const Sum& x) {
  for (int i = 0; i < kLanes; ++i) from_float(x.lane[i], p + i);
}

constexpr ProductKernels kTable = make_table();

}  // namespace

const ProductKernels* product_kernels_amx_bf16() { return &kTable; }

// This build has no level in between.
const ProductKernels* product_kernels_avx2() { return nullptr; }
const ProductKernels* product_kernels_avx512() { return nullptr; }
const ProductKernels* product_kernels_avx512_bf16() { return nullptr; }

}  // namespace concerto::cpu
