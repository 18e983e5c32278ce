#include "concerto/parallel/expert_segments.h"

#include "concerto/ops/elementwise.h"

namespace concerto {
namespace {

// What is under way, for errors.
constexpr const char *kDispatch = "dispatch", *kDispatchBack = "dispatch backward", *kCombine = "combine",
                     *kCombineBack = "combine backward";

SegmentSpec communication(const ExpertLayer& layer, const char* what) {
  return {.name = "layers." + std::to_string(layer.layer) + "." + what,
          .layer = layer.layer,
          .kind = SegmentKind::kCommunication};
}

// With later rounds, whose weight gradients are made in backward_input.
SegmentSpec returning(const ExpertLayer& layer) {
  SegmentSpec spec = communication(layer, "return");
  spec.fuses_weight = layer.most_rows > 0;
  return spec;
}

struct TravelSaved {
  ExpertTravel* travel;
};

View as_column(View rows) { return rows.reshape({rows.dim(0), 1}); }

// to[i] = from[index[i]], values of the stat type.
void gather_values(const SegmentContext& ctx, View from, View index, View to) {
  gather_slots(ctx.ops, {.rows = from, .row_of = as_column(index), .slots = as_column(to)});
}

}  // namespace

DispatchStartSegment::DispatchStartSegment(std::shared_ptr<const ExpertLayer> layer)
    : Segment(communication(*layer, "dispatch_start")), layer_(std::move(layer)) {}

void DispatchStartSegment::make_plan(const SegmentContext& ctx, const Acts& in, Saved& saved) const {
  auto& t = saved.start<ExpertTravel>();
  const ExpertPlaces& places = layer_->places;
  const bool dry = ctx.ops.dry_run;
  plan_sent_rows(places, in.offsets, in.row_token, in.row_of, *saved.keep, *ctx.ops.scratch, dry, t);
  t.recv_counts = saved.keep->take({places.ranks(), layer_->local}, DType::kI32);
  layer_->exchange_counts(ctx, t);
  t.first = plan_round(places, t, 0, *saved.keep, dry, dry ? layer_->plan_rows(ctx, in.normed.dim(0), t) : 0);
}

void DispatchStartSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  if (!ctx.replay) make_plan(ctx, in, saved);
  auto& t = saved.as<ExpertTravel>();
  t.x = in.normed;
  t.slots = in.weights;
  t.rows = saved.forward->take({t.first.received, t.x.cols()}, t.x.dtype);
  t.weights = saved.passing->take({t.first.received}, t.slots.dtype);
  layer_->gather_sent(ctx, t, *saved.passing);
  const ExpertLayer::Round round{0, t.first};
  t.rows_ticket = layer_->start_to_experts(ctx, t, round, t.sent, t.rows, *saved.passing, kDispatch);
  t.weights_ticket = layer_->start_to_experts(ctx, t, round, t.sent_weights, t.weights, *saved.passing, kDispatch);
  out.weights = {};
  out.row_token = row_slice(t.send_token, 0, t.kept);
  out.row_of = t.back_row;
  out.offsets = t.first.offsets;
  out.travel = &t;
}

// The shared experts' gradient is there already, if there are any.
void DispatchStartSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& t = saved.as<ExpertTravel>();
  layer_->wait(ctx, t.rows_ticket, kDispatchBack);
  layer_->wait(ctx, t.weights_ticket, kDispatchBack);
  const int etp = layer_->places.etp;
  fill_zero(ctx.ops, row_slice(t.rows, t.kept * etp, t.back_rows(etp)));
  din.normed = saved.backward->take(t.x.shape, t.x.dtype);
  if (dout.normed)
    combine_rows(ctx.ops, {.rows = t.rows, .row_of = t.back_row, .add = dout.normed, .y = din.normed});
  else
    gather_rows_backward(ctx.ops, {.drows = t.rows, .row_of = t.back_row, .dx = din.normed});
  const View sum = row_slice(t.weights, 0, t.kept);
  for (int q = 1; q < etp; ++q)
    add(ctx.ops, {.a = sum, .b = row_slice(t.weights, q * t.kept, (q + 1) * t.kept), .out = sum});
  din.weights = saved.backward->take(t.send_row.shape, t.weights.dtype);
  gather_slots(ctx.ops, {.rows = t.weights, .row_of = t.send_row, .slots = din.weights});
}

