// What the executor's parts share: its records of chunks and slots.
#pragma once

#include <cstring>

#include "concerto/train/executor.h"

namespace concerto {

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
  Acts acts;                       // what the units so far have made
  View input;                      // [T_r, H] what the stage before has made; null in the first
  RouterPool pool;                 // of the layers up to this chunk's end; null views unless the loss pools
  Arena keep, backward;            // `backward` only when B and W are apart
  Arena edges;                     // gradients between stages, and the pool
  View gradient_in, gradient_out;  // [most T_r, H] from the stage after, for the stage before; null at the model's ends
  CommTicket sent_forward[3], sent_backward[2];
};

// routing_unit global: the unit over all micro-batches.
struct Executor::Together {
  RouterMemory router;
  Arena pool_memory;
  RouterPool pool;
  Tokens tokens;
  std::vector<int32_t> offsets{0, 0};
  std::vector<int64_t> room{0}, in_unit{0};
  std::vector<RouteSegment::Part> parts;
};

struct Executor::Chunk {
  Chunk(const Stage& of, RouterLosses router_losses) : stage(of), losses(std::move(router_losses)) {}
  const Stage& stage;
  RouterLosses losses;
  std::vector<std::unique_ptr<Slot>> slots;
  std::vector<int64_t> slot_of;  // [micro-batches of the step] slot index, -1: not in flight
  std::unique_ptr<Together> together;
  std::vector<int64_t> left;                      // free slots, the one left first in front
  int64_t forwards_left = 0, backwards_left = 0;  // of the step
  bool forwarded = false;                         // with `together`: all of them, in this step
  int number = 0, next_number = 0;                // of this chunk on its rank, of the next stage on its
  int prev_rank = -1, next_rank = -1;             // pipeline ranks of the neighbouring stages; -1: the model ends here
  Chunk* prev = nullptr;                          // the neighbours, where they are on this rank
  Chunk* next = nullptr;
  int64_t layers() const { return static_cast<int64_t>(stage.moe_layers().size()); }
  bool first() const { return prev_rank < 0; }
  bool last() const { return next_rank < 0; }
};

// Of a buffer with room for the longest micro-batch, what this one has.
inline View first_rows(View v, int64_t rows) { return v ? v.rows_range(0, rows) : v; }

inline void copy_view(View from, View to) {
  CHECK(from.shape == to.shape && from.dtype == to.dtype, "{} to {}", from.shape.str(), to.shape.str());
  if (from.bytes() > 0) std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
}

struct Executor::Arenas {
  Arena gradients[3];  // recycled: unit i works in gradients[i % unit_reach]
  Arena temporary, scratch;
};

}  // namespace concerto
