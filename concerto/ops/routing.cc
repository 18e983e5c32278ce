#include "concerto/ops/routing.h"

#include <algorithm>
#include <cmath>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

void check_stat(const View& v, int rank, const char* name) {
  CHECK(v.dtype == DType::kF32 || v.dtype == DType::kF64, "{} is {}", name, dtype_name(v.dtype));
  check_rank(v, rank, name);
}

// For lists that hold optional views.
void check_given_memory(const Context& ctx, std::initializer_list<View> views) {
  for (const View& v : views)
    if (is_given(v)) check_memory(ctx, {v});
}

void check_units_view(const View& unit_offsets) {
  check_rank(unit_offsets, 1, "routing.unit_offsets");
  CHECK(unit_offsets.dim(0) >= 1, "routing.unit_offsets is empty");
  check_view(unit_offsets, {unit_offsets.dim(0)}, DType::kI32, "routing.unit_offsets");
}

void check_groups(int64_t groups, int64_t experts) {
  CHECK(groups >= 1 && experts % groups == 0, "{} experts in {} groups", experts, groups);
}

void check_i32(const View& v, Shape shape, const char* name) {
  check_view(v, shape, DType::kI32, name);
  check_dense(v, name);
}
void check_i64(const View& v, Shape shape, const char* name) {
  check_view(v, shape, DType::kI64, name);
  check_dense(v, name);
}

// The ids [T, K] of E experts.
void check_choice(const View& ids, int64_t tokens, int64_t experts) {
  check_rank(ids, 2, "routing.expert_ids");
  CHECK(ids.dim(1) >= 1 && ids.dim(1) <= experts, "top {} of {} experts", ids.dim(1), experts);
  check_i32(ids, {tokens, ids.dim(1)}, "routing.expert_ids");
}

}  // namespace

void routing_scores(const Context& ctx, const RoutingScores& args) {
  check_stat(args.logits, 2, "routing.logits");
  check_view(args.probs, args.logits.shape, args.logits.dtype, "routing.probs");
  check_groups(args.groups, args.logits.dim(1));
  CHECK(args.scoring == Scoring::kSoftmax || args.groups == 1, "sigmoid scores have no groups");
  check_given_memory(ctx, {args.logits, args.probs});
  check_apart(args.probs, {args.logits}, "routing.probs");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.scores, args, "routing_scores");
}

// No early return here or below: without tokens counts and sums must still become zero.
void routing_choose(const Context& ctx, const RoutingChoose& args) {
  check_stat(args.probs, 2, "routing.probs");
  check_units_view(args.unit_offsets);
  const int64_t tokens = args.probs.dim(0), experts = args.probs.dim(1), units = args.unit_offsets.dim(0) - 1;
  check_choice(args.expert_ids, tokens, experts);
  const int64_t top_k = args.expert_ids.dim(1);
  check_groups(args.groups, experts);
  CHECK(args.groups == 1 || (args.gate == Gate::kTopK && args.groups == top_k), "{} groups, top {}", args.groups,
        top_k);
  if (is_given(args.bias)) check_view(args.bias, {experts}, args.probs.dtype, "routing.bias");
  if (args.gate == Gate::kTop2) {
    CHECK(top_k == 2, "the top-2 gate chooses {}", top_k);
    check_view(args.logits, {tokens, experts}, args.probs.dtype, "routing.logits");
    check_given_memory(ctx, {args.logits});
  }
  if (args.sinkhorn) {
    CHECK(args.gate == Gate::kTop2, "Sinkhorn makes second choices of the top-2 gate only");
    CHECK(args.sinkhorn_temp > 0, "sinkhorn_temp {}", args.sinkhorn_temp);
    check_i64(args.capacity, {units}, "routing.capacity");
    check_given_memory(ctx, {args.capacity});
  }
  check_i64(args.claims, {units, top_k, experts}, "routing.claims");
  check_i64(args.counts, {units, experts}, "routing.counts");
  check_i64(args.bare_counts, {units, experts}, "routing.bare_counts");
  check_given_memory(
      ctx, {args.probs, args.bias, args.unit_offsets, args.expert_ids, args.claims, args.counts, args.bare_counts});
  check_apart(args.counts, {args.bare_counts, args.claims}, "routing.counts");
  check_apart(args.bare_counts, {args.claims}, "routing.bare_counts");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.choose, args, "routing_choose");
}

