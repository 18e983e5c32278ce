// Faults that other trainers have had (their issues' cases), where no test of a room would see them.
#include <gtest/gtest.h>

#include <functional>

#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

class Watcher final : public Observer {
 public:
  bool wants_logits() const override { return false; }
  void record(const std::string& name, View value) override {
    const std::vector<double> block = to_doubles(value);
    values[name].insert(values[name].end(), block.begin(), block.end());
  }
  Tensors values;
};

void set_values(ParameterStore& store, const std::string& name, const std::function<float(int64_t, int64_t)>& value) {
  const int i = store.find(name);
  const Shape shape = store.specs()[static_cast<size_t>(i)].shape;
  std::vector<float> values;
  for (int64_t r = 0; r < shape.elements() / shape[shape.rank() - 1]; ++r)
    for (int64_t c = 0; c < shape[shape.rank() - 1]; ++c) values.push_back(value(r, c));
  store.set(i, values.data());
}

ModelConfig one_moe_layer() {
  ModelConfig c = tiny_moe();
  c.num_hidden_layers = 1;
  c.moe_layer_start_index = 0;
  c.moe_num_shared_experts = 0;
  c.moe_k = 1;
  return c;
}

// Known fault 6: tokens that come back from the experts at wrong positions when there is more than one row. Experts that
// are the identity, exactly: the first feature is always one, 32 of it is its own silu, and the rest are powers of two.
TEST(KnownFaults, TokensComeBackWhereTheyWere) {
  ModelConfig c = one_moe_layer();
  c.moe_intermediate_size = c.hidden_size;
  c.rms_norm_eps = 0;  // values of plus and minus one are their own norm
  ThreadPool pool(2);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const Rows& rows : {Rows{{7}}, Rows{{5, 1}, {9}}, Rows{{4}, {2, 6}, {3}}}) {
      TinyRun run(c, backend_by_name("cpu"), pool, dtype);
      const std::string layer = "model.layers.0.";
      set_values(run.store, "model.embed_tokens.weight", [](int64_t id, int64_t feature) {
        return feature == 0 || (id >> ((feature - 1) % 6) & 1) != 0 ? 1.0f : -1.0f;
      });
      set_values(run.store, layer + "self_attn.o_proj.weight", [](int64_t, int64_t) { return 0.0f; });
      set_values(run.store, layer + "post_attention_layernorm.weight", [](int64_t, int64_t) { return 1.0f; });
      for (int64_t e = 0; e < c.moe_num_experts; ++e) {
        const std::string expert = fmt::format("{}mlp.experts.{}.", layer, e);
        set_values(run.store, expert + "gate_proj.weight", [](int64_t, int64_t in) { return in == 0 ? 32.0f : 0.0f; });
        set_values(run.store, expert + "up_proj.weight",
                   [](int64_t out, int64_t in) { return out == in ? 1.0f / 32 : 0.0f; });
        set_values(run.store, expert + "down_proj.weight",
                   [](int64_t out, int64_t in) { return out == in ? 1.0f : 0.0f; });
      }
      Watcher watcher;
      run.executor.set_observer(&watcher);
      run.step(std::vector<MicroBatch>{random_batch(c, rows, 3)});
      EXPECT_EQ(watcher.values.at("mlp_out.0"), watcher.values.at("hidden.0")) << rows.size() << " rows";
      const auto& counts = run.output.tokens_per_expert[0];
      EXPECT_GT(std::count_if(counts.begin(), counts.end(), [](int64_t n) { return n > 0; }), 1);
    }
}

// Known fault 15: counts of tokens that went through a small float type on the way.
TEST(KnownFaults, TokensPerExpertAreExact) {
  const ModelConfig c = one_moe_layer();
  ThreadPool pool(2);
  TinyRun run(c, backend_by_name("cpu"), pool, DType::kBF16, {.max_tokens = 640});
  set_values(run.store, "model.layers.0.mlp.moe_statics.e_score_correction_bias",
             [](int64_t, int64_t e) { return e == 5 ? 100.0f : 0.0f; });
  std::vector<MicroBatch> batches;
  int64_t tokens = 0;
  for (int i = 0; i < 64; ++i) {  // 638 tokens, or 639
    batches.push_back(random_batch(c, {std::vector<int>(21, 29), {i < 8 ? 30 : 29}}, static_cast<uint64_t>(i)));
    tokens += batches.back().tokens();
  }
  ASSERT_EQ(tokens, 40840);  // in bf16 it would be 40704 or 41216
  run.step(batches);
  std::vector<int64_t> want(static_cast<size_t>(c.moe_num_experts), 0);
  want[5] = tokens;
  EXPECT_EQ(run.output.tokens_per_expert[0], want);
  EXPECT_EQ(run.output.tokens, tokens);
}

}  // namespace
}  // namespace concerto::test
