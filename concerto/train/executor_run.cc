// The one switch over actions, and what passes between pipeline stages.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "concerto/train/executor_state.h"

namespace concerto {
// Who holds the neighbours of each virtual stage.
void Executor::place_chunks(const PipelineSchedule& s) {
  const int rank = options_.groups.pp_rank;
  CHECK(s.chunks == static_cast<int>(chunks_.size()) && (s.pp == 1) == options_.groups.pp.empty());
  for (int c = 0; c < s.chunks; ++c) {
    Chunk& chunk = *chunks_[static_cast<size_t>(c)];
    const int v = s.virtual_stage(rank, c);
    const auto neighbour = [&](int at, int& its_rank, Chunk*& here) {
      its_rank = at < 0 || at >= s.stages() ? -1 : s.rank_of(at);
      here = its_rank == rank ? chunks_[static_cast<size_t>(s.chunk_of(at))].get() : nullptr;
    };
    neighbour(v - 1, chunk.prev_rank, chunk.prev);
    neighbour(v + 1, chunk.next_rank, chunk.next);
    chunk.number = c;
    if (!chunk.last()) chunk.next_number = s.chunk_of(v + 1);
    CHECK(chunk.first() == chunk.stage.span().embedding && chunk.last() == chunk.stage.span().head,
          "virtual stage {} of {}", v, s.stages());
  }
}

void Executor::run(const PipelineSchedule& schedule, std::span<const MicroBatch> micro_batches, StepOutput& output) {
  CHECK(options_.train && schedule.split == options_.split && schedule.together == is_global());
  CHECK(schedule.micro_batches == static_cast<int64_t>(micro_batches.size()));
  place_chunks(schedule);
  begin_output(micro_batches, output);
  for (auto& chunk : chunks_) {
    chunk->slot_of.assign(micro_batches.size(), -1);
    chunk->backwards_left = schedule.micro_batches;
    for (auto& slot : chunk->slots) slot->micro_batch = -1;
    chunk->left.resize(chunk->slots.size());
    std::iota(chunk->left.begin(), chunk->left.end(), 0);
    chunk->forwards_left = schedule.micro_batches;
    if (chunk->together && chunk->losses.pools()) clear_router_pool(chunk->together->pool);
  }
  for (const Action& a : schedule.ranks[static_cast<size_t>(options_.groups.pp_rank)]) {
    play(schedule, a, micro_batches, output);
    if (played_) played_->push_back(a);
  }
  for (auto& chunk : chunks_)
    for (auto& slot : chunk->slots)
      for (CommTicket& sent : slot->sent_backward) sent.wait();
  store_.settle_gradients(*ops().pool);
}

namespace {

const char* doing(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kBackwardInput:
      return "backward of inputs";
    case ActionKind::kBackwardWeight:
      return "backward of weights";
    case ActionKind::kSendForward:
      return "send activations";
    case ActionKind::kRecvForward:
      return "receive activations";
    case ActionKind::kSendBackward:
      return "send gradients";
    case ActionKind::kRecvBackward:
      return "receive gradients";
  }
  return nullptr;
}

}  // namespace

void Executor::play(const PipelineSchedule& schedule, const Action& a, std::span<const MicroBatch> micro_batches,
                    StepOutput& output) {
  Chunk& chunk = *chunks_[static_cast<size_t>(a.chunk)];
  const MicroBatch& b = micro_batches[static_cast<size_t>(a.micro_batch)];
  const CommScope scope(doing(a.kind), a.micro_batch);
  switch (a.kind) {
    case ActionKind::kRecvForward:
      receive_forward(chunk, claim(chunk, a.micro_batch, b));
      break;
    case ActionKind::kForward:
      bring_input(chunk, a.micro_batch, b);
      if (schedule.together) {
        // Together with the step's last.
        if (--chunk.forwards_left > 0) break;
        forward_together(chunk, schedule.micro_batches);
        for (int64_t m = 0; m < schedule.micro_batches; ++m)
          finish_forward(chunk, *chunk.slots[static_cast<size_t>(m)], output);
        losses_together(chunk, output.router);
      } else {
        Slot& slot = slot_of(chunk, a.micro_batch);
        forward(chunk, slot);
        finish_forward(chunk, slot, output);
        router_losses(chunk, slot, output.router);
      }
      break;
    case ActionKind::kSendForward:
      send_forward(chunk, slot_of(chunk, a.micro_batch));
      break;
    case ActionKind::kRecvBackward:
      receive_backward(chunk, slot_of(chunk, a.micro_batch));
      break;
    case ActionKind::kBackward:
      backward(chunk, slot_of(chunk, a.micro_batch));
      release(chunk, slot_of(chunk, a.micro_batch), output);
      break;
    case ActionKind::kBackwardInput:
      backward_input(chunk, slot_of(chunk, a.micro_batch));
      break;
    case ActionKind::kBackwardWeight:
      backward_weight(chunk, slot_of(chunk, a.micro_batch));
      release(chunk, slot_of(chunk, a.micro_batch), output);
      break;
    case ActionKind::kSendBackward:
      send_backward(chunk, *chunk.slots[static_cast<size_t>(chunk.slot_of[static_cast<size_t>(a.micro_batch)])]);
      break;
  }
}

