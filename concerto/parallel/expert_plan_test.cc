#include "concerto/parallel/expert_plan.h"

#include <gtest/gtest.h>

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
  plan_received_rows(places, 2, keep, false, t);
  EXPECT_EQ(t.received, 6);
  EXPECT_EQ(ints(t.offsets), (std::vector<int32_t>{0, 4, 6}));
  EXPECT_EQ(ints(t.received_row), (std::vector<int32_t>{0, 3, 4, 5, 1, 2}));
  EXPECT_EQ(ints(t.sorted_row), (std::vector<int32_t>{0, 4, 5, 1, 2, 3}));
}

TEST(ExpertPlan, RanksWithoutExpertsOrRows) {
  const ExpertPlaces places = expert_places(experts(2), {.ep = 3});
  Arena keep(4096), scratch(4096);
  for (int rank = 0; rank < 3; ++rank) {
    const int64_t local = places.count(rank);
    std::vector<int32_t> counts(static_cast<size_t>(3 * local), 0);
    ExpertTravel t;
    t.recv_counts = view(counts, {3, local});
    plan_received_rows(places, local, keep, false, t);
    EXPECT_EQ(t.received, 0);
    EXPECT_EQ(ints(t.offsets), std::vector<int32_t>(static_cast<size_t>(local + 1), 0));
  }
  Routed none = route({}, 2, 2, false);
  ExpertTravel t;
  plan_sent_rows(places, view(none.offsets, {3}), view(none.row_token, {0}), view(none.row_of, {0, 2}), keep, scratch,
                 false, t);
  EXPECT_EQ(t.kept, 0);
  EXPECT_EQ(ints(t.send_counts), (std::vector<int32_t>{0, 0}));
}

// What all ranks plan together: each row arrives at its expert, in (sender, token, slot) order.
TEST(ExpertPlan, EveryRowMeetsItsExpert) {
  for (const int ep : {1, 2, 3, 4})
    for (uint64_t seed = 0; seed < 8; ++seed) {
      const Rng rng(seed, "expert plan");
      const int64_t count = 7, top_k = 3;
      ShardPlan plan{.ep = ep};
      for (int e = 0; e < count; ++e) plan.rank_of_expert.push_back(static_cast<int>(rng.below(100 + e, ep)));
      const ExpertPlaces places = expert_places(experts(count), plan);
      std::vector<Arena> keep;
      Arena scratch(1 << 16);
      std::vector<ExpertTravel> travels(static_cast<size_t>(ep));
      std::vector<std::vector<int32_t>> ids(static_cast<size_t>(ep));
      for (int r = 0; r < ep; ++r) {
        auto& mine = ids[static_cast<size_t>(r)];
        const int64_t tokens = static_cast<int64_t>(rng.below(200 + r, 9));
        for (int64_t i = 0; i < tokens * top_k; ++i)
          mine.push_back(static_cast<int32_t>(rng.below(1000 * (r + 1) + i, count + 1)));
        Routed routed = route(mine, top_k, count, true);
        keep.emplace_back(1 << 16);
        plan_sent_rows(places, view(routed.offsets, {count + 2}), view(routed.row_token, {tokens * top_k}),
                       view(routed.row_of, {tokens, top_k}), keep.back(), scratch, false,
                       travels[static_cast<size_t>(r)]);
      }
      for (int owner = 0; owner < ep; ++owner) {
        const int64_t local = places.count(owner);
        std::vector<int32_t> counts;
        std::vector<std::pair<int, int32_t>> arrived;  // sender, its row
        for (int r = 0; r < ep; ++r) {
          const ExpertTravel& t = travels[static_cast<size_t>(r)];
          for (int64_t l = 0; l < local; ++l)
            counts.push_back(ints(t.send_counts)[static_cast<size_t>(places.first[owner] + l)]);
          for (int64_t s = t.send_begin.as<int64_t>()[owner]; s < t.send_begin.as<int64_t>()[owner + 1]; ++s)
            arrived.emplace_back(r, static_cast<int32_t>(s));
        }
        ExpertTravel t;
        t.recv_counts = view(counts, {ep, local});
        Arena own(1 << 16);
        plan_received_rows(places, local, own, false, t);
        ASSERT_EQ(t.received, static_cast<int64_t>(arrived.size()));
        std::vector<std::tuple<int64_t, int, int64_t>> order;  // expert, sender, (token, slot)
        for (int64_t l = 0; l < local; ++l)
          for (int32_t s = ints(t.offsets)[static_cast<size_t>(l)]; s < ints(t.offsets)[static_cast<size_t>(l + 1)];
               ++s) {
            const int32_t at = ints(t.received_row)[static_cast<size_t>(s)];
            EXPECT_EQ(ints(t.sorted_row)[static_cast<size_t>(at)], s);
            const auto [sender, row] = arrived[static_cast<size_t>(at)];
            const std::vector<int32_t> rows = ints(travels[static_cast<size_t>(sender)].send_row);
            const auto choice = std::find(rows.begin(), rows.end(), row) - rows.begin();
            const auto& mine = ids[static_cast<size_t>(sender)];
            EXPECT_EQ(mine[static_cast<size_t>(choice)],
                      places.experts[static_cast<size_t>(owner)][static_cast<size_t>(l)]);
            order.emplace_back(l, sender, choice);
          }
        EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
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
