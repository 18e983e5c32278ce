#include "concerto/layers/router_segments.h"

#include <algorithm>
#include <cstring>

namespace concerto {
namespace {

struct RouterSaved {
  View x, rstd, normed;   // [T_r, H], [T_r], [T_r, H]
  View dlogits, dnormed;  // [T_r, E], [T_r, H]
};

std::string segment_name(int layer, const char* what) { return "layers." + std::to_string(layer) + "." + what; }

void copy_rows(const Context& ctx, View from, View to) {
  if (!ctx.dry_run && from.rows() > 0) std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
}

}  // namespace

Scoring scoring_of(const ModelConfig& c) {
  return c.scoring_func == RouterScoring::kSoftmax ? Scoring::kSoftmax : Scoring::kSigmoid;
}
Gate gate_of(const ModelConfig& c) { return c.moe_gate == RouterGate::kTopK ? Gate::kTopK : Gate::kTop2; }
DropOrder drop_order_of(const ModelConfig& c) {
  return c.moe_drop_order == TokenDrop::kRankMajor ? DropOrder::kRankMajor : DropOrder::kTokenMajor;
}

RouterSegment::RouterSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, int layer,
                             const TensorShard& shard)
    : Segment({.name = segment_name(layer, "router"), .layer = layer}),
      store_(store),
      norm_{&store, store.ref(prefix + "post_attention_layernorm.weight"), c.rms_norm_eps},
      w_(store.ref(prefix + "mlp.gate.weight")),
      shard_(shard) {}

void RouterSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<RouterSaved>();
  const int64_t tokens = ctx.tokens->local.count;
  const DType type = in.hidden.dtype, stat = stat_dtype(type);
  s.x = in.hidden;
  s.rstd = saved.forward->take({tokens}, stat);
  s.normed = saved.output->take(s.x.shape, type);
  out.logits = saved.output->take({tokens, w_.shape[0]}, stat);
  norm_.forward(ctx.ops, s.x, s.normed, s.rstd);
  router_logits(ctx.ops, {.x = s.normed, .w = store_.weight(w_), .logits = out.logits});
  out.normed = s.normed;
  observe_tokens(
      ctx, shard_, [&] { return "router." + std::to_string(spec().layer) + ".input"; }, s.normed);
}

void RouterSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<RouterSaved>();
  s.dlogits = dout.logits;
  s.dnormed = dout.normed;
  router_logits_backward_input(ctx.ops, {.dlogits = s.dlogits, .w = store_.weight(w_), .dx = s.dnormed});
  din = {};
  din.hidden = saved.backward->take(s.x.shape, s.x.dtype);
  norm_.backward_input(ctx.ops, s.dnormed, s.x, s.rstd, dout.hidden, din.hidden);
}

void RouterSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<RouterSaved>();
  if (!ctx.freeze_router)
    router_logits_backward_weight(ctx.ops, {.dlogits = s.dlogits, .x = s.normed, .dw = store_.grad(w_)});
  norm_.backward_weight(ctx.ops, s.dnormed, s.x, s.rstd);
}

RouteSegment::RouteSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, int layer,
                           int moe_index, const TensorShard& shard)
    : Segment({.name = segment_name(layer, "route"), .layer = layer}),
      store_(store),
      bias_(c.moe_use_aux_free ? store.ref(prefix + "mlp.moe_statics.e_score_correction_bias", {c.moe_num_experts})
                               : ParamRef{}),
      config_(c),
      plain_(c.moe_gate == RouterGate::kTopK && c.scoring_func == RouterScoring::kSoftmax && !c.moe_group_experts &&
             c.moe_norm_gate_logits && !may_drop(c)),
      may_drop_(may_drop(c)),
      moe_index_(moe_index),
      shard_(shard) {}

// The fused op knows one unit and no z loss.
bool RouteSegment::is_fused(const SegmentContext& ctx) const {
  const View& offsets = ctx.tokens->units.offsets;
  return plain_ && !ctx.router->z_sums && !ctx.router->first_choices && (!offsets || offsets.dim(0) == 2);
}

void RouteSegment::take_choices(int64_t tokens, Arena& arena, Rows& rows) const {
  const Shape shape{tokens, config_.moe_k};
  rows.expert_ids = arena.take(shape, DType::kI32);
  if (!may_drop_) return;
  rows.slots = arena.take(shape, DType::kI32);
  rows.kept_ids = arena.take(shape, DType::kI32);
}

