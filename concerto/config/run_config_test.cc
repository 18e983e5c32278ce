#include "concerto/config/run_config.h"

#include <gtest/gtest.h>

#include <random>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/config/model_fields.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

const char* kModel = "model: {num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4}\n";

RunConfig parse(const std::string& text, const Overrides& overrides = {}) {
  return parse_run_config(text, "run.yaml", overrides);
}
std::string fault_of(const std::string& text, const Overrides& overrides = {}) {
  return error_of(ErrorCode::kConfig, [&] { parse(text, overrides); });
}
// The one fault of a file that holds a sound model and `text`.
std::string one_fault(const std::string& text) {
  const std::string message = fault_of(kModel + text);
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  return message;
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(ParseRunConfig, ReadsADesignLikeFile) {
  const RunConfig c = parse(R"(
run: {dir: runs/quickstart, seed: 7, resume: auto}
model: {path: tests/golden/moe-tiny, init: pretrained}
data: {train: [{path: data/en, weight: 0.7}, {path: data/zh, weight: 0.3}, data/fr], valid: data/valid, tokenizer: data/tokenizer.model}
training: {steps: 2000, global_batch_size: 64, micro_batch_size: 8, seq_length: 128, dtype: bf16, routing_unit: micro_batch}
optimizer: {name: lamb, lr: 3.0e-4, schedule: wsd, wsd_decay: 1-sqrt, warmup_steps: 100, weight_decay: 0.1, clip_norm: 1}
parallel: {tp: 2, pp: 2, vpp: 3, ep: 4, etp: 2, cp: 1, stage_layers: [1, 0, 1, 1, 0, 0], zero: 0, grad_wire: bf16,
           dispatch_buffer_mib: 64, schedule: interleaved, recompute: full}
checkpoint: {every_steps: 500, every_minutes: 0, keep: 3, keep_best: false}
monitor: {tensorboard: true, trace_steps: [10, 12]}
backend: ref
)");
  EXPECT_EQ(c.run.dir, "runs/quickstart");
  EXPECT_EQ(c.run.seed, 7);
  EXPECT_EQ(c.model.init, InitFrom::kPretrained);
  EXPECT_EQ(c.model.config.moe_num_experts, 16);
  ASSERT_EQ(c.data.train.size(), 3u);
  EXPECT_EQ(c.data.train[1].path, "data/zh");
  EXPECT_EQ(c.data.train[1].weight, 0.3);
  EXPECT_EQ(c.data.train[2].weight, 1.0);
  ASSERT_EQ(c.data.valid.size(), 1u);
  EXPECT_EQ(c.data.valid[0].path, "data/valid");
  EXPECT_EQ(c.training.steps, 2000);
  EXPECT_EQ(c.optimizer.name, OptimizerName::kLamb);
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_EQ(c.optimizer.schedule, LrSchedule::kWsd);
  EXPECT_EQ(c.optimizer.wsd_decay, WsdDecay::kOneMinusSqrt);
  EXPECT_EQ(c.parallel.tp, 2);
  EXPECT_EQ(c.parallel.pp, 2);
  EXPECT_EQ(c.parallel.vpp, 3);
  EXPECT_EQ(c.parallel.ep, 4);
  EXPECT_EQ(c.parallel.etp, 2);
  EXPECT_EQ(c.parallel.stage_layers, (std::vector<int64_t>{1, 0, 1, 1, 0, 0}));
  EXPECT_EQ(c.parallel.zero, 0);
  EXPECT_EQ(c.parallel.grad_wire, "bf16");
  EXPECT_EQ(c.parallel.dispatch_buffer_mib, 64);
  EXPECT_EQ(c.parallel.schedule, "interleaved");
  EXPECT_EQ(c.parallel.recompute, Recompute::kFull);
  EXPECT_FALSE(c.checkpoint.keep_best);
  EXPECT_EQ(c.monitor.trace_steps, (std::vector<int64_t>{10, 12}));
  EXPECT_EQ(c.backend, "ref");
  check_trainable(c);
}

TEST(ParseRunConfig, ReadsJson) {
  const RunConfig c = parse(
      "{\n  \"model\": {\"hidden_size\": 64, \"num_attention_heads\": 4},\n\t\"run\": {\"dir\": \"a \\\"b\\\"\"}\n}\n");
  EXPECT_EQ(c.run.dir, "a \"b\"");
  EXPECT_EQ(c.model.config.head_dim, 16);
}

TEST(ParseRunConfig, EachKindOfFault) {
  EXPECT_EQ(one_fault("training: {stps: 3}\n"),
            "run.yaml:2: training.stps: unknown setting. Did you mean training.steps?");
  EXPECT_EQ(one_fault("training: {lr: 3}\n"), "run.yaml:2: training.lr: unknown setting. Did you mean optimizer.lr?");
  EXPECT_EQ(one_fault("steps: 3\n"), "run.yaml:2: steps: unknown setting. Did you mean training.steps?");
  EXPECT_EQ(one_fault("trainin: {steps: 3}\n"), "run.yaml:2: trainin: unknown setting. Did you mean training?");
  EXPECT_EQ(one_fault("hidden_size: 3\n"), "run.yaml:2: hidden_size: unknown setting. Did you mean model.hidden_size?");
  EXPECT_EQ(one_fault("xyzzyplugh: 3\n"), "run.yaml:2: xyzzyplugh: unknown setting");
  EXPECT_EQ(one_fault("\n\ntraining:\n  steps: many\n"),
            "run.yaml:5: training.steps: expected a whole number, got many");
  EXPECT_EQ(one_fault("training: {steps: \"10\"}\n"),
            "run.yaml:2: training.steps: expected a whole number, got \"10\"");
  EXPECT_EQ(one_fault("training: {steps: 99999999999999999999}\n"),
            "run.yaml:2: training.steps: expected a whole number, got 99999999999999999999");
  EXPECT_EQ(one_fault("training: {steps: }\n"), "run.yaml:2: training.steps: expected a whole number, got nothing");
  EXPECT_EQ(one_fault("training: {steps: [1]}\n"), "run.yaml:2: training.steps: expected a whole number, got a list");
  EXPECT_TRUE(has(one_fault("optimizer: {lr: nan}\n"), "expected a number, got nan"));
  EXPECT_TRUE(has(one_fault("optimizer: {lr: .inf}\n"), "expected a number, got .inf"));
  EXPECT_TRUE(has(one_fault("optimizer: {lr: 1e999}\n"), "expected a number"));
  EXPECT_TRUE(has(one_fault("optimizer: {beta1: 1}\n"), "1 is out of range. Choose 0 <= x < 1"));
  EXPECT_TRUE(has(one_fault("optimizer: {eps: 0}\n"), "0 is out of range. Choose 0 < x <= 1"));
  EXPECT_TRUE(has(one_fault("optimizer: {name: adamv}\n"), "adamv is not one of adamw, lamb. Did you mean adamw?"));
  EXPECT_TRUE(has(one_fault("optimizer: {schedule: \"wsd:100\"}\n"), "Write schedule: wsd and wsd_stable_steps: 100"));
  EXPECT_TRUE(has(one_fault("data: {shuffle: yes}\n"), "expected true or false, got yes"));
  EXPECT_TRUE(has(one_fault("run: {dir: [a]}\n"), "expected text, got a list"));
  EXPECT_TRUE(has(one_fault("data: {train: [{path: a, wieght: 1}]}\n"), "\"wieght\" is unknown in a source"));
  EXPECT_TRUE(has(one_fault("data: {train: [{path: a, weight: 0}]}\n"), "weight: 0 is out of range"));
  EXPECT_TRUE(has(one_fault("data: {train: [{path: [a]}]}\n"), "path: expected text"));
  EXPECT_TRUE(has(one_fault("data: {train: [{path: a, path: b}]}\n"), "\"path\" is given twice in a source"));
  EXPECT_TRUE(has(one_fault("data: {train: {path: a, weight: 1, weight: 1}}\n"), "\"weight\" is given twice"));
  EXPECT_TRUE(has(one_fault("data: {train: [{weight: 2}]}\n"), "a source without a path"));
  EXPECT_TRUE(has(one_fault("data: {train: [[a]]}\n"), "expected a path or {path: ..., weight: ...}, got a list"));
  EXPECT_TRUE(has(one_fault("monitor: {trace_steps: 3}\n"), "expected a list of whole numbers, got 3"));
  EXPECT_TRUE(has(one_fault("monitor: {trace_steps: [1, x]}\n"), "expected a whole number, got x"));
  EXPECT_TRUE(has(one_fault("training: 3\n"), "training: expected a map of settings, got 3"));
  EXPECT_TRUE(has(one_fault("run: {}\nrun: {}\n"), "run.yaml:3: run: this section is given twice"));
  EXPECT_TRUE(has(one_fault("training: {steps: 3, steps: 4}\n"), "given twice, also as training.steps"));
  EXPECT_TRUE(has(one_fault("max_steps: 3\ntrain_iters: 3\n"), "train_iters: given twice, also as max_steps"));
  EXPECT_TRUE(has(one_fault("gradient_accumulation_steps: 3\n"), "Set training.global_batch_size"));
  EXPECT_TRUE(has(fault_of("- 1\n- 2\n"), "expected sections of settings, got a list"));
  EXPECT_TRUE(has(fault_of("a: [1\nb: }"), "YAML syntax"));
  EXPECT_TRUE(has(fault_of(""), "model.path: no model is given"));
  EXPECT_TRUE(has(fault_of("model: {path: no/such/folder}\n"), "run.yaml:1: model.path: no/such/folder: no such file"));
  EXPECT_TRUE(has(fault_of("model: {hiden_size: 3}\n"),
                  "run.yaml:1: model.hiden_size: unknown setting. Did you mean model.hidden_size?"));
  EXPECT_TRUE(has(fault_of("model: {int: pretrained, hidden_size: 40}\n"), "Did you mean model.init?"));
  EXPECT_TRUE(has(fault_of("model: {moe_k: 65}\n"), "run.yaml:1: model.moe_k: 65 is more than moe_num_experts = 64"));
  EXPECT_TRUE(has(fault_of("model: {moe_gate: top2, moe_k: 6}\n"), "top2 chooses 2 experts, but moe_k = 6"));
  EXPECT_TRUE(has(fault_of("model: {dtype: bfloat16}\n"), "Set training.dtype"));
  EXPECT_TRUE(has(fault_of("model: {path: tests/golden/dense-tiny, model_type: ernie4_5_moe}\n"), "They must agree"));
}

TEST(ParseRunConfig, RulesBetweenSettings) {
  EXPECT_TRUE(has(one_fault("training: {micro_batch_size: 65}\n"), "65 is more than global_batch_size = 64"));
  EXPECT_TRUE(has(one_fault("training: {seq_length: 131073}\n"), "max_position_embeddings = 131072"));
  EXPECT_TRUE(has(one_fault("training: {micro_batch_size: 400000, global_batch_size: 400000, seq_length: 1024}\n"),
                  "run.yaml:2: training.micro_batch_size: 400000 sequences of 1024 tokens are more than the "));
  EXPECT_TRUE(has(one_fault("training: {micro_batch_size: 1, global_batch_size: 2000000}\n"),
                  "2000000 are 2000000 micro-batches a step, at most 1048576 are possible"));
  EXPECT_TRUE(has(one_fault("training: {dtype: f64}\n"), "f64 is not built for backend cpu"));
  EXPECT_EQ(parse(std::string(kModel) + "training: {dtype: f64}\nbackend: ref\n").training.dtype, "f64");
  EXPECT_TRUE(has(one_fault("training: {dtype: f64}\nbackend: ref\noptimizer: {moments_dtype: bf16}\n"),
                  "optimizer.moments_dtype: bf16, but an f64 run keeps its moments in f64. Set it to f32"));
  EXPECT_TRUE(has(one_fault("optimizer: {warmup_steps: 1001}\n"), "1001 is more than training.steps = 1000"));
  EXPECT_TRUE(has(one_fault("optimizer: {wsd_stable_steps: 1001}\n"), "1001 is more than training.steps = 1000"));
  EXPECT_TRUE(has(one_fault("optimizer: {min_lr: 1}\n"), "1.0 is more than lr = 0.0003"));
  const auto capacity = [](const std::string& more) {
    return fault_of("model: {moe_num_experts: 8, moe_k: 2, moe_gate: topk, moe_capacity: [2, 2, 2]}\n" + more);
  };
  EXPECT_TRUE(has(capacity("training: {seq_length: 3, routing_unit: sequence}\n"),
                  "2.0 x 3 tokens of a routing unit / 8 experts leaves no room. Raise it, or"));
  EXPECT_TRUE(has(fault_of("model: {moe_num_experts: 8, moe_k: 2, moe_capacity: [2, 0.001, 2]}\n"
                           "training: {micro_batch_size: 1, seq_length: 64}\n"),
                  "0.001 x 64 tokens of a routing unit in evaluation / 8 experts leaves no room"));
  // The same for commands that make their settings themselves.
  RunConfig made;
  made.model.config.moe_num_experts = 8;
  made.model.config.moe_capacity = {2, 0.001, 0.5};
  made.training.micro_batch_size = 1;
  made.training.seq_length = 64;
  check_capacity(made, true);
  EXPECT_TRUE(has(error_of(ErrorCode::kConfig, [&] { check_capacity(made, false); }),
                  "0.001 x 64 tokens of a routing unit in evaluation / 8 experts leaves no room"));
  made.training.seq_length = 4;  // fewer tokens than experts: the third number
  EXPECT_TRUE(has(error_of(ErrorCode::kConfig, [&] { check_capacity(made, false); }), "0.5 x 4 tokens"));
  made.model.config.moe_capacity = {};
  check_capacity(made, false);
  // Of an age are only config.json files.
  EXPECT_EQ(parse("model: {moe_num_experts: 8, moe_k: 3, moe_capacity: [8, 8, 8]}\n").model.config.moe_gate,
            RouterGate::kTopK);
  EXPECT_TRUE(has(fault_of("model: {moe_num_experts: 8, moe_k: 2, moe_group_experts: true}\n"
                           "training: {balance_counts: first_choice}\n"),
                  "first choices are those of the first group only"));
  EXPECT_TRUE(has(capacity("training: {allow_drops: false}\n"), "2.0, is less than moe_num_experts = 8. Set"));
  EXPECT_TRUE(has(one_fault("training: {token_balance_seqlen: 3}\n"), "3, but loss_average does not read it"));
  EXPECT_TRUE(has(one_fault("monitor: {trace_steps: [1, 2, 3]}\n"), "3 numbers, wanted two"));
  EXPECT_TRUE(has(one_fault("monitor: {trace_steps: [3, 2]}\n"), "3 is after 2"));
  for (const char* name : {"cuda", "gpu", "GPU", "cuda:0", "nvidia"}) {
    const std::string fault = one_fault(fmt::format("backend: \"{}\"\n", name));
    EXPECT_TRUE(has(fault, "cuda is planned, not built yet. Use cpu or ref")) << fault;
    EXPECT_FALSE(has(fault, "Did you mean")) << fault;
  }
  EXPECT_TRUE(has(one_fault("backend: cpuu\n"), "Did you mean cpu?"));
  EXPECT_TRUE(
      has(fault_of("model: {hidden_size: 64, num_attention_heads: 4, init: pretrained}\n"), "model.path is not given"));
  const TestFolder folder;
  folder.write("config.json", R"({"model_type": "ernie4_5"})");
  EXPECT_TRUE(has(fault_of(fmt::format("model: {{path: \"{}\", init: pretrained}}\n", folder.path())),
                  "holds no .safetensors file"));
  // A rule does not speak of a value that is wrong by itself.
  EXPECT_EQ(one_fault("optimizer: {min_lr: 1, lr: x}\n"), "run.yaml:2: optimizer.lr: expected a number, got x");
}

// Layouts that no number of ranks makes work. The model: 12 layers of which 11 are MoE, 6 / 2 heads.
TEST(ParseRunConfig, RulesOfThePlan) {
  const std::string model = R"(
model: {num_hidden_layers: 12, hidden_size: 96, num_attention_heads: 6, num_key_value_heads: 2, moe_num_experts: 10,
        moe_k: 2, moe_intermediate_size: 8, moe_num_shared_experts: 1, vocab_size: 50, intermediate_size: 7}
)";
  struct Case {
    const char* plan;
    std::vector<const char*> said;  // one a fault
  };
  const Case bad[] = {
      {"cp: 2", {"parallel.cp: 2 context parallel ranks: context parallelism is not built yet. Set it to 1"}},
      {"tp: 4", {"parallel.tp: 4 tensor parallel ranks do not divide the model's 6 heads; 3 or 6 would"}},
      {"tp: 9",
       {"9 tensor parallel ranks do not divide the model's 6 heads; 6 would",
        "9 tensor parallel ranks can neither split nor share the model's 2 key/value heads",
        "9 tensor parallel ranks, but the model's intermediate_size is 7"}},
      {"tp: 3", {"3 tensor parallel ranks can neither split nor share the model's 2 key/value heads"}},
      {"ep: 11", {"parallel.ep: 11 expert parallel ranks, but the model has 10 experts a layer"}},
      {"etp: 9", {"parallel.etp: 9 tensor parallel ranks inside an expert, but the model's experts are 8 wide"}},
      {"zero: 3", {"parallel.zero: 3 is out of range"}},
      {"zero: 2, pp: 3", {"parallel.zero: stage 2 with 3 pipeline stages"}},
      {"tp: 2}\noptimizer: {moments_dtype: bf16",
       {"optimizer.moments_dtype: bf16 with tensors cut among ranks (tp 2, etp 1)"}},
      {"zero: 2, schedule: zero_bubble, dispatch_buffer_mib: 8",
       {"parallel.zero: stage 2 with schedule zero_bubble and a bound on dispatch"}},
      {"vpp: 2", {"parallel.vpp: 2 virtual stages a rank do not go with schedule 1f1b on 1 pipeline ranks"}},
      {"vpp: 2, pp: 2, schedule: zero_bubble", {"do not go with schedule zero_bubble"}},
      {"vpp: 3, pp: 2, schedule: zero_bubble_v", {"do not go with schedule zero_bubble_v"}},
      {"pp: 2, schedule: interleaved", {"1 virtual stages a rank do not go with schedule interleaved on 2"}},
      {"pp: 2, schedule: zigzag", {"parallel.schedule: zigzag is not one of"}},
      {"pp: 2, stage_layers: [12]", {"parallel.stage_layers: 1 numbers of layers for 2 virtual stages (2 ranks x 1)"}},
      {"pp: 2, schedule: zero_bubble_v, stage_layers: [6, 6]",
       {"2 numbers of layers for 4 virtual stages (2 ranks x 2)"}},
      {"pp: 2, stage_layers: [6, 7]", {"stages of 13 layers together, but the model has 12"}},
      {"grad_wire: fp8", {"parallel.grad_wire: fp8 is not one of f32, bf16"}},
      {"dispatch_buffer_mib: -1", {"parallel.dispatch_buffer_mib: -1 is out of range"}},
  };
  for (const Case& c : bad) {
    const std::string text = fault_of(fmt::format("{}parallel: {{{}}}\n", model, c.plan));
    EXPECT_EQ(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1, c.said.size()) << text;
    for (const char* said : c.said) EXPECT_TRUE(has(text, said)) << said << "\n" << text;
  }
  for (const char* good :
       {"tp: 6, ep: 10, etp: 8", "tp: 2, pp: 5", "pp: 40", "zero: 2, tp: 2", "zero: 0, pp: 2",
        "pp: 2, vpp: 3, schedule: interleaved", "vpp: 3, schedule: interleaved",
        "pp: 2, vpp: 2, schedule: zero_bubble_v", "pp: 2, schedule: zero_bubble_v, stage_layers: [0, 6, 6, 0]",
        "grad_wire: bf16, dispatch_buffer_mib: 64"})
    EXPECT_NO_THROW(parse(fmt::format("{}parallel: {{{}}}\n", model, good))) << good;
  const std::string dense = "model: {model_type: ernie4_5, hidden_size: 64}\n";
  EXPECT_TRUE(has(fault_of(dense + "parallel: {ep: 2}\n"), "2 expert parallel ranks, but the model has 0 experts"));
  EXPECT_TRUE(has(fault_of(dense + "parallel: {etp: 2}\n"), "the model's experts are 0 wide"));
  // The rules do not speak of a model that is not there.
  EXPECT_FALSE(has(fault_of("parallel: {tp: 64}\n"), "parallel.tp"));
}

