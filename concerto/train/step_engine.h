// Everything that a step needs, and nothing of files: a rank's part of the model, store, executor, optimizer, and what it
// shares with other ranks. `train`, `bench step` and tests step the same object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "concerto/optim/gradient_sync.h"
#include "concerto/optim/optimizer.h"
#include "concerto/parallel/token_exchange.h"
#include "concerto/train/bad_step.h"
#include "concerto/train/executor.h"
#include "concerto/train/metrics.h"
#include "concerto/train/router_steps.h"

namespace concerto {

MicroBatch empty_micro_batch();  // of no tokens
// The micro-batches of a step that a data rank works on: the first ranks take what does not divide.
Part dealt_micro_batches(int64_t micro_batches, int64_t dp, int64_t dp_rank);

// The pipeline schedule of a rank with `dp` data ranks, checked.
PipelineSchedule step_schedule(const RunConfig& config, const MeshSizes& sizes);
// What a rank holds.
ShardPlan shard_plan(const RunConfig& config, const MeshSizes& sizes, const MeshPlace& place,
                     const PipelineSchedule& schedule);

class StepEngine {
 public:
  // `docs_per_row`: documents of a usual row, which the predicted memory counts on. `groups`: of a parallel job, or
  // null; all its ranks make their engine together. `rank_of_expert`: as in ShardPlan.
  StepEngine(const RunConfig& config, const Backend& backend, ThreadPool& pool, double docs_per_row = 1,
             bool poison = false, const RankGroups* groups = nullptr, std::vector<int> rank_of_expert = {});
  ~StepEngine();

  // Forward, backward, norm, clipping and update on this data rank's micro-batches (dealt_micro_batches). Fills the
  // numbers of `report` (not its times), which are those of all ranks; a step that `guard` (may be null) finds bad
  // changes no weight and is marked skipped; `why` then says why.
  void step(int64_t step, std::span<const MicroBatch> micro_batches, LossGuard* guard, StepReport& report,
            std::string& why);
  // Forward only, called as often as on every other data rank, if with empty ones; then sums over all ranks.
  void evaluate(const MicroBatch& micro_batch, StepOutput& output);
  void sum_evaluation(StepOutput& output);
  // Make the memory that a step uses, by the threads that will use it; what is there is lost. The first before weights
  // are set, the second after: a checkpoint that is read is in memory too, and would add to the peak.
  void first_touch_state();
  void first_touch_work();
  // Of the last step, before anything is dropped, and what was: [MoE layers of the model][experts].
  const StepOutput& output() const { return output_; }

  ParameterStore& store() { return *store_; }
  Executor& executor() { return *executor_; }
  const PipelineSchedule& schedule() const { return schedule_; }
  // Plays the same actions in another order from now on (checked). All ranks of the job set the same.
  void set_schedule(PipelineSchedule schedule);
  const RankGroups* groups() const { return groups_; }
  GradientSync* sync() { return sync_.get(); }
  const std::vector<int>& moe_layers() const { return moe_layers_; }  // of the model, by layer number
  int64_t predicted_bytes() const { return predicted_bytes_; }

 private:
  template <class F>
  void guarded(F&& work);
  void make_stages(const ShardPlan& plan);
  void pad(std::span<const MicroBatch> micro_batches);
  void sum_output();
  void report_losses(StepReport& report);
  void read_correction_bias(StepReport& report);

  const RunConfig& config_;
  ThreadPool& pool_;
  const RankGroups* groups_;
  PipelineSchedule schedule_;
  std::unique_ptr<ParameterStore> store_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::unique_ptr<TokenExchange> exchange_;  // null: one tensor parallel rank
  std::unique_ptr<GradientSync> sync_;       // null: one rank
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<RouterSteps> router_steps_;
  std::vector<int> moe_layers_;
  std::vector<MicroBatch> padded_;  // this rank's micro-batches, and empty ones up to those of the first rank
  StepOutput output_;
  std::vector<double> orthogonal_, biases_;  // [MoE layers], [MoE layers * experts]
  std::vector<double> sums_;                 // what sum_output sends
  std::vector<int64_t> counts_;
  std::vector<int> correction_biases_;  // [own MoE layers] places in the store
  std::vector<size_t> bias_rows_;       // their rows among the MoE layers of the model
  bool has_bias_ = false;               // one was not zero
  int64_t predicted_bytes_ = 0;
};

}  // namespace concerto
