#include "concerto/train/executor.h"

#include <algorithm>
#include <cstring>

#include "concerto/tensor/first_touch.h"

namespace concerto {
namespace {

View ints(const std::vector<int32_t>& v, Shape shape) {
  return View(const_cast<int32_t*>(v.data()), shape, DType::kI32);
}

}  // namespace

// What one micro-batch in flight owns.
struct Executor::Slot {
  int64_t micro_batch = -1;
  Tokens tokens;
  LossSums losses;
  RouterMemory router;
  std::vector<int32_t> whole;          // [2] offsets of the one unit that the micro-batch is
  std::vector<int64_t> room, in_unit;  // [U] capacity, tokens
  std::vector<double> unit_weights;    // [U] in the step
  std::vector<UnitSaved> units;
  Acts acts;
  Arena keep, backward;  // `backward` only when B and W are apart
  Acts grads;
};

struct Executor::Together {
  RouterMemory router;
  Tokens tokens;
  std::vector<int32_t> offsets{0, 0};
  std::vector<int64_t> room{0}, in_unit{0};
  std::vector<RouteSegment::Part> parts;
};

struct Executor::Arenas {
  Arena gradients[3];  // recycled: unit i works in gradients[i % unit_reach]
  Arena temporary, scratch;
};

Executor::Executor(const Stage& stage, ParameterStore& store, const Backend& backend, ThreadPool& pool,
                   const ExecutorOptions& options)
    : stage_(stage),
      store_(store),
      options_(options),
      arenas_(std::make_unique<Arenas>()),
      losses_(stage.config(), options.routing, static_cast<int64_t>(stage.moe_layers().size()),
              options.routing.unit == RoutingUnit::kSequence
                  ? (options.max_rows > 0 ? options.max_rows : options.max_tokens)
                  : 1) {
  CHECK(options.max_tokens > 0 && options.slots > 0);
  CHECK(stage.config().num_nextn_predict_layers <= kMostMtpLayers);
  CHECK((options.routing.unit == RoutingUnit::kGlobal) == (stage.routing_unit() == RoutingUnit::kGlobal));
  check_backend(backend, store.compute());
  if (options_.max_docs == 0) options_.max_docs = options_.max_tokens;
  if (options_.usual_docs == 0) options_.usual_docs = options_.max_docs;
  context_ = {.backend = &backend, .pool = &pool, .scratch = &arenas_->scratch};
  if (options_.max_rows == 0) options_.max_rows = options_.max_tokens;
  const RouterStatsSize size{.layers = static_cast<int64_t>(stage.moe_layers().size()),
                             .units = max_units(),
                             .stat = store.stat(),
                             .balance = losses_.balance() && options_.train,
                             .z = losses_.z() && options_.train};
  for (int64_t i = 0; i < options_.slots; ++i) {
    auto slot = std::make_unique<Slot>();
    slot->units.resize(stage.units().size());
    for (size_t u = 0; u < slot->units.size(); ++u) slot->units[u].segments.resize(stage.units()[u].segments.size());
    slot->router = RouterMemory(stage.config(), size);
    slot->router.stats.first_choices = losses_.first_choices();
    const auto units = static_cast<size_t>(max_units());
    slot->whole = {0, 0};
    slot->room.resize(units);
    slot->in_unit.resize(units);
    slot->unit_weights.resize(units);
    slots_.push_back(std::move(slot));
  }
  if (is_global() && options_.train) {
    together_ = std::make_unique<Together>();
    together_->router = RouterMemory(stage.config(), size);
    together_->parts.resize(slots_.size());
  }
  plan_memory();
  for (auto& slot : slots_) {
    slot->keep = Arena(memory_.keep);
    if (options_.train && options_.split) slot->backward = Arena(memory_.backward);
  }
  Arenas& a = *arenas_;
  for (Arena& g : a.gradients) g = Arena(g.high_water());
  a.temporary = Arena(memory_.temporary);
  a.scratch = Arena(memory_.scratch);
  if (options_.poison) {
    for (auto& slot : slots_) slot->keep.poison(), slot->backward.poison();
    for (Arena* arena : {&a.gradients[0], &a.gradients[1], &a.gradients[2], &a.temporary, &a.scratch}) arena->poison();
  }
}

Executor::~Executor() = default;

// Slots are alike, and the dry run is of the first.
void Executor::note_growth() {
  const Slot& first = *slots_[0];
  Arenas& a = *arenas_;
  for (const auto& slot : slots_) {
    growth_.emplace_back(&slot->keep, first.keep.growth());
    growth_.emplace_back(&slot->backward, first.backward.growth());
  }
  for (Arena* arena : {&a.gradients[0], &a.gradients[1], &a.gradients[2], &a.temporary, &a.scratch})
    growth_.emplace_back(arena, arena->growth());
}

void Executor::first_touch() {
  std::vector<Extent> extents;
  for (const auto& [arena, growth] : growth_)
    for (const Arena::Growth& g : growth)
      if (arena->data()) extents.push_back({arena->data() + g.begin, arena->data() + g.end, arena->data() + g.fresh});
  if (!options_.poison) concerto::first_touch(*context_.pool, extents);  // poison has touched all
  growth_ = {};
}

int64_t Executor::max_units() const { return options_.routing.unit == RoutingUnit::kSequence ? options_.max_rows : 1; }

// Runs micro-batches of the largest size on counting arenas: forward only, and (training) forward and backward.
void Executor::dry_run(int64_t docs) {
  Slot& slot = *slots_[0];
  set_tokens(slot, nullptr, false, docs);
  forward_only(slot);
  if (!options_.train) return;
  if (is_global()) {
    for (auto& each : slots_) set_tokens(*each, nullptr, true, docs);
    forward_together(options_.slots);
  } else {
    set_tokens(slot, nullptr, true, docs);
    forward(slot);
  }
  if (options_.split) {
    backward_input(slot);
    backward_weight(slot);
  } else {
    backward(slot);
  }
}

// Attention pads every document to whole tiles, so a micro-batch of one-token documents wants scratch many times that
// of a usual one. There is room for it, but room that is never touched takes no memory: the total counts usual
// documents.
void Executor::plan_memory() {
  Slot& slot = *slots_[0];
  slot_of_.assign(1, -1);
  const Arenas& a = *arenas_;
  const Context real = context_;
  context_.dry_run = true;
  dry_run(options_.usual_docs);
  note_growth();
  const int64_t usual_scratch = a.scratch.high_water();
  dry_run(options_.max_docs);
  context_ = real;
  // Kernels may round their scratch differently for smaller micro-batches.
  constexpr int64_t kScratchSlack = 1 << 20;
  memory_.keep = slot.keep.high_water();
  int64_t gradients = 0;
  for (const Arena& arena : a.gradients) gradients += arena.high_water();
  memory_.backward = options_.split ? slot.backward.high_water() : gradients;
  memory_.temporary = a.temporary.high_water();
  memory_.scratch = std::max(a.scratch.high_water(), options_.scratch) + kScratchSlack;
  memory_.total = options_.slots * memory_.keep + (options_.split ? options_.slots : 1) * memory_.backward +
                  memory_.temporary + std::max(usual_scratch, options_.scratch) + options_.slots * slot.router.bytes();
  if (options_.split) memory_.total += gradients;
  if (together_) memory_.total += together_->router.bytes();
}

// The units of a micro-batch. In evaluation, and while memory is planned, the global unit is the micro-batch.
void Executor::set_units(Slot& slot, const MicroBatch* b, bool training) {
  RoutingUnits& units = slot.tokens.units;
  const bool sequences = options_.routing.unit == RoutingUnit::kSequence;
  const int64_t count = !sequences ? 1 : b ? b->rows() : options_.max_rows;
  CHECK(count <= max_units(), "{} sequences in a micro-batch, planned for {}", count, options_.max_rows);
  slot.whole[1] = static_cast<int32_t>(slot.tokens.count);
  units.offsets =
      b ? ints(sequences ? b->row_offsets : slot.whole, {count + 1}) : View(nullptr, {count + 1}, DType::kI32);
  units.capacity = View(b ? slot.room.data() : nullptr, {count}, DType::kI64);
  units.drops = true;
  const ModelConfig& c = stage_.config();
  for (int64_t u = 0; u < count && b; ++u) {
    const auto i = static_cast<size_t>(u);
    slot.in_unit[i] = sequences ? b->row_offsets[i + 1] - b->row_offsets[i] : slot.tokens.count;
    slot.room[i] = expert_room(c, training, slot.in_unit[i]);
  }
}

void Executor::set_tokens(Slot& slot, const MicroBatch* b, bool training, int64_t planned_docs) {
  const int64_t tokens = b ? b->tokens() : options_.max_tokens;
  const int64_t depth = stage_.config().num_nextn_predict_layers;
  CHECK(tokens <= options_.max_tokens, "{} tokens in a micro-batch, planned for {}", tokens, options_.max_tokens);
  static const std::vector<int32_t> nothing;
  const auto view = [&](const std::vector<int32_t>& v, Shape shape) {
    CHECK(!b || static_cast<int64_t>(v.size()) == shape.elements(), "{} values in a micro-batch, wanted {}", v.size(),
          shape.str());
    return b ? ints(v, shape) : View(nullptr, shape, DType::kI32);
  };
  Tokens& t = slot.tokens;
  t = {};
  t.count = tokens;
  t.local = b ? stage_.shard().own(tokens) : Part{0, stage_.shard().most_own(tokens)};
  t.ids = view(b ? b->token_ids : nothing, {tokens});
  t.positions = view(b ? b->positions : nothing, {tokens});
  if (!b || !b->targets.empty()) t.targets = view(b ? b->targets : nothing, {tokens});
  const int64_t offsets = b ? static_cast<int64_t>(b->doc_offsets.size()) : planned_docs + 1;
  t.doc_offsets = view(b ? b->doc_offsets : nothing, {offsets});
  if (depth > 0 && (!b || !b->mtp_token_ids.empty())) {
    t.mtp_ids = view(b ? b->mtp_token_ids : nothing, {depth, tokens});
    t.mtp_targets = view(b ? b->mtp_targets : nothing, {depth, tokens});
  }
  set_units(slot, b, training);
}

SegmentContext Executor::segment_context(Slot& slot, bool training) {
  return {.ops = context_,
          .tokens = &slot.tokens,
          .losses = &slot.losses,
          .router = &slot.router.stats,
          .observer = context_.dry_run ? nullptr : observer_,
          .training = training,
          .freeze_router = options_.routing.freeze_router};
}

// All units, everything kept for the backward pass.
void Executor::forward(Slot& slot) {
  const TraceScope whole(trace_, "forward", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  slot.keep.reset();
  Acts acts;
  for (size_t i = 0; i < stage_.units().size(); ++i) {
    const Unit& unit = stage_.units()[i];
    TraceScope scope(trace_, unit.name, "forward", -1, slot.micro_batch);
    unit_forward(unit, ctx, acts, slot.units[i], {&slot.keep, &arenas_->temporary, nullptr});
  }
}

// All micro-batches of the step, unit by unit: a unit that routes wants what all of them have brought there.
void Executor::forward_together(int64_t count) {
  const ModelConfig& c = stage_.config();
  const bool joint = may_drop(c) || c.uses_sinkhorn();
  for (int64_t m = 0; m < count; ++m) {
    slots_[static_cast<size_t>(m)]->keep.reset();
    slots_[static_cast<size_t>(m)]->acts = {};
  }
  for (size_t i = 0; i < stage_.units().size(); ++i) {
    const Unit& unit = stage_.units()[i];
    if (unit.routes && joint) choose_together(unit, i, count);
    for (int64_t m = 0; m < count; ++m) {
      Slot& slot = *slots_[static_cast<size_t>(m)];
      SegmentContext ctx = segment_context(slot, true);
      ctx.routed = unit.routes && joint;
      TraceScope scope(trace_, unit.name, "forward", -1, slot.micro_batch);
      unit_forward(unit, ctx, slot.acts, slot.units[i], {&slot.keep, &arenas_->temporary, nullptr});
    }
  }
}

void Executor::choose_together(const Unit& unit, size_t index, int64_t count) {
  Together& all = *together_;
  int64_t tokens = 0;
  for (int64_t m = 0; m < count; ++m) {
    Slot& slot = *slots_[static_cast<size_t>(m)];
    Saved& saved = slot.units[index].segments[0];
    saved.keep = &slot.keep;
    all.parts[static_cast<size_t>(m)] = {
        .logits = slot.acts.logits, .tokens = &slot.tokens, .stats = &slot.router.stats, .saved = &saved};
    tokens += slot.tokens.count;
  }
  all.offsets[1] = static_cast<int32_t>(tokens);
  all.room[0] = expert_room(stage_.config(), true, tokens);
  all.tokens.count = tokens;
  all.tokens.units = {
      .offsets = ints(all.offsets, {2}), .capacity = View(all.room.data(), {1}, DType::kI64), .drops = true};
  SegmentContext ctx = segment_context(*slots_[0], true);
  ctx.tokens = &all.tokens;
  unit.routes->choose_together(ctx, std::span(all.parts).first(static_cast<size_t>(count)));
}

// The main model without a backward pass: arenas take turns.
void Executor::forward_only(Slot& slot) {
  const SegmentContext ctx = segment_context(slot, false);
  Arena* turns[3] = {&slot.keep, &arenas_->gradients[0], &arenas_->gradients[1]};
  const auto reach = static_cast<size_t>(stage_.unit_reach());
  Acts acts;
  for (size_t i = 0; i < stage_.units().size(); ++i) {
    const Unit& unit = stage_.units()[i];
    if (unit.training_only) continue;
    Arena* arena = turns[i % reach];
    arena->reset();
    unit_forward(unit, ctx, acts, slot.units[i], {arena, arena, nullptr});
  }
}

// Unit by unit: gradients of activations, then of weights, so that gradient memory is recycled after each unit.
void Executor::backward(Slot& slot) {
  const TraceScope whole(trace_, "backward", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  Acts grads;
  for (size_t i = stage_.units().size(); i-- > 0;) {
    const Unit& unit = stage_.units()[i];
    TraceScope scope(trace_, unit.name, "backward", -1, slot.micro_batch);
    Arena& arena = arenas_->gradients[i % static_cast<size_t>(stage_.unit_reach())];
    arena.reset();
    ArenaScope temporary(arenas_->temporary);
    unit_backward_input(unit, ctx, grads, slot.units[i], {&slot.keep, &arenas_->temporary, &arena});
    unit_backward_weight(unit, ctx, slot.units[i]);
  }
}

void Executor::backward_input(Slot& slot) {
  const TraceScope whole(trace_, "backward_input", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  slot.backward.reset();
  Acts grads;
  for (size_t i = stage_.units().size(); i-- > 0;) {
    const Unit& unit = stage_.units()[i];
    TraceScope scope(trace_, unit.name, "backward_input", -1, slot.micro_batch);
    unit_backward_input(unit, ctx, grads, slot.units[i], {&slot.keep, &slot.backward, &slot.backward});
  }
}

void Executor::backward_weight(Slot& slot) {
  const TraceScope whole(trace_, "backward_weight", "schedule", -1, slot.micro_batch);
  const SegmentContext ctx = segment_context(slot, true);
  for (size_t i = stage_.units().size(); i-- > 0;) {
    const Unit& unit = stage_.units()[i];
    TraceScope scope(trace_, unit.name, "backward_weight", -1, slot.micro_batch);
    unit_backward_weight(unit, ctx, slot.units[i]);
  }
}

void Executor::begin_output(std::span<const MicroBatch> micro_batches, StepOutput& output) {
  totals_ = {};
  output.loss_sum = {};
  output.loss_count = {};
  output.differentiated = {};
  output.aux_loss = output.z_loss = 0;
  output.tokens = 0;
  for (auto* counts : {&output.tokens_per_expert, &output.drops_per_expert}) {
    counts->resize(stage_.moe_layers().size());
    for (auto& layer : *counts) layer.assign(static_cast<size_t>(stage_.config().moe_num_experts), 0);
  }
  const int64_t depth = stage_.config().num_nextn_predict_layers;
  for (const MicroBatch& b : micro_batches) {
    totals_.tokens += b.tokens();
    totals_.targets[0] += b.valid_targets();
    for (int64_t m = 0; m < depth && !b.mtp_targets.empty(); ++m)
      for (int64_t t = 0; t < b.tokens(); ++t)
        totals_.targets[static_cast<size_t>(m + 1)] +=
            b.mtp_targets[static_cast<size_t>(m * b.tokens() + t)] != kIgnoreIndex;
  }
  totals_.micro_batches = static_cast<int64_t>(micro_batches.size());
}

// What each loss of this micro-batch weighs in the step: by valid tokens, one mean among the micro-batches' means, or
// over a constant. A micro-batch (or a step) without a valid target weighs nothing. Router losses weigh by tokens.
void Executor::loss_scales(const MicroBatch& b, Slot& slot) const {
  const int64_t depth = stage_.config().num_nextn_predict_layers;
  const double micro_batches = static_cast<double>(totals_.micro_batches);
  const auto weight = [&](int64_t in_batch, int64_t in_step) {
    if (in_batch == 0) return 0.0;
    switch (options_.loss_average) {
      case LossAverage::kTokens:
        return 1.0 / static_cast<double>(in_step);
      case LossAverage::kMicroBatches:
        return 1.0 / (micro_batches * static_cast<double>(in_batch));
      case LossAverage::kTokenBalance:
        break;
    }
    const int64_t length = options_.token_balance_seqlen;
    return 1.0 / (length > 0 ? micro_batches * static_cast<double>(length) : static_cast<double>(totals_.tokens));
  };
  slot.losses = {};
  slot.losses.scale[0] = weight(b.valid_targets(), totals_.targets[0]);
  for (int64_t m = 0; m < depth; ++m) {
    int64_t valid = 0;
    for (int64_t t = 0; t < b.tokens(); ++t)
      valid += b.mtp_targets[static_cast<size_t>(m * b.tokens() + t)] != kIgnoreIndex;
    slot.losses.scale[m + 1] = stage_.config().mtp_loss_scaling_factor / static_cast<double>(depth) *
                               weight(valid, totals_.targets[static_cast<size_t>(m + 1)]);
  }
  const double all = options_.loss_average == LossAverage::kMicroBatches
                         ? micro_batches * static_cast<double>(b.tokens())
                         : static_cast<double>(totals_.tokens);
  for (size_t u = 0; u < slot.in_unit.size(); ++u)
    slot.unit_weights[u] = slot.in_unit[u] > 0 ? static_cast<double>(slot.in_unit[u]) / all : 0.0;
}

void Executor::router_losses(Slot& slot, RouterLossValues& values) {
  const auto units = static_cast<size_t>(slot.tokens.units.offsets.dim(0) - 1);
  losses_.apply(context_, slot.router.stats, std::span(slot.in_unit).first(units),
                std::span(slot.unit_weights).first(units), values);
}

// One unit over all micro-batches: what its losses add to a token's gradients is the same in each of them.
void Executor::losses_together(RouterLossValues& values) {
  const RouterStats& all = together_->router.stats;
  const auto layers = static_cast<int64_t>(stage_.moe_layers().size());
  if (layers == 0) return;
  clear_router_stats(all);
  for (int64_t m = 0; m < totals_.micro_batches; ++m)
    add_router_stats(slots_[static_cast<size_t>(m)]->router.stats, layers, all);
  together_->in_unit[0] = totals_.tokens;
  const double whole = 1;
  losses_.apply(context_, all, together_->in_unit, {&whole, 1}, values);
  for (auto& slot : slots_) {
    slot->router.stats.aux_dprob = all.aux_dprob;
    slot->router.stats.z_scale = all.z_scale;
  }
}

void Executor::finish_forward(Slot& slot, StepOutput& output) {
  output.tokens += slot.tokens.count;
  const RouterStats& stats = slot.router.stats;
  const int64_t experts = stage_.config().moe_num_experts, units = slot.tokens.units.offsets.dim(0) - 1;
  const bool drops = may_drop(stage_.config());
  for (size_t l = 0; l < output.tokens_per_expert.size(); ++l) {
    const auto layer = static_cast<int>(l);
    const auto* counts = stats.layer(stats.counts, layer, units).as<int64_t>();
    const auto* kept = stats.layer(stats.kept_counts, layer, units).as<int64_t>();
    for (int64_t i = 0; i < units * experts; ++i) {
      const auto e = static_cast<size_t>(i % experts);
      output.tokens_per_expert[l][e] += counts[i];
      if (drops) output.drops_per_expert[l][e] += counts[i] - kept[i];
    }
  }
}

void Executor::finish_backward(Slot& slot, StepOutput& output) {
  const int64_t losses = 1 + stage_.config().num_nextn_predict_layers;
  for (int64_t i = 0; i < losses; ++i) {
    const auto n = static_cast<size_t>(i);
    output.differentiated[n] += slot.losses.sum[n] * slot.losses.scale[n];
    if (options_.loss_average != LossAverage::kMicroBatches) {
      output.loss_sum[n] += slot.losses.sum[n];
      output.loss_count[n] = totals_.targets[n];
    } else if (slot.losses.scale[n] > 0) {
      const double factor = i == 0 ? 1.0 : stage_.config().mtp_loss_scaling_factor / static_cast<double>(losses - 1);
      output.loss_sum[n] +=
          slot.losses.sum[n] * (slot.losses.scale[n] / factor) * static_cast<double>(totals_.micro_batches);
      output.loss_count[n] = totals_.micro_batches;
    }
  }
}

void Executor::start_forward(Slot& slot, int32_t index, const MicroBatch& b) {
  slot.micro_batch = index;
  set_tokens(slot, &b, true);
  loss_scales(b, slot);
}

void Executor::run(const Schedule& schedule, std::span<const MicroBatch> micro_batches, StepOutput& output) {
  CHECK(options_.train && schedule.split == options_.split && schedule.slots <= options_.slots);
  CHECK(schedule.micro_batches == static_cast<int64_t>(micro_batches.size()));
  begin_output(micro_batches, output);
  slot_of_.assign(micro_batches.size(), -1);
  for (auto& slot : slots_) slot->micro_batch = -1;
  RouterLossValues values;
  if (is_global()) {
    CHECK(schedule.slots == schedule.micro_batches, "routing_unit global wants a slot a micro-batch");
    for (size_t m = 0; m < micro_batches.size(); ++m)
      start_forward(*slots_[m], static_cast<int32_t>(m), micro_batches[m]);
    forward_together(schedule.micro_batches);
    for (size_t m = 0; m < micro_batches.size(); ++m) finish_forward(*slots_[m], output);
    losses_together(values);
  }
  for (const Action& a : schedule.actions) {
    int64_t& index = slot_of_[static_cast<size_t>(a.micro_batch)];
    if (is_global())
      index = a.micro_batch;
    else if (a.kind == ActionKind::kForward)
      for (index = 0; slots_[static_cast<size_t>(index)]->micro_batch >= 0;) ++index;
    Slot& slot = *slots_[static_cast<size_t>(index)];
    switch (a.kind) {
      case ActionKind::kForward:
        if (is_global()) break;  // done above, all of them together
        start_forward(slot, a.micro_batch, micro_batches[static_cast<size_t>(a.micro_batch)]);
        forward(slot);
        finish_forward(slot, output);
        router_losses(slot, values);
        break;
      case ActionKind::kBackward:
        backward(slot);
        break;
      case ActionKind::kBackwardInput:
        backward_input(slot);
        break;
      case ActionKind::kBackwardWeight:
        backward_weight(slot);
        break;
    }
    if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight) {
      finish_backward(slot, output);
      slot.micro_batch = -1;
    }
  }
  store_.settle_gradients(*ops().pool);
  output.aux_loss = values.balance;
  output.z_loss = values.z;
}

void Executor::evaluate(const MicroBatch& b, StepOutput& output) {
  Slot& slot = *slots_[0];
  set_tokens(slot, &b, false);
  slot.losses = {};
  forward_only(slot);
  output.tokens += b.tokens();
  output.loss_sum[0] += slot.losses.sum[0];
  output.loss_count[0] += b.valid_targets();
}

}  // namespace concerto
