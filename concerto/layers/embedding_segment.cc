#include "concerto/layers/embedding_segment.h"

namespace concerto {
namespace {
struct EmbeddingSaved {
  View dy;  // [T, H]
};
}  // namespace

EmbeddingSegment::EmbeddingSegment(const ParameterStore& store, const ModelConfig& config)
    : Segment({.name = "embedding"}),
      store_(store),
      table_(store.ref("model.embed_tokens.weight")),
      skip_id_(config.pad_token_id) {}

void EmbeddingSegment::forward(const SegmentContext& ctx, const Acts&, Acts& out, Saved& saved) const {
  saved.start<EmbeddingSaved>();
  const View table = store_.table(table_);
  out.hidden = saved.forward->take({ctx.tokens->count, table.cols()}, store_.compute());
  embedding_forward(ctx.ops, {.ids = ctx.tokens->ids, .table = table, .y = out.hidden});
  if (ctx.observer) ctx.observer->record("hidden.0", out.hidden);
}

void EmbeddingSegment::backward_input(const SegmentContext&, const Acts& dout, Acts& din, Saved& saved) const {
  saved.as<EmbeddingSaved>().dy = dout.hidden;
  din.hidden = {};
}

void EmbeddingSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  embedding_backward_weight(ctx.ops, {.ids = ctx.tokens->ids,
                                      .dy = saved.as<EmbeddingSaved>().dy,
                                      .skip_id = skip_id_,
                                      .dtable = store_.grad(table_)});
}

}  // namespace concerto
