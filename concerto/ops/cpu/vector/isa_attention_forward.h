// Attention forward of one block of query rows: key blocks pass by, softmax is kept online (maximum and sum so far,
// output rescaled as the maximum grows).
#pragma once

#include "concerto/ops/cpu/vector/isa_attention.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {

template <int kVecs>
CONCERTO_INLINE void store_weights(const Vec* p, float* to) {
#pragma GCC unroll 16
  for (int j = 0; j < kVecs; ++j) store(to + j * kLanes, p[j]);
}
#if defined(__AVX512BF16__)
template <int kVecs>
CONCERTO_INLINE void store_weights(const Vec* p, Pair* to) {
#pragma GCC unroll 16
  for (int j = 0; j + 2 <= kVecs; j += 2)
    _mm512_storeu_si512(to + j * (kLanes / 2), (__m512i)_mm512_cvtne2ps_pbh(p[j + 1], p[j]));
  if (kVecs % 2)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (kVecs - 1) * (kLanes / 2)),
                        (__m256i)_mm512_cvtneps_pbh(p[kVecs - 1]));
}
#endif

template <class T>
struct ForwardWork {
  typedef typename Packed<T>::Element E;
  E* q;        // [kForwardQueries][steps of dim]
  float* out;  // [kForwardQueries][padded dim], not yet divided by the sum
  float* top;  // [kForwardQueries] largest score so far, times scale * log2(e)
  float* sum;  // [kForwardQueries][kLanes] sums of weights, a lane each
  int64_t bytes;

  ForwardWork(void* memory, int64_t dim) {
    Work work{static_cast<char*>(memory)};
    q = work.take<E>(kForwardQueries * steps_of<E>(dim));
    out = work.take<float>(kForwardQueries * padded_dim(dim));
    top = work.take<float>(kForwardQueries + kLanes);
    sum = work.take<float>(kForwardQueries * kLanes);
    bytes = work.used;
  }
};

// Scores of a tile [rows][kKeyBlock] to weights. factors: what the sums so far must be multiplied by. Row r sees the
// first first_seen + r keys.
template <int kVecs, bool kMasked, class E>
CONCERTO_INLINE void weigh(const float* scores, int64_t rows, int64_t first_seen, float log2_scale, float* top,
                           float* sum, float* factors, E* weights) {
  const auto score = [&](int64_t r, int j) {
    const Vec s = load(scores + r * kKeyBlock + j * kLanes);
    return kMasked ? keep_seen(s, j * kLanes, first_seen + r, -__builtin_inff()) : s;
  };
  for (int64_t r = 0; r < rows; ++r) {
    Vec most = score(r, 0);
#pragma GCC unroll 16
    for (int j = 1; j < kVecs; ++j) most = max(score(r, j), most);
    factors[r] = max_lane(most);
  }
  for_lanes(rows, [&](int64_t i, auto m) {
    const Vec old = load(top + i, m), next = max(load(factors + i, m) * log2_scale, old);
    store(factors + i, exp2_negative(old - next), m);
    store(top + i, next, m);
  });
  for (int64_t r = 0; r < rows; ++r) {
    Vec p[kVecs], total = load(sum + r * kLanes) * factors[r];
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) {
      p[j] = exp2_negative(score(r, j) * log2_scale - top[r]);
      total += p[j];
    }
    store(sum + r * kLanes, total);
    store_weights<kVecs>(p, weights + r * (kKeyBlock / kStep<E>));
  }
}

// One body for each number of vectors: up to four, or all that a block has (no row sees the keys beyond).
template <bool kMasked, class E>
void any_weigh(int64_t vecs, const float* scores, int64_t rows, int64_t first_seen, float log2_scale, float* top,
               float* sum, float* factors, E* weights) {
  const auto with = [&]<int kVecs>() {
    weigh<kVecs, kMasked>(scores, rows, first_seen, log2_scale, top, sum, factors, weights);
  };
  switch (vecs) {
    case 1:
      return with.template operator()<1>();
    case 2:
      return with.template operator()<2>();
    case 3:
      return with.template operator()<3>();
    case 4:
      return with.template operator()<4>();
    default:
      return with.template operator()<kKeyBlock / kLanes>();
  }
}

