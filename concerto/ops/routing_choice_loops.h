// The loops of routing.h that choose experts and give out their slots (see routing_loops.h).
#pragma once

#include "concerto/ops/routing_loops.h"

namespace concerto::routing {

constexpr int kSinkhornRounds = 10;
constexpr double kSinkhornEnough = 1e-8, kSinkhornEps = 1e-8;
constexpr int64_t kSinkhornBlock = 256;  // tokens of one partial column sum

template <class S>
int32_t argmax(const S* s, int64_t n) {
  int32_t best = 0;
  for (int32_t e = 1; e < n; ++e)
    if (s[e] > s[best]) best = e;
  return best;
}

// The best expert that is not `first`, by value(e).
template <class F>
int32_t second_best(int64_t experts, int32_t first, F&& value) {
  int32_t best = first == 0 ? 1 : 0;
  auto highest = value(best);
  for (int32_t e = best + 1; e < experts; ++e) {
    if (e == first) continue;
    const auto v = value(e);
    if (v > highest) best = e, highest = v;
  }
  return best;
}

struct SinkhornScratch {
  View p;      // [T, E] f64
  View rho;    // [T] f64: row sums
  View sums;   // [blocks, E] f64: partial column sums
  View moved;  // [blocks] i32: a row sum changed
  View scale;  // [U, 2, E] f64: target of each column, factor that is still to be applied
};

// Second choices of one unit (reference 4.2).
template <class S>
void sinkhorn_unit(const Context& ctx, const RoutingChoose& a, const SinkhornScratch& s, int64_t u) {
  const int32_t* offsets = a.unit_offsets.as<int32_t>();
  const int64_t begin = offsets[u], tokens = offsets[u + 1] - begin, experts = a.probs.dim(1);
  if (tokens == 0) return;
  const int64_t first_block = begin / kSinkhornBlock + u, blocks = (tokens + kSinkhornBlock - 1) / kSinkhornBlock;
  double *target = s.scale.as<double>() + u * 2 * experts, *factor = target + experts;
  double room = 0;
  for (int64_t e = 0; e < experts; ++e) {
    target[e] = static_cast<double>(
        std::max<int64_t>(0, a.capacity.as<int64_t>()[u] - row_at<int64_t>(a.claims, u * a.claims.dim(1))[e]));
    room += target[e];
  }
  for (int64_t e = 0; e < experts; ++e) {
    target[e] = room == 0 && a.full == FullExperts::kUniform ? 1.0 / static_cast<double>(experts) : target[e] / room;
    factor[e] = 1;
  }
  // fn(token, row of P, block) over the unit.
  const auto each = [&](auto&& before, auto&& fn) {
    ctx.pool->parallel_for(blocks, 1, [&](int64_t from, int64_t to, int) {
      for (int64_t b = from; b < to; ++b) {
        before(first_block + b);
        for (int64_t i = b * kSinkhornBlock; i < std::min(tokens, (b + 1) * kSinkhornBlock); ++i)
          fn(begin + i, row_at<double>(s.p, begin + i), first_block + b);
      }
    });
  };
  const auto nothing = [](int64_t) {};

  each(nothing, [&](int64_t t, double* p, int64_t) {  // softmax of z / temp without the first choice
    const S* z = row_at<S>(a.logits, t);
    const int32_t first = row_at<int32_t>(a.expert_ids, t)[0];
    const double highest = z[second_best(experts, first, [&](int32_t e) { return z[e]; })];
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) {
      p[e] = e == first ? 0.0 : std::exp((z[e] - highest) / a.sinkhorn_temp);
      sum += p[e];
    }
    for (int64_t e = 0; e < experts; ++e) p[e] /= sum;
    s.rho.as<double>()[t] = 0;
  });
  const double share = 1.0 / static_cast<double>(tokens);
  for (int round = 0; round < kSinkhornRounds; ++round) {
    each([&](int64_t b) { s.moved.as<int32_t>()[b] = 0; },
         [&](int64_t t, double* p, int64_t b) {
           double sum = 0;
           for (int64_t e = 0; e < experts; ++e) sum += p[e] *= factor[e];
           double& rho = s.rho.as<double>()[t];
           if (!(std::fabs(rho - sum) < kSinkhornEnough)) s.moved.as<int32_t>()[b] = 1;  // NaN has not settled
           rho = sum;
         });
    std::fill(factor, factor + experts, 1.0);
    const int32_t* moved = s.moved.as<int32_t>() + first_block;
    if (std::none_of(moved, moved + blocks, [](int32_t m) { return m != 0; })) break;
    each([&](int64_t b) { std::fill_n(row_at<double>(s.sums, b), experts, 0.0); },
         [&](int64_t t, double* p, int64_t b) {
           const double by = share / (s.rho.as<double>()[t] + kSinkhornEps);
           double* sum = row_at<double>(s.sums, b);
           for (int64_t e = 0; e < experts; ++e) sum[e] += p[e] *= by;
         });
    for (int64_t e = 0; e < experts; ++e) {
      double sum = 0;
      for (int64_t b = 0; b < blocks; ++b) sum += row_at<double>(s.sums, first_block + b)[e];
      factor[e] = target[e] / (sum + kSinkhornEps);
    }
  }
  each(nothing, [&](int64_t t, double* p, int64_t) {
    int32_t* ids = row_at<int32_t>(a.expert_ids, t);
    ids[1] = second_best(experts, ids[0], [&](int32_t e) {
      const double v = p[e] * factor[e];
      return std::isnan(v) ? 0.0 : v;
    });
  });
}

