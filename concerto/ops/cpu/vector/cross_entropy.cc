#include <cstring>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

template <Isa isa>
struct Loss {
  // `of_row(i)`: log(sum(exp)) of a row that counts and its target's logit; the target's column may lie outside.
  template <class Args, class OfRow>
  static void losses(const Context& ctx, const Args& a, int64_t begin_id, OfRow of_row) {
    const int64_t tokens = a.logits.rows(), vocab = a.logits.cols();
    ArenaScope scope(*ctx.scratch);
    const View token_losses = ctx.scratch->take({tokens}, DType::kF64);
    if (ctx.dry_run) return;
    const SoftmaxTable& t = *kernel_table(isa).softmax;
    const Rows logits(a.logits), dlogits(a.dlogits);
    const auto gradient = dlogits.data ? t.cross_entropy_grad[type_index(a.dlogits.dtype)] : nullptr;
    const int32_t* targets = a.targets.template as<int32_t>();
    const float scale = static_cast<float>(a.scale);
    double* losses = token_losses.as<double>();
    ctx.pool->parallel_for(tokens, grain_rows(vocab * logits.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const float* x = reinterpret_cast<const float*>(logits[i]);
        losses[i] = 0;
        if (targets[i] < 0) {
          if (gradient) std::memset(dlogits[i], 0, static_cast<size_t>(vocab * dlogits.element));
          continue;
        }
        const JoinedShares row = of_row(x, i);
        losses[i] = row.lse - row.target;
        if (gradient) gradient(x, static_cast<float>(row.lse), scale, targets[i] - begin_id, dlogits[i], vocab);
      }
    });
    double sum = *a.loss_sum.template as<double>();
    for (int64_t i = 0; i < tokens; ++i) sum += losses[i];
    *a.loss_sum.template as<double>() = sum;
    if (float* token_loss = a.token_loss ? a.token_loss.template as<float>() : nullptr)
      for (int64_t i = 0; i < tokens; ++i) token_loss[i] = static_cast<float>(losses[i]);
  }

  static void apply(const Context& ctx, const CrossEntropy& a) {
    const int32_t* targets = static_cast<const int32_t*>(a.targets.data);
    losses(ctx, a, 0, [&](const float* x, int64_t i) {
      return JoinedShares{kernel_table(isa).softmax->log_sum_exp(x, a.logits.cols()),
                          static_cast<double>(x[targets[i]])};
    });
  }

  static void share(const Context& ctx, const CrossEntropyShare& a) {
    if (ctx.dry_run) return;
    const int64_t vocab = a.logits.cols();
    const Rows logits(a.logits), shares(a.share);
    const int32_t* targets = a.targets.as<int32_t>();
    ctx.pool->parallel_for(a.logits.rows(), grain_rows(vocab * logits.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const float* x = reinterpret_cast<const float*>(logits[i]);
        const int64_t target = targets[i] - a.begin;
        double* to = reinterpret_cast<double*>(shares[i]);
        to[0] = kernel_table(isa).softmax->log_sum_exp(x, vocab);
        to[1] = target >= 0 && target < vocab ? static_cast<double>(x[target]) : 0.0;
      }
    });
  }

  static void of_shares(const Context& ctx, const CrossEntropyOfShares& a) {
    losses(ctx, a, a.begin, [&](const float*, int64_t i) { return join_shares(a.shares, i); });
  }

  static void fill(Backend& b) { b.cross_entropy = {apply, share, of_shares}; }
};

}  // namespace

void fill_cross_entropy(Backend& backend, Isa isa) { fill_for<Loss>(backend, isa); }

}  // namespace concerto::cpu