TEST(ParseRunConfig, AllAtOnce) {
  const TestFolder folder;
  const std::string path = folder.write("config.json", R"({"model_type": "ernie4_5_moe", "moe_k": 100})");
  const std::string text = fault_of(
      fmt::format("model: {{path: \"{}\", hiden_size: 3}}\ntraining:\n  stps: 3\n  dtype: f16\nbackend: cuda\n", path),
      {{"optimizer.lr", "fast"}, {"nonsense.key", "1"}});
  for (const char* part :
       {"run.yaml:3: training.stps: ", "run.yaml:4: training.dtype: ", "run.yaml:5: backend: ",
        "run.yaml:1: model.hiden_size: ", "config.json: moe_k: ",
        "command line: optimizer.lr: expected a number, got fast", "command line: nonsense.key: unknown"})
    EXPECT_TRUE(has(text, part)) << part << "\n" << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 6) << text;
}

TEST(ParseRunConfig, Aliases) {
  const RunConfig c = parse(std::string(kModel) + R"(
train_iters: 11
max_seq_len: 12
seed: 13
output_dir: out
tensor_parallel_degree: 1
save_total_limit: 4
lr_scheduler_type: constant_with_warmup
training: {batch_size: 2, global_batch_size: 8}
optimizer: {learning_rate: 0.5, adam_beta1: 0.25, clip_grad: 2, moe_gate_lr_ratio: 0.01, decay_function: half_life}
checkpoint: {save_interval: 14}
)");
  EXPECT_EQ(c.training.steps, 11);
  EXPECT_EQ(c.training.seq_length, 12);
  EXPECT_EQ(c.run.seed, 13);
  EXPECT_EQ(c.run.dir, "out");
  EXPECT_EQ(c.checkpoint.keep, 4);
  EXPECT_EQ(c.optimizer.schedule, LrSchedule::kConstant);
  EXPECT_EQ(c.training.micro_batch_size, 2);
  EXPECT_EQ(c.optimizer.lr, 0.5);
  EXPECT_EQ(c.optimizer.beta1, 0.25);
  EXPECT_EQ(c.optimizer.clip_norm, 2);
  EXPECT_EQ(c.optimizer.router_lr_ratio, 0.01);
  EXPECT_EQ(c.checkpoint.every_steps, 14);
}

