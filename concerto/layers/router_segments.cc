#include "concerto/layers/router_segments.h"

#include <cstring>

namespace concerto {
namespace {

struct RouterSaved {
  View x, rstd, normed;   // [T, H], [T], [T, H]
  View dlogits, dnormed;  // [T, E], [T, H]
};

struct RouteSaved {
  View logits, probs, weights, lse;  // [T, E], [T, E], [T, K], [T]
  View expert_ids, slots, kept_ids;  // [T, K], in Saved::keep; slots and kept_ids only where choices may be dropped
  View offsets, row_token, row_of;   // the plan, in Saved::keep
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

RouterSegment::RouterSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, int layer)
    : Segment({.name = segment_name(layer, "router"), .layer = layer}),
      store_(store),
      norm_{&store, store.ref(prefix + "post_attention_layernorm.weight"), c.rms_norm_eps},
      w_(store.ref(prefix + "mlp.gate.weight")) {}

void RouterSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<RouterSaved>();
  const int64_t tokens = ctx.tokens->count;
  const DType type = in.hidden.dtype, stat = stat_dtype(type);
  s.x = in.hidden;
  s.rstd = saved.forward->take({tokens}, stat);
  s.normed = saved.output->take(s.x.shape, type);
  out.logits = saved.output->take({tokens, w_.shape[0]}, stat);
  norm_.forward(ctx.ops, s.x, s.normed, s.rstd);
  router_logits(ctx.ops, {.x = s.normed, .w = store_.weight(w_), .logits = out.logits});
  out.normed = s.normed;
  if (ctx.observer) ctx.observer->record("router." + std::to_string(spec().layer) + ".input", s.normed);
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
                           int moe_index)
    : Segment({.name = segment_name(layer, "route"), .layer = layer}),
      store_(store),
      bias_(c.moe_use_aux_free ? store.ref(prefix + "mlp.moe_statics.e_score_correction_bias", {c.moe_num_experts})
                               : ParamRef{}),
      config_(c),
      plain_(c.moe_gate == RouterGate::kTopK && c.scoring_func == RouterScoring::kSoftmax && !c.moe_group_experts &&
             c.moe_norm_gate_logits && !may_drop(c)),
      may_drop_(may_drop(c)),
      moe_index_(moe_index) {}

// The fused op knows one unit and no z loss.
bool RouteSegment::is_fused(const SegmentContext& ctx) const {
  const View& offsets = ctx.tokens->units.offsets;
  return plain_ && !ctx.router->z_sums && !ctx.router->first_choices && (!offsets || offsets.dim(0) == 2);
}

void RouteSegment::take_plan(int64_t tokens, Saved& saved) const {
  auto& s = saved.start<RouteSaved>();
  const int64_t k = config_.moe_k;
  s.expert_ids = saved.keep->take({tokens, k}, DType::kI32);
  s.offsets = saved.keep->take({config_.moe_num_experts + (may_drop_ ? 2 : 1)}, DType::kI32);
  s.row_token = saved.keep->take({tokens * k}, DType::kI32);
  s.row_of = saved.keep->take({tokens, k}, DType::kI32);
  if (!may_drop_) return;
  s.slots = saved.keep->take({tokens, k}, DType::kI32);
  s.kept_ids = saved.keep->take({tokens, k}, DType::kI32);
}

void RouteSegment::choose(const SegmentContext& ctx, View logits, View probs, Saved& saved) const {
  auto& s = saved.as<RouteSaved>();
  const RoutingUnits& units = ctx.tokens->units;
  const RouterStats& stats = *ctx.router;
  const int64_t count = units.offsets.dim(0) - 1;
  const View claims = stats.layer_claims(moe_index_, count);
  routing_choose(ctx.ops, {.logits = logits,
                           .probs = probs,
                           .bias = store_.weight(bias_),
                           .unit_offsets = units.offsets,
                           .gate = gate_of(config_),
                           .groups = config_.router_groups(),
                           .sinkhorn = config_.uses_sinkhorn() && ctx.training,
                           .sinkhorn_temp = config_.sinkhorn_temp,
                           .capacity = units.capacity,
                           .expert_ids = s.expert_ids,
                           .claims = claims,
                           .counts = stats.layer(stats.counts, moe_index_, count),
                           .bare_counts = stats.layer(stats.bare_counts, moe_index_, count)});
  if (!may_drop_) return;
  routing_drop(ctx.ops, {.expert_ids = s.expert_ids,
                         .unit_offsets = units.offsets,
                         .capacity = units.drops ? units.capacity : View{},
                         .claims = claims,
                         .before = {},
                         .order = drop_order_of(config_),
                         .reverse = config_.moe_reverse_token_drop,
                         .slots = s.slots,
                         .kept_ids = s.kept_ids,
                         .kept_counts = stats.layer(stats.kept_counts, moe_index_, count)});
}

void RouteSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  const int64_t tokens = ctx.tokens->count, experts = config_.moe_num_experts;
  if (!ctx.replay && !ctx.routed) take_plan(tokens, saved);
  auto& s = saved.as<RouteSaved>();
  Arena& arena = *saved.forward;
  s.logits = in.logits;
  const DType stat = s.logits.dtype;
  s.probs = arena.take({tokens, experts}, stat);
  s.weights = arena.take({tokens, config_.moe_k}, stat);
  const RouterStats& stats = *ctx.router;
  if (is_fused(ctx)) {
    const auto row = [&](View v) { return stats.layer(v, moe_index_, 1).reshape({experts}); };
    router_select(ctx.ops, {.logits = s.logits,
                            .bias = store_.weight(bias_),
                            .norm_min = config_.moe_norm_min,
                            .probs = s.probs,
                            .expert_ids = s.expert_ids,
                            .weights = s.weights,
                            .counts = row(stats.counts),
                            .bare_counts = row(stats.bare_counts),
                            .prob_sums = row(stats.prob_sums),
                            .replay = ctx.replay});
  } else {
    const int64_t units = ctx.tokens->units.offsets.dim(0) - 1;
    routing_scores(
        ctx.ops,
        {.logits = s.logits, .scoring = scoring_of(config_), .groups = config_.router_groups(), .probs = s.probs});
    if (!ctx.replay && !ctx.routed) choose(ctx, s.logits, s.probs, saved);
    routing_weights(ctx.ops, {.probs = s.probs,
                              .expert_ids = s.expert_ids,
                              .slots = s.slots,
                              .normalize = config_.moe_norm_gate_logits,
                              .norm_min = config_.moe_norm_min,
                              .weights = s.weights});
    s.lse = stats.z_sums ? arena.take({tokens}, stat) : View{};
    routing_sums(ctx.ops, {.probs = s.probs,
                           .logits = s.logits,
                           .unit_offsets = ctx.tokens->units.offsets,
                           .scoring = scoring_of(config_),
                           .prob_sums = stats.layer(stats.prob_sums, moe_index_, units),
                           .lse = s.lse,
                           .z_sums = stats.layer_z_sums(moe_index_, units)});
  }
  if (!ctx.replay)
    make_dispatch_plan(ctx.ops, {.expert_ids = may_drop_ ? s.kept_ids : s.expert_ids,
                                 .offsets = s.offsets,
                                 .row_token = s.row_token,
                                 .row_of = s.row_of});
  out.logits = {};
  out.weights = s.weights;
  out.offsets = s.offsets;
  out.row_token = s.row_token;
  out.row_of = s.row_of;
  if (ctx.observer) observe(ctx, saved);
}

