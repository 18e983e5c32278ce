// The loops of routing.h for processors, written once: a backend brings what it does faster with a row (`R`, see
// ref/routing.cc) and lists the rest. They are few operations a token and expert beside the products; sums are in f64,
// in an order that no number of threads changes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "concerto/ops/routing.h"

namespace concerto::routing {

template <class T>
T* row_at(const View& v, int64_t row) {
  return v.as<T>() + row * v.row_stride;
}

// Rows worth handing to another thread.
inline int64_t grain_of(int64_t row_elements) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, row_elements));
}

// Units are few: looking at them costs nothing and a wrong offset would write anywhere.
inline void check_units(const View& unit_offsets, int64_t tokens) {
  const int32_t* o = unit_offsets.as<int32_t>();
  const int64_t units = unit_offsets.dim(0) - 1;
  CHECK(o[0] == 0 && o[units] == tokens, "routing units from {} to {}, {} tokens", o[0], o[units], tokens);
  for (int64_t u = 0; u < units; ++u) CHECK(o[u] <= o[u + 1], "unit offsets fall from {} to {}", o[u], o[u + 1]);
}

// fn(token, unit, thread).
template <class F>
void for_tokens(const Context& ctx, const View& unit_offsets, int64_t tokens, int64_t row_elements, F&& fn) {
  check_units(unit_offsets, tokens);
  const int32_t* offsets = unit_offsets.as<int32_t>();
  ctx.pool->parallel_for(tokens, grain_of(row_elements), [&](int64_t begin, int64_t end, int thread) {
    int64_t u = std::upper_bound(offsets, offsets + unit_offsets.dim(0), begin) - offsets - 1;
    for (int64_t t = begin; t < end; ++t) {
      while (t >= offsets[u + 1]) ++u;
      fn(t, u, thread);
    }
  });
}

constexpr double kLeastRowSum = 1e-12;

template <class R>
struct Loops {
  using S = typename R::S;

