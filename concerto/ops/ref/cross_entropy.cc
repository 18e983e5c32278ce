#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void apply(const Context& ctx, const CrossEntropy& a) {
  if (ctx.dry_run) return;
  const int64_t vocab = a.logits.dim(1);
  const DType compute = is_given(a.dlogits) ? a.dlogits.dtype : a.logits.dtype;
  with_types(compute, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.logits.dim(0); ++t) {
      const S* z = row_of<S>(a.logits, t);
      const int32_t target = a.targets.as<int32_t>()[t];
      CHECK(target < vocab, "target {} of a vocabulary of {}", target, vocab);
      const double highest = load(*std::max_element(z, z + vocab));
      double sum = 0;
      for (int64_t v = 0; v < vocab; ++v) sum += std::exp(load(z[v]) - highest);
      const double loss = target < 0 ? 0.0 : highest + std::log(sum) - load(z[target]);
      if (target >= 0) *a.loss_sum.as<double>() += loss;
      if (is_given(a.token_loss)) store(a.token_loss.as<S>()[t], loss);
      if (!is_given(a.dlogits)) continue;
      C* dz = row_of<C>(a.dlogits, t);
      for (int64_t v = 0; v < vocab; ++v) {
        const double p = std::exp(load(z[v]) - highest) / sum;
        store(dz[v], target < 0 ? 0.0 : a.scale * (p - (v == target ? 1.0 : 0.0)));
      }
    }
  });
}

}  // namespace

CrossEntropyKernels cross_entropy() { return {.apply = apply}; }

}  // namespace concerto::ref