// Every alias of the table, flat and in its section, reaches the same field as the name itself.
TEST(ParseRunConfig, EveryAliasMeansItsField) {
  for (const Field<RunConfig>& field : run_fields()) {
    if (field.key() == "model.path") continue;  // read at once
    RunConfig initial;
    const Value value = read(field.slot(initial));
    const std::string text = value.kind == Value::Kind::kQuoted && value.text.empty() ? "some/place" : value.text;
    for (const std::string& alias : field.aliases) {
      const std::string expected = run_config_yaml(parse(std::string(kModel), {{field.key(), text}}));
      EXPECT_EQ(run_config_yaml(parse(fmt::format("{}{}: {}\n", kModel, alias, text))), expected) << alias;
      EXPECT_EQ(run_config_yaml(parse(std::string(kModel), {{alias, text}})), expected) << alias;
      EXPECT_EQ(run_config_yaml(parse(std::string(kModel), {{field.section + "." + alias, text}})), expected) << alias;
    }
  }
}

TEST(ParseRunConfig, EveryAliasOfAModelFieldMeansItsField) {
  for (const Field<ModelConfig>& field : model_fields())
    for (const std::string& alias : field.aliases) {
      ModelConfig initial;
      initial.head_dim = 128;
      initial.num_key_value_heads = initial.num_attention_heads;
      const std::string text = print_json(read(field.slot(initial))), model = "model: {vocab_size: 512}\n";
      const std::string expected = run_config_yaml(parse(model, {{field.key(), text}}));
      EXPECT_EQ(run_config_yaml(parse(fmt::format("{}{}: {}\n", model, alias, text))), expected) << alias;
      EXPECT_EQ(run_config_yaml(parse(fmt::format("model: {{vocab_size: 512, {}: {}}}\n", alias, text))), expected)
          << alias;
      EXPECT_EQ(run_config_yaml(parse(model, {{alias, text}})), expected) << alias;
      EXPECT_EQ(run_config_yaml(parse(model, {{"model." + alias, text}})), expected) << alias;
    }
  const std::string model = kModel;
  EXPECT_EQ(fault_of(model + "num_experts: x\n"), "run.yaml:2: model.num_experts: expected a whole number, got x");
  EXPECT_TRUE(has(fault_of(model + "num_layers: 3\n"), "given twice, also as model.num_hidden_layers"));
}

