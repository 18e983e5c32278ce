#include "concerto/layers/inspection.h"

#include <algorithm>
#include <functional>

#include "concerto/layers/router_segments.h"

namespace concerto {
namespace {

// Runs `body` twice, on counting arenas and then on real ones, as a step is measured before a run.
using Body = std::function<void(const Context&, Arena&)>;
Arena run_measured(Context ctx, const Body& body) {
  Arena memory, scratch;
  ctx.scratch = &scratch;
  ctx.dry_run = true;
  body(ctx, memory);
  Arena real_memory(memory.high_water()), real_scratch(scratch.high_water());
  ctx.scratch = &real_scratch;
  ctx.dry_run = false;
  body(ctx, real_memory);
  return real_memory;
}

OwnedTensor tensor(Shape shape, DType type) {
  Buffer memory(shape.elements() * dtype_bytes(type));
  const View view(memory.data(), shape, type);
  return {view, std::move(memory)};
}

}  // namespace

GateSettings gate_settings(const ModelConfig& c, bool training) {
  GateSettings s{.top_k = c.moe_k,
                 .gate = gate_of(c),
                 .scoring = scoring_of(c),
                 .groups = c.router_groups(),
                 .sinkhorn = c.uses_sinkhorn(),
                 .sinkhorn_temp = c.sinkhorn_temp,
                 .capacity = {},
                 .at_least_one = true,
                 .training = training,
                 .order = drop_order_of(c),
                 .reverse = c.moe_reverse_token_drop,
                 .normalize = c.moe_norm_gate_logits,
                 .norm_min = c.moe_norm_min};
  if (c.moe_capacity.size() == 3)
    s.capacity =
        CapacityFactors{.train = c.moe_capacity[0], .eval = c.moe_capacity[1], .few_tokens = c.moe_capacity[2]};
  return s;
}

GateAndDispatch gate_and_dispatch(const Context& ctx, const GateSettings& s, View x, View w, View bias) {
  const int64_t tokens = x.dim(0), experts = w.dim(0), k = s.top_k;
  const DType stat = stat_dtype(x.dtype);
  const bool sinkhorn = s.sinkhorn && s.training && s.gate == Gate::kTop2;
  GateAndDispatch r;
  if (s.capacity)
    r.capacity = s.at_least_one ? expert_room(*s.capacity, s.training, tokens, experts)
                                : expert_capacity(*s.capacity, s.training, tokens, experts);
  View counts;
  r.memory = run_measured(ctx, [&](const Context& c, Arena& arena) {
    r.gate_logits = arena.take({tokens, experts}, stat);
    r.gate_prob = arena.take({tokens, experts}, stat);
    r.expert_ids = arena.take({tokens, k}, DType::kI32);
    r.slots = arena.take({tokens, k}, DType::kI32);
    r.scatter_index = arena.take({tokens, k}, DType::kI32);
    r.combine_weights = arena.take({tokens, k}, x.dtype);
    r.router_loss = arena.take({1}, DType::kF32);
    counts = arena.take({1, experts}, DType::kI64);
    const View kept_counts = arena.take({1, experts}, DType::kI64);
    r.dispatch_mask = (s.count_drops ? counts : kept_counts).reshape({experts});
    ArenaScope scope(*c.scratch);
    const View claims = c.scratch->take({1, k, experts}, DType::kI64);
    const View bare_counts = c.scratch->take({1, experts}, DType::kI64);
    const View kept_ids = c.scratch->take({tokens, k}, DType::kI32);
    const View weights = c.scratch->take({tokens, k}, stat);
    const View units = c.scratch->take({2}, DType::kI32), room = c.scratch->take({1}, DType::kI64);
    if (!c.dry_run) {
      units.as<int32_t>()[0] = 0;
      units.as<int32_t>()[1] = static_cast<int32_t>(tokens);
      room.as<int64_t>()[0] = s.capacity ? r.capacity : tokens;
    }
    fill_zero(c, r.router_loss);
    router_logits(c, {.x = x, .w = w, .logits = r.gate_logits});
    routing_scores(c, {.logits = r.gate_logits, .scoring = s.scoring, .groups = s.groups, .probs = r.gate_prob});
    routing_choose(c, {.logits = r.gate_logits,
                       .probs = r.gate_prob,
                       .bias = bias,
                       .unit_offsets = units,
                       .gate = s.gate,
                       .groups = s.groups,
                       .sinkhorn = sinkhorn,
                       .sinkhorn_temp = s.sinkhorn_temp,
                       .full = s.full,
                       .capacity = room,
                       .expert_ids = r.expert_ids,
                       .claims = claims,
                       .counts = counts,
                       .bare_counts = bare_counts});
    routing_drop(c, {.expert_ids = r.expert_ids,
                     .unit_offsets = units,
                     .capacity = s.capacity ? room : View{},
                     .claims = claims,
                     .before = {},
                     .order = s.order,
                     .reverse = s.reverse,
                     .slots = r.slots,
                     .kept_ids = kept_ids,
                     .kept_counts = kept_counts});
    routing_weights(c, {.probs = r.gate_prob,
                        .expert_ids = r.expert_ids,
                        .slots = r.slots,
                        .normalize = s.normalize,
                        .norm_min = s.norm_min,
                        .weights = weights});
    cast(c, {.in = weights, .out = r.combine_weights});
  });
  if (!s.capacity)
    r.capacity = std::max<int64_t>(1, *std::max_element(counts.as<int64_t>(), counts.as<int64_t>() + experts));
  OwnedTensor buffer = tensor({experts, r.capacity, x.dim(1)}, x.dtype);
  r.dispatched_input = buffer.view;
  r.dispatched_memory = std::move(buffer.memory);
  pad_dispatch(ctx, {.x = x,
                     .expert_ids = r.expert_ids,
                     .slots = r.slots,
                     .nowhere = s.nowhere,
                     .scatter_index = r.scatter_index,
                     .buffer = r.dispatched_input});
  return r;
}

OwnedTensor forward_experts(const Context& ctx, View dispatched_input, View gate_up, View down) {
  const int64_t experts = dispatched_input.dim(0), capacity = dispatched_input.dim(1), rows = experts * capacity;
  const DType type = dispatched_input.dtype;
  OwnedTensor out = tensor(dispatched_input.shape, type);
  run_measured(ctx, [&](const Context& c, Arena& arena) {
    const View offsets = arena.take({experts + 1}, DType::kI32);
    const View hidden = arena.take({rows, gate_up.dim(1)}, type), act = arena.take({rows, gate_up.dim(1) / 2}, type);
    for (int64_t e = 0; e <= experts && !c.dry_run; ++e) offsets.as<int32_t>()[e] = static_cast<int32_t>(e * capacity);
    const View x = dispatched_input.reshape({rows, dispatched_input.dim(2)});
    grouped_linear_forward(c, {.x = x, .w = gate_up, .offsets = offsets, .y = hidden});
    swiglu_forward(c, {.gate_up = hidden, .act = act});
    grouped_linear_forward(c, {.x = act, .w = down, .offsets = offsets, .y = out.view.reshape(x.shape)});
  });
  return out;
}

OwnedTensor combine_expert_output(const Context& ctx, View expert_output, View combine_weights, View scatter_index) {
  OwnedTensor out = tensor({scatter_index.dim(0), expert_output.dim(2)}, expert_output.dtype);
  pad_combine(ctx,
              {.buffer = expert_output, .scatter_index = scatter_index, .weights = combine_weights, .y = out.view});
  return out;
}

}  // namespace concerto
