#include "concerto/parallel/expert_segments.h"

#include <algorithm>
#include <new>

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

struct TravelSaved {
  ExpertTravel* travel;
};

View slice(View of, int64_t begin, int64_t end) {
  if (of.shape.rank() > 1) return of.rows_range(begin, end - begin);
  View v = of;
  v.shape = Shape{end - begin};
  v.row_stride = end - begin;
  if (v.data) v.data = static_cast<char*>(v.data) + begin * dtype_bytes(of.dtype);
  return v;
}

View as_column(View rows) { return rows.reshape({rows.dim(0), 1}); }

// to[i] = from[index[i]], values of the stat type.
void gather_values(const SegmentContext& ctx, View from, View index, View to) {
  gather_slots(ctx.ops, {.rows = from, .row_of = as_column(index), .slots = as_column(to)});
}

}  // namespace

ExpertLayer::ExpertLayer(const ModelConfig& config, const ExpertGroup& group, int layer)
    : comm(group.dispatch),
      plan(group.plan),
      places(expert_places(config, group.plan)),
      local(places.count(plan.ep_rank)),
      top_k(config.moe_k),
      layer(layer) {
  CHECK(comm && comm->size() == places.ranks() && comm->rank() == plan.ep_rank * plan.etp + plan.etp_rank,
        "dispatch group of layer {}", layer);
}

ExpertLayer::Lists ExpertLayer::take_lists(Arena& arena) const {
  const auto ranks = static_cast<size_t>(places.ranks());
  void* bytes = arena.take_bytes(static_cast<int64_t>(2 * ranks * sizeof(View)));
  if (!bytes) return {};
  View* views = new (bytes) View[2 * ranks];
  return {views, views + ranks};
}

int64_t ExpertLayer::start(const Lists& lists, const char* what) const {
  const CommScope scope(what, -1, layer);
  const auto ranks = static_cast<size_t>(places.ranks());
  return comm->start_all_to_all({lists.to, ranks}, {lists.from, ranks}).put_down();
}

void ExpertLayer::exchange_counts(const SegmentContext& ctx, ExpertTravel& t) const {
  const ArenaScope scope(*ctx.ops.scratch);
  const Lists lists = take_lists(*ctx.ops.scratch);
  if (ctx.ops.dry_run) return;
  for (int64_t r = 0; r < places.ranks(); ++r) {
    const auto owner = static_cast<size_t>(r / places.etp);
    lists.to[r] = slice(t.send_counts, places.first[owner], places.first[owner + 1]);
    lists.from[r] = View(t.recv_counts.as<int32_t>() + r * local, {local}, DType::kI32);
  }
  const char* const what = "dispatch counts";
  wait(ctx, start(lists, what), what);
}

int64_t ExpertLayer::start_to_experts(const SegmentContext& ctx, const ExpertTravel& t, View sent, View received,
                                      Arena& passing, const char* what) const {
  const Lists lists = take_lists(passing);
  if (ctx.ops.dry_run) return 0;
  const auto *send = t.send_begin.as<int64_t>(), *recv = t.recv_begin.as<int64_t>();
  for (int64_t r = 0; r < places.ranks(); ++r) {
    lists.to[r] = slice(sent, send[r / places.etp], send[r / places.etp + 1]);
    lists.from[r] = slice(received, recv[r], recv[r + 1]);
  }
  return start(lists, what);
}

int64_t ExpertLayer::start_to_tokens(const SegmentContext& ctx, const ExpertTravel& t, View received, View back,
                                     Arena& passing, const char* what) const {
  const Lists lists = take_lists(passing);
  if (ctx.ops.dry_run) return 0;
  const auto *send = t.send_begin.as<int64_t>(), *recv = t.recv_begin.as<int64_t>();
  for (int64_t r = 0; r < places.ranks(); ++r) {
    const int64_t copy = r % places.etp * t.kept;
    lists.to[r] = slice(received, recv[r], recv[r + 1]);
    lists.from[r] = slice(back, copy + send[r / places.etp], copy + send[r / places.etp + 1]);
  }
  return start(lists, what);
}