// A free slot for a micro-batch. What an earlier one in it has sent back must have been received by now.
Executor::Slot& Executor::claim(Chunk& chunk, int32_t micro_batch, const MicroBatch& b) {
  int64_t& index = chunk.slot_of[static_cast<size_t>(micro_batch)];
  CHECK(index < 0, "micro-batch {} begins twice", micro_batch);
  if (is_global()) {
    index = micro_batch;
  } else {
    CHECK(!chunk.left.empty(), "no slot is left for micro-batch {}", micro_batch);
    index = chunk.left.front();
    chunk.left.erase(chunk.left.begin());
  }
  Slot& slot = *chunk.slots.at(static_cast<size_t>(index));
  for (CommTicket& sent : slot.sent_backward) sent.wait();
  slot.micro_batch = micro_batch;
  set_tokens(slot, &b, true);
  loss_scales(b, slot);
  slot.keep.reset();
  slot.input = {};
  if (chunk.losses.pools()) clear_router_pool(slot.pool);
  return slot;
}

Executor::Slot& Executor::slot_of(Chunk& chunk, int32_t micro_batch) {
  const int64_t index = chunk.slot_of[static_cast<size_t>(micro_batch)];
  CHECK(index >= 0 && chunk.slots[static_cast<size_t>(index)]->micro_batch == micro_batch,
        "micro-batch {} is not in flight", micro_batch);
  return *chunk.slots[static_cast<size_t>(index)];
}

// The units of a micro-batch, or the one of the step.
RouterPool Executor::pool_of(const Chunk& chunk, const Slot& slot) const {
  return is_global() ? chunk.together->pool : slot.pool.rows(slot.tokens.units.offsets.dim(0) - 1);
}

View Executor::take_input(Slot& slot) {
  return slot.keep.take({slot.tokens.local.count, config().hidden_size}, store_.compute());
}

// Before a forward: a stage that receives has its slot already; another takes one, and what the stage before has made.
void Executor::bring_input(Chunk& chunk, int32_t micro_batch, const MicroBatch& b) {
  if (!chunk.first() && !chunk.prev) return;
  Slot& slot = claim(chunk, micro_batch, b);
  if (!chunk.prev) return;
  Slot& before = slot_of(*chunk.prev, micro_batch);
  slot.input = before.acts.hidden;
  if (!chunk.losses.pools()) return;
  const RouterPool from = pool_of(*chunk.prev, before), to = pool_of(chunk, slot);
  copy_view(from.counts, to.counts);
  copy_view(from.sums, to.sums);
}

void Executor::receive_forward(Chunk& chunk, Slot& slot) {
  Communicator& pp = *options_.groups.pp[static_cast<size_t>(chunk.number)].forward;
  slot.input = take_input(slot);
  CommTicket hidden = pp.start_recv(slot.input, chunk.prev_rank);
  if (slot.micro_batch >= 0 && chunk.losses.pools()) {
    const RouterPool pool = pool_of(chunk, slot);
    pp.start_recv(pool.counts, chunk.prev_rank).wait();
    pp.start_recv(pool.sums, chunk.prev_rank).wait();
  }
  hidden.wait();
}

void Executor::send_forward(Chunk& chunk, Slot& slot) {
  Communicator& pp = *options_.groups.pp[static_cast<size_t>(chunk.next_number)].forward;
  slot.sent_forward[0] = pp.start_send(slot.acts.hidden, chunk.next_rank);
  if (!chunk.losses.pools()) return;
  const RouterPool pool = pool_of(chunk, slot);
  slot.sent_forward[1] = pp.start_send(pool.counts, chunk.next_rank);
  slot.sent_forward[2] = pp.start_send(pool.sums, chunk.next_rank);
}

