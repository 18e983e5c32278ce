// Product kernels for AVX2 with FMA: f32 arithmetic, bf16 widened while packing.
#include "concerto/ops/cpu/product_kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace concerto::cpu {
namespace {

constexpr int kUnit = 1, kRows = 6, kVectors = 2;

struct Bits16;

struct Vec {
  static constexpr int64_t kLanes = 8;
  using Sum = __m256;
  using Words = __m256;
  static Sum zero() { return _mm256_setzero_ps(); }
  static Sum add(Sum a, Sum b) { return _mm256_add_ps(a, b); }
  static Sum load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Sum x) { _mm256_storeu_ps(p, x); }
  static void stream(float* p, Sum x) { _mm256_stream_ps(p, x); }
  static void settle() { _mm_sfence(); }
  static void store_bf16(Bits16* p, Sum x) {  // as from_float in product_kernels_body.h
    const __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i bits = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static Words load_words(const uint32_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static Words broadcast(const void* p) { return _mm256_broadcast_ss(static_cast<const float*>(p)); }
  static Sum multiply_add(Sum s, Words a, Words b) { return _mm256_fmadd_ps(a, b, s); }
};

template <class S, bool kStream = false>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth, bool kStream = false>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
#include "concerto/ops/cpu/product_vector_body.h"

inline __m256 load_row(const Bits32* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline __m256 load_row(const Bits16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}

template <class S, bool kStream>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words) {
  if (k < kLanes) {
    pack_block_plain(from, stride, n, k, to, row_words);
    return;
  }
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = i < n ? load_row(from + i * stride) : _mm256_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // r[i + q]: words q and q + 4 of rows i..i + 3
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  float* out = reinterpret_cast<float*>(to);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + i * row_words, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + (i + 4) * row_words, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
}

template <class S, int64_t kWidth, bool kStream>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  pack_lines_plain<S, kWidth>(from, stride, n, k, to);
}

constexpr ProductKernels kTable = make_table();

}  // namespace

const ProductKernels* product_kernels_avx2() { return &kTable; }

}  // namespace concerto::cpu

#else

namespace concerto::cpu {
const ProductKernels* product_kernels_avx2() { return nullptr; }
}  // namespace concerto::cpu

#endif
