#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

// Moments of element i from its gradient, rounded as they are stored.
template <class S>
void update_moments(const AdamStep& a, int64_t i) {
  const double g = load(a.grad.as<S>()[i]) * a.grad_scale;
  S &m = a.m.as<S>()[i], &v = a.v.as<S>()[i];
  store(m, a.beta1 * load(m) + (1 - a.beta1) * g);
  store(v, a.beta2 * load(v) + (1 - a.beta2) * g * g);
}

template <class S>
double direction(const AdamStep& a, int64_t i) {
  return load(a.m.as<S>()[i]) / a.c1 / (std::sqrt(load(a.v.as<S>()[i]) / a.c2) + a.eps);
}

template <class S>
void write(const AdamStep& a, int64_t i, double value) {
  S& w = a.w.as<S>()[i];
  store(w, value);
  if (!is_given(a.copy)) return;
  with_types(a.copy.dtype, [&]<class C, class>() { store(a.copy.as<C>()[i], load(w)); });
}

void adamw(const Context& ctx, const AdamStep& a) {
  if (ctx.dry_run) return;
  with_stat(a.w.dtype, [&]<class S>() {
    for (int64_t i = 0; i < a.w.elements(); ++i) {
      update_moments<S>(a, i);
      write<S>(a, i, load(a.w.as<S>()[i]) * (1 - a.lr * a.weight_decay) - a.lr * direction<S>(a, i));
    }
  });
}

void lamb_norms(const Context& ctx, const LambNorms& args) {
  if (ctx.dry_run) return;
  const AdamStep& a = args.step;
  constexpr int64_t kBlock = 4096;
  with_stat(a.w.dtype, [&]<class S>() {
    double w_total = 0, u_total = 0;
    for (int64_t begin = 0; begin < a.w.elements(); begin += kBlock) {
      double w_sum = 0, u_sum = 0;
      for (int64_t i = begin; i < std::min(begin + kBlock, a.w.elements()); ++i) {
        update_moments<S>(a, i);
        const double w = load(a.w.as<S>()[i]), u = direction<S>(a, i) + a.weight_decay * w;
        w_sum += w * w;
        u_sum += u * u;
      }
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
  with_stat(a.w.dtype, [&]<class S>() {
    for (int64_t i = 0; i < a.w.elements(); ++i) {
      const double w = load(a.w.as<S>()[i]), u = direction<S>(a, i) + a.weight_decay * w;
      write<S>(a, i, w - a.lr * args.trust_ratio * u);
    }
  });
}

}  // namespace

OptimizerKernels optimizer() { return {.adamw = adamw, .lamb_norms = lamb_norms, .lamb_apply = lamb_apply}; }

}  // namespace concerto::ref