// What is ignored in a config.json must not look as if it did something in a run file.
TEST(ParseRunConfig, KeysOfARunAreRefusedAmongModelFields) {
  const auto fault = [](const std::string& key) { return fault_of(fmt::format("model: {{moe_k: 2, {}: 1}}\n", key)); };
  for (const Field<RunConfig>& field : run_fields())
    for (const std::string& alias : field.aliases)
      if (field.section != "model") {
        EXPECT_TRUE(has(fault(alias), fmt::format("model.{}: is no setting of a model and would decide nothing here. "
                                                  "Set {}",
                                                  alias, field.key())))
            << alias;
      }
  for (const ForeignName& foreign : foreign_names()) EXPECT_TRUE(has(fault(foreign.name), foreign.advice));
  for (const std::string& key : layout_model_keys()) {
    EXPECT_TRUE(has(fault(key), "is no setting of a model")) << key;
    const auto& ignored = ignored_model_keys();
    EXPECT_NE(std::find(ignored.begin(), ignored.end(), key), ignored.end()) << key;
  }
  EXPECT_TRUE(has(fault("recompute_granularity"), "Set parallel.recompute"));
  EXPECT_TRUE(has(fault("sequence_parallel"), "Remove it: the layout of a run stands in the section `parallel`"));
  EXPECT_TRUE(has(fault_of(kModel, {{"model.use_recompute", "true"}}), "Set parallel.recompute to none"));
  EXPECT_EQ(parse("model: {moe_k: 2, use_cache: true, transformers_version: 5}\n").model.config.moe_k, 2);
}

