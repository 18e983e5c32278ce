// The loops of the orthogonal loss (routing.h): E^2 H multiplications, once a step.
#pragma once

#include "concerto/ops/routing_loops.h"

namespace concerto::routing {

// In a fixed order that vector units can follow.
template <class S>
double dot(const S* a, const S* b, int64_t n) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += double{a[i + l]} * double{b[i + l]};
  for (; i < n; ++i) sum += double{a[i]} * double{b[i]};
  for (double lane : lanes) sum += lane;
  return sum;
}

// The loss; the gradient of row i goes to use(i, gradient [H]) if `with_gradient`. Gradient by w~_i: 4 / n * sum_j (G -
// I)_ij w~_j, with G = W~ W~^T. By w_i: what is left of it across w~_i, over |w_i|; a row shorter than the least norm
// is only scaled.
template <class S, class Use>
double orthogonal(const Context& ctx, const View& w, int64_t blocks, bool with_gradient, Use&& use) {
  constexpr double kLeastNorm = 1e-12;
  const int64_t experts = w.dim(0), hidden = w.dim(1), width = experts / blocks;
  ArenaScope arena(*ctx.scratch);
  const View gram = ctx.scratch->take({experts, width}, DType::kF64);
  const View norms = ctx.scratch->take({experts}, DType::kF64);
  const View sums = ctx.scratch->take({with_gradient ? ctx.pool->size() : 0, hidden}, DType::kF64);
  if (ctx.dry_run) return 0;
  double* norm = norms.as<double>();
  for (int64_t i = 0; i < experts; ++i)
    norm[i] = std::max(std::sqrt(dot(row_at<S>(w, i), row_at<S>(w, i), hidden)), kLeastNorm);
  ctx.pool->parallel_dynamic(experts, [&](int64_t i, int) {
    const int64_t first = i / width * width;
    for (int64_t j = first; j <= i; ++j) {
      const double g = dot(row_at<S>(w, i), row_at<S>(w, j), hidden) / norm[i] / norm[j] - (i == j ? 1.0 : 0.0);
      row_at<double>(gram, i)[j - first] = g;
      row_at<double>(gram, j)[i - first] = g;
    }
  });
  const double entries = static_cast<double>(experts * width);
  double loss = 0;
  for (int64_t i = 0; i < experts * width; ++i) loss += gram.as<double>()[i] * gram.as<double>()[i];
  if (!with_gradient) return loss / entries;
  ctx.pool->parallel_dynamic(experts, [&](int64_t i, int thread) {
    const int64_t first = i / width * width;
    double* d = row_at<double>(sums, thread);
    std::fill(d, d + hidden, 0.0);
    for (int64_t j = 0; j < width; ++j) {
      const double g = 4 / entries * row_at<double>(gram, i)[j] / norm[first + j];
      const S* row = row_at<S>(w, first + j);
      for (int64_t h = 0; h < hidden; ++h) d[h] += g * row[h];
    }
    const S* row = row_at<S>(w, i);
    double along = 0;
    for (int64_t h = 0; h < hidden && norm[i] > kLeastNorm; ++h) along += d[h] * row[h] / norm[i];
    for (int64_t h = 0; h < hidden; ++h) d[h] = (d[h] - along * row[h] / norm[i]) / norm[i];
    use(i, d);
  });
  return loss / entries;
}

template <class S>
void orthogonal_loss(const Context& ctx, const OrthogonalLoss& a) {
  const int64_t hidden = a.w.dim(1);
  const double loss = orthogonal<S>(ctx, a.w, a.blocks, static_cast<bool>(a.dw), [&](int64_t i, const double* d) {
    S* dw = row_at<S>(a.dw, i);
    for (int64_t h = 0; h < hidden; ++h) dw[h] = static_cast<S>(dw[h] + a.scale * d[h]);
  });
  if (!ctx.dry_run) a.loss.as<double>()[0] = loss;
}

template <class S>
void orthogonal_step(const Context& ctx, const OrthogonalStep& a) {
  const int64_t experts = a.w.dim(0), hidden = a.w.dim(1);
  ArenaScope arena(*ctx.scratch);
  const View after =
      ctx.scratch->take({experts, hidden}, a.w.dtype);  // every row's gradient needs the others as they were
  const double loss = orthogonal<S>(ctx, a.w, a.blocks, true, [&](int64_t i, const double* d) {
    for (int64_t h = 0; h < hidden; ++h) row_at<S>(after, i)[h] = static_cast<S>(row_at<S>(a.w, i)[h] - a.rate * d[h]);
  });
  if (ctx.dry_run) return;
  for (int64_t i = 0; i < experts; ++i) std::copy_n(row_at<S>(after, i), hidden, row_at<S>(a.w, i));
  a.loss.as<double>()[0] = loss;
}

}  // namespace concerto::routing
