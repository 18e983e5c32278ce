// The products of attention: register tile, packing. A packed element E is one f32, or (where the processor multiplies
// bf16) a pair of bf16 that are neighbours in the sum, so that one step of the tile handles kStep<E> terms.
//
//   A  [M][steps]: rows, elements follow the sum.
//   B  panels of kPanel columns, each [steps][columns of the panel]; the last may be a narrower multiple of kLanes.
//   C  [M][N] f32.
#pragma once

#include "concerto/ops/cpu/vector/simd.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {

typedef uint32_t Pair;  // two bf16, the first in the lower half

template <class E>
constexpr int kStep = 1;
template <>
constexpr int kStep<Pair> = 2;

template <class T>
struct Packed {
  typedef float Element;
};
#if defined(__AVX512BF16__)
template <>
struct Packed<uint16_t> {
  typedef Pair Element;
};
#endif

constexpr int kTileRows = 6;
constexpr int kTileVecs = kLanes == 16 ? 4 : 2;  // what the registers hold
constexpr int kPanel = kTileVecs * kLanes;
constexpr int kKeyBlock = 64;
constexpr int kForwardQueries = 16 * kTileRows;
constexpr int kBackwardQueries = 64;
static_assert(kKeyBlock % kPanel == 0 && kKeyGroup % kLanes == 0 && kKeyBlock % kKeyGroup == 0);

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
template <class E>
constexpr int64_t steps_of(int64_t terms) {
  return (terms + kStep<E> - 1) / kStep<E>;
}

CONCERTO_INLINE Vec multiply_add(float a, Vec b, Vec c) { return c + b * a; }
CONCERTO_INLINE Vec load_packed(const float* p) { return load(p); }
#if defined(__AVX512BF16__)
CONCERTO_INLINE __m512bh load_packed(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
CONCERTO_INLINE Vec multiply_add(Pair a, __m512bh b, Vec c) {
  return _mm512_dpbf16_ps(c, b, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)));
}
#endif

// c += A B of one tile.
template <int kRows, int kVecs, class E>
CONCERTO_INLINE void multiply(const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t steps,
                              Vec (&c)[kRows][kVecs]) {
  for (int64_t k = 0; k < steps; ++k, b += b_stride) {
    decltype(load_packed(b)) columns[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) columns[j] = load_packed(b + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) c[r][j] = multiply_add(a[r * a_stride + k], columns[j], c[r][j]);
  }
}

// How a tile starts: from zero, from c, or from c times one factor a row.
enum class Start { kZero, kSum, kScaledSum };

template <int kRows, int kVecs, Start kStart, class E>
void tile(const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t steps, float* c, int64_t c_stride,
          const float* factors) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      sums[r][j] = kStart == Start::kZero ? Vec{} : load(c + r * c_stride + j * kLanes);
      if (kStart == Start::kScaledSum) sums[r][j] *= factors[r];
    }
  multiply(a, a_stride, b, b_stride, steps, sums);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) store(c + r * c_stride + j * kLanes, sums[r][j]);
}

template <Start kStart, class E>
void any_tile(int64_t rows, int64_t vecs, const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t steps,
              float* c, int64_t c_stride, const float* factors) {
  const auto by_rows = [&]<int kVecs>() {
    switch (rows) {
      case 1:
        return tile<1, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
      case 2:
        return tile<2, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
      case 3:
        return tile<3, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
      case 4:
        return tile<4, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
      case 5:
        return tile<5, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
      default:
        return tile<6, kVecs, kStart>(a, a_stride, b, b_stride, steps, c, c_stride, factors);
    }
  };
  switch (vecs) {
    case 1:
      return by_rows.template operator()<1>();
    case 2:
      return by_rows.template operator()<2>();
    case 3:
      if constexpr (kTileVecs > 2) return by_rows.template operator()<3>();
      break;
    default:
      if constexpr (kTileVecs > 2) return by_rows.template operator()<4>();
  }
}

// C [rows][columns] from A [rows][steps] and the first `columns` of B, whose panels are laid out for `b_columns`
// columns and `b_steps` steps.
template <Start kStart, class E>
void product(int64_t rows, int64_t columns, int64_t steps, const E* a, int64_t a_stride, const E* b, int64_t b_columns,
             int64_t b_steps, float* c, int64_t c_stride, const float* factors = nullptr) {
  for (int64_t n = 0; n < columns; n += kPanel) {
    const int64_t vecs = smaller(kPanel, columns - n) / kLanes, b_stride = smaller(kPanel, b_columns - n);
    for (int64_t m = 0; m < rows; m += kTileRows)
      any_tile<kStart>(smaller(kTileRows, rows - m), vecs, a + m * a_stride, a_stride, b + n * b_steps, b_stride, steps,
                       c + m * c_stride + n, c_stride, factors ? factors + m : nullptr);
  }
}

CONCERTO_INLINE void clear(void* p, int64_t bytes) { __builtin_memset(p, 0, static_cast<size_t>(bytes)); }

