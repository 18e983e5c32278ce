#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

constexpr double kMany = 1e15;  // more than any run counts to, and exact in a double
constexpr double kMaxBatch = 1e9;
constexpr double kMaxRanks = 1 << 20;

template <class E>
int number(E value) {
  return static_cast<int>(value);
}

const EnumNames kInitFromNames = {{number(InitFrom::kRandom), "random", "new weights drawn from `run.seed`"},
                                  {number(InitFrom::kPretrained), "pretrained", "the weights in `model.path`"}};
const EnumNames kInitNames = {{number(Init::kHuggingFace), "huggingface", "N(0, initializer_range) for every matrix"},
                              {number(Init::kHuggingFace), "hf", ""},
                              {number(Init::kPretrain), "pretrain",
                               "Baidu's pre-training: N(0, sqrt(0.3333 / hidden_size)), and o_proj and down_proj "
                               "smaller by 1 / sqrt(2 x layers)"}};
const EnumNames kRoutingUnitNames = {
    {number(RoutingUnit::kSequence), "sequence", "each sequence"},
    {number(RoutingUnit::kMicroBatch), "micro_batch", "the tokens of one micro-batch"},
    {number(RoutingUnit::kGlobal), "global",
     "the tokens of a step (of a micro-batch in evaluation); its micro-batches are then in memory together"}};
const EnumNames kBalanceLossNames = {
    {number(BalanceLoss::kAuto), "auto",
     "pooled if model.output_router_logits, else per_layer if model.moe_aux_loss_per_layer, else none"},
    {number(BalanceLoss::kNone), "none", "not trained"},
    {number(BalanceLoss::kPooled), "pooled", "one loss over all MoE layers together, as Hugging Face does"},
    {number(BalanceLoss::kPerLayer), "per_layer", "the sum of the losses of the layers, as Baidu does"}};
const EnumNames kBalanceCountsNames = {
    {number(BalanceCounts::kAuto), "auto", "first_choice for gate top2 without correction bias, else top_k"},
    {number(BalanceCounts::kTopK), "top_k", "the moe_k best without correction bias"},
    {number(BalanceCounts::kFirstChoice), "first_choice", "first choices only"}};
const EnumNames kOrthogonalNames = {
    {number(Orthogonal::kLoss), "loss", "a loss that is differentiated"},
    {number(Orthogonal::kStep), "step", "a step of its own after the optimizer's, decoupled as weight decay is"}};
const EnumNames kLossAverageNames = {
    {number(LossAverage::kTokens), "tokens", "every valid token of the global batch weighs the same"},
    {number(LossAverage::kMicroBatches), "micro_batches",
     "mean of the means of the micro-batches, as Baidu's trainers do"},
    {number(LossAverage::kTokenBalance), "token_balance",
     "the sum over valid tokens is differentiated divided by a constant, token_balance_seqlen; the mean is reported"}};
const EnumNames kBadStepNames = {{number(BadStep::kStop), "stop", "end with an error that names step and tensor"},
                                 {number(BadStep::kSkip), "skip", "drop the batch and go on"}};
const EnumNames kOptimizerNames = {
    {number(OptimizerName::kAdamW), "adamw", "AdamW with decoupled weight decay"},
    {number(OptimizerName::kLamb), "lamb", "LAMB: AdamW's update scaled by ||w|| / ||update||"}};
const EnumNames kScheduleNames = {{number(LrSchedule::kConstant), "constant", "lr after the warm-up"},
                                  {number(LrSchedule::kConstant), "constant_with_warmup", ""},
                                  {number(LrSchedule::kLinear), "linear", "straight down to min_lr"},
                                  {number(LrSchedule::kCosine), "cosine", "half a cosine wave down to min_lr"},
                                  {number(LrSchedule::kWsd), "wsd", "warm-up, stable, decay"},
                                  {number(LrSchedule::kWsd), "WSD", ""}};
const EnumNames kWsdDecayNames = {{number(WsdDecay::kHalfLife), "half_life", "r = (0.05^q - 0.05) / 0.95"},
                                  {number(WsdDecay::kOneMinusSqrt), "one_minus_sqrt", "r = 1 - sqrt(q)"},
                                  {number(WsdDecay::kOneMinusSqrt), "1-sqrt", ""}};
