#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "concerto/base/rng.h"
#include "concerto/ops/ref/ref_backend.h"
#include "concerto/optim/lr_schedule.h"
#include "concerto/optim/optimizer.h"

namespace concerto {
namespace {

TEST(LearningRate, Schedules) {
  OptimizerSection o;
  o.lr = 1;
  o.min_lr = 0.1;
  o.warmup_steps = 10;
  o.schedule = LrSchedule::kCosine;
  EXPECT_DOUBLE_EQ(learning_rate(o, 110, 1), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(o, 110, 10), 1);
  EXPECT_NEAR(learning_rate(o, 110, 60), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(o, 110, 110), 0.1, 1e-12);
  o.schedule = LrSchedule::kLinear;
  EXPECT_NEAR(learning_rate(o, 110, 60), 0.55, 1e-12);
  o.schedule = LrSchedule::kConstant;
  EXPECT_DOUBLE_EQ(learning_rate(o, 110, 110), 1);
  o.schedule = LrSchedule::kWsd;  // stable until 99 of 110
  EXPECT_DOUBLE_EQ(learning_rate(o, 110, 99), 1);
  EXPECT_NEAR(learning_rate(o, 110, 110), 0.1, 1e-12);
  o.wsd_stable_steps = 10;
  EXPECT_NEAR(learning_rate(o, 110, 60), 0.1 + 0.9 * (std::sqrt(0.05) - 0.05) / 0.95, 1e-12);
  o.wsd_decay = WsdDecay::kOneMinusSqrt;
  EXPECT_NEAR(learning_rate(o, 110, 60), 0.1 + 0.9 * (1 - std::sqrt(0.5)), 1e-12);
}

struct OptimizerFixture : ::testing::Test {
  static ModelConfig model() {
    ModelConfig c;
    c.vocab_size = 32;
    c.hidden_size = 8;
    c.intermediate_size = 12;
    c.num_hidden_layers = 2;
    c.num_attention_heads = 2;
    c.num_key_value_heads = 1;
    c.head_dim = 4;
    c.moe_num_experts = 4;
    c.moe_k = 2;
    c.moe_intermediate_size = 4;
    return c;
  }
  void fill_gradients(double scale) {
    for (int i = 0; i < store.size(); ++i)
      for (int64_t j = 0; j < store.gradient(i).elements(); ++j)
        store.gradient(i).as<float>()[j] =
            static_cast<float>(scale * Rng(3, store.specs()[i].name).normal(static_cast<uint64_t>(j)));
  }
  OptimizerFixture() { store.initialize(model(), Init::kHuggingFace, 1, pool); }

