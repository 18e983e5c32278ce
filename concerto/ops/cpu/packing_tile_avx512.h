// Packing of A into tiles by AVX-512; included inside anonymous namespaces after packing_avx512.h.

void pack_row(const Bits16* from, int64_t n, uint32_t* to) {
  __builtin_prefetch(from + 128);
  _mm512_storeu_si512(to, load_row(from, n));
}

void pack_square(const Bits16* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  static const Bits16 kNoRow[kLanes] = {};
  constexpr int64_t kAhead = 32;  // the next square's rows: short pieces that no processor fetches ahead by itself
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int64_t w = 0; w < 16; ++w) {
    const Bits16* low = from + 2 * w * stride;
    __builtin_prefetch(low + kAhead * stride);
    __builtin_prefetch(low + (kAhead + 1) * stride);
    r[w] = 2 * w < k ? load_words_of(low, 2 * w + 1 < k ? low + stride : kNoRow, n) : _mm512_setzero_si512();
  }
  transpose(r, t);
#pragma GCC unroll 16
  for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 16, t[i]);
}
