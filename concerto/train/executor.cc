#include "concerto/train/executor.h"

#include <algorithm>
#include <cstring>

#include "concerto/tensor/first_touch.h"
#include "concerto/train/executor_state.h"

namespace concerto {
namespace {

View ints(const std::vector<int32_t>& v, Shape shape) {
  return View(const_cast<int32_t*>(v.data()), shape, DType::kI32);
}

}  // namespace

Executor::Executor(const Stage& stage, ParameterStore& store, const Backend& backend, ThreadPool& pool,
                   const ExecutorOptions& options)
    : Executor(std::vector<const Stage*>{&stage}, store, backend, pool, options) {}

Executor::Executor(std::vector<const Stage*> stages, ParameterStore& store, const Backend& backend, ThreadPool& pool,
                   const ExecutorOptions& options)
    : stages_(std::move(stages)), store_(store), options_(options), arenas_(std::make_unique<Arenas>()) {
  CHECK(!stages_.empty() && options.slots.size() == stages_.size());
  CHECK(options.max_tokens > 0);
  CHECK(config().num_nextn_predict_layers <= kMostMtpLayers);
  check_backend(backend, store.compute());
  if (options_.max_docs == 0) options_.max_docs = options_.max_tokens;
  if (options_.usual_docs == 0) options_.usual_docs = options_.max_docs;
  context_ = {.backend = &backend, .pool = &pool, .scratch = &arenas_->scratch};
  if (options_.max_rows == 0) options_.max_rows = options_.max_tokens;
  if (is_global() && options_.groups.dp) data_rows_ = std::make_unique<DataRowExchange>(*options_.groups.dp);
  for (size_t c = 0; c < stages_.size(); ++c) {
    const Stage& stage = *stages_[c];
    CHECK((options.routing.unit == RoutingUnit::kGlobal) == (stage.routing_unit() == RoutingUnit::kGlobal));
    chunks_.push_back(
        std::make_unique<Chunk>(stage, RouterLosses(config(), options.routing, stage.first_moe_layer(),
                                                    static_cast<int64_t>(stage.moe_layers().size()), max_units())));
    make_slots(*chunks_.back(), options.slots[c]);
  }
  plan_memory();
  take_memory();
}

Executor::~Executor() = default;

void Executor::make_slots(Chunk& chunk, int64_t count) {
  CHECK(count > 0);
  const RouterStatsSize size{.layers = chunk.layers(),
                             .units = max_units(),
                             .stat = store_.stat(),
                             .balance = chunk.losses.balance() && options_.train,
                             .z = chunk.losses.z() && options_.train};
  for (int64_t i = 0; i < count; ++i) {
    auto slot = std::make_unique<Slot>();
    slot->units.resize(chunk.stage.units().size());
    for (size_t u = 0; u < slot->units.size(); ++u)
      slot->units[u].segments.resize(chunk.stage.units()[u].segments.size());
    slot->router = RouterMemory(config(), size);
    slot->router.stats.first_choices = chunk.losses.first_choices();
    const auto units = static_cast<size_t>(max_units());
    slot->whole = {0, 0};
    slot->room.resize(units);
    slot->in_unit.resize(units);
    slot->unit_weights.resize(units);
    chunk.slots.push_back(std::move(slot));
  }
  if (!is_global() || !options_.train) return;
  chunk.together = std::make_unique<Together>();
  chunk.together->router = RouterMemory(config(), size);
  chunk.together->parts.resize(chunk.slots.size());
}

namespace {

RouterPool take_pool(Arena& arena, const RouterLosses& losses, int64_t units, int64_t experts, DType stat) {
  RouterPool pool;
  pool.counts = arena.take({units, experts}, DType::kI64);
  pool.sums = arena.take({units, experts}, DType::kF64);
  if (losses.pool_is_trained()) pool.dprob = arena.take({units, experts}, stat);
  return pool;
}

}  // namespace

// Slots of a chunk are alike, and the dry run is of the first.
void Executor::note_growth() {
  Arenas& a = *arenas_;
  for (const auto& chunk : chunks_)
    for (const auto& slot : chunk->slots) {
      growth_.emplace_back(&slot->keep, chunk->slots[0]->keep.growth());
      growth_.emplace_back(&slot->backward, chunk->slots[0]->backward.growth());
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
  for (auto& chunk : chunks_) dry_run(*chunk, docs);
}

void Executor::dry_run(Chunk& chunk, int64_t docs) {
  Slot& slot = *chunk.slots[0];
  set_tokens(slot, nullptr, false, docs);
  forward_only(chunk, slot);
  if (!options_.train) return;
  slot.keep.reset();
  if (is_global()) {
    for (auto& each : chunk.slots) set_tokens(*each, nullptr, true, docs);
    for (auto& each : chunk.slots) {
      each->keep.reset();
      each->input = chunk.stage.span().embedding ? View{} : take_input(*each);
    }
    forward_together(chunk, static_cast<int64_t>(chunk.slots.size()));
  } else {
    set_tokens(slot, nullptr, true, docs);
    slot.input = chunk.stage.span().embedding ? View{} : take_input(slot);
    forward(chunk, slot);
  }
  slot.gradient_in = chunk.stage.span().head
                         ? View{}
                         : View(nullptr, {slot.tokens.local.count, config().hidden_size}, store_.compute());
  if (options_.split) {
    backward_input(chunk, slot);
    backward_weight(chunk, slot);
  } else {
    backward(chunk, slot);
  }
}

// Bytes of the dry runs so far, without the router's.
MemoryPlan Executor::counted() const {
  MemoryPlan plan;
  for (const auto& chunk : chunks_) {
    const auto slots = static_cast<int64_t>(chunk->slots.size());
    plan.keep += slots * chunk->slots[0]->keep.high_water();
    plan.backward += slots * chunk->slots[0]->backward.high_water();
  }
  for (const Arena& arena : arenas_->gradients) plan.backward += arena.high_water();
  plan.temporary = arenas_->temporary.high_water();
  plan.scratch = std::max(arenas_->scratch.high_water(), options_.scratch);
  return plan;
}

// Attention pads every document to whole tiles, so a micro-batch of one-token documents wants scratch many times that
// of a usual one; and all tokens of all ranks may choose the experts of one. There is room for both, but room that is
// never touched takes no memory: the total counts usual documents and usual loads.
void Executor::plan_memory() {
  const Context real = context_;
  context_.dry_run = true;
  usual_load_ = true;
  dry_run(options_.usual_docs);
  usual_load_ = false;
  note_growth();
  const MemoryPlan usual = counted();
  dry_run(options_.max_docs);
  context_ = real;
  // Kernels may round their scratch differently for smaller micro-batches.
  constexpr int64_t kScratchSlack = 1 << 20;
  memory_ = counted();
  memory_.scratch += kScratchSlack;
  memory_.total = usual.keep + usual.backward + usual.temporary + usual.scratch;
  for (const auto& chunk : chunks_) {
    memory_.total += static_cast<int64_t>(chunk->slots.size()) * chunk->slots[0]->router.bytes();
    if (chunk->together) memory_.total += chunk->together->router.bytes();
  }
}

void Executor::take_memory() {
  const int64_t most_rows = (options_.max_tokens + options_.groups.tp - 1) / options_.groups.tp;
  const DType compute = store_.compute();
  for (auto& chunk : chunks_) {
    const int64_t keep = chunk->slots[0]->keep.high_water(), split = chunk->slots[0]->backward.high_water();
    const auto edges = [&](Arena& arena, Slot& slot) {
      if (!options_.train) return;
      slot.gradient_in = chunk->stage.span().head ? View{} : arena.take({most_rows, config().hidden_size}, compute);
      slot.gradient_out =
          chunk->stage.span().embedding ? View{} : arena.take({most_rows, config().hidden_size}, compute);
      if (chunk->losses.pools())
        slot.pool = take_pool(arena, chunk->losses, max_units(), config().moe_num_experts, store_.stat());
    };
    for (auto& slot : chunk->slots) {
      slot->keep = Arena(keep);
      if (options_.train && options_.split) slot->backward = Arena(split);
      Arena counting;
      edges(counting, *slot);
      slot->edges = Arena(counting.high_water());
      edges(slot->edges, *slot);
      memory_.total += slot->edges.capacity();
    }
    if (!chunk->together || !chunk->losses.pools()) continue;
    Arena counting;
    take_pool(counting, chunk->losses, 1, config().moe_num_experts, store_.stat());
    chunk->together->pool_memory = Arena(counting.high_water());
    chunk->together->pool =
        take_pool(chunk->together->pool_memory, chunk->losses, 1, config().moe_num_experts, store_.stat());
    memory_.total += chunk->together->pool_memory.capacity();
  }
  Arenas& a = *arenas_;
  for (Arena& g : a.gradients) g = Arena(g.high_water());
  a.temporary = Arena(memory_.temporary);
  a.scratch = Arena(memory_.scratch);
  if (!options_.poison) return;
  for (auto& chunk : chunks_)
    for (auto& slot : chunk->slots) slot->keep.poison(), slot->backward.poison();
  for (Arena* arena : {&a.gradients[0], &a.gradients[1], &a.gradients[2], &a.temporary, &a.scratch}) arena->poison();
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
  const ModelConfig& c = config();
  for (int64_t u = 0; u < count && b; ++u) {
    const auto i = static_cast<size_t>(u);
    slot.in_unit[i] = sequences ? b->row_offsets[i + 1] - b->row_offsets[i] : slot.tokens.count;
    slot.room[i] = expert_room(c, training, slot.in_unit[i]);
  }
}

void Executor::set_tokens(Slot& slot, const MicroBatch* b, bool training, int64_t planned_docs) {
  const int64_t tokens = b ? b->tokens() : options_.max_tokens;
  const int64_t depth = config().num_nextn_predict_layers;
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
  const ExecutorGroups& g = options_.groups;
  t.local =
      b ? part_of(tokens, g.tp, g.tp_rank) : Part{0, (tokens + g.tp - 1) / g.tp};  // planned: the most there can be
  t.ids = view(b ? b->token_ids : nothing, {tokens});
  t.positions = view(b ? b->positions : nothing, {tokens});
  if (!b || !b->targets.empty() || tokens == 0) t.targets = view(b ? b->targets : nothing, {tokens});
  const int64_t offsets = b ? static_cast<int64_t>(b->doc_offsets.size()) : planned_docs + 1;
  t.doc_offsets = view(b ? b->doc_offsets : nothing, {offsets});
  if (depth > 0 && (!b || !b->mtp_token_ids.empty() || tokens == 0)) {
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
          .freeze_router = options_.routing.freeze_router,
          .usual_load = usual_load_};
}

void Executor::begin_output(std::span<const MicroBatch> micro_batches, StepOutput& output) {
  totals_ = {};
  output.loss_sum = {};
  output.loss_count = {};
  output.differentiated = {};
  const int64_t moe_layers = config().num_moe_layers();
  output.router.clear(moe_layers);
  output.tokens = 0;
  for (auto* counts : {&output.tokens_per_expert, &output.drops_per_expert}) {
    counts->resize(static_cast<size_t>(moe_layers));
    for (auto& layer : *counts) layer.assign(static_cast<size_t>(config().moe_num_experts), 0);
  }
  const int64_t depth = config().num_nextn_predict_layers;
  for (const MicroBatch& b : micro_batches) {
    totals_.tokens += b.tokens();
    totals_.micro_batches += b.rows() > 0;
    totals_.targets[0] += b.valid_targets();
    for (int64_t m = 0; m < depth && !b.mtp_targets.empty(); ++m)
      for (int64_t t = 0; t < b.tokens(); ++t)
        totals_.targets[static_cast<size_t>(m + 1)] +=
            b.mtp_targets[static_cast<size_t>(m * b.tokens() + t)] != kIgnoreIndex;
  }
  if (options_.groups.dp) sum_totals();
  for (size_t n = 0; n < output.loss_count.size(); ++n)
    output.loss_count[n] = options_.loss_average != LossAverage::kMicroBatches ? totals_.targets[n]
                           : totals_.targets[n] > 0                            ? totals_.micro_batches
                                                                               : 0;
}

void Executor::sum_totals() {
  std::array<int64_t, kMaxLosses + 2> counts{};
  std::copy(totals_.targets.begin(), totals_.targets.end(), counts.begin());
  counts[kMaxLosses] = totals_.tokens;
  counts[kMaxLosses + 1] = totals_.micro_batches;
  options_.groups.dp->all_reduce(View(counts.data(), {static_cast<int64_t>(counts.size())}, DType::kI64));
  std::copy_n(counts.begin(), totals_.targets.size(), totals_.targets.begin());
  totals_.tokens = counts[kMaxLosses];
  totals_.micro_batches = counts[kMaxLosses + 1];
}

// What each loss of this micro-batch weighs in the step: by valid tokens, one mean among the micro-batches' means, or
// over a constant. A micro-batch (or a step) without a valid target weighs nothing. Router losses weigh by tokens.
void Executor::loss_scales(const MicroBatch& b, Slot& slot) const {
  const int64_t depth = config().num_nextn_predict_layers;
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
    slot.losses.scale[m + 1] = config().mtp_loss_scaling_factor / static_cast<double>(depth) *
                               weight(valid, totals_.targets[static_cast<size_t>(m + 1)]);
  }
  const double all = options_.loss_average == LossAverage::kMicroBatches
                         ? micro_batches * static_cast<double>(b.tokens())
                         : static_cast<double>(totals_.tokens);
  for (size_t u = 0; u < slot.in_unit.size(); ++u)
    slot.unit_weights[u] = slot.in_unit[u] > 0 ? static_cast<double>(slot.in_unit[u]) / all : 0.0;
}

}  // namespace concerto
