#include "concerto/schedule/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "concerto/base/error.h"

namespace concerto {
namespace {

PipelineSchedule built(const char* name, int pp, int64_t m, int vpp = 1, bool together = false) {
  return build_pipeline({.name = name, .pp = pp, .vpp = vpp, .micro_batches = m, .together = together});
}

double bubble(const char* name, int pp, int64_t m, int vpp = 1) {
  return time_pipeline(built(name, pp, m, vpp)).bubble;
}

TEST(Pipeline, OneRankPlaysInTurn) {
  const auto list = [](const char* name, int64_t m, bool together = false) {
    const PipelineSchedule s = built(name, 1, m, 1, together);
    EXPECT_NO_THROW(validate_pipeline(s));
    EXPECT_EQ(s.slots[0][0], together ? m : std::min<int64_t>(m, 1));
    return list_text(s.ranks[0]);
  };
  EXPECT_EQ(list("1f1b", 0), "");
  EXPECT_EQ(list("1f1b", 2), "F0 B0 F1 B1");
  EXPECT_EQ(list("1f1b", 2, true), "F0 F1 B0 B1");
  EXPECT_EQ(list("zero_bubble", 2), "F0 I0 W0 F1 I1 W1");
  EXPECT_EQ(list("zero_bubble", 2, true), "F0 F1 I0 W0 I1 W1");
  EXPECT_EQ(list_text(built("interleaved", 1, 2, 2).ranks[0]), "F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1");
  EXPECT_EQ(list_text(built("zero_bubble_v", 1, 1).ranks[0]), "F0 F0.1 I0.1 W0.1 I0 W0");
}

TEST(Pipeline, ListsOfTwoRanks) {
  const PipelineSchedule s = built("1f1b", 2, 3);
  EXPECT_EQ(list_text(s.ranks[0]), "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 B1 RB2 B2");
  EXPECT_EQ(list_text(s.ranks[1]), "RF0 F0 B0 SB0 RF1 F1 B1 SB1 RF2 F2 B2 SB2");
  const PipelineSchedule z = built("zero_bubble", 2, 2);
  EXPECT_EQ(list_text(z.ranks[0]), "F0 SF0 F1 SF1 RB0 I0 W0 RB1 I1 W1");
  EXPECT_EQ(list_text(z.ranks[1]), "RF0 F0 I0 SB0 RF1 F1 I1 SB1 W0 W1");
  // The last rank of a V passes to itself.
  const PipelineSchedule v = built("zero_bubble_v", 2, 1);
  EXPECT_EQ(list_text(v.ranks[1]), "RF0 F0 F0.1 SF0.1 RB0.1 I0.1 W0.1 I0 SB0 W0");
  const PipelineSchedule together = built("1f1b", 2, 2, 1, true);
  EXPECT_EQ(list_text(together.ranks[1]), "RF0 RF1 F0 F1 B0 SB0 B1 SB1");
}

TEST(Pipeline, Places) {
  PipelineSchedule s = built("interleaved", 3, 3, 2);
  EXPECT_EQ(s.virtual_stage(1, 1), 4);
  EXPECT_EQ(s.rank_of(4), 1);
  EXPECT_EQ(s.chunk_of(4), 1);
  EXPECT_TRUE(s.sends(2, 0));
  EXPECT_FALSE(s.sends(2, 1));
  s = built("zero_bubble_v", 3, 3);
  EXPECT_EQ(s.virtual_stage(1, 1), 4);
  EXPECT_EQ(s.rank_of(3), 2);
  EXPECT_EQ(s.rank_of(5), 0);
  EXPECT_FALSE(s.sends(2, 0));
  EXPECT_FALSE(s.receives(2, 1));
  EXPECT_TRUE(s.receives(0, 1));
}

TEST(Pipeline, RefusesWhatCannotBe) {
  const auto refused = [](const PipelineOptions& o) {
    try {
      build_pipeline(o);
    } catch (const Error& e) {
      return e.where + ": " + e.problem;
    }
    return std::string();
  };
  EXPECT_EQ(refused({.name = "fastest"}), "parallel.schedule: 'fastest' is not a schedule");
  EXPECT_EQ(refused({.name = "interleaved", .pp = 2}),
            "parallel.vpp: interleaved with one virtual stage a rank has nothing to interleave");
  EXPECT_EQ(refused({.name = "1f1b", .pp = 2, .vpp = 2}), "parallel.vpp: 2 virtual stages a rank: 1f1b has 1");
  EXPECT_EQ(refused({.name = "zero_bubble_v", .vpp = 3}), "parallel.vpp: 3 virtual stages a rank: zero_bubble_v has 2");
  EXPECT_EQ(refused({.name = "zero_bubble_v", .pp = 2, .vpp = 2}), "");
  EXPECT_EQ(refused({.name = "interleaved"}), "");
}

// 8 stages, 32 micro-batches, F = I = W = 1.
TEST(Pipeline, BubblesAsPublished) {
  EXPECT_NEAR(bubble("1f1b", 8, 32), 7. / 39, 1e-12);
  EXPECT_NEAR(bubble("interleaved", 8, 32, 2), 7. / 71, 1e-12);
  EXPECT_NEAR(bubble("interleaved", 8, 32, 4), 7. / 135, 1e-12);
  EXPECT_NEAR(bubble("zero_bubble", 8, 32), 7. / 103, 1e-12);
  EXPECT_NEAR(bubble("zero_bubble_v", 8, 32), 3.5 / 99.5, 1e-12);
  EXPECT_NEAR(bubble_bound({.name = "1f1b", .pp = 8, .micro_batches = 32}), 7. / 39, 1e-12);
  EXPECT_NEAR(bubble_bound({.name = "interleaved", .pp = 8, .vpp = 2, .micro_batches = 32}), 7. / 71, 1e-12);
  EXPECT_NEAR(bubble_bound({.name = "zero_bubble", .pp = 8, .micro_batches = 32}), 7. / 103, 1e-12);
  EXPECT_NEAR(bubble_bound({.name = "zero_bubble_v", .pp = 8, .micro_batches = 32}), 3.5 / 99.5, 1e-12);
  for (const char* name : {"1f1b", "interleaved", "zero_bubble", "zero_bubble_v"})
    EXPECT_EQ(bubble(name, 1, 3, name == std::string("interleaved") ? 2 : 1), 0) << name;
}

TEST(Pipeline, InFlightAsPublished) {
  EXPECT_EQ(peak_in_flight(built("1f1b", 4, 16)), (std::vector<int64_t>{4, 3, 2, 1}));
  EXPECT_EQ(peak_in_flight(built("zero_bubble", 4, 16)), (std::vector<int64_t>{4, 4, 4, 4}));
  EXPECT_EQ(peak_in_flight(built("zero_bubble_v", 4, 16)), (std::vector<int64_t>{8, 8, 8, 8}));
  EXPECT_EQ(peak_in_flight(built("interleaved", 4, 16, 2)), (std::vector<int64_t>{11, 9, 7, 5}));
  EXPECT_EQ(peak_in_flight(built("1f1b", 4, 16, 1, true)), (std::vector<int64_t>{16, 16, 16, 16}));
  EXPECT_EQ(built("zero_bubble_v", 4, 16).slots, (std::vector<std::vector<int64_t>>{{7, 1}, {6, 2}, {5, 3}, {4, 4}}));
}

TEST(Pipeline, BugNamesRankAndAction) {
  const auto fault = [](const PipelineSchedule& s) {
    try {
      validate_pipeline(s);
    } catch (const Bug& bug) {
      return std::string(bug.what());
    }
    return std::string();
  };
  const auto has = [&](const PipelineSchedule& s, const char* part) {
    EXPECT_NE(fault(s).find(part), std::string::npos) << fault(s);
  };
  const PipelineSchedule good = built("1f1b", 2, 3);
  EXPECT_EQ(fault(good), "");
  PipelineSchedule s = good;  // rank 0 waits for gradients before it has sent what they need
  std::rotate(s.ranks[0].begin() + 1, s.ranks[0].begin() + 4, s.ranks[0].begin() + 5);
  has(s, "rank 0, action 1 RB0 waits for rank 1's SB0; rank 1, action 0 RF0 waits for rank 0's SF0");
  s = good;
  s.ranks[1].erase(s.ranks[1].begin() + 3);
  has(s, "rank 1: SB0 is missing");
  s = good;
  s.ranks[0][0].chunk = 1;
  has(s, "rank 0, action 0: no such kind, chunk or micro-batch");
  s = good;
  s.slots[0][0] = 1;
  has(s, "rank 0, action 2 F1: 2 micro-batches of chunk 0 in flight, 1 slots");
  s = good;
  s.ranks[0].insert(s.ranks[0].begin(), {ActionKind::kRecvForward, 0});
  has(s, "rank 0, action 0 RF0 has no place on this rank");
  s = good;
  std::swap(s.ranks[1][0], s.ranks[1][1]);
  has(s, "rank 1, action 0 F0 comes before its cause RF0");
  s = good;
  s.ranks[1][5] = s.ranks[1][1];
  has(s, "rank 1, action 5 F0 is there twice");
  // Two sends change places: the other rank receives what it does not expect.
  s = good;
  std::swap(s.ranks[0][1], s.ranks[0][2]);
  std::swap(s.ranks[0][2], s.ranks[0][3]);
  has(s, "rank 1, action 0 RF0: what comes next from rank 0 is SF1");
  // The turn of a V: chunk 1 reads what lies in chunk 0's slot, to its end.
  s = built("zero_bubble_v", 2, 3);
  auto& turn = s.ranks[1];
  const auto late = std::find(turn.begin(), turn.end(), Action{ActionKind::kBackwardWeight, 0, 1});
  const auto early = std::find(turn.begin(), turn.end(), Action{ActionKind::kBackwardWeight, 0, 0});
  std::rotate(late, late + 1, early + 1);
  has(s, "W0 comes before its cause W0.1");
  // More in flight than the name allows, with slots for all: 1f1b of two ranks has at most two.
  s = good;
  s.ranks = {};
  for (int rank = 0; rank < 2; ++rank) {
    s.ranks.emplace_back();
    for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward})
      for (int32_t m = 0; m < 3; ++m) s.ranks[rank].push_back({kind, m});
  }
  s = complete_pipeline(s);
  EXPECT_EQ(s.slots, (std::vector<std::vector<int64_t>>{{3}, {3}}));
  has(s, "rank 0: 3 micro-batches in flight; 1f1b has at most 2");
  s.name = "mine";
  EXPECT_EQ(fault(s), "");
  // Together: a backward between forwards.
  s = built("1f1b", 2, 3);
  s.together = true;
  has(s, "rank 0, action 2 F1 stands apart from the other forwards of its chunk");
}