template <class R>
struct ChoiceLoops {
  using S = typename R::S;

  // Choices of a token by p + bias (bias may be null); `work` holds E numbers.
  static void top_k(const S* p, const S* bias, int64_t experts, int64_t k, int64_t groups, S* work, int32_t* ids) {
    const int64_t width = experts / groups;
    if (groups == 1) {
      for (int64_t e = 0; e < experts; ++e) work[e] = bias ? p[e] + bias[e] : p[e];
      R::top_k(work, experts, k, ids);
      return;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const S* q = p + g * width;
      const S highest = q[argmax(q, width)];
      for (int64_t i = 0; i < width; ++i) work[i] = bias ? q[i] / highest + bias[g * width + i] : q[i];
      ids[g] = static_cast<int32_t>(g * width) + argmax(work, width);
    }
  }

  static int32_t greedy_second(const RoutingChoose& a, int64_t t, int32_t first, const S* bias, S* work) {
    const int64_t experts = a.probs.dim(1);
    const S* z = row_at<S>(a.logits, t);
    if (!bias) return second_best(experts, first, [&](int32_t e) { return z[e]; });
    S *rest = work, *q = work + experts;
    std::copy(z, z + first, rest);
    std::copy(z + first + 1, z + experts, rest + first);
    R::softmax(rest, q, experts - 1);
    return second_best(experts, first, [&](int32_t e) { return static_cast<S>(q[e < first ? e : e - 1] + bias[e]); });
  }

  static void choose(const Context& ctx, const RoutingChoose& a) {
    const int64_t tokens = a.probs.dim(0), experts = a.probs.dim(1), k = a.expert_ids.dim(1);
    const int64_t units = a.unit_offsets.dim(0) - 1, blocks = tokens / kSinkhornBlock + units;
    const bool top2 = a.gate == Gate::kTop2, bare_differs = a.bias || top2;
    ArenaScope arena(*ctx.scratch);
    const View rows = ctx.scratch->take({ctx.pool->size(), 2 * experts}, a.probs.dtype);
    const View bare_ids = ctx.scratch->take({bare_differs ? tokens : 0, k}, DType::kI32);
    SinkhornScratch s;
    if (a.sinkhorn)
      s = {.p = ctx.scratch->take({tokens, experts}, DType::kF64),
           .rho = ctx.scratch->take({tokens}, DType::kF64),
           .sums = ctx.scratch->take({blocks, experts}, DType::kF64),
           .moved = ctx.scratch->take({blocks}, DType::kI32),
           .scale = ctx.scratch->take({units, 2, experts}, DType::kF64)};
    if (ctx.dry_run) return;
    const S* bias = a.bias ? a.bias.as<S>() : nullptr;
    for_tokens(ctx, a.unit_offsets, tokens, 4 * experts, [&](int64_t t, int64_t, int thread) {
      S* work = row_at<S>(rows, thread);
      const S* p = row_at<S>(a.probs, t);
      int32_t* ids = row_at<int32_t>(a.expert_ids, t);
      top_k(p, bias, experts, top2 ? 1 : k, a.groups, work, ids);
      if (top2) ids[1] = a.sinkhorn ? ids[0] : greedy_second(a, t, ids[0], bias, work);
      if (bare_differs) top_k(p, nullptr, experts, k, a.groups, work, row_at<int32_t>(bare_ids, t));
    });
    count(a, a.expert_ids);
    if (a.sinkhorn) {
      ctx.pool->parallel_dynamic(units, [&](int64_t u, int) { sinkhorn_unit<S>(ctx, a, s, u); });
      count(a, a.expert_ids);
    }
    total(a, a.counts);
    if (!bare_differs) return total(a, a.bare_counts);
    for (int64_t u = 0; u < units; ++u) {
      int64_t* bare = row_at<int64_t>(a.bare_counts, u);
      std::fill(bare, bare + experts, int64_t{0});
      for (int64_t t = a.unit_offsets.as<int32_t>()[u]; t < a.unit_offsets.as<int32_t>()[u + 1]; ++t)
        for (int64_t j = 0; j < k; ++j) ++bare[row_at<int32_t>(bare_ids, t)[j]];
    }
  }

