// Attention backward. A block of query rows stays in scratch and meets key blocks; scores are made again from lse. With
// P = exp(scale q k - lse) and dS = scale P (dout v - delta), delta = rowsum(dout * out):
//   dv = P^T dout, dk = dS^T q: kept as [dim][keys], so that dout^T and q^T are the rows of the product and P, dS its
//   columns.  dq = dS k.
#pragma once

#include "concerto/ops/cpu/vector/isa_attention_forward.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {

// Elements of kStep rows, lane by lane, as one step of B.
CONCERTO_INLINE void store_step(Vec row, Vec, float* to) { store(to, row); }
#if defined(__AVX512BF16__)
CONCERTO_INLINE void store_step(Vec row, Vec next, Pair* to) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(next, row);  // 16 of row, then 16 of next
  alignas(64) static const uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves));
}
#endif

template <class T>
struct BackwardWork {
  typedef typename Packed<T>::Element E;
  static constexpr int64_t kRowSteps = kBackwardQueries / kStep<E>, kKeySteps = kKeyBlock / kStep<E>;
  E *q, *dout;              // [kBackwardQueries][steps of dim]
  E *q_cols, *dout_cols;    // [dim][kRowSteps]
  E* ds;                    // [kBackwardQueries][kKeySteps], rows for dq
  E *p_cols, *ds_cols;      // panels over keys, summed over rows: [kRowSteps][kKeyBlock]
  E* step;                  // [kRowSteps][padded dim]
  float* dq;                // [kBackwardQueries][padded dim]
  float *log2_lse, *delta;  // [kBackwardQueries]
  int64_t bytes;

  BackwardWork(void* memory, int64_t dim) {
    Work work{static_cast<char*>(memory)};
    q = work.take<E>(kBackwardQueries * steps_of<E>(dim));
    dout = work.take<E>(kBackwardQueries * steps_of<E>(dim));
    q_cols = work.take<E>(dim * kRowSteps);
    dout_cols = work.take<E>(dim * kRowSteps);
    ds = work.take<E>(kBackwardQueries * kKeySteps);
    p_cols = work.take<E>(kRowSteps * kKeyBlock);
    ds_cols = work.take<E>(kRowSteps * kKeyBlock);
    step = work.take<E>(kRowSteps * padded_dim(dim));
    dq = work.take<float>(kBackwardQueries * padded_dim(dim));
    log2_lse = work.take<float>(kBackwardQueries);
    delta = work.take<float>(kBackwardQueries);
    bytes = work.used;
  }
};

template <class T>
void load_queries(const void* q_, int64_t q_stride, const void* dout_, int64_t dout_stride, const float* lse,
                  int64_t lse_stride, const float* delta, int64_t delta_stride, int64_t rows, int64_t dim,
                  void* memory) {
  typedef typename Packed<T>::Element E;
  const BackwardWork<T> work(memory, dim);
  const int64_t steps = steps_of<E>(dim), padded = padded_dim(dim), row_steps = steps_of<E>(rows),
                all_rows = row_steps * kStep<E>;
  const auto fill = [&](const T* x, int64_t stride, E* by_row, E* by_column) {
    for (int64_t r = 0; r < rows; ++r) pack_row(x + r * stride, dim, by_row + r * steps);
    clear(by_row + rows * steps, (all_rows - rows) * steps * static_cast<int64_t>(sizeof(E)));
    for (int64_t k = 0; k < row_steps; ++k) {
      const int64_t r = k * kStep<E>;
      pack_step(x + r * stride, r + 1 < rows ? x + (r + 1) * stride : nullptr, dim, by_column,
                [&](int64_t i) { return work.step + k * padded + i; });
    }
    transpose(work.step, padded, row_steps, dim, by_column, BackwardWork<T>::kRowSteps);
  };
  fill(static_cast<const T*>(q_), q_stride, work.q, work.q_cols);
  fill(static_cast<const T*>(dout_), dout_stride, work.dout, work.dout_cols);
  for (int64_t r = 0; r < all_rows; ++r) {  // an infinite lse: a row that was filled up has weights zero
    work.log2_lse[r] = r < rows ? lse[r * lse_stride] * kLog2E : __builtin_inff();
    work.delta[r] = r < rows ? delta[r * delta_stride] : 0.0f;
  }
  clear(work.dq, rows * padded * 4);
}