void routing_drop(const Context& ctx, const RoutingDrop& args) {
  check_rank(args.claims, 3, "routing.claims");
  check_rank(args.expert_ids, 2, "routing.expert_ids");
  check_units_view(args.unit_offsets);
  const int64_t tokens = args.expert_ids.dim(0), top_k = args.expert_ids.dim(1), experts = args.claims.dim(2);
  const int64_t units = args.unit_offsets.dim(0) - 1;
  check_choice(args.expert_ids, tokens, experts);
  check_i64(args.claims, {units, top_k, experts}, "routing.claims");
  if (is_given(args.capacity)) check_i64(args.capacity, {units}, "routing.capacity");
  if (is_given(args.before)) check_i64(args.before, {units, top_k, experts}, "routing.before");
  check_i32(args.slots, {tokens, top_k}, "routing.slots");
  check_i32(args.kept_ids, {tokens, top_k}, "routing.kept_ids");
  check_i64(args.kept_counts, {units, experts}, "routing.kept_counts");
  check_given_memory(ctx, {args.expert_ids, args.unit_offsets, args.capacity, args.claims, args.before, args.slots,
                           args.kept_ids, args.kept_counts});
  check_apart(args.slots, {args.expert_ids, args.kept_ids}, "routing.slots");
  check_apart(args.kept_ids, {args.expert_ids}, "routing.kept_ids");
  check_apart(args.kept_counts, {args.claims, args.before}, "routing.kept_counts");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.drop, args, "routing_drop");
}

void routing_weights(const Context& ctx, const RoutingWeights& args) {
  check_stat(args.probs, 2, "routing.probs");
  const int64_t tokens = args.probs.dim(0);
  check_choice(args.expert_ids, tokens, args.probs.dim(1));
  if (is_given(args.slots)) check_i32(args.slots, args.expert_ids.shape, "routing.slots");
  CHECK(args.norm_min > 0, "norm_min {}", args.norm_min);
  check_view(args.weights, args.expert_ids.shape, args.probs.dtype, "routing.weights");
  check_dense(args.weights, "routing.weights");
  check_given_memory(ctx, {args.probs, args.expert_ids, args.slots, args.weights});
  check_apart(args.weights, {args.probs, args.expert_ids, args.slots}, "routing.weights");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.weights, args, "routing_weights");
}

void routing_sums(const Context& ctx, const RoutingSums& args) {
  check_stat(args.probs, 2, "routing.probs");
  check_units_view(args.unit_offsets);
  const int64_t tokens = args.probs.dim(0), units = args.unit_offsets.dim(0) - 1;
  check_view(args.prob_sums, {units, args.probs.dim(1)}, DType::kF64, "routing.prob_sums");
  CHECK(is_given(args.lse) == is_given(args.z_sums), "lse and z_sums come together");
  if (is_given(args.lse)) {
    check_view(args.logits, args.probs.shape, args.probs.dtype, "routing.logits");
    check_view(args.lse, {tokens}, args.probs.dtype, "routing.lse");
    check_view(args.z_sums, {units}, DType::kF64, "routing.z_sums");
    check_given_memory(ctx, {args.logits, args.lse, args.z_sums});
    check_apart(args.lse, {args.logits, args.probs}, "routing.lse");
  }
  check_given_memory(ctx, {args.probs, args.unit_offsets, args.prob_sums});
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.sums, args, "routing_sums");
}

void routing_balance(const Context& ctx, const RoutingBalance& args) {
  check_rank(args.counts, 2, "routing.counts");
  const int64_t units = args.counts.dim(0), experts = args.counts.dim(1);
  check_view(args.counts, {units, experts}, DType::kI64, "routing.counts");
  check_view(args.prob_sums, {units, experts}, DType::kF64, "routing.prob_sums");
  check_i64(args.tokens, {units}, "routing.tokens");
  check_view(args.scale, {units}, DType::kF64, "routing.scale");
  check_view(args.loss, {units}, DType::kF64, "routing.loss");
  check_groups(args.groups, experts);
  if (is_given(args.aux_dprob)) {
    check_stat(args.aux_dprob, 2, "routing.aux_dprob");
    check_view(args.aux_dprob, {units, experts}, args.aux_dprob.dtype, "routing.aux_dprob");
  }
  check_given_memory(ctx, {args.counts, args.prob_sums, args.tokens, args.scale, args.loss, args.aux_dprob});
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.balance, args, "routing_balance");
}

