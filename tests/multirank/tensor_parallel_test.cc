// Tensor and sequence parallel layers give what one rank gives: activations, losses, router statistics and the gradient
// of every weight, put together from the shards.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "tests/multirank/shard_run.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

// Heads for 1 to 4 ranks, widths and a vocabulary that divide by none of them.
ModelConfig ragged(ModelConfig c, int64_t kv_heads) {
  c.num_attention_heads = 12;
  c.num_key_value_heads = kv_heads;
  c.head_dim = 4;
  c.vocab_size = 41;
  c.intermediate_size = 25;
  c.moe_intermediate_size = 11;
  c.use_bias = true;
  return c;
}

const Rows kShapes[] = {{{5, 3}, {4, 1}}, {{1}}, {{3, 2}}, {{7}}, {{2}}, {{2, 3}, {4, 4, 1}, {3}}, {}};

struct Case {
  const char* name;
  ModelConfig config;
  Recompute recompute = Recompute::kNone;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> all;
  ModelConfig dense = tiny_dense(), moe = tiny_moe();
  all.push_back({"dense_tied", ragged(dense, 12)});
  dense.tie_word_embeddings = false;
  all.push_back({"dense_untied_full", ragged(dense, 12), Recompute::kFull});
  all.push_back({"dense_one_kv_head", ragged(dense, 1)});
  dense.num_nextn_predict_layers = 2;
  all.push_back({"dense_mtp", ragged(dense, 12)});
  dense.tie_word_embeddings = true;
  dense.mtp_hidden = MtpHidden::kPostNorm;
  all.push_back({"dense_tied_mtp_post_norm", ragged(dense, 1), Recompute::kSelective});
  all.push_back({"moe", ragged(moe, 12)});
  all.push_back({"moe_full", ragged(moe, 1), Recompute::kFull});
  moe.num_nextn_predict_layers = 1;
  moe.tie_word_embeddings = true;
  all.push_back({"moe_tied_mtp_selective", ragged(moe, 12), Recompute::kSelective});
  return all;
}

class TensorParallel : public ::testing::TestWithParam<Case> {};

TEST_P(TensorParallel, EqualsOneRankInF64) {
  const Case& c = GetParam();
  const ShardSetup setup{.config = c.config, .backend = &backend_by_name("ref"), .recompute = c.recompute};
  for (const Rows& rows : kShapes) {
    const MicroBatch batch = random_batch(c.config, rows, 5);
    const ShardResult one = run_shards(setup, batch, 1);
    for (const int tp : {2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} tokens on {} ranks", batch.tokens(), tp));
      const ShardResult got = run_shards(setup, batch, tp);
      expect_close(got.shown, one.shown, 1e-10);
      expect_close(got.gradients, one.gradients, 1e-10);
      EXPECT_EQ(got.counts, one.counts);
      expect_close({{"losses", got.loss_sums}, {"evaluation", {got.eval_loss_sum}}, {"sums", got.sums}},
                   {{"losses", one.loss_sums}, {"evaluation", {one.eval_loss_sum}}, {"sums", one.sums}}, 1e-10);
    }
  }
}
// What rounding leaves: every activation of the way through the layers and back is rounded once to the compute type, and
// sums are taken in the stat type. Choices of experts have margins far above it.
double rounding(const ModelConfig& c, DType type) {
  const double unit = type == DType::kBF16 ? 0x1p-8 : 0x1p-23, stat = 0x1p-23;
  const auto segments = static_cast<double>(2 * (c.num_hidden_layers + c.num_nextn_predict_layers) + 2);
  constexpr double kRoundings = 6;  // of one segment
  const auto longest = static_cast<double>(std::max(c.vocab_size, c.num_attention_heads * c.head_dim));
  return 2 * unit * std::sqrt(2 * kRoundings * segments) + stat * (4 + std::sqrt(longest)) * segments;
}

TEST_P(TensorParallel, EqualsOneRankButForRounding) {
  const Case& c = GetParam();
  for (const char* backend : {"ref", "cpu"})
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const ShardSetup setup{.config = c.config,
                             .backend = &backend_by_name(backend),
                             .dtype = type,
                             .recompute = c.recompute,
                             .threads = 2};
      for (const Rows& rows : {kShapes[0], kShapes[1], kShapes[3]}) {
        const MicroBatch batch = random_batch(c.config, rows, 5);
        const ShardResult one = run_shards(setup, batch, 1);
        for (const int tp : {2, 4}) {
          SCOPED_TRACE(fmt::format("{}, {}, {} tokens on {} ranks", backend, dtype_name(type), batch.tokens(), tp));
          const ShardResult got = run_shards(setup, batch, tp);
          EXPECT_EQ(got.counts, one.counts);
          const double allowed = rounding(c.config, type);
          expect_close(got.shown, one.shown, allowed);
          expect_close(got.gradients, one.gradients, allowed, 1e-2);
          expect_close({{"losses", got.loss_sums}, {"evaluation", {got.eval_loss_sum}}, {"sums", got.sums}},
                       {{"losses", one.loss_sums}, {"evaluation", {one.eval_loss_sum}}, {"sums", one.sums}}, allowed);
        }
      }
    }
}
INSTANTIATE_TEST_SUITE_P(Models, TensorParallel, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

class TensorParallelRouters : public ::testing::TestWithParam<TinyRouter> {};

// Units that the border between ranks cuts; recompute must not choose again.
TEST_P(TensorParallelRouters, EqualsOneRankInF64) {
  ModelConfig c = ragged(GetParam().config, 12);
  const MicroBatch batch = random_batch(c, {{5, 2}, {4}, {3, 3, 1}}, 9);
  for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal})
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      const ShardSetup setup{
          .config = c, .backend = &backend_by_name("ref"), .recompute = recompute, .unit = unit, .threads = 2};
      const ShardResult one = run_shards(setup, batch, 1);
      for (const int tp : {2, 3}) {
        SCOPED_TRACE(
            fmt::format("unit {}, recompute {}, {} ranks", static_cast<int>(unit), static_cast<int>(recompute), tp));
        const ShardResult got = run_shards(setup, batch, tp);
        EXPECT_EQ(got.counts, one.counts);
        expect_close(got.shown, one.shown, 1e-10);
        expect_close(got.gradients, one.gradients, 1e-10);
        expect_close({{"losses", got.loss_sums}, {"sums", got.sums}}, {{"losses", one.loss_sums}, {"sums", one.sums}},
                     1e-10);
      }
    }
}
INSTANTIATE_TEST_SUITE_P(Routers, TensorParallelRouters, ::testing::ValuesIn(tiny_routers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