TEST(ParseRunConfig, Overrides) {
  const std::string file = std::string(kModel) + "training: {steps: 10}\n";
  const RunConfig c = parse(file, {{"training.steps", "20"},
                                   {"max_steps", "30"},
                                   {"run.dir", "a: b, [c"},
                                   {"monitor.trace_steps", "[1, 2]"},
                                   {"data.train", "[{path: x, weight: 2}, y]"},
                                   {"data.valid", "z"},
                                   {"model.moe_k", "3"},
                                   {"backend", "ref"},
                                   {"optimizer.schedule", "linear"},
                                   {"data.shuffle", "false"}});
  EXPECT_EQ(c.training.steps, 30);  // the last one wins
  EXPECT_EQ(c.run.dir, "a: b, [c");
  EXPECT_EQ(c.monitor.trace_steps.size(), 2u);
  ASSERT_EQ(c.data.train.size(), 2u);
  EXPECT_EQ(c.data.train[0].weight, 2);
  EXPECT_EQ(c.data.valid.at(0).path, "z");
  EXPECT_EQ(c.model.config.moe_k, 3);
  EXPECT_EQ(c.backend, "ref");
  EXPECT_EQ(c.optimizer.schedule, LrSchedule::kLinear);
  EXPECT_FALSE(c.data.shuffle);
  EXPECT_TRUE(has(fault_of(file, {{"training.stps", "1"}}),
                  "command line: training.stps: unknown setting. Did you mean training.steps?"));
  EXPECT_TRUE(has(fault_of(file, {{"trainin.steps", "1"}}), "Did you mean training.steps?"));
  EXPECT_TRUE(has(fault_of(file, {{"monitor.trace_steps", "[1"}}), "YAML syntax"));
  EXPECT_TRUE(has(fault_of(file, {{"model.moe_k", "[1"}}), "YAML syntax"));
  // A sound override mends a faulty file's rule, and a wrong value on the command line is named there.
  EXPECT_TRUE(has(fault_of(file, {{"optimizer.warmup_steps", "11"}}),
                  "command line: optimizer.warmup_steps: 11 is more than training.steps = 10"));
}

