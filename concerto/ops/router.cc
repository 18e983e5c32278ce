#include "concerto/ops/router.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void router_logits(const Context& ctx, const RouterLogits& args) {
  check_compute(args.x, "router.x");
  check_rank(args.x, 2, "router.x");
  check_rank(args.w, 2, "router.w");
  const DType stat = stat_dtype(args.x.dtype);
  const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.w.dim(0);
  check_view(args.w, {experts, hidden}, stat, "router.w");
  check_dense(args.w, "router.w");
  check_view(args.logits, {tokens, experts}, stat, "router.logits");
  check_memory(ctx, {args.x, args.w, args.logits});
  check_apart(args.logits, {args.x, args.w}, "router.logits");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->router.logits, args, "router_logits");
}

// No early return: without tokens the counts and sums must still become zero.
void router_select(const Context& ctx, const RouterSelect& args) {
  const DType stat = args.logits.dtype;
  CHECK(stat == DType::kF32 || stat == DType::kF64, "router.logits is {}", dtype_name(stat));
  check_rank(args.logits, 2, "router.logits");
  check_rank(args.expert_ids, 2, "router.expert_ids");
  const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1), top_k = args.expert_ids.dim(1);
  CHECK(top_k >= 1 && top_k <= experts, "top {} of {} experts", top_k, experts);
  CHECK(args.norm_min > 0, "norm_min {}", args.norm_min);
  if (is_given(args.bias)) {
    check_view(args.bias, {experts}, stat, "router.bias");
    check_memory(ctx, {args.bias});
  }
  check_view(args.probs, {tokens, experts}, stat, "router.probs");
  check_view(args.expert_ids, {tokens, top_k}, DType::kI32, "router.expert_ids");
  check_view(args.weights, {tokens, top_k}, stat, "router.weights");
  check_view(args.counts, {experts}, DType::kI64, "router.counts");
  check_view(args.bare_counts, {experts}, DType::kI64, "router.bare_counts");
  check_view(args.prob_sums, {experts}, DType::kF64, "router.prob_sums");
  check_dense(args.expert_ids, "router.expert_ids");
  check_dense(args.weights, "router.weights");
  check_memory(ctx,
               {args.logits, args.probs, args.expert_ids, args.weights, args.counts, args.bare_counts, args.prob_sums});
  check_apart(args.probs, {args.logits, args.bias}, "router.probs");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->router.select, args, "router_select");
}

void router_select_backward(const Context& ctx, const RouterSelectBackward& args) {
  const DType stat = args.probs.dtype;
  CHECK(stat == DType::kF32 || stat == DType::kF64, "router.probs is {}", dtype_name(stat));
  check_rank(args.probs, 2, "router.probs");
  check_rank(args.expert_ids, 2, "router.expert_ids");
  const int64_t tokens = args.probs.dim(0), experts = args.probs.dim(1), top_k = args.expert_ids.dim(1);
  CHECK(top_k >= 1 && top_k <= experts, "top {} of {} experts", top_k, experts);
  CHECK(args.norm_min > 0, "norm_min {}", args.norm_min);
  check_view(args.dweights, {tokens, top_k}, stat, "router.dweights");
  check_view(args.expert_ids, {tokens, top_k}, DType::kI32, "router.expert_ids");
  check_dense(args.dweights, "router.dweights");
  check_dense(args.expert_ids, "router.expert_ids");
  if (is_given(args.aux_dprob)) {
    check_view(args.aux_dprob, {experts}, stat, "router.aux_dprob");
    check_memory(ctx, {args.aux_dprob});
  }
  check_view(args.dlogits, {tokens, experts}, stat, "router.dlogits");
  check_memory(ctx, {args.dweights, args.probs, args.expert_ids, args.dlogits});
  check_apart(args.dlogits, {args.probs, args.dweights, args.aux_dprob}, "router.dlogits");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->router.select_backward, args, "router_select_backward");
}

void router_logits_backward_input(const Context& ctx, const RouterLogitsBackwardInput& args) {
  check_compute(args.dx, "router.dx");
  check_rank(args.dx, 2, "router.dx");
  check_rank(args.w, 2, "router.w");
  const DType stat = stat_dtype(args.dx.dtype);
  const int64_t tokens = args.dx.dim(0), hidden = args.dx.dim(1), experts = args.w.dim(0);
  check_view(args.dlogits, {tokens, experts}, stat, "router.dlogits");
  check_view(args.w, {experts, hidden}, stat, "router.w");
  check_dense(args.w, "router.w");
  check_memory(ctx, {args.dlogits, args.w, args.dx});
  check_apart(args.dx, {args.dlogits, args.w}, "router.dx");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->router.logits_backward_input, args, "router_logits_backward_input");
}

void router_logits_backward_weight(const Context& ctx, const RouterLogitsBackwardWeight& args) {
  check_compute(args.x, "router.x");
  check_rank(args.x, 2, "router.x");
  check_rank(args.dw, 2, "router.dw");
  const DType stat = stat_dtype(args.x.dtype);
  const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.dw.dim(0);
  check_view(args.dlogits, {tokens, experts}, stat, "router.dlogits");
  check_view(args.dw, {experts, hidden}, stat, "router.dw");
  check_dense(args.dw, "router.dw");
  check_memory(ctx, {args.dlogits, args.x, args.dw});
  check_apart(args.dw, {args.dlogits, args.x}, "router.dw");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->router.logits_backward_weight, args, "router_logits_backward_weight");
}

}  // namespace concerto