const EnumNames kDecayNames = {{number(Decay::kMatrices), "matrices", "parameters of two dimensions or more"},
                               {number(Decay::kAll), "all", "every parameter"}};
const EnumNames kRecomputeNames = {
    {number(Recompute::kNone), "none", "keep what backward needs"},
    {number(Recompute::kSelective), "selective", "recompute what is cheap for its bytes"},
    {number(Recompute::kFull), "full", "keep only the input of each layer"}};

using F = Field<RunConfig>;

void run_and_model(std::vector<F>& f) {
  f.push_back(F(
                  "run", "dir", [](RunConfig& c) -> Slot { return &c.run.dir; },
                  "folder that receives metrics, checkpoints and the resolved config")
                  .when_unset("required to train")
                  .also({"output_dir"}));
  f.push_back(
      F(
          "run", "seed", [](RunConfig& c) -> Slot { return &c.run.seed; }, "seed of initial weights and data order")
          .range(0, 9e15)
          .also({"seed"})
          .decides_numbers());
  f.push_back(F(
      "run", "resume", [](RunConfig& c) -> Slot { return &c.run.resume; },
      "auto (from the newest checkpoint in the run folder, if any), never, or the path of a checkpoint"));
  f.push_back(
      F(
          "run", "threads", [](RunConfig& c) -> Slot { return &c.run.threads; },
          "threads of the CPU backends; 0: as many as run.cores, else OMP_NUM_THREADS, else all processors that "
          "the process may use")
          .range(0, 4096));
  f.push_back(F(
                  "run", "cores", [](RunConfig& c) -> Slot { return &c.run.cores; },
                  "cores that the threads are pinned to, one each, by Linux's numbers, as in 0-3,8; cores beyond the "
                  "threads are left to reading data")
                  .when_unset("not pinned"));

  f.push_back(F(
                  "model", "path", [](RunConfig& c) -> Slot { return &c.model.path; },
                  "Hugging Face folder; its config.json gives every model field that this section does not")
                  .when_unset("none: fields inline")
                  .also({"model_name_or_path"}));
  f.push_back(F(
                  "model", "init", [](RunConfig& c) -> Slot { return enum_slot(c.model.init, kInitFromNames); },
                  "where the first weights come from")
                  .decides_numbers());
  f.push_back(F(
                  "model", "init_method",
                  [](RunConfig& c) -> Slot { return enum_slot(c.model.init_method, kInitNames); },
                  "how `init: random` draws them")
                  .decides_numbers());
}

void data(std::vector<F>& f) {
  f.push_back(F(
                  "data", "train", [](RunConfig& c) -> Slot { return &c.data.train; },
                  "training data: prefixes of .bin/.idx pairs with weights (default 1)")
                  .when_unset("required to train")
                  .decides_numbers());
  f.push_back(
      F(
          "data", "valid", [](RunConfig& c) -> Slot { return &c.data.valid; }, "held-out data, in the same form")
          .when_unset("none"));
  f.push_back(F(
                  "data", "tokenizer", [](RunConfig& c) -> Slot { return &c.data.tokenizer; },
                  "tokenizer.model, or a folder that holds one")
                  .when_unset("model.path")
                  .also({"tokenizer_name_or_path", "tokenizer_model"}));
  f.push_back(F(
                  "data", "document_mask", [](RunConfig& c) -> Slot { return &c.data.document_mask; },
                  "attention does not cross documents, and positions restart in each")
                  .decides_numbers());
  f.push_back(F(
                  "data", "shuffle", [](RunConfig& c) -> Slot { return &c.data.shuffle; },
                  "order of the samples drawn from (seed, step); false: the order of the files")
                  .also({"random_shuffle"})
                  .decides_numbers());
  f.push_back(F(
                  "data", "prefetch", [](RunConfig& c) -> Slot { return &c.data.prefetch; },
                  "steps read ahead off the training thread")
                  .range(0, 1024));
}

