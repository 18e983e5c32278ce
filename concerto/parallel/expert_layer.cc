#include "concerto/parallel/expert_layer.h"

#include <algorithm>
#include <new>

#include "concerto/ops/permute.h"

namespace concerto {

View row_slice(View of, int64_t begin, int64_t end) {
  if (of.shape.rank() > 1) return of.rows_range(begin, end - begin);
  View v = of;
  v.shape = Shape{end - begin};
  v.row_stride = end - begin;
  if (v.data) v.data = static_cast<char*>(v.data) + begin * dtype_bytes(of.dtype);
  return v;
}

ExpertLayer::ExpertLayer(const ModelConfig& config, const ExpertGroup& group, int layer)
    : comm(group.dispatch),
      plan(group.plan),
      places(expert_places(config, group.plan)),
      local(places.count(plan.ep_rank)),
      top_k(config.moe_k),
      most_rows(group.most_rows),
      layer(layer) {
  CHECK(comm && comm->size() == places.ranks() && comm->rank() == plan.ep_rank * plan.etp + plan.etp_rank,
        "dispatch group of layer {}", layer);
  CHECK(most_rows == 0 || most_rows >= places.ranks(), "{} rows a round from {} ranks", most_rows, places.ranks());
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

void ExpertLayer::wait(const SegmentContext& ctx, int64_t ticket, const char* what) const {
  if (ctx.ops.dry_run) return;
  const CommScope scope(what, -1, layer);
  CommTicket(comm, ticket).wait();
}

void ExpertLayer::exchange_counts(const SegmentContext& ctx, ExpertTravel& t) const {
  const ArenaScope scope(*ctx.ops.scratch);
  const Lists lists = take_lists(*ctx.ops.scratch);
  const View all = ctx.ops.scratch->take({places.ranks()}, DType::kI64);
  if (ctx.ops.dry_run) return;
  for (int64_t r = 0; r < places.ranks(); ++r) {
    const auto owner = static_cast<size_t>(r / places.etp);
    lists.to[r] = row_slice(t.send_counts, places.first[owner], places.first[owner + 1]);
    lists.from[r] = row_slice(t.recv_counts.reshape({places.ranks() * local}), r * local, (r + 1) * local);
  }
  const char* const what = "dispatch counts";
  wait(ctx, start(lists, what), what);
  if (most_rows == 0) return;
  // As many rounds as the rank needs that gets most.
  int64_t mine = rounds_needed(places, t.recv_counts, most_rows);
  for (int64_t r = 0; r < places.ranks(); ++r) lists.from[r] = row_slice(all, r, r + 1);
  const CommScope rounds("dispatch rounds", -1, layer);
  comm->all_gather(View(&mine, {1}, DType::kI64), {lists.from, static_cast<size_t>(places.ranks())});
  t.rounds = *std::max_element(all.as<int64_t>(), all.as<int64_t>() + places.ranks());
}

// Ranks that share a micro-batch's tokens may differ by one.
int64_t ExpertLayer::plan_rows(const SegmentContext& ctx, int64_t tokens, ExpertTravel& t) const {
  const int64_t most_tokens = std::min(ctx.tokens->count, tokens + 1);
  const int64_t rows = (ctx.usual_load ? usual_received_rows : most_received_rows)(places, local, most_tokens, top_k);
  if (most_rows == 0 || rows <= most_rows) return rows;
  t.rounds = 2;  // the first, which is kept, and one of the others, which are alike
  return most_rows;
}

void ExpertLayer::gather_sent(const SegmentContext& ctx, ExpertTravel& t, Arena& passing) const {
  t.sent = passing.take({t.kept, t.x.cols()}, t.x.dtype);
  t.sent_weights = passing.take({t.kept + t.dropped}, t.slots.dtype);
  gather_rows(ctx.ops, {.x = t.x, .row_token = row_slice(t.send_token, 0, t.kept), .rows = t.sent});
  scatter_slots(ctx.ops, {.slots = t.slots, .row_of = t.send_row, .rows = t.sent_weights});
}

int64_t ExpertLayer::start_to_experts(const SegmentContext& ctx, const ExpertTravel& t, const Round& round, View sent,
                                      View received, Arena& passing, const char* what) const {
  const Lists lists = take_lists(passing);
  if (ctx.ops.dry_run) return 0;
  const auto* begin = round.plan.begin.as<int64_t>();
  for (int64_t r = 0; r < places.ranks(); ++r) {
    const Part part = t.sent_part(r / places.etp, round.number);
    lists.to[r] = row_slice(sent, part.begin, part.end());
    lists.from[r] = row_slice(received, begin[r], begin[r + 1]);
  }
  return start(lists, what);
}

int64_t ExpertLayer::start_to_tokens(const SegmentContext& ctx, const ExpertTravel& t, const Round& round,
                                     View received, View back, Arena& passing, const char* what) const {
  const Lists lists = take_lists(passing);
  if (ctx.ops.dry_run) return 0;
  const auto* begin = round.plan.begin.as<int64_t>();
  for (int64_t r = 0; r < places.ranks(); ++r) {
    const Part part = t.sent_part(r / places.etp, round.number);
    const int64_t copy = r % places.etp * t.kept;
    lists.to[r] = row_slice(received, begin[r], begin[r + 1]);
    lists.from[r] = row_slice(back, copy + part.begin, copy + part.end());
  }
  return start(lists, what);
}

}  // namespace concerto
