#include "concerto/layers/moe_segments.h"

#include <algorithm>

namespace concerto {
namespace {

struct DispatchSaved {
  View row_of;  // [T, K]
};
struct ExpertsSaved {
  View x, x_source;    // what came in: [R, H], or [T, H] and [R]
  View weights;        // [R]
  View gate_up;        // [R, 2 F] (becomes its gradient)
  View offsets;        // [E + 1]
  View dropped;        // [E + 2]: the same and where dropped rows end; null: there are none
  View dy, dy_source;  // likewise
  View act;            // [R, F] weighted, from backward_input on
};
struct CombineSaved {
  View row_token;  // [R]
  bool has_shared;
};

std::string segment_name(int layer, const char* what) { return "layers." + std::to_string(layer) + "." + what; }

}  // namespace

DispatchSegment::DispatchSegment(const ModelConfig& c, int layer)
    : Segment({.name = segment_name(layer, "dispatch"), .layer = layer}), top_k_(c.moe_k) {}

// The experts' products read the rows of normed where they are; only the weights move.
void DispatchSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  saved.start<DispatchSaved>().row_of = in.row_of;
  out.rows = in.normed;
  out.row_source = in.row_token;
  out.row_weights = saved.forward->take({in.row_of.dim(0) * top_k_}, in.weights.dtype);
  scatter_slots(ctx.ops, {.slots = in.weights, .row_of = in.row_of, .rows = out.row_weights});
}

void DispatchSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  const View row_of = saved.as<DispatchSaved>().row_of;
  din.normed = saved.backward->take({row_of.dim(0), dout.rows.cols()}, dout.rows.dtype);
  din.weights = saved.backward->take(row_of.shape, dout.row_weights.dtype);
  gather_rows_backward(ctx.ops, {.drows = dout.rows, .row_of = row_of, .dx = din.normed});
  gather_slots(ctx.ops, {.rows = dout.row_weights, .row_of = row_of, .slots = din.weights});
  din.rows = din.row_weights = {};
}

ExpertsSegment::ExpertsSegment(const ParameterStore& store, const ModelConfig& c, const std::string& prefix, int layer,
                               const ShardPlan& plan)
    : Segment({.name = segment_name(layer, "experts"), .layer = layer}),
      store_(store),
      width_(part_of(c.moe_intermediate_size, plan.etp, plan.etp_rank).count) {
  const std::vector<int> ids = local_experts(c, plan, plan.ep_rank);
  experts_ = static_cast<int64_t>(ids.size());
  if (experts_ == 0) return;
  const int count = static_cast<int>(experts_);
  const std::string first = prefix + "mlp.experts." + std::to_string(ids[0]);
  gate_up_ = store.fused(first + ".gate_proj.weight", 2 * count, {experts_, 2 * width_, c.hidden_size});
  down_ = store.fused(first + ".down_proj.weight", count, {experts_, c.hidden_size, width_});
}

void ExpertsSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<ExpertsSaved>();
  const int64_t rows = in.row_weights.dim(0);
  s.x = in.rows;
  s.x_source = in.row_source;
  s.weights = in.row_weights;
  s.offsets = in.offsets;
  if (in.offsets.dim(0) == experts_ + 2) {
    s.dropped = in.offsets;
    s.offsets.shape = Shape{experts_ + 1};
    s.offsets.row_stride = experts_ + 1;
  }
  s.gate_up = saved.forward->take({rows, 2 * width_}, s.x.dtype);
  out.rows = saved.passing->take({rows, s.x.cols()}, s.x.dtype);
  out.row_source = {};
  if (experts_ == 0) return;
  ArenaScope scope(*ctx.ops.scratch);
  const View act = ctx.ops.scratch->take({rows, width_}, s.x.dtype);
  grouped_linear_forward(ctx.ops, {.x = s.x,
                                   .w = store_.weight(gate_up_),
                                   .offsets = s.offsets,
                                   .y = s.gate_up,
                                   .row_token = s.x_source,
                                   .packed = store_.packed(ctx.ops, gate_up_)});
  swiglu_forward(ctx.ops, {.gate_up = s.gate_up, .weights = s.weights, .act = act});
  grouped_linear_forward(ctx.ops, {.x = act,
                                   .w = store_.weight(down_),
                                   .offsets = s.offsets,
                                   .y = out.rows,
                                   .packed = store_.packed(ctx.ops, down_)});
  if (s.dropped) clear_dropped(ctx.ops, {.offsets = s.dropped, .rows = out.rows});
}

void ExpertsSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& s = saved.as<ExpertsSaved>();
  const int64_t rows = s.weights.dim(0);
  s.dy = dout.rows;
  s.dy_source = dout.row_source;
  s.act = saved.backward->take({rows, width_}, s.x.dtype);
  din.row_weights = saved.backward->take({rows}, s.weights.dtype);
  din.rows = saved.passing->take({rows, s.x.cols()}, s.x.dtype);
  din.row_source = {};
  if (experts_ == 0) return;
  const View dact = s.act;  // its gradient first, then the act itself
  grouped_linear_backward_input(ctx.ops, {.dy = s.dy,
                                          .w = store_.weight(down_),
                                          .offsets = s.offsets,
                                          .dx = dact,
                                          .row_token = s.dy_source,
                                          .packed = store_.packed(ctx.ops, down_)});
  swiglu_backward(ctx.ops, {.gate_up = s.gate_up,
                            .weights = s.weights,
                            .dact = dact,
                            .dgate_up = s.gate_up,
                            .dweights = din.row_weights,
                            .act = s.act});
  grouped_linear_backward_input(ctx.ops, {.dy = s.gate_up,
                                          .w = store_.weight(gate_up_),
                                          .offsets = s.offsets,
                                          .dx = din.rows,
                                          .packed = store_.packed(ctx.ops, gate_up_)});
  if (s.dropped) clear_dropped(ctx.ops, {.offsets = s.dropped, .rows = din.rows});
}

void ExpertsSegment::backward_weight(const SegmentContext& ctx, Saved& saved) const {
  if (experts_ == 0) return;
  auto& s = saved.as<ExpertsSaved>();
  const ProductGradient down = store_.product_gradient(ctx.ops, down_),
                        gate_up = store_.product_gradient(ctx.ops, gate_up_);
  grouped_linear_backward_weight(ctx.ops, {.x = s.act,
                                           .dy = s.dy,
                                           .offsets = s.offsets,
                                           .dw = down.view,
                                           .dy_row_token = s.dy_source,
                                           .accumulate = down.accumulate});
  grouped_linear_backward_weight(ctx.ops, {.x = s.x,
                                           .dy = s.gate_up,
                                           .offsets = s.offsets,
                                           .dw = gate_up.view,
                                           .x_row_token = s.x_source,
                                           .accumulate = gate_up.accumulate});
}

CombineSegment::CombineSegment(int layer, const TensorShard& shard)
    : Segment({.name = segment_name(layer, "combine"), .layer = layer}), shard_(shard) {}

void CombineSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  auto& s = saved.start<CombineSaved>();
  s.row_token = in.row_token;
  s.has_shared = static_cast<bool>(in.mlp);
  out = {};
  out.hidden = saved.output->take(in.hidden.shape, in.hidden.dtype);
  combine_rows(ctx.ops, {.rows = in.rows, .row_of = in.row_of, .add = in.mlp, .residual = in.hidden, .y = out.hidden});
  observe(ctx, in, out);
}

// What the layer adds to the stream, which nobody else needs, a block of rows at a time: a dry run counts the block,
// whoever watches later. Ranks that share the tokens show all of theirs at once.
void CombineSegment::observe(const SegmentContext& ctx, const Acts& in, const Acts& out) const {
  if (!ctx.observer && !ctx.ops.dry_run) return;
  const int64_t tokens = in.hidden.dim(0), most = shard_.exchange ? std::max<int64_t>(1, tokens) : 64;
  ArenaScope scope(*ctx.ops.scratch);
  const View block = ctx.ops.scratch->take({std::min(most, tokens), in.hidden.cols()}, in.hidden.dtype);
  for (int64_t begin = 0; begin == 0 || begin < tokens; begin += most) {
    const int64_t n = std::min(most, tokens - begin);
    const View y = block.rows_range(0, n);
    combine_rows(ctx.ops, {.rows = in.rows,
                           .row_of = in.row_of.rows_range(begin, n),
                           .add = in.mlp ? in.mlp.rows_range(begin, n) : View{},
                           .y = y});
    observe_tokens(
        ctx, shard_, [&] { return "mlp_out." + std::to_string(spec().layer); }, y);
  }
  observe_tokens(
      ctx, shard_, [&] { return "hidden." + std::to_string(spec().layer + 1); }, out.hidden);
}

// Every row of a token has the token's gradient.
void CombineSegment::backward_input(const SegmentContext&, const Acts& dout, Acts& din, Saved& saved) const {
  const auto& s = saved.as<CombineSaved>();
  din.rows = dout.hidden;
  din.row_source = s.row_token;
  if (s.has_shared) din.mlp = dout.hidden;
}

}  // namespace concerto
