// Known fault 13: padding that counts somewhere, in a loss, in a count, in a router's decision or in the correction bias.
// Padded arrays as others hand them over, and rows that end before their seq_length does: no bit of a step changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <numeric>

#include "concerto/base/rng.h"
#include "concerto/checkpoint/safetensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/golden_case.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/tensor/values.h"
#include "tests/support/tiny_routers.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

// [rows, columns] arrays with an attention mask: rows of different lengths, `left` pads before and `right` after each.
class PaddedArrays {
 public:
  explicit PaddedArrays(const ModelConfig& config) : config_(config) {}

  std::vector<MicroBatch> batches(const std::vector<int>& lengths, int left, int right, uint64_t seed) {
    const std::string name = fmt::format("{}-{}-{}", left, right, seed);
    const int64_t rows = std::ssize(lengths), cols = *std::max_element(lengths.begin(), lengths.end()) + left + right;
    std::vector<TensorInfo> infos;
    for (const char* tensor : {"attention_mask", "input_ids", "labels"})
      infos.push_back({tensor, {rows, cols}, DType::kI64});
    std::filesystem::create_directories(folder_ / name);
    folder_.write(name + "/case.json", R"({"tolerance": {}, "aux_loss_in_loss": false})");
    SafetensorsWriter writer(folder_ / name + "/golden.safetensors", infos);
    for (const TensorInfo& info : writer.tensors()) {
      const int64_t pad = info.name == "labels" ? kIgnoreIndex : info.name == "input_ids" ? config_.pad_token_id : 0;
      std::vector<int64_t> values(static_cast<size_t>(rows * cols), pad);
      const Rng rng(seed, "tokens");
      uint64_t at = 0;
      for (int64_t r = 0; r < rows; ++r)
        for (int t = 0; t < lengths[static_cast<size_t>(r)]; ++t) {
          const auto id = static_cast<int64_t>(1 + rng.below(at++, static_cast<uint64_t>(config_.vocab_size - 1)));
          int64_t& value = values[static_cast<size_t>(r * cols + left + t)];
          value = info.name == "attention_mask" ? 1 : info.name == "labels" && id % 5 == 0 ? kIgnoreIndex : id;
        }
      writer.write(View(values.data(), info.shape, DType::kI64));
    }
    writer.finish();
    return GoldenCase(folder_ / name).batch("", 0, 2, config_).micro_batches;
  }

 private:
  const ModelConfig& config_;
  TestFolder folder_;
};

std::vector<uint64_t> bits(const std::vector<double>& values) {
  std::vector<uint64_t> all;
  for (const double v : values) all.push_back(std::bit_cast<uint64_t>(v));
  return all;
}

// All that some steps leave, and tell.
struct Trail {
  std::map<std::string, std::vector<uint64_t>> numbers;
  std::vector<std::vector<std::vector<int64_t>>> tokens, drops;  // [steps][MoE layers][experts]
  bool operator==(const Trail&) const = default;
};

int64_t dropped(const Trail& trail) {
  int64_t n = 0;
  for (const auto& step : trail.drops)
    for (const auto& layer : step) n = std::accumulate(layer.begin(), layer.end(), n);
  return n;
}

std::string first_difference(const Trail& a, const Trail& b) {
  for (const auto& [name, values] : a.numbers)
    if (!b.numbers.contains(name) || b.numbers.at(name) != values) return name;
  return a == b ? "" : "counts";
}

class Padding : public ::testing::TestWithParam<TinyRouter> {};

