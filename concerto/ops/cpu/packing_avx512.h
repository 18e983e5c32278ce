// Packing by blocks of 16 x 16 words and lines of 16, for the two AVX-512 files; included inside their anonymous
// namespaces, after product_kernels_body.h.

// Up to 16 words of one row; elements from `count` on read as zero and are not touched.
inline __m512i load_row(const Bits32* p, int64_t count) {
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u), p);
}
inline __m512i load_row(const Bits16* p, int64_t count) {
  if constexpr (kUnit == 2) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(count >= 32 ? 0xffffffffu : (1u << count) - 1u), p);
  } else {
    const __m256i half =
        _mm256_maskz_loadu_epi16(static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u), p);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  }
}

// t[w][i] = r[i][w], in words; r is overwritten.
[[gnu::always_inline]] inline void transpose(__m512i (&r)[16], __m512i (&t)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + q]: words q, q + 4, q + 8, q + 12 of rows i..i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const __m512i low01 = _mm512_shuffle_i32x4(r[q], r[q + 4], 0x88),
                  low23 = _mm512_shuffle_i32x4(r[q + 8], r[q + 12], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(r[q], r[q + 4], 0xdd),
                  high23 = _mm512_shuffle_i32x4(r[q + 8], r[q + 12], 0xdd);
    t[q] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[q + 4] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[q + 8] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[q + 12] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

template <bool kStream>
inline void put(uint32_t* to, __m512i words) {
  if constexpr (kStream)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), words);
  else
    _mm512_storeu_si512(to, words);
}

template <class S, bool kStream>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words) {
  constexpr int64_t kAhead = 256 / sizeof(S);  // many short streams: more than the processor follows by itself
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    __builtin_prefetch(from + (i < n ? i : 0) * stride + kAhead);
    r[i] = i < n ? load_row(from + i * stride, k) : _mm512_setzero_si512();
  }
  transpose(r, t);
  const int64_t words = words_of(k);
#pragma GCC unroll 16
  for (int w = 0; w < 16; ++w)
    if (w < words) put<kStream>(to + w * row_words, t[w]);
}

// Up to 16 words from one place of two rows.
inline __m512i load_words_of(const Bits32* low, const Bits32*, int64_t n) { return load_row(low, n); }
inline __m512i load_words_of(const Bits16* low, const Bits16* high, int64_t n) {
  const auto mask = static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
  const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, low));
  if constexpr (kUnit == 1) return _mm512_slli_epi32(first, 16);
  const __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, high));
  return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
}

// The words of columns [0, 16) and [16, 32) of two rows, of which n are there.
struct TwoLines {
  __m512i first, second;
};
inline TwoLines interleave(const Bits16* low, const Bits16* high, int64_t n) {
  alignas(64) static constexpr uint16_t kPairs[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const auto mask = static_cast<__mmask32>(n >= 32 ? 0xffffffffu : (1u << n) - 1u);
  const __m512i l = _mm512_maskz_loadu_epi16(mask, low), h = _mm512_maskz_loadu_epi16(mask, high);
  return {_mm512_permutex2var_epi16(l, _mm512_load_si512(kPairs[0]), h),
          _mm512_permutex2var_epi16(l, _mm512_load_si512(kPairs[1]), h)};
}

template <class S, int64_t kWidth, bool kStream>
[[gnu::always_inline]] inline void pack_some_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  static const S kNoRow[kWidth + 16] = {};
  for (int64_t i = 0; i < k; i += kUnit, from += kUnit * stride, to += kWidth) {
    const S* high = i + 1 < k ? from + stride : kNoRow;  // read if words are pairs
    if constexpr (kUnit == 2 && kWidth == 32) {
      const TwoLines lines = interleave(from, high, n);
      put<kStream>(to, lines.first);
      put<kStream>(to + 16, lines.second);
    } else {
#pragma GCC unroll 2
      for (int64_t v = 0; v < kWidth; v += 16) {
        const int64_t left = n - v < 0 ? 0 : smaller(n - v, kWidth - v);
        put<kStream>(to + v, load_words_of(from + v, high + v, left));
      }
    }
  }
}

template <class S, int64_t kWidth, bool kStream>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  if (n < kWidth || k < kLinesAtOnce * kUnit) return pack_some_lines<S, kWidth, kStream>(from, stride, n, k, to);
  if constexpr (kWidth == 12) {  // four lines of 12 words are three of 16
    __m512i line[4];
#pragma GCC unroll 4
    for (int64_t q = 0; q < 4; ++q)
      line[q] = load_words_of(from + q * kUnit * stride, from + (q * kUnit + kUnit - 1) * stride, 12);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19);
    const __m512i middle = _mm512_setr_epi32(4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(line[0], low, line[1]));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi32(line[1], middle, line[2]));
    _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi32(line[2], high, line[3]));
  } else {
    pack_some_lines<S, kWidth, kStream>(from, stride, kWidth, kLinesAtOnce * kUnit, to);
  }
}
