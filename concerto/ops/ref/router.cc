#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void logits(const Context& ctx, const RouterLogits& a) {
  if (ctx.dry_run) return;
  const int64_t experts = a.w.dim(0), hidden = a.x.dim(1);
  with_types(a.x.dtype, [&]<class C, class S>() {
    for_rows(ctx, a.x.dim(0), [&](int64_t t, int) {
      for (int64_t e = 0; e < experts; ++e) {
        double sum = 0;
        for (int64_t h = 0; h < hidden; ++h) sum += load(row_of<C>(a.x, t)[h]) * load(row_of<S>(a.w, e)[h]);
        store(row_of<S>(a.logits, t)[e], sum);
      }
    });
  });
}

// The k largest of score(e), largest first, ties to the lower id.
template <class Score>
void top_k(int64_t experts, int64_t k, int32_t* ids, Score&& score) {
  for (int64_t j = 0; j < k; ++j) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (std::find(ids, ids + j, e) != ids + j) continue;
      if (best < 0 || score(e) > score(best)) best = e;
    }
    ids[j] = best;
  }
}

template <class S>
void softmax(const S* z, int64_t n, S* p) {
  const double highest = load(*std::max_element(z, z + n));
  double sum = 0;
  for (int64_t e = 0; e < n; ++e) sum += std::exp(load(z[e]) - highest);
  for (int64_t e = 0; e < n; ++e) store(p[e], std::exp(load(z[e]) - highest) / sum);
}

void select(const Context& ctx, const RouterSelect& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t experts = a.logits.dim(1), k = a.expert_ids.dim(1);
  const View bare_ids = ctx.scratch->take({k}, DType::kI32);
  if (ctx.dry_run) return;
  with_stat(a.logits.dtype, [&]<class S>() {
    auto *counts = a.counts.as<int64_t>(), *bare_counts = a.bare_counts.as<int64_t>();
    auto* prob_sums = a.prob_sums.as<double>();
    std::fill(prob_sums, prob_sums + experts, 0.0);
    if (!a.replay) {
      std::fill(counts, counts + experts, int64_t{0});
      std::fill(bare_counts, bare_counts + experts, int64_t{0});
    }
    const S* bias = is_given(a.bias) ? a.bias.as<S>() : nullptr;
    for (int64_t t = 0; t < a.logits.dim(0); ++t) {
      S* p = row_of<S>(a.probs, t);
      auto* ids = row_of<int32_t>(a.expert_ids, t);
      S* weights = row_of<S>(a.weights, t);
      softmax(row_of<S>(a.logits, t), experts, p);
      for (int64_t e = 0; e < experts; ++e) prob_sums[e] += load(p[e]);
      if (!a.replay) {
        auto* bare = bare_ids.as<int32_t>();
        // p + bias in the stat type, as released models were trained: near a bias of 40 its coarse steps make ties.
        top_k(experts, k, ids, [&](int32_t e) { return static_cast<S>(p[e] + (bias ? bias[e] : S{0})); });
        top_k(experts, k, bare, [&](int32_t e) { return p[e]; });
        for (int64_t j = 0; j < k; ++j) ++counts[ids[j]], ++bare_counts[bare[j]];
      }
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += load(p[ids[j]]);
      for (int64_t j = 0; j < k; ++j) store(weights[j], load(p[ids[j]]) / std::max(sum, a.norm_min));
    }
  });
}

// With s = sum of the chosen p and w_j = p_j / s: dp_j = (dw_j - sum_i dw_i w_i) / s; below norm_min the divisor is
// constant. Softmax: dz_e = p_e (dp_e - sum_i p_i dp_i).
void select_backward(const Context& ctx, const RouterSelectBackward& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t experts = a.probs.dim(1), k = a.expert_ids.dim(1);
  const View dprobs = ctx.scratch->take({experts}, DType::kF64);
  if (ctx.dry_run) return;
  check_ids(a.expert_ids, experts, "router.expert_ids");
  with_stat(a.probs.dtype, [&]<class S>() {
    double* dp = dprobs.as<double>();
    for (int64_t t = 0; t < a.probs.dim(0); ++t) {
      const S* p = row_of<S>(a.probs, t);
      const auto* ids = row_of<int32_t>(a.expert_ids, t);
      const S* dw = row_of<S>(a.dweights, t);
      double sum = 0, mean = 0, pull = 0;
      for (int64_t j = 0; j < k; ++j) sum += load(p[ids[j]]);
      const double divisor = std::max(sum, a.norm_min);
      for (int64_t j = 0; j < k && sum >= a.norm_min; ++j) mean += load(dw[j]) * load(p[ids[j]]) / divisor;
      for (int64_t e = 0; e < experts; ++e) dp[e] = is_given(a.aux_dprob) ? load(a.aux_dprob.as<S>()[e]) : 0.0;
      for (int64_t j = 0; j < k; ++j) dp[ids[j]] += (load(dw[j]) - mean) / divisor;
      for (int64_t e = 0; e < experts; ++e) pull += load(p[e]) * dp[e];
      for (int64_t e = 0; e < experts; ++e) store(row_of<S>(a.dlogits, t)[e], load(p[e]) * (dp[e] - pull));
    }
  });
}

void logits_backward_input(const Context& ctx, const RouterLogitsBackwardInput& a) {
  if (ctx.dry_run) return;
  const int64_t experts = a.w.dim(0), hidden = a.dx.dim(1);
  with_types(a.dx.dtype, [&]<class C, class S>() {
    for_rows(ctx, a.dx.dim(0), [&](int64_t t, int) {
      C* dx = row_of<C>(a.dx, t);
      for (int64_t h = 0; h < hidden; ++h) {
        double sum = 0;
        for (int64_t e = 0; e < experts; ++e) sum += load(row_of<S>(a.dlogits, t)[e]) * load(row_of<S>(a.w, e)[h]);
        store(dx[h], load(dx[h]) + sum);
      }
    });
  });
}

void logits_backward_weight(const Context& ctx, const RouterLogitsBackwardWeight& a) {
  if (ctx.dry_run) return;
  const int64_t hidden = a.x.dim(1);
  with_types(a.x.dtype, [&]<class C, class S>() {
    for_rows(ctx, a.dw.dim(0), [&](int64_t e, int) {
      S* dw = row_of<S>(a.dw, e);
      for (int64_t h = 0; h < hidden; ++h) {
        double sum = 0;
        for (int64_t t = 0; t < a.x.dim(0); ++t) sum += load(row_of<S>(a.dlogits, t)[e]) * load(row_of<C>(a.x, t)[h]);
        store(dw[h], load(dw[h]) + sum);
      }
    });
  });
}

}  // namespace

RouterKernels router() {
  return {.logits = logits,
          .select = select,
          .select_backward = select_backward,
          .logits_backward_input = logits_backward_input,
          .logits_backward_weight = logits_backward_weight};
}

}  // namespace concerto::ref
