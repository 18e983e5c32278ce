#include "concerto/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

DType check_logits(const View& logits, const View& targets) {
  const DType stat = logits.dtype;
  CHECK(stat == DType::kF32 || stat == DType::kF64, "cross_entropy.logits is {}", dtype_name(stat));
  check_rank(logits, 2, "cross_entropy.logits");
  check_view(targets, {logits.dim(0)}, DType::kI32, "cross_entropy.targets");
  return stat;
}

template <class Args>
void check_outputs(const Context& ctx, const Args& args, DType stat) {
  const int64_t tokens = args.logits.dim(0), vocab = args.logits.dim(1);
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
}

}  // namespace

void cross_entropy(const Context& ctx, const CrossEntropy& args) {
  check_outputs(ctx, args, check_logits(args.logits, args.targets));
  if (args.logits.dim(0) == 0) return;
  run_kernel(ctx, OpFamily::kHead, ctx.backend->cross_entropy.apply, args, "cross_entropy");
}

void cross_entropy_share(const Context& ctx, const CrossEntropyShare& args) {
  check_logits(args.logits, args.targets);
  const int64_t tokens = args.logits.dim(0);
  CHECK(args.begin >= 0 && args.logits.dim(1) > 0, "cross_entropy.begin is {}", args.begin);
  check_view(args.share, {tokens, 2}, DType::kF64, "cross_entropy.share");
  check_memory(ctx, {args.logits, args.targets, args.share});
  check_apart(args.share, {args.logits, args.targets}, "cross_entropy.share");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kHead, ctx.backend->cross_entropy.share, args, "cross_entropy_share");
}

void cross_entropy_of_shares(const Context& ctx, const CrossEntropyOfShares& args) {
  const DType stat = check_logits(args.logits, args.targets);
  const int64_t tokens = args.logits.dim(0);
  check_rank(args.shares, 3, "cross_entropy.shares");
  check_view(args.shares, {args.shares.dim(0), tokens, 2}, DType::kF64, "cross_entropy.shares");
  check_dense(args.shares, "cross_entropy.shares");
  CHECK(args.begin >= 0 && args.logits.dim(1) > 0, "cross_entropy.begin is {}", args.begin);
  check_outputs(ctx, args, stat);
  check_memory(ctx, {args.shares});
  check_apart(args.dlogits, {args.shares}, "cross_entropy.dlogits");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kHead, ctx.backend->cross_entropy.of_shares, args, "cross_entropy_of_shares");
}

JoinedShares join_shares(const View& shares, int64_t token) {
  const int64_t ranks = shares.dim(0), stride = shares.dim(1) * 2;
  const double* first = static_cast<const double*>(shares.data) + token * 2;
  double highest = first[0];
  for (int64_t r = 1; r < ranks; ++r) highest = std::max(highest, first[r * stride]);
  double sum = 0;
  JoinedShares joined;
  for (int64_t r = 0; r < ranks; ++r) {
    sum += std::exp(first[r * stride] - highest);
    joined.target += first[r * stride + 1];
  }
  joined.lse = highest + std::log(sum);
  return joined;
}

}  // namespace concerto
