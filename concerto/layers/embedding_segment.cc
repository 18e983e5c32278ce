#include "concerto/layers/embedding_segment.h"

namespace concerto {
namespace {
struct EmbeddingSaved {
  View dy;  // [T, H]
};
}  // namespace

EmbeddingSegment::EmbeddingSegment(const ParameterStore& store, const ModelConfig& config, const TensorShard& shard)
    : Segment({.name = "embedding"}), table_(store, config, shard) {}

void EmbeddingSegment::forward(const SegmentContext& ctx, const Acts&, Acts& out, Saved& saved) const {
  saved.start<EmbeddingSaved>();
  out.hidden = saved.forward->take({ctx.tokens->local.count, table_.table.shape[1]}, table_.store->compute());
  table_.forward(ctx, ctx.tokens->ids, out.hidden);
  observe_tokens(
      ctx, table_.shard, [] { return "hidden.0"; }, out.hidden);
}

void EmbeddingSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  saved.as<EmbeddingSaved>().dy = gather_tokens(ctx, table_.shard, dout.hidden, *saved.backward);
  din.hidden = {};
}

void EmbeddingSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  table_.backward_weight(ctx, ctx.tokens->ids, saved.as<EmbeddingSaved>().dy);
}

}  // namespace concerto