void ExpertLayer::wait(const SegmentContext& ctx, int64_t ticket, const char* what) const {
  if (ctx.ops.dry_run) return;
  const CommScope scope(what, -1, layer);
  CommTicket(comm, ticket).wait();
}

DispatchStartSegment::DispatchStartSegment(std::shared_ptr<const ExpertLayer> layer)
    : Segment(communication(*layer, "dispatch_start")), layer_(std::move(layer)) {}

void DispatchStartSegment::make_plan(const SegmentContext& ctx, const Acts& in, Saved& saved) const {
  auto& t = saved.start<ExpertTravel>();
  const ExpertPlaces& places = layer_->places;
  plan_sent_rows(places, in.offsets, in.row_token, in.row_of, *saved.keep, *ctx.ops.scratch, ctx.ops.dry_run, t);
  t.recv_counts = saved.keep->take({places.ranks(), layer_->local}, DType::kI32);
  if (ctx.ops.dry_run) {
    // Ranks that share a micro-batch's tokens may differ by one.
    const int64_t tokens = std::min(ctx.tokens->count, in.normed.dim(0) + 1);
    t.received =
        (ctx.usual_load ? usual_received_rows : most_received_rows)(places, layer_->local, tokens, layer_->top_k);
  }
  layer_->exchange_counts(ctx, t);
  plan_received_rows(places, layer_->local, *saved.keep, ctx.ops.dry_run, t);
}

void DispatchStartSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  if (!ctx.replay) make_plan(ctx, in, saved);
  auto& t = saved.as<ExpertTravel>();
  const View token = slice(t.send_token, 0, t.kept), x = in.normed;
  const View sent = saved.passing->take({t.kept, x.cols()}, x.dtype),
             sent_weights = saved.passing->take({t.kept + t.dropped}, in.weights.dtype);
  t.rows = saved.forward->take({t.received, x.cols()}, x.dtype);
  t.weights = saved.passing->take({t.received}, in.weights.dtype);
  gather_rows(ctx.ops, {.x = x, .row_token = token, .rows = sent});
  scatter_slots(ctx.ops, {.slots = in.weights, .row_of = t.send_row, .rows = sent_weights});
  t.rows_ticket = layer_->start_to_experts(ctx, t, sent, t.rows, *saved.passing, kDispatch);
  t.weights_ticket = layer_->start_to_experts(ctx, t, sent_weights, t.weights, *saved.passing, kDispatch);
  out.weights = {};
  out.row_token = token;
  out.row_of = t.back_row;
  out.offsets = t.offsets;
  out.travel = &t;
}

// The shared experts' gradient is there already, if there are any.
void DispatchStartSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  auto& t = saved.as<ExpertTravel>();
  layer_->wait(ctx, t.rows_ticket, kDispatchBack);
  layer_->wait(ctx, t.weights_ticket, kDispatchBack);
  const int etp = layer_->places.etp;
  fill_zero(ctx.ops, slice(t.rows, t.kept * etp, t.back_rows(etp)));
  din.normed = saved.backward->take({t.send_row.dim(0), t.rows.cols()}, t.rows.dtype);
  if (dout.normed)
    combine_rows(ctx.ops, {.rows = t.rows, .row_of = t.back_row, .add = dout.normed, .y = din.normed});
  else
    gather_rows_backward(ctx.ops, {.drows = t.rows, .row_of = t.back_row, .dx = din.normed});
  const View sum = slice(t.weights, 0, t.kept);
  for (int q = 1; q < etp; ++q)
    add(ctx.ops, {.a = sum, .b = slice(t.weights, q * t.kept, (q + 1) * t.kept), .out = sum});
  din.weights = saved.backward->take(t.send_row.shape, t.weights.dtype);
  gather_slots(ctx.ops, {.rows = t.weights, .row_of = t.send_row, .slots = din.weights});
}

