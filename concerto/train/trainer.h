// The training loop: data, steps, evaluation, checkpoints, what the user sees, and what happens when a step goes wrong.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "concerto/checkpoint/checkpoint.h"
#include "concerto/data/batch_source.h"
#include "concerto/data/prefetcher.h"
#include "concerto/optim/optimizer.h"
#include "concerto/train/bad_step.h"
#include "concerto/train/load_file.h"
#include "concerto/train/metrics.h"
#include "concerto/train/progress.h"
#include "concerto/train/run_folder.h"
#include "concerto/train/step_engine.h"
#include "concerto/train/summary.h"
#include "concerto/train/tensorboard.h"

namespace concerto {

// How `train` reads data.train.
BatchSourceOptions train_source_options(const RunConfig& config);

class Trainer {
 public:
  // Error if anything about the run is wrong; in the run folder nothing is written before all of it is checked.
  // Progress and summary go to `screen`. `groups`: of a parallel job, or null; all its ranks make their trainer together,
  // and the first of them (the lead) has the run folder and the screen.
  Trainer(const RunConfig& config, const Backend& backend, ThreadPool& pool, const TerminalStyle& style,
          std::FILE* screen = stdout, const RankGroups* groups = nullptr);
  ~Trainer();

  // To the end, or to a signal (which somebody must have a StopSignals for). From construction on a signal means kSave.
  RunSummary run();
  StepEngine& engine() { return engine_; }
  const std::string& exported_model() const { return exported_; }  // the HF folder that was left, or empty
  void log(const std::string& line) { progress_.log(line); }

 private:
  bool leads() const { return !world_ || world_->rank() == 0; }
  std::string resume_path() const;
  void agree();
  void start_from_weights();
  void resume(const std::string& path);
  void describe(const ThreadPool& pool);
  const std::vector<MicroBatch>& next_batch();
  void one_step();
  void handle_bad_step(const std::string& why, std::span<const MicroBatch> micro_batches);
  void open_records();
  void report_step(double seconds);
  bool evaluation_due() const;
  void evaluate();
  bool should_save() const;
  bool save_by_clock() const;
  void save();
  void finish(RunSummary& summary);
  double docs_per_row() const;
  int64_t batch_bytes() const;
  int64_t data_bytes_to_map() const;
  int64_t of_this_machine(int64_t bytes) const;

  RunConfig config_;
  double start_time_;
  std::FILE* screen_;
  Communicator* world_;                // null: one rank
  Part dealt_;                         // micro-batches of a step that this data rank works on
  std::unique_ptr<RunFolder> folder_;  // the lead's
  Progress progress_;
  int64_t before_data_bytes_;  // resident
  BatchSource source_;
  std::unique_ptr<BatchSource> valid_;  // null: no validation data
  int64_t baseline_bytes_;              // resident with the data open, before the engine
  StepEngine engine_;
  int64_t predicted_bytes_ = 0;  // what the run will add to the baseline
  LossGuard guard_;
  int64_t step_ = 0, first_step_ = 1;  // steps done; first of this process
  CheckpointMeta meta_;
  int64_t saved_step_ = -1;
  SavePlan save_plan_;
  std::string unsaved_;  // why the last save or export failed
  double saved_time_ = 0;
  int stop_signal_ = 0;  // what all ranks have agreed on before the next step
  bool save_is_due_ = false;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<LoadWriter> loads_;  // null: dense, or not wanted
  LoadWatch watch_;
  std::unique_ptr<EventWriter> events_;
  std::unique_ptr<TraceWriter> trace_;
  StepReport report_;
  std::string why_;
  std::vector<MicroBatch> valid_batches_;
  std::vector<uint8_t> owned_;  // by spec; empty: all
  StepOutput valid_output_;
  int64_t tokens_ = 0, skipped_ = 0, skipped_in_a_row_ = 0;
  double train_seconds_ = 0;
  std::string exported_;
};

}  // namespace concerto
