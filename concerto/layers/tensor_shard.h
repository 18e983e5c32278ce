// A rank's part in tensor and sequence parallel layers (token_exchange.h), and the exchanges with the rounding that
// belongs to them. One rank: nothing is exchanged, copied or taken.
#pragma once

#include "concerto/layers/segment.h"
#include "concerto/layers/token_exchange.h"

namespace concerto {

struct TensorShard {
  const TokenExchange* exchange = nullptr;  // null: one rank
  int size = 1, rank = 0;

  Part own(int64_t tokens) const { return part_of(tokens, size, rank); }
  // Of any micro-batch of at most so many: what memory is planned for.
  int64_t most_own(int64_t tokens) const { return (tokens + size - 1) / size; }
};

// The rows of all ranks [T, C] of own rows [T_r, C], in `arena`; on one rank `own` itself.
View gather_tokens(const SegmentContext& ctx, const TensorShard& shard, View own, Arena& arena);

// Own rows [T_r, C] (compute or stat) of the sum over ranks of `partial` [T, C] (stat) + `bias` [C] (stat, or null),
// rounded once; `accumulate`: added to what is there. Not on one rank.
struct TokenSum {
  View partial, bias, own;
  bool accumulate = false;
};
void sum_tokens(const SegmentContext& ctx, const TensorShard& shard, const TokenSum& args);

// Shows an observer all rows of own ones; every rank of the group has an observer, or none. `name` is a function.
template <class Name>
void observe_tokens(const SegmentContext& ctx, const TensorShard& shard, Name name, View own) {
  if (!ctx.observer && !(shard.exchange && ctx.ops.dry_run)) return;
  ArenaScope scope(*ctx.ops.scratch);
  const View all = gather_tokens(ctx, shard, own, *ctx.ops.scratch);
  if (ctx.observer) ctx.observer->record(name(), all);
}

}  // namespace concerto
