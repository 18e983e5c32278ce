#include <algorithm>

#include "concerto/ops/ref/kernels.h"
#include "concerto/ops/routing_kernels.h"

namespace concerto::ref {
namespace {

// What a row needs, in plain loops through double.
template <class Stat>
struct PlainRows {
  using S = Stat;
  static void softmax(const S* z, S* p, int64_t n) {
    const double highest = *std::max_element(z, z + n);
    double sum = 0;
    for (int64_t e = 0; e < n; ++e) sum += std::exp(z[e] - highest);
    for (int64_t e = 0; e < n; ++e) p[e] = static_cast<S>(std::exp(z[e] - highest) / sum);
  }
  static void softmax_backward(const S* p, const S* dp, S* dz, int64_t n) {
    double pull = 0;
    for (int64_t e = 0; e < n; ++e) pull += double{p[e]} * dp[e];
    for (int64_t e = 0; e < n; ++e) dz[e] = static_cast<S>(p[e] * (dp[e] - pull));
  }
  static double log_sum_exp(const S* z, int64_t n) {
    const double highest = *std::max_element(z, z + n);
    double sum = 0;
    for (int64_t e = 0; e < n; ++e) sum += std::exp(z[e] - highest);
    return highest + std::log(sum);
  }
  static void sigmoid(const S* z, S* p, int64_t n) {
    for (int64_t e = 0; e < n; ++e) p[e] = static_cast<S>(1 / (1 + std::exp(-double{z[e]})));
  }
  static void top_k(const S* s, int64_t n, int64_t k, int32_t* ids) {
    for (int64_t j = 0; j < k; ++j) {
      int32_t best = -1;
      for (int32_t e = 0; e < n; ++e)
        if (std::find(ids, ids + j, e) == ids + j && (best < 0 || s[e] > s[best])) best = e;
      ids[j] = best;
    }
  }
};

constexpr RoutingKernels kF32 = routing::kernels<PlainRows<float>>(), kF64 = routing::kernels<PlainRows<double>>();

const RoutingKernels& of(const View& stat) { return stat.dtype == DType::kF64 ? kF64 : kF32; }

}  // namespace

RoutingKernels routing() {
  RoutingKernels k = routing::kernels<PlainRows<float>>();
  k.scores = [](const Context& ctx, const RoutingScores& a) { of(a.logits).scores(ctx, a); };
  k.choose = [](const Context& ctx, const RoutingChoose& a) { of(a.probs).choose(ctx, a); };
  k.weights = [](const Context& ctx, const RoutingWeights& a) { of(a.probs).weights(ctx, a); };
  k.sums = [](const Context& ctx, const RoutingSums& a) { of(a.probs).sums(ctx, a); };
  k.balance = [](const Context& ctx, const RoutingBalance& a) { of(a.aux_dprob).balance(ctx, a); };
  k.backward = [](const Context& ctx, const RoutingBackward& a) { of(a.probs).backward(ctx, a); };
  k.orthogonal_loss = [](const Context& ctx, const OrthogonalLoss& a) { of(a.w).orthogonal_loss(ctx, a); };
  k.orthogonal_step = [](const Context& ctx, const OrthogonalStep& a) { of(a.w).orthogonal_step(ctx, a); };
  k.bias_update = [](const Context& ctx, const BiasUpdate& a) { of(a.bias).bias_update(ctx, a); };
  return k;
}

}  // namespace concerto::ref