// A row along its own elements: [steps_of(dim)], an odd last one filled up with zero.
template <class T>
CONCERTO_INLINE void pack_row(const T* x, int64_t dim, float* to) {
  for_lanes(dim, [&](int64_t i, auto m) { store(to + i, load(x + i, m), m); });
}
#if defined(__AVX512BF16__)
CONCERTO_INLINE void pack_row(const uint16_t* x, int64_t dim, Pair* to) {
  int64_t i = 0;
  for (; i + 32 <= dim; i += 32) _mm512_storeu_si512(to + i / 2, _mm512_loadu_si512(x + i));
  if (i == dim) return;
  const __mmask32 rest = (1u << (dim - i)) - 1, pairs = rest | 1u << (round_up(dim - i, 2) - 1);
  _mm512_mask_storeu_epi16(to + i / 2, pairs, _mm512_maskz_loadu_epi16(rest, x + i));
}
#endif

// The kStep rows that make one step, side by side: element i of each, zero beyond dim. place(i) is where lanes [i,
// i + kLanes) go; a null row is zero.
template <class T, class Place>
CONCERTO_INLINE void pack_step(const T* x, const T*, int64_t dim, float*, Place place) {
  for_lanes(dim, [&](int64_t i, auto m) { store(place(i), x ? load(x + i, m) : Vec{}); });
  for (int64_t i = round_up(dim, kLanes); i < padded_dim(dim); i += kLanes) store(place(i), Vec{});
}
#if defined(__AVX512BF16__)
template <class Place>
CONCERTO_INLINE void pack_step(const uint16_t* x, const uint16_t* next, int64_t dim, Pair*, Place place) {
  for_lanes(dim, [&](int64_t i, auto m) {
    const IntVec low = x ? (IntVec)load(x + i, m) : IntVec{}, high = next ? (IntVec)load(next + i, m) : IntVec{};
    const IntVec pairs = (IntVec)((WordVec)low >> 16) | high;
    _mm512_storeu_si512(place(i), (__m512i)pairs);
  });
}
#endif

#if defined(__AVX512F__)
// 16 x 16 words by four rounds of swaps.
CONCERTO_INLINE void transpose_block(const void* x, int64_t stride, void* to, int64_t to_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(x) + i * stride * 4);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
    // a[4q + c]: columns c, c + 4, c + 8, c + 12 of rows 4q .. 4q + 3, one in each quarter.
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    a[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
    a[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
    a[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
    a[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(static_cast<char*>(to) + i * to_stride * 4, a[i]);
}
#endif

// to[c * to_stride + r] = x[r * stride + c].
template <class E>
void transpose(const E* x, int64_t stride, int64_t rows, int64_t columns, E* to, int64_t to_stride) {
  static_assert(sizeof(E) == 4);
  constexpr int64_t kSide = 16;
  for (int64_t r = 0; r < rows; r += kSide)
    for (int64_t c = 0; c < columns; c += kSide) {
      const int64_t r_end = smaller(rows, r + kSide), c_end = smaller(columns, c + kSide);
#if defined(__AVX512F__)
      if (r_end - r == kSide && c_end - c == kSide) {
        transpose_block(x + r * stride + c, stride, to + c * to_stride + r, to_stride);
        continue;
      }
#endif
      for (int64_t i = c; i < c_end; ++i)
        for (int64_t j = r; j < r_end; ++j) to[i * to_stride + j] = x[j * stride + i];
    }
}

// Panels over keys, summed over dim: B[k][key] = x[key][k]. `work` holds width * steps_of(dim).
template <class E, class T>
void pack_by_dim(const T* x, int64_t stride, int64_t keys, int64_t width, int64_t dim, E* to, E* work) {
  const int64_t steps = steps_of<E>(dim);
  for (int64_t r = 0; r < keys; ++r) pack_row(x + r * stride, dim, work + r * steps);
  clear(work + keys * steps, (width - keys) * steps * static_cast<int64_t>(sizeof(E)));
  for (int64_t n = 0; n < width; n += kPanel) {
    const int64_t columns = smaller(kPanel, width - n);
    transpose(work + n * steps, steps, columns, steps, to + n * steps, columns);
  }
}

// Panels over dim, summed over keys: B[k][d] = x[k][d].
template <class E, class T>
void pack_by_key(const T* x, int64_t stride, int64_t keys, int64_t width, int64_t dim, E* to) {
  const int64_t padded = padded_dim(dim), steps = steps_of<E>(width);
  for (int64_t k = 0; k < steps; ++k) {
    const int64_t row = k * kStep<E>;
    pack_step(row < keys ? x + row * stride : nullptr, row + 1 < keys ? x + (row + 1) * stride : nullptr, dim, to,
              [&](int64_t i) {
                const int64_t panel = i / kPanel * kPanel;
                return to + panel * steps + k * smaller(kPanel, padded - panel) + (i - panel);
              });
  }
}

// The mask of causal attention: lanes [first, first + kLanes) of a row that sees `seen` keys of the block.
CONCERTO_INLINE Vec keep_seen(Vec v, int64_t first, int64_t seen, float fill) {
  if (seen >= first + kLanes) return v;
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(seen - first) ? v : splat(fill);
}

// Hands out parts of a thread's scratch; without memory it only counts.
struct Work {
  char* memory;
  int64_t used = 0;
  template <class E>
  E* take(int64_t count) {
    char* p = memory ? memory + used : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(E)), 64);
    return reinterpret_cast<E*>(p);
  }
};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