  static void scores(const Context& ctx, const RoutingScores& a) {
    if (ctx.dry_run) return;
    const int64_t experts = a.logits.dim(1), width = experts / a.groups;
    ctx.pool->parallel_for(a.logits.dim(0), grain_of(experts), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const S* z = row_at<S>(a.logits, t);
        S* p = row_at<S>(a.probs, t);
        if (a.scoring == Scoring::kSigmoid)
          R::sigmoid(z, p, experts);
        else
          for (int64_t g = 0; g < experts; g += width) R::softmax(z + g, p + g, width);
      }
    });
  }

  // Sum of the kept p of a token, at least norm_min.
  static double divisor(const S* p, const int32_t* ids, const int32_t* slots, int64_t top_k, double norm_min,
                        bool* constant) {
    double sum = 0;
    for (int64_t j = 0; j < top_k; ++j)
      if (!slots || slots[j] >= 0) sum += p[ids[j]];
    *constant = sum < norm_min;
    return std::max(sum, norm_min);
  }

  static void weights(const Context& ctx, const RoutingWeights& a) {
    if (ctx.dry_run) return;
    const int64_t top_k = a.expert_ids.dim(1);
    ctx.pool->parallel_for(a.probs.dim(0), grain_of(4 * top_k), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const S* p = row_at<S>(a.probs, t);
        const int32_t* ids = row_at<int32_t>(a.expert_ids, t);
        const int32_t* slots = a.slots ? row_at<int32_t>(a.slots, t) : nullptr;
        bool constant;
        const double by = a.normalize ? divisor(p, ids, slots, top_k, a.norm_min, &constant) : 1.0;
        for (int64_t j = 0; j < top_k; ++j)
          row_at<S>(a.weights, t)[j] = !slots || slots[j] >= 0 ? static_cast<S>(p[ids[j]] / by) : S{0};
      }
    });
  }

  static void sums(const Context& ctx, const RoutingSums& a) {
    const int64_t tokens = a.probs.dim(0), experts = a.probs.dim(1), units = a.unit_offsets.dim(0) - 1;
    const bool sigmoid = a.scoring == Scoring::kSigmoid;
    ArenaScope arena(*ctx.scratch);
    const View row_sums = ctx.scratch->take({sigmoid ? tokens : 0}, DType::kF64);
    const View squares = ctx.scratch->take({a.lse ? tokens : 0}, DType::kF64);
    if (ctx.dry_run) return;
    check_units(a.unit_offsets, tokens);
    const int32_t* offsets = a.unit_offsets.as<int32_t>();
    if (sigmoid || a.lse)
      ctx.pool->parallel_for(tokens, grain_of(experts), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          if (sigmoid) row_sums.as<double>()[t] = row_sum(row_at<S>(a.probs, t), experts);
          if (!a.lse) continue;
          const double lse = R::log_sum_exp(row_at<S>(a.logits, t), experts);
          a.lse.as<S>()[t] = static_cast<S>(lse);
          squares.as<double>()[t] = lse * lse;
        }
      });
    // A thread takes columns, not tokens: every sum is in token order.
    ctx.pool->parallel_for(experts, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t u = 0; u < units; ++u) {
        double* sum = row_at<double>(a.prob_sums, u);
        std::fill(sum + begin, sum + end, 0.0);
        for (int64_t t = offsets[u]; t < offsets[u + 1]; ++t) {
          const S* p = row_at<S>(a.probs, t);
          const double by = sigmoid ? row_sums.as<double>()[t] : 1.0;
          for (int64_t e = begin; e < end; ++e) sum[e] += p[e] / by;
        }
      }
    });
    if (!a.lse) return;
    for (int64_t u = 0; u < units; ++u) {
      double sum = 0;
      for (int64_t t = offsets[u]; t < offsets[u + 1]; ++t) sum += squares.as<double>()[t];
      a.z_sums.as<double>()[u] = sum;
    }
  }

  static double row_sum(const S* p, int64_t experts) {
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += p[e];
    return std::max(sum, kLeastRowSum);
  }

  static void balance(const Context& ctx, const RoutingBalance& a) {
    if (ctx.dry_run) return;
    const int64_t units = a.counts.dim(0), experts = a.counts.dim(1);
    for (int64_t u = 0; u < units; ++u) {
      const int64_t* counts = row_at<int64_t>(a.counts, u);
      const double* sums = row_at<double>(a.prob_sums, u);
      const double tokens = static_cast<double>(std::max<int64_t>(1, a.tokens.as<int64_t>()[u]));
      const double factor = static_cast<double>(experts) / tokens / static_cast<double>(a.groups);
      double loss = 0;
      for (int64_t e = 0; e < experts; ++e) {
        const double share = factor * static_cast<double>(counts[e]) / tokens;
        loss += share * sums[e];
        if (a.aux_dprob) row_at<S>(a.aux_dprob, u)[e] = static_cast<S>(a.scale.as<double>()[u] * share);
      }
      a.loss.as<double>()[u] = loss;
    }
  }

  // With s = sum of the kept p, w_j = p_j / s: dp_j = (dw_j - sum_i dw_i w_i) / s, over kept entries; below norm_min
  // the divisor is constant. dp is collected in dlogits.
  static void backward(const Context& ctx, const RoutingBackward& a) {
    if (ctx.dry_run) return;
    const int64_t tokens = a.probs.dim(0), experts = a.probs.dim(1), top_k = a.expert_ids.dim(1);
    const int64_t width = experts / a.groups;
    for_tokens(ctx, a.unit_offsets, tokens, 3 * experts, [&](int64_t t, int64_t u, int) {
      const S* p = row_at<S>(a.probs, t);
      const S* dw = row_at<S>(a.dweights, t);
      const int32_t* ids = row_at<int32_t>(a.expert_ids, t);
      const int32_t* slots = a.slots ? row_at<int32_t>(a.slots, t) : nullptr;
      S* dz = row_at<S>(a.dlogits, t);
      std::fill(dz, dz + experts, S{0});
      if (a.aux_dprob) add_aux(a, p, row_at<S>(a.aux_dprob, u), dz);
      double by = 1, mean = 0;
      bool constant = true;
      if (a.normalize) by = divisor(p, ids, slots, top_k, a.norm_min, &constant);
      for (int64_t j = 0; j < top_k && !constant; ++j)
        if (!slots || slots[j] >= 0) mean += dw[j] * (p[ids[j]] / by);
      for (int64_t j = 0; j < top_k; ++j)
        if (!slots || slots[j] >= 0) dz[ids[j]] = static_cast<S>(dz[ids[j]] + (dw[j] - mean) / by);
      if (a.scoring == Scoring::kSigmoid)
        for (int64_t e = 0; e < experts; ++e) dz[e] = static_cast<S>(dz[e] * double{p[e]} * (1 - double{p[e]}));
      else
        for (int64_t g = 0; g < experts; g += width) R::softmax_backward(p + g, dz + g, dz + g, width);
      if (!a.lse) return;
      const double lse = a.lse.as<S>()[t], scale = 2 * a.z_scale.as<double>()[u] * lse;
      const S* z = row_at<S>(a.logits, t);
      const bool softmax = a.scoring == Scoring::kSoftmax && a.groups == 1;
      for (int64_t e = 0; e < experts; ++e)
        dz[e] = static_cast<S>(dz[e] + scale * (softmax ? double{p[e]} : std::exp(z[e] - lse)));
    });
  }

  // Gradient of the balance loss by p; for sigmoid through q = p / sum p: (a_e - sum_i a_i q_i) / sum p.
  static void add_aux(const RoutingBackward& a, const S* p, const S* aux, S* dp) {
    const int64_t experts = a.probs.dim(1);
    if (a.scoring == Scoring::kSoftmax) {
      std::copy(aux, aux + experts, dp);
      return;
    }
    const double sum = row_sum(p, experts);
    double mean = 0;
    for (int64_t e = 0; e < experts && sum > kLeastRowSum; ++e) mean += aux[e] * (p[e] / sum);
    for (int64_t e = 0; e < experts; ++e) dp[e] = static_cast<S>((aux[e] - mean) / sum);
  }

  static void bias_update(const Context& ctx, const BiasUpdate& a) {
    if (ctx.dry_run) return;
    const int64_t experts = a.usage.dim(1);
    const S rate = static_cast<S>(a.rate);
    for (int64_t r = 0; r < a.usage.dim(0); ++r) {
      int64_t* usage = row_at<int64_t>(a.usage, r);
      S* bias = row_at<S>(a.bias, r);
      int64_t total = 0;
      for (int64_t e = 0; e < experts; ++e) total += usage[e];
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t used = usage[e] * experts;
        if (used < total) bias[e] += rate;
        if (used > total) bias[e] -= rate;
      }
      std::fill(usage, usage + experts, int64_t{0});
    }
  }
};

