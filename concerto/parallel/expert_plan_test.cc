#include "concerto/parallel/expert_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "concerto/base/rng.h"

namespace concerto {
namespace {

ModelConfig experts(int64_t count) {
  ModelConfig c;
  c.moe_num_experts = count;
  return c;
}

std::vector<int32_t> ints(View v) { return {v.as<int32_t>(), v.as<int32_t>() + v.elements()}; }

struct Routed {
  std::vector<int32_t> offsets, row_token, row_of;
};

// Rows sorted by expert; id `count`: dropped.
Routed route(const std::vector<int32_t>& ids, int64_t top_k, int64_t count, bool may_drop) {
  Routed r;
  r.row_of.resize(ids.size());
  for (int32_t e = 0; e < count + may_drop; ++e) {
    r.offsets.push_back(static_cast<int32_t>(r.row_token.size()));
    for (size_t i = 0; i < ids.size(); ++i)
      if (ids[i] == e) {
        r.row_of[i] = static_cast<int32_t>(r.row_token.size());
        r.row_token.push_back(static_cast<int32_t>(static_cast<int64_t>(i) / top_k));
      }
  }
  r.offsets.push_back(static_cast<int32_t>(r.row_token.size()));
  return r;
}

View view(std::vector<int32_t>& v, Shape shape) { return View(v.data(), shape, DType::kI32); }

TEST(ExpertPlan, PlacesAreIdsInOrder) {
  const ExpertPlaces blocks = expert_places(experts(5), {.ep = 2});
  EXPECT_EQ(blocks.experts, (std::vector<std::vector<int>>{{0, 1}, {2, 3, 4}}));
  const ExpertPlaces table = expert_places(experts(5), {.etp = 2, .ep = 3, .rank_of_expert = {2, 0, 2, 0, 2}});
  EXPECT_EQ(table.experts, (std::vector<std::vector<int>>{{1, 3}, {}, {0, 2, 4}}));
  EXPECT_EQ(table.first, (std::vector<int64_t>{0, 2, 2, 5}));
  EXPECT_EQ(table.ranks(), 6);
}

TEST(ExpertPlan, SentRowsAreSortedByRankThenExpert) {
  const ExpertPlaces places = expert_places(experts(4), {.ep = 2, .rank_of_expert = {1, 0, 1, 0}});
  // Tokens 0..2 with two choices each; 4: dropped.
  Routed r = route({0, 1, 3, 4, 2, 1}, 2, 4, true);
  Arena keep(4096), scratch(4096);
  ExpertTravel t;
  plan_sent_rows(places, view(r.offsets, {6}), view(r.row_token, {6}), view(r.row_of, {3, 2}), keep, scratch, false, t);
  EXPECT_EQ(t.kept, 5);
  EXPECT_EQ(t.dropped, 1);
  EXPECT_EQ(ints(t.send_counts), (std::vector<int32_t>{2, 1, 1, 1}));       // experts 1, 3 | 0, 2
  EXPECT_EQ(ints(t.send_token), (std::vector<int32_t>{0, 2, 1, 0, 2, 1}));  // 1: tokens 0, 2; 3: 1; 0: 0; 2: 2
  EXPECT_EQ(ints(t.send_row), (std::vector<int32_t>{3, 0, 2, 5, 4, 1}));
  EXPECT_EQ(t.send_begin.as<int64_t>()[1], 3);
  EXPECT_EQ(t.back_row.data, t.send_row.data);
}

TEST(ExpertPlan, RowsComeBackOnceFromEachSlice) {
  const ExpertPlaces places = expert_places(experts(2), {.etp = 2, .ep = 1});
  Routed r = route({1, 0, 2, 0}, 2, 2, true);
  Arena keep(4096), scratch(4096);
  ExpertTravel t;
  plan_sent_rows(places, view(r.offsets, {4}), view(r.row_token, {4}), view(r.row_of, {2, 2}), keep, scratch, false, t);
  EXPECT_EQ(t.kept, 3);
  EXPECT_EQ(t.back_rows(2), 7);
  EXPECT_EQ(ints(t.send_row), (std::vector<int32_t>{2, 0, 3, 1}));
  EXPECT_EQ(ints(t.back_row), (std::vector<int32_t>{2, 5, 0, 3, 6, 6, 1, 4}));  // the dropped one: the zero row, twice
}

TEST(ExpertPlan, ReceivedRowsAreSortedByExpertThenSender) {
  const ExpertPlaces places = expert_places(experts(4), {.ep = 2});
  Arena keep(4096);
  std::vector<int32_t> counts{1, 2, 3, 0};  // sender 0: 1 row of the first expert, 2 of the second; sender 1: 3, none
  ExpertTravel t;
  t.recv_counts = view(counts, {2, 2});
  const ExpertRound r = plan_round(places, t, 0, keep, false, 0);
  EXPECT_EQ(r.received, 6);
  EXPECT_EQ(ints(r.offsets), (std::vector<int32_t>{0, 4, 6}));
  EXPECT_EQ(ints(r.received_row), (std::vector<int32_t>{0, 3, 4, 5, 1, 2}));
  EXPECT_EQ(ints(r.sorted_row), (std::vector<int32_t>{0, 4, 5, 1, 2, 3}));
}

TEST(ExpertPlan, RanksWithoutExpertsOrRows) {
  const ExpertPlaces places = expert_places(experts(2), {.ep = 3});
  Arena keep(4096), scratch(4096);
  for (int rank = 0; rank < 3; ++rank) {
    const int64_t local = places.count(rank);
    std::vector<int32_t> counts(static_cast<size_t>(3 * local), 0);
    ExpertTravel t;
    t.recv_counts = view(counts, {3, local});
    const ExpertRound r = plan_round(places, t, 0, keep, false, 0);
    EXPECT_EQ(r.received, 0);
    EXPECT_EQ(ints(r.offsets), std::vector<int32_t>(static_cast<size_t>(local + 1), 0));
    EXPECT_EQ(rounds_needed(places, t.recv_counts, 3), 1);
  }
  Routed none = route({}, 2, 2, false);
  ExpertTravel t;
  plan_sent_rows(places, view(none.offsets, {3}), view(none.row_token, {0}), view(none.row_of, {0, 2}), keep, scratch,
                 false, t);
  EXPECT_EQ(t.kept, 0);
  EXPECT_EQ(ints(t.send_counts), (std::vector<int32_t>{0, 0}));
}

// Senders with 5 and 2 rows, at most 4 at a time: 2 rounds of 3 + 1 rows at most.
TEST(ExpertPlan, RoundsKeepWithinTheBound) {
  const ExpertPlaces places = expert_places(experts(4), {.ep = 2});
  std::vector<int32_t> counts{4, 1, 0, 2};
  const View all = view(counts, {2, 2});
  EXPECT_EQ(rounds_needed(places, all, 0), 1);
  EXPECT_EQ(rounds_needed(places, all, 7), 1);
  EXPECT_EQ(rounds_needed(places, all, 6), 2);
  EXPECT_EQ(rounds_needed(places, all, 4), 2);
  EXPECT_EQ(rounds_needed(places, all, 3), 3);
  EXPECT_EQ(rounds_needed(places, all, 2), 5);
  EXPECT_THROW(rounds_needed(places, all, 1), Bug);
  Arena keep(4096);
  ExpertTravel t{.rounds = 2};
  t.recv_counts = all;
  const ExpertRound first = plan_round(places, t, 0, keep, false, 0), last = plan_round(places, t, 1, keep, false, 0);
  EXPECT_EQ(ints(first.offsets), (std::vector<int32_t>{0, 2, 3}));  // 2 rows of the 5, 1 of the 2
  EXPECT_EQ(ints(last.offsets), (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(ints(last.received_row), (std::vector<int32_t>{0, 1, 2, 3}));
  int64_t begin[3] = {0, 5, 7};
  t.send_begin = View(begin, {3}, DType::kI64);
  EXPECT_EQ(t.sent_part(0, 1).begin, 2);
  EXPECT_EQ(t.sent_part(0, 1).count, 3);
  EXPECT_EQ(t.sent_part(1, 0).begin, 5);
  EXPECT_EQ(t.sent_part(1, 0).count, 1);
}

// A random group: the choices of each rank's tokens, and what each of them plans to send.
struct Group {
  static constexpr int64_t kExperts = 7, kTopK = 3;
  ExpertPlaces places;
  std::vector<std::vector<int32_t>> ids;
  std::vector<Arena> keep;
  std::vector<ExpertTravel> travels;

  Group(int ep, uint64_t seed) {
    const Rng rng(seed, "expert plan");
    ShardPlan plan{.ep = ep};
    for (int e = 0; e < kExperts; ++e)
      plan.rank_of_expert.push_back(
          static_cast<int>(rng.below(static_cast<uint64_t>(100 + e), static_cast<uint64_t>(ep))));
    places = expert_places(experts(kExperts), plan);
    Arena scratch(1 << 16);
    for (int r = 0; r < ep; ++r) {
      const auto tokens = static_cast<int64_t>(rng.below(static_cast<uint64_t>(200 + r), 9));
      std::vector<int32_t> mine;
      for (int64_t i = 0; i < tokens * kTopK; ++i)
        mine.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(1000 * (r + 1) + i), kExperts + 1)));
      Routed routed = route(mine, kTopK, kExperts, true);
      ids.push_back(mine);
      keep.emplace_back(1 << 16);
      travels.emplace_back();
      plan_sent_rows(places, view(routed.offsets, {kExperts + 2}), view(routed.row_token, {tokens * kTopK}),
                     view(routed.row_of, {tokens, kTopK}), keep.back(), scratch, false, travels.back());
    }
  }

