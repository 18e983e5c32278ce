#include "concerto/model/stage.h"

#include "concerto/layers/attention_segment.h"
#include "concerto/layers/embedding_segment.h"
#include "concerto/layers/head_segment.h"
#include "concerto/layers/mlp_segment.h"
#include "concerto/layers/moe_segments.h"
#include "concerto/layers/mtp_segment.h"

namespace concerto {

Stage::Stage(const ModelConfig& config, const ParameterStore& store, Recompute recompute, int64_t max_positions,
             RoutingUnit routing_unit)
    : Stage(config, store, recompute, max_positions, routing_unit, StageLayout::whole(config)) {}

Stage::Stage(const ModelConfig& config, const ParameterStore& store, Recompute recompute, int64_t max_positions,
             RoutingUnit routing_unit, const StageLayout& layout)
    : config_(config), routing_unit_(routing_unit), layout_(layout) {
  const int64_t positions = max_positions + config.num_nextn_predict_layers + 1;
  rope_ = Buffer(positions * config.head_dim * dtype_bytes(store.stat()));
  cos_sin_ = View(rope_.data(), {positions, config.head_dim}, store.stat());
  rope_fill_table(cos_sin_, config.rope_theta);
  if (span().embedding)
    unit("embedding", false).segments.push_back(std::make_unique<EmbeddingSegment>(store, config_, shard()));
  for (int64_t i = span().first_layer; i < span().last_layer; ++i) add_layer(store, static_cast<int>(i), recompute);
  if (!span().head) return;
  unit("head", false).segments.push_back(std::make_unique<HeadSegment>(store, config_, -1, shard()));
  for (int m = 0; m < config.num_nextn_predict_layers; ++m) add_mtp(store, m, recompute);
}

Stage::Stage(const ModelConfig& config, const StageSpan& span, std::vector<Unit> units)
    : config_(config), routing_unit_(RoutingUnit::kMicroBatch), layout_{.span = span}, units_(std::move(units)) {}

int64_t Stage::first_moe_layer() const {
  int64_t before = 0;
  for (int64_t i = 0; i < span().first_layer; ++i) before += config_.is_moe_layer(i);
  return before;
}

Unit& Stage::unit(std::string name, bool recompute) {
  units_.push_back({.name = std::move(name), .segments = {}, .recompute = recompute});
  return units_.back();
}

void Stage::add_layer(const ParameterStore& store, int layer, Recompute recompute) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".",
                    name = "layers." + std::to_string(layer) + ".";
  const bool moe = config_.is_moe_layer(layer);
  const bool apart = moe && routing_unit_ == RoutingUnit::kGlobal;
  const bool full = recompute == Recompute::kFull && !apart;
  Unit* u = &unit(full ? name + "layer" : name + "attention", recompute == Recompute::kFull);
  u->segments.push_back(
      std::make_unique<AttentionSegment>(store, config_, prefix, name + "attention", layer, cos_sin_, shard()));
  if (apart) u = &unit(name + "router", false);
  if (!full && !apart) u = &unit(name + "mlp", recompute == Recompute::kSelective);
  if (!moe) {
    u->segments.push_back(std::make_unique<MlpSegment>(store, config_, prefix, name + "mlp", layer, shard()));
    return;
  }
  u->segments.push_back(std::make_unique<RouterSegment>(store, config_, prefix, layer, shard()));
  auto route =
      std::make_unique<RouteSegment>(store, config_, prefix, layer, static_cast<int>(moe_layers_.size()), shard());
  if (apart) {
    u = &unit(name + "mlp", recompute != Recompute::kNone);
    u->routes = route.get();
  }
  u->segments.push_back(std::move(route));
  moe_layers_.push_back(layer);
  std::unique_ptr<Segment> shared;
  if (config_.moe_num_shared_experts > 0)
    shared = std::make_unique<SharedExpertsSegment>(store, config_, prefix, layer, shard());
  if (layout_.experts.dispatch)
    return add_expert_segments(u->segments, store, config_, prefix, layer, layout_.experts, std::move(shared), shard());
  if (shared) u->segments.push_back(std::move(shared));
  u->segments.push_back(std::make_unique<DispatchSegment>(config_, layer));
  u->segments.push_back(std::make_unique<ExpertsSegment>(store, config_, prefix, layer));
  u->segments.push_back(std::make_unique<CombineSegment>(layer, shard()));
}