TEST(ParseRunConfig, InlineFieldsOverrideTheFile) {
  const RunConfig c = parse(
      "model: {path: tests/golden/moe-tiny, hidden_size: 32, num_experts: 4, moe_k: 1}\ntraining: {seq_length: 16}\n");
  EXPECT_EQ(c.model.config.hidden_size, 32);
  EXPECT_EQ(c.model.config.head_dim, 8);
  EXPECT_EQ(c.model.config.moe_num_experts, 4);
  EXPECT_EQ(c.model.config.vocab_size, 256);
  EXPECT_EQ(parse("model: {model_type: ernie4_5}\n").model.config.num_hidden_layers, 18);
}

TEST(ParseRunConfig, CoresAreAListWithOneForEachThread) {
  const auto cores = [](const std::string& text) { return pinned_cores(parse(std::string(kModel) + text).run); };
  EXPECT_EQ(cores("run: {cores: '0-3,8'}\n"), (std::vector<int>{0, 1, 2, 3, 8}));
  EXPECT_EQ(cores("run: {cores: 0-1, threads: 2}\n"), (std::vector<int>{0, 1}));
  EXPECT_EQ(cores("run: {cores: 3}\n"), (std::vector<int>{3}));
  EXPECT_TRUE(cores("run: {threads: 64}\n").empty());
  EXPECT_TRUE(has(one_fault("run: {cores: 1-0}\n"), "run.cores: '1-0' ends before it begins. Write it as in 0-3,8"));
  EXPECT_TRUE(has(one_fault("run: {cores: 0-1, threads: 3}\n"),
                  "run.threads: 3 threads, but only 2 cores to pin them to. Name a core for each thread in run.cores"));
  RunSection bad;
  bad.cores = "x";
  EXPECT_TRUE(has(error_of(ErrorCode::kConfig, [&] { pinned_cores(bad); }), "run.cores: 'x' is no core number"));
}

TEST(RunConfigYaml, RoundTrips) {
  for (const char* model : {"path: tests/golden/moe-interval2", "path: tests/golden/dense-tiny, init_method: pretrain",
                            "hidden_size: 640, pad_token_id: null"}) {
    RunConfig c = parse(fmt::format("model: {{{}}}\ntraining: {{seq_length: 64}}\n", model));
    c.run.dir = "a \"quoted\" \\ path: {x}, \t# not a comment\n\x01";
    c.run.resume = "12";
    c.monitor.sample_prompt = "null";
    c.data.train = {{"Dönekpfad/数据", 1.0 / 3}, {"true", 1e-300}};
    c.optimizer.lr = 1.0 / 7;
    c.optimizer.min_lr = 5e-324;
    c.monitor.trace_steps = {1, 2};
    const std::string yaml = run_config_yaml(c);
    const RunConfig back = parse(yaml);
    EXPECT_EQ(run_config_yaml(back), yaml);
    EXPECT_EQ(back.run.dir, c.run.dir);
    EXPECT_EQ(back.data.train[0].weight, 1.0 / 3);
    EXPECT_EQ(back.optimizer.min_lr, 5e-324);
    EXPECT_EQ(run_config_hash(back), run_config_hash(c));
    EXPECT_TRUE(run_config_differences(back, c).empty());
    EXPECT_EQ(run_config_yaml(parse(run_config_json(c))), yaml);
  }
}

