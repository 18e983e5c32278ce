#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

constexpr int64_t kBlock = 64;  // columns whose sums are kept at once, where the inner loop runs down rows

void forward(const Context& ctx, const LinearForward& a) {
  if (ctx.dry_run) return;
  const int64_t in = a.x.dim(1), out = a.w.dim(0);
  with_types(a.x.dtype, [&]<class C, class S>() {
    const auto run = [&]<class Y>() {
      for_rows(ctx, a.x.dim(0), [&](int64_t r, int) {
        const C* x = row_of<C>(a.x, r);
        Y* y = row_of<Y>(a.y, r);
        for (int64_t n = 0; n < out; ++n) {
          const C* w = row_of<C>(a.w, n);
          double sum = 0;
          for (int64_t k = 0; k < in; ++k) sum += load(x[k]) * load(w[k]);
          store(y[n], sum + (is_given(a.bias) ? load(a.bias.as<S>()[n]) : 0.0));
        }
      });
    };
    a.y.dtype == dtype_of<C>() ? run.template operator()<C>() : run.template operator()<S>();
  });
}

void backward_input(const Context& ctx, const LinearBackwardInput& a) {
  if (ctx.dry_run) return;
  const int64_t in = a.w.dim(1), out = a.w.dim(0);
  with_types(a.dy.dtype, [&]<class C, class S>() {
    const auto run = [&]<class X>() {
      for_rows(ctx, a.dy.dim(0), [&](int64_t r, int) {
        const C* dy = row_of<C>(a.dy, r);
        X* dx = row_of<X>(a.dx, r);
        for (int64_t k0 = 0; k0 < in; k0 += kBlock) {
          const int64_t width = std::min(kBlock, in - k0);
          double sum[kBlock] = {};
          for (int64_t n = 0; n < out; ++n)
            for (int64_t k = 0; k < width; ++k) sum[k] += load(dy[n]) * load(row_of<C>(a.w, n)[k0 + k]);
          for (int64_t k = 0; k < width; ++k) store(dx[k0 + k], sum[k] + (a.accumulate ? load(dx[k0 + k]) : 0.0));
        }
      });
    };
    a.dx.dtype == dtype_of<C>() ? run.template operator()<C>() : run.template operator()<S>();
  });
}

void backward_weight(const Context& ctx, const LinearBackwardWeight& a) {
  if (ctx.dry_run) return;
  const int64_t rows = a.x.dim(0), in = a.x.dim(1), out = a.dy.dim(1);
  with_types(a.x.dtype, [&]<class C, class S>() {
    for_rows(ctx, out, [&](int64_t n, int) {
      S* dw = row_of<S>(a.dw, n);
      for (int64_t k0 = 0; k0 < in; k0 += kBlock) {
        const int64_t width = std::min(kBlock, in - k0);
        double sum[kBlock] = {};
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < width; ++k) sum[k] += load(row_of<C>(a.dy, r)[n]) * load(row_of<C>(a.x, r)[k0 + k]);
        for (int64_t k = 0; k < width; ++k) store(dw[k0 + k], (a.accumulate ? load(dw[k0 + k]) : 0.0) + sum[k]);
      }
      if (!is_given(a.db)) return;
      const View& summed = is_given(a.bias_dy) ? a.bias_dy : a.dy;
      double sum = 0;
      for (int64_t r = 0; r < summed.dim(0); ++r) sum += load(row_of<C>(summed, r)[n]);
      S* db = a.db.as<S>() + n;
      store(*db, load(*db) + sum);
    });
  });
}

}  // namespace

LinearKernels linear() {
  return {.forward = forward, .backward_input = backward_input, .backward_weight = backward_weight};
}

}  // namespace concerto::ref
