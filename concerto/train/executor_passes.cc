// Forward and backward of a micro-batch through one virtual stage.
#include <algorithm>
#include <cstring>

#include "concerto/train/executor_state.h"

namespace concerto {

// All units, everything kept for the backward pass.
void Executor::forward(Chunk& chunk, Slot& slot) {
  const TraceScope whole(trace_, "forward", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  slot.acts = {};
  slot.acts.hidden = slot.input;
  for (size_t i = 0; i < chunk.stage.units().size(); ++i) {
    const Unit& unit = chunk.stage.units()[i];
    TraceScope scope(trace_, unit.name, "forward", -1, slot.micro_batch);
    unit_forward(unit, ctx, slot.acts, slot.units[i], {&slot.keep, &arenas_->temporary, nullptr});
  }
}

// All micro-batches of the step, unit by unit: a unit that routes wants what all of them have brought there.
void Executor::forward_together(Chunk& chunk, int64_t count) {
  const bool joint = may_drop(config()) || config().uses_sinkhorn();
  for (int64_t m = 0; m < count; ++m) {
    Slot& slot = *chunk.slots[static_cast<size_t>(m)];
    slot.acts = {};
    slot.acts.hidden = slot.input;
  }
  for (size_t i = 0; i < chunk.stage.units().size(); ++i) {
    const Unit& unit = chunk.stage.units()[i];
    if (unit.routes && joint) choose_together(chunk, unit, i, count);
    for (int64_t m = 0; m < count; ++m) {
      Slot& slot = *chunk.slots[static_cast<size_t>(m)];
      SegmentContext ctx = segment_context(slot, true);
      ctx.routed = unit.routes && joint;
      TraceScope scope(trace_, unit.name, "forward", -1, slot.micro_batch);
      unit_forward(unit, ctx, slot.acts, slot.units[i], {&slot.keep, &arenas_->temporary, nullptr});
    }
  }
}

void Executor::choose_together(Chunk& chunk, const Unit& unit, size_t index, int64_t count) {
  Together& all = *chunk.together;
  int64_t tokens = 0;
  for (int64_t m = 0; m < count; ++m) {
    Slot& slot = *chunk.slots[static_cast<size_t>(m)];
    Saved& saved = slot.units[index].segments[0];
    saved.keep = &slot.keep;
    all.parts[static_cast<size_t>(m)] = {
        .logits = slot.acts.logits, .tokens = &slot.tokens, .stats = &slot.router.stats, .saved = &saved};
    tokens += slot.tokens.count;
  }
  RouteSegment::DataRanks ranks;
  if (data_rows_) {
    if (!context_.dry_run) data_rows_->share_counts(tokens);
    ranks = {.exchange = data_rows_.get(),
             .tokens = context_.dry_run ? tokens * options_.groups.dp->size() : data_rows_->total(),
             .begin = context_.dry_run ? 0 : data_rows_->begin(),
             .first = data_rows_->first()};
    tokens = ranks.tokens;
  }
  all.offsets[1] = static_cast<int32_t>(tokens);
  all.room[0] = expert_room(config(), true, tokens);
  all.tokens.count = tokens;
  all.tokens.units = {.offsets = View(all.offsets.data(), {2}, DType::kI32),
                      .capacity = View(all.room.data(), {1}, DType::kI64),
                      .drops = true};
  SegmentContext ctx = segment_context(*chunk.slots[0], true);
  ctx.tokens = &all.tokens;
  unit.routes->choose_together(ctx, std::span(all.parts).first(static_cast<size_t>(count)), ranks);
}

// The main model without a backward pass: arenas take turns, and the first holds what came from the stage before.
void Executor::forward_only(Chunk& chunk, Slot& slot) {
  const SegmentContext ctx = segment_context(slot, false);
  Arena* turns[3] = {&slot.keep, &arenas_->gradients[0], &arenas_->gradients[1]};
  const auto reach = static_cast<size_t>(chunk.stage.unit_reach());
  slot.acts = {};
  turns[0]->reset();
  if (!chunk.stage.span().embedding) {
    if (context_.dry_run || chunk.prev)
      slot.input = take_input(slot);
    else
      receive_forward(chunk, slot);
    if (chunk.prev) copy_view(chunk.prev->slots[0]->acts.hidden, slot.input);
    slot.acts.hidden = slot.input;
  }
  for (size_t i = 0; i < chunk.stage.units().size(); ++i) {
    const Unit& unit = chunk.stage.units()[i];
    if (unit.training_only) continue;
    Arena* arena = turns[(i + 1) % reach];
    arena->reset();
    unit_forward(unit, ctx, slot.acts, slot.units[i], {arena, arena, nullptr});
  }
}

// Unit by unit: gradients of activations, then of weights, so that gradient memory is recycled after each unit.
void Executor::backward(Chunk& chunk, Slot& slot) {
  const TraceScope whole(trace_, "backward", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  Acts grads;
  grads.hidden = first_rows(slot.gradient_in, slot.tokens.local.count);
  for (size_t i = chunk.stage.units().size(); i-- > 0;) {
    const Unit& unit = chunk.stage.units()[i];
    TraceScope scope(trace_, unit.name, "backward", -1, slot.micro_batch);
    Arena& arena = arenas_->gradients[i % static_cast<size_t>(chunk.stage.unit_reach())];
    arena.reset();
    ArenaScope temporary(arenas_->temporary);
    unit_backward_input(unit, ctx, grads, slot.units[i], {&slot.keep, &arenas_->temporary, &arena});
    unit_backward_weight(unit, ctx, slot.units[i]);
    weights_done(chunk, i);
  }
  hand_gradient_on(chunk, slot, grads);
}

void Executor::backward_input(Chunk& chunk, Slot& slot) {
  const TraceScope whole(trace_, "backward_input", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  slot.backward.reset();
  Acts grads;
  grads.hidden = first_rows(slot.gradient_in, slot.tokens.local.count);
  for (size_t i = chunk.stage.units().size(); i-- > 0;) {
    const Unit& unit = chunk.stage.units()[i];
    TraceScope scope(trace_, unit.name, "backward_input", -1, slot.micro_batch);
    unit_backward_input(unit, ctx, grads, slot.units[i], {&slot.keep, &slot.backward, &slot.backward});
  }
  hand_gradient_on(chunk, slot, grads);
}

void Executor::backward_weight(Chunk& chunk, Slot& slot) {
  const TraceScope whole(trace_, "backward_weight", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  for (size_t i = chunk.stage.units().size(); i-- > 0;) {
    const Unit& unit = chunk.stage.units()[i];
    TraceScope scope(trace_, unit.name, "backward_weight", -1, slot.micro_batch);
    unit_backward_weight(unit, ctx, slot.units[i]);
    weights_done(chunk, i);
  }
}

void Executor::router_losses(Chunk& chunk, Slot& slot, RouterLossValues& values) {
  const auto units = static_cast<size_t>(slot.tokens.units.offsets.dim(0) - 1);
  const auto in_unit = std::span(slot.in_unit).first(units);
  const auto weights = std::span(slot.unit_weights).first(units);
  chunk.losses.apply(context_, slot.router.stats, in_unit, weights, values);
  if (!chunk.losses.pools()) return;
  const RouterPool pool = slot.pool.rows(static_cast<int64_t>(units));
  chunk.losses.add_to_pool(slot.router.stats, pool);
  if (!chunk.last()) return;
  chunk.losses.finish_pool(context_, pool, in_unit, weights, values);
  chunk.losses.spread_pool(pool, slot.router.stats);
}

// One unit over all micro-batches: what its losses add to a token's gradients is the same in each of them.
void Executor::losses_together(Chunk& chunk, RouterLossValues& values) {
  Together& whole = *chunk.together;
  const RouterStats& all = whole.router.stats;
  const double one = 1;
  whole.in_unit[0] = totals_.tokens;
  if (chunk.layers() > 0) {
    clear_router_stats(all);
    for (const auto& slot : chunk.slots)
      if (slot->micro_batch >= 0) add_router_stats(slot->router.stats, chunk.layers(), all);
    if (options_.groups.dp) reduce_router_stats(all, *options_.groups.dp);
    chunk.losses.apply(context_, all, whole.in_unit, {&one, 1}, values);
  }
  if (chunk.losses.pools()) {
    chunk.losses.add_to_pool(all, whole.pool);
    if (chunk.last()) {
      chunk.losses.finish_pool(context_, whole.pool, whole.in_unit, {&one, 1}, values);
      chunk.losses.spread_pool(whole.pool, all);
    }
  }
  for (auto& slot : chunk.slots) {
    slot->router.stats.aux_dprob = all.aux_dprob;
    slot->router.stats.z_scale = all.z_scale;
  }
}

void Executor::finish_forward(Chunk& chunk, Slot& slot, StepOutput& output) {
  if (&chunk == chunks_[0].get()) output.tokens += slot.tokens.count;
  const RouterStats& stats = slot.router.stats;
  const int64_t experts = config().moe_num_experts, units = slot.tokens.units.offsets.dim(0) - 1;
  const bool drops = may_drop(config());
  for (int64_t l = 0; l < chunk.layers(); ++l) {
    const auto layer = static_cast<int>(l);
    const auto row = static_cast<size_t>(chunk.stage.first_moe_layer() + l);
    const auto* counts = stats.layer(stats.counts, layer, units).as<int64_t>();
    const auto* kept = stats.layer(stats.kept_counts, layer, units).as<int64_t>();
    for (int64_t i = 0; i < units * experts; ++i) {
      const auto e = static_cast<size_t>(i % experts);
      output.tokens_per_expert[row][e] += counts[i];
      if (drops) output.drops_per_expert[row][e] += counts[i] - kept[i];
    }
  }
}

void Executor::finish_backward(Chunk& chunk, Slot& slot, StepOutput& output) {
  if (!chunk.stage.span().head) return;
  const int64_t losses = 1 + config().num_nextn_predict_layers;
  for (int64_t i = 0; i < losses; ++i) {
    const auto n = static_cast<size_t>(i);
    output.differentiated[n] += slot.losses.sum[n] * slot.losses.scale[n];
    if (options_.loss_average != LossAverage::kMicroBatches) {
      output.loss_sum[n] += slot.losses.sum[n];
    } else if (slot.losses.scale[n] > 0) {
      const double factor = i == 0 ? 1.0 : config().mtp_loss_scaling_factor / static_cast<double>(losses - 1);
      output.loss_sum[n] +=
          slot.losses.sum[n] * (slot.losses.scale[n] / factor) * static_cast<double>(totals_.micro_batches);
    }
  }
}

}  // namespace concerto
