#include "concerto/layers/head_segment.h"

#include <algorithm>

#include "concerto/ops/head_loss.h"

namespace concerto {
namespace {
struct HeadSaved {
  View x, rstd, normed;  // [T, H], [T], [T, H]
  View dnormed;          // [T, H]
};
}  // namespace

HeadSegment::HeadSegment(const ParameterStore& store, const ModelConfig& c, int depth)
    : Segment({.name = depth < 0 ? "head" : "mtp." + std::to_string(depth) + ".head", .fuses_weight = true}),
      norm_{&store, store.ref("model.norm.weight"), c.rms_norm_eps},
      head_{&store, store.ref(c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight"),
            store.ref("lm_head.bias")},
      depth_(depth) {}

View HeadSegment::targets(const SegmentContext& ctx) const {
  if (depth_ < 0) return ctx.tokens->targets;
  return ctx.tokens->mtp_targets.rows_range(depth_, 1).reshape({ctx.tokens->count});
}

View HeadSegment::loss_sum(const SegmentContext& ctx) const {
  return View(&ctx.losses->sum[depth_ + 1], {1}, DType::kF64);
}

void HeadSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<HeadSaved>();
  const int64_t tokens = ctx.tokens->count;
  s.x = in.hidden;
  s.rstd = saved.forward->take({tokens}, stat_dtype(s.x.dtype));
  s.normed = saved.forward->take(s.x.shape, s.x.dtype);
  norm_.forward(ctx.ops, s.x, s.normed, s.rstd);
  out.normed = s.normed;
  if (ctx.observer && depth_ < 0) ctx.observer->record("final_norm", s.normed);
  if (ctx.observer && ctx.observer->wants_logits() && depth_ < 0) observe_logits(ctx, s.normed);
  if (!ctx.training && ctx.tokens->targets)
    head_loss(ctx.ops, {.x = s.normed,
                        .w = head_.store->weight(head_.w),
                        .bias = head_.store->weight(head_.bias),
                        .targets = targets(ctx),
                        .loss_sum = loss_sum(ctx),
                        .packed = head_.store->packed(ctx.ops, head_.w)});
}

// In head_loss's chunks, for which the plan has room.
void HeadSegment::observe_logits(const SegmentContext& ctx, View normed) const {
  const int64_t tokens = normed.dim(0), chunk = std::min(head_loss_chunk(head_.out_features()), tokens);
  ArenaScope scope(*ctx.ops.scratch);
  const View logits = ctx.ops.scratch->take({chunk, head_.out_features()}, stat_dtype(normed.dtype));
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const View part = logits.rows_range(0, std::min(chunk, tokens - begin));
    head_.forward(ctx.ops, normed.rows_range(begin, part.dim(0)), part);
    ctx.observer->record("logits", part);
  }
}

void HeadSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<HeadSaved>();
  s.dnormed = saved.backward->take(s.x.shape, s.x.dtype);
  const ProductGradient dw = head_.store->product_gradient(ctx.ops, head_.w);
  head_loss(ctx.ops, {.x = s.normed,
                      .w = head_.store->weight(head_.w),
                      .bias = head_.store->weight(head_.bias),
                      .targets = targets(ctx),
                      .scale = ctx.losses->scale[depth_ + 1],
                      .loss_sum = loss_sum(ctx),
                      .dx = s.dnormed,
                      .dw = dw.view,
                      .db = head_.store->grad(head_.bias),
                      .packed = head_.store->packed(ctx.ops, head_.w),
                      .accumulate = dw.accumulate});
  if (dout.normed) add(ctx.ops, {.a = s.dnormed, .b = dout.normed, .out = s.dnormed});
  din = {};
  din.hidden = saved.backward->take(s.x.shape, s.x.dtype);
  norm_.backward_input(ctx.ops, s.dnormed, s.x, s.rstd, dout.hidden, din.hidden);
}

void HeadSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<HeadSaved>();
  norm_.backward_weight(ctx.ops, s.dnormed, s.x, s.rstd);
}

}  // namespace concerto
