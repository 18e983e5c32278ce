// Optimizer kernels over a run of parameters, and the sums of squares that go with them.
#include "concerto/ops/cpu/vector/simd.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {
namespace {

struct Moments {
  Vec m, v;
};

template <class M>
CONCERTO_INLINE Moments moments(const float* m, const float* v, const float* grad, const AdamScalars& s, M lanes) {
  const Vec g = load(grad, lanes) * s.grad_scale;
  return {load(m, lanes) * s.beta1 + g * s.rest1, load(v, lanes) * s.beta2 + (g * g) * s.rest2};
}
CONCERTO_INLINE Vec direction(Moments k, const AdamScalars& s) {
  return (k.m * s.inverse_c1) / (sqrt(k.v) * s.inverse_sqrt_c2 + s.eps);
}

template <class T>
void adamw(float* w, float* m, float* v, const float* grad, void* copy_, int64_t n, const AdamScalars& s) {
  T* copy = static_cast<T*>(copy_);
  const float keep_share = 1.0f - s.lr * s.weight_decay;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Moments k = moments(m + i, v + i, grad + i, s, lanes);
    const Vec next = load(w + i, lanes) * keep_share - direction(k, s) * s.lr;
    store(m + i, k.m, lanes);
    store(v + i, k.v, lanes);
    store(w + i, next, lanes);
    if (copy) store_exact(copy + i, next, lanes);
  });
}

template <class T>
void lamb_apply(float* w, const float* m, const float* v, void* copy_, int64_t n, const AdamScalars& s) {
  T* copy = static_cast<T*>(copy_);
  const float step = s.lr * s.trust_ratio;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec old = load(w + i, lanes);
    const Vec u = direction({load(m + i, lanes), load(v + i, lanes)}, s) + old * s.weight_decay;
    const Vec next = old - u * step;
    store(w + i, next, lanes);
    if (copy) store_exact(copy + i, next, lanes);
  });
}

void lamb_norms(const float* w, float* m, float* v, const float* grad, int64_t n, const AdamScalars& s, double* sums) {
  SquareSum w_squares, u_squares;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Moments k = moments(m + i, v + i, grad + i, s, lanes);
    store(m + i, k.m, lanes);
    store(v + i, k.v, lanes);
    const Vec old = load(w + i, lanes);
    // Lanes beyond the end: 0 / eps, which is NaN when eps is 0.
    w_squares.add(old);
    u_squares.add(keep(direction(k, s), lanes, 0.0f) + old * s.weight_decay);
  });
  sums[0] += w_squares.total();
  sums[1] += u_squares.total();
}

double sum_squares(const float* x, int64_t n) {
  SquareSum squares;
  for_lanes(n, [&](int64_t i, auto m) { squares.add(load(x + i, m)); });
  return squares.total();
}

}  // namespace

extern const OptimizerTable kOptimizer[2];
const OptimizerTable kOptimizer[2] = {{adamw<float>, lamb_apply<float>, lamb_norms, sum_squares},
                                      {adamw<uint16_t>, lamb_apply<uint16_t>, lamb_norms, sum_squares}};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
