#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

constexpr int64_t kBlock = 64;  // columns whose sums are kept at once, where the inner loop runs down rows

// The expert that owns a row.
int64_t expert_of(const View& offsets, int64_t row) {
  const auto* begin = offsets.as<int32_t>();
  return std::upper_bound(begin, begin + offsets.dim(0), static_cast<int32_t>(row)) - begin - 1;
}

// Row r of the product in x.
template <class C>
const C* row_at(const View& x, const View& row_token, int64_t r) {
  return row_of<C>(x, is_given(row_token) ? row_token.as<int32_t>()[r] : r);
}

void check_row_token(const View& row_token, const View& x) {
  if (is_given(row_token)) check_ids(row_token, x.dim(0), "grouped_linear.row_token");
}

void forward(const Context& ctx, const GroupedLinearForward& a) {
  if (ctx.dry_run) return;
  check_offsets(a.offsets, a.y.dim(0), false);
  check_row_token(a.row_token, a.x);
  const int64_t in = a.x.dim(1), out = a.w.dim(1), used = a.offsets.as<int32_t>()[a.w.dim(0)];
  with_types(a.x.dtype, [&]<class C, class S>() {
    for_rows(ctx, used, [&](int64_t r, int) {
      const C* x = row_at<C>(a.x, a.row_token, r);
      const C* w = a.w.as<C>() + expert_of(a.offsets, r) * out * in;
      C* y = row_of<C>(a.y, r);
      for (int64_t n = 0; n < out; ++n, w += in) {
        double sum = 0;
        for (int64_t k = 0; k < in; ++k) sum += load(x[k]) * load(w[k]);
        store(y[n], sum);
      }
    });
  });
}

void backward_input(const Context& ctx, const GroupedLinearBackwardInput& a) {
  if (ctx.dry_run) return;
  check_offsets(a.offsets, a.dx.dim(0), false);
  check_row_token(a.row_token, a.dy);
  const int64_t in = a.w.dim(2), out = a.w.dim(1), used = a.offsets.as<int32_t>()[a.w.dim(0)];
  with_types(a.dy.dtype, [&]<class C, class S>() {
    for_rows(ctx, used, [&](int64_t r, int) {
      const C* dy = row_at<C>(a.dy, a.row_token, r);
      const C* w = a.w.as<C>() + expert_of(a.offsets, r) * out * in;
      C* dx = row_of<C>(a.dx, r);
      for (int64_t k0 = 0; k0 < in; k0 += kBlock) {
        const int64_t width = std::min(kBlock, in - k0);
        double sum[kBlock] = {};
        for (int64_t n = 0; n < out; ++n)
          for (int64_t k = 0; k < width; ++k) sum[k] += load(dy[n]) * load(w[n * in + k0 + k]);
        for (int64_t k = 0; k < width; ++k) store(dx[k0 + k], sum[k]);
      }
    });
  });
}

void backward_weight(const Context& ctx, const GroupedLinearBackwardWeight& a) {
  if (ctx.dry_run) return;
  check_offsets(a.offsets, is_given(a.x_row_token) ? a.x_row_token.dim(0) : a.x.dim(0), false);
  check_row_token(a.x_row_token, a.x);
  check_row_token(a.dy_row_token, a.dy);
  const int64_t in = a.x.dim(1), out = a.dy.dim(1), experts = a.dw.dim(0);
  const auto* offsets = a.offsets.as<int32_t>();
  with_types(a.x.dtype, [&]<class C, class S>() {
    for_rows(ctx, experts * out, [&](int64_t i, int) {
      const int64_t e = i / out, n = i % out;
      if (offsets[e] == offsets[e + 1] && a.accumulate) return;
      S* dw = a.dw.as<S>() + i * in;
      for (int64_t k0 = 0; k0 < in; k0 += kBlock) {
        const int64_t width = std::min(kBlock, in - k0);
        double sum[kBlock] = {};
        for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
          const C *x = row_at<C>(a.x, a.x_row_token, r) + k0, *dy = row_at<C>(a.dy, a.dy_row_token, r) + n;
          for (int64_t k = 0; k < width; ++k) sum[k] += load(*dy) * load(x[k]);
        }
        for (int64_t k = 0; k < width; ++k) store(dw[k0 + k], (a.accumulate ? load(dw[k0 + k]) : 0.0) + sum[k]);
      }
    });
  });
}

}  // namespace

GroupedLinearKernels grouped_linear() {
  return {.forward = forward, .backward_input = backward_input, .backward_weight = backward_weight};
}

}  // namespace concerto::ref