// The age of a config.json shows in what it was resolved to, so the copy in a run folder needs no age.
TEST(RunConfigYaml, KeepsWhatAnOlderFileTrains) {
  const TestFolder folder;
  folder.write("config.json", R"({"model_type": "ernie4_5_moe", "moe_gate": "topk", "moe_use_aux_free": true})");
  const auto with = [&](const std::string& more) {
    RunConfig c = parse(fmt::format("model: {{path: \"{}\"{}}}\ntraining: {{seq_length: 64}}\n", folder.path(), more));
    c.model.path = "gone";
    const RunConfig alone = parse(run_config_yaml(c));
    EXPECT_EQ(run_config_yaml(alone), run_config_yaml(c));
    EXPECT_EQ(run_config_hash(alone), run_config_hash(c));
    EXPECT_EQ(alone.model.config.moe_router_bias_update_rate, 0.001);
    return balance_loss(alone.model.config, routing_options(alone));
  };
  EXPECT_EQ(with(""), BalanceLoss::kNone);
  EXPECT_EQ(with(", router_aux_loss_coef: 0.5"), BalanceLoss::kPerLayer);
  EXPECT_EQ(with(", moe_aux_loss_lambda: 0.5, output_router_logits: true"), BalanceLoss::kPooled);
  EXPECT_EQ(with(", moe_aux_loss_lambda: 0.5, moe_aux_loss_per_layer: false"), BalanceLoss::kNone);
}

TEST(RunConfigYaml, StandsAloneWithoutTheModelFolder) {
  RunConfig c = parse("model: {path: tests/golden/moe-tiny}\ntraining: {seq_length: 64}\n");
  c.model.path = "gone";
  EXPECT_EQ(run_config_yaml(parse(run_config_yaml(c))), run_config_yaml(c));
}

TEST(RunConfigHash, CountsWhatDecidesTheNumbers) {
  const RunConfig a = parse(kModel);
  RunConfig b = a;
  b.run.dir = "elsewhere";
  b.run.threads = 3;
  b.run.cores = "0-2";
  b.backend = "ref";
  b.data.prefetch = 7;
  b.parallel = {.tp = 2, .pp = 3, .vpp = 4, .ep = 5, .etp = 6, .stage_layers = {1, 2}, .zero = 2, .grad_wire = "bf16"};
  b.parallel.dispatch_buffer_mib = 7;
  b.parallel.schedule = "zero_bubble_v";
  b.parallel.recompute = Recompute::kFull;
  b.monitor.log_every_steps = 9;
  b.checkpoint.keep = 9;
  b.model.path = "moved";
  EXPECT_EQ(run_config_hash(a), run_config_hash(b));
  EXPECT_TRUE(run_config_differences(a, b).empty());
  b.model.init = a.model.init;
  b.training.seq_length = 256;
  b.model.config.rope_theta = 10000;
  EXPECT_NE(run_config_hash(a), run_config_hash(b));
  EXPECT_EQ(run_config_differences(a, b), (std::vector<std::string>{"training.seq_length: 1024 here, 256 there",
                                                                    "model.rope_theta: 500000.0 here, 10000.0 there"}));
  b = a;
  b.model.init = InitFrom::kPretrained;
  b.model.path = "weights";
  EXPECT_EQ(run_config_differences(a, b), (std::vector<std::string>{"model.init: \"random\" here, \"pretrained\" there",
                                                                    "model.path: nothing here, \"weights\" there"}));
  EXPECT_EQ(run_config_differences(b, a).size(), 2u);
  b = a;
  b.model.config.model_type = ModelType::kErnie45;
  EXPECT_GT(run_config_differences(a, b).size(), 5u);
}

// A run may not go on with another router; what only refuses a config, or lays the work out, is none of its maths.
TEST(RunConfigHash, CountsEveryRouterSetting) {
  const std::string model = R"(
model: {moe_num_experts: 8, moe_k: 2, moe_use_aux_free: true, moe_capacity: [8, 8, 8], hidden_size: 640}
)";
  const RunConfig a = parse(model);
  for (const auto& [key, value] : Overrides{{"model.moe_gate", "top2"},
                                            {"model.moe_k", "1"},
                                            {"model.scoring_func", "sigmoid"},
                                            {"model.moe_use_aux_free", "false"},
                                            {"model.moe_group_experts", "true"},
                                            {"model.sinkhorn_2gate", "true"},
                                            {"model.sinkhorn_temp", "0.5"},
                                            {"model.moe_capacity", "[8, 8, 4]"},
                                            {"model.moe_drop_order", "token_major"},
                                            {"model.moe_reverse_token_drop", "true"},
                                            {"model.moe_norm_gate_logits", "false"},
                                            {"model.moe_norm_min", "0.5"},
                                            {"model.router_aux_loss_coef", "0.5"},
                                            {"model.output_router_logits", "true"},
                                            {"model.moe_aux_loss_per_layer", "true"},
                                            {"model.router_z_loss_coef", "0.5"},
                                            {"model.moe_orthogonal_loss_lambda", "0.5"},
                                            {"model.moe_group_orthogonal_loss", "false"},
                                            {"model.moe_router_bias_update_rate", "0.5"},
                                            {"training.routing_unit", "global"},
                                            {"training.balance_loss", "per_layer"},
                                            {"training.balance_counts", "first_choice"},
                                            {"training.orthogonal", "step"},
                                            {"training.loss_average", "token_balance"},
                                            {"optimizer.router_lr_ratio", "0.5"},
                                            {"optimizer.freeze_router", "true"}}) {
    const RunConfig b = parse(model, {{key, value}});
    EXPECT_NE(run_config_hash(b), run_config_hash(a)) << key;
    const std::vector<std::string> lines = run_config_differences(a, b);
    EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [&, k = key](const std::string& line) {
      return line.starts_with(k + ": ");
    })) << key;
  }
  EXPECT_EQ(run_config_hash(parse(model, {{"training.allow_drops", "false"}})), run_config_hash(a));
}