// A rank that must reuse its only slot while the gradients it sent from there wait for a rank that waits for it.
TEST(Pipeline, SlotHeldByASendDeadlocks) {
  PipelineSchedule s;
  s.name = "mine";
  s.pp = 2;
  s.micro_batches = 2;
  const auto list = [](std::initializer_list<std::pair<ActionKind, int>> actions) {
    std::vector<Action> out;
    for (const auto& [kind, m] : actions) out.push_back({kind, m});
    return out;
  };
  using enum ActionKind;
  s.ranks = {list({{kForward, 0},
                   {kSendForward, 0},
                   {kForward, 1},
                   {kSendForward, 1},
                   {kRecvBackward, 0},
                   {kRecvBackward, 1},
                   {kBackward, 0},
                   {kBackward, 1}}),
             list({{kRecvForward, 0},
                   {kForward, 0},
                   {kBackward, 0},
                   {kRecvForward, 1},
                   {kSendBackward, 0},
                   {kForward, 1},
                   {kBackward, 1},
                   {kSendBackward, 1}})};
  s.slots = {{2}, {2}};
  EXPECT_NO_THROW(validate_pipeline(s));
  s.slots = {{2}, {1}};  // the send of B0 stands behind the receive that wants its slot
  try {
    validate_pipeline(s);
    FAIL();
  } catch (const Bug& bug) {
    EXPECT_NE(std::string(bug.what()).find("rank 1, action 3 RF1 waits for one of its 1 slots"), std::string::npos)
        << bug.what();
  }
}

}  // namespace
}  // namespace concerto
