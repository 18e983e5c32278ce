#include <gtest/gtest.h>

#include <cmath>

#include "concerto/arch/layout_cost.h"
#include "concerto/arch/tensor_owners.h"
#include "concerto/params/parameter_store.h"

namespace concerto {
namespace {

ModelConfig tiny() {
  ModelConfig c;
  c.vocab_size = 64;
  c.hidden_size = 16;
  c.intermediate_size = 24;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.moe_num_experts = 4;
  c.moe_k = 2;
  c.moe_intermediate_size = 8;
  c.moe_num_shared_experts = 1;
  return c;
}

TEST(ParameterStore, FusedViewIsTheTensorsInOrder) {
  ParameterStore store(tensor_specs(tiny()), DType::kF32, StoreUse::kTrain);
  const std::string p = "model.layers.0.self_attn.";
  const ParamRef qkv = store.fused(p + "q_proj.weight", 3, {32, 16});
  EXPECT_EQ(store.weight(qkv).rows_range(16, 8).data, store.weight(store.ref(p + "k_proj.weight")).data);
  EXPECT_EQ(store.grad(qkv).rows_range(24, 8).data, store.grad(store.ref(p + "v_proj.weight")).data);
  const ParamRef experts = store.fused("model.layers.1.mlp.experts.0.gate_proj.weight", 8, {4, 16, 16});
  EXPECT_EQ(store.weight(experts).rows_range(3 * 16 + 8, 8).data,
            store.weight(store.ref("model.layers.1.mlp.experts.3.up_proj.weight")).data);
  EXPECT_THROW(store.fused("model.norm.weight", 2, {32}), Bug);
}

TEST(ParameterStore, Bf16KeepsRouterNormsAndMastersInF32) {
  ParameterStore store(tensor_specs(tiny()), DType::kBF16, StoreUse::kTrain);
  EXPECT_EQ(store.weight(store.ref("model.norm.weight")).dtype, DType::kF32);
  EXPECT_EQ(store.weight(store.ref("model.layers.1.mlp.gate.weight")).dtype, DType::kF32);
  EXPECT_EQ(store.weight(store.ref("model.embed_tokens.weight")).dtype, DType::kBF16);
  EXPECT_EQ(store.master(store.find("model.embed_tokens.weight")).dtype, DType::kF32);
}

TEST(ParameterStore, Bf16MomentsTakeHalfTheMemory) {
  const auto specs = tensor_specs(tiny());
  const ParameterStore wide(specs, DType::kBF16, StoreUse::kTrain),
      narrow(specs, DType::kBF16, StoreUse::kTrain, nullptr, DType::kBF16);
  EXPECT_EQ(narrow.moment1(0).dtype, DType::kBF16);
  EXPECT_EQ(narrow.moment2(0).dtype, DType::kBF16);
  EXPECT_EQ(wide.moment1(0).dtype, DType::kF32);
  EXPECT_EQ(wide.bytes() - narrow.bytes(), 2 * 2 * wide.elements());
  EXPECT_EQ(ParameterStore(specs, DType::kF64, StoreUse::kTrain).moment1(0).dtype, DType::kF64);
  EXPECT_THROW(ParameterStore(specs, DType::kF64, StoreUse::kTrain, nullptr, DType::kBF16), Bug);
}

// The store of a rank takes the bytes that arch says it takes.
TEST(ParameterStore, BytesAreThoseOfTheFormulas) {
  const ModelConfig c = tiny();
  const auto expect = [&](const RankWork& w, const std::vector<uint8_t>& updated) {
    const ParameterStore store(tensor_specs(c, w.plan), w.compute, StoreUse::kTrain, nullptr, w.moments, updated);
    const LayoutCost cost = layout_cost(c, w);
    EXPECT_EQ(store.bytes(), cost.weight_bytes + cost.copy_bytes + cost.gradient_bytes + cost.moment_bytes);
    EXPECT_EQ(store.elements() * dtype_bytes(store.stat()), cost.weight_bytes);
  };
  for (const DType compute : {DType::kBF16, DType::kF32, DType::kF64}) {
    RankWork w{.compute = compute, .zero = 0};
    expect(w, {});
    w.plan = {.tp = 2, .tp_rank = 1, .ep = 3, .ep_rank = 2};
    w.dp = 3;
    w.dp_rank = 2;
    expect(w, {});
    w.plan.stages = {{1, 2, false, true}};
    w.pp = 2;
    w.pp_rank = 1;
    expect(w, {});
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto owners = tensor_owners(tensor_specs(c, ShardPlan{}), {3, 3, 3, 3, 3});
    std::vector<uint8_t> updated;
    for (const int owner : owners) updated.push_back(owner == rank);
    expect({.dp = 3, .dp_rank = rank, .moments = DType::kBF16, .zero = 1}, updated);
  }
}

TEST(ParameterStore, InferenceStoreHoldsOneCopyOfEachTensor) {
  const auto specs = tensor_specs(tiny());
  ParameterStore store(specs, DType::kBF16, StoreUse::kInfer);
  int64_t elements = 0;
  for (const auto& s : specs) elements += s.shape.elements();
  EXPECT_LT(store.bytes(), elements * 3);
  const int i = store.find("model.embed_tokens.weight");
  std::vector<float> x(static_cast<size_t>(specs[i].shape.elements()), 1.5f), y(x.size());
  store.set(i, x.data());
  store.get(i, y.data());
  EXPECT_EQ(x, y);
}

TEST(ParameterStore, InitialValuesDependOnNameAndSeedOnly) {
  ModelConfig a = tiny(), b = tiny();
  b.num_hidden_layers = 3;  // other tensors around it
  ThreadPool one(1), two(2);
  ParameterStore x(tensor_specs(a), DType::kF32, StoreUse::kInfer), y(tensor_specs(b), DType::kF32, StoreUse::kInfer);
  x.initialize(a, Init::kHuggingFace, 7, one);
  y.initialize(b, Init::kHuggingFace, 7, two);
  for (int i = 0; i < x.size(); ++i) {
    const int j = y.find(x.specs()[i].name);
    ASSERT_GE(j, 0);
    EXPECT_EQ(std::memcmp(x.master(i).data, y.master(j).data, static_cast<size_t>(x.master(i).bytes())), 0)
        << x.specs()[i].name;
  }
  EXPECT_EQ(x.master(x.find("model.embed_tokens.weight")).as<float>()[3], 0);  // the padding row
  EXPECT_EQ(x.master(x.find("model.norm.weight")).as<float>()[3], 1);
}

}  // namespace
}  // namespace concerto
