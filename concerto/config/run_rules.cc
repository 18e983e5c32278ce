#include <algorithm>
#include <filesystem>
#include <limits>

#include "concerto/base/cores.h"
#include "concerto/base/error.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

using R = Rule<RunConfig>;

bool has_weights(const std::string& folder) {
  std::error_code ignored;
  for (std::filesystem::directory_iterator it(folder, ignored), end; !ignored && it != end; it.increment(ignored))
    if (it->path().extension() == ".safetensors") return true;
  return false;
}

// Tokens of a full routing unit.
double unit_tokens(const RunConfig& c) {
  const TrainingSection& t = c.training;
  const int64_t rows = t.routing_unit == RoutingUnit::kSequence     ? 1
                       : t.routing_unit == RoutingUnit::kMicroBatch ? t.micro_batch_size
                                                                    : t.global_batch_size;
  return static_cast<double>(rows) * static_cast<double>(t.seq_length);
}
// Evaluation's, where `global` is the micro-batch.
double eval_unit_tokens(const RunConfig& c) {
  RunConfig e;
  e.training = c.training;
  if (e.training.routing_unit == RoutingUnit::kGlobal) e.training.routing_unit = RoutingUnit::kMicroBatch;
  return unit_tokens(e);
}
// Of moe_capacity, for a full unit of evaluation.
size_t eval_factor(const RunConfig& c) {
  return eval_unit_tokens(c) < static_cast<double>(c.model.config.moe_num_experts) ? 2 : 1;
}
bool has_capacity(const RunConfig& c) {
  return c.model.config.num_moe_layers() > 0 && c.model.config.moe_capacity.size() == 3;
}
double capacity_factor(const RunConfig& c, bool trains) {
  return c.model.config.moe_capacity[trains ? 0 : eval_factor(c)];
}
double full_unit(const RunConfig& c, bool trains) { return trains ? unit_tokens(c) : eval_unit_tokens(c); }
// Whether a full routing unit of training, or of evaluation, gives each expert room for a token.
bool leaves_room(const RunConfig& c, bool trains) {
  return !has_capacity(c) ||
         capacity_factor(c, trains) * full_unit(c, trains) >= static_cast<double>(c.model.config.moe_num_experts);
}
std::string no_room(const RunConfig& c, bool trains) {
  return fmt::format("{} x {} tokens of a routing unit{} / {} experts leaves no room",
                     print_double(capacity_factor(c, trains)), full_unit(c, trains), trains ? "" : " in evaluation",
                     c.model.config.moe_num_experts);
}
double lowest_factor(const RunConfig& c) {
  const auto& factors = c.model.config.moe_capacity;
  return *std::min_element(factors.begin(), factors.end());
}

std::string cores_problem(const RunSection& run) {
  std::vector<int> cores;
  return run.cores.empty() ? std::string() : parse_cores(run.cores, cores);
}

}  // namespace

int64_t micro_batches(const TrainingSection& t) {
  return (t.global_batch_size + t.micro_batch_size - 1) / t.micro_batch_size;
}

int64_t most_micro_batch_tokens(const ModelConfig& model) {
  return std::numeric_limits<int32_t>::max() / std::max<int64_t>(1, model.num_moe_layers() > 0 ? model.moe_k : 1);
}

std::vector<int> pinned_cores(const RunSection& run) {
  std::vector<int> cores;
  const std::string problem = run.cores.empty() ? std::string() : parse_cores(run.cores, cores);
  if (!problem.empty()) throw Error(ErrorCode::kConfig, "run.cores", problem, "Write it as in 0-3,8.");
  return cores;
}

RoutingOptions routing_options(const RunConfig& c) {
  return {.unit = c.training.routing_unit,
          .balance_loss = c.training.balance_loss,
          .balance_counts = c.training.balance_counts,
          .freeze_router = c.optimizer.freeze_router};
}

void check_capacity(const RunConfig& c, bool trains) {
  if (!leaves_room(c, trains))
    throw Error(ErrorCode::kConfig, "model.moe_capacity", no_room(c, trains),
                "Raise it, or give a routing unit more tokens.");
}

