// Weights packed once a step give the training of weights read as they are, bit for bit.
#include <gtest/gtest.h>

#include "concerto/cli/backends.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

// Store, stage and executor with or without packed copies, and an optimizer.
struct Job {
  Job(const ModelConfig& config, const Backend& backend, ThreadPool& pool, bool packs, OptimizerName name,
      DType moments = DType::kF32)
      : store(tensor_specs(config), DType::kBF16, StoreUse::kTrain, packs ? &backend : nullptr, moments),
        stage(config, store, Recompute::kNone, 64, RoutingUnit::kSequence),
        executor(stage, store, backend, pool, {.max_tokens = 64, .poison = true}),
        optimizer(store, settings(name)),
        pool(pool) {
    fill_random(store, 7);
  }
  static OptimizerSection settings(OptimizerName name) {
    OptimizerSection o;
    o.name = name;
    return o;
  }
  void step(int64_t number, std::span<const MicroBatch> batches) {
    store.clear_gradients(pool);
    executor.run(build_pipeline({.micro_batches = static_cast<int64_t>(batches.size())}), batches, output);
    losses.push_back(output.loss());
    const double norm = optimizer.gradient_norm(executor.ops());
    Arena scratch(1 << 20);
    Context ctx = executor.ops();
    ctx.scratch = &scratch;
    optimizer.step(ctx, number, 1e-2, norm);
  }

  ParameterStore store;
  Stage stage;
  Executor executor;
  Optimizer optimizer;
  StepOutput output;
  ThreadPool& pool;
  std::vector<double> losses;
};

bool has_packing() {
  if (backend_by_name("cpu").linear.packing) return true;
  std::cout << "this processor's products read bf16 weights as they are\n";
  return false;
}

void expect_same_masters(const ParameterStore& a, const ParameterStore& b) {
  for (int i = 0; i < a.size(); ++i) {
    const View x = a.master(i), y = b.master(i);
    ASSERT_EQ(std::memcmp(x.data, y.data, static_cast<size_t>(x.bytes())), 0) << a.specs()[static_cast<size_t>(i)].name;
  }
}

// Three steps of two micro-batches each.
void expect_same_training(const ModelConfig& config, Job& packed, Job& plain) {
  for (int64_t step = 1; step <= 3; ++step) {
    const std::vector<MicroBatch> batches = {random_batch(config, {{3, 9}, {14}}, static_cast<uint64_t>(step)),
                                             random_batch(config, {{20}}, static_cast<uint64_t>(step + 9))};
    packed.step(step, batches);
    plain.step(step, batches);
    expect_same_masters(packed.store, plain.store);
  }
  EXPECT_EQ(packed.losses, plain.losses);
}

TEST(PackedWeights, TrainAsPlainOnesDo) {
  if (!has_packing()) GTEST_SKIP();
  const Backend& cpu = backend_by_name("cpu");
  ThreadPool pool(2);
  ModelConfig config = tiny_moe();
  config.num_nextn_predict_layers = 2;  // three heads read one weight
  for (const auto& [name, moments] :
       {std::pair{OptimizerName::kAdamW, DType::kF32}, std::pair{OptimizerName::kAdamW, DType::kBF16},
        std::pair{OptimizerName::kLamb, DType::kF32}, std::pair{OptimizerName::kLamb, DType::kBF16}}) {
    Job packed(config, cpu, pool, true, name, moments), plain(config, cpu, pool, false, name, moments);
    EXPECT_TRUE(packed.store.packed_from(packed.store.find("lm_head.weight")));
    EXPECT_FALSE(plain.store.packed_from(plain.store.find("lm_head.weight")));
    expect_same_training(config, packed, plain);
    EXPECT_NE(packed.losses[0], packed.losses[2]);
  }
}

TEST(PackedWeights, ATiedHeadIsPackedAndLookedUp) {
  if (!has_packing()) GTEST_SKIP();
  ThreadPool pool(2);
  const ModelConfig config = tiny_dense();
  ASSERT_TRUE(config.tie_word_embeddings);
  Job packed(config, backend_by_name("cpu"), pool, true, OptimizerName::kAdamW),
      plain(config, backend_by_name("cpu"), pool, false, OptimizerName::kAdamW);
  EXPECT_TRUE(packed.store.packed_from(packed.store.find("model.embed_tokens.weight")));
  expect_same_training(config, packed, plain);
}

