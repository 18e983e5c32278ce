// Vectors of floats as wide as this instruction set has them, for the isa_*.cc sources. Everything lives in the
// namespace of the instruction set, so that copies compiled with different instructions never meet. Arithmetic is that
// of GCC's vector types; intrinsics only where those say too little.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "concerto/ops/cpu/vector/kernel_table.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef float HalfVec __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

#define CONCERTO_INLINE static inline __attribute__((always_inline))

// Which lanes an access touches: all, or the first n (0 < n < kLanes). for_lanes hands them out.
struct All {};
struct First {
  int n;
};

template <class F>
CONCERTO_INLINE void for_lanes(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, All{});
  if (i < n) f(i, First{static_cast<int>(n - i)});
}

CONCERTO_INLINE Vec splat(float x) { return Vec{} + x; }

CONCERTO_INLINE Vec load(const float* p, All = {}) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
CONCERTO_INLINE void store(float* p, Vec v, All = {}) { __builtin_memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)

CONCERTO_INLINE __mmask16 mask_of(First m) { return static_cast<__mmask16>((1u << m.n) - 1); }
CONCERTO_INLINE Vec load(const float* p, First m) { return _mm512_maskz_loadu_ps(mask_of(m), p); }
CONCERTO_INLINE void store(float* p, Vec v, First m) { _mm512_mask_storeu_ps(p, mask_of(m), v); }
CONCERTO_INLINE Vec widen(__m256i halves) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
CONCERTO_INLINE Vec load(const uint16_t* p, All = {}) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
CONCERTO_INLINE Vec load(const uint16_t* p, First m) { return widen(_mm256_maskz_loadu_epi16(mask_of(m), p)); }

#else

CONCERTO_INLINE Vec load(const float* p, First m) {
  float buffer[kLanes] = {};
  for (int i = 0; i < m.n; ++i) buffer[i] = p[i];
  return load(buffer);
}
CONCERTO_INLINE void store(float* p, Vec v, First m) {
  for (int i = 0; i < m.n; ++i) p[i] = v[i];
}
CONCERTO_INLINE Vec load(const uint16_t* p, All = {}) {
#if defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  return (Vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
}
CONCERTO_INLINE Vec load(const uint16_t* p, First m) {
  uint16_t buffer[kLanes] = {};
  for (int i = 0; i < m.n; ++i) buffer[i] = p[i];
  return load(buffer);
}

#endif

// bf16 bits in the upper half of each word: round to nearest even, NaN stays NaN, subnormals are kept.
CONCERTO_INLINE IntVec round_bf16(Vec v) {
  const WordVec u = (WordVec)v;
  const WordVec rounded = u + 0x7fffu + ((u >> 16) & 1);
  return (IntVec)(v != v ? (u | 0x400000u) : rounded);
}

// The same up or down by 16 random bits a lane: round_stochastic of base/stochastic_rounding.h, the lower half cut off.
CONCERTO_INLINE Vec round_with(Vec v, WordVec random) {
  const WordVec u = (WordVec)v, rounded = u + random;
  return (Vec)((v != v ? (u | 0x400000u) : rounded) & 0xffff0000u);
}

// The upper half of each word.
#if defined(__AVX512F__)
CONCERTO_INLINE void store_upper(uint16_t* p, IntVec words, All = {}) {
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)words, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}
CONCERTO_INLINE void store_upper(uint16_t* p, IntVec words, First m) {
  _mm256_mask_storeu_epi16(p, mask_of(m), _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)words, 16)));
}
#else
CONCERTO_INLINE void store_upper(uint16_t* p, IntVec bits, All = {}) {
  // The arithmetic shift makes the signed saturation of the pack an identity.
#if defined(__AVX2__)
  const __m256i words = _mm256_srai_epi32((__m256i)bits, 16);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
#else
  const __m128i words = _mm_srai_epi32((__m128i)bits, 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(words, words));
#endif
}
CONCERTO_INLINE void store_upper(uint16_t* p, IntVec bits, First m) {
  uint16_t buffer[kLanes];
  store_upper(buffer, bits);
  for (int i = 0; i < m.n; ++i) p[i] = buffer[i];
}
#endif

template <class M = All>
CONCERTO_INLINE void store_exact(uint16_t* p, Vec v, M m = {}) {
  store_upper(p, round_bf16(v), m);
}