void RouteSegment::take_plan(int64_t tokens, Saved& saved) const {
  auto& s = saved.start<State>();
  const int64_t k = config_.moe_k;
  take_choices(tokens, *saved.keep, s.rows);
  s.offsets = saved.keep->take({config_.moe_num_experts + (may_drop_ ? 2 : 1)}, DType::kI32);
  s.row_token = saved.keep->take({tokens * k}, DType::kI32);
  s.row_of = saved.keep->take({tokens, k}, DType::kI32);
}

void RouteSegment::take_values(const SegmentContext& ctx, int64_t tokens, DType stat, Arena& arena, Rows& rows) const {
  rows.probs = arena.take({tokens, config_.moe_num_experts}, stat);
  rows.weights = arena.take({tokens, config_.moe_k}, stat);
  rows.lse = ctx.router->z_sums ? arena.take({tokens}, stat) : View{};
}

// The rows of all ranks, with the logits filled in.
RouteSegment::Rows RouteSegment::gather(const SegmentContext& ctx, const Rows& own) const {
  Rows all;
  Arena& scratch = *ctx.ops.scratch;
  all.logits = gather_tokens(ctx, shard_, own.logits, scratch);
  take_values(ctx, ctx.tokens->count, own.logits.dtype, scratch, all);
  take_choices(ctx.tokens->count, scratch, all);
  return all;
}

void RouteSegment::keep_own(const SegmentContext& ctx, const Rows& all, const Rows& own) const {
  const concerto::Part part = ctx.tokens->local;
  const auto keep = [&](View from, View to) {
    if (!from) return;
    if (from.shape.rank() == 1) from = from.reshape({from.dim(0), 1});
    copy_rows(ctx.ops, from.rows_range(part.begin, part.count), to);
  };
  keep(all.probs, own.probs);
  keep(all.lse, own.lse);
  if (is_fused(ctx)) keep(all.weights, own.weights);
  if (ctx.routed) return;
  keep(all.expert_ids, own.expert_ids);
  keep(all.slots, own.slots);
  keep(all.kept_ids, own.kept_ids);
}

// The units as ranges of own tokens; the border between ranks may cut one.
View RouteSegment::own_units(const SegmentContext& ctx) const {
  const View whole = ctx.tokens->units.offsets;
  if (!shard_.exchange) return whole;
  const View own = ctx.ops.scratch->take(whole.shape, DType::kI32);
  if (ctx.ops.dry_run) return own;
  const concerto::Part part = ctx.tokens->local;
  for (int64_t u = 0; u < whole.dim(0); ++u)
    own.as<int32_t>()[u] =
        static_cast<int32_t>(std::clamp<int64_t>(whole.as<int32_t>()[u] - part.begin, 0, part.count));
  return own;
}

// Where recompute puts the sums of own rows, which nobody wants: those of the whole micro-batch stay.
RouterStats RouteSegment::unread_stats(const SegmentContext& ctx) const {
  RouterStats stats = *ctx.router;
  const int64_t units = ctx.tokens->units.offsets ? ctx.tokens->units.offsets.dim(0) - 1 : 1;
  stats.stride = 0;  // one layer
  stats.prob_sums = ctx.ops.scratch->take({units, config_.moe_num_experts}, DType::kF64);
  if (stats.z_sums) stats.z_sums = ctx.ops.scratch->take({units}, DType::kF64);
  return stats;
}

void RouteSegment::choose(const SegmentContext& ctx, const Rows& rows) const {
  const RoutingUnits& units = ctx.tokens->units;
  const RouterStats& stats = *ctx.router;
  const int64_t count = units.offsets.dim(0) - 1;
  const View claims = stats.layer_claims(moe_index_, count);
  routing_choose(ctx.ops, {.logits = rows.logits,
                           .probs = rows.probs,
                           .bias = store_.weight(bias_),
                           .unit_offsets = units.offsets,
                           .gate = gate_of(config_),
                           .groups = config_.router_groups(),
                           .sinkhorn = config_.uses_sinkhorn() && ctx.training,
                           .sinkhorn_temp = config_.sinkhorn_temp,
                           .capacity = units.capacity,
                           .expert_ids = rows.expert_ids,
                           .claims = claims,
                           .counts = stats.layer(stats.counts, moe_index_, count),
                           .bare_counts = stats.layer(stats.bare_counts, moe_index_, count)});
  if (!may_drop_) return;
  routing_drop(ctx.ops, {.expert_ids = rows.expert_ids,
                         .unit_offsets = units.offsets,
                         .capacity = units.drops ? units.capacity : View{},
                         .claims = claims,
                         .before = {},
                         .order = drop_order_of(config_),
                         .reverse = config_.moe_reverse_token_drop,
                         .slots = rows.slots,
                         .kept_ids = rows.kept_ids,
                         .kept_counts = stats.layer(stats.kept_counts, moe_index_, count)});
}

