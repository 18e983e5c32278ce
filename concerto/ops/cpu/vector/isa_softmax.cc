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
  const Vec hit = (exp(splat(logits[target] - lse)) - 1.0f) * scale;
  for_lanes(n, [&](int64_t i, auto m) {
    store(dlogits + i, exp2_negative(load(logits + i, m) * kLog2E - log2_lse) * scale, m);
  });
  store(dlogits + target, hit, First{1});
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

void top_k(float* s, int64_t n, int64_t k, int32_t* ids) {
  const float taken = -__builtin_inff();
  for (int64_t j = 0; j < k; ++j) {
    const float top = row_max(s, n);
    int64_t best = first_equal(s, n, top);
    if (best == n || top == taken) {
      // Only NaN and minus infinity are left: take the first index not taken yet, so that indices stay different and in
      // range.
      for (best = 0;; ++best) {
        bool used = false;
        for (int64_t i = 0; i < j; ++i) used |= ids[i] == best;
        if (!used) break;
      }
    }
    ids[j] = static_cast<int32_t>(best);
    s[best] = taken;
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
