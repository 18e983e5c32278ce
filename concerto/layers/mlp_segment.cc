#include "concerto/layers/mlp_segment.h"

namespace concerto {

Mlp::Mlp(const ParameterStore& store, const std::string& p, const TensorShard& s) : shard(s) {
  const Shape half = store.ref(p + "gate_proj.weight").shape;
  const int64_t width = half[0], hidden = half[1];
  gate_up = {&store, store.fused(p + "gate_proj.weight", 2, {2 * width, hidden}),
             store.fused(p + "gate_proj.bias", 2, {2 * width})};
  down = {&store, store.ref(p + "down_proj.weight"), store.ref(p + "down_proj.bias")};
}

void Mlp::forward(const SegmentContext& ctx, View x, View y, MlpSaved& s, Arena& arena) const {
  s.gate_up = arena.take({x.rows(), gate_up.out_features()}, x.dtype);
  ArenaScope scope(*ctx.ops.scratch);
  const View act = ctx.ops.scratch->take({x.rows(), gate_up.out_features() / 2}, x.dtype);
  gate_up.forward(ctx.ops, x, s.gate_up);
  swiglu_forward(ctx.ops, {.gate_up = s.gate_up, .act = act});
  down.forward_summed(ctx, shard, act, y);
}

void Mlp::backward_input(const SegmentContext& ctx, View dy, View dx, bool accumulate, MlpSaved& s,
                         Arena& arena) const {
  s.act = arena.take({dy.rows(), gate_up.out_features() / 2}, dy.dtype);
  const View dact = s.act;  // its gradient first, then the act itself
  down.backward_input(ctx.ops, dy, dact);
  swiglu_backward(ctx.ops, {.gate_up = s.gate_up, .dact = dact, .dgate_up = s.gate_up, .act = s.act});
  gate_up.backward_input_summed(ctx, shard, s.gate_up, dx, accumulate);
}

void Mlp::backward_weight(const SegmentContext& ctx, View x, View dy, View own_dy, MlpSaved& s) const {
  down.backward_weight(ctx.ops, s.act, dy, own_dy);
  gate_up.backward_weight(ctx.ops, x, s.gate_up);
}

namespace {
struct MlpSegmentSaved {
  View x, rstd;  // [T_r, H], [T_r]
  View normed;   // [T, H], made again in backward_input
  MlpSaved mlp;
  View dy;               // [T, H]
  View own_dy, dnormed;  // [T_r, H]
};
struct SharedSaved {
  View own_x, x;  // [T_r, H], and from backward_input on [T, H]
  MlpSaved mlp;
  View own_dy, dy;  // [T_r, H], [T, H]
};
}  // namespace

MlpSegment::MlpSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, std::string name,
                       int layer, const TensorShard& shard)
    : Segment({.name = std::move(name), .layer = layer}),
      norm_{&store, store.ref(prefix + "post_attention_layernorm.weight"), c.rms_norm_eps},
      mlp_(store, prefix + "mlp.", shard) {}

void MlpSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<MlpSegmentSaved>();
  Arena& arena = *saved.forward;
  s.x = in.hidden;
  s.rstd = arena.take({s.x.dim(0)}, stat_dtype(s.x.dtype));
  out.hidden = saved.output->take(s.x.shape, s.x.dtype);
  ArenaScope scope(*ctx.ops.scratch);
  const View normed = ctx.ops.scratch->take(s.x.shape, s.x.dtype), y = ctx.ops.scratch->take(s.x.shape, s.x.dtype);
  norm_.forward(ctx.ops, s.x, normed, s.rstd);
  mlp_.forward(ctx, gather_tokens(ctx, mlp_.shard, normed, *ctx.ops.scratch), y, s.mlp, arena);
  observe_tokens(
      ctx, mlp_.shard, [&] { return "mlp_out." + std::to_string(spec().layer); }, y);
  add(ctx.ops, {.a = s.x, .b = y, .out = out.hidden});
  observe_tokens(
      ctx, mlp_.shard, [&] { return "hidden." + std::to_string(spec().layer + 1); }, out.hidden);
}

void MlpSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<MlpSegmentSaved>();
  s.own_dy = dout.hidden;
  s.dy = gather_tokens(ctx, mlp_.shard, s.own_dy, *saved.backward);
  s.dnormed = saved.backward->take(s.x.shape, s.x.dtype);
  mlp_.backward_input(ctx, s.dy, s.dnormed, false, s.mlp, *saved.backward);
  const View normed = saved.backward->take(s.x.shape, s.x.dtype);
  din.hidden = saved.backward->take(s.x.shape, s.x.dtype);
  norm_.backward_input(ctx.ops, s.dnormed, s.x, s.rstd, dout.hidden, din.hidden, normed);
  s.normed = gather_tokens(ctx, mlp_.shard, normed, *saved.backward);
}

void MlpSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<MlpSegmentSaved>();
  mlp_.backward_weight(ctx, s.normed, s.dy, s.own_dy, s.mlp);
  norm_.backward_weight(ctx.ops, s.dnormed, s.x, s.rstd);
}

SharedExpertsSegment::SharedExpertsSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix,
                                           int layer, const TensorShard& shard)
    : Segment({.name = "layers." + std::to_string(layer) + ".shared_experts", .layer = layer}),
      mlp_(store, prefix + "mlp.shared_experts.", shard) {
  const int64_t width = mlp_.gate_up.out_features() / 2;
  CHECK(width == shard.own(c.shared_intermediate_size()).count, "shared experts of width {}", width);
}

void SharedExpertsSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<SharedSaved>();
  s.own_x = in.normed;
  out.mlp = saved.passing->take(s.own_x.shape, s.own_x.dtype);
  ArenaScope scope(*ctx.ops.scratch);
  const View x = gather_tokens(ctx, mlp_.shard, s.own_x, *ctx.ops.scratch);
  mlp_.forward(ctx, x, out.mlp, s.mlp, *saved.forward);
}

// dout.normed holds what the routed experts gave back, and the shared experts' share is added; or nothing yet, while
// rows travel (parallel/expert_segments.h).
void SharedExpertsSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<SharedSaved>();
  s.own_dy = dout.mlp;
  s.dy = gather_tokens(ctx, mlp_.shard, s.own_dy, *saved.backward);
  const bool accumulate = static_cast<bool>(dout.normed);
  if (!accumulate) din.normed = saved.backward->take(s.own_x.shape, s.own_x.dtype);
  mlp_.backward_input(ctx, s.dy, din.normed, accumulate, s.mlp, *saved.backward);
  s.x = gather_tokens(ctx, mlp_.shard, s.own_x, *saved.backward);
  din.mlp = {};
}

void SharedExpertsSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<SharedSaved>();
  mlp_.backward_weight(ctx, s.x, s.dy, s.own_dy, s.mlp);
}

}  // namespace concerto