void routing_backward(const Context& ctx, const RoutingBackward& args) {
  check_stat(args.probs, 2, "routing.probs");
  check_units_view(args.unit_offsets);
  const DType stat = args.probs.dtype;
  const int64_t tokens = args.probs.dim(0), experts = args.probs.dim(1), units = args.unit_offsets.dim(0) - 1;
  check_choice(args.expert_ids, tokens, experts);
  check_view(args.dweights, args.expert_ids.shape, stat, "routing.dweights");
  check_dense(args.dweights, "routing.dweights");
  if (is_given(args.slots)) check_i32(args.slots, args.expert_ids.shape, "routing.slots");
  check_groups(args.groups, experts);
  CHECK(args.scoring == Scoring::kSoftmax || args.groups == 1, "sigmoid scores have no groups");
  CHECK(args.norm_min > 0, "norm_min {}", args.norm_min);
  if (is_given(args.aux_dprob)) check_view(args.aux_dprob, {units, experts}, stat, "routing.aux_dprob");
  CHECK(is_given(args.lse) == is_given(args.z_scale) && is_given(args.lse) == is_given(args.logits),
        "logits, lse and z_scale come together");
  if (is_given(args.lse)) {
    check_view(args.logits, args.probs.shape, stat, "routing.logits");
    check_view(args.lse, {tokens}, stat, "routing.lse");
    check_view(args.z_scale, {units}, DType::kF64, "routing.z_scale");
  }
  check_view(args.dlogits, args.probs.shape, stat, "routing.dlogits");
  check_given_memory(ctx, {args.dweights, args.probs, args.expert_ids, args.slots, args.unit_offsets, args.aux_dprob,
                           args.logits, args.lse, args.z_scale, args.dlogits});
  check_apart(args.dlogits, {args.dweights, args.probs, args.aux_dprob, args.logits, args.lse}, "routing.dlogits");
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.backward, args, "routing_backward");
}

void orthogonal_loss(const Context& ctx, const OrthogonalLoss& args) {
  check_stat(args.w, 2, "orthogonal.w");
  check_groups(args.blocks, args.w.dim(0));
  check_view(args.loss, {1}, DType::kF64, "orthogonal.loss");
  if (is_given(args.dw)) {
    check_view(args.dw, args.w.shape, args.w.dtype, "orthogonal.dw");
    check_apart(args.dw, {args.w}, "orthogonal.dw");
  }
  check_given_memory(ctx, {args.w, args.loss, args.dw});
  run_kernel(ctx, OpFamily::kRouter, ctx.backend->routing.orthogonal_loss, args, "orthogonal_loss");
}

void orthogonal_step(const Context& ctx, const OrthogonalStep& args) {
  check_stat(args.w, 2, "orthogonal.w");
  check_groups(args.blocks, args.w.dim(0));
  check_view(args.loss, {1}, DType::kF64, "orthogonal.loss");
  check_given_memory(ctx, {args.w, args.loss});
  run_kernel(ctx, OpFamily::kOptimizer, ctx.backend->routing.orthogonal_step, args, "orthogonal_step");
}

void bias_update(const Context& ctx, const BiasUpdate& args) {
  check_stat(args.bias, 2, "bias_update.bias");
  check_view(args.usage, args.bias.shape, DType::kI64, "bias_update.usage");
  CHECK(std::isfinite(args.rate), "bias_update.rate {}", args.rate);
  check_given_memory(ctx, {args.usage, args.bias});
  run_kernel(ctx, OpFamily::kOptimizer, ctx.backend->routing.bias_update, args, "bias_update");
}

void clear_dropped(const Context& ctx, const ClearDropped& args) {
  check_compute(args.rows, "clear_dropped.rows");
  check_rank(args.rows, 2, "clear_dropped.rows");
  check_rank(args.offsets, 1, "clear_dropped.offsets");
  CHECK(args.offsets.dim(0) >= 3, "clear_dropped.offsets has {} entries", args.offsets.dim(0));
  check_view(args.offsets, {args.offsets.dim(0)}, DType::kI32, "clear_dropped.offsets");
  check_given_memory(ctx, {args.offsets, args.rows});
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->routing.clear_dropped, args, "clear_dropped");
}

