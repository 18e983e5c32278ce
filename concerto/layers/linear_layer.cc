#include "concerto/layers/linear_layer.h"

namespace concerto {

EmbeddingLayer::EmbeddingLayer(const ParameterStore& parameters, const ModelConfig& config, const TensorShard& s)
    : store(&parameters),
      table(parameters.ref("model.embed_tokens.weight")),
      begin(parameters.specs()[static_cast<size_t>(table.first)].cut_begin),
      skip_id(config.pad_token_id),
      shard(s) {}

void EmbeddingLayer::forward(const SegmentContext& ctx, View ids, View y) const {
  const View rows = store->table(table);
  if (!shard.exchange) return embedding_forward(ctx.ops, {.ids = ids, .table = rows, .y = y});
  ArenaScope scope(*ctx.ops.scratch);
  const Shape all{ctx.tokens->count, rows.cols()};
  const View partial = ctx.ops.scratch->take(all, store->stat());
  const View found = rows.dtype == store->stat() ? partial : ctx.ops.scratch->take(all, rows.dtype);
  embedding_forward(ctx.ops, {.ids = ids, .table = rows, .y = found, .begin = begin, .slice = true});
  if (rows.dtype != store->stat()) cast(ctx.ops, {.in = found, .out = partial});
  sum_tokens(ctx, shard, {.partial = partial, .bias = {}, .own = y});
}

void EmbeddingLayer::backward_weight(const SegmentContext& ctx, View ids, View dy) const {
  embedding_backward_weight(ctx.ops, {.ids = ids,
                                      .dy = dy,
                                      .skip_id = skip_id,
                                      .dtable = store->grad(table),
                                      .begin = shard.exchange ? begin : 0,
                                      .slice = shard.exchange != nullptr});
}

}  // namespace concerto