  ThreadPool pool{1};
  Arena scratch{1 << 20};
  ParameterStore store{tensor_specs(model()), DType::kF32, StoreUse::kTrain};
  Context ctx{.backend = &ref_backend(), .pool = &pool, .scratch = &scratch};
};

TEST_F(OptimizerFixture, EveryTrainableElementIsUpdatedOnceAndTheBiasNever) {
  OptimizerSection o;
  o.weight_decay = 0;
  o.clip_norm = 0;
  fill_gradients(1);
  std::vector<std::vector<float>> before;
  for (int i = 0; i < store.size(); ++i) {
    const float* w = store.master(i).as<float>();
    before.emplace_back(w, w + store.master(i).elements());
  }
  Optimizer(store, o).step(ctx, 1, 0.01, 1);
  for (int i = 0; i < store.size(); ++i)
    for (int64_t j = 0; j < store.master(i).elements(); ++j) {
      const float w = store.master(i).as<float>()[j], b = before[static_cast<size_t>(i)][static_cast<size_t>(j)];
      const float g = store.gradient(i).as<float>()[j];
      // The first Adam step has length lr in the direction of -sign(g).
      const float wanted = store.specs()[i].trainable ? b - std::copysign(0.01f, g) : b;
      EXPECT_NEAR(w, wanted, 2e-6) << store.specs()[i].name << " " << j;
    }
}

TEST_F(OptimizerFixture, ClippingScalesToTheNorm) {
  fill_gradients(1);
  Optimizer clipped(store, {.beta1 = 0, .clip_norm = 0.5});
  const double norm = clipped.gradient_norm(ctx);
  double sum = 0;
  for (int i = 0; i < store.size(); ++i) {
    if (!store.specs()[i].trainable) continue;
    for (int64_t j = 0; j < store.gradient(i).elements(); ++j) {
      const double g = store.gradient(i).as<float>()[j];
      sum += g * g;
    }
  }
  EXPECT_NEAR(norm, std::sqrt(sum), 1e-9 * norm);
  clipped.step(ctx, 1, 0.01, norm);
  const int i = store.find("model.layers.0.self_attn.q_proj.weight");  // m = clipped gradient when beta1 = 0
  EXPECT_NEAR(store.moment1(i).as<float>()[0], store.gradient(i).as<float>()[0] * 0.5 / (norm + 1e-6), 1e-9);
}

TEST_F(OptimizerFixture, RouterRatioAndDecayChooseTheirTensors) {
  fill_gradients(0);  // zero gradients: only decay moves weights
  OptimizerSection o;
  o.weight_decay = 0.5;
  o.router_lr_ratio = 0.01;
  const int router = store.find("model.layers.1.mlp.gate.weight"), norm = store.find("model.norm.weight");
  const float r = store.master(router).as<float>()[1];
  Optimizer(store, o).step(ctx, 1, 0.1, 0);
  EXPECT_FLOAT_EQ(store.master(router).as<float>()[1], r * (1 - 0.1f * 0.01f * 0.5f));
  EXPECT_EQ(store.master(norm).as<float>()[0], 1.0f);
  o.decay = Decay::kAll;
  Optimizer(store, o).step(ctx, 2, 0.1, 0);
  EXPECT_FLOAT_EQ(store.master(norm).as<float>()[0], 0.95f);
}

TEST_F(OptimizerFixture, LambNormsAreATensorsOwn) {
  OptimizerSection o;
  o.name = OptimizerName::kLamb;
  o.weight_decay = 0;
  o.eps = 0;
  fill_gradients(1);
  const int i = store.find("model.layers.1.mlp.experts.2.up_proj.weight");
  const View w = store.master(i);
  double before = 0;
  std::vector<float> old(w.as<float>(), w.as<float>() + w.elements());
  for (float x : old) before += double{x} * x;
  Optimizer(store, o).step(ctx, 1, 0.1, 1);
  double moved = 0;
  for (int64_t j = 0; j < w.elements(); ++j) moved += std::pow(w.as<float>()[j] - old[static_cast<size_t>(j)], 2);
  EXPECT_NEAR(std::sqrt(moved), 0.1 * std::sqrt(before), 1e-5 * std::sqrt(before));  // |step| = lr * |w|
}

// What is drawn is a tensor's own: the experts' tensors are one piece for AdamW, and each alone for LAMB.
TEST_F(OptimizerFixture, Bf16MomentsAreRoundedByNameSeedAndStep) {
  const auto moments = [&](uint64_t seed, int64_t step, int64_t experts) {
    ModelConfig c = model();
    c.moe_num_experts = experts;  // fewer: other tensors beside it, and another place
    ParameterStore narrow(tensor_specs(c), DType::kF32, StoreUse::kTrain, nullptr, DType::kBF16);
    narrow.initialize(c, Init::kHuggingFace, 1, pool);
    for (int i = 0; i < narrow.size(); ++i)
      for (int64_t j = 0; j < narrow.gradient(i).elements(); ++j)
        narrow.gradient(i).as<float>()[j] = 1.0f + static_cast<float>(j) * 0x1p-12f;
    OptimizerSection o;
    o.clip_norm = 0;
    Optimizer(narrow, o, seed).step(ctx, step, 0.01, 1);
    const int i = narrow.find("model.layers.1.mlp.experts.1.up_proj.weight");
    const bf16* m = narrow.moment1(i).as<bf16>();
    std::vector<uint16_t> bits;
    for (int64_t j = 0; j < narrow.moment1(i).elements(); ++j) bits.push_back(m[j].bits);
    return bits;
  };
  const auto first = moments(1, 1, 4);
  EXPECT_EQ(first, moments(1, 1, 4));
  EXPECT_EQ(first, moments(1, 1, 2));
  EXPECT_NE(first, moments(2, 1, 4));
  EXPECT_NE(first, moments(1, 2, 4));
}

}  // namespace
}  // namespace concerto
