#include "concerto/ops/cross_entropy.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void cross_entropy(const Context& ctx, const CrossEntropy& args) {
  const DType stat = args.logits.dtype;
  CHECK(stat == DType::kF32 || stat == DType::kF64, "cross_entropy.logits is {}", dtype_name(stat));
  check_rank(args.logits, 2, "cross_entropy.logits");
  const int64_t tokens = args.logits.dim(0), vocab = args.logits.dim(1);
  check_view(args.targets, {tokens}, DType::kI32, "cross_entropy.targets");
  check_view(args.loss_sum, {1}, DType::kF64, "cross_entropy.loss_sum");
  check_memory(ctx, {args.logits, args.targets, args.loss_sum});
  if (is_given(args.dlogits)) {
    check_compute(args.dlogits, "cross_entropy.dlogits");
    CHECK(stat_dtype(args.dlogits.dtype) == stat, "cross_entropy.dlogits is {}", dtype_name(args.dlogits.dtype));
    check_view(args.dlogits, {tokens, vocab}, args.dlogits.dtype, "cross_entropy.dlogits");
    check_memory(ctx, {args.dlogits});
    if (!same_memory(args.logits, args.dlogits)) check_apart(args.dlogits, {args.logits}, "cross_entropy.dlogits");
    check_apart(args.dlogits, {args.targets, args.loss_sum, args.token_loss}, "cross_entropy.dlogits");
  }
  if (is_given(args.token_loss)) {
    check_view(args.token_loss, {tokens}, stat, "cross_entropy.token_loss");
    check_memory(ctx, {args.token_loss});
    check_apart(args.token_loss, {args.logits, args.targets, args.loss_sum}, "cross_entropy.token_loss");
  }
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kHead, ctx.backend->cross_entropy.apply, args, "cross_entropy");
}

}  // namespace concerto
