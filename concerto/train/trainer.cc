#include "concerto/train/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "concerto/base/clock.h"
#include "concerto/base/cores.h"
#include "concerto/base/rng.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/comm/action_log.h"
#include "concerto/train/human_units.h"
#include "concerto/train/signals.h"

namespace concerto {
namespace {

constexpr double kSecondsForFiles = 3600;

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

BatchSourceOptions source_options(const RunConfig& c, bool valid) {
  const ModelConfig& m = c.model.config;
  return {.sources = valid ? c.data.valid : c.data.train,
          .vocab_size = m.vocab_size,
          .seq_length = c.training.seq_length,
          .mtp_depth = valid ? 0 : m.num_nextn_predict_layers,
          .pad_id = static_cast<int32_t>(std::max<int64_t>(0, m.pad_token_id)),
          .seed = static_cast<uint64_t>(c.run.seed),
          .document_mask = c.data.document_mask,
          .shuffle = c.data.shuffle && !valid,
          .one_pass = valid};
}

}  // namespace

BatchSourceOptions train_source_options(const RunConfig& config) { return source_options(config, false); }

Trainer::Trainer(const RunConfig& config, const Backend& backend, ThreadPool& pool, const TerminalStyle& style,
                 std::FILE* screen, const RankGroups* groups)
    : config_((check_trainable(config), config)),
      start_time_(steady_seconds()),
      screen_(screen),
      world_(groups ? &groups->world() : nullptr),
      dealt_(dealt_micro_batches(micro_batches(config_.training), groups ? groups->mesh().sizes().dp : 1,
                                 groups ? groups->place().dp : 0)),
      folder_(leads() ? std::make_unique<RunFolder>(config_) : nullptr),
      progress_({.fd = ::fileno(screen), .style = style, .log_every_steps = config_.monitor.log_every_steps}),
      before_data_bytes_(read_process_memory().rss_bytes),
      source_(train_source_options(config_)),
      valid_(config_.data.valid.empty() ? nullptr : std::make_unique<BatchSource>(source_options(config_, true))),
      baseline_bytes_(read_process_memory().rss_bytes),
      engine_(config_, backend, pool, docs_per_row(), false, groups),
      guard_(config_.training.spike_factor),
      watch_({.steps = config_.monitor.load_warning_steps,
              .starving_below = config_.monitor.starving_below,
              .collapsed_below = config_.monitor.collapsed_below,
              .experts_per_token = config_.model.config.moe_k}) {
  const CommPatience patience(kSecondsForFiles);  // the lead may look through large checkpoints
  check_memory(of_this_machine(engine_.predicted_bytes() + batch_bytes()), read_available_memory());  // not yet touched
  if (world_) owned_ = owned_tensors(engine_.store().specs(), *groups);
  const std::string from = resume_path();
  for (size_t i = 0; folder_ && i < folder_->notes().size(); ++i) progress_.log("passed over " + folder_->notes()[i]);
  constexpr int64_t kManyParameters = 50'000'000;  // take some seconds
  if (const int64_t n = parameter_count(config_.model.config); n > kManyParameters)
    progress_.status(fmt::format("setting up {} parameters", format_count(static_cast<double>(n))));
  engine_.first_touch_state();
  if (from.empty()) {
    if (config_.model.init == InitFrom::kPretrained)
      start_from_weights();
    else
      engine_.store().initialize(config_.model.config, config_.model.init_method,
                                 static_cast<uint64_t>(config_.run.seed), pool);
  } else {
    resume(from);
  }
  engine_.first_touch_work();
  meta_.config_hash = run_config_hash(config_);
  meta_.model_config = model_config_json(config_.model.config, "float32");
  meta_.tokenizer = config_.data.tokenizer.empty() ? config_.model.path : config_.data.tokenizer;
  first_step_ = step_ + 1;
  predicted_bytes_ = of_this_machine(engine_.predicted_bytes() + batch_bytes()) + data_bytes_to_map();
  StopSignals::set(StopMeans::kSave);  // from here on the folder is this run's
  if (folder_) folder_->write_config(config_);
  describe(pool);

  if (folder_) open_records();
  engine_.executor().set_trace(trace_.get());
  const TrainingSection& t = config_.training;
  const int64_t rows = std::min(t.micro_batch_size, t.global_batch_size), first = dealt_.begin * rows,
                count = std::min(t.global_batch_size, dealt_.end() * rows) - first;
  const auto fill = [this, n = t.global_batch_size, rows, first, count](int64_t step, std::vector<MicroBatch>& out) {
    source_.fill((step - 1) * n + first, count, rows, out);
  };
  prefetcher_ =
      std::make_unique<Prefetcher>(fill, step_ + 1, t.steps + 1, config_.data.prefetch, [&pool] { pool.leave_core(); });
  saved_time_ = steady_seconds();
}

Trainer::~Trainer() = default;

void Trainer::open_records() {
  const auto warn = [this](const std::string& line) { progress_.log(line); };
  metrics_ = std::make_unique<MetricsWriter>(folder_->file("metrics.jsonl"), step_, warn);
  if (const auto& layers = engine_.moe_layers(); config_.monitor.expert_load && !layers.empty())
    loads_ = std::make_unique<LoadWriter>(
        folder_->file(kLoadFileName),
        LoadHead{.layers = {layers.begin(), layers.end()}, .experts = config_.model.config.moe_num_experts}, step_,
        warn);
  if (config_.monitor.tensorboard) events_ = std::make_unique<EventWriter>(folder_->dir(), step_, warn);
  if (config_.monitor.trace_steps.size() == 2)
    trace_ = std::make_unique<TraceWriter>(folder_->file("trace.json"), config_.monitor.trace_steps[0],
                                           config_.monitor.trace_steps[1]);
}

void Trainer::start_from_weights() {
  for (const std::string& line : load_hf_weights(config_.model.path, config_.model.config, engine_.store()))
    progress_.log(line);
}

// The lead looks, the others are told.
std::string Trainer::resume_path() const {
  std::string path = folder_ ? folder_->resume_path() : "";
  if (!world_) return path;
  const CommScope scope("agree where to go on");
  auto size = static_cast<int64_t>(path.size());
  const OwnedPiece length{View(&size, {1}, DType::kI64), 0};
  world_->broadcast_from_owners({&length, 1});
  std::vector<int32_t> letters(path.begin(), path.end());
  letters.resize(static_cast<size_t>(size));
  const OwnedPiece text{View(letters.data(), {size}, DType::kI32), 0};
  world_->broadcast_from_owners({&text, 1});
  return {letters.begin(), letters.end()};
}

// A signal may reach one process, or one rank a step before another; and clocks differ. Everybody does what any of them
// has seen, and saves when the lead's clock says so.
void Trainer::agree() {
  stop_signal_ = StopSignals::requested();
  save_is_due_ = save_by_clock();
  if (!world_) return;
  const CommScope scope("agree to go on");
  const CommPatience patience(saved_step_ == step_ ? kSecondsForFiles : 0);  // the lead removes old checkpoints
  std::array<int64_t, 3> seen{stop_signal_ == 2, stop_signal_ != 0 && stop_signal_ != 2, leads() && save_is_due_};
  world_->all_reduce(View(seen.data(), {3}, DType::kI64));
  stop_signal_ = seen[1] > 0 ? 15 : seen[0] > 0 ? 2 : 0;
  save_is_due_ = seen[2] > 0;
}

// Ranks on one machine share its memory.
int64_t Trainer::of_this_machine(int64_t bytes) const {
  if (!world_) return bytes;
  const auto machine = static_cast<int64_t>(hash_name(machine_name()));
  std::vector<int64_t> machines(static_cast<size_t>(world_->size())), needs(machines.size());
  machines[static_cast<size_t>(world_->rank())] = machine;
  needs[static_cast<size_t>(world_->rank())] = bytes;
  for (std::vector<int64_t>* v : {&machines, &needs})
    world_->all_reduce(View(v->data(), {world_->size()}, DType::kI64));
  int64_t sum = 0;
  for (size_t r = 0; r < machines.size(); ++r) sum += machines[r] == machine ? needs[r] : 0;
  return sum;
}

void Trainer::resume(const std::string& path) {
  const std::string saved_by = CheckpointReader(path).meta().config_hash;
  if (!saved_by.empty() && saved_by != run_config_hash(config_))
    throw Error(ErrorCode::kCheckpoint, path,
                "was saved by a run with other settings (model, data, training, optimizer or seed)",
                "Use the config.yaml of its run folder, or start from its exported model with model.init: pretrained.");
  load_checkpoint(path, meta_, checkpoint_tensors(engine_.store(), owned_), world_);
  engine_.store().refresh_copies();
  guard_.restore(meta_.loss_history);
  step_ = meta_.step;
  saved_step_ = step_;
  const auto counter = [&](const char* name) {
    const auto it = meta_.counters.find(name);
    return it == meta_.counters.end() ? int64_t{0} : static_cast<int64_t>(it->second);
  };
  skipped_ = counter("skipped_steps");
  progress_.log(fmt::format("going on from {} (step {})", path, step_));
}

// Of the mixed sources. A row may begin and end inside a document, hence the one more.
double Trainer::docs_per_row() const {
  if (!config_.data.document_mask) return 1;
  double docs = 0, weights = 0;
  for (size_t i = 0; i < source_.sources().size(); ++i) {
    const SourceInfo& s = source_.sources()[i];
    const double weight = config_.data.train[i].weight;
    docs += weight * (1 + static_cast<double>(s.documents) / static_cast<double>(s.rows));
    weights += weight;
  }
  return std::min(docs / weights, static_cast<double>(config_.training.seq_length));
}

// Of the micro-batches that are read ahead and the ones in use: ids, positions and targets of each token.
int64_t Trainer::batch_bytes() const {
  const TrainingSection& t = config_.training;
  const int64_t steps = std::min<int64_t>(config_.data.prefetch + 1, std::max<int64_t>(1, t.steps - step_));
  const int64_t ids = 3 + 2 * config_.model.config.num_nextn_predict_layers;
  return steps * t.global_batch_size * t.seq_length * ids * static_cast<int64_t>(sizeof(int32_t));
}

// What reading the data will still map: opening it has mapped small files whole, to check them. A row's tokens stand
// anywhere in a large file, and the kernel maps some pages around each.
int64_t Trainer::data_bytes_to_map() const {
  constexpr int64_t kAroundFault = 64 << 10;
  int64_t files = 0;
  for (const auto* sources : {&config_.data.train, &config_.data.valid})
    for (const DataSource& s : *sources) {
      std::error_code ignored;
      for (const char* end : {".bin", ".idx", ".lsm"}) {
        const auto size = std::filesystem::file_size(s.path + end, ignored);
        if (!ignored) files += static_cast<int64_t>(size);
      }
    }
  const TrainingSection& t = config_.training;
  const int64_t left = std::max<int64_t>(0, files - (baseline_bytes_ - before_data_bytes_));
  return std::min(left, (t.steps - step_) * t.global_batch_size * (t.seq_length * 4 + kAroundFault));
}

void Trainer::describe(const ThreadPool& pool) {
  const ModelConfig& m = config_.model.config;
  progress_.log(fmt::format("model     {} parameters, {} active a token, {}",
                            format_count(static_cast<double>(parameter_count(m))),
                            format_count(static_cast<double>(active_parameter_count(m))), config_.training.dtype));
  if (m.num_moe_layers() > 0) progress_.log("router    " + router_summary(config_));
  for (const SourceInfo& s : source_.sources()) {
    progress_.log(fmt::format("data      {}: {} tokens in {} documents", s.path,
                              format_count(static_cast<double>(s.tokens)),
                              format_count(static_cast<double>(s.documents))));
    if (s.dropped_documents > 0)
      progress_.log(fmt::format("data      {}: {} records are longer than training.seq_length and left out", s.path,
                                s.dropped_documents));
  }
  if (const RankGroups* groups = engine_.groups()) progress_.log("ranks     " + mesh_text(groups->mesh().sizes()));
  std::string threads = std::to_string(pool.size());
  if (world_) threads += " a rank";
  if (!pool.cores().empty()) threads += fmt::format(", pinned to cores {}", format_cores(pool.cores()));
  progress_.log("threads   " + threads);
  progress_.log(fmt::format("memory    predicted peak {}", format_bytes(baseline_bytes_ + predicted_bytes_)));
  const TrainingSection& t = config_.training;
  if (step_ >= t.steps)
    return progress_.log(fmt::format("run       {}: all {} steps are done already", config_.run.dir, t.steps));
  progress_.log(fmt::format("run       {}: steps {} to {}, {} tokens a step", config_.run.dir, step_ + 1, t.steps,
                            format_count(static_cast<double>(t.global_batch_size * t.seq_length))));
}

RunSummary Trainer::run() {
  RunSummary summary;
  if (saved_step_ == step_ && evaluation_due() && !meta_.valid_loss) {  // the stop cut it off
    evaluate();
    if (meta_.valid_loss) save();
  }
  for (agree(); step_ < config_.training.steps && stop_signal_ == 0; agree()) {
    one_step();
    if (evaluation_due()) evaluate();
    if (step_ == config_.training.steps || should_save()) save();
  }
  if (stop_signal_ != 0) {
    summary.stopped_by = stop_signal_ == 2 ? "Ctrl-C" : "SIGTERM";
    if (saved_step_ != step_) save();
  }
  if (trace_) trace_->finish();
  finish(summary);
  return summary;
}

const std::vector<MicroBatch>& Trainer::next_batch() {
  const TraceScope scope(trace_.get(), "wait for data", "data");
  return prefetcher_->next();
}

void Trainer::one_step() {
  const double begin = steady_seconds();
  const int64_t next = step_ + 1;
  ActionLog::note_step(next);
  if (trace_) trace_->begin_step(next);
  const std::vector<MicroBatch>& micro_batches = next_batch();
  engine_.step(next, micro_batches, &guard_, report_, why_);
  if (trace_) trace_->end_step();
  if (report_.skipped) handle_bad_step(why_, micro_batches);
  step_ = next;
  meta_.valid_loss.reset();
  const double seconds = steady_seconds() - begin;
  train_seconds_ += seconds;
  report_step(seconds);
}

void Trainer::handle_bad_step(const std::string& why, std::span<const MicroBatch> micro_batches) {
  const int64_t n = config_.training.global_batch_size, first = step_ * n;
  std::string bad = world_ ? first_bad_gradient(engine_.store())
                           : first_bad_tensor(engine_.executor(), engine_.store(), micro_batches);
  if (bad.empty()) bad = fmt::format("no gradient of rank {}", world_->rank());
  const std::string text =
      fmt::format("{}; batch: samples {} to {}; first bad tensor: {}", why, first, first + n - 1, bad);
  constexpr int64_t kMostInARow = 20;  // weights that are broken never give a good step again
  ++skipped_;
  const std::string where = fmt::format("step {}", step_ + 1);
  if (config_.training.on_bad_loss == BadStep::kStop)
    throw Error(ErrorCode::kNumeric, where, text,
                "Lower optimizer.lr, raise warmup_steps, or skip such batches with training.on_bad_loss: skip.");
  if (++skipped_in_a_row_ > kMostInARow)
    throw Error(ErrorCode::kNumeric, where, fmt::format("{} bad steps in a row; the last: {}", skipped_in_a_row_, text),
                "It is not the batch: look at the data from there on, or go back to an earlier checkpoint with "
                "run.resume.");
  progress_.log(fmt::format("step {} skipped: {}", step_ + 1, text));
}

void Trainer::report_step(double seconds) {
  if (!report_.skipped) skipped_in_a_row_ = 0;
  report_.seconds = seconds;
  report_.tokens_per_s = static_cast<double>(report_.tokens) / seconds;
  report_.peak_bytes = read_process_memory().peak_bytes;
  tokens_ += report_.tokens;
  if (!folder_) return;
  metrics_->write(report_);
  if (loads_) loads_->write(report_);
  if (events_) events_->write(report_);
  progress_.step(report_);
  for (const std::string& line :
       watch_.step(report_.step, report_.moe_layers, report_.tokens_per_expert, report_.layer_loads))
    progress_.log("WARNING: " + line);
}

bool Trainer::evaluation_due() const {
  const TrainingSection& t = config_.training;
  return valid_ && step_ > 0 && (step_ == t.steps || (t.eval_every_steps > 0 && step_ % t.eval_every_steps == 0));
}

void Trainer::evaluate() {
  progress_.status("evaluating");
  const double begin = steady_seconds();
  const TrainingSection& t = config_.training;
  const int64_t rows = std::min(t.micro_batch_size, t.global_batch_size), all = valid_->rows_per_pass();
  const int64_t samples = t.eval_batches > 0 ? std::min(all, t.eval_batches * rows) : all;
  valid_output_.loss_sum = {};
  valid_output_.loss_count = {};
  const int64_t batches = (samples + rows - 1) / rows;
  const RankGroups* groups = engine_.groups();
  const Part mine =
      groups ? dealt_micro_batches(batches, groups->mesh().sizes().dp, groups->place().dp) : Part{0, batches};
  const int64_t most = groups ? dealt_micro_batches(batches, groups->mesh().sizes().dp, 0).count : batches;
  for (int64_t i = 0; i < most; ++i) {
    if (!world_ && StopSignals::requested() != 0) return;  // half an evaluation says nothing
    const int64_t at = (mine.begin + i) * rows;
    if (i < mine.count)
      valid_->fill(at, std::min(rows, samples - at), rows, valid_batches_);
    else
      valid_batches_.assign(1, empty_micro_batch());
    for (const MicroBatch& b : valid_batches_) engine_.evaluate(b, valid_output_);
  }
  engine_.sum_evaluation(valid_output_);
  if (valid_output_.loss_count[0] == 0)
    return progress_.log(fmt::format("WARNING: no validation loss: no token of the {} rows looked at counts", samples));
  const EvalReport report{.step = step_,
                          .valid_loss = valid_output_.loss(),
                          .valid_tokens = valid_output_.loss_count[0],
                          .seconds = steady_seconds() - begin};
  meta_.valid_loss = report.valid_loss;
  if (report.valid_loss < meta_.best_valid_loss) {
    meta_.best_valid_loss = report.valid_loss;
    meta_.best_step = step_;
  }
  if (!folder_) return;
  metrics_->write(report);
  if (events_) events_->write(report);
  progress_.eval(report);
}

bool Trainer::should_save() const {
  const CheckpointSection& c = config_.checkpoint;
  const bool only_at_the_end = c.every_steps == 0 && c.every_minutes == 0;
  if (c.keep_best && !only_at_the_end && meta_.best_step == step_) return true;
  if (c.every_steps > 0 && step_ % c.every_steps == 0) return true;
  return save_is_due_;
}

bool Trainer::save_by_clock() const {
  const double minutes = config_.checkpoint.every_minutes;
  return minutes > 0 && steady_seconds() - saved_time_ >= minutes * 60;
}

// A checkpoint that cannot be written (full disk) is an alarm, not the end of the run: the last good one stays.
void Trainer::save() {
  progress_.status(fmt::format("saving checkpoint {}", step_));
  meta_.step = step_;
  meta_.weights_only = false;  // it is true of a checkpoint that `checkpoint import` made, not of ours
  meta_.samples = step_ * config_.training.global_batch_size;
  meta_.loss_history = guard_.history();
  meta_.counters["skipped_steps"] = static_cast<double>(skipped_);
  saved_time_ = steady_seconds();
  try {
    if (metrics_) metrics_->sync();
    if (loads_) loads_->sync();
    SaveOptions options;
    options.world = world_;
    options.plan = &save_plan_;
    options.model = &config_.model.config;
    save_checkpoint(config_.run.dir, meta_, checkpoint_tensors(engine_.store(), owned_), options);
    saved_step_ = step_;
    unsaved_.clear();
  } catch (const Error& e) {
    if (e.code != ErrorCode::kIo) throw;
    unsaved_ = fmt::format("the last checkpoint could not be saved: {}: {}", e.where, e.problem);
    progress_.log(fmt::format("WARNING: checkpoint {} could not be saved: {}", step_, e.what()));
    return;
  }
  if (!folder_) return;
  try {
    remove_old_checkpoints(folder_->dir(), config_.checkpoint.keep, config_.checkpoint.keep_best);
  } catch (const Error& e) {
    if (e.code != ErrorCode::kIo) throw;
    progress_.log(fmt::format("WARNING: an old checkpoint could not be removed: {}", e.what()));
  }
}

void Trainer::finish(RunSummary& s) {
  const std::string dir = config_.run.dir;
  if (step_ == config_.training.steps && config_.checkpoint.export_model) {
    progress_.status("exporting the model");
    try {
      HfExport options;
      options.dtype = config_.training.dtype == "bf16" ? DType::kBF16 : DType::kF32;
      if (!meta_.tokenizer.empty()) options.copy_files = files_beside_weights(meta_.tokenizer);
      options.replace = true;
      export_hf_store(dir + "/model", config_.model.config, engine_.store(), options, world_, owned_);
      exported_ = dir + "/model";
    } catch (const Error& e) {
      if (e.code != ErrorCode::kIo) throw;
      unsaved_ = fmt::format("the model could not be exported: {}: {}", e.where, e.problem);
      progress_.log(fmt::format("WARNING: the model could not be exported: {}", e.what()));
    }
  }
  progress_.finish();
  if (!folder_) return;
  LossCurves curves;
  try {
    curves = write_loss_svg(dir);
  } catch (const Error& e) {
    progress_.log(fmt::format("WARNING: no picture of the loss: {}", e.what()));
  }
  s.run_dir = dir;
  s.first_step = first_step_;
  s.step = step_;
  s.steps = config_.training.steps;
  s.final_loss = curves.train.y.empty() ? report_.loss : curves.train.y.back();
  if (meta_.best_step >= 0) {
    s.best_valid_loss = meta_.best_valid_loss;
    s.best_valid_step = meta_.best_step;
  }
  s.tokens = tokens_;
  s.seconds = steady_seconds() - start_time_;
  s.train_seconds = train_seconds_;
  s.skipped_steps = skipped_;
  s.unsaved = unsaved_;
  s.memory = {.baseline_bytes = baseline_bytes_,
              .predicted_bytes = predicted_bytes_,
              .peak_bytes = read_process_memory().peak_bytes};
  s.outputs = find_outputs(dir);
  const int fd = ::fileno(screen_);
  fmt::print(screen_, "{}", format_summary(s, curves, terminal_width(fd), detect_terminal(fd).unicode));
  std::fflush(screen_);
}

}  // namespace concerto
