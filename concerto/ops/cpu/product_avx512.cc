// Product kernels for AVX-512 (F, BW, DQ, VL): f32 arithmetic, bf16 widened while packing.
#include "concerto/ops/cpu/product_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace concerto::cpu {
namespace {

constexpr int kUnit = 1, kRows = 12, kVectors = 2;

struct Bits16;

struct Vec {
  static constexpr int64_t kLanes = 16;
  using Sum = __m512;
  using Words = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Sum x) { _mm512_storeu_ps(p, x); }
  static void store_bf16(Bits16* p, Sum x) {  // as from_float in product_kernels_body.h
    const __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i bits =
        _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
  }
  static Words load_words(const uint32_t* p) { return _mm512_loadu_ps(p); }
  static Words broadcast(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p))); }
  static Sum multiply_add(Sum s, Words a, Words b) { return _mm512_fmadd_ps(a, b, s); }
};

template <class S>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth>
void pack_line(const S* low, const S* high, int64_t n, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
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
