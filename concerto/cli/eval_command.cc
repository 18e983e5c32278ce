#include "concerto/cli/eval_command.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/model_folder.h"
#include "concerto/cli/option_checks.h"
#include "concerto/cli/overrides.h"
#include "concerto/data/batch_source.h"
#include "concerto/train/executor.h"
#include "concerto/train/work_line.h"

namespace concerto {
namespace {

struct EvalArguments {
  std::string config, model, data, checkpoint, dtype = "f32", backend = "cpu";
  int64_t seq_length = 1024, micro_batch_size = 8, max_batches = 0;
  bool json = false;
};

// From --model DIR: a config made of the folder's own.
RunConfig config_of_folder(const EvalArguments& a) {
  RunConfig c;
  c.model.path = model_folder(a.model);
  c.model.init = InitFrom::kPretrained;
  c.model.config = load_model_config(c.model.path);
  const int64_t longest = c.model.config.max_position_embeddings;
  if (a.seq_length > longest)
    throw Error(ErrorCode::kUsage, "--seq-length",
                fmt::format("{} is more than the model's max_position_embeddings = {}", a.seq_length, longest),
                fmt::format("Set it to {} or less.", longest));
  c.data.valid = {{a.data, 1.0}};
  c.training.seq_length = a.seq_length;
  c.training.micro_batch_size = a.micro_batch_size;
  c.training.dtype = a.dtype;
  c.training.eval_batches = a.max_batches;
  c.backend = a.backend;
  check_capacity(c, false);
  return c;
}

// The weights of a run: the named checkpoint, else its latest, else the folder it starts from.
std::unique_ptr<ParameterStore> load_weights(const RunConfig& c, const std::string& checkpoint, std::string& from) {
  const ModelConfig& m = c.model.config;
  from = follow_latest(checkpoint);
  if (from.empty() && !c.run.dir.empty()) {
    const LatestCheckpoint latest = find_latest(c.run.dir);
    for (const std::string& line : latest.skipped) fmt::print(stderr, "passed over {}\n", line);
    if (latest.path.empty() && !latest.skipped.empty())
      throw Error(ErrorCode::kCheckpoint, c.run.dir, "no checkpoint of it is whole: " + latest.skipped[0],
                  "Give another --checkpoint, or --model.");
    from = latest.path;
  }
  const DType compute = compute_dtype(c.training.dtype);
  if (from.empty()) {
    if (c.model.init != InitFrom::kPretrained)
      throw Error(ErrorCode::kCheckpoint, c.run.dir, "holds no checkpoint to evaluate",
                  "Train first, or give --checkpoint or --model.");
    from = c.model.path;
    return load_hf_store(c.model.path, m, compute, StoreUse::kInfer);
  }
  auto store = std::make_unique<ParameterStore>(tensor_specs(m), compute, StoreUse::kInfer);
  const CheckpointReader reader(from);
  std::vector<float> values;
  for (int i = 0; i < store->size(); ++i) {
    const TensorSpec& s = store->specs()[static_cast<size_t>(i)];
    values.resize(static_cast<size_t>(s.shape.elements()));
    reader.read(std::string(kWeightPrefix) + s.name, View(values.data(), s.shape, DType::kF32));
    store->set(i, values.data());
  }
  return store;
}

// With a CONFIG these are settings: an option that did nothing would mislead.
void refuse_model_options(const CLI::App& command) {
  for (const auto& [option, setting] : {std::pair{"--seq-length", "--training.seq_length"},
                                        {"--micro-batch-size", "--training.micro_batch_size"},
                                        {"--max-batches", "--training.eval_batches"},
                                        {"--dtype", "--training.dtype"},
                                        {"--backend", "--backend"}}) {
    const CLI::Option* o = command.get_option(option);
    if (o->count() == 0) continue;
    const std::string value = o->as<std::string>();
    throw Error(ErrorCode::kUsage, option, "goes with --model; a CONFIG has a setting for it",
                option == std::string(setting) ? fmt::format("Set `backend: {}` in the config.", value)
                                               : fmt::format("Say {}={} instead.", setting, value));
  }
}

void evaluate(Executor& executor, BatchSource& source, int64_t rows, int64_t samples, const std::string& weights,
              StepOutput& out) {
  WorkLine line("evaluating " + weights, "sequences");
  std::vector<MicroBatch> batches;
  for (int64_t at = 0; at < samples; at += rows) {
    source.fill(at, std::min(rows, samples - at), rows, batches);
    for (const MicroBatch& b : batches) executor.evaluate(b, out);
    line.set(std::min(at + rows, samples), samples);
  }
}

void run_eval(const EvalArguments& a, const CLI::App& command) {
  const std::vector<std::string> rest = command.remaining();
  if (a.config.empty() == a.model.empty())
    throw Error(ErrorCode::kUsage, "eval", "wants a CONFIG or --model DIR, one of them",
                "For example: concerto eval examples/quickstart.yaml");
  if (!a.model.empty() && a.data.empty())
    throw Error(ErrorCode::kUsage, "eval", "--model wants --data",
                "Give the prefix of a .bin/.idx pair, as in --data data/quickstart/valid.");
  if (!a.model.empty() && !rest.empty())
    throw Error(ErrorCode::kUsage, rest[0], "--model takes no settings of a config", "Run `concerto eval --help`.");
  if (a.model.empty()) refuse_model_options(command);
  RunConfig c = a.model.empty() ? load_run_config(a.config, parse_overrides(rest)) : config_of_folder(a);
  if (!a.data.empty()) c.data.valid = {{a.data, 1.0}};
  if (c.data.valid.empty()) throw Error(ErrorCode::kConfig, "data.valid", "is empty", "Set it, or give --data PREFIX.");
  const int64_t rows = c.training.micro_batch_size;
  check_micro_batch("--micro-batch-size", c.model.config, rows, c.training.seq_length);
  ThreadPool pool(c.run.threads, pinned_cores(c.run));
  std::string from;
  const auto store = load_weights(c, a.checkpoint, from);
  const ModelConfig& m = c.model.config;
  const Stage stage(m, *store, Recompute::kNone, c.training.seq_length, c.training.routing_unit);
  Executor executor(
      stage, *store, backend_by_name(c.backend), pool,
      {.max_tokens = rows * c.training.seq_length, .max_rows = rows, .train = false, .routing = routing_options(c)});
  BatchSource source({.sources = c.data.valid,
                      .vocab_size = m.vocab_size,
                      .seq_length = c.training.seq_length,
                      .pad_id = static_cast<int32_t>(std::max<int64_t>(0, m.pad_token_id)),
                      .document_mask = c.data.document_mask,
                      .shuffle = false,
                      .one_pass = true});
  int64_t samples = source.rows_per_pass();
  if (c.training.eval_batches > 0) samples = std::min(samples, c.training.eval_batches * rows);
  StepOutput out;
  evaluate(executor, source, rows, samples, from, out);
  if (out.loss_count[0] == 0)
    throw Error(ErrorCode::kData, c.data.valid[0].path,
                "holds no token that counts: all are masked, or each document has one token", "Give other data.");
  if (!std::isfinite(out.loss()))
    throw Error(ErrorCode::kNumeric, from,
                std::isnan(out.loss()) ? std::string("the loss is nan") : fmt::format("the loss is {}", out.loss()),
                "Look for the tensor with `concerto checkpoint verify`.");
  if (a.json)
    fmt::print("{}\n", nlohmann::json{{"weights", from},
                                      {"loss", out.loss()},
                                      {"perplexity", std::exp(out.loss())},
                                      {"tokens", out.loss_count[0]},
                                      {"sequences", samples}}
                           .dump());
  else
    fmt::print("weights    {}\nloss       {:.6f}\nperplexity {:.4f}\ntokens     {} in {} sequences\n", from, out.loss(),
               std::exp(out.loss()), out.loss_count[0], samples);
}

}  // namespace

void add_eval_command(CLI::App& app) {
  auto a = std::make_shared<EvalArguments>();
  CLI::App* c = app.add_subcommand("eval", "loss and perplexity on a data set");
  c->add_option("CONFIG", a->config, "a run's config: its latest checkpoint on data.valid");
  c->add_option("--model", a->model, "a Hugging Face folder in place of a config");
  c->add_option("--data", a->data, "prefix of a .bin/.idx pair");
  c->add_option("--checkpoint", a->checkpoint, "this checkpoint, not the run's latest");
  c->add_option("--seq-length", a->seq_length, "with --model")
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  c->add_option("--micro-batch-size", a->micro_batch_size, "with --model")
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  c->add_option("--max-batches", a->max_batches, "with --model: micro-batches at most; 0: all")
      ->check(whole_number(0, INT64_MAX))
      ->capture_default_str();
  c->add_option("--dtype", a->dtype, "with --model: f32 | bf16")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  c->add_option("--backend", a->backend, "with --model: cpu | ref")->capture_default_str();
  c->add_flag("--json", a->json, "print one JSON object");
  c->allow_extras();
  c->callback([a, c] { run_eval(*a, *c); });
}

}  // namespace concerto