void RouteSegment::observe(const SegmentContext& ctx, Saved& saved) const {
  const auto& s = saved.as<RouteSaved>();
  const std::string p = "router." + std::to_string(spec().layer) + ".";
  ctx.observer->record(p + "logits", s.logits);
  ctx.observer->record(p + "probs", s.probs);
  ctx.observer->record(p + "topk_index", s.expert_ids);
  ctx.observer->record(p + "topk_weight", s.weights);
}

void RouteSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<RouteSaved>();
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
  const int64_t units = ctx.tokens->units.offsets.dim(0) - 1;
  View z_scale = stats.z_scale;
  if (z_scale) z_scale = z_scale.reshape({z_scale.dim(0), 1}).rows_range(0, units).reshape({units});
  routing_backward(ctx.ops, {.dweights = dout.weights,
                             .probs = s.probs,
                             .expert_ids = s.expert_ids,
                             .slots = s.slots,
                             .unit_offsets = ctx.tokens->units.offsets,
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

void RouteSegment::choose_together(const SegmentContext& ctx, std::span<const Part> parts) const {
  ArenaScope scope(*ctx.ops.scratch);
  Arena& scratch = *ctx.ops.scratch;
  int64_t tokens = 0;
  for (const Part& p : parts) tokens += p.logits.dim(0);
  const View logits = scratch.take({tokens, config_.moe_num_experts}, parts[0].logits.dtype);
  const View probs = scratch.take(logits.shape, logits.dtype);
  Saved all;
  all.keep = &scratch;
  take_plan(tokens, all);
  int64_t at = 0;
  for (const Part& p : parts) {
    copy_rows(ctx.ops, p.logits, logits.rows_range(at, p.logits.dim(0)));
    at += p.logits.dim(0);
  }
  routing_scores(ctx.ops,
                 {.logits = logits, .scoring = scoring_of(config_), .groups = config_.router_groups(), .probs = probs});
  SegmentContext together = ctx;
  together.router = parts[0].stats;
  choose(together, logits, probs, all);
  const auto& chosen = all.as<RouteSaved>();
  at = 0;
  for (const Part& p : parts) {
    const int64_t n = p.logits.dim(0);
    take_plan(n, *p.saved);
    auto& s = p.saved->as<RouteSaved>();
    copy_rows(ctx.ops, chosen.expert_ids.rows_range(at, n), s.expert_ids);
    if (may_drop_) {
      copy_rows(ctx.ops, chosen.slots.rows_range(at, n), s.slots);
      copy_rows(ctx.ops, chosen.kept_ids.rows_range(at, n), s.kept_ids);
    }
    at += n;
  }
  for (const Part& p : parts.subspan(1))
    for (const View v : {p.stats->counts, p.stats->bare_counts, p.stats->kept_counts}) {
      const View row = p.stats->layer(v, moe_index_, 1), claims = p.stats->layer_claims(moe_index_, 1);
      if (ctx.ops.dry_run) continue;
      std::memset(row.data, 0, static_cast<size_t>(row.bytes()));
      std::memset(claims.data, 0, static_cast<size_t>(claims.bytes()));
    }
}

}  // namespace concerto