template <class M>
CONCERTO_INLINE void store_exact(float* p, Vec v, M m) {
  store(p, v, m);
}

// For activations: the instruction, where there is one, takes subnormals for zero. Copies of weights must equal a later
// cast of them and take store_exact.
#if defined(__AVX512BF16__)
CONCERTO_INLINE void store(uint16_t* p, Vec v, All = {}) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
CONCERTO_INLINE void store(uint16_t* p, Vec v, First m) {
  _mm256_mask_storeu_epi16(p, mask_of(m), (__m256i)_mm512_cvtneps_pbh(v));
}
#else
template <class M = All>
CONCERTO_INLINE void store(uint16_t* p, Vec v, M m = {}) {
  store_exact(p, v, m);
}
#endif

// Lanes beyond m become `fill`.
CONCERTO_INLINE Vec keep(Vec v, All, float) { return v; }
CONCERTO_INLINE Vec keep(Vec v, First m, float fill) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < m.n ? v : splat(fill);
}

// b where either is NaN.
CONCERTO_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return _mm_max_ps(a, b);
#endif
}
CONCERTO_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return _mm_min_ps(a, b);
#endif
}
CONCERTO_INLINE Vec sqrt(Vec v) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#else
  return _mm_sqrt_ps(v);
#endif
}

CONCERTO_INLINE float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
#endif
}
CONCERTO_INLINE float max_lane(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// The first i in [0, n) with p[i] == x, or n.
CONCERTO_INLINE int64_t first_equal(const float* p, int64_t n, float x) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i < n; i += kLanes) {
    const __mmask16 valid = n - i >= kLanes ? 0xffff : mask_of({static_cast<int>(n - i)});
    const __mmask16 hits = _mm512_mask_cmpeq_ps_mask(valid, _mm512_maskz_loadu_ps(valid, p + i), splat(x));
    if (hits) return i + __builtin_ctz(hits);
  }
  return n;
#else
  while (i < n && !(p[i] == x)) ++i;
  return i;
#endif
}

// A sum of squares in double, a lane each.
struct SquareSum {
  Doubles low{}, high{};
  __attribute__((always_inline)) void add(Vec v) {
    HalfVec halves[2];
    __builtin_memcpy(halves, &v, sizeof v);
    const Doubles a = __builtin_convertvector(halves[0], Doubles), b = __builtin_convertvector(halves[1], Doubles);
    low += a * a;
    high += b * b;
  }
  __attribute__((always_inline)) double total() const {
    const Doubles both = low + high;
    double s = 0;
    for (int i = 0; i < kLanes / 2; ++i) s += both[i];
    return s;
  }
};

// Nearest integer for |v| < 2^22.
CONCERTO_INLINE Vec nearest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, 0);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (v + 12582912.0f) - 12582912.0f;
#endif
}

// v * 2^n for whole n in [-160, 160], subnormal and infinite results included.
CONCERTO_INLINE Vec scale_by_power(Vec v, Vec n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(v, n);
#else
  const IntVec k = __builtin_convertvector(n, IntVec), half = k >> 1;
  return v * (Vec)((half + 127) << 23) * (Vec)((k - half + 127) << 23);
#endif
}

// e^x with an error below 2 ulp; 0 and infinity where e^x is beyond float, NaN for NaN. Cephes' polynomial on [-ln2/2,
// ln2/2].
CONCERTO_INLINE Vec exp(Vec x) {
  x = min(splat(89.0f), max(splat(-104.0f), x));
  const Vec n = nearest(x * kLog2E);
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return scale_by_power(p * (r * r) + r + 1.0f, n);
}

// 2^x for x <= 0 with an error of some 3 ulp, exact at 0: what the softmax of attention needs. Chebyshev fit of (2^r -
// 1) / r on [-1/2, 1/2].
CONCERTO_INLINE Vec exp2_negative(Vec x) {
  x = max(splat(-150.0f), x);
  const Vec n = nearest(x);
  const Vec r = x - n;
  Vec p = splat(1.338130254e-3f);
  p = p * r + 9.666368515e-3f;
  p = p * r + 5.550381014e-2f;
  p = p * r + 2.402234904e-1f;
  p = p * r + 6.931471806e-1f;
  return scale_by_power(p * r + 1.0f, n);
}

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