BalanceLoss balance_loss(const ModelConfig& model, const RoutingOptions& options) {
  if (options.freeze_router) return BalanceLoss::kNone;
  if (options.balance_loss != BalanceLoss::kAuto) return options.balance_loss;
  if (model.output_router_logits) return BalanceLoss::kPooled;
  return model.moe_aux_loss_per_layer ? BalanceLoss::kPerLayer : BalanceLoss::kNone;
}

namespace {
std::vector<R> general_rules() {
  return {
      {{"run.cores"},
       "`run.cores` is a list of core numbers and ranges, none named twice",
       [](const RunConfig& c) { return cores_problem(c.run).empty(); },
       [](const RunConfig& c) { return cores_problem(c.run); },
       "Write it as in 0-3,8"},
      {{"run.threads", "run.cores"},
       "run.threads is at most the number of run.cores, where they are given",
       [](const RunConfig& c) {
         return !cores_problem(c.run).empty() || c.run.cores.empty() ||
                static_cast<size_t>(c.run.threads) <= pinned_cores(c.run).size();
       },
       [](const RunConfig& c) {
         return fmt::format("{} threads, but only {} cores to pin them to", c.run.threads, pinned_cores(c.run).size());
       },
       "Name a core for each thread in run.cores, or lower it"},
      {{"model.init", "model.path"},
       "`init: pretrained` needs a `model.path` that is a folder with .safetensors files",
       [](const RunConfig& c) { return c.model.init != InitFrom::kPretrained || has_weights(c.model.path); },
       [](const RunConfig& c) {
         return c.model.path.empty() ? std::string("pretrained, but model.path is not given")
                                     : fmt::format("pretrained, but {} holds no .safetensors file", c.model.path);
       },
       "Point model.path at a folder with weights, or set init to random"},
      {{"training.micro_batch_size", "training.global_batch_size"},
       "micro_batch_size <= global_batch_size",
       [](const RunConfig& c) { return c.training.micro_batch_size <= c.training.global_batch_size; },
       [](const RunConfig& c) {
         return fmt::format("{} is more than global_batch_size = {}", c.training.micro_batch_size,
                            c.training.global_batch_size);
       },
       "A micro-batch is a part of the global batch: lower it"},
      {{"training.micro_batch_size", "training.seq_length", "model.max_position_embeddings"},
       "micro_batch_size x seq_length (x moe_k) < 2^31",
       [](const RunConfig& c) {
         return c.training.micro_batch_size <= most_micro_batch_tokens(c.model.config) / c.training.seq_length;
       },
       [](const RunConfig& c) {
         return fmt::format("{} sequences of {} tokens are more than the {} of a micro-batch",
                            c.training.micro_batch_size, c.training.seq_length,
                            most_micro_batch_tokens(c.model.config));
       },
       "Lower it: a global batch is put together from micro-batches"},
      {{"training.global_batch_size", "training.micro_batch_size"},
       "at most 2^20 micro-batches a step",
       [](const RunConfig& c) { return micro_batches(c.training) <= kMostMicroBatches; },
       [](const RunConfig& c) {
         return fmt::format("{} are {} micro-batches a step, at most {} are possible", c.training.global_batch_size,
                            micro_batches(c.training), kMostMicroBatches);
       },
       "Lower it, or raise training.micro_batch_size"},
      {{"training.seq_length", "model.max_position_embeddings"},
       "seq_length <= the model's max_position_embeddings",
       [](const RunConfig& c) { return c.training.seq_length <= c.model.config.max_position_embeddings; },
       [](const RunConfig& c) {
         return fmt::format("{} is more than the model's max_position_embeddings = {}", c.training.seq_length,
                            c.model.config.max_position_embeddings);
       },
       "Lower it, or raise model.max_position_embeddings"},
      {{"training.dtype", "backend"},
       "`dtype: f64` only with `backend: ref`",
       [](const RunConfig& c) { return c.training.dtype != "f64" || c.backend == "ref"; },
       [](const RunConfig& c) { return fmt::format("f64 is not built for backend {}", c.backend); },
       "Use bf16 or f32, or backend: ref"},
      {{"optimizer.moments_dtype", "training.dtype"},
       "`moments_dtype: bf16` not with `dtype: f64`",
       [](const RunConfig& c) { return c.optimizer.moments_dtype != "bf16" || c.training.dtype != "f64"; },
       [](const RunConfig&) { return std::string("bf16, but an f64 run keeps its moments in f64"); },
       "Set it to f32"},
      {{"model.moe_capacity", "training.micro_batch_size", "training.seq_length"},
       "moe_capacity gives each expert room for a token of a full routing unit, in training and in evaluation",
       [](const RunConfig& c) { return leaves_room(c, true) && leaves_room(c, false); },
       [](const RunConfig& c) { return no_room(c, !leaves_room(c, true)); },
       "Raise it, or give a routing unit more tokens"},
      {{"training.balance_counts", "model.moe_group_experts"},
       "`balance_counts: first_choice` not with moe_group_experts, where choice j is the best of group j",
       [](const RunConfig& c) {
         return c.training.balance_counts != BalanceCounts::kFirstChoice || !c.model.config.moe_group_experts;
       },
       [](const RunConfig&) { return std::string("with groups, first choices are those of the first group only"); },
       "Set it to top_k or auto"},
      {{"training.allow_drops", "model.moe_capacity"},
       "`allow_drops: false` needs moe_capacity to be empty, or at least moe_num_experts (an expert gets at most every "
       "token once)",
       [](const RunConfig& c) {
         return c.training.allow_drops || !has_capacity(c) ||
                lowest_factor(c) >= static_cast<double>(c.model.config.moe_num_experts);
       },
       [](const RunConfig& c) {
         return fmt::format("false, but a factor of moe_capacity, {}, is less than moe_num_experts = {}",
                            print_double(lowest_factor(c)), c.model.config.moe_num_experts);
       },
       "Set moe_capacity to [], or allow_drops to true"},
      {{"training.token_balance_seqlen", "training.loss_average"},
       "token_balance_seqlen > 0 only with `loss_average: token_balance`",
       [](const RunConfig& c) {
         return c.training.token_balance_seqlen == 0 || c.training.loss_average == LossAverage::kTokenBalance;
       },
       [](const RunConfig& c) {
         return fmt::format("{}, but loss_average does not read it", c.training.token_balance_seqlen);
       },
       "Set training.loss_average to token_balance, or this to 0"},
      {{"optimizer.warmup_steps", "training.steps"},
       "warmup_steps <= training.steps",
       [](const RunConfig& c) { return c.optimizer.warmup_steps <= c.training.steps; },
       [](const RunConfig& c) {
         return fmt::format("{} is more than training.steps = {}", c.optimizer.warmup_steps, c.training.steps);
       },
       "The warm-up is a part of the run: lower it"},
      {{"optimizer.wsd_stable_steps", "training.steps"},
       "wsd_stable_steps <= training.steps",
       [](const RunConfig& c) { return c.optimizer.wsd_stable_steps <= c.training.steps; },
       [](const RunConfig& c) {
         return fmt::format("{} is more than training.steps = {}", c.optimizer.wsd_stable_steps, c.training.steps);
       },
       "Lower it, or set -1 for 0.9 of all steps"},
      {{"optimizer.min_lr", "optimizer.lr"},
       "min_lr <= lr",
       [](const RunConfig& c) { return c.optimizer.min_lr <= c.optimizer.lr; },
       [](const RunConfig& c) {
         return fmt::format("{} is more than lr = {}", print_double(c.optimizer.min_lr), print_double(c.optimizer.lr));
       },
       "min_lr is where the decay ends: lower it"},
      {{"monitor.trace_steps"},
       "trace_steps is empty, or two numbers [first, last] with first <= last",
       [](const RunConfig& c) {
         const auto& t = c.monitor.trace_steps;
         return t.empty() || (t.size() == 2 && t[0] <= t[1]);
       },
       [](const RunConfig& c) {
         const auto& t = c.monitor.trace_steps;
         return t.size() != 2 ? fmt::format("{} numbers, wanted two", t.size())
                              : fmt::format("{} is after {}", t[0], t[1]);
       },
       "Write [first, last], as in [10, 12]"},
      {{"backend"},
       "`backend: cuda` is planned and refused",
       [](const RunConfig& c) { return c.backend != "cuda"; },
       [](const RunConfig&) { return std::string("cuda is planned, not built yet"); },
       "Use cpu or ref"},
  };
}
}  // namespace