TEST(PackedWeights, FollowWhatIsSet) {
  if (!has_packing()) GTEST_SKIP();
  const Backend& cpu = backend_by_name("cpu");
  ThreadPool pool(2);
  Job run(tiny_moe(), cpu, pool, true, OptimizerName::kAdamW);
  const std::vector<MicroBatch> batches = {random_batch(tiny_moe(), {{20}}, 1)};
  run.step(1, batches);
  fill_random(run.store, 7);
  Job fresh(tiny_moe(), cpu, pool, true, OptimizerName::kAdamW);
  for (Job* r : {&run, &fresh}) r->step(1, batches);
  EXPECT_EQ(run.losses.back(), fresh.losses.back());
  EXPECT_EQ(run.losses.back(), run.losses.front());
}

TEST(PackedWeights, AreTheirOnlyCopy) {
  if (!has_packing()) GTEST_SKIP();
  const auto specs = tensor_specs(tiny_moe());
  const ParameterStore packed(specs, DType::kBF16, StoreUse::kTrain, &backend_by_name("cpu"));
  const ParamRef head = packed.ref("lm_head.weight");
  EXPECT_EQ(packed.weight(head).data, nullptr);
  EXPECT_EQ(packed.weight(head).shape, head.shape);
  EXPECT_FALSE(packed.copy(head.first));
  const ParamRef embedding = packed.ref("model.embed_tokens.weight");
  EXPECT_EQ(packed.table(embedding).data, packed.master(embedding.first).data);
  EXPECT_FALSE(packed.copy(embedding.first));
  // One tensor of a fused run cannot be read by itself.
  Context ctx;
  EXPECT_THROW(packed.packed(ctx, packed.ref("model.layers.0.self_attn.k_proj.weight")), Bug);
}

// Products of another library read weights as they are: experts may be packed where a tied head is not.
TEST(PackedWeights, ExpertsAlone) {
  if (!has_packing()) GTEST_SKIP();
  Backend other = backend_by_name("cpu");
  other.linear.packing = nullptr;
  ThreadPool pool(2);
  ModelConfig config = tiny_moe();
  config.tie_word_embeddings = true;
  Job packed(config, other, pool, true, OptimizerName::kAdamW),
      plain(config, other, pool, false, OptimizerName::kAdamW);
  const ParamRef head = packed.store.ref("model.embed_tokens.weight");
  EXPECT_EQ(packed.store.weight(head).dtype, DType::kBF16);
  EXPECT_TRUE(packed.store.packed_from(packed.store.find("model.layers.1.mlp.experts.0.gate_proj.weight")));
  expect_same_training(config, packed, plain);
}

// A product writes the first time in a step and adds later; what no product wrote is zero in the end.
TEST(ProductGradients, AreWrittenOnceAndSettled) {
  ParameterStore store(tensor_specs(tiny_moe()), DType::kF32, StoreUse::kTrain);
  ThreadPool pool(2);
  const ParamRef head = store.ref("lm_head.weight"), norm = store.ref("model.norm.weight");
  const ParamRef out = store.ref("model.layers.0.self_attn.o_proj.weight");
  for (const ParamRef r : {head, norm, out}) store.gradient(r.first).as<float>()[0] = 5;
  Context ctx;
  EXPECT_TRUE(store.product_gradient(ctx, head).accumulate);  // nothing was cleared: sums so far
  store.clear_gradients(pool);
  EXPECT_EQ(store.grad(norm).as<float>()[0], 0);
  ctx.dry_run = true;
  EXPECT_TRUE(store.product_gradient(ctx, head).accumulate);
  ctx.dry_run = false;
  EXPECT_FALSE(store.product_gradient(ctx, head).accumulate);
  EXPECT_TRUE(store.product_gradient(ctx, head).accumulate);
  EXPECT_THROW(store.grad(out), Bug);
  store.settle_gradients(pool);
  EXPECT_EQ(store.gradient(head.first).as<float>()[0], 5);  // the product's business
  EXPECT_EQ(store.gradient(out.first).as<float>()[0], 0);
  EXPECT_TRUE(store.product_gradient(ctx, out).accumulate);
}

}  // namespace
}  // namespace concerto::test
