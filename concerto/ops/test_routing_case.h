// Tests only: one call of every routing op in a row, with its arguments by values.
#pragma once

#include "concerto/ops/op_test.h"
#include "concerto/ops/test_routing_model.h"

namespace concerto::test {

struct RoutingCase {
  int64_t tokens = 0, experts = 0, top_k = 0;
  Values logits, bias;  // bias empty: null
  Values units;         // token offsets; empty: one unit
  Scoring scoring = Scoring::kSoftmax;
  int64_t groups = 1;
  Gate gate = Gate::kTopK;
  bool sinkhorn = false;
  double sinkhorn_temp = 0.03;
  FullExperts full = FullExperts::kUniform;
  Values capacity;  // a unit each; empty: nothing is dropped, and without slots at all if `plain`
  DropOrder order = DropOrder::kRankMajor;
  bool reverse = false, plain = false;
  bool normalize = true;
  double norm_min = 1e-12;
  bool balance = false;
  double balance_scale = 0, z_scale = 0;  // z_scale 0: no z loss
  Values dweights;                        // empty: no backward
  Values given_ids, given_slots;          // replay: choose and drop are left out
  bool compare_choice = true;

  int64_t num_units() const { return units.empty() ? 1 : static_cast<int64_t>(units.size()) - 1; }
  Values unit_offsets() const { return units.empty() ? Values{0, static_cast<double>(tokens)} : units; }
};

// Outputs: probs ids claims counts bare_counts slots kept_ids kept_counts weights prob_sums lse z_sums loss aux_dprob
// dlogits.
inline Body routing_body(const RoutingCase& c) {
  return [=](OpRun& r) {
    const Context& ctx = r.context();
    const int64_t T = c.tokens, E = c.experts, K = c.top_k, U = c.num_units();
    const double range = 1 + largest(c.logits) + (c.bias.empty() ? 0 : largest(c.bias));
    const Bound choice{.compared = c.compare_choice};
    const bool z = c.z_scale != 0, replay = !c.given_ids.empty();
    Values tokens;
    for (int64_t u = 0; u < U; ++u) tokens.push_back(c.unit_offsets()[u + 1] - c.unit_offsets()[u]);
    const View logits = r.in(Kind::kStat, {T, E}, c.logits, 3);
    const View bias = c.bias.empty() ? View{} : r.in(Kind::kStat, {E}, c.bias);
    const View units = r.in(Kind::kI32, {U + 1}, c.unit_offsets());
    const View capacity = c.capacity.empty() ? View{} : r.in(Kind::kI64, {U}, c.capacity);
    const View probs = r.out("probs", Kind::kStat, {T, E}, {.length = E, .norm = range}, 2);
    routing_scores(ctx, {.logits = logits, .scoring = c.scoring, .groups = c.groups, .probs = probs});
    View ids, slots;
    const View claims = r.out("claims", Kind::kI64, {U, K, E}, choice);
    const View counts = r.out("counts", Kind::kI64, {U, E}, choice);
    if (replay) {
      ids = r.in(Kind::kI32, {T, K}, c.given_ids);
      if (!c.given_slots.empty()) slots = r.in(Kind::kI32, {T, K}, c.given_slots);
    } else {
      ids = r.out("ids", Kind::kI32, {T, K}, choice);
      routing_choose(ctx, {.logits = logits,
                           .probs = probs,
                           .bias = bias,
                           .unit_offsets = units,
                           .gate = c.gate,
                           .groups = c.groups,
                           .sinkhorn = c.sinkhorn,
                           .sinkhorn_temp = c.sinkhorn_temp,
                           .full = c.full,
                           .capacity = c.sinkhorn ? capacity : View{},
                           .expert_ids = ids,
                           .claims = claims,
                           .counts = counts,
                           .bare_counts = r.out("bare_counts", Kind::kI64, {U, E}, choice)});
    }
    if (!replay && !c.plain) {
      slots = r.out("slots", Kind::kI32, {T, K}, choice);
      routing_drop(ctx, {.expert_ids = ids,
                         .unit_offsets = units,
                         .capacity = capacity,
                         .claims = claims,
                         .before = {},
                         .order = c.order,
                         .reverse = c.reverse,
                         .slots = slots,
                         .kept_ids = r.out("kept_ids", Kind::kI32, {T, K}, choice),
                         .kept_counts = r.out("kept_counts", Kind::kI64, {U, E}, choice)});
    }
    routing_weights(
        ctx,
        {.probs = probs,
         .expert_ids = ids,
         .slots = slots,
         .normalize = c.normalize,
         .norm_min = c.norm_min,
         .weights = r.out("weights", Kind::kStat, {T, K},
                          {.length = E, .norm = range * static_cast<double>(E * E), .compared = c.compare_choice})});
    const View prob_sums =
        r.out("prob_sums", Kind::kF64, {U, E}, {.length = E, .norm = range * static_cast<double>(T + 1)});
    const View lse = z ? r.out("lse", Kind::kStat, {T}, {.length = E, .norm = range}) : View{};
    routing_sums(ctx, {.probs = probs,
                       .logits = z ? logits : View{},
                       .unit_offsets = units,
                       .scoring = c.scoring,
                       .prob_sums = prob_sums,
                       .lse = lse,
                       .z_sums = z ? r.out("z_sums", Kind::kF64, {U},
                                           {.length = E, .norm = 10 * range * range * static_cast<double>(T + 1)})
                                   : View{}});
    View aux;
    if (c.balance && !replay) {
      aux = r.out("aux_dprob", Kind::kStat, {U, E}, choice);
      routing_balance(
          ctx, {.counts = counts,
                .prob_sums = prob_sums,
                .tokens = r.in(Kind::kI64, {U}, tokens),
                .scale = r.in(Kind::kF64, {U}, Values(tokens.size(), c.balance_scale)),
                .groups = c.groups,
                .loss = r.out("loss", Kind::kF64, {U},
                              {.length = E, .norm = range * static_cast<double>(E), .compared = c.compare_choice}),
                .aux_dprob = aux});
    }
    if (c.dweights.empty()) return;
    const double backward_norm =
        10 * range * static_cast<double>(E) *
        (static_cast<double>(E) * largest(c.dweights) + c.balance_scale * static_cast<double>(E) + c.z_scale * range);
    routing_backward(ctx, {.dweights = r.in(Kind::kStat, {T, K}, c.dweights),
                           .probs = probs,
                           .expert_ids = ids,
                           .slots = slots,
                           .unit_offsets = units,
                           .scoring = c.scoring,
                           .groups = c.groups,
                           .normalize = c.normalize,
                           .norm_min = c.norm_min,
                           .aux_dprob = aux,
                           .logits = z ? logits : View{},
                           .lse = lse,
                           .z_scale = z ? r.in(Kind::kF64, {U}, Values(tokens.size(), c.z_scale)) : View{},
                           .dlogits = r.out("dlogits", Kind::kStat, {T, E}, {.length = E, .norm = backward_norm}, 1)});
  };
}

inline model::Matrix matrix(const Values& v, int64_t cols, int64_t first = 0, int64_t end = -1) {
  model::Matrix m;
  for (int64_t r = first; r < (end < 0 ? static_cast<int64_t>(v.size()) / cols : end); ++r)
    m.push_back(slice(v, r * cols, cols));
  return m;
}
inline model::Ids whole(const Values& v, int64_t cols, int64_t first, int64_t end) {
  model::Ids m;
  for (const auto& row : matrix(v, cols, first, end)) m.emplace_back(row.begin(), row.end());
  return m;
}

}  // namespace concerto::test
