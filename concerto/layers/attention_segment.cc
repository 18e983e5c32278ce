#include "concerto/layers/attention_segment.h"

#include <cmath>

namespace concerto {
namespace {
struct AttentionSaved {
  View x;         // [T_r, H]
  View rstd;      // [T_r]
  View normed;    // [T, H], made again in backward_input
  View qkv;       // [T, (N + 2 N_kv) * D] after rope
  View attended;  // [T, N * D]
  View lse;       // [T, N]
  View dy;        // [T, H]
  View own_dy;    // [T_r, H]
  View dqkv;      // like qkv
  View dnormed;   // [T_r, H]
};
}  // namespace

AttentionSegment::AttentionSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix,
                                   std::string name, int layer, View cos_sin, const TensorShard& shard)
    : Segment({.name = std::move(name), .layer = layer}),
      head_dim_(c.head_dim),
      q_cols_(store.ref(prefix + "self_attn.q_proj.weight").shape[0]),
      kv_cols_(store.ref(prefix + "self_attn.k_proj.weight").shape[0]),
      scale_(1.0 / std::sqrt(static_cast<double>(head_dim_))),
      cos_sin_(cos_sin),
      shard_(shard) {
  num_heads_ = q_cols_ / head_dim_;
  num_kv_heads_ = kv_cols_ / head_dim_;
  const std::string a = prefix + "self_attn.";
  const int64_t cols = q_cols_ + 2 * kv_cols_;
  norm_ = {&store, store.ref(prefix + "input_layernorm.weight"), c.rms_norm_eps};
  qkv_ = {&store, store.fused(a + "q_proj.weight", 3, {cols, c.hidden_size}),
          store.fused(a + "q_proj.bias", 3, {cols})};
  out_ = {&store, store.ref(a + "o_proj.weight"), store.ref(a + "o_proj.bias")};
}

void AttentionSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<AttentionSaved>();
  Arena& arena = *saved.forward;
  const int64_t tokens = ctx.tokens->count;
  const DType type = in.hidden.dtype, stat = stat_dtype(type);
  s.x = in.hidden;
  s.rstd = arena.take({s.x.dim(0)}, stat);
  s.qkv = arena.take({tokens, qkv_.out_features()}, type);
  s.attended = arena.take({tokens, q_cols_}, type);
  {
    ArenaScope scope(*ctx.ops.scratch);
    const View normed = ctx.ops.scratch->take(in.hidden.shape, type);
    norm_.forward(ctx.ops, s.x, normed, s.rstd);
    qkv_.forward(ctx.ops, gather_tokens(ctx, shard_, normed, *ctx.ops.scratch), s.qkv);
  }
  rope_apply(ctx.ops, {.x = qk(s.qkv), .positions = ctx.tokens->positions, .cos_sin = cos_sin_});
  if (ctx.cache) {
    CHECK(!shard_.exchange, "a cache of keys and values is of one rank");
    attend_cached(ctx, s.qkv, s.attended);
  } else {
    s.lse = arena.take({tokens, num_heads_}, stat);
    attention_forward(ctx.ops, {.q = q(s.qkv),
                                .k = k(s.qkv),
                                .v = v(s.qkv),
                                .doc_offsets = ctx.tokens->doc_offsets,
                                .num_heads = num_heads_,
                                .num_kv_heads = num_kv_heads_,
                                .head_dim = head_dim_,
                                .scale = scale_,
                                .out = s.attended,
                                .lse = s.lse});
  }
  out.hidden = saved.output->take(in.hidden.shape, type);
  ArenaScope scope(*ctx.ops.scratch);
  const View projected = ctx.ops.scratch->take(in.hidden.shape, type);
  out_.forward_summed(ctx, shard_, s.attended, projected);
  observe_tokens(
      ctx, shard_, [&] { return "attn_out." + std::to_string(spec().layer); }, projected);
  add(ctx.ops, {.a = in.hidden, .b = projected, .out = out.hidden});
}

void AttentionSegment::attend_cached(const SegmentContext& ctx, View qkv, View attended) const {
  const View k_cache = ctx.cache->k[spec().layer], v_cache = ctx.cache->v[spec().layer];
  const int64_t past = ctx.cache->past, tokens = ctx.tokens->count;
  cast(ctx.ops, {.in = k(qkv), .out = k_cache.rows_range(past, tokens)});
  cast(ctx.ops, {.in = v(qkv), .out = v_cache.rows_range(past, tokens)});
  attention_cached(ctx.ops, {.q = q(qkv),
                             .k_cache = k_cache,
                             .v_cache = v_cache,
                             .past = past,
                             .num_heads = num_heads_,
                             .num_kv_heads = num_kv_heads_,
                             .head_dim = head_dim_,
                             .scale = scale_,
                             .out = attended});
}

void AttentionSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<AttentionSaved>();
  Arena& arena = *saved.backward;
  s.own_dy = dout.hidden;
  s.dy = gather_tokens(ctx, shard_, s.own_dy, arena);
  s.dqkv = arena.take(s.qkv.shape, s.qkv.dtype);
  s.dnormed = arena.take(s.x.shape, s.x.dtype);
  {
    ArenaScope scope(*ctx.ops.scratch);
    const View dattended = ctx.ops.scratch->take(s.attended.shape, s.attended.dtype);
    out_.backward_input(ctx.ops, s.dy, dattended);
    attention_backward(ctx.ops, {.dout = dattended,
                                 .q = q(s.qkv),
                                 .k = k(s.qkv),
                                 .v = v(s.qkv),
                                 .out = s.attended,
                                 .lse = s.lse,
                                 .doc_offsets = ctx.tokens->doc_offsets,
                                 .num_heads = num_heads_,
                                 .num_kv_heads = num_kv_heads_,
                                 .head_dim = head_dim_,
                                 .scale = scale_,
                                 .dq = q(s.dqkv),
                                 .dk = k(s.dqkv),
                                 .dv = v(s.dqkv)});
  }
  rope_apply(ctx.ops, {.x = qk(s.dqkv), .positions = ctx.tokens->positions, .cos_sin = cos_sin_, .inverse = true});
  qkv_.backward_input_summed(ctx, shard_, s.dqkv, s.dnormed);
  const View normed = arena.take(s.x.shape, s.x.dtype);
  din.hidden = arena.take(s.x.shape, s.x.dtype);
  norm_.backward_input(ctx.ops, s.dnormed, s.x, s.rstd, dout.hidden, din.hidden, normed);
  s.normed = gather_tokens(ctx, shard_, normed, arena);
}

void AttentionSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<AttentionSaved>();
  out_.backward_weight(ctx.ops, s.attended, s.dy, s.own_dy);
  qkv_.backward_weight(ctx.ops, s.normed, s.dqkv);
  norm_.backward_weight(ctx.ops, s.dnormed, s.x, s.rstd);
}

}  // namespace concerto
