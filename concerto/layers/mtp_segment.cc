#include "concerto/layers/mtp_segment.h"

namespace concerto {
namespace {
struct MtpSaved {
  View embedded, embedded_rstd;  // [T_r, H], [T_r]
  View h, h_rstd;                // [T_r, H], [T_r]
  View joined;                   // [T_r, 2 H]
  View dy;                       // [T_r, H]
  View dembedded_norm, dh_norm;  // [T_r, H] gradients behind the norms
  View dembedded;                // [T, H]
};
}  // namespace

MtpSegment::MtpSegment(const ParameterStore& store, const ModelConfig& c, int depth, const TensorShard& shard)
    : Segment(
          {.name = "mtp." + std::to_string(depth) + ".join", .layer = static_cast<int>(c.num_hidden_layers) + depth}),
      table_(store, c, shard),
      depth_(depth),
      from_normed_(depth == 0 && c.mtp_hidden == MtpHidden::kPostNorm) {
  const std::string d = std::to_string(depth);
  embedding_norm_ = {&store, store.ref("model.mtp_emb_norm." + d + ".weight"), c.rms_norm_eps};
  hidden_norm_ = {&store, store.ref("model.mtp_hidden_norm." + d + ".weight"), c.rms_norm_eps};
  projection_ = {&store, store.ref("model.mtp_linear_proj." + d + ".weight"),
                 store.ref("model.mtp_linear_proj." + d + ".bias")};
}

View MtpSegment::ids(const SegmentContext& ctx) const {
  return ctx.tokens->mtp_ids.rows_range(depth_, 1).reshape({ctx.tokens->count});
}

void MtpSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<MtpSaved>();
  Arena& arena = *saved.forward;
  const DType type = in.hidden.dtype, stat = stat_dtype(type);
  const int64_t tokens = ctx.tokens->local.count, hidden = in.hidden.cols();
  s.h = from_normed_ ? in.normed : in.hidden;
  s.embedded = arena.take({tokens, hidden}, type);
  s.embedded_rstd = arena.take({tokens}, stat);
  s.h_rstd = arena.take({tokens}, stat);
  s.joined = arena.take({tokens, 2 * hidden}, type);
  out = {};
  out.hidden = arena.take({tokens, hidden}, type);
  table_.forward(ctx, ids(ctx), s.embedded);
  ArenaScope scope(*ctx.ops.scratch);
  const View half = ctx.ops.scratch->take({tokens, hidden}, type);
  embedding_norm_.forward(ctx.ops, s.embedded, half, s.embedded_rstd);
  cast(ctx.ops, {.in = half, .out = s.joined.cols_range(0, hidden)});
  hidden_norm_.forward(ctx.ops, s.h, half, s.h_rstd);
  cast(ctx.ops, {.in = half, .out = s.joined.cols_range(hidden, hidden)});
  projection_.forward(ctx.ops, s.joined, out.hidden);
}

void MtpSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<MtpSaved>();
  Arena& arena = *saved.backward;
  const int64_t hidden = s.h.cols();
  s.dy = dout.hidden;
  s.dembedded_norm = arena.take(s.h.shape, s.h.dtype);
  s.dh_norm = arena.take(s.h.shape, s.h.dtype);
  const View dembedded = arena.take(s.h.shape, s.h.dtype);
  const View dh = arena.take(s.h.shape, s.h.dtype);
  {
    ArenaScope scope(*ctx.ops.scratch);
    const View djoined = ctx.ops.scratch->take(s.joined.shape, s.joined.dtype);
    projection_.backward_input(ctx.ops, s.dy, djoined);
    cast(ctx.ops, {.in = djoined.cols_range(0, hidden), .out = s.dembedded_norm});
    cast(ctx.ops, {.in = djoined.cols_range(hidden, hidden), .out = s.dh_norm});
  }
  embedding_norm_.backward_input(ctx.ops, s.dembedded_norm, s.embedded, s.embedded_rstd, {}, dembedded);
  s.dembedded = gather_tokens(ctx, table_.shard, dembedded, arena);
  hidden_norm_.backward_input(ctx.ops, s.dh_norm, s.h, s.h_rstd, {}, dh);
  din = {};
  (from_normed_ ? din.normed : din.hidden) = dh;
}

void MtpSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<MtpSaved>();
  projection_.backward_weight(ctx.ops, s.joined, s.dy);
  embedding_norm_.backward_weight(ctx.ops, s.dembedded_norm, s.embedded, s.embedded_rstd);
  hidden_norm_.backward_weight(ctx.ops, s.dh_norm, s.h, s.h_rstd);
  table_.backward_weight(ctx, ids(ctx), s.dembedded);
}

}  // namespace concerto
