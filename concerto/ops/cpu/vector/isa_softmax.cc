// Kernels of one row of logits each: cross entropy and the router's choice.
#include <math.h>

#include "concerto/ops/cpu/vector/simd.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {
namespace {

float row_max(const float* x, int64_t n) {
  Vec top = splat(-__builtin_inff());
  for_lanes(n, [&](int64_t i, auto m) { top = max(keep(load(x + i, m), m, -__builtin_inff()), top); });
  return max_lane(top);
}

double log_sum_exp(const float* x, int64_t n) {
  const float top = row_max(x, n), log2_top = top * kLog2E;
  Vec total{};
  for_lanes(n, [&](int64_t i, auto m) { total += keep(exp2_negative(load(x + i, m) * kLog2E - log2_top), m, 0.0f); });
  return static_cast<double>(top) + __builtin_log(static_cast<double>(sum(total)));
}

template <class T>
void cross_entropy_grad(const float* logits, float lse, float scale, int64_t target, void* dlogits_, int64_t n) {
  T* dlogits = static_cast<T*>(dlogits_);
  const float log2_lse = lse * kLog2E;
  // The target's element first: the logits may be overwritten.
  const bool here = target >= 0 && target < n;
  const Vec hit = (exp(splat(logits[here ? target : 0] - lse)) - 1.0f) * scale;
  for_lanes(n, [&](int64_t i, auto m) {
    store(dlogits + i, exp2_negative(load(logits + i, m) * kLog2E - log2_lse) * scale, m);
  });
  if (here) store(dlogits + target, hit, First{1});
}

void softmax(const float* x, float* p, int64_t n) {
  const float top = row_max(x, n);
  Vec total{};
  for_lanes(n, [&](int64_t i, auto m) {
    const Vec e = exp(load(x + i, m) - top);
    total += keep(e, m, 0.0f);
    store(p + i, e, m);
  });
  const float share = 1.0f / sum(total);
  for_lanes(n, [&](int64_t i, auto m) { store(p + i, load(p + i, m) * share, m); });
}

void softmax_backward(const float* p, const float* dp, float* dx, int64_t n) {
  Vec dot{};
  for_lanes(n, [&](int64_t i, auto m) { dot += load(p + i, m) * load(dp + i, m); });
  const float mean = sum(dot);
  for_lanes(n, [&](int64_t i, auto m) { store(dx + i, load(p + i, m) * (load(dp + i, m) - mean), m); });
}

// Only NaN and minus infinity are left: the first index not taken yet, so that indices stay different and in range.
int32_t first_free(const int32_t* ids, int64_t taken) {
  for (int32_t free = 0;; ++free) {
    bool used = false;
    for (int64_t i = 0; i < taken; ++i) used |= ids[i] == free;
    if (!used) return free;
  }
}

#if defined(__AVX512F__)
CONCERTO_INLINE Vec max_everywhere(Vec v) {
  v = max(v, (Vec)_mm512_shuffle_f32x4(v, v, 0x4e));
  v = max(v, (Vec)_mm512_shuffle_f32x4(v, v, 0xb1));
  v = max(v, (Vec)_mm512_permute_ps(v, 0x4e));
  return max(v, (Vec)_mm512_permute_ps(v, 0xb1));
}

// All of s in registers. The chain from one choice to the next is maximum, compare, blend; the index is found beside
// it.
template <int kVecs>
void top_k_in_registers(const float* s, int64_t n, int64_t k, int32_t* ids) {
  const Vec taken = splat(-__builtin_inff());
  Vec v[kVecs];
  for (int j = 0; j < kVecs; ++j) {
    const int64_t rest = n - j * kLanes;
    const __mmask16 valid = rest >= kLanes ? 0xffff : rest <= 0 ? 0 : mask_of({static_cast<int>(rest)});
    v[j] = max((Vec)_mm512_mask_loadu_ps(taken, valid, s + (rest > 0 ? j * kLanes : 0)), taken);  // NaN: as if taken
  }
  for (int64_t choice = 0; choice < k; ++choice) {
    Vec top = v[0];
#pragma GCC unroll 8
    for (int j = 1; j < kVecs; ++j) top = max(top, v[j]);
    top = max_everywhere(top);
    uint64_t hits = 0;
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      const __mmask16 hit = _mm512_cmpeq_ps_mask(v[j], top);
      hits |= static_cast<uint64_t>(hit) << (j * kLanes);
      v[j] = _mm512_mask_mov_ps(v[j], hit, taken);
    }
    const int best = __builtin_ctzll(hits);
    if (top[0] == taken[0]) {
      ids[choice] = first_free(ids, choice);
      continue;
    }
    ids[choice] = best;
    if ((hits & (hits - 1)) == 0) continue;
    hits &= hits - 1;  // ties: the others stay
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) v[j] = _mm512_mask_mov_ps(v[j], static_cast<__mmask16>(hits >> (j * kLanes)), top);
  }
}
#endif

void top_k(float* s, int64_t n, int64_t k, int32_t* ids) {
#if defined(__AVX512F__)
  if (n <= kLanes) return top_k_in_registers<1>(s, n, k, ids);
  if (n <= 2 * kLanes) return top_k_in_registers<2>(s, n, k, ids);
  if (n <= 4 * kLanes) return top_k_in_registers<4>(s, n, k, ids);
#endif
  const float taken = -__builtin_inff();
  for (int64_t choice = 0; choice < k; ++choice) {
    const float top = row_max(s, n);
    const int64_t best = first_equal(s, n, top);
    ids[choice] = best == n || top == taken ? first_free(ids, choice) : static_cast<int32_t>(best);
    s[ids[choice]] = taken;
  }
}

void add_to_double(const float* x, double* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void exp_row(const float* x, float* y, int64_t n) {
  for_lanes(n, [&](int64_t i, auto m) { store(y + i, exp(load(x + i, m)), m); });
}

}  // namespace

extern const SoftmaxTable kSoftmax;
const SoftmaxTable kSoftmax = {log_sum_exp, {cross_entropy_grad<float>, cross_entropy_grad<uint16_t>},
                               softmax,     softmax_backward,
                               top_k,       add_to_double,
                               exp_row};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
