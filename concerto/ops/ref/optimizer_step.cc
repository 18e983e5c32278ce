#include <algorithm>
#include <type_traits>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

struct Moments {
  double m, v;
};

// fn<S, M>() with the stat type and the moments' type.
template <class F>
void with_moments(const AdamStep& a, F&& fn) {
  if (a.m.dtype == DType::kBF16) return fn.template operator()<float, bf16>();
  with_stat(a.w.dtype, [&]<class S>() { fn.template operator()<S, S>(); });
}

// fn(i, random) for the elements of [begin, end); random bits are for bf16 moments.
template <class F>
void for_elements(const AdamStep& a, int64_t begin, int64_t end, F&& fn) {
  if (a.m.dtype != DType::kBF16) {
    for (int64_t i = begin; i < end; ++i) fn(i, 0u);
    return;
  }
  for_rounded_pieces(a.rounding, begin, end, [&](int64_t b, int64_t e, RoundingKey key, uint32_t element) {
    for (int64_t i = b; i < e; ++i) fn(i, rounding_bits(key, element + static_cast<uint32_t>(i - b)));
  });
}

// Moments of element i from its gradient, rounded to the stat type; stored as they are, or rounded to bf16.
template <class S, class M>
Moments update_moments(const AdamStep& a, int64_t i, uint32_t random) {
  const double g = load(a.grad.as<S>()[i]) * a.grad_scale;
  M &m = a.m.as<M>()[i], &v = a.v.as<M>()[i];
  const S next_m = static_cast<S>(a.beta1 * load(m) + (1 - a.beta1) * g),
          next_v = static_cast<S>(a.beta2 * load(v) + (1 - a.beta2) * g * g);
  if constexpr (std::is_same_v<M, bf16>) {
    m = round_stochastic(next_m, static_cast<uint16_t>(random));
    v = round_stochastic(next_v, static_cast<uint16_t>(random >> 16));
  } else {
    m = next_m;
    v = next_v;
  }
  return {next_m, next_v};
}

template <class M>
Moments stored(const AdamStep& a, int64_t i) {
  return {load(a.m.as<M>()[i]), load(a.v.as<M>()[i])};
}

double direction(const AdamStep& a, Moments k) { return k.m / a.c1 / (std::sqrt(k.v / a.c2) + a.eps); }

template <class S>
void write(const AdamStep& a, int64_t i, double value) {
  S& w = a.w.as<S>()[i];
  store(w, value);
  if (!is_given(a.copy)) return;
  with_types(a.copy.dtype, [&]<class C, class>() { store(a.copy.as<C>()[i], load(w)); });
}

void adamw(const Context& ctx, const AdamStep& a) {
  if (ctx.dry_run) return;
  with_moments(a, [&]<class S, class M>() {
    for_elements(a, 0, a.w.elements(), [&](int64_t i, uint32_t random) {
      const Moments k = update_moments<S, M>(a, i, random);
      write<S>(a, i, load(a.w.as<S>()[i]) * (1 - a.lr * a.weight_decay) - a.lr * direction(a, k));
    });
  });
}

void lamb_norms(const Context& ctx, const LambNorms& args) {
  if (ctx.dry_run) return;
  const AdamStep& a = args.step;
  constexpr int64_t kBlock = 4096;
  with_moments(a, [&]<class S, class M>() {
    double w_total = 0, u_total = 0;
    for (int64_t begin = 0; begin < a.w.elements(); begin += kBlock) {
      double w_sum = 0, u_sum = 0;
      for_elements(a, begin, std::min(begin + kBlock, a.w.elements()), [&](int64_t i, uint32_t random) {
        update_moments<S, M>(a, i, random);
        const double w = load(a.w.as<S>()[i]), u = direction(a, stored<M>(a, i)) + a.weight_decay * w;
        w_sum += w * w;
        u_sum += u * u;
      });
      w_total += w_sum;
      u_total += u_sum;
    }
    args.norms.as<double>()[0] = w_total;
    args.norms.as<double>()[1] = u_total;
  });
}

void lamb_apply(const Context& ctx, const LambApply& args) {
  if (ctx.dry_run) return;
  const AdamStep& a = args.step;
  with_moments(a, [&]<class S, class M>() {
    for (int64_t i = 0; i < a.w.elements(); ++i) {
      const double w = load(a.w.as<S>()[i]), u = direction(a, stored<M>(a, i)) + a.weight_decay * w;
      write<S>(a, i, w - a.lr * args.trust_ratio * u);
    }
  });
}

}  // namespace

OptimizerKernels optimizer() { return {.adamw = adamw, .lamb_norms = lamb_norms, .lamb_apply = lamb_apply}; }

}  // namespace concerto::ref
