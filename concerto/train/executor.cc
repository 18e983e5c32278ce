#include "concerto/train/executor.h"

#include <algorithm>
#include <cstring>

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
  RouterStats router;
  Buffer router_memory;
  std::array<bool, kMaxLosses> has_targets{};
  double aux_weight = 0;
  std::vector<UnitSaved> units;
  Arena keep, backward;  // `backward` only when B and W are apart
  Acts grads;
};

struct Executor::Arenas {
  Arena gradients[2];  // recycled: unit i works in gradients[i % 2]
  Arena temporary, scratch;
};

Executor::Executor(const Stage& stage, ParameterStore& store, const Backend& backend, ThreadPool& pool,
                   const ExecutorOptions& options)
    : stage_(stage), store_(store), options_(options), arenas_(std::make_unique<Arenas>()) {
  CHECK(options.max_tokens > 0 && options.slots > 0);
  CHECK(stage.config().num_nextn_predict_layers <= kMostMtpLayers);
  check_backend(backend, store.compute());
  if (options_.max_docs == 0) options_.max_docs = options_.max_tokens;
  if (options_.usual_docs == 0) options_.usual_docs = options_.max_docs;
  context_ = {.backend = &backend, .pool = &pool, .scratch = &arenas_->scratch};
  const ModelConfig& c = stage.config();
  const int64_t experts = c.moe_num_experts,
                rows = std::max<int64_t>(1, static_cast<int64_t>(stage.moe_layers().size()));
  for (int64_t i = 0; i < options_.slots; ++i) {
    auto slot = std::make_unique<Slot>();
    slot->units.resize(stage.units().size());
    for (size_t u = 0; u < slot->units.size(); ++u) slot->units[u].segments.resize(stage.units()[u].segments.size());
    slot->router_memory = Buffer((3 * rows + 1) * experts * 8);
    char* memory = slot->router_memory.data();
    slot->router.counts = View(memory, {rows, experts}, DType::kI64);
    slot->router.bare_counts = View(memory + rows * experts * 8, {rows, experts}, DType::kI64);
    slot->router.prob_sums = View(memory + 2 * rows * experts * 8, {rows, experts}, DType::kF64);
    if (c.output_router_logits && !stage.moe_layers().empty())
      slot->router.aux_dprob = View(memory + 3 * rows * experts * 8, {experts}, store.stat());
    slots_.push_back(std::move(slot));
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
    for (Arena* arena : {&a.gradients[0], &a.gradients[1], &a.temporary, &a.scratch}) arena->poison();
  }
}

Executor::~Executor() = default;

// Runs one micro-batch of the largest size on counting arenas: forward only, and (training) forward and backward.
void Executor::dry_run(Slot& slot, int64_t docs) {
  set_tokens(slot, nullptr, docs);
  forward_only(slot);
  if (!options_.train) return;
  forward(slot);
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
  dry_run(slot, options_.usual_docs);
  const int64_t usual_scratch = a.scratch.high_water();
  dry_run(slot, options_.max_docs);
  context_ = real;
  // Kernels may round their scratch differently for smaller micro-batches.
  constexpr int64_t kScratchSlack = 1 << 20;
  memory_.keep = slot.keep.high_water();
  memory_.backward =
      options_.split ? slot.backward.high_water() : a.gradients[0].high_water() + a.gradients[1].high_water();
  memory_.temporary = a.temporary.high_water();
  memory_.scratch = std::max(a.scratch.high_water(), options_.scratch) + kScratchSlack;
  memory_.total = options_.slots * memory_.keep + (options_.split ? options_.slots : 1) * memory_.backward +
                  memory_.temporary + std::max(usual_scratch, options_.scratch);
  if (options_.split) memory_.total += a.gradients[0].high_water() + a.gradients[1].high_water();
}

void Executor::set_tokens(Slot& slot, const MicroBatch* b, int64_t planned_docs) {
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
  t.ids = view(b ? b->token_ids : nothing, {tokens});
  t.positions = view(b ? b->positions : nothing, {tokens});
  if (!b || !b->targets.empty()) t.targets = view(b ? b->targets : nothing, {tokens});
  const int64_t offsets = b ? static_cast<int64_t>(b->doc_offsets.size()) : planned_docs + 1;
  t.doc_offsets = view(b ? b->doc_offsets : nothing, {offsets});
  if (depth > 0 && (!b || !b->mtp_token_ids.empty())) {
    t.mtp_ids = view(b ? b->mtp_token_ids : nothing, {depth, tokens});
    t.mtp_targets = view(b ? b->mtp_targets : nothing, {depth, tokens});
  }
}