// P and dS of the rows of a tile, from scores and dout v [rows][kKeyBlock]. kVecs: width / kLanes, or 0 when not known
// before.
template <int kVecs, bool kMasked, class T>
void differentiate(const float* scores, const float* dweights, int64_t m, int64_t rows, int64_t first_seen,
                   int64_t width, float scale, const BackwardWork<T>& work) {
  typedef BackwardWork<T> W;
  typedef typename W::E E;
  constexpr int kMost = kVecs ? kVecs : kKeyBlock / kLanes;
  const int64_t vecs = kVecs ? kVecs : width / kLanes;
  const float log2_scale = scale * kLog2E;
  for (int64_t r = 0; r < rows; r += kStep<E>) {
    Vec p[kStep<E>][kMost], ds[kStep<E>][kMost];
#pragma GCC unroll 2
    for (int s = 0; s < kStep<E>; ++s) {
      const int64_t row = r + s;
      const float log2_lse = work.log2_lse[m + row], delta = work.delta[m + row];
#pragma GCC unroll 4
      for (int64_t j = 0; j < vecs; ++j) {
        const Vec score = load(scores + row * kKeyBlock + j * kLanes);
        const Vec dweight = load(dweights + row * kKeyBlock + j * kLanes);
        p[s][j] = exp2_negative(score * log2_scale - log2_lse);
        ds[s][j] = p[s][j] * (dweight - delta) * scale;
        if (kMasked) {
          p[s][j] = keep_seen(p[s][j], j * kLanes, first_seen + row, 0.0f);
          ds[s][j] = keep_seen(ds[s][j], j * kLanes, first_seen + row, 0.0f);
        }
      }
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < vecs; ++j) {
      const int64_t n = j * kLanes, panel = n / kPanel * kPanel, columns = smaller(kPanel, width - panel);
      const int64_t at = panel * W::kRowSteps + (m + r) / kStep<E> * columns + n - panel;
      store_step(p[0][j], p[kStep<E> - 1][j], work.p_cols + at);
      store_step(ds[0][j], ds[kStep<E> - 1][j], work.ds_cols + at);
    }
    for (int s = 0; s < kStep<E>; ++s) {
      E* to = work.ds + (m + r + s) * W::kKeySteps;
      if constexpr (kVecs > 0)
        store_weights<kVecs>(ds[s], to);
      else
        for (int64_t j = 0; j < vecs; ++j) store_weights<1>(ds[s] + j, to + j * (kLanes / kStep<E>));
    }
  }
}

template <bool kMasked, class T>
void any_differentiate(const float* scores, const float* dweights, int64_t m, int64_t rows, int64_t first_seen,
                       int64_t width, float scale, const BackwardWork<T>& work) {
  const auto with = [&]<int kVecs>() {
    differentiate<kVecs, kMasked>(scores, dweights, m, rows, first_seen, width, scale, work);
  };
  if constexpr (kLanes < 16) return with.template operator()<0>();
  switch (width / kLanes) {
    case 1:
      return with.template operator()<1>();
    case 2:
      return with.template operator()<2>();
    case 3:
      return with.template operator()<3>();
    default:
      return with.template operator()<4>();
  }
}

template <class T>
void meet(int64_t begin, int64_t rows, int64_t key_begin, int64_t width, int64_t dim, float scale,
          const AttentionTable::Packs& block, float* dk, float* dv, bool want_dq, void* memory) {
  typedef typename Packed<T>::Element E;
  typedef BackwardWork<T> W;
  const W work(memory, dim);
  const E *k_by_dim = static_cast<const E*>(block.k_by_dim), *v_by_dim = static_cast<const E*>(block.v_by_dim);
  const int64_t steps = steps_of<E>(dim), padded = padded_dim(dim), row_steps = steps_of<E>(rows),
                all_rows = row_steps * kStep<E>;
  alignas(64) float scores[kTileRows * kKeyBlock] = {}, dweights[kTileRows * kKeyBlock] = {};

  for (int64_t m = 0; m < all_rows; m += kTileRows) {
    const int64_t tile_rows = smaller(kTileRows, all_rows - m), first_seen = begin + m + 1 - key_begin;
    const int64_t last_seen = first_seen + tile_rows - 1 > 0 ? first_seen + tile_rows - 1 : 0;
    const int64_t columns = smaller(width, round_up(last_seen, kLanes));
    product<Start::kZero>(tile_rows, columns, steps, work.q + m * steps, steps, k_by_dim, width, steps, scores,
                          kKeyBlock);
    product<Start::kZero>(tile_rows, columns, steps, work.dout + m * steps, steps, v_by_dim, width, steps, dweights,
                          kKeyBlock);
    if (first_seen >= kKeyBlock)
      any_differentiate<false>(scores, dweights, m, tile_rows, first_seen, width, scale, work);
    else
      any_differentiate<true>(scores, dweights, m, tile_rows, first_seen, width, scale, work);
  }
  if (dk) {
    product<Start::kSum>(dim, width, row_steps, work.dout_cols, W::kRowSteps, work.p_cols, width, W::kRowSteps, dv,
                         width);
    product<Start::kSum>(dim, width, row_steps, work.q_cols, W::kRowSteps, work.ds_cols, width, W::kRowSteps, dk,
                         width);
  }
  if (want_dq)
    product<Start::kSum>(rows, padded, width / kStep<E>, work.ds, W::kKeySteps, static_cast<const E*>(block.k_by_key),
                         padded, width / kStep<E>, work.dq, padded);
}

template <class T>
void store_dq(int64_t rows, int64_t dim, void* dq_, int64_t dq_stride, void* memory) {
  const BackwardWork<T> work(memory, dim);
  T* dq = static_cast<T*>(dq_);
  for (int64_t r = 0; r < rows; ++r)
    for_lanes(dim,
              [&](int64_t i, auto m) { store(dq + r * dq_stride + i, load(work.dq + r * padded_dim(dim) + i), m); });
}

template <class T>
void store_transposed(const float* sums, int64_t keys, int64_t width, int64_t dim, void* rows_, int64_t stride) {
  T* rows = static_cast<T*>(rows_);
  float row[kLanes];
  for (int64_t key = 0; key < keys; ++key)
    for_lanes(dim, [&](int64_t d, auto m) {
      for (int64_t i = 0; i < smaller(kLanes, dim - d); ++i) row[i] = sums[(d + i) * width + key];
      store(rows + key * stride + d, load(row, m), m);
    });
}

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
