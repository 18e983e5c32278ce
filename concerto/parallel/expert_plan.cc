#include "concerto/parallel/expert_plan.h"

#include <algorithm>

namespace concerto {
namespace {

// Rows move with their expert's block; each block keeps its order.
void move_blocks(const ExpertPlaces& places, const int32_t* offsets, const int32_t* row_token, int32_t* moved_to,
                 const ExpertTravel& t) {
  auto* counts = t.send_counts.as<int32_t>();
  auto* begin = t.send_begin.as<int64_t>();
  auto* token = t.send_token.as<int32_t>();
  int32_t at = 0;
  begin[0] = 0;
  for (size_t rank = 0; rank < places.experts.size(); ++rank) {
    for (const int e : places.experts[rank]) {
      *counts++ = offsets[e + 1] - offsets[e];
      for (int32_t r = offsets[e]; r < offsets[e + 1]; ++r, ++at) {
        token[at] = row_token[r];
        moved_to[r] = at;
      }
    }
    begin[rank + 1] = at;
  }
  for (int64_t r = t.kept; r < t.kept + t.dropped; ++r) {
    token[r] = row_token[r];
    moved_to[r] = static_cast<int32_t>(r);
  }
}

}  // namespace

ExpertPlaces expert_places(const ModelConfig& config, const ShardPlan& plan) {
  ExpertPlaces p{.ep = plan.ep, .etp = plan.etp, .experts = {}, .first = {0}};
  for (int r = 0; r < plan.ep; ++r) {
    p.experts.push_back(local_experts(config, plan, r));
    p.first.push_back(p.first.back() + p.count(r));
  }
  CHECK(p.total() == config.moe_num_experts, "{} of {} experts have a place", p.total(), config.moe_num_experts);
  return p;
}

void plan_sent_rows(const ExpertPlaces& places, View offsets, View row_token, View row_of, Arena& keep, Arena& scratch,
                    bool dry_run, ExpertTravel& t) {
  const int64_t experts = places.total(), rows = row_token.dim(0), slots = row_of.dim(1);
  const bool may_drop = offsets.dim(0) == experts + 2;
  CHECK(may_drop || offsets.dim(0) == experts + 1, "{} offsets of {} experts", offsets.dim(0), experts);
  t.send_counts = keep.take({experts}, DType::kI32);
  t.send_begin = keep.take({places.ep + 1}, DType::kI64);
  t.send_token = keep.take({rows}, DType::kI32);
  t.send_row = keep.take(row_of.shape, DType::kI32);
  t.back_row = places.etp > 1 ? keep.take({row_of.dim(0), slots * places.etp}, DType::kI32) : t.send_row;
  const ArenaScope scope(scratch);
  const View moved_to = scratch.take({rows}, DType::kI32);
  t.kept = rows;
  t.dropped = 0;
  if (dry_run) return;
  const auto* first = offsets.as<int32_t>();
  t.kept = first[experts];
  t.dropped = rows - t.kept;
  CHECK(may_drop || t.dropped == 0, "{} of {} rows are no expert's", t.dropped, rows);
  CHECK(t.back_rows(places.etp) <= INT32_MAX, "{} rows come back", t.back_rows(places.etp));
  move_blocks(places, first, row_token.as<int32_t>(), moved_to.as<int32_t>(), t);
  const auto *from = row_of.as<int32_t>(), *to = moved_to.as<int32_t>();
  auto *row = t.send_row.as<int32_t>(), *back = t.back_row.as<int32_t>();
  for (int64_t i = 0; i < rows; ++i) row[i] = to[from[i]];
  if (places.etp == 1) return;
  const auto kept = static_cast<int32_t>(t.kept);
  for (int64_t i = 0; i < rows; ++i)
    for (int q = 0; q < places.etp; ++q)
      back[i * places.etp + q] = row[i] < kept ? q * kept + row[i] : (places.etp - 1) * kept + row[i];
}

void plan_received_rows(const ExpertPlaces& places, int64_t local, Arena& keep, bool dry_run, ExpertTravel& t) {
  const int64_t ranks = places.ranks();
  t.recv_begin = keep.take({ranks + 1}, DType::kI64);
  t.offsets = keep.take({local + 1}, DType::kI32);
  if (!dry_run) {
    const auto* counts = t.recv_counts.as<int32_t>();
    auto* begin = t.recv_begin.as<int64_t>();
    begin[0] = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      begin[r + 1] = begin[r];
      for (int64_t l = 0; l < local; ++l) begin[r + 1] += counts[r * local + l];
    }
    t.received = begin[ranks];
    CHECK(t.received <= INT32_MAX, "{} rows come to this rank", t.received);
  }
  t.received_row = keep.take({t.received}, DType::kI32);
  t.sorted_row = keep.take({t.received}, DType::kI32);
  if (dry_run) return;
  const auto* counts = t.recv_counts.as<int32_t>();
  auto *offsets = t.offsets.as<int32_t>(), *received = t.received_row.as<int32_t>(),
       *sorted = t.sorted_row.as<int32_t>();
  // offsets[l]: first where the rows of expert l begin, then where its next one goes, which in the end is where those
  // of l + 1 begin.
  int32_t at = 0;
  for (int64_t l = 0; l < local; ++l) {
    offsets[l] = at;
    for (int64_t r = 0; r < ranks; ++r) at += counts[r * local + l];
  }
  int32_t from = 0;
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t l = 0; l < local; ++l)
      for (int32_t i = 0; i < counts[r * local + l]; ++i, ++from) {
        received[offsets[l]] = from;
        sorted[from] = offsets[l]++;
      }
  for (int64_t l = local; l > 0; --l) offsets[l] = offsets[l - 1];
  offsets[0] = 0;
}

int64_t most_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k) {
  return places.ranks() * tokens * std::min(top_k, local);
}

int64_t usual_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k) {
  const int64_t balanced = places.ranks() * tokens * top_k * local / places.total();
  return std::min(balanced + (balanced + 1) / 2, most_received_rows(places, local, tokens, top_k));
}

}  // namespace concerto
