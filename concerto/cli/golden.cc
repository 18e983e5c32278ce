#include "concerto/cli/golden.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/golden_case.h"
#include "concerto/infer/sampler.h"
#include "concerto/infer/session.h"
#include "concerto/optim/lr_schedule.h"
#include "concerto/optim/optimizer.h"
#include "concerto/tensor/values.h"
#include "concerto/train/executor.h"

namespace concerto {
namespace {

// Keeps everything that the segments show; micro-batches follow each other.
class Recorder final : public Observer {
 public:
  bool wants_logits() const override { return true; }
  void record(const std::string& name, View value) override {
    std::vector<double> v = to_doubles(value);
    auto& all = values[name];
    all.insert(all.end(), v.begin(), v.end());
    cols[name] = value.cols();
  }
  std::map<std::string, std::vector<double>> values;
  std::map<std::string, int64_t> cols;
};

// A model, its store and the means to step it.
struct Trainer {
  Trainer(const ModelConfig& config, const GoldenOptions& options, const Backend& backend, ThreadPool& pool,
          int64_t tokens, int64_t positions)
      : store(load_hf_store(options.model_dir, config, DType::kF32, StoreUse::kTrain)),
        stage(config, *store, options.recompute, positions),
        executor(stage, *store, backend, pool,
                 {.max_tokens = tokens, .split = options.schedule == "zero_bubble", .poison = true}) {}
  std::unique_ptr<ParameterStore> store;
  Stage stage;
  Executor executor;
};

void compare_router(GoldenCase& golden, const Recorder& got, const std::string& p, const ParameterStore& store,
                    int layer, const std::vector<int64_t>& rows) {
  const auto& probs = got.values.at(p + "probs");
  const auto& ids = got.values.at(p + "topk_index");
  const auto& weights = got.values.at(p + "topk_weight");
  const int64_t experts = got.cols.at(p + "probs"), k = got.cols.at(p + "topk_index");
  const int64_t tokens = static_cast<int64_t>(rows.size());
  golden.compare(p + "logits", got.values.at(p + "logits"), rows);
  golden.compare(p + "probs", probs, rows);
  std::vector<double> scores = probs, combine(probs.size(), 0.0);
  const int bias = store.find("model.layers." + std::to_string(layer) + ".mlp.moe_statics.e_score_correction_bias");
  const std::vector<double> b = to_doubles(store.master(bias));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) scores[static_cast<size_t>(t * experts + e)] += b[static_cast<size_t>(e)];
    for (int64_t j = 0; j < k; ++j) {
      const auto at = static_cast<size_t>(t * k + j);
      combine[static_cast<size_t>(t * experts) + static_cast<size_t>(ids[at])] = weights[at];
    }
  }
  golden.compare(p + "scores", scores, rows);
  golden.compare(p + "combine", combine, rows);
  // The order of the k choices is free: sort both sides by expert.
  const auto pick = [&](const std::string& name) {
    const std::vector<double> all = golden.values(name);
    std::vector<double> out;
    for (int64_t r : rows)
      for (int64_t j = 0; j < k; ++j) out.push_back(all[static_cast<size_t>(r * k + j)]);
    return out;
  };
  const auto sorted = [&](const std::vector<double>& order, const std::vector<double>& values) {
    std::vector<double> out;
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<std::pair<double, double>> row;
      for (int64_t j = 0; j < k; ++j)
        row.emplace_back(order[static_cast<size_t>(t * k + j)], values[static_cast<size_t>(t * k + j)]);
      std::sort(row.begin(), row.end());
      for (const auto& [_, v] : row) out.push_back(v);
    }
    return out;
  };
  const std::vector<double> want_ids = pick(p + "topk_index");
  golden.compare_values(p + "topk_index", sorted(ids, ids), sorted(want_ids, want_ids));
  golden.compare_values(p + "topk_weight", sorted(ids, weights), sorted(want_ids, pick(p + "topk_weight")));
}

