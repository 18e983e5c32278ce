#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

struct Sum {
  double highest = 0, sum = 0;  // of exp(z - highest)
  double log() const { return highest + std::log(sum); }
};

template <class S>
Sum sum_exp(const S* z, int64_t n) {
  Sum s{load(*std::max_element(z, z + n)), 0};
  for (int64_t v = 0; v < n; ++v) s.sum += std::exp(load(z[v]) - s.highest);
  return s;
}

void apply(const Context& ctx, const CrossEntropy& a) {
  if (ctx.dry_run) return;
  const int64_t vocab = a.logits.dim(1);
  const DType compute = is_given(a.dlogits) ? a.dlogits.dtype : a.logits.dtype;
  with_types(compute, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.logits.dim(0); ++t) {
      const S* z = row_of<S>(a.logits, t);
      const int32_t target = a.targets.as<int32_t>()[t];
      CHECK(target < vocab, "target {} of a vocabulary of {}", target, vocab);
      const Sum s = sum_exp(z, vocab);
      const double loss = target < 0 ? 0.0 : s.log() - load(z[target]);
      if (target >= 0) *a.loss_sum.as<double>() += loss;
      if (is_given(a.token_loss)) store(a.token_loss.as<S>()[t], loss);
      if (!is_given(a.dlogits)) continue;
      C* dz = row_of<C>(a.dlogits, t);
      for (int64_t v = 0; v < vocab; ++v) {
        const double p = std::exp(load(z[v]) - s.highest) / s.sum;
        store(dz[v], target < 0 ? 0.0 : a.scale * (p - (v == target ? 1.0 : 0.0)));
      }
    }
  });
}

void share(const Context& ctx, const CrossEntropyShare& a) {
  if (ctx.dry_run) return;
  const int64_t vocab = a.logits.dim(1);
  with_stat(a.logits.dtype, [&]<class S>() {
    for (int64_t t = 0; t < a.logits.dim(0); ++t) {
      const S* z = row_of<S>(a.logits, t);
      const int64_t target = a.targets.as<int32_t>()[t] - a.begin;
      double* to = row_of<double>(a.share, t);
      to[0] = sum_exp(z, vocab).log();
      to[1] = target >= 0 && target < vocab ? load(z[target]) : 0.0;
    }
  });
}

void of_shares(const Context& ctx, const CrossEntropyOfShares& a) {
  if (ctx.dry_run) return;
  const DType compute = is_given(a.dlogits) ? a.dlogits.dtype : a.logits.dtype;
  with_types(compute, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.logits.dim(0); ++t) {
      const S* z = row_of<S>(a.logits, t);
      const int32_t target = a.targets.as<int32_t>()[t];
      const JoinedShares joined = join_shares(a.shares, t);
      const double loss = target < 0 ? 0.0 : joined.lse - joined.target;
      if (target >= 0) *a.loss_sum.as<double>() += loss;
      if (is_given(a.token_loss)) store(a.token_loss.as<S>()[t], loss);
      if (!is_given(a.dlogits)) continue;
      C* dz = row_of<C>(a.dlogits, t);
      for (int64_t v = 0; v < a.logits.dim(1); ++v)
        store(dz[v], target < 0 ? 0.0 : a.scale * (std::exp(load(z[v]) - joined.lse) - (v + a.begin == target)));
    }
  });
}

}  // namespace

CrossEntropyKernels cross_entropy() { return {.apply = apply, .share = share, .of_shares = of_shares}; }

}  // namespace concerto::ref
