// Optimizer kernels over a run of parameters, and the sums of squares that go with them.
#include "concerto/ops/cpu/vector/simd.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {
namespace {

struct Moments {
  Vec m, v;
};

template <class K, class M>
CONCERTO_INLINE Moments moments(const K* m, const K* v, const float* grad, const AdamScalars& s, M lanes) {
  const Vec g = load(grad, lanes) * s.grad_scale;
  return {load(m, lanes) * s.beta1 + g * s.rest1, load(v, lanes) * s.beta2 + (g * g) * s.rest2};
}
CONCERTO_INLINE Vec direction(Moments k, const AdamScalars& s) {
  return (k.m * s.inverse_c1) / (sqrt(k.v) * s.inverse_sqrt_c2 + s.eps);
}

CONCERTO_INLINE WordVec rounding_bits(WordVec element, const AdamScalars& s) {  // of base/stochastic_rounding.h
  WordVec x = element ^ s.key_first;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15 ^ s.key_second;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Moments of elements from i on as they are stored, and then stored: f32 as they are, bf16 rounded stochastically.
template <class M>
CONCERTO_INLINE Moments put(float* m, float* v, int64_t i, Moments k, const AdamScalars&, M lanes) {
  store(m + i, k.m, lanes);
  store(v + i, k.v, lanes);
  return k;
}
template <class M>
CONCERTO_INLINE Moments put(uint16_t* m, uint16_t* v, int64_t i, Moments k, const AdamScalars& s, M lanes) {
  WordVec element;
  for (int j = 0; j < kLanes; ++j) element[j] = static_cast<uint32_t>(j);
  element += s.element + static_cast<uint32_t>(i);
  const WordVec random = rounding_bits(element, s);
  const Moments rounded = {round_with(k.m, random & 0xffffu), round_with(k.v, random >> 16)};
  store_upper(m + i, (IntVec)rounded.m, lanes);
  store_upper(v + i, (IntVec)rounded.v, lanes);
  return rounded;
}

template <class T, class K>
void adamw(float* w, void* m_, void* v_, const float* grad, void* copy_, int64_t n, const AdamScalars& s) {
  T* copy = static_cast<T*>(copy_);
  K *m = static_cast<K*>(m_), *v = static_cast<K*>(v_);
  const float keep_share = 1.0f - s.lr * s.weight_decay;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Moments k = moments(m + i, v + i, grad + i, s, lanes);
    const Vec next = load(w + i, lanes) * keep_share - direction(k, s) * s.lr;
    put(m, v, i, k, s, lanes);
    store(w + i, next, lanes);
    if (copy) store_exact(copy + i, next, lanes);
  });
}

template <class T, class K>
void lamb_apply(float* w, const void* m_, const void* v_, void* copy_, int64_t n, const AdamScalars& s) {
  T* copy = static_cast<T*>(copy_);
  const K *m = static_cast<const K*>(m_), *v = static_cast<const K*>(v_);
  const float step = s.lr * s.trust_ratio;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec old = load(w + i, lanes);
    const Vec u = direction({load(m + i, lanes), load(v + i, lanes)}, s) + old * s.weight_decay;
    const Vec next = old - u * step;
    store(w + i, next, lanes);
    if (copy) store_exact(copy + i, next, lanes);
  });
}

template <class K>
void lamb_norms(const float* w, void* m_, void* v_, const float* grad, int64_t n, const AdamScalars& s, double* sums) {
  K *m = static_cast<K*>(m_), *v = static_cast<K*>(v_);
  SquareSum w_squares, u_squares;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Moments k = put(m, v, i, moments(m + i, v + i, grad + i, s, lanes), s, lanes);
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

template <class T, class K>
constexpr OptimizerTable kTable = {adamw<T, K>, lamb_apply<T, K>, lamb_norms<K>, sum_squares};

}  // namespace

extern const OptimizerTable kOptimizer[4];
const OptimizerTable kOptimizer[4] = {kTable<float, float>, kTable<uint16_t, float>, kTable<float, uint16_t>,
                                      kTable<uint16_t, uint16_t>};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
