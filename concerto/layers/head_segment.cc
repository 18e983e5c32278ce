#include "concerto/layers/head_segment.h"

#include <algorithm>

namespace concerto {
namespace {
struct HeadSaved {
  View x, rstd, normed;  // [T_r, H], [T_r], [T_r, H]
  View dnormed;          // [T_r, H]
};
}  // namespace

HeadSegment::HeadSegment(const ParameterStore& store, const ModelConfig& c, int depth, const TensorShard& shard)
    : Segment({.name = depth < 0 ? "head" : "mtp." + std::to_string(depth) + ".head", .fuses_weight = true}),
      norm_{&store, store.ref("model.norm.weight"), c.rms_norm_eps},
      head_{&store, store.ref(c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight"),
            store.ref("lm_head.bias")},
      depth_(depth),
      shard_(shard) {
  const TensorSpec& w = store.specs()[static_cast<size_t>(head_.w.first)];
  vocab_ = w.whole()[0];
  begin_ = w.cut_begin;
}

View HeadSegment::targets(const SegmentContext& ctx) const {
  if (depth_ < 0) return ctx.tokens->targets;
  return ctx.tokens->mtp_targets.rows_range(depth_, 1).reshape({ctx.tokens->count});
}

View HeadSegment::loss_sum(const SegmentContext& ctx) const {
  return View(&ctx.losses->sum[depth_ + 1], {1}, DType::kF64);
}

void HeadSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<HeadSaved>();
  s.x = in.hidden;
  s.rstd = saved.forward->take({s.x.dim(0)}, stat_dtype(s.x.dtype));
  s.normed = saved.forward->take(s.x.shape, s.x.dtype);
  norm_.forward(ctx.ops, s.x, s.normed, s.rstd);
  out.normed = s.normed;
  if (depth_ < 0)
    observe_tokens(
        ctx, shard_, [] { return "final_norm"; }, s.normed);
  if (depth_ < 0) observe_logits(ctx, s.normed);
  if (ctx.training || !ctx.tokens->targets) return;
  ArenaScope scope(*ctx.ops.scratch);
  loss(ctx, {.x = gather_tokens(ctx, shard_, s.normed, *ctx.ops.scratch),
             .w = head_.store->weight(head_.w),
             .bias = head_.store->weight(head_.bias),
             .targets = targets(ctx),
             .loss_sum = loss_sum(ctx),
             .packed = head_.store->packed(ctx.ops, head_.w)});
}

// With slices, chunks are those of the widest: all ranks meet once a chunk.
void HeadSegment::loss(const SegmentContext& ctx, const HeadLoss& args) const {
  if (!shard_.exchange) return head_loss(ctx.ops, args);
  const auto fn = [](const void* self, const Context& c, const CrossEntropy& a) {
    static_cast<const HeadSegment*>(self)->loss_of_slices(c, a);
  };
  head_loss_in_chunks(ctx.ops, args, head_loss_chunk(shard_.most_own(vocab_)), {fn, this});
}

void HeadSegment::loss_of_slices(const Context& ctx, const CrossEntropy& a) const {
  const int64_t rows = a.logits.dim(0);
  ArenaScope scope(*ctx.scratch);
  const View share = ctx.scratch->take({rows, 2}, DType::kF64),
             shares = ctx.scratch->take({shard_.size * rows, 2}, DType::kF64);
  cross_entropy_share(ctx, {.logits = a.logits, .targets = a.targets, .begin = begin_, .share = share});
  shard_.exchange->gather_parts(ctx, share, shares);
  cross_entropy_of_shares(ctx, {.logits = a.logits,
                                .targets = a.targets,
                                .begin = begin_,
                                .shares = shares.reshape({shard_.size, rows, 2}),
                                .scale = a.scale,
                                .loss_sum = a.loss_sum,
                                .dlogits = a.dlogits,
                                .token_loss = a.token_loss});
}

// In head_loss's chunks, for which the plan has room.
void HeadSegment::observe_logits(const SegmentContext& ctx, View normed) const {
  if (shard_.exchange) return observe_slices(ctx, normed);
  if (!ctx.observer || !ctx.observer->wants_logits()) return;
  const int64_t tokens = normed.dim(0), chunk = std::min(head_loss_chunk(head_.out_features()), tokens);
  ArenaScope scope(*ctx.ops.scratch);
  const View logits = ctx.ops.scratch->take({chunk, head_.out_features()}, stat_dtype(normed.dtype));
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const View part = logits.rows_range(0, std::min(chunk, tokens - begin));
    head_.forward(ctx.ops, normed.rows_range(begin, part.dim(0)), part);
    ctx.observer->record("logits", part);
  }
}

// A few rows at a time: slices of equal width, gathered and put side by side.
void HeadSegment::observe_slices(const SegmentContext& ctx, View own_normed) const {
  if (!ctx.ops.dry_run && !(ctx.observer && ctx.observer->wants_logits())) return;
  constexpr int64_t kRows = 8;
  ArenaScope scope(*ctx.ops.scratch);
  Arena& scratch = *ctx.ops.scratch;
  const View normed = gather_tokens(ctx, shard_, own_normed, scratch);
  const int64_t tokens = normed.dim(0), wide = shard_.most_own(vocab_);
  const DType stat = stat_dtype(normed.dtype);
  const View own = scratch.take({kRows, wide}, stat), all = scratch.take({shard_.size * kRows, wide}, stat),
             logits = scratch.take({kRows, vocab_}, stat);
  for (int64_t begin = 0; begin < tokens && !ctx.ops.dry_run; begin += kRows) {
    const int64_t rows = std::min(kRows, tokens - begin);
    fill_zero(ctx.ops, own);
    head_.forward(ctx.ops, normed.rows_range(begin, rows), own.rows_range(0, rows).cols_range(0, head_.out_features()));
    shard_.exchange->gather_parts(ctx.ops, own, all);
    for (int r = 0; r < shard_.size; ++r) {
      const Part part = part_of(vocab_, shard_.size, r);
      cast(ctx.ops, {.in = all.rows_range(r * kRows, rows).cols_range(0, part.count),
                     .out = logits.rows_range(0, rows).cols_range(part.begin, part.count)});
    }
    ctx.observer->record("logits", logits.rows_range(0, rows));
  }
}

void HeadSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<HeadSaved>();
  s.dnormed = saved.backward->take(s.x.shape, s.x.dtype);
  const ProductGradient dw = head_.store->product_gradient(ctx.ops, head_.w);
  {
    ArenaScope scope(*ctx.ops.scratch);
    const View x = gather_tokens(ctx, shard_, s.normed, *ctx.ops.scratch);
    const View dx = shard_.exchange ? ctx.ops.scratch->take(x.shape, head_.store->stat()) : s.dnormed;
    loss(ctx, {.x = x,
               .w = head_.store->weight(head_.w),
               .bias = head_.store->weight(head_.bias),
               .targets = targets(ctx),
               .scale = ctx.losses->scale[depth_ + 1],
               .loss_sum = loss_sum(ctx),
               .dx = dx,
               .dw = dw.view,
               .db = head_.store->grad(head_.bias),
               .packed = head_.store->packed(ctx.ops, head_.w),
               .accumulate = dw.accumulate});
    if (shard_.exchange) sum_tokens(ctx, shard_, {.partial = dx, .bias = {}, .own = s.dnormed});
  }
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