double total_loss(const ModelConfig& c, const StepOutput& out) {
  double total = out.loss() + (c.output_router_logits ? c.router_aux_loss_coef * out.aux_loss() : 0.0);
  const int depth = static_cast<int>(c.num_nextn_predict_layers);
  for (int m = 0; m < depth; ++m) total += c.mtp_loss_scaling_factor / depth * out.loss(m + 1);
  return total;
}

void compare_if(GoldenCase& golden, const std::string& name, double got) {
  if (golden.has(name)) golden.compare(name, {got});
  if (golden.has("float64." + name)) golden.compare("float64." + name, {got});
}

// Passes over the model: they are what takes time.
struct Passes {
  const std::function<void(int64_t, int64_t)>& progress;
  int64_t total, done = 0;
  void next() {
    if (progress) progress(++done, total);
  }
};

int64_t passes_of(const GoldenCase& golden) {
  const int64_t tokens = golden.has("generate.prompt_ids") ? golden.shape("generate.new_ids").elements() : 0;
  return 1 + golden.train_steps() + tokens;
}

void forward_backward(GoldenCase& golden, const GoldenOptions& options, const ModelConfig& config,
                      const Backend& backend, ThreadPool& pool, Passes& passes) {
  const GoldenBatch batch = golden.batch("", 0, options.micro_batches, config);
  const Shape shape = golden.shape("input_ids");
  Trainer t(config, options, backend, pool, shape.elements(), shape[shape.rank() - 1]);
  Recorder got;
  t.executor.set_observer(&got);
  StepOutput out;
  t.executor.run(
      build_pipeline({.name = options.schedule, .micro_batches = static_cast<int64_t>(batch.micro_batches.size())}),
      batch.micro_batches, out);
  passes.next();
  for (const auto& [name, values] : got.values)
    if (!name.starts_with("router.") && golden.has(name)) golden.compare(name, values, batch.rows);
  for (int layer : t.stage.moe_layers())
    if (golden.has(fmt::format("router.{}.logits", layer)))
      compare_router(golden, got, fmt::format("router.{}.", layer), *t.store, layer, batch.rows);

  compare_if(golden, "loss", out.loss());
  compare_if(golden, "aux_loss", out.aux_loss());
  compare_if(golden, "total_loss", total_loss(config, out));
  for (int m = 0; m < config.num_nextn_predict_layers; ++m)
    compare_if(golden, fmt::format("mtp_loss.{}", m), out.loss(m + 1));
  for (int i = 0; i < t.store->size(); ++i) {
    const std::string name = "grad." + t.store->specs()[static_cast<size_t>(i)].name;
    if (golden.has(name)) golden.compare(name, to_doubles(t.store->gradient(i)));
  }
  compare_if(golden, "grad_norm", Optimizer(*t.store, golden.optimizer()).gradient_norm(t.executor.ops()));
}