void training(std::vector<F>& f) {
  f.push_back(
      F(
          "training", "steps", [](RunConfig& c) -> Slot { return &c.training.steps; }, "optimizer steps of the run")
          .range(1, kMany)
          .also({"max_steps", "train_iters"})
          .decides_numbers());
  f.push_back(F(
                  "training", "global_batch_size", [](RunConfig& c) -> Slot { return &c.training.global_batch_size; },
                  "sequences of one optimizer step")
                  .range(1, kMaxBatch)
                  .also({"global_batch_size"})
                  .decides_numbers());
  f.push_back(F(
                  "training", "micro_batch_size", [](RunConfig& c) -> Slot { return &c.training.micro_batch_size; },
                  "sequences of one forward and backward pass")
                  .range(1, kMaxBatch)
                  .also({"micro_batch_size", "per_device_train_batch_size", "batch_size"})
                  .decides_numbers());
  f.push_back(
      F(
          "training", "seq_length", [](RunConfig& c) -> Slot { return &c.training.seq_length; }, "tokens of a sequence")
          .range(1, 1 << 30)
          .also({"seq_length", "max_seq_len", "max_seq_length"})
          .decides_numbers());
  f.push_back(F(
                  "training", "dtype", [](RunConfig& c) -> Slot { return &c.training.dtype; },
                  "compute type; bf16 keeps fp32 master weights")
                  .one_of({"bf16", "f32", "f64"})
                  .also({"compute_type"})
                  .decides_numbers());
  f.push_back(F(
                  "training", "routing_unit",
                  [](RunConfig& c) -> Slot { return enum_slot(c.training.routing_unit, kRoutingUnitNames); },
                  "the tokens over which router losses, capacity, drop order and Sinkhorn are defined")
                  .decides_numbers());
  f.push_back(F(
                  "training", "balance_loss",
                  [](RunConfig& c) -> Slot { return enum_slot(c.training.balance_loss, kBalanceLossNames); },
                  "form of the balance loss that model.router_aux_loss_coef weighs")
                  .decides_numbers());
  f.push_back(F(
                  "training", "balance_counts",
                  [](RunConfig& c) -> Slot { return enum_slot(c.training.balance_counts, kBalanceCountsNames); },
                  "which choices the balance loss counts")
                  .decides_numbers());
  f.push_back(F(
                  "training", "orthogonal",
                  [](RunConfig& c) -> Slot { return enum_slot(c.training.orthogonal, kOrthogonalNames); },
                  "how model.moe_orthogonal_loss_lambda acts")
                  .decides_numbers());
  f.push_back(F(
      "training", "allow_drops", [](RunConfig& c) -> Slot { return &c.training.allow_drops; },
      "false: a model.moe_capacity that could drop a token is refused"));
  f.push_back(F(
                  "training", "loss_average",
                  [](RunConfig& c) -> Slot { return enum_slot(c.training.loss_average, kLossAverageNames); },
                  "how the losses of micro-batches are joined")
                  .decides_numbers());
  f.push_back(
      F(
          "training", "token_balance_seqlen", [](RunConfig& c) -> Slot { return &c.training.token_balance_seqlen; },
          "what loss_average: token_balance divides a micro-batch's sum by, before the mean over micro-batches; "
          "0: the step's sum by the step's tokens, masked ones too")
          .range(0, kMany)
          .decides_numbers());
  // What to do at a bad loss may change between a stop and its resume, so these two are no part of the hash.
  f.push_back(F(
      "training", "on_bad_loss", [](RunConfig& c) -> Slot { return enum_slot(c.training.on_bad_loss, kBadStepNames); },
      "what a loss that is not finite, or spikes, does"));
  f.push_back(F(
                  "training", "spike_factor", [](RunConfig& c) -> Slot { return &c.training.spike_factor; },
                  "a loss above this times its running mean is a spike; 0: only a loss that is not finite")
                  .range(0, 1e9));
  f.push_back(F(
                  "training", "eval_every_steps", [](RunConfig& c) -> Slot { return &c.training.eval_every_steps; },
                  "steps between two evaluations of data.valid; 0: only at the end")
                  .range(0, kMany)
                  .also({"eval_steps", "eval_interval"}));
  f.push_back(F(
                  "training", "eval_batches", [](RunConfig& c) -> Slot { return &c.training.eval_batches; },
                  "micro-batches of one evaluation; 0: all of data.valid")
                  .range(0, kMany));
}

