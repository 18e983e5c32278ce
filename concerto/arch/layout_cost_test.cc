#include "concerto/arch/layout_cost.h"

#include <gtest/gtest.h>

#include <numeric>

#include "concerto/arch/stage_split.h"
#include "concerto/arch/tensor_owners.h"
#include "concerto/base/error.h"
#include "concerto/base/part.h"

namespace concerto {
namespace {

// Sizes that cut evenly and are multiples of 64, so that sums over ranks are exact.
ModelConfig model() {
  ModelConfig c;
  c.vocab_size = 128;
  c.hidden_size = 64;
  c.intermediate_size = 128;
  c.num_hidden_layers = 4;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 4;
  c.head_dim = 16;
  c.moe_num_experts = 8;
  c.moe_k = 2;
  c.moe_intermediate_size = 64;
  c.moe_num_shared_experts = 1;
  c.moe_layer_start_index = 1;
  return c;
}

struct Sizes {
  int tp = 1, dp = 1, pp = 1, ep = 1, etp = 1;
  int ranks() const { return tp * dp * pp; }
};

// Rank `rank` in the order of topology/mesh.h. `micro_batches`: of the step, dealt to the data ranks in turn.
RankWork work_of(const ModelConfig& c, const Sizes& s, int rank, const std::vector<int64_t>& micro_batches) {
  RankWork w;
  const int inside = rank % (s.tp * s.dp);
  w.dp = s.dp;
  w.dp_rank = inside / s.tp;
  w.pp = s.pp;
  w.pp_rank = rank / (s.tp * s.dp);
  w.plan = {.tp = s.tp,
            .tp_rank = inside % s.tp,
            .etp = s.etp,
            .etp_rank = inside % s.etp,
            .ep = s.ep,
            .ep_rank = inside / s.etp % s.ep,
            .stages = stages_of(split_stages(c, s.pp), {w.pp_rank})};
  for (size_t i = static_cast<size_t>(w.dp_rank); i < micro_batches.size(); i += static_cast<size_t>(s.dp))
    w.micro_batches.push_back(micro_batches[i]);
  return w;
}

LayoutCost sum_over_ranks(const ModelConfig& c, const Sizes& s, const std::vector<int64_t>& micro_batches,
                          const auto& change) {
  LayoutCost sum;
  for (int r = 0; r < s.ranks(); ++r) {
    RankWork w = work_of(c, s, r, micro_batches);
    change(w);
    const LayoutCost one = layout_cost(c, w);
    sum.weight_bytes += one.weight_bytes;
    sum.copy_bytes += one.copy_bytes;
    sum.gradient_bytes += one.gradient_bytes;
    sum.moment_bytes += one.moment_bytes;
    sum.linear_flops += one.linear_flops;
    sum.router_flops += one.router_flops;
    sum.expert_flops += one.expert_flops;
    sum.head_flops += one.head_flops;
    sum.reduce_to_owners_bytes += one.reduce_to_owners_bytes;
    sum.broadcast_bytes += one.broadcast_bytes;
    sum.dispatch_bytes += one.dispatch_bytes;
  }
  return sum;
}
const auto kAsIs = [](RankWork&) {};

const std::vector<int64_t> kMicroBatches = {24, 24, 24, 24};

TEST(LayoutCost, OneRankIsTheModel) {
  ModelConfig c = model();
  for (int64_t mtp = 0; mtp < 2; ++mtp) {
    c.num_nextn_predict_layers = mtp;
    const LayoutCost cost = layout_cost(c, work_of(c, {}, 0, kMicroBatches));
    int64_t elements = 0, vectors = 0, norms = 0, f32 = 0;
    for (const TensorSpec& s : tensor_specs(c)) {
      const int64_t n = s.shape.elements();
      elements += (n + 63) / 64 * 64;
      if (s.role == TensorRole::kNorm) norms += n;
      if (s.shape.rank() < 2) vectors += n;
      if (s.keep_f32) f32 += (n + 63) / 64 * 64;
    }
    EXPECT_EQ(cost.weight_bytes, 4 * elements);
    EXPECT_EQ(cost.gradient_bytes, 4 * elements);
    EXPECT_EQ(cost.moment_bytes, 8 * elements);
    EXPECT_EQ(cost.copy_bytes, 2 * (elements - vectors - f32));
    EXPECT_DOUBLE_EQ(cost.product_flops(), 96 * (flops_per_token(c, 0) - 6.0 * static_cast<double>(norms)));
    EXPECT_EQ(cost.tp_gather_bytes + cost.tp_reduce_scatter_bytes + cost.dispatch_bytes + cost.pipeline_bytes, 0);
    EXPECT_EQ(cost.reduce_to_owners_bytes + cost.broadcast_bytes, 0);
  }
}

TEST(LayoutCost, F32HasNoCopiesAndPackedWeightsHaveTwo) {
  const ModelConfig c = model();
  RankWork w = work_of(c, {}, 0, kMicroBatches);
  const int64_t plain = layout_cost(c, w).copy_bytes;
  w.packs = true;
  EXPECT_EQ(layout_cost(c, w).copy_bytes, 2 * plain);
  ModelConfig untied = c;  // its table is looked up in the masters
  untied.tie_word_embeddings = false;
  EXPECT_EQ(layout_cost(untied, w).copy_bytes, 2 * plain);
  w.moments = DType::kBF16;
  EXPECT_EQ(2 * layout_cost(c, w).moment_bytes, 2 * layout_cost(c, w).weight_bytes);
  w.compute = DType::kF32;
  EXPECT_EQ(layout_cost(c, w).copy_bytes, 0);
}

// Nobody holds or computes what is not theirs: what is not replicated sums to one rank's.
TEST(LayoutCost, RanksShareTheModelAndItsWork) {
  ModelConfig c = model();
  c.num_nextn_predict_layers = 1;
  const LayoutCost one = layout_cost(c, work_of(c, {}, 0, kMicroBatches));
  for (const Sizes& s : {Sizes{.tp = 4},
                         {.dp = 4},
                         {.pp = 3},
                         {.tp = 2, .dp = 2, .ep = 4},
                         {.dp = 4, .ep = 2, .etp = 2},
                         {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}}) {
    SCOPED_TRACE(fmt::format("tp {} dp {} pp {} ep {} etp {}", s.tp, s.dp, s.pp, s.ep, s.etp));
    for (int zero = 0; zero < 3; ++zero) {
      const LayoutCost all = sum_over_ranks(c, s, kMicroBatches, [&](RankWork& w) { w.zero = zero; });
      EXPECT_NEAR(all.linear_flops, one.linear_flops, 1e-9 * one.linear_flops);
      EXPECT_NEAR(all.expert_flops, one.expert_flops, 1e-9 * one.expert_flops);
      EXPECT_NEAR(all.router_flops, one.router_flops, 1e-9 * one.router_flops);
      EXPECT_NEAR(all.head_flops, one.head_flops, 1e-9 * one.head_flops);
      const double spare = 0.02 * static_cast<double>(one.moment_bytes);  // vectors begin at a multiple of 64
      EXPECT_NEAR(all.moment_bytes, zero == 0 ? 2 * all.weight_bytes : one.moment_bytes, spare);
      if (zero < 2) {
        EXPECT_NEAR(all.gradient_bytes, all.weight_bytes, spare);
      } else {
        EXPECT_GT(all.gradient_bytes, all.moment_bytes / 2);  // and a layer and what is outside of layers
      }
      // Every copy of a gradient but the owner's travels once (zero 2: in every micro-batch), and its sum back as often.
      const auto sums = zero < 2 ? 1 : std::ssize(kMicroBatches) / s.dp;
      EXPECT_EQ(all.reduce_to_owners_bytes, sums * all.broadcast_bytes);
    }
  }
  EXPECT_EQ(sum_over_ranks(c, {.dp = 4}, kMicroBatches, kAsIs).weight_bytes, 4 * one.weight_bytes);
}

TEST(LayoutCost, OwnersTakeEqualShares) {
  const ModelConfig c = model();
  for (int r = 0; r < 4; ++r) {
    RankWork w = work_of(c, {.dp = 4}, r, kMicroBatches);
    const LayoutCost cost = layout_cost(c, w);
    EXPECT_NEAR(static_cast<double>(cost.moment_bytes), static_cast<double>(cost.weight_bytes) / 2,
                0.1 * static_cast<double>(cost.weight_bytes));
  }
}

TEST(LayoutCost, KeyValueHeadsAreReplicatedWhereThereAreTooFew) {
  ModelConfig c = model();
  c.num_key_value_heads = 2;
  const auto all = sum_over_ranks(c, {.tp = 8}, kMicroBatches, kAsIs),
             one = layout_cost(c, work_of(c, {}, 0, kMicroBatches));
  // Each of 4 layers computes 3 more copies of k and v: 2 heads x 16 x 64 weights each.
  EXPECT_NEAR(all.linear_flops - one.linear_flops, 6.0 * 96 * 4 * 3 * 2 * (2 * 16 * 64), 1);
}

TEST(LayoutCost, RecomputeRunsForwardAgain) {
  const ModelConfig c = model();
  const auto flops = [&](Recompute recompute, bool global = false) {
    RankWork w = work_of(c, {}, 0, kMicroBatches);
    w.recompute = recompute;
    w.global_routing = global;
    return layout_cost(c, w);
  };
  const LayoutCost none = flops(Recompute::kNone), selective = flops(Recompute::kSelective),
                   full = flops(Recompute::kFull);
  EXPECT_DOUBLE_EQ(selective.expert_flops, none.expert_flops * 4 / 3);
  EXPECT_DOUBLE_EQ(full.linear_flops, none.linear_flops * 4 / 3);
  EXPECT_GT(selective.linear_flops, none.linear_flops);
  EXPECT_LT(selective.linear_flops, full.linear_flops);
  EXPECT_DOUBLE_EQ(full.head_flops, none.head_flops);
  EXPECT_DOUBLE_EQ(full.router_flops, none.router_flops * 4 / 3);
  EXPECT_DOUBLE_EQ(flops(Recompute::kFull, true).router_flops, none.router_flops);
}

// By hand: 2 tensor parallel ranks, a micro-batch of 25 tokens, of which the second has 13.
TEST(LayoutCost, TensorParallelTraffic) {
  const ModelConfig c = model();  // 4 attentions, 1 dense MLP, 3 shared experts, 3 routers
  RankWork w = work_of(c, {.tp = 2}, 1, {25});
  const int64_t gather = 13 * 64 * 2, sum = 12 * 64 * 4;
  LayoutCost cost = layout_cost(c, w);
  EXPECT_EQ(cost.tp_gather_bytes, (4 + 4) * 3 * gather + 2 * gather + 16 * 25 + 3 * 13 * 8 * 4);
  EXPECT_EQ(cost.tp_reduce_scatter_bytes, (4 + 4) * 2 * sum + 2 * sum);
  w.recompute = Recompute::kSelective;
  EXPECT_EQ(layout_cost(c, w).tp_gather_bytes, cost.tp_gather_bytes + 4 * gather);
  w.recompute = Recompute::kFull;
  EXPECT_EQ(layout_cost(c, w).tp_gather_bytes, cost.tp_gather_bytes + 8 * gather);
  EXPECT_EQ(layout_cost(c, w).tp_reduce_scatter_bytes, cost.tp_reduce_scatter_bytes + 8 * sum);
}

// By hand: ep 2 x etp 2 on 4 data ranks, uneven loads, 1 micro-batch of 10 tokens on this rank.
TEST(LayoutCost, DispatchTraffic) {
  ModelConfig c = model();
  c.num_hidden_layers = 2;  // one MoE layer
  const Sizes s{.dp = 4, .ep = 2, .etp = 2};
  RankWork w = work_of(c, s, 2, {10, 10, 10, 10});  // ep rank 1, etp rank 0: experts 4 to 7, half of each
  w.sent_rows = {5, 0, 0, 2, 9, 0, 3, 1};
  w.received_rows = {4, 6, 13, 1};
  const int64_t row = 64 * 2, weight = 4;
  // 7 rows go to both ranks of ep 0, 13 to the other one of ep 1; 11 came from others. Counts: 4 experts at 3 ranks.
  EXPECT_EQ(layout_cost(c, w).dispatch_bytes, (14 + 13) * (2 * row + weight) + 11 * (2 * row + weight) + 3 * 4 * 4);
  EXPECT_DOUBLE_EQ(layout_cost(c, w).expert_flops, 6.0 * (3 * 64 * 32) * 24);
  w.recompute = Recompute::kSelective;
  EXPECT_EQ(layout_cost(c, w).dispatch_bytes, (14 + 13) * (3 * row + 2 * weight) + 11 * (3 * row + weight) + 3 * 4 * 4);
  w.later_sent = 8;
  w.later_received = 5;
  EXPECT_EQ(layout_cost(c, w).dispatch_bytes,
            (14 + 13) * (3 * row + 2 * weight) + 11 * (3 * row + weight) + 3 * 4 * 4 + 8 * (row + weight));
  EXPECT_DOUBLE_EQ(layout_cost(c, w).expert_flops, 2.0 * (3 * 64 * 32) * (4 * 24 + 5));
  // Even loads: all tokens of the group, shared by its experts.
  w = work_of(c, s, 2, {10, 10, 10, 10});
  EXPECT_DOUBLE_EQ(layout_cost(c, w).expert_flops, 6.0 * (3 * 64 * 32) * (4 * 10 * 2 / 2));
  w.received_rows = {1, 2};
  EXPECT_THROW(layout_cost(c, w), Bug);
  // A stage without MoE layers sends no token anywhere.
  c.moe_layer_start_index = 2;
  c.num_hidden_layers = 3;
  RankWork dense = work_of(c, s, 0, {10, 10, 10, 10});
  dense.plan.stages = {{0, 2, true, false}};
  EXPECT_EQ(layout_cost(c, dense).dispatch_bytes, 0);
}

TEST(LayoutCost, PipelineTraffic) {
  const ModelConfig c = model();
  const auto sent = [&](int rank) { return layout_cost(c, work_of(c, {.pp = 3}, rank, {10, 7})).pipeline_bytes; };
  EXPECT_EQ(sent(0), 17 * 64 * 2);
  EXPECT_EQ(sent(1), 2 * 17 * 64 * 2);
  EXPECT_EQ(sent(2), 17 * 64 * 2);
  RankWork w = work_of(c, {.pp = 3}, 1, {10, 7});
  w.pooled_units = 2;
  EXPECT_EQ(layout_cost(c, w).pipeline_bytes, 2 * 17 * 64 * 2 + 2 * 2 * 8 * 16);
  w.trains_pool = true;
  EXPECT_EQ(layout_cost(c, w).pipeline_bytes, 2 * 17 * 64 * 2 + 2 * 2 * 8 * (16 + 4));
  // In a V the first rank has both ends, and the turn lies inside the last.
  w.v_shape = true;
  w.pooled_units = 0;
  const auto all = split_stages(c, 6);
  w.plan.stages = stages_of(all, {1, 4});
  EXPECT_EQ(layout_cost(c, w).pipeline_bytes, 4 * 17 * 64 * 2);
  w.pp_rank = 0;
  w.plan.stages = stages_of(all, {0, 5});
  EXPECT_EQ(layout_cost(c, w).pipeline_bytes, 2 * 17 * 64 * 2);
  w.pp_rank = 2;
  w.plan.stages = stages_of(all, {2, 3});
  EXPECT_EQ(layout_cost(c, w).pipeline_bytes, 2 * 17 * 64 * 2);
}

TEST(LayoutCost, GradientTraffic) {
  const ModelConfig c = model();
  RankWork w = work_of(c, {.dp = 2}, 0, kMicroBatches);
  const LayoutCost a = layout_cost(c, w), b = layout_cost(c, work_of(c, {.dp = 2}, 1, kMicroBatches));
  EXPECT_EQ(a.reduce_to_owners_bytes, b.broadcast_bytes);
  EXPECT_EQ(a.reduce_to_owners_bytes + b.reduce_to_owners_bytes, 4 * parameter_count(c));
  w.bf16_gradients = true;
  EXPECT_EQ(2 * layout_cost(c, w).reduce_to_owners_bytes, a.reduce_to_owners_bytes);
  EXPECT_EQ(layout_cost(c, w).broadcast_bytes, a.broadcast_bytes);
  w.compute = DType::kF64;  // is sent as it is
  EXPECT_EQ(layout_cost(c, w).reduce_to_owners_bytes, 2 * a.reduce_to_owners_bytes);
}

TEST(TensorOwners, EachUnitBelongsToOneRankAndExpertsStayWhole) {
  const ModelConfig c = model();
  const auto specs = tensor_specs(c, {.ep = 2, .ep_rank = 1});
  for (int ranks = 1; ranks <= 7; ++ranks) {
    const auto owners = tensor_owners(specs, {ranks, ranks, ranks, ranks, ranks});
    ASSERT_EQ(owners.size(), specs.size());
    std::vector<int> in_unit(specs.size(), 0);
    for (const Replicas kind : kReplicaKinds) {
      int last = 0;
      for (const auto& unit : ownership_units(specs, kind)) {
        for (const int i : unit) {
          ++in_unit[static_cast<size_t>(i)];
          EXPECT_EQ(owners[static_cast<size_t>(i)], owners[static_cast<size_t>(unit[0])]);
          EXPECT_EQ(specs[static_cast<size_t>(i)].expert, specs[static_cast<size_t>(unit[0])].expert);
        }
        const int owner = owners[static_cast<size_t>(unit[0])];
        EXPECT_TRUE(owner >= last && owner < ranks);
        last = owner;
      }
    }
    EXPECT_EQ(in_unit, std::vector<int>(specs.size(), 1));
  }
}

}  // namespace
}  // namespace concerto
