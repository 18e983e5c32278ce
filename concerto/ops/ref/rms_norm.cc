#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void forward(const Context& ctx, const RmsNormForward& a) {
  if (ctx.dry_run) return;
  const int64_t hidden = a.x.dim(1);
  with_types(a.x.dtype, [&]<class C, class S>() {
    const S* w = a.w.as<S>();
    for (int64_t t = 0; t < a.x.dim(0); ++t) {
      const C* x = row_of<C>(a.x, t);
      C* y = row_of<C>(a.y, t);
      double sum = 0;
      for (int64_t h = 0; h < hidden; ++h) sum += load(x[h]) * load(x[h]);
      S& kept = a.rstd.as<S>()[t];
      store(kept, 1 / std::sqrt(sum / static_cast<double>(hidden) + a.eps));
      const double rstd = load(kept);  // rounded, as backward sees it: its y must be this one
      for (int64_t h = 0; h < hidden; ++h) store(y[h], load(w[h]) * load(x[h]) * rstd);
    }
  });
}

void backward_input(const Context& ctx, const RmsNormBackwardInput& a) {
  if (ctx.dry_run) return;
  const int64_t hidden = a.x.dim(1);
  with_types(a.x.dtype, [&]<class C, class S>() {
    const S* w = a.w.as<S>();
    for (int64_t t = 0; t < a.x.dim(0); ++t) {
      const C* x = row_of<C>(a.x, t);
      const C* dy = row_of<C>(a.dy, t);
      const C* residual = is_given(a.residual) ? row_of<C>(a.residual, t) : nullptr;
      C* dx = row_of<C>(a.dx, t);
      const double rstd = load(a.rstd.as<S>()[t]);
      double dot = 0;
      for (int64_t h = 0; h < hidden; ++h) dot += load(dy[h]) * load(w[h]) * load(x[h]);
      const double pull = rstd * rstd * dot / static_cast<double>(hidden);
      for (int64_t h = 0; h < hidden; ++h)
        store(dx[h], rstd * (load(dy[h]) * load(w[h]) - load(x[h]) * pull) + (residual ? load(residual[h]) : 0.0));
      if (!is_given(a.y)) continue;
      C* y = row_of<C>(a.y, t);
      for (int64_t h = 0; h < hidden; ++h) store(y[h], load(w[h]) * load(x[h]) * rstd);
    }
  });
}

void backward_weight(const Context& ctx, const RmsNormBackwardWeight& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t hidden = a.x.dim(1);
  const View sums = ctx.scratch->take({hidden}, DType::kF64);
  if (ctx.dry_run) return;
  with_types(a.x.dtype, [&]<class C, class S>() {
    double* sum = sums.as<double>();
    for (int64_t h = 0; h < hidden; ++h) sum[h] = 0;
    for (int64_t t = 0; t < a.x.dim(0); ++t) {
      const double rstd = load(a.rstd.as<S>()[t]);
      for (int64_t h = 0; h < hidden; ++h) sum[h] += load(row_of<C>(a.dy, t)[h]) * load(row_of<C>(a.x, t)[h]) * rstd;
    }
    S* dw = a.dw.as<S>();
    for (int64_t h = 0; h < hidden; ++h) store(dw[h], load(dw[h]) + sum[h]);
  });
}

}  // namespace

RmsNormKernels rms_norm() {
  return {.forward = forward, .backward_input = backward_input, .backward_weight = backward_weight};
}

}  // namespace concerto::ref
