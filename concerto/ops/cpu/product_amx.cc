// Product kernels for AMX: tiles of bf16 pairs into tiles of f32 sums.
#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/tile.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace concerto::cpu {
namespace {

constexpr int kUnit = 2, kRows = 16, kVectors = 2;

#include "concerto/ops/cpu/sums_avx512.h"
#include "concerto/ops/cpu/tile_amx.h"

using Vec = SumsAvx512;

template <class S, bool kStream = false>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth, bool kStream = false>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);
void pack_row(const Bits16* from, int64_t n, uint32_t* to);
void pack_square(const Bits16* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
#include "concerto/ops/cpu/product_tile_body.h"
// and on them:
#include "concerto/ops/cpu/packing_avx512.h"
#include "concerto/ops/cpu/packing_tile_avx512.h"

constexpr ProductKernels kTable = make_table();

}  // namespace

const ProductKernels* product_kernels_amx_bf16() { return &kTable; }

}  // namespace concerto::cpu

#else

namespace concerto::cpu {
const ProductKernels* product_kernels_amx_bf16() { return nullptr; }
}  // namespace concerto::cpu

#endif
