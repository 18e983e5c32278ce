// Product kernels for AVX-512 (F, BW, DQ, VL): f32 arithmetic, bf16 widened while packing.
#include "concerto/ops/cpu/product_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace concerto::cpu {
namespace {

constexpr int kUnit = 1, kRows = 12, kVectors = 2;

#include "concerto/ops/cpu/sums_avx512.h"

struct Vec : SumsAvx512 {
  using Words = __m512;
  static Words load_words(const uint32_t* p) { return _mm512_loadu_ps(p); }
  static Words broadcast(const void* p) { return _mm512_set1_ps(*static_cast<const float*>(p)); }
  static Sum multiply_add(Sum s, Words a, Words b) { return _mm512_fmadd_ps(a, b, s); }
};

template <class S, bool kStream = false>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth, bool kStream = false>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
#include "concerto/ops/cpu/product_vector_body.h"
// and on it:
#include "concerto/ops/cpu/packing_avx512.h"

constexpr ProductKernels kTable = make_table();

}  // namespace

const ProductKernels* product_kernels_avx512() { return &kTable; }

}  // namespace concerto::cpu

#else

namespace concerto::cpu {
const ProductKernels* product_kernels_avx512() { return nullptr; }
}  // namespace concerto::cpu

#endif