DispatchFinishSegment::DispatchFinishSegment(std::shared_ptr<const ExpertLayer> layer)
    : Segment(communication(*layer, "dispatch_finish")), layer_(std::move(layer)) {}

void DispatchFinishSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  saved.start<TravelSaved>().travel = in.travel;
  const ExpertTravel& t = *in.travel;
  layer_->wait(ctx, t.rows_ticket, kDispatch);
  layer_->wait(ctx, t.weights_ticket, kDispatch);
  out.rows = t.rows;
  out.row_source = t.first.received_row;
  out.row_weights = saved.forward->take({t.first.received}, t.weights.dtype);
  gather_values(ctx, t.weights, t.first.received_row, out.row_weights);
}

// To where the return segment has put those of later rounds.
void DispatchFinishSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  ExpertTravel& t = *saved.as<TravelSaved>().travel;
  Arena& passing = *saved.passing;
  const View rows = passing.take(dout.rows.shape, dout.rows.dtype),
             weights = passing.take(dout.row_weights.shape, dout.row_weights.dtype);
  gather_rows(ctx.ops, {.x = dout.rows, .row_token = t.first.sorted_row, .rows = rows});
  gather_values(ctx, dout.row_weights, t.first.sorted_row, weights);
  const ExpertLayer::Round round{0, t.first};
  t.rows_ticket = layer_->start_to_tokens(ctx, t, round, rows, t.rows, passing, kDispatchBack);
  t.weights_ticket = layer_->start_to_tokens(ctx, t, round, weights, t.weights, passing, kDispatchBack);
  din.rows = din.row_source = din.row_weights = {};
}

ReturnSegment::ReturnSegment(std::shared_ptr<const ExpertLayer> layer, const ExpertsSegment& experts)
    : Segment(returning(*layer)), layer_(std::move(layer)), experts_(experts) {}

void ReturnSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  saved.start<TravelSaved>().travel = in.travel;
  const ExpertTravel& t = *in.travel;
  const int etp = layer_->places.etp;
  out.rows = saved.passing->take({t.back_rows(etp), in.rows.cols()}, in.rows.dtype);
  send_back(ctx, t, {0, t.first}, in.rows, out.rows, kCombine);
  for (int64_t round = 1; round < t.rounds; ++round) forward_later(ctx, t, round, out.rows);
  fill_zero(ctx.ops, row_slice(out.rows, t.kept * etp, t.back_rows(etp)));
  out.row_weights = {};
  out.travel = nullptr;
}

void ReturnSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  ExpertTravel& t = *saved.as<TravelSaved>().travel;
  Arena& passing = *saved.passing;
  const int etp = layer_->places.etp;
  const View sent = passing.take({t.kept, dout.rows.cols()}, dout.rows.dtype);
  gather_rows(ctx.ops, {.x = dout.rows, .row_token = dout.row_source, .rows = sent});
  t.rows = passing.take({t.back_rows(etp), t.x.cols()}, t.x.dtype);
  t.weights = passing.take({t.back_rows(etp)}, t.slots.dtype);
  if (t.rounds > 1) layer_->gather_sent(ctx, t, passing);
  for (int64_t round = 1; round < t.rounds; ++round) backward_later(ctx, t, round, sent);
  din.rows = saved.backward->take({t.first.received, sent.cols()}, sent.dtype);
  din.row_source = t.first.received_row;
  const ExpertLayer::Round first{0, t.first};
  layer_->wait(ctx, layer_->start_to_experts(ctx, t, first, sent, din.rows, passing, kCombineBack), kCombineBack);
}