// Scores, choices where they are to be made, and sums.
void RouteSegment::score(const SegmentContext& ctx, const Rows& rows, const RouterStats& stats,
                         View unit_offsets) const {
  if (is_fused(ctx)) {
    const auto row = [&](View v) { return stats.layer(v, moe_index_, 1).reshape({config_.moe_num_experts}); };
    router_select(ctx.ops, {.logits = rows.logits,
                            .bias = store_.weight(bias_),
                            .norm_min = config_.moe_norm_min,
                            .probs = rows.probs,
                            .expert_ids = rows.expert_ids,
                            .weights = rows.weights,
                            .counts = row(stats.counts),
                            .bare_counts = row(stats.bare_counts),
                            .prob_sums = row(stats.prob_sums),
                            .replay = ctx.replay});
    return;
  }
  const int64_t units = unit_offsets.dim(0) - 1;
  routing_scores(
      ctx.ops,
      {.logits = rows.logits, .scoring = scoring_of(config_), .groups = config_.router_groups(), .probs = rows.probs});
  if (!ctx.replay && !ctx.routed) choose(ctx, rows);
  routing_sums(ctx.ops, {.probs = rows.probs,
                         .logits = rows.logits,
                         .unit_offsets = unit_offsets,
                         .scoring = scoring_of(config_),
                         .prob_sums = stats.layer(stats.prob_sums, moe_index_, units),
                         .lse = rows.lse,
                         .z_sums = stats.layer_z_sums(moe_index_, units)});
}

void RouteSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  const int64_t tokens = ctx.tokens->local.count;
  if (!ctx.replay && !ctx.routed) take_plan(tokens, saved);
  auto& s = saved.as<State>();
  s.rows.logits = in.logits;
  take_values(ctx, tokens, in.logits.dtype, *saved.forward, s.rows);
  {
    ArenaScope scope(*ctx.ops.scratch);
    if (!shard_.exchange) {
      score(ctx, s.rows, *ctx.router, ctx.tokens->units.offsets);
    } else if (ctx.replay) {
      score(ctx, s.rows, unread_stats(ctx), is_fused(ctx) ? View{} : own_units(ctx));
    } else {
      const Rows all = gather(ctx, s.rows);
      score(ctx, all, *ctx.router, ctx.tokens->units.offsets);
      keep_own(ctx, all, s.rows);
    }
  }
  if (!is_fused(ctx))
    routing_weights(ctx.ops, {.probs = s.rows.probs,
                              .expert_ids = s.rows.expert_ids,
                              .slots = s.rows.slots,
                              .normalize = config_.moe_norm_gate_logits,
                              .norm_min = config_.moe_norm_min,
                              .weights = s.rows.weights});
  if (!ctx.replay)
    make_dispatch_plan(ctx.ops, {.expert_ids = may_drop_ ? s.rows.kept_ids : s.rows.expert_ids,
                                 .offsets = s.offsets,
                                 .row_token = s.row_token,
                                 .row_of = s.row_of});
  out.logits = {};
  out.weights = s.rows.weights;
  out.offsets = s.offsets;
  out.row_token = s.row_token;
  out.row_of = s.row_of;
  observe(ctx, saved);
}

void RouteSegment::observe(const SegmentContext& ctx, Saved& saved) const {
  const Rows& rows = saved.as<State>().rows;
  const auto show = [&](const char* what, View v) {
    observe_tokens(
        ctx, shard_, [&] { return "router." + std::to_string(spec().layer) + "." + what; }, v);
  };
  show("logits", rows.logits);
  show("probs", rows.probs);
  show("topk_index", rows.expert_ids);
  show("topk_weight", rows.weights);
}

void RouteSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  const Rows& s = saved.as<State>().rows;
  const RouterStats& stats = *ctx.router;
  din.weights = {};
  din.logits = saved.backward->take(s.logits.shape, s.logits.dtype);
  if (is_fused(ctx)) {
    const View dprob =
        stats.aux_dprob ? stats.layer(stats.aux_dprob, moe_index_, 1).reshape({config_.moe_num_experts}) : View{};
    router_select_backward(ctx.ops, {.dweights = dout.weights,
                                     .aux_dprob = dprob,
                                     .probs = s.probs,
                                     .expert_ids = s.expert_ids,
                                     .norm_min = config_.moe_norm_min,
                                     .dlogits = din.logits});
    return;
  }
  ArenaScope scope(*ctx.ops.scratch);
  const View unit_offsets = own_units(ctx);
  const int64_t units = unit_offsets.dim(0) - 1;
  View z_scale = stats.z_scale;
  if (z_scale) z_scale = z_scale.reshape({z_scale.dim(0), 1}).rows_range(0, units).reshape({units});
  routing_backward(ctx.ops, {.dweights = dout.weights,
                             .probs = s.probs,
                             .expert_ids = s.expert_ids,
                             .slots = s.slots,
                             .unit_offsets = unit_offsets,
                             .scoring = scoring_of(config_),
                             .groups = config_.router_groups(),
                             .normalize = config_.moe_norm_gate_logits,
                             .norm_min = config_.moe_norm_min,
                             .aux_dprob = stats.aux_dprob ? stats.layer(stats.aux_dprob, moe_index_, units) : View{},
                             .logits = s.lse ? s.logits : View{},
                             .lse = s.lse,
                             .z_scale = z_scale,
                             .dlogits = din.logits});
}

View RouteSegment::joined_logits(const SegmentContext& ctx, std::span<const Part> parts, const DataRanks& ranks) const {
  Arena& scratch = *ctx.ops.scratch;
  int64_t tokens = 0, at = 0;
  for (const Part& p : parts) tokens += p.tokens->count;
  const View own = scratch.take({tokens, config_.moe_num_experts}, parts[0].logits.dtype);
  for (const Part& p : parts) {
    const View logits = own.rows_range(at, p.tokens->count);
    if (shard_.exchange)
      shard_.exchange->gather(ctx.ops, p.logits, logits);
    else
      copy_rows(ctx.ops, p.logits, logits);
    at += p.tokens->count;
  }
  if (!ranks.exchange) return own;
  const View all = scratch.take({ranks.tokens, config_.moe_num_experts}, own.dtype);
  ranks.exchange->gather(ctx.ops, own, all);
  return all;
}

void RouteSegment::choose_together(const SegmentContext& ctx, std::span<const Part> parts,
                                   const DataRanks& ranks) const {
  ArenaScope scope(*ctx.ops.scratch);
  Arena& scratch = *ctx.ops.scratch;
  Rows all;
  all.logits = joined_logits(ctx, parts, ranks);
  all.probs = scratch.take(all.logits.shape, all.logits.dtype);
  take_choices(all.logits.dim(0), scratch, all);
  routing_scores(
      ctx.ops,
      {.logits = all.logits, .scoring = scoring_of(config_), .groups = config_.router_groups(), .probs = all.probs});
  SegmentContext together = ctx;
  together.router = parts[0].stats;
  choose(together, all);
  int64_t at = ranks.begin;
  for (const Part& p : parts) {
    const concerto::Part own = p.tokens->local;
    take_plan(own.count, *p.saved);
    const Rows& rows = p.saved->as<State>().rows;
    copy_rows(ctx.ops, all.expert_ids.rows_range(at + own.begin, own.count), rows.expert_ids);
    if (may_drop_) {
      copy_rows(ctx.ops, all.slots.rows_range(at + own.begin, own.count), rows.slots);
      copy_rows(ctx.ops, all.kept_ids.rows_range(at + own.begin, own.count), rows.kept_ids);
    }
    at += p.tokens->count;
  }
  // Counts are those of the whole unit: they stand once, in the first micro-batch of the first rank.
  for (const Part& p : parts.subspan(ranks.begin == 0 && ranks.first ? 1 : 0))
    for (const View v : {p.stats->counts, p.stats->bare_counts, p.stats->kept_counts}) {
      const View row = p.stats->layer(v, moe_index_, 1), claims = p.stats->layer_claims(moe_index_, 1);
      if (ctx.ops.dry_run) continue;
      std::memset(row.data, 0, static_cast<size_t>(row.bytes()));
      std::memset(claims.data, 0, static_cast<size_t>(claims.bytes()));
    }
}

}  // namespace concerto