void pad_dispatch(const Context& ctx, const PadDispatch& args) {
  check_compute(args.x, "pad.x");
  check_rank(args.x, 2, "pad.x");
  check_rank(args.buffer, 3, "pad.buffer");
  const int64_t experts = args.buffer.dim(0), capacity = args.buffer.dim(1);
  check_choice(args.expert_ids, args.x.dim(0), experts);
  check_i32(args.slots, args.expert_ids.shape, "pad.slots");
  check_i32(args.scatter_index, args.expert_ids.shape, "pad.scatter_index");
  check_view(args.buffer, {experts, capacity, args.x.dim(1)}, args.x.dtype, "pad.buffer");
  CHECK(experts * capacity <= INT32_MAX, "{} experts of {} slots", experts, capacity);
  CHECK(args.nowhere == 0 || args.nowhere == -1, "pad.nowhere {}", args.nowhere);
  check_given_memory(ctx, {args.x, args.expert_ids, args.slots, args.scatter_index, args.buffer});
  check_apart(args.buffer, {args.x, args.expert_ids, args.slots, args.scatter_index}, "pad.buffer");
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->routing.pad_dispatch, args, "pad_dispatch");
}

void pad_combine(const Context& ctx, const PadCombine& args) {
  check_compute(args.buffer, "pad.buffer");
  check_rank(args.buffer, 3, "pad.buffer");
  check_rank(args.scatter_index, 2, "pad.scatter_index");
  const int64_t tokens = args.scatter_index.dim(0);
  check_i32(args.scatter_index, args.scatter_index.shape, "pad.scatter_index");
  check_view(args.weights, args.scatter_index.shape, args.buffer.dtype, "pad.weights");
  check_view(args.y, {tokens, args.buffer.dim(2)}, args.buffer.dtype, "pad.y");
  check_given_memory(ctx, {args.buffer, args.scatter_index, args.weights, args.y});
  check_apart(args.y, {args.buffer, args.scatter_index, args.weights}, "pad.y");
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->routing.pad_combine, args, "pad_combine");
}

int64_t expert_capacity(const CapacityFactors& factors, bool training, int64_t tokens, int64_t experts) {
  CHECK(tokens >= 0 && experts > 0, "{} tokens, {} experts", tokens, experts);
  const int which = training ? 0 : tokens < experts ? 2 : 1;
  const double factor = which == 0 ? factors.train : which == 1 ? factors.eval : factors.few_tokens;
  if (tokens == 0) return 0;
  // Python's a // b rounds down the exact quotient, which a / b may not.
  const double room = factor * static_cast<double>(tokens), each = static_cast<double>(experts);
  const double slots = std::floor((room - std::fmod(room, each)) / each + 0.5);
  if (!(slots >= 1))
    throw Error(ErrorCode::kConfig, fmt::format("moe_capacity[{}]", which),
                fmt::format("{} x {} tokens / {} experts gives {} slots an expert", factor, tokens, experts,
                            slots < 0 || std::isnan(slots) ? "no" : "0"),
                fmt::format("Set it to at least {}, or give each routing unit more tokens.",
                            each / static_cast<double>(tokens)));
  return slots < 0x1p62 ? static_cast<int64_t>(slots) : INT64_MAX;
}

void claims_before(DropOrder order, bool reverse, std::span<const int64_t* const> claims, int64_t piece, int64_t top_k,
                   int64_t experts, int64_t* before) {
  const auto pieces = static_cast<int64_t>(claims.size());
  CHECK(piece >= 0 && piece < pieces, "piece {} of {}", piece, pieces);
  std::fill(before, before + top_k * experts, int64_t{0});
  for (int64_t p = 0; p < pieces; ++p) {
    const bool ahead = reverse ? p > piece : p < piece;
    for (int64_t j = 0; j < top_k; ++j)
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t n = claims[p][j * experts + e];
        if (order == DropOrder::kTokenMajor) {
          if (ahead) before[e] += n;
          continue;
        }
        if (ahead) before[j * experts + e] += n;
        for (int64_t later = j + 1; later < top_k; ++later) before[later * experts + e] += n;
      }
  }
}

}  // namespace concerto