// Bias updates of several steps among them: a bias that counted a pad would choose otherwise from the second step on.
TEST_P(Padding, OfArraysChangesNoBit) {
  RunConfig c;
  c.model.config = GetParam().config;
  ModelConfig& m = c.model.config;
  m.moe_use_aux_free = m.moe_gate == RouterGate::kTopK;
  m.moe_router_bias_update_rate = m.moe_use_aux_free ? 0.25 : 0;
  m.moe_orthogonal_loss_lambda = 0.1;
  c.training.balance_loss = GetParam().options.balance_loss;
  c.training.balance_counts = GetParam().options.balance_counts;
  c.training.steps = 3;
  c.training.global_batch_size = 3;
  c.training.micro_batch_size = 2;
  c.optimizer.lr = 0.01;
  const std::vector<int> lengths = {19, 40, 7};
  ThreadPool pool(2);
  const auto train = [&](int left, int right) {
    c.training.seq_length = 40 + left + right;  // and memory is planned for it
    PaddedArrays arrays(m);
    StepEngine engine(c, backend_by_name("cpu"), pool, 1, true);
    ParameterStore& store = engine.store();
    fill_random(store, 11);
    Trail trail;
    StepReport r;
    std::string why;
    for (int64_t step = 1; step <= 3; ++step) {
      engine.step(step, arrays.batches(lengths, left, right, static_cast<uint64_t>(step)), nullptr, r, why);
      EXPECT_EQ(r.tokens, 66);
      trail.numbers[fmt::format("losses {}", step)] =
          bits({r.loss, r.total_loss, r.aux_loss, r.z_loss, r.orthogonal_loss, r.grad_norm});
      trail.tokens.push_back(r.tokens_per_expert);
      trail.drops.push_back(r.dropped_per_expert);
      for (int i = 0; i < store.size(); ++i) {
        const std::string& name = store.specs()[static_cast<size_t>(i)].name;
        trail.numbers[fmt::format("gradient of {}, step {}", name, step)] = bits(to_doubles(store.gradient(i)));
        trail.numbers[fmt::format("{} after step {}", name, step)] = bits(to_doubles(store.master(i)));
      }
    }
    return trail;
  };
  for (const char* dtype : {"f32", "bf16"})
    for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
      c.training.dtype = dtype;
      c.training.routing_unit = unit;
      const Trail plain = train(0, 0);
      EXPECT_EQ(dropped(plain) > 0, GetParam().drops);
      if (m.moe_use_aux_free) {
        const std::string bias = "model.layers.1.mlp.moe_statics.e_score_correction_bias after step ";
        EXPECT_NE(plain.numbers.at(bias + "1"), plain.numbers.at(bias + "2"));
      }
      for (const auto& [left, right] : {std::pair{0, 1}, {0, 64}, {3, 5}})
        EXPECT_EQ(first_difference(train(left, right), plain), "") << left << " and " << right << " pads";
    }
}

// A whole run on records, each a row of its own: with a longer seq_length every row is padded.
TEST_P(Padding, OfRecordsChangesNoBit) {
  const Workplace work;
  RunConfig c = tiny_run_config(work);
  c.model.config = GetParam().config;
  ModelConfig& m = c.model.config;
  m.moe_use_aux_free = m.moe_gate == RouterGate::kTopK;
  m.moe_router_bias_update_rate = m.moe_use_aux_free ? 0.25 : 0;
  for (const char* name : {"train", "valid"}) {
    const Rng rng(3, name);
    uint64_t at = 0;
    IndexedDatasetWriter writer(work / name, m.vocab_size, true);
    for (int i = 0; i < 20; ++i) {
      std::vector<int32_t> ids(21 + rng.below(at++, 12));  // two are too long for a row of 40
      std::vector<uint8_t> trained(ids.size());
      for (int32_t& id : ids) id = 1 + static_cast<int32_t>(rng.below(at++, static_cast<uint64_t>(m.vocab_size - 1)));
      for (uint8_t& t : trained) t = rng.below(at++, 4) != 0;
      writer.add_document(ids, trained);
    }
    writer.finish();
  }
  c.training.steps = 4;
  c.training.eval_every_steps = 2;
  c.checkpoint.every_steps = 0;
  c.checkpoint.keep_best = c.checkpoint.export_model = c.monitor.tensorboard = false;
  c.training.balance_loss = GetParam().options.balance_loss;
  c.training.balance_counts = GetParam().options.balance_counts;
  for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
    c.training.routing_unit = unit;
    const auto run = [&](int64_t seq_length) {
      c.training.seq_length = seq_length;
      c.run.dir = work / fmt::format("run-{}-{}", seq_length, static_cast<int>(unit));
      train(c);
      return std::pair(metrics_rows(c.run.dir), checkpoint_contents(checkpoint_path(c.run.dir, 4)));
    };
    const auto plain = run(32);
    EXPECT_EQ(plain.first.size(), 6u);
    EXPECT_EQ(run(40), plain);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Padding, ::testing::ValuesIn(tiny_routers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
