#include <cstring>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

template <Isa isa>
struct Loss {
  static void apply(const Context& ctx, const CrossEntropy& a) {
    const int64_t tokens = a.logits.rows(), vocab = a.logits.cols();
    ArenaScope scope(*ctx.scratch);
    const View token_losses = ctx.scratch->take({tokens}, DType::kF64);
    if (ctx.dry_run) return;
    const SoftmaxTable& t = *kernel_table(isa).softmax;
    const Rows logits(a.logits), dlogits(a.dlogits);
    const auto gradient = dlogits.data ? t.cross_entropy_grad[type_index(a.dlogits.dtype)] : nullptr;
    const int32_t* targets = a.targets.as<int32_t>();
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
        const double lse = t.log_sum_exp(x, vocab);
        losses[i] = lse - static_cast<double>(x[targets[i]]);
        if (gradient) gradient(x, static_cast<float>(lse), scale, targets[i], dlogits[i], vocab);
      }
    });
    double sum = *a.loss_sum.as<double>();
    for (int64_t i = 0; i < tokens; ++i) sum += losses[i];
    *a.loss_sum.as<double>() = sum;
    if (float* token_loss = a.token_loss ? a.token_loss.as<float>() : nullptr)
      for (int64_t i = 0; i < tokens; ++i) token_loss[i] = static_cast<float>(losses[i]);
  }

  static void fill(Backend& b) { b.cross_entropy = {apply}; }
};

}  // namespace

void fill_cross_entropy(Backend& backend, Isa isa) { fill_for<Loss>(backend, isa); }

}  // namespace concerto::cpu
