#include <algorithm>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

// Tokens of one partial sum of the statistics: fixed by the shape.
int64_t statistics_block(int64_t tokens) { return std::max<int64_t>(128, blocks_of(tokens, 256)); }

float normalizer(const float* probs, const int32_t* ids, int64_t top_k, float norm_min) {
  float sum = 0;
  for (int64_t j = 0; j < top_k; ++j) sum += probs[ids[j]];
  return std::max(sum, norm_min);
}

template <Isa isa>
struct Router {
  static const SoftmaxTable& table() { return *kernel_table(isa).softmax; }

  static void select(const Context& ctx, const RouterSelect& a) {
    const int64_t tokens = a.logits.rows(), experts = a.logits.cols(), top_k = a.expert_ids.cols();
    const int64_t block = statistics_block(tokens), blocks = blocks_of(tokens, block);
    ArenaScope scope(*ctx.scratch);
    const View block_counts = ctx.scratch->take({blocks, 2, experts}, DType::kI64);
    const View block_sums = ctx.scratch->take({blocks, experts}, DType::kF64);
    const View choice = ctx.scratch->take({ctx.pool->size(), experts + top_k}, DType::kF32);
    if (ctx.dry_run) return;
    const Rows logits(a.logits), probs(a.probs), ids(a.expert_ids), weights(a.weights);
    const float* bias = a.bias ? a.bias.as<float>() : nullptr;
    const float norm_min = static_cast<float>(a.norm_min);
    ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int thread) {
      float* scores = choice.as<float>() + thread * (experts + top_k);
      int32_t* bare_ids = reinterpret_cast<int32_t*>(scores + experts);
      for (int64_t b = begin; b < end; ++b) {
        int64_t* counts = block_counts.as<int64_t>() + b * 2 * experts;
        double* sums = block_sums.as<double>() + b * experts;
        std::fill_n(counts, 2 * experts, 0);
        std::fill_n(sums, experts, 0.0);
        for (int64_t i = b * block; i < std::min(tokens, (b + 1) * block); ++i) {
          float* p = reinterpret_cast<float*>(probs[i]);
          int32_t* chosen = reinterpret_cast<int32_t*>(ids[i]);
          table().softmax(reinterpret_cast<const float*>(logits[i]), p, experts);
          table().add_to_double(p, sums, experts);
          if (!a.replay) {
            for (int64_t e = 0; e < experts; ++e) scores[e] = bias ? p[e] + bias[e] : p[e];
            table().top_k(scores, experts, top_k, chosen);
            const int32_t* bare = chosen;
            if (bias) {
              std::copy_n(p, experts, scores);
              table().top_k(scores, experts, top_k, bare_ids);
              bare = bare_ids;
            }
            for (int64_t j = 0; j < top_k; ++j) {
              ++counts[chosen[j]];
              ++counts[experts + bare[j]];
            }
          }
          const float norm = normalizer(p, chosen, top_k, norm_min);
          float* w = reinterpret_cast<float*>(weights[i]);
          for (int64_t j = 0; j < top_k; ++j) w[j] = p[chosen[j]] / norm;
        }
      }
    });
    int64_t *counts = a.counts.as<int64_t>(), *bare_counts = a.bare_counts.as<int64_t>();
    double* prob_sums = a.prob_sums.as<double>();
    std::fill_n(prob_sums, experts, 0.0);
    if (!a.replay) {
      std::fill_n(counts, experts, 0);
      std::fill_n(bare_counts, experts, 0);
    }
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t e = 0; e < experts; ++e) {
        prob_sums[e] += block_sums.as<double>()[b * experts + e];
        if (a.replay) continue;
        counts[e] += block_counts.as<int64_t>()[b * 2 * experts + e];
        bare_counts[e] += block_counts.as<int64_t>()[(b * 2 + 1) * experts + e];
      }
  }

  // w_j = p_j / max(s, norm_min), s = sum of the chosen p: dp_j = (dw_j - [s >= norm_min] * sum_i dw_i w_i) / norm.
  static void select_backward(const Context& ctx, const RouterSelectBackward& a) {
    if (ctx.dry_run) return;
    const int64_t tokens = a.probs.rows(), experts = a.probs.cols(), top_k = a.expert_ids.cols();
    const Rows dweights(a.dweights), probs(a.probs), ids(a.expert_ids), dlogits(a.dlogits);
    const float* aux = a.aux_dprob ? a.aux_dprob.as<float>() : nullptr;
    const float norm_min = static_cast<float>(a.norm_min);
    ctx.pool->parallel_for(tokens, grain_rows(3 * experts * 4), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const float *p = reinterpret_cast<const float*>(probs[i]), *dw = reinterpret_cast<const float*>(dweights[i]);
        const int32_t* chosen = reinterpret_cast<const int32_t*>(ids[i]);
        float* dp = reinterpret_cast<float*>(dlogits[i]);  // dlogits holds dp until the softmax's backward
        if (aux)
          std::copy_n(aux, experts, dp);
        else
          std::fill_n(dp, experts, 0.0f);
        float sum = 0, mean = 0;
        for (int64_t j = 0; j < top_k; ++j) sum += p[chosen[j]];
        const float norm = std::max(sum, norm_min);
        if (sum >= norm_min)
          for (int64_t j = 0; j < top_k; ++j) mean += dw[j] * (p[chosen[j]] / norm);
        for (int64_t j = 0; j < top_k; ++j) dp[chosen[j]] += (dw[j] - mean) / norm;
        table().softmax_backward(p, dp, dp, experts);
      }
    });
  }

  static void fill(Backend& b) {
    b.router.select = select;
    b.router.select_backward = select_backward;
  }
};

}  // namespace

void fill_router(Backend& backend, Isa isa) { fill_for<Router>(backend, isa); }

}  // namespace concerto::cpu
