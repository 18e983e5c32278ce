// Vectors of 16 f32 sums and their write-out, for the AVX-512 files; included inside their anonymous namespaces.

struct Bits16;

struct SumsAvx512 {
  static constexpr int64_t kLanes = 16;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Sum x) { _mm512_storeu_ps(p, x); }
  static void stream(float* p, Sum x) { _mm512_stream_ps(p, x); }
  static void settle() { _mm_sfence(); }
  static void store_bf16(Bits16* p, Sum x) {  // as from_float in product_kernels_body.h
    const __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i bits =
        _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
  }
};
