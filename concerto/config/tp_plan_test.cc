#include "concerto/config/tp_plan.h"

#include <gtest/gtest.h>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/config/run_config.h"

namespace concerto {
namespace {

TpPlanReading reading(const std::string& json) {
  Value plan;
  SyntaxFault syntax;
  EXPECT_TRUE(parse_json_settings(json, plan, syntax)) << syntax.what;
  return read_tp_plan(plan);
}

std::string only_problem(const std::string& json) {
  const TpPlanReading r = reading(json);
  EXPECT_EQ(r.problems.size(), 1u) << json;
  EXPECT_TRUE(r.note.empty());
  return r.problems.empty() ? "" : r.problems[0].what + ". " + r.problems[0].fix;
}

// The plan of the older remote code (reference 4), of Hugging Face's first port, and of the one with packed experts.
const char* const kOldPlan = R"({
  "model.layers.*.self_attn.q_proj": "colwise_rep", "model.layers.*.self_attn.k_proj": "colwise_rep",
  "model.layers.*.self_attn.v_proj": "colwise_rep", "model.layers.*.self_attn.o_proj": "rowwise_rep",
  "model.layers.*.mlp.experts.*.gate_proj": "colwise", "model.layers.*.mlp.experts.*.up_proj": "colwise",
  "model.layers.*.mlp.experts.*.down_proj": "rowwise",
  "model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise",
  "model.layers.*.mlp.down_proj": "rowwise"})";

TEST(TpPlan, PlansThatNameOurSplitsPassWithANote) {
  for (const char* plan :
       {kOldPlan,
        R"({"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.experts.gate_up_proj": "local_rowwise", "layers.*.mlp.experts.down_proj": "local_rowwise",
            "layers.*.mlp.experts": "gather", "layers.*.mlp.shared_experts.down_proj": "rowwise"})",
        R"({"layers.*.mlp.experts.gate_up_proj": "packed_colwise", "layers.*.mlp.experts.down_proj": "rowwise",
            "layers.*.mlp.experts": "moe_tp_experts", "lm_head": "colwise_gather_output",
            "embed_tokens": "embedding_rowwise", "norm.weight": "sequence_parallel"})",
        R"({"layers.*.mlp.experts.*.gate_proj": "local_colwise", "layers.*.mlp.experts.*": "local"})",
        R"({"layers.*.self_attn.q_proj": "replicate", "layers.*.mlp.gate": "replicate"})"}) {
    const TpPlanReading r = reading(plan);
    EXPECT_TRUE(r.problems.empty()) << r.problems[0].what;
    EXPECT_HAS(r.note, "parallel.tp");
  }
  EXPECT_TRUE(reading("null").note.empty());
  EXPECT_TRUE(reading("{}").note.empty());
}

TEST(TpPlan, RefusesOtherSplitsAndUnknownWords) {
  EXPECT_HAS(only_problem(R"({"layers.*.self_attn.q_proj": "rowwise"})"),
             "layers.*.self_attn.q_proj: rowwise, but here it is cut by its outputs (colwise). Remove");
  EXPECT_HAS(only_problem(R"({"layers.*.mlp.down_proj": "colwise_rep"})"), "cut by its inputs (rowwise)");
  EXPECT_HAS(only_problem(R"({"layers.*.mlp.experts.*.down_proj": "colwise"})"), "cut by its inputs (rowwise)");
  EXPECT_HAS(only_problem(R"({"layers.*.mlp.gate": "colwise"})"), "whole on each rank (replicate)");
  EXPECT_HAS(only_problem(R"({"layers.*.mlp.experts": "colwise"})"), "parallel.ep and parallel.etp");
  EXPECT_HAS(only_problem(R"({"layers.*.self_attn.q_proj": "diagonal"})"),
             "\"diagonal\" is no word of such a plan. Known: colwise, colwise_rep,");
  EXPECT_HAS(only_problem(R"({"layers.*.self_attn.q_proj": ["colwise"]})"), "a list is no word");
  EXPECT_HAS(only_problem(R"({"layers.*.self_attn.qkv": "colwise"})"),
             "layers.*.self_attn.qkv: no module of this model. Known: q_proj,");
  EXPECT_HAS(only_problem(R"({"*": "colwise"})"), "*: no module of this model");
  EXPECT_HAS(only_problem(R"("auto")"), "expected a map of modules to words, got \"auto\"");
  EXPECT_EQ(reading(R"({"a": "b", "q_proj": "rowwise"})").problems.size(), 3u);
}

TEST(TpPlan, OfAModelFolderAndOfARunFile) {
  const TestFolder folder;
  const auto write = [&](const std::string& plan) {
    return folder.write("config.json", R"({"model_type": "ernie4_5_moe", "base_model_tp_plan": )" + plan + "}");
  };
  write(kOldPlan);
  const std::string run = fmt::format("model: {{path: \"{}\"}}\nparallel: {{tp: 2}}\n", folder.path());
  const RunConfig c = parse_run_config(run, "run.yaml", {});
  ASSERT_EQ(c.notes.size(), 1u);
  EXPECT_HAS(c.notes[0], "config.json: base_model_tp_plan: read; it decides nothing.");
  EXPECT_EQ(run_config_yaml(c).find("tp_plan"), std::string::npos);
  EXPECT_EQ(load_model_config(folder.path()).moe_k, 6);

  write(R"({"layers.*.mlp.up_proj": "rowwise", "x": "colwise"})");
  const std::string faults = error_of(ErrorCode::kConfig, [&] { parse_run_config(run, "run.yaml", {}); });
  EXPECT_HAS(faults, "config.json: base_model_tp_plan: layers.*.mlp.up_proj: rowwise, but");
  EXPECT_HAS(faults, "config.json: base_model_tp_plan: x: no module");
  error_of(ErrorCode::kModel, [&] { load_model_config(folder.path()); });

  const RunConfig inline_plan =
      parse_run_config(fmt::format("model: {{moe_k: 2, base_model_tp_plan: {}}}\n", kOldPlan), "run.yaml", {});
  ASSERT_EQ(inline_plan.notes.size(), 1u);
  EXPECT_HAS(inline_plan.notes[0], "run.yaml: model.base_model_tp_plan: read");
}

}  // namespace
}  // namespace concerto