  // What `owner` learns from the count exchange.
  std::vector<int32_t> counts(int owner) const {
    std::vector<int32_t> all;
    for (const ExpertTravel& t : travels)
      for (int64_t l = places.first[static_cast<size_t>(owner)]; l < places.first[static_cast<size_t>(owner) + 1]; ++l)
        all.push_back(ints(t.send_counts)[static_cast<size_t>(l)]);
    return all;
  }
};

// Checks one round of what comes to `owner`; returns how many rows did.
int64_t check_round(Group& g, int owner, const ExpertTravel& mine, int64_t round) {
  std::vector<std::pair<int, int32_t>> arrived;  // sender, its row
  for (size_t r = 0; r < g.travels.size(); ++r) {
    g.travels[r].rounds = mine.rounds;
    const Part part = g.travels[r].sent_part(owner, round);
    for (int64_t s = part.begin; s < part.end(); ++s) arrived.emplace_back(r, static_cast<int32_t>(s));
  }
  Arena own(1 << 16);
  const ExpertRound plan = plan_round(g.places, mine, round, own, false, 0);
  EXPECT_EQ(plan.received, static_cast<int64_t>(arrived.size()));
  std::vector<std::tuple<size_t, int, int64_t>> order;  // expert, sender, (token, slot)
  const std::vector<int>& held = g.places.experts[static_cast<size_t>(owner)];
  for (size_t l = 0; l < held.size(); ++l)
    for (int32_t s = ints(plan.offsets)[l]; s < ints(plan.offsets)[l + 1]; ++s) {
      const int32_t at = ints(plan.received_row)[static_cast<size_t>(s)];
      EXPECT_EQ(ints(plan.sorted_row)[static_cast<size_t>(at)], s);
      const auto [sender, row] = arrived[static_cast<size_t>(at)];
      const std::vector<int32_t> rows = ints(g.travels[static_cast<size_t>(sender)].send_row);
      const auto choice = std::find(rows.begin(), rows.end(), row) - rows.begin();
      EXPECT_EQ(g.ids[static_cast<size_t>(sender)][static_cast<size_t>(choice)], held[l]);
      order.emplace_back(l, sender, choice);
    }
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  return plan.received;
}

// What all ranks plan together: each row arrives at its expert once, in (sender, token, slot) order, in one round or in
// many.
TEST(ExpertPlan, EveryRowMeetsItsExpert) {
  for (const int ep : {1, 2, 3, 4})
    for (uint64_t seed = 0; seed < 8; ++seed)
      for (const int64_t bound : {0, 4, 9}) {
        Group g(ep, seed);
        for (int owner = 0; owner < ep; ++owner) {
          std::vector<int32_t> counts = g.counts(owner);
          ExpertTravel mine;
          mine.recv_counts = view(counts, {ep, g.places.count(owner)});
          mine.rounds = rounds_needed(g.places, mine.recv_counts, bound);
          int64_t rows = 0;
          for (int64_t round = 0; round < mine.rounds; ++round) {
            const int64_t now = check_round(g, owner, mine, round);
            EXPECT_TRUE(bound == 0 || now <= bound) << now << " rows, bound " << bound;
            rows += now;
          }
          EXPECT_EQ(rows, std::accumulate(counts.begin(), counts.end(), int64_t{0}));
        }
      }
}

TEST(ExpertPlan, RowsToPlanFor) {
  const ExpertPlaces places = expert_places(experts(8), {.ep = 4});
  EXPECT_EQ(most_received_rows(places, 2, 10, 6), 4 * 10 * 2);  // a token chooses both experts of the rank
  EXPECT_EQ(most_received_rows(places, 2, 10, 1), 4 * 10);
  EXPECT_EQ(usual_received_rows(places, 2, 10, 1), 15);
  EXPECT_EQ(usual_received_rows(places, 2, 10, 8), 80);
  EXPECT_EQ(most_received_rows(places, 0, 10, 6), 0);
}

}  // namespace
}  // namespace concerto