// All contradictions of routing at once, each with what to do.
TEST(ParseRunConfig, EveryContradictionOfRoutingAtOnce) {
  const TestFolder folder;
  const std::string path = folder.write("config.json", R"({"model_type": "ernie4_5_moe", "moe_num_experts": 64,
    "moe_k": 4, "moe_gate": "top2", "sinkhorn_2gate": true, "moe_capacity": [0.5, 0.5, 0.5], "moe_group_experts": true,
    "vision_config": {"depth": 2}, "scoring_func": "sigmoid", "moe_use_aux_free": false})");
  const std::string text = fault_of(fmt::format(
      "model: {{path: \"{}\", moe_router_bias_update_rate: 0.5}}\n"
      "training: {{allow_drops: false, seq_length: 16, micro_batch_size: 1, balance_counts: first_choice}}\n",
      path));
  for (const char* part :
       {"moe_gate: top2 chooses 2 experts, but moe_k = 4. Set moe_gate to topk, or moe_k to 2",
        "moe_group_experts: group gating is not defined for experts of several modalities. Set it to false",
        "moe_group_experts: true, but moe_gate is top2. Set it to false",
        "scoring_func: sigmoid, but moe_gate is top2. Set scoring_func to softmax",
        "moe_router_bias_update_rate: 0.5, but moe_use_aux_free is false. Set it to 0",
        "vision_config: ", "moe_capacity: 0.5 x 16 tokens of a routing unit / 64 experts leaves no room. Raise it",
        "training.allow_drops: false, but a factor of moe_capacity, 0.5, is less than moe_num_experts = 64. Set",
        "training.balance_counts: with groups, first choices are those of the first group only. Set it to"})
    EXPECT_TRUE(has(text, part)) << part << "\n" << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 8) << text;
}

// Evaluation of fewer tokens than experts has a factor of its own, and only a full unit must leave room.
TEST(ParseRunConfig, RoomOfEvaluationIsThatOfItsFactor) {
  const auto capacity = [](const char* factors) {
    return fmt::format(
        "model: {{moe_num_experts: 64, moe_k: 2, hidden_size: 640, moe_capacity: {}}}\n"
        "training: {{seq_length: 32, micro_batch_size: 1, routing_unit: global}}\n",
        factors);
  };
  EXPECT_EQ(parse(capacity("[2, 1, 2]")).model.config.moe_capacity[1], 1);  // 32 tokens: the third counts
  EXPECT_TRUE(has(fault_of(capacity("[2, 2, 1]")), "1.0 x 32 tokens of a routing unit in evaluation / 64 experts"));
}

TEST(CheckTrainable, NamesAllThatIsMissing) {
  const std::string text = error_of(ErrorCode::kConfig, [] { check_trainable(parse(kModel)); });
  EXPECT_TRUE(has(text, "data.train: no training data is given") && has(text, "run.dir: no run folder is given"))
      << text;
}

TEST(LoadRunConfig, ReadsFiles) {
  const TestFolder folder;
  EXPECT_EQ(load_run_config(folder.write("a.yaml", kModel), {{"training.steps", "3"}}).training.steps, 3);
  EXPECT_TRUE(
      has(error_of(ErrorCode::kConfig, [&] { load_run_config(folder.path() + "/none.yaml", {}); }), "no such file"));
  EXPECT_TRUE(has(error_of(ErrorCode::kConfig, [&] { load_run_config(folder.path(), {}); }), "is not a regular file"));
  const std::string big = folder.write("big.yaml", std::string(5 << 20, '#'));
  EXPECT_TRUE(has(error_of(ErrorCode::kConfig, [&] { load_run_config(big, {}); }),
                  "big.yaml: has 5242880 bytes, at most 4194304 were expected"));
}

// Broken text gives a config or an Error, nothing else.
TEST(ParseRunConfig, GarbageNeverCrashes) {
  std::mt19937_64 random(7);
  const std::string seed = run_config_yaml(parse(kModel));
  const std::string pieces = "{}[]:,#&*!|>'\"%@`-?~\n \t\\0aZ\xff\xc3";
  int sound = 0;
  for (int round = 0; round < 400; ++round) {
    std::string text = round % 2 ? seed : "";
    const int edits = 1 + static_cast<int>(random() % 20);
    for (int i = 0; i < edits; ++i) {
      const char piece = pieces[random() % pieces.size()];
      if (text.empty() || random() % 3 == 0)
        text.insert(text.begin() + static_cast<std::ptrdiff_t>(random() % (text.size() + 1)), piece);
      else if (random() % 2)
        text[random() % text.size()] = piece;
      else
        text.erase(random() % text.size(), random() % 40);
    }
    try {
      parse(text);
      ++sound;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kConfig);
    }
  }
  EXPECT_LT(sound, 200);
}

}  // namespace
}  // namespace concerto