inline void clear_dropped(const Context& ctx, const ClearDropped& a) {
  if (ctx.dry_run) return;
  const int64_t element = dtype_bytes(a.rows.dtype), rows = a.rows.dim(0);
  const int64_t first = a.offsets.as<int32_t>()[a.offsets.dim(0) - 2];
  CHECK(first >= 0 && first <= rows, "dropped rows from {} of {}", first, rows);
  for (int64_t r = first; r < rows; ++r)
    std::memset(static_cast<char*>(a.rows.data) + r * a.rows.row_stride * element, 0,
                static_cast<size_t>(a.rows.dim(1) * element));
}

template <class C>
void pad_dispatch(const PadDispatch& a) {
  const int64_t capacity = a.buffer.dim(1), places = a.buffer.dim(0) * capacity, hidden = a.x.dim(1);
  for (int64_t r = 0; r < places; ++r) std::fill_n(row_at<C>(a.buffer, r), hidden, C{});
  for (int64_t t = 0; t < a.expert_ids.dim(0); ++t)
    for (int64_t j = 0; j < a.expert_ids.dim(1); ++j) {
      const int64_t slot = row_at<int32_t>(a.slots, t)[j];
      const int64_t place = row_at<int32_t>(a.expert_ids, t)[j] * capacity + slot;
      CHECK(slot < capacity && place < places, "slot {} of {}, place {} of {}", slot, capacity, place, places);
      row_at<int32_t>(a.scatter_index, t)[j] = slot < 0 ? a.nowhere : static_cast<int32_t>(place);
      if (slot >= 0) std::copy_n(row_at<C>(a.x, t), hidden, row_at<C>(a.buffer, place));
    }
}

template <class C, class Acc>
void pad_combine(const PadCombine& a) {
  const int64_t places = a.buffer.rows(), hidden = a.buffer.cols();
  for (int64_t t = 0; t < a.scatter_index.dim(0); ++t)
    for (int64_t h = 0; h < hidden; ++h) {
      Acc sum = 0;
      for (int64_t j = 0; j < a.scatter_index.dim(1); ++j) {
        const int32_t at = row_at<int32_t>(a.scatter_index, t)[j];
        const Acc weight = static_cast<Acc>(row_at<C>(a.weights, t)[j]);
        CHECK(at < places, "scatter index {} of {}", at, places);
        if (at >= 0 && weight != 0) sum += weight * static_cast<Acc>(row_at<C>(a.buffer, at)[h]);
      }
      row_at<C>(a.y, t)[h] = static_cast<C>(sum);
    }
}

inline void pad_dispatch_any(const Context& ctx, const PadDispatch& a) {
  if (ctx.dry_run) return;
  if (a.x.dtype == DType::kF64) return pad_dispatch<double>(a);
  if (a.x.dtype == DType::kBF16) return pad_dispatch<bf16>(a);
  pad_dispatch<float>(a);
}
inline void pad_combine_any(const Context& ctx, const PadCombine& a) {
  if (ctx.dry_run) return;
  if (a.buffer.dtype == DType::kF64) return pad_combine<double, double>(a);
  if (a.buffer.dtype == DType::kBF16) return pad_combine<bf16, float>(a);
  pad_combine<float, float>(a);
}

}  // namespace concerto::routing
