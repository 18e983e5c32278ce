#include "concerto/layers/tensor_shard.h"

namespace concerto {

View gather_tokens(const SegmentContext& ctx, const TensorShard& shard, View own, Arena& arena) {
  if (!shard.exchange) return own;
  const View all = arena.take({ctx.tokens->count, own.cols()}, own.dtype);
  shard.exchange->gather(ctx.ops, own, all);
  return all;
}

void sum_tokens(const SegmentContext& ctx, const TensorShard& shard, const TokenSum& args) {
  const View own = args.own;
  const DType stat = args.partial.dtype;
  ArenaScope scope(*ctx.ops.scratch);
  const bool in_place = own.dtype == stat && !args.accumulate && own.dense();
  const View sum = in_place ? own : ctx.ops.scratch->take(own.shape, stat);
  shard.exchange->reduce_scatter(ctx.ops, args.partial, sum);
  if (args.bias) {
    View rows = args.bias;
    rows.shape = own.shape;
    rows.row_stride = 0;
    add(ctx.ops, {.a = sum, .b = rows, .out = sum});
  }
  if (args.accumulate) {
    const View before = ctx.ops.scratch->take(own.shape, stat);
    cast(ctx.ops, {.in = own, .out = before});
    add(ctx.ops, {.a = sum, .b = before, .out = sum});
  }
  if (!in_place) cast(ctx.ops, {.in = sum, .out = own});
}

}  // namespace concerto