SegmentContext Executor::segment_context(Slot& slot, bool training) {
  return {.ops = context_,
          .tokens = &slot.tokens,
          .losses = &slot.losses,
          .router = &slot.router,
          .observer = context_.dry_run ? nullptr : observer_,
          .training = training};
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

// The main model without a backward pass: two arenas take turns.
void Executor::forward_only(Slot& slot) {
  const SegmentContext ctx = segment_context(slot, false);
  Arena* turns[2] = {&slot.keep, &arenas_->gradients[0]};
  Acts acts;
  for (size_t i = 0; i < stage_.units().size(); ++i) {
    const Unit& unit = stage_.units()[i];
    if (unit.training_only) continue;
    Arena* arena = turns[i % 2];
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
    Arena& arena = arenas_->gradients[i % 2];
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
  output.aux_loss = 0;
  output.tokens = 0;
  output.tokens_per_expert.resize(stage_.moe_layers().size());
  for (auto& layer : output.tokens_per_expert) layer.assign(static_cast<size_t>(stage_.config().moe_num_experts), 0);
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

// What each loss of this micro-batch weighs in the step: by valid tokens, or one mean among the micro-batches' means. A
// micro-batch (or a step) without a valid target weighs nothing.
void Executor::loss_scales(const MicroBatch& b, Slot& slot) const {
  const int64_t depth = stage_.config().num_nextn_predict_layers;
  const auto weight = [&](int64_t in_batch, int64_t in_step) {
    if (in_batch == 0) return 0.0;
    if (options_.loss_average == LossAverage::kTokens) return 1.0 / static_cast<double>(in_step);
    return 1.0 / (static_cast<double>(totals_.micro_batches) * static_cast<double>(in_batch));
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
  slot.aux_weight = options_.loss_average == LossAverage::kTokens
                        ? static_cast<double>(b.tokens()) / static_cast<double>(std::max<int64_t>(1, totals_.tokens))
                        : 1.0 / static_cast<double>(totals_.micro_batches);
}

// HF's balance loss of one micro-batch (golden README, surprise 3): E * sum_e f_e P_e, counts of bare top-k and mean
// probabilities pooled over all MoE layers. Its gradient for every token's p[e] is the same E * f_e / (layers *
// tokens).
void Executor::aux_loss(Slot& slot, StepOutput& output) {
  const int64_t layers = static_cast<int64_t>(stage_.moe_layers().size()), experts = stage_.config().moe_num_experts;
  if (layers == 0 || slot.tokens.count == 0) return;
  const int64_t* counts = slot.router.bare_counts.as<int64_t>();
  const double* sums = slot.router.prob_sums.as<double>();
  const double rows = static_cast<double>(layers * slot.tokens.count);
  const View dprob = slot.router.aux_dprob;
  double loss = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t count = 0;
    double sum = 0;
    for (int64_t l = 0; l < layers; ++l) {
      count += counts[l * experts + e];
      sum += sums[l * experts + e];
    }
    const double f = static_cast<double>(count) / rows;
    loss += static_cast<double>(experts) * f * sum / rows;
    if (!dprob) continue;
    const double gradient =
        stage_.config().router_aux_loss_coef * slot.aux_weight * static_cast<double>(experts) * f / rows;
    if (dprob.dtype == DType::kF64)
      dprob.as<double>()[e] = gradient;
    else
      dprob.as<float>()[e] = static_cast<float>(gradient);
  }
  output.aux_loss += slot.aux_weight * loss;
}

void Executor::finish_forward(Slot& slot, StepOutput& output) {
  output.tokens += slot.tokens.count;
  const int64_t experts = stage_.config().moe_num_experts;
  for (size_t l = 0; l < output.tokens_per_expert.size(); ++l) {
    const int64_t* counts = slot.router.counts.as<int64_t>() + static_cast<int64_t>(l) * experts;
    for (int64_t e = 0; e < experts; ++e) output.tokens_per_expert[l][static_cast<size_t>(e)] += counts[e];
  }
  aux_loss(slot, output);
}

void Executor::finish_backward(Slot& slot, StepOutput& output) {
  const int64_t losses = 1 + stage_.config().num_nextn_predict_layers;
  for (int64_t i = 0; i < losses; ++i) {
    const auto n = static_cast<size_t>(i);
    if (options_.loss_average == LossAverage::kTokens) {
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

void Executor::run(const Schedule& schedule, std::span<const MicroBatch> micro_batches, StepOutput& output) {
  CHECK(options_.train && schedule.split == options_.split && schedule.slots <= options_.slots);
  CHECK(schedule.micro_batches == static_cast<int64_t>(micro_batches.size()));
  begin_output(micro_batches, output);
  slot_of_.assign(micro_batches.size(), -1);
  for (auto& slot : slots_) slot->micro_batch = -1;
  for (const Action& a : schedule.actions) {
    int64_t& index = slot_of_[static_cast<size_t>(a.micro_batch)];
    if (a.kind == ActionKind::kForward)
      for (index = 0; slots_[static_cast<size_t>(index)]->micro_batch >= 0;) ++index;
    Slot& slot = *slots_[static_cast<size_t>(index)];
    switch (a.kind) {
      case ActionKind::kForward: {
        const MicroBatch& b = micro_batches[static_cast<size_t>(a.micro_batch)];
        slot.micro_batch = a.micro_batch;
        set_tokens(slot, &b);
        loss_scales(b, slot);
        forward(slot);
        finish_forward(slot, output);
        break;
      }
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
}

void Executor::evaluate(const MicroBatch& b, StepOutput& output) {
  Slot& slot = *slots_[0];
  set_tokens(slot, &b);
  slot.losses = {};
  forward_only(slot);
  output.tokens += b.tokens();
  output.loss_sum[0] += slot.losses.sum[0];
  output.loss_count[0] += b.valid_targets();
}

}  // namespace concerto