// `sorted`: rows of a round as the experts give them.
void ReturnSegment::send_back(const SegmentContext& ctx, const ExpertTravel& t, const ExpertLayer::Round& round,
                              View sorted, View back, const char* what) const {
  const ArenaScope scope(*ctx.ops.scratch);
  const View rows = ctx.ops.scratch->take(sorted.shape, sorted.dtype);
  if (rows.shape.rank() > 1)
    gather_rows(ctx.ops, {.x = sorted, .row_token = round.plan.sorted_row, .rows = rows});
  else
    gather_values(ctx, sorted, round.plan.sorted_row, rows);
  layer_->wait(ctx, layer_->start_to_tokens(ctx, t, round, rows, back, *ctx.ops.scratch, what), what);
}

// From the tokens through the experts, all in scratch memory.
void ReturnSegment::bring(const SegmentContext& ctx, const ExpertTravel& t, int64_t number, Later& later) const {
  Arena& scratch = *ctx.ops.scratch;
  later.plan = plan_round(layer_->places, t, number, scratch, ctx.ops.dry_run, t.first.received);
  const int64_t received = later.plan.received;
  const View rows = scratch.take({received, t.x.cols()}, t.x.dtype), arrived = scratch.take({received}, t.slots.dtype),
             weights = scratch.take({received}, t.slots.dtype);
  const ExpertLayer::Round round{number, later.plan};
  const int64_t rows_ticket = layer_->start_to_experts(ctx, t, round, t.sent, rows, scratch, kDispatch),
                weights_ticket = layer_->start_to_experts(ctx, t, round, t.sent_weights, arrived, scratch, kDispatch);
  layer_->wait(ctx, rows_ticket, kDispatch);
  layer_->wait(ctx, weights_ticket, kDispatch);
  gather_values(ctx, arrived, later.plan.received_row, weights);
  Acts in;
  in.rows = rows;
  in.row_source = later.plan.received_row;
  in.row_weights = weights;
  in.offsets = later.plan.offsets;
  Saved& s = later.saved;
  s.keep = s.forward = s.output = s.backward = s.passing = &scratch;
  later.out = in;
  experts_.forward(ctx, in, later.out, s);
}

void ReturnSegment::forward_later(const SegmentContext& ctx, const ExpertTravel& t, int64_t round, View back) const {
  const ArenaScope scope(*ctx.ops.scratch);
  Later later;
  bring(ctx, t, round, later);
  send_back(ctx, t, {round, later.plan}, later.out.rows, back, kCombine);
}

void ReturnSegment::backward_later(const SegmentContext& ctx, const ExpertTravel& t, int64_t number, View sent) const {
  Arena& scratch = *ctx.ops.scratch;
  const ArenaScope scope(scratch);
  Later later;
  bring(ctx, t, number, later);
  const ExpertLayer::Round round{number, later.plan};
  Acts dout, din;
  dout.rows = scratch.take({later.plan.received, sent.cols()}, sent.dtype);
  dout.row_source = later.plan.received_row;
  layer_->wait(ctx, layer_->start_to_experts(ctx, t, round, sent, dout.rows, scratch, kCombineBack), kCombineBack);
  experts_.backward_input(ctx, dout, din, later.saved);
  experts_.backward_weight(ctx, later.saved);
  send_back(ctx, t, round, din.rows, t.rows, kDispatchBack);
  send_back(ctx, t, round, din.row_weights, t.weights, kDispatchBack);
}

void add_expert_segments(std::vector<std::unique_ptr<Segment>>& segments, const ParameterStore& store,
                         const ModelConfig& config, const std::string& prefix, int number, const ExpertGroup& group,
                         std::unique_ptr<Segment> shared, const TensorShard& shard) {
  const auto layer = std::make_shared<const ExpertLayer>(config, group, number);
  auto experts = std::make_unique<ExpertsSegment>(store, config, prefix, number, group.plan);
  auto returns = std::make_unique<ReturnSegment>(layer, *experts);
  segments.push_back(std::make_unique<DispatchStartSegment>(layer));
  if (shared) segments.push_back(std::move(shared));
  segments.push_back(std::make_unique<DispatchFinishSegment>(layer));
  segments.push_back(std::move(experts));
  segments.push_back(std::move(returns));
  segments.push_back(std::make_unique<CombineSegment>(number, shard));
}

}  // namespace concerto