void Executor::receive_backward(Chunk& chunk, Slot& slot) {
  Communicator& pp = *options_.groups.pp[static_cast<size_t>(chunk.next_number)].backward;
  CommTicket hidden = pp.start_recv(first_rows(slot.gradient_in, slot.tokens.local.count), chunk.next_rank);
  if (chunk.losses.pool_is_trained()) {
    const RouterPool pool = pool_of(chunk, slot);
    pp.start_recv(pool.dprob, chunk.next_rank).wait();
    chunk.losses.spread_pool(pool, slot.router.stats);
  }
  hidden.wait();
}

void Executor::send_backward(Chunk& chunk, Slot& slot) {
  Communicator& pp = *options_.groups.pp[static_cast<size_t>(chunk.number)].backward;
  slot.sent_backward[0] = pp.start_send(first_rows(slot.gradient_out, slot.tokens.local.count), chunk.prev_rank);
  if (!chunk.losses.pool_is_trained()) return;
  // The step's one pool is written again by the next micro-batch, while this one's is on its way: a copy goes.
  const View dprob = slot.pool.rows(pool_of(chunk, slot).counts.dim(0)).dprob;
  if (is_global()) copy_view(chunk.together->pool.dprob, dprob);
  slot.sent_backward[1] = pp.start_send(dprob, chunk.prev_rank);
}

// After the first unit's backward: the gradient of what came in, to the stage before.
void Executor::hand_gradient_on(Chunk& chunk, Slot& slot, const Acts& grads) {
  for (CommTicket& sent : slot.sent_forward)
    sent.wait();  // backward here comes after the next stage's, so it is received
  if (context_.dry_run || chunk.first()) return;
  const View to =
      chunk.prev ? slot_of(*chunk.prev, static_cast<int32_t>(slot.micro_batch)).gradient_in : slot.gradient_out;
  copy_view(grads.hidden, first_rows(to, slot.tokens.local.count));
  if (!chunk.prev || !chunk.losses.pool_is_trained()) return;
  Slot& before = slot_of(*chunk.prev, static_cast<int32_t>(slot.micro_batch));
  const RouterPool from = pool_of(chunk, slot), pool = pool_of(*chunk.prev, before);
  copy_view(from.dprob, pool.dprob);
  chunk.prev->losses.spread_pool(pool, before.router.stats);
}

// A unit's weight gradients are made. Units of a layer stand side by side.
void Executor::weights_done(Chunk& chunk, size_t unit) {
  if (context_.dry_run || !options_.groups.sync) return;
  const auto layer_of = [&](size_t u) {
    const int layer = chunk.stage.units()[u].segments[0]->spec().layer;
    return layer < config().num_hidden_layers ? layer : kOutsideLayers;
  };
  const bool last = chunk.backwards_left == 1;
  const int layer = layer_of(unit);
  if (layer != kOutsideLayers && (unit == 0 || layer_of(unit - 1) != layer))
    options_.groups.sync->layer_done(context_, layer, last);
  if (unit == 0) options_.groups.sync->layer_done(context_, kOutsideLayers, last);
}

void Executor::release(Chunk& chunk, Slot& slot, StepOutput& output) {
  finish_backward(chunk, slot, output);
  --chunk.backwards_left;
  if (!is_global()) chunk.left.push_back(chunk.slot_of[static_cast<size_t>(slot.micro_batch)]);
  slot.micro_batch = -1;
}

void Executor::evaluate(const PipelineSchedule& schedule, const MicroBatch& b, StepOutput& output) {
  place_chunks(schedule);
  for (auto& chunk : chunks_) {
    Slot& slot = *chunk->slots[0];
    slot.micro_batch = -1;
    set_tokens(slot, &b, false);
    slot.losses = {};
    forward_only(*chunk, slot);
    if (!chunk->last() && !chunk->next)
      options_.groups.pp[static_cast<size_t>(chunk->next_number)].forward->send(slot.acts.hidden, chunk->next_rank);
    if (!chunk->stage.span().head) continue;
    output.loss_sum[0] += slot.losses.sum[0];
    output.loss_count[0] += b.valid_targets();
    output.tokens += b.tokens();
  }
}

void Executor::evaluate(const MicroBatch& b, StepOutput& output) {
  static const PipelineSchedule alone = build_pipeline({});
  evaluate(alone, b, output);
}

}  // namespace concerto