  static void count(const RoutingChoose& a, const View& ids) {
    const int64_t k = ids.dim(1), experts = a.probs.dim(1);
    for (int64_t u = 0; u + 1 < a.unit_offsets.dim(0); ++u) {
      int64_t* claims = row_at<int64_t>(a.claims, u * k);
      std::fill(claims, claims + k * experts, int64_t{0});
      for (int64_t t = a.unit_offsets.as<int32_t>()[u]; t < a.unit_offsets.as<int32_t>()[u + 1]; ++t)
        for (int64_t j = 0; j < k; ++j) ++claims[j * experts + row_at<int32_t>(ids, t)[j]];
    }
  }

  static void total(const RoutingChoose& a, const View& counts) {
    const int64_t k = a.expert_ids.dim(1), experts = a.probs.dim(1);
    for (int64_t u = 0; u + 1 < a.unit_offsets.dim(0); ++u) {
      int64_t* sum = row_at<int64_t>(counts, u);
      std::fill(sum, sum + experts, int64_t{0});
      for (int64_t j = 0; j < k; ++j)
        for (int64_t e = 0; e < experts; ++e) sum[e] += row_at<int64_t>(a.claims, u * k + j)[e];
    }
  }
};

// One walk over a unit's tokens with a counter for each (choice, expert) or expert: the place of a claim among all of
// its expert. In kRankMajor choice j starts after all choices before j, of the whole unit.
inline void drop(const Context& ctx, const RoutingDrop& a) {
  const int64_t tokens = a.expert_ids.dim(0), k = a.expert_ids.dim(1), experts = a.claims.dim(2);
  const int64_t units = a.unit_offsets.dim(0) - 1;
  ArenaScope arena(*ctx.scratch);
  const View counters = ctx.scratch->take({units, k, experts}, DType::kI64);
  if (ctx.dry_run) return;
  check_units(a.unit_offsets, tokens);
  for (int64_t i = 0; i < tokens * k; ++i) {
    const int32_t e = a.expert_ids.as<int32_t>()[i];
    CHECK(e >= 0 && e < experts, "token {} chose expert {} of {}", i / k, e, experts);
  }
  for (int64_t u = 0; a.capacity && u < units; ++u)
    CHECK(a.capacity.as<int64_t>()[u] > 0 || a.unit_offsets.as<int32_t>()[u] == a.unit_offsets.as<int32_t>()[u + 1],
          "unit {} has tokens and a capacity of {}", u, a.capacity.as<int64_t>()[u]);
  const bool rank_major = a.order == DropOrder::kRankMajor;
  ctx.pool->parallel_dynamic(units, [&](int64_t u, int) {
    const int64_t begin = a.unit_offsets.as<int32_t>()[u], end = a.unit_offsets.as<int32_t>()[u + 1];
    const int64_t capacity = a.capacity ? a.capacity.as<int64_t>()[u] : INT64_MAX;
    int64_t* next = row_at<int64_t>(counters, u * k);
    int64_t* kept = row_at<int64_t>(a.kept_counts, u);
    std::fill(next, next + k * experts, int64_t{0});
    std::fill(kept, kept + experts, int64_t{0});
    if (a.before)
      std::copy_n(row_at<int64_t>(a.before, u * k), k * experts, next);
    else if (rank_major)
      for (int64_t i = experts; i < k * experts; ++i)
        next[i] = next[i - experts] + row_at<int64_t>(a.claims, u * k)[i - experts];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = a.reverse ? begin + end - 1 - i : i;
      for (int64_t j = 0; j < k; ++j) {
        const int32_t e = row_at<int32_t>(a.expert_ids, t)[j];
        const int64_t place = next[(rank_major ? j * experts : 0) + e]++;
        const bool keep = place < capacity;
        row_at<int32_t>(a.slots, t)[j] = keep ? static_cast<int32_t>(place) : -1;
        row_at<int32_t>(a.kept_ids, t)[j] = keep ? e : static_cast<int32_t>(experts);
        kept[e] += keep;
      }
    }
  });
}

}  // namespace concerto::routing