void training_steps(GoldenCase& golden, const GoldenOptions& options, const ModelConfig& config, const Backend& backend,
                    ThreadPool& pool, Passes& passes) {
  const Shape shape = golden.shape("train.input_ids");
  Trainer t(config, options, backend, pool, shape.elements() / shape[0], shape[shape.rank() - 1]);
  const OptimizerSection settings = golden.optimizer();
  const Optimizer optimizer(*t.store, settings);
  std::vector<std::vector<double>> start;
  for (int i = 0; i < t.store->size(); ++i) start.push_back(to_doubles(t.store->master(i)));

  std::vector<double> loss, ce, aux, norms;
  StepOutput out;
  for (int64_t step = 0; step < golden.train_steps(); ++step) {
    const GoldenBatch batch = golden.batch("train.", step, options.micro_batches, config);
    t.store->clear_gradients(pool);
    t.executor.run(
        build_pipeline({.name = options.schedule, .micro_batches = static_cast<int64_t>(batch.micro_batches.size())}),
        batch.micro_batches, out);
    const double norm = optimizer.gradient_norm(t.executor.ops());
    optimizer.step(t.executor.ops(), step + 1, learning_rate(settings, golden.train_steps(), step + 1), norm);
    loss.push_back(total_loss(config, out));
    ce.push_back(out.loss());
    aux.push_back(out.aux_loss());
    norms.push_back(norm);
    passes.next();
  }
  for (const auto& [name, values] :
       {std::pair{"train.loss", &loss}, {"train.ce", &ce}, {"train.aux_loss", &aux}, {"train.grad_norm", &norms}})
    for (const char* prefix : {"", "float64."})
      if (golden.has(std::string(prefix) + name)) golden.compare(std::string(prefix) + name, *values);
  for (int i = 0; i < t.store->size(); ++i) {
    const std::string& name = t.store->specs()[static_cast<size_t>(i)].name;
    const std::vector<double> end = to_doubles(t.store->master(i));
    if (golden.has("final." + name)) golden.compare("final." + name, end);
    double sum = 0;
    for (size_t j = 0; j < end.size(); ++j) sum += std::pow(end[j] - start[static_cast<size_t>(i)][j], 2);
    if (golden.has("final_delta_l2." + name)) golden.compare("final_delta_l2." + name, {std::sqrt(sum)});
  }
}

void greedy_text(GoldenCase& golden, const GoldenOptions& options, const ModelConfig& config, const Backend& backend,
                 ThreadPool& pool, Passes& passes) {
  std::vector<int32_t> prompt;
  for (double id : golden.values("generate.prompt_ids")) {
    if (!(id >= 0 && id < static_cast<double>(config.vocab_size)))
      throw Error(ErrorCode::kModel, "generate.prompt_ids",
                  fmt::format("the id {} is not below the vocabulary's {}", id, config.vocab_size),
                  "Use the model that the case was made with.");
    prompt.push_back(static_cast<int32_t>(id));
  }
  if (prompt.empty()) throw Error(ErrorCode::kModel, "generate.prompt_ids", "is empty");
  golden.fed("generate.prompt_ids");
  const int64_t steps = golden.shape("generate.new_ids").elements();
  const auto store = load_hf_store(options.model_dir, config, DType::kF32, StoreUse::kInfer);
  const int64_t capacity = static_cast<int64_t>(prompt.size()) + steps;
  const Stage stage(config, *store, Recompute::kNone, capacity);
  InferenceSession session(stage, *store, backend, pool, capacity, capacity);
  Sampler greedy({.temperature = 0});
  std::vector<double> ids, logits;
  View next = session.extend(prompt);
  for (int64_t i = 0; i < steps; ++i) {
    const std::vector<double> values = to_doubles(next);
    logits.insert(logits.end(), values.begin(), values.end());
    const int32_t id = greedy.choose(next, session.length());
    ids.push_back(id);
    passes.next();
    if (i + 1 < steps) next = session.extend({&id, 1});
  }
  golden.compare("generate.new_ids", ids);
  golden.compare("generate.logits", logits);
}

}  // namespace

GoldenReport verify_golden(const GoldenOptions& options, const Backend& backend, ThreadPool& pool) {
  const ModelConfig config = load_model_config(options.model_dir);
  GoldenCase golden(options.golden_dir);
  if (golden.aux_loss_in_loss() != config.output_router_logits)
    throw Error(ErrorCode::kModel, options.golden_dir,
                "case.json and config.json disagree on the aux loss (output_router_logits)");
  Passes passes{options.progress, passes_of(golden)};
  forward_backward(golden, options, config, backend, pool, passes);
  if (golden.train_steps() > 0) training_steps(golden, options, config, backend, pool, passes);
  if (golden.has("generate.prompt_ids")) greedy_text(golden, options, config, backend, pool, passes);
  return golden.finish();
}

}  // namespace concerto