void Stage::add_mtp(const ParameterStore& store, int depth, Recompute recompute) {
  const std::string prefix = "model.mtp_block." + std::to_string(depth) + ".",
                    name = "mtp." + std::to_string(depth) + ".";
  const int layer = static_cast<int>(config_.num_hidden_layers) + depth;
  const int64_t shift = config_.mtp_positions == MtpPositions::kShifted ? depth + 1 : 0;
  const View table = cos_sin_.rows_range(shift, cos_sin_.rows() - shift);
  const auto add_unit = [&](const char* what, bool again, std::unique_ptr<Segment> segment) {
    Unit& u = unit(name + what, again);
    u.training_only = true;
    u.segments.push_back(std::move(segment));
  };
  add_unit("join", false, std::make_unique<MtpSegment>(store, config_, depth, shard()));
  add_unit("attention", recompute == Recompute::kFull,
           std::make_unique<AttentionSegment>(store, config_, prefix, name + "attention", layer, table, shard()));
  add_unit("mlp", recompute != Recompute::kNone,
           std::make_unique<MlpSegment>(store, config_, prefix, name + "mlp", layer, shard()));
  add_unit("head", false, std::make_unique<HeadSegment>(store, config_, depth, shard()));
}

namespace {

void run_segments(const Unit& unit, const SegmentContext& ctx, Acts& acts, UnitSaved& saved, Arena* keep,
                  Arena* forward, Arena* output) {
  for (size_t i = 0; i < unit.segments.size(); ++i) {
    Saved& s = saved.segments[i];
    s.keep = keep;
    s.forward = forward;
    s.passing = ctx.ops.scratch;
    s.output = i + 1 == unit.segments.size() ? output : forward;
    Acts out = acts;
    unit.segments[i]->forward(ctx, acts, out, s);
    acts = out;
  }
}

}  // namespace

void unit_forward(const Unit& unit, const SegmentContext& ctx, Acts& acts, UnitSaved& saved, const UnitArenas& arenas) {
  saved.input = acts;
  ArenaScope passing(*ctx.ops.scratch);
  if (!unit.recompute || !ctx.training) {
    run_segments(unit, ctx, acts, saved, arenas.keep, arenas.keep, arenas.keep);
    return;
  }
  ArenaScope scope(*arenas.temporary);
  run_segments(unit, ctx, acts, saved, arenas.keep, arenas.temporary, arenas.keep);
}

void unit_backward_input(const Unit& unit, const SegmentContext& ctx, Acts& grads, UnitSaved& saved,
                         const UnitArenas& arenas) {
  ArenaScope passing(*ctx.ops.scratch);
  if (unit.recompute) {
    ArenaScope forward_only(*ctx.ops.scratch);
    SegmentContext again = ctx;
    again.replay = true;
    again.observer = nullptr;
    Acts acts = saved.input;
    run_segments(unit, again, acts, saved, arenas.keep, arenas.temporary, arenas.temporary);
  }
  for (size_t i = unit.segments.size(); i-- > 0;) {
    saved.segments[i].backward = arenas.backward;
    saved.segments[i].passing = ctx.ops.scratch;
    Acts din = grads;
    unit.segments[i]->backward_input(ctx, grads, din, saved.segments[i]);
    grads = din;
  }
}

void unit_backward_weight(const Unit& unit, const SegmentContext& ctx, UnitSaved& saved) {
  for (size_t i = unit.segments.size(); i-- > 0;) unit.segments[i]->backward_weight(ctx, saved.segments[i]);
}

}  // namespace concerto
