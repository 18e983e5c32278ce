// Every setting of a run, declared once: the struct and its defaults here, names, help, ranges and aliases in
// run_fields.cc (the field table), which parse, validate, `config help|check|show`, docs/config.md and the dump into
// the run folder all read.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "concerto/config/model_config.h"

namespace concerto {

struct RunSection {
  std::string dir;  // run folder; required for train
  int64_t seed = 1;
  std::string resume = "auto";  // auto | never | PATH of a checkpoint
  int threads = 0;              // 0: as many as `cores`, else OMP_NUM_THREADS, else all processors
  std::string cores;            // that the threads are pinned to, as in "0-3,8"; empty: not pinned
};

enum class InitFrom { kRandom, kPretrained };
struct ModelSection {
  std::string path;  // HF folder; empty when the fields are given inline
  InitFrom init = InitFrom::kRandom;
  Init init_method = Init::kHuggingFace;
  ModelConfig config;  // resolved: from path/config.json, then inline fields of the `model` section on top
};

struct DataSource {
  std::string path;  // prefix of a .bin/.idx pair
  double weight = 1.0;
};
struct DataSection {
  std::vector<DataSource> train, valid;  // in YAML: a list of {path, weight} or of plain strings, or one string
  std::string tokenizer;                 // tokenizer.model or a folder that holds one; empty: model.path
  bool document_mask = true;  // attention does not cross documents, positions restart (block-diagonal causal)
  bool shuffle = true;
  int prefetch = 2;  // steps read ahead off the training thread
};

enum class RoutingUnit { kSequence, kMicroBatch, kGlobal };
enum class BalanceLoss { kAuto, kNone, kPooled, kPerLayer };
enum class BalanceCounts { kAuto, kTopK, kFirstChoice };
enum class Orthogonal { kLoss, kStep };
enum class LossAverage {
  kTokens,
  kMicroBatches,
  kTokenBalance
};  // accumulation weighted by valid tokens; Baidu's mean of micro-batch means; or gradients over a constant
enum class BadStep { kStop, kSkip };
struct TrainingSection {
  int64_t steps = 1000;
  int64_t global_batch_size = 64;  // sequences
  int64_t micro_batch_size = 8;    // sequences
  int64_t seq_length = 1024;
  std::string dtype = "bf16";  // bf16 | f32 (f64: ref backend, tests)
  RoutingUnit routing_unit = RoutingUnit::kMicroBatch;
  BalanceLoss balance_loss = BalanceLoss::kAuto;  // its weight is model.router_aux_loss_coef
  BalanceCounts balance_counts = BalanceCounts::kAuto;
  Orthogonal orthogonal = Orthogonal::kLoss;
  bool allow_drops = true;  // false: a capacity that could drop a token is refused
  LossAverage loss_average = LossAverage::kTokens;
  int64_t token_balance_seqlen = 0;      // 0: the tokens of the step, masked ones too
  BadStep on_bad_loss = BadStep::kStop;  // NaN or spike: stop with an error, or skip the batch
  double spike_factor = 0;               // a loss above this times the running mean is a spike; 0: only NaN/inf
  int64_t eval_every_steps = 0;          // 0: only at the end (if there is validation data)
  int64_t eval_batches = 0;              // micro-batches; 0: all of it
};

enum class OptimizerName { kAdamW, kLamb };
enum class LrSchedule { kConstant, kLinear, kCosine, kWsd };
enum class WsdDecay { kHalfLife, kOneMinusSqrt };
enum class Decay { kMatrices, kAll };  // which parameters weight decay acts on: rank >= 2 only, or all
struct OptimizerSection {
  OptimizerName name = OptimizerName::kAdamW;
  double lr = 3e-4;
  double min_lr = 0;
  LrSchedule schedule = LrSchedule::kCosine;
  int64_t warmup_steps = 0;
  int64_t wsd_stable_steps = -1;  // last step of the constant phase; -1: 0.9 * steps
  WsdDecay wsd_decay = WsdDecay::kHalfLife;
  double num_cycles = 0.5;  // cosine
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  std::string moments_dtype = "f32";  // f32 (f64 in an f64 run) | bf16
  double weight_decay = 0.1;
  Decay decay = Decay::kMatrices;
  double clip_norm = 1.0;        // 0: off
  double router_lr_ratio = 1.0;  // multiplies lr for router weights (Baidu's moe_gate_lr_ratio)
  bool freeze_router = false;    // router weights and correction bias stay; their losses are left out
};

enum class Recompute { kNone, kSelective, kFull };
struct ParallelSection {  // data parallel ranks follow from the number of ranks (topology/layout.h)
  int64_t tp = 1, pp = 1, vpp = 1, ep = 1, etp = 1, cp = 1;
  std::vector<int64_t> stage_layers;  // of each virtual stage, in the order of the model; empty: balanced
  int64_t zero = 1;                   // 0 | 1 | 2
  std::string grad_wire = "f32";      // f32 | bf16
  double timeout_minutes = 10;        // how long a rank waits for another
  int64_t dispatch_buffer_mib = 0;    // 0: room for the worst case, one round
  std::string schedule = "1f1b";      // 1f1b | interleaved | zero_bubble | zero_bubble_v
  Recompute recompute = Recompute::kNone;
};

struct CheckpointSection {
  int64_t every_steps = 500;  // 0: only at the end and on signals
  double every_minutes = 0;
  int64_t keep = 3;
  bool keep_best = true;
  bool export_model = true;  // leave an HF folder in the run folder at the end
};

struct MonitorSection {
  bool tensorboard = true;
  std::vector<int64_t> trace_steps;  // [first, last]; empty: none
  int64_t log_every_steps = 1;       // plain lines when not on a terminal
  bool expert_load = true;           // write expert_load.bin
  int64_t load_warning_steps = 100;  // in a row that a bad expert load lasts before a warning; 0: none
  double starving_below = 0.01, collapsed_below = 0.1;
  std::string sample_prompt;  // a prompt continued at the end of training; empty: none
  int64_t sample_tokens = 64;
};

struct RunConfig {
  RunSection run;
  ModelSection model;
  DataSection data;
  TrainingSection training;
  OptimizerSection optimizer;
  ParallelSection parallel;
  CheckpointSection checkpoint;
  MonitorSection monitor;
  std::string backend = "cpu";     // cpu | ref | cuda
  std::vector<std::string> notes;  // no settings: what the user should know about the files that were read
};

using Overrides = std::vector<std::pair<std::string, std::string>>;  // {"training.steps", "10"}

// Reads a YAML or JSON file, applies overrides, loads model.path/config.json, validates everything (cross-field rules
// too). All faults are reported at once in one Error(kConfig), one a line: `FILE:LINE: key: what. fix` with the nearest
// known name for an unknown key. Keys of ERNIEKit and Megatron with the same meaning are accepted as aliases.
// data.train and run.dir may be missing: see check_trainable. A `model` section that gives every field does not read
// model.path/config.json, so that the resolved config of a run folder stands alone.
RunConfig load_run_config(const std::string& path, const Overrides& overrides);
RunConfig parse_run_config(const std::string& text, const std::string& file_name, const Overrides& overrides);
// What only training needs (data.train, run.dir): all that is missing in one Error(kConfig).
void check_trainable(const RunConfig& config);
// Of a pipeline rank, and of the whole pipeline.
int64_t stages_of_a_rank(const ParallelSection& parallel);
int64_t virtual_stages(const ParallelSection& parallel);
int64_t micro_batches(const TrainingSection& training);  // of a step
// Tokens of one micro-batch, times the experts of a token, are numbered with 32 bits.
int64_t most_micro_batch_tokens(const ModelConfig& model);
// run.cores as numbers; empty: none given. Error(kConfig) if it is no list.
std::vector<int> pinned_cores(const RunSection& run);
constexpr int64_t kMostMicroBatches = int64_t{1} << 20;  // of a step: its schedule is a list of them
// The whole resolved config as YAML that load_run_config reads back to the same value; model fields inline.
std::string run_config_yaml(const RunConfig& config);
std::string run_config_json(const RunConfig& config);  // the same on one line
// What of a run is about routing.
struct RoutingOptions {
  RoutingUnit unit = RoutingUnit::kMicroBatch;
  BalanceLoss balance_loss = BalanceLoss::kAuto;
  BalanceCounts balance_counts = BalanceCounts::kAuto;
  bool freeze_router = false;
};
RoutingOptions routing_options(const RunConfig& config);
// What `auto` stands for: pooled if the model has output_router_logits, else per_layer if it has moe_aux_loss_per_layer,
// else none. None for a frozen router.
BalanceLoss balance_loss(const ModelConfig& model, const RoutingOptions& options);
// Hash of what decides the numbers (model, data, training, optimizer, seed): runs with equal hash may resume each
// other. Left out: where things lie, what is saved and shown, evaluation, the plan, backend, threads, prefetch, and
// what to do at a bad loss. model.path counts only with `init: pretrained`.
// The rule of moe_capacity for settings that a command makes by itself: Error(kConfig) if a full routing unit, of training
// or of evaluation, leaves an expert no room.
void check_capacity(const RunConfig& config, bool trains);
std::string run_config_hash(const RunConfig& config);
// Key and text of every setting.
std::vector<std::pair<std::string, std::string>> run_config_settings(RunConfig config);
// One line a setting that decides the numbers and differs between two configs ("training.seq_length: 128 here, 256
// there").
std::vector<std::string> run_config_differences(const RunConfig& a, const RunConfig& b);
// Text for `concerto config help [SECTION|KEY]` ("" for the overview; an unknown key is an Error(kUsage)), and
// docs/config.md.
std::string config_help(const std::string& key);
std::string config_markdown();

}  // namespace concerto