void optimizer(std::vector<F>& f) {
  f.push_back(F(
                  "optimizer", "name",
                  [](RunConfig& c) -> Slot { return enum_slot(c.optimizer.name, kOptimizerNames); }, "the update rule")
                  .also({"optim"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "lr", [](RunConfig& c) -> Slot { return &c.optimizer.lr; }, "highest learning rate")
                  .range(0, 1e6)
                  .also({"lr", "learning_rate"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "min_lr", [](RunConfig& c) -> Slot { return &c.optimizer.min_lr; },
                  "learning rate at the end of the decay")
                  .range(0, 1e6)
                  .also({"min_lr"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "schedule",
                  [](RunConfig& c) -> Slot { return enum_slot(c.optimizer.schedule, kScheduleNames); },
                  "learning rate over the steps")
                  .also({"lr_scheduler_type", "lr_scheduler", "lr_decay_style"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "warmup_steps", [](RunConfig& c) -> Slot { return &c.optimizer.warmup_steps; },
                  "steps in which the learning rate rises from 0")
                  .range(0, kMany)
                  .also({"warmup_steps", "lr_warmup_iters"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "wsd_stable_steps", [](RunConfig& c) -> Slot { return &c.optimizer.wsd_stable_steps; },
                  "wsd: last step of the constant phase; -1: 0.9 of all steps")
                  .range(-1, kMany)
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "wsd_decay",
                  [](RunConfig& c) -> Slot { return enum_slot(c.optimizer.wsd_decay, kWsdDecayNames); },
                  "wsd: form of the decay, q being its progress; lr = r x (lr - min_lr) + min_lr")
                  .also({"decay_function"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "num_cycles", [](RunConfig& c) -> Slot { return &c.optimizer.num_cycles; },
                  "cosine: waves over the decay")
                  .above(0, 1e6)
                  .also({"num_cycles"})
                  .decides_numbers());
  f.push_back(
      F(
          "optimizer", "beta1", [](RunConfig& c) -> Slot { return &c.optimizer.beta1; }, "decay of the first moment")
          .below(0, 1)
          .also({"adam_beta1"})
          .decides_numbers());
  f.push_back(
      F(
          "optimizer", "beta2", [](RunConfig& c) -> Slot { return &c.optimizer.beta2; }, "decay of the second moment")
          .below(0, 1)
          .also({"adam_beta2"})
          .decides_numbers());
  f.push_back(F(
                  "optimizer", "eps", [](RunConfig& c) -> Slot { return &c.optimizer.eps; },
                  "added to the root of the second moment")
                  .above(0, 1)
                  .also({"adam_epsilon", "adam_eps"})
                  .decides_numbers());
  f.push_back(
      F(
          "optimizer", "moments_dtype", [](RunConfig& c) -> Slot { return &c.optimizer.moments_dtype; },
          "type in which both moments are kept: f32 (f64 in an f64 run), or bf16 with stochastic rounding, half "
          "the memory")
          .one_of({"f32", "bf16"})
          .decides_numbers());
  f.push_back(F(
                  "optimizer", "weight_decay", [](RunConfig& c) -> Slot { return &c.optimizer.weight_decay; },
                  "decoupled weight decay")
                  .range(0, 1e6)
                  .also({"weight_decay"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "decay", [](RunConfig& c) -> Slot { return enum_slot(c.optimizer.decay, kDecayNames); },
                  "which parameters weight decay acts on")
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "clip_norm", [](RunConfig& c) -> Slot { return &c.optimizer.clip_norm; },
                  "largest global norm of the gradient; 0: no clipping")
                  .range(0, 1e9)
                  .also({"max_grad_norm", "clip_grad"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "router_lr_ratio", [](RunConfig& c) -> Slot { return &c.optimizer.router_lr_ratio; },
                  "multiplies the learning rate of router weights")
                  .range(0, 1e6)
                  .also({"moe_gate_lr_ratio"})
                  .decides_numbers());
  f.push_back(F(
                  "optimizer", "freeze_router", [](RunConfig& c) -> Slot { return &c.optimizer.freeze_router; },
                  "router weights and correction bias stay as they are, and router losses are left out")
                  .decides_numbers());
}

void parallel(std::vector<F>& f) {
  f.push_back(F(
                  "parallel", "tp", [](RunConfig& c) -> Slot { return &c.parallel.tp; }, "tensor parallel ranks")
                  .range(1, kMaxRanks)
                  .also({"tensor_model_parallel_size", "tensor_parallel_degree"}));
  f.push_back(F(
                  "parallel", "pp", [](RunConfig& c) -> Slot { return &c.parallel.pp; }, "pipeline parallel ranks")
                  .range(1, kMaxRanks)
                  .also({"pipeline_model_parallel_size", "pipeline_parallel_degree"}));
  f.push_back(F(
                  "parallel", "vpp", [](RunConfig& c) -> Slot { return &c.parallel.vpp; },
                  "virtual stages of a pipeline rank, for schedule interleaved")
                  .range(1, kMaxRanks)
                  .also({"virtual_pipeline_model_parallel_size", "virtual_pp_degree"}));
  f.push_back(F(
                  "parallel", "ep", [](RunConfig& c) -> Slot { return &c.parallel.ep; },
                  "expert parallel ranks: the experts are spread over them, inside tp x dp")
                  .range(1, kMaxRanks)
                  .also({"expert_model_parallel_size", "expert_parallel_degree"}));
  f.push_back(F(
                  "parallel", "etp", [](RunConfig& c) -> Slot { return &c.parallel.etp; },
                  "tensor parallel ranks inside an expert")
                  .range(1, kMaxRanks)
                  .also({"expert_tensor_parallel_size", "expert_tensor_model_parallel_size"}));
  f.push_back(F(
                  "parallel", "cp", [](RunConfig& c) -> Slot { return &c.parallel.cp; }, "context parallel ranks")
                  .range(1, kMaxRanks)
                  .also({"context_parallel_size"}));
  f.push_back(F(
                  "parallel", "stage_layers", [](RunConfig& c) -> Slot { return &c.parallel.stage_layers; },
                  "decoder layers of each virtual pipeline stage, in the order of the model")
                  .range(0, 1 << 16)
                  .when_unset("balanced by cost"));
  f.push_back(F(
                  "parallel", "zero", [](RunConfig& c) -> Slot { return &c.parallel.zero; },
                  "ZeRO stage, what data ranks split among them: 0 nothing, 1 optimizer state, 2 gradients too")
                  .range(0, 2));
  f.push_back(F(
                  "parallel", "grad_wire", [](RunConfig& c) -> Slot { return &c.parallel.grad_wire; },
                  "type that gradients are sent in between ranks that hold copies of a tensor; they are summed in f32 "
                  "all the same")
                  .one_of({"f32", "bf16"}));
  f.push_back(F(
                  "parallel", "timeout_minutes", [](RunConfig& c) -> Slot { return &c.parallel.timeout_minutes; },
                  "minutes that a rank waits for another before the job ends with an error that names who is missing")
                  .range(0.01, 1e5)
                  .also({"distributed_timeout_minutes"}));
  f.push_back(F(
                  "parallel", "dispatch_buffer_mib",
                  [](RunConfig& c) -> Slot { return &c.parallel.dispatch_buffer_mib; },
                  "bound in MiB of the rows that a rank receives for its experts at once: what may be more travels in "
                  "further rounds; 0: room for all tokens of the group, one round")
                  .range(0, 1 << 20));
  f.push_back(
      F(
          "parallel", "schedule", [](RunConfig& c) -> Slot { return &c.parallel.schedule; },
          "order of the passes: 1f1b, interleaved (vpp stages a rank), zero_bubble with the gradients of weights "
          "apart, zero_bubble_v with two stages a rank in a V; same numbers")
          .one_of({"1f1b", "interleaved", "zero_bubble", "zero_bubble_v"}));
  f.push_back(F(
                  "parallel", "recompute",
                  [](RunConfig& c) -> Slot { return enum_slot(c.parallel.recompute, kRecomputeNames); },
                  "what backward computes again instead of keeping; same numbers")
                  .also({"recompute_granularity"}));
}

void output(std::vector<F>& f) {
  f.push_back(F(
                  "checkpoint", "every_steps", [](RunConfig& c) -> Slot { return &c.checkpoint.every_steps; },
                  "steps between two checkpoints; 0: only at the end and on signals")
                  .range(0, kMany)
                  .also({"save_steps", "save_interval"}));
  f.push_back(F(
                  "checkpoint", "every_minutes", [](RunConfig& c) -> Slot { return &c.checkpoint.every_minutes; },
                  "minutes between two checkpoints; 0: by steps only")
                  .range(0, 1e6));
  f.push_back(F(
                  "checkpoint", "keep", [](RunConfig& c) -> Slot { return &c.checkpoint.keep; },
                  "newest checkpoints that stay on disk")
                  .range(1, 1e6)
                  .also({"save_total_limit"}));
  f.push_back(F(
      "checkpoint", "keep_best", [](RunConfig& c) -> Slot { return &c.checkpoint.keep_best; },
      "the checkpoint with the lowest validation loss stays too, and is saved when it is found (unless checkpoints are "
      "saved "
      "at the end only)"));
  f.push_back(F(
      "checkpoint", "export_model", [](RunConfig& c) -> Slot { return &c.checkpoint.export_model; },
      "leave a Hugging Face folder in the run folder at the end"));

  f.push_back(F(
      "monitor", "tensorboard", [](RunConfig& c) -> Slot { return &c.monitor.tensorboard; },
      "write TensorBoard event files"));
  f.push_back(F(
                  "monitor", "trace_steps", [](RunConfig& c) -> Slot { return &c.monitor.trace_steps; },
                  "[first, last] step that trace.json shows")
                  .range(0, kMany)
                  .when_unset("none"));
  f.push_back(F(
                  "monitor", "log_every_steps", [](RunConfig& c) -> Slot { return &c.monitor.log_every_steps; },
                  "steps between two plain progress lines when the output is not a terminal")
                  .range(1, kMany)
                  .also({"logging_steps", "log_interval"}));
  f.push_back(F(
      "monitor", "expert_load", [](RunConfig& c) -> Slot { return &c.monitor.expert_load; },
      "write expert_load.bin: the tokens of every expert in every step, which `concerto inspect load` shows"));
  f.push_back(F(
                  "monitor", "load_warning_steps", [](RunConfig& c) -> Slot { return &c.monitor.load_warning_steps; },
                  "steps in a row that experts starve or a router collapses before a warning; 0: no warnings")
                  .range(0, kMany));
  f.push_back(F(
                  "monitor", "starving_below", [](RunConfig& c) -> Slot { return &c.monitor.starving_below; },
                  "an expert starves with fewer tokens than this share of its layer's mean")
                  .range(0, 1));
  f.push_back(
      F(
          "monitor", "collapsed_below", [](RunConfig& c) -> Slot { return &c.monitor.collapsed_below; },
          "a router collapses with fewer effective experts, exp(entropy), than moe_k + this x (experts - moe_k)")
          .range(0, 1));
  f.push_back(F(
                  "monitor", "sample_prompt", [](RunConfig& c) -> Slot { return &c.monitor.sample_prompt; },
                  "a prompt that the model continues at the end of training")
                  .when_unset("none"));
  f.push_back(F(
                  "monitor", "sample_tokens", [](RunConfig& c) -> Slot { return &c.monitor.sample_tokens; },
                  "tokens of that continuation")
                  .range(1, 1 << 20));

  f.push_back(F(
                  "", "backend", [](RunConfig& c) -> Slot { return &c.backend; },
                  "kernels: cpu (fast), ref (plain loops, to compare with), cuda (planned)")
                  .one_of({"cpu", "ref", "cuda"})
                  .spelled(backend_word));
}

}  // namespace

std::string backend_word(const std::string& text) {
  std::string word = text;
  for (char& c : word)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  word = word.substr(0, word.find(':'));  // cuda:0
  for (const char* gpu : {"cuda", "gpu", "nvidia"})
    if (word == gpu) return "cuda";
  return text;
}

const std::vector<SectionInfo>& run_sections() {
  static const std::vector<SectionInfo> sections = {
      {"run", "where a run lives and how it starts"},
      {"model", "the model: a Hugging Face folder, its fields inline, or both (inline wins)"},
      {"data", "what is read"},
      {"training", "batch, length and precision: with `model`, the maths of a run"},
      {"optimizer", "the update rule and its learning rate"},
      {"parallel", "the plan: how the work is laid out; it never changes the maths"},
      {"checkpoint", "what is saved, and when"},
      {"monitor", "what is shown"},
  };
  return sections;
}

const std::vector<Field<RunConfig>>& run_fields() {
  static const std::vector<F> fields = [] {
    std::vector<F> f;
    run_and_model(f);
    data(f);
    training(f);
    optimizer(f);
    parallel(f);
    output(f);
    return f;
  }();
  return fields;
}

}  // namespace concerto