const std::vector<Rule<RunConfig>>& run_rules() {
  static const std::vector<R> rules = [] {
    std::vector<R> all = general_rules();
    all.insert(all.end(), parallel_rules().begin(), parallel_rules().end());
    return all;
  }();
  return rules;
}

const std::vector<Rule<RunConfig>>& training_rules() {
  static const std::vector<R> rules = {
      {{"data.train"},
       "`train` needs data.train",
       [](const RunConfig& c) { return !c.data.train.empty(); },
       [](const RunConfig&) { return std::string("no training data is given"); },
       "Give the prefix of a .bin/.idx pair; `concerto data pack` makes one"},
      {{"run.dir"},
       "`train` needs run.dir",
       [](const RunConfig& c) { return !c.run.dir.empty(); },
       [](const RunConfig&) { return std::string("no run folder is given"); },
       "Give a folder, as in runs/first"},
  };
  return rules;
}

const std::vector<ForeignName>& foreign_names() {
  static const std::vector<ForeignName> names = {
      {"gradient_accumulation_steps", "Set training.global_batch_size to micro_batch_size x accumulation steps"},
      {"num_train_epochs", "A run is counted in steps: set training.steps"},
      {"warmup_ratio", "Set optimizer.warmup_steps to the ratio x training.steps"},
      {"lr_warmup_fraction", "Set optimizer.warmup_steps to the fraction x training.steps"},
      {"decay_steps", "The decay ends with the run: set training.steps"},
      {"lr_decay_iters", "The decay ends with the run: set training.steps"},
      {"bf16", "Set training.dtype to bf16 or f32"},
      {"exp_avg_dtype", "Set optimizer.moments_dtype to bf16 or f32, for both moments"},
      {"exp_avg_sq_dtype", "Set optimizer.moments_dtype to bf16 or f32, for both moments"},
      {"fp16", "fp16 is not supported; set training.dtype to bf16 or f32"},
      {"input_dir", "List the prefixes in data.train as {path, weight}"},
      {"data_path", "List the prefixes in data.train as {path, weight}"},
      {"train_data_path", "List the prefixes in data.train as {path, weight}"},
      {"train_dataset_path", "Pack the files with `concerto data pack` and list the prefixes in data.train"},
      {"eval_dataset_path", "Pack the files with `concerto data pack` and list the prefixes in data.valid"},
      {"split", "Pack the held-out text apart and list it in data.valid"},
      {"sharding", "Set parallel.zero to 0, 1 or 2"},
      {"use_distributed_optimizer", "Set parallel.zero to 1"},
      {"sharding_parallel_size", "Data ranks follow from the number of ranks: ranks / (tp x pp)"},
      {"sharding_parallel_degree", "Data ranks follow from the number of ranks: ranks / (tp x pp)"},
      {"data_parallel_size", "Data ranks follow from the number of ranks: ranks / (tp x pp)"},
      {"data_parallel_degree", "Data ranks follow from the number of ranks: ranks / (tp x pp)"},
      {"grad_reduce_in_bf16", "Set parallel.grad_wire to bf16"},
      {"accumulate_allreduce_grads_in_fp32", "Set parallel.grad_wire to f32"},
      {"pipeline_model_parallel_layout", "List the layers of each virtual stage in parallel.stage_layers"},
      {"decoder_first_pipeline_num_layers", "List the layers of each virtual stage in parallel.stage_layers"},
      {"decoder_last_pipeline_num_layers", "List the layers of each virtual stage in parallel.stage_layers"},
      {"num_layers_per_virtual_pipeline_stage", "Set parallel.vpp to the virtual stages of a rank"},
      {"resume_from_checkpoint", "Set run.resume to auto, never or the path of a checkpoint"},
      {"max_evaluate_steps", "Set training.eval_batches, in micro-batches"},
      {"eval_iters", "Set training.eval_batches, in micro-batches"},
      {"fine_tuning", "Training is always full; LoRA is not built yet"},
      {"use_recompute", "Set parallel.recompute to none, selective or full"},
  };
  return names;
}

}  // namespace concerto
