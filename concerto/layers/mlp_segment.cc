#include "concerto/layers/mlp_segment.h"

namespace concerto {

Mlp::Mlp(const ParameterStore& store, const std::string& p, int64_t width, int64_t hidden) {
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
  down.forward(ctx.ops, act, y);
}

void Mlp::backward_input(const SegmentContext& ctx, View dy, View dx, bool accumulate, MlpSaved& s,
                         Arena& arena) const {
  s.act = arena.take({dy.rows(), gate_up.out_features() / 2}, dy.dtype);
  const View dact = s.act;  // its gradient first, then the act itself
  down.backward_input(ctx.ops, dy, dact);
  swiglu_backward(ctx.ops, {.gate_up = s.gate_up, .dact = dact, .dgate_up = s.gate_up, .act = s.act});
  gate_up.backward_input(ctx.ops, s.gate_up, dx, accumulate);
}

void Mlp::backward_weight(const SegmentContext& ctx, View x, View dy, MlpSaved& s) const {
  down.backward_weight(ctx.ops, s.act, dy);
  gate_up.backward_weight(ctx.ops, x, s.gate_up);
}

namespace {
struct MlpSegmentSaved {
  View x, rstd;  // [T, H], [T]
  View normed;   // [T, H], made again in backward_input
  MlpSaved mlp;
  View dy, dnormed;  // [T, H]
};
struct SharedSaved {
  View x;  // [T, H]
  MlpSaved mlp;
  View dy;  // [T, H]
};
}  // namespace

MlpSegment::MlpSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, std::string name,
                       int layer)
    : Segment({.name = std::move(name), .layer = layer}),
      norm_{&store, store.ref(prefix + "post_attention_layernorm.weight"), c.rms_norm_eps},
      mlp_(store, prefix + "mlp.", c.intermediate_size, c.hidden_size) {}

void MlpSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<MlpSegmentSaved>();
  Arena& arena = *saved.forward;
  s.x = in.hidden;
  s.rstd = arena.take({ctx.tokens->count}, stat_dtype(s.x.dtype));
  out.hidden = saved.output->take(s.x.shape, s.x.dtype);
  ArenaScope scope(*ctx.ops.scratch);
  const View normed = ctx.ops.scratch->take(s.x.shape, s.x.dtype), y = ctx.ops.scratch->take(s.x.shape, s.x.dtype);
  norm_.forward(ctx.ops, s.x, normed, s.rstd);
  mlp_.forward(ctx, normed, y, s.mlp, arena);
  if (ctx.observer) ctx.observer->record("mlp_out." + std::to_string(spec().layer), y);
  add(ctx.ops, {.a = s.x, .b = y, .out = out.hidden});
  if (ctx.observer) ctx.observer->record("hidden." + std::to_string(spec().layer + 1), out.hidden);
}

void MlpSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<MlpSegmentSaved>();
  s.dy = dout.hidden;
  s.dnormed = saved.backward->take(s.x.shape, s.x.dtype);
  mlp_.backward_input(ctx, s.dy, s.dnormed, false, s.mlp, *saved.backward);
  s.normed = saved.backward->take(s.x.shape, s.x.dtype);
  din.hidden = saved.backward->take(s.x.shape, s.x.dtype);
  norm_.backward_input(ctx.ops, s.dnormed, s.x, s.rstd, dout.hidden, din.hidden, s.normed);
}

void MlpSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<MlpSegmentSaved>();
  mlp_.backward_weight(ctx, s.normed, s.dy, s.mlp);
  norm_.backward_weight(ctx.ops, s.dnormed, s.x, s.rstd);
}

SharedExpertsSegment::SharedExpertsSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix,
                                           int layer)
    : Segment({.name = "layers." + std::to_string(layer) + ".shared_experts", .layer = layer}),
      mlp_(store, prefix + "mlp.shared_experts.", c.shared_intermediate_size(), c.hidden_size) {}

void SharedExpertsSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<SharedSaved>();
  s.x = in.normed;
  out.mlp = saved.passing->take(s.x.shape, s.x.dtype);
  mlp_.forward(ctx, s.x, out.mlp, s.mlp, *saved.forward);
}

// dout.normed holds what the routed experts gave back, and the shared experts' share is added; or nothing yet, while
// rows travel (parallel/expert_segments.h).
void SharedExpertsSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<SharedSaved>();
  s.dy = dout.mlp;
  const bool accumulate = static_cast<bool>(dout.normed);
  if (!accumulate) din.normed = saved.backward->take(s.x.shape, s.x.dtype);
  mlp_.backward_input(ctx, s.dy, din.normed, accumulate, s.mlp, *saved.backward);
  din.mlp = {};
}

void SharedExpertsSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  auto& s = saved.as<SharedSaved>();
  mlp_.backward_weight(ctx, s.x, s.dy, s.mlp);
}

}  // namespace concerto