DispatchFinishSegment::DispatchFinishSegment(std::shared_ptr<const ExpertLayer> layer)
    : Segment(communication(*layer, "dispatch_finish")), layer_(std::move(layer)) {}

void DispatchFinishSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  saved.start<TravelSaved>().travel = in.travel;
  ExpertTravel& t = *in.travel;
  layer_->wait(ctx, t.rows_ticket, kDispatch);
  layer_->wait(ctx, t.weights_ticket, kDispatch);
  out.rows = t.rows;
  out.row_source = t.received_row;
  out.row_weights = saved.forward->take({t.received}, t.weights.dtype);
  gather_values(ctx, t.weights, t.received_row, out.row_weights);
}

void DispatchFinishSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  ExpertTravel& t = *saved.as<TravelSaved>().travel;
  Arena& passing = *saved.passing;
  const int etp = layer_->places.etp;
  const View rows = passing.take(dout.rows.shape, dout.rows.dtype),
             weights = passing.take(dout.row_weights.shape, dout.row_weights.dtype);
  t.rows = passing.take({t.back_rows(etp), rows.cols()}, rows.dtype);
  t.weights = passing.take({t.back_rows(etp)}, weights.dtype);
  gather_rows(ctx.ops, {.x = dout.rows, .row_token = t.sorted_row, .rows = rows});
  gather_values(ctx, dout.row_weights, t.sorted_row, weights);
  t.rows_ticket = layer_->start_to_tokens(ctx, t, rows, t.rows, passing, kDispatchBack);
  t.weights_ticket = layer_->start_to_tokens(ctx, t, weights, t.weights, passing, kDispatchBack);
  din.rows = din.row_source = din.row_weights = {};
}

ReturnSegment::ReturnSegment(std::shared_ptr<const ExpertLayer> layer)
    : Segment(communication(*layer, "return")), layer_(std::move(layer)) {}

void ReturnSegment::forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const {
  saved.start<TravelSaved>().travel = in.travel;
  const ExpertTravel& t = *in.travel;
  const int etp = layer_->places.etp;
  const View rows = saved.passing->take(in.rows.shape, in.rows.dtype);
  out.rows = saved.passing->take({t.back_rows(etp), rows.cols()}, rows.dtype);
  gather_rows(ctx.ops, {.x = in.rows, .row_token = t.sorted_row, .rows = rows});
  layer_->wait(ctx, layer_->start_to_tokens(ctx, t, rows, out.rows, *saved.passing, kCombine), kCombine);
  fill_zero(ctx.ops, slice(out.rows, t.kept * etp, t.back_rows(etp)));
  out.row_weights = {};
  out.travel = nullptr;
}

void ReturnSegment::backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const {
  const ExpertTravel& t = *saved.as<TravelSaved>().travel;
  const View sent = saved.passing->take({t.kept, dout.rows.cols()}, dout.rows.dtype);
  din.rows = saved.backward->take({t.received, dout.rows.cols()}, dout.rows.dtype);
  din.row_source = t.received_row;
  gather_rows(ctx.ops, {.x = dout.rows, .row_token = dout.row_source, .rows = sent});
  layer_->wait(ctx, layer_->start_to_experts(ctx, t, sent, din.rows, *saved.passing, kCombineBack), kCombineBack);
}

void add_expert_segments(std::vector<std::unique_ptr<Segment>>& segments, const ParameterStore& store,
                         const ModelConfig& config, const std::string& prefix, int number, const ExpertGroup& group,
                         std::unique_ptr<Segment> shared) {
  const auto layer = std::make_shared<const ExpertLayer>(config, group, number);
  segments.push_back(std::make_unique<DispatchStartSegment>(layer));
  if (shared) segments.push_back(std::move(shared));
  segments.push_back(std::make_unique<DispatchFinishSegment>(layer));
  segments.push_back(std::make_unique<ExpertsSegment>(store, config, prefix, number, group.plan));
  segments.push_back(std::make_unique<ReturnSegment>(layer));
  segments.push_back(std::make_unique<CombineSegment>(number));
}

}  // namespace concerto
