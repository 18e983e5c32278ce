// Layouts that cannot work: each is refused with its reason, and every layout that is offered instead does work.
#include "concerto/topology/layout.h"

#include <gtest/gtest.h>

#include "concerto/base/test_errors.h"

namespace concerto {
namespace {

// 12 layers of which 11 are MoE with 10 experts; 6 / 2 heads; 8 micro-batches a step.
RunConfig base() {
  RunConfig c;
  ModelConfig& m = c.model.config;
  m.num_hidden_layers = 12;
  m.hidden_size = 96;
  m.num_attention_heads = 6;
  m.num_key_value_heads = 2;
  m.head_dim = 16;
  m.vocab_size = 50;
  m.intermediate_size = 64;
  m.moe_num_experts = 10;
  m.moe_k = 2;
  m.moe_intermediate_size = 16;
  c.training.global_batch_size = 16;
  c.training.micro_batch_size = 2;
  return c;
}

RunConfig with(ParallelSection p) {
  RunConfig c = base();
  c.parallel = std::move(p);
  return c;
}

TEST(Layout, DataRanksFollowFromTheRanks) {
  const MeshSizes sizes = resolve_layout(with({.tp = 2, .pp = 3, .ep = 4, .etp = 2}), 24);
  EXPECT_EQ(sizes.tp, 2);
  EXPECT_EQ(sizes.dp, 4);
  EXPECT_EQ(sizes.pp, 3);
  EXPECT_EQ(sizes.ep, 4);
  EXPECT_EQ(sizes.etp, 2);
  EXPECT_EQ(resolve_layout(base(), 1).world(), 1);
}

TEST(Layout, WhatNeedNotDivideIsTaken) {
  for (const auto& [parallel, ranks] : std::vector<std::pair<ParallelSection, int>>{
           {{.pp = 5}, 5},             // 12 layers
           {{.pp = 40}, 40},           // more stages than layers
           {{.ep = 3}, 3},             // 10 experts
           {{.tp = 6, .ep = 10}, 30},  // 2 key/value heads on 6 ranks; dp 5 of 8 micro-batches
           {{.ep = 1, .etp = 7}, 7},   // width 16
           {{.tp = 2, .ep = 2, .etp = 3}, 6},
           {{.stage_layers = {12}}, 3}})
    EXPECT_NO_THROW(resolve_layout(with(parallel), ranks));
  RunConfig dense = base();
  dense.model.config.moe_num_experts = 0;
  dense.parallel.tp = 2;
  EXPECT_NO_THROW(resolve_layout(dense, 6));
}

struct Bad {
  const char* name;
  ParallelSection parallel;
  int ranks;
  std::vector<const char*> reasons;
  const char* nearest;  // the first layout that is offered
};

const std::vector<Bad>& bad_layouts() {
  static const std::vector<Bad> all = {
      {"ranks", {.tp = 2, .pp = 2}, 6, {"tp 2 x pp 2 = 4 does not divide 6 ranks"}, "tp: 2, pp: 3, ep: 1 (dp 1)"},
      {"one rank", {.tp = 2}, 1, {"tp 2 x pp 1 = 2 does not divide 1 rank\n"}, "tp: 1, pp: 1, ep: 1 (dp 1)"},
      {"fold",
       {.tp = 2, .ep = 4},
       6,
       {"ep 4 x etp 1 = 4 does not divide the 6 ranks of a pipeline stage (tp 2 x dp 3)"},
       "tp: 2, pp: 1, ep: 3 (dp 3)"},
      {"fold etp",
       {.ep = 2, .etp = 2},
       6,
       {"ep 2 x etp 2 = 4 does not divide the 6 ranks"},
       "tp: 1, pp: 1, ep: 2, etp: 3 (dp 6)"},
      {"heads",
       {.tp = 4},
       4,
       {"4 tensor parallel ranks do not divide the model's 6 heads"},
       "tp: 2, pp: 1, ep: 1 (dp 2)"},
      {"key/value heads",
       {.tp = 3},
       6,
       {"can neither split nor share the model's 2 key/value heads"},
       "tp: 2, pp: 1, ep: 1 (dp 3)"},
      {"experts",
       {.ep = 12},
       24,
       {"12 expert parallel ranks, but the model has 10 experts", "24 data parallel ranks"},
       "tp: 1, pp: 3, ep: 8 (dp 8)"},
      {"micro-batches",
       {},
       9,
       {"training.micro_batch_size: 9 data parallel ranks, but a step of 16 sequences has 8 micro-batches of 2; with "
        "micro_batch_size 1 it would have 16"},
       "tp: 1, pp: 3, ep: 1 (dp 3)"},
      {"sequences",
       {},
       17,
       {"a step of 16 sequences has 8 micro-batches of 2; global_batch_size is too small for them"},
       "tp: 1, pp: 17, ep: 1 (dp 1)"},
      {"expert width",
       {.pp = 2, .etp = 17},
       34,
       {"17 tensor parallel ranks inside an expert, but the model's experts are 16 wide", "17 data parallel ranks"},
       ""},
      {"zero",
       {.pp = 2, .zero = 2},
       4,
       {"parallel.zero: stage 2 with 2 pipeline stages"},
       "tp: 1, pp: 2, ep: 1, zero: 1 (dp 2)"},
      {"virtual stages",
       {.pp = 2, .vpp = 2},
       4,
       {"2 virtual stages a rank do not go with schedule 1f1b"},
       "tp: 1, pp: 2, ep: 1, vpp: 1 (dp 2)"},
      {"interleaved",
       {.pp = 2, .schedule = "interleaved"},
       4,
       {"1 virtual stages a rank do not go with schedule interleaved"},
       ""},
      {"stage list",
       {.pp = 2, .stage_layers = {4, 4, 4}},
       4,
       {"3 numbers of layers for 2 virtual stages"},
       "tp: 1, pp: 2, ep: 1, stage_layers: [] (dp 2)"},
      {"stage sum",
       {.pp = 2, .stage_layers = {4, 4}},
       4,
       {"stages of 8 layers together, but the model has 12"},
       "tp: 1, pp: 2, ep: 1, stage_layers: [] (dp 2)"},
      {"context", {.cp = 2}, 2, {"context parallelism is not built yet"}, "tp: 1, pp: 1, ep: 1, cp: 1 (dp 2)"},
      {"all at once",
       {.tp = 5, .pp = 2, .vpp = 3, .ep = 11, .etp = 20, .zero = 2},
       20,
       {"5 tensor parallel ranks do not divide", "can neither split nor share", "11 expert parallel",
        "20 tensor parallel ranks inside", "stage 2 with 2", "3 virtual stages",
        "ep 11 x etp 20 = 220 does not divide the 10 ranks"},
       ""},
      {"prime",
       {.tp = 2, .pp = 2, .ep = 2},
       7,
       {"tp 2 x pp 2 = 4 does not divide 7 ranks"},
       "tp: 1, pp: 1, ep: 1 (dp 7)"},
      {"many",
       {.tp = 8, .pp = 12, .ep = 8},
       2016,
       {"8 tensor parallel ranks do not divide", "21 data parallel ranks"},
       ""},
  };
  return all;
}

TEST(Layout, RefusesWithEveryReasonAndOffersWhatWorks) {
  for (const Bad& bad : bad_layouts()) {
    SCOPED_TRACE(bad.name);
    const RunConfig c = with(bad.parallel);
    EXPECT_EQ(layout_faults(c, bad.ranks).size(), bad.reasons.size());
    const std::string text = error_of(ErrorCode::kConfig, [&] { resolve_layout(c, bad.ranks); });
    for (const char* reason : bad.reasons) EXPECT_HAS(text, reason);
    const std::vector<ParallelSection> near = nearest_layouts(c, bad.ranks);
    ASSERT_FALSE(near.empty()) << text;
    EXPECT_LE(near.size(), 3u);
    for (const ParallelSection& p : near) {
      EXPECT_HAS(text, "\n    " + layout_text(p, c.parallel, bad.ranks));
      EXPECT_EQ(resolve_layout(with(p), bad.ranks).world(), bad.ranks);
    }
    EXPECT_EQ(bad.nearest[0] ? bad.nearest : layout_text(near[0], c.parallel, bad.ranks),
              layout_text(near[0], c.parallel, bad.ranks))
        << text;
  }
}

TEST(Layout, WidthsBoundTensorParallelRanks) {
  RunConfig c = base();
  c.parallel.tp = 6;
  c.model.config.vocab_size = 5;
  EXPECT_HAS(layout_faults(c, 6).at(0), "but the model's vocab_size is 5");
  c.model.config.vocab_size = 50;
  c.model.config.moe_intermediate_size = 2;
  EXPECT_HAS(layout_faults(c, 6).at(0), "width of the shared experts is 4");
  c.model.config.moe_num_shared_experts = 0;
  EXPECT_TRUE(layout_faults(c, 6).empty());
  c.model.config.intermediate_size = 5;
  EXPECT_HAS(layout_faults(c, 6).at(0), "intermediate_size is 5");
  c.model.config.moe_layer_start_index = 0;  // no dense layer is left
  EXPECT_TRUE(layout_faults(c, 6).empty());
}

TEST(Layout, NamesTheNumbersOfRanksThatWork) {
  const auto said = [](const ParallelSection& p, int ranks) {
    return error_of(ErrorCode::kConfig, [&] { resolve_layout(with(p), ranks); });
  };
  EXPECT_HAS(said({.tp = 2, .pp = 2}, 6), "As written it works on 4 or 8 ranks.");
  EXPECT_HAS(said({.tp = 2, .ep = 4}, 6), "As written it works on 4 or 8 ranks.");
  EXPECT_HAS(said({.tp = 2}, 1), "As written it works on 2 ranks.");
  EXPECT_HAS(said({}, 11), "As written it works on 8 ranks.");
  EXPECT_EQ(said({.tp = 4}, 4).find("As written"), std::string::npos);
}

// What is offered is the nearest of all that work: no layout of the same kind lies nearer.
TEST(Layout, OffersAreSortedByDistance) {
  const RunConfig c = with({.tp = 2, .pp = 2, .ep = 8});
  const std::vector<ParallelSection> near = nearest_layouts(c, 12, 100);
  ASSERT_GT(near.size(), 3u);
  const auto distance = [&](const ParallelSection& p) {
    double d = static_cast<double>(p.etp);
    for (const auto& [a, b] : {std::pair{p.tp, int64_t{2}}, {p.pp, int64_t{2}}, {p.ep, int64_t{8}}})
      d *= static_cast<double>(std::max(a, b)) / static_cast<double>(std::min(a, b));
    return d;
  };
  for (size_t i = 1; i < near.size(); ++i) EXPECT_LE(distance(near[i - 1]), distance(near[i]));
  EXPECT_EQ(layout_text(near[0], c.parallel, 12), "tp: 2, pp: 2, ep: 6 (dp 3)");
  EXPECT_THROW(layout_faults(c, 0), Bug);
}

}  // namespace
}  // namespace concerto
