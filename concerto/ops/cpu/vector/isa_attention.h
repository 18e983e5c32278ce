// The products of attention: register tile, packing. A packed element E is one f32, or (where the processor multiplies
// bf16) a pair of bf16 that are neighbours in the sum, so that one step of the tile handles kStep<E> terms.
//
//   A  [M][steps]: rows, elements follow the sum.
//   B  panels of kPanel columns, each [steps][columns of the panel]; the last panel may be narrower (a multiple of
//   kLanes). C  [M][N] f32.
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

// Row r of x along its own elements: [steps_of(dim)], an odd last one filled up with zero.
CONCERTO_INLINE void pack_row(const float* x, int64_t dim, float* to) {
  __builtin_memcpy(to, x, static_cast<size_t>(dim) * 4);
}
CONCERTO_INLINE void pack_row(const uint16_t* x, int64_t dim, float* to) {
  for_lanes(dim, [&](int64_t i, auto m) { store(to + i, load(x + i, m), m); });
}
CONCERTO_INLINE void pack_row(const uint16_t* x, int64_t dim, Pair* to) {
  if (dim % 2) to[dim / 2] = 0;
  __builtin_memcpy(to, x, static_cast<size_t>(dim) * 2);
}

// The kStep rows that make one step, side by side: to[i] holds element i of each. Null rows are zero.
CONCERTO_INLINE void pack_step(const float* x, const float*, int64_t dim, float* to) {
  __builtin_memcpy(to, x, static_cast<size_t>(dim) * 4);
}
CONCERTO_INLINE void pack_step(const uint16_t* x, const uint16_t*, int64_t dim, float* to) { pack_row(x, dim, to); }
CONCERTO_INLINE void pack_step(const uint16_t* x, const uint16_t* next, int64_t dim, Pair* to) {
  if (next)
    for (int64_t i = 0; i < dim; ++i) to[i] = x[i] | static_cast<Pair>(next[i]) << 16;
  else
    for (int64_t i = 0; i < dim; ++i) to[i] = x[i];
}

CONCERTO_INLINE void clear(void* p, int64_t bytes) { __builtin_memset(p, 0, static_cast<size_t>(bytes)); }

// to[c * to_stride + r] = x[r * stride + c].
template <class E>
void transpose(const E* x, int64_t stride, int64_t rows, int64_t columns, E* to, int64_t to_stride) {
  static_assert(sizeof(E) == 4);
  constexpr int64_t kSide = 16;
  for (int64_t r = 0; r < rows; r += kSide)
    for (int64_t c = 0; c < columns; c += kSide) {
      const int64_t r_end = smaller(rows, r + kSide), c_end = smaller(columns, c + kSide);
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

// Panels over dim, summed over keys: B[k][d] = x[k][d]. `work` holds padded_dim(dim).
template <class E, class T>
void pack_by_key(const T* x, int64_t stride, int64_t keys, int64_t width, int64_t dim, E* to, E* work) {
  const int64_t padded = padded_dim(dim), steps = steps_of<E>(width);
  clear(work, padded * static_cast<int64_t>(sizeof(E)));
  for (int64_t k = 0; k < steps; ++k) {
    const int64_t row = k * kStep<E>;
    if (row < keys)
      pack_step(x + row * stride, row + 1 < keys ? x + (row + 1) * stride : nullptr, dim, work);
    else
      clear(work, padded * static_cast<int64_t>(sizeof(E)));
    for (int64_t n = 0; n < padded; n += kPanel) {
      const int64_t columns = smaller(kPanel, padded - n);
      __builtin_memcpy(to + n * steps + k * columns, work + n, static_cast<size_t>(columns) * sizeof(E));
    }
  }
}

// The mask of causal attention: lanes [first, first + kLanes) of a row that sees `seen` keys of the block.
CONCERTO_INLINE Vec keep_seen(Vec v, int64_t first, int64_t seen, float fill) {
  if (seen >= first + kLanes) return v;
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(seen - first) ? v : splat(fill);
}

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Hands out parts of a thread's scratch.
struct Work {
  char* at;
  template <class E>
  E* take(int64_t count) {
    char* p = at;
    at += round_up(count * static_cast<int64_t>(sizeof(E)), 64);
    return reinterpret_cast<E*>(p);
  }
};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
