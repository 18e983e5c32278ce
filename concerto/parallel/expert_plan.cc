#include "concerto/parallel/expert_plan.h"

#include <algorithm>
#include <numeric>

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

// f(sender, expert, rows) of a round, in the order in which they arrive.
template <class F>
void each_block(const ExpertTravel& t, int64_t round, int64_t ranks, int64_t local, F&& f) {
  const auto* counts = t.recv_counts.as<int32_t>();
  for (int64_t r = 0; r < ranks; ++r, counts += local) {
    const Part part = part_of(std::accumulate(counts, counts + local, int64_t{0}), t.rounds, round);
    int64_t at = 0;
    for (int64_t l = 0; l < local; ++l, at += counts[l - 1]) {
      const int64_t begin = std::max(at, part.begin), end = std::min(at + counts[l], part.end());
      f(r, l, static_cast<int32_t>(std::max<int64_t>(0, end - begin)));
    }
  }
}

void count_round(const ExpertTravel& t, int64_t round, int64_t ranks, int64_t local, ExpertRound& to) {
  auto* begin = to.begin.as<int64_t>();
  auto* offsets = to.offsets.as<int32_t>();
  std::fill_n(begin, ranks + 1, 0);
  std::fill_n(offsets, local + 1, 0);
  each_block(t, round, ranks, local, [&](int64_t r, int64_t l, int32_t rows) {
    begin[r + 1] += rows;
    offsets[l + 1] += rows;
  });
  for (int64_t r = 0; r < ranks; ++r) begin[r + 1] += begin[r];
  for (int64_t l = 0; l < local; ++l) offsets[l + 1] += offsets[l];
  to.received = begin[ranks];
  CHECK(to.received <= INT32_MAX, "{} rows come to this rank", to.received);
}

// offsets[l] is where the next row of expert l goes, and in the end where those of l + 1 begin.
void sort_round(const ExpertTravel& t, int64_t round, int64_t ranks, int64_t local, ExpertRound& to) {
  auto *offsets = to.offsets.as<int32_t>(), *received = to.received_row.as<int32_t>(),
       *sorted = to.sorted_row.as<int32_t>();
  int32_t from = 0;
  each_block(t, round, ranks, local, [&](int64_t, int64_t l, int32_t rows) {
    for (int32_t i = 0; i < rows; ++i, ++from) {
      received[offsets[l]] = from;
      sorted[from] = offsets[l]++;
    }
  });
  for (int64_t l = local; l > 0; --l) offsets[l] = offsets[l - 1];
  offsets[0] = 0;
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

Part ExpertTravel::sent_part(int64_t ep_rank, int64_t round) const {
  const auto* begin = send_begin.as<int64_t>() + ep_rank;
  const Part part = part_of(begin[1] - begin[0], rounds, round);
  return {begin[0] + part.begin, part.count};
}

int64_t rounds_needed(const ExpertPlaces& places, View counts, int64_t most_rows) {
  if (most_rows == 0 || counts.elements() == 0) return 1;
  CHECK(most_rows >= places.ranks(), "{} rows a round from {} ranks", most_rows, places.ranks());
  const int64_t local = counts.dim(1);
  const auto* count = counts.as<int32_t>();
  const auto rows = [&](int64_t rounds) {
    int64_t most = 0;
    for (int64_t r = 0; r < places.ranks(); ++r)
      most += (std::accumulate(count + r * local, count + (r + 1) * local, int64_t{0}) + rounds - 1) / rounds;
    return most;
  };
  int64_t rounds = std::max<int64_t>(1, rows(1) / most_rows);
  while (rows(rounds) > most_rows) ++rounds;
  return rounds;
}

ExpertRound plan_round(const ExpertPlaces& places, const ExpertTravel& t, int64_t round, Arena& arena, bool dry_run,
                       int64_t planned) {
  const int64_t ranks = places.ranks(), local = t.recv_counts.dim(1);
  ExpertRound r{.received = planned};
  r.begin = arena.take({ranks + 1}, DType::kI64);
  r.offsets = arena.take({local + 1}, DType::kI32);
  if (!dry_run) count_round(t, round, ranks, local, r);
  r.received_row = arena.take({r.received}, DType::kI32);
  r.sorted_row = arena.take({r.received}, DType::kI32);
  if (!dry_run) sort_round(t, round, ranks, local, r);
  return r;
}

int64_t most_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k) {
  return places.ranks() * tokens * std::min(top_k, local);
}

int64_t usual_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k) {
  const int64_t balanced = places.ranks() * tokens * top_k * local / places.total();
  return std::min(balanced + (balanced + 1) / 2, most_received_rows(places, local, tokens, top_k));
}

}  // namespace concerto