template <class T>
void attention_forward(const void* q_, int64_t q_stride, int64_t begin, int64_t rows, int64_t document, int64_t dim,
                       float scale, const AttentionTable::Packs& packs, void* out_, int64_t out_stride, float* lse,
                       int64_t lse_stride, void* memory) {
  typedef typename Packed<T>::Element E;
  const ForwardWork<T> work(memory, dim);
  const int64_t steps = steps_of<E>(dim), padded = padded_dim(dim);
  const T* q = static_cast<const T*>(q_);
  const float log2_scale = scale * kLog2E;
  for (int64_t r = 0; r < rows; ++r) pack_row(q + r * q_stride, dim, work.q + r * steps);
  clear(work.out, rows * padded * 4);
  clear(work.sum, rows * kLanes * 4);
  for (int64_t r = 0; r < rows; ++r) work.top[r] = -__builtin_inff();

  alignas(64) float scores[kTileRows * kKeyBlock] = {};
  alignas(64) E weights[kTileRows * kKeyBlock / kStep<E>];
  float factors[kLanes + kTileRows];
  for (int64_t key = 0; key < begin + rows; key += kKeyBlock) {
    const int64_t width = smaller(kKeyBlock, round_up(document - key, kKeyGroup));
    const E* k = static_cast<const E*>(packs.k_by_dim) + key * padded / kStep<E>;
    const E* v = static_cast<const E*>(packs.v_by_key) + key * padded / kStep<E>;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t tile_rows = smaller(kTileRows, rows - r), first_seen = begin + r + 1 - key,
                    last_seen = first_seen + tile_rows - 1;
      if (last_seen <= 0) continue;  // all of the block comes after these rows
      const int64_t columns = smaller(width, round_up(last_seen, kLanes));
      product<Start::kZero>(tile_rows, columns, steps, work.q + r * steps, steps, k, width, steps, scores, kKeyBlock);
      const int64_t vecs = columns / kLanes;
      if (first_seen >= kKeyBlock)
        any_weigh<false>(vecs, scores, tile_rows, first_seen, log2_scale, work.top + r, work.sum + r * kLanes, factors,
                         weights);
      else
        any_weigh<true>(vecs, scores, tile_rows, first_seen, log2_scale, work.top + r, work.sum + r * kLanes, factors,
                        weights);
      product<Start::kScaledSum>(tile_rows, padded, columns / kStep<E>, weights, kKeyBlock / kStep<E>, v, padded,
                                 width / kStep<E>, work.out + r * padded, padded, factors);
    }
  }

  T* out = static_cast<T*>(out_);
  for (int64_t r = 0; r < rows; ++r) {
    const float total = sum(load(work.sum + r * kLanes)), share = 1.0f / total;
    for_lanes(dim,
              [&](int64_t i, auto m) { store(out + r * out_stride + i, load(work.out + r * padded + i) * share, m); });
    lse[r * lse_stride] = work.top[r] * kLn2 + __builtin_logf(total);
  }
}

// Generation: scores of 64 keys at a time, straight from the cache.
template <class T>
void attention_cached(const void* q_, const void* k_, int64_t k_stride, const void* v_, int64_t v_stride, int64_t keys,
                      int64_t dim, float scale, void* out_, void* memory) {
  const T *q = static_cast<const T*>(q_), *k = static_cast<const T*>(k_), *v = static_cast<const T*>(v_);
  Work work{static_cast<char*>(memory)};
  float* sums = work.take<float>(padded_dim(dim));
  clear(sums, padded_dim(dim) * 4);
  const float log2_scale = scale * kLog2E;
  float top = -__builtin_inff(), total = 0;
  for (int64_t begin = 0; begin < keys; begin += kKeyBlock) {
    const int64_t count = smaller(kKeyBlock, keys - begin);
    float scores[kKeyBlock];
    float next = top;
    for (int64_t i = 0; i < count; ++i) {
      Vec dot{};
      for_lanes(dim, [&](int64_t d, auto m) { dot += load(q + d, m) * load(k + (begin + i) * k_stride + d, m); });
      scores[i] = sum(dot) * log2_scale;
      next = scores[i] > next ? scores[i] : next;
    }
    const float factor = exp2_negative(splat(top - next))[0];
    top = next;
    Vec block{};
    for_lanes(count, [&](int64_t i, auto m) {
      const Vec p = exp2_negative(load(scores + i, m) - top);
      block += keep(p, m, 0.0f);
      store(scores + i, p, m);
    });
    total = total * factor + sum(block);
    for_lanes(dim, [&](int64_t d, auto m) {
      Vec o = load(sums + d, m) * factor;
      for (int64_t i = 0; i < count; ++i) o += load(v + (begin + i) * v_stride + d, m) * scores[i];
      store(sums + d, o, m);
    });
  }
  T* out = static_cast<T*>(out_);
  for_lanes(dim, [&](int64_t d, auto m) { store(out + d, load(sums + d, m) * (1.0f / total), m); });
}

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
