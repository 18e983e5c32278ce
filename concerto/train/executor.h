// Plays a step's action list on tensors: the one switch over actions. Owns what a micro-batch in flight needs (its
// slot) and the arenas; every byte is planned by a dry run of the same code before the first step, and nothing is
// allocated after construction.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "concerto/data/micro_batch.h"
#include "concerto/model/stage.h"
#include "concerto/schedule/action.h"
#include "concerto/train/router_losses.h"
#include "concerto/train/trace_writer.h"

namespace concerto {

struct ExecutorOptions {
  int64_t max_tokens = 0;  // of one micro-batch
  int64_t max_rows = 0;    // rows (sequences) of one micro-batch; 0: as many as tokens
  int64_t max_docs = 0;    // documents of one micro-batch that there is room for; 0: as many as tokens
  int64_t usual_docs = 0;  // documents that the predicted memory counts on; 0: max_docs
  bool train = true;       // false: forward only
  bool split = false;      // schedules with B and W apart
  int64_t slots = 1;       // micro-batches in flight
  LossAverage loss_average = LossAverage::kTokens;
  int64_t token_balance_seqlen = 0;  // with kTokenBalance
  RoutingOptions routing;            // its unit is the stage's
  int64_t cache_rows = 0;            // generation: rows of the KV cache, at least max_tokens
  int64_t scratch = 0;               // bytes that others who work with ops() need at least: the optimizer
  bool poison = false;               // tests: unused memory is NaN
};

// Sums over the micro-batches of a step (or of an evaluation). A loss is (sum, count) until the last moment.
struct StepOutput {
  std::array<double, kMaxLosses>
      loss_sum{};  // [0] language model, [1 + m] MTP depth m; with kMicroBatches: sums of means
  std::array<int64_t, kMaxLosses> loss_count{};         // valid targets; with kMicroBatches: micro-batches
  std::array<double, kMaxLosses> differentiated{};      // with kTokenBalance: what was, factors included
  double aux_loss = 0;                                  // balance loss, unscaled, mean over units as they weigh
  double z_loss = 0;                                    // likewise
  int64_t tokens = 0;                                   // tokens that went through the model
  std::vector<std::vector<int64_t>> tokens_per_expert;  // [moe layers][experts], before drops
  std::vector<std::vector<int64_t>> drops_per_expert;   // [moe layers][experts]

  double loss(int i = 0) const { return loss_count[i] > 0 ? loss_sum[i] / static_cast<double>(loss_count[i]) : 0.0; }
};

// Bytes by kind, from a dry run.
struct MemoryPlan {
  int64_t keep = 0;       // a slot: activations from forward to backward
  int64_t backward = 0;   // gradients of activations: two recycled arenas, or (split) one a slot
  int64_t temporary = 0;  // recompute
  int64_t scratch = 0;    // room for max_docs; only what is touched takes memory
  int64_t total = 0;      // what a step touches, with usual_docs
};

class Executor {
 public:
  Executor(const Stage& stage, ParameterStore& store, const Backend& backend, ThreadPool& pool,
           const ExecutorOptions& options);
  ~Executor();

  const MemoryPlan& memory() const { return memory_; }
  // Makes the memory that a step will use, each part in the thread that will use it first. Before the first step.
  void first_touch();
  const Context& ops() const { return context_; }

  // Runs a schedule over micro_batches (their memory stays where it is until this returns). Gradients of
  // (LM loss + router losses with their coefficients + MTP losses) add up in the store. With routing_unit global the
  // schedule's forwards come first, and run together, unit by unit.
  void run(const Schedule& schedule, std::span<const MicroBatch> micro_batches, StepOutput& output);

  // Forward only: adds the micro-batch's loss sum and count to `output`.
  void evaluate(const MicroBatch& micro_batch, StepOutput& output);

  void set_observer(Observer* observer) { observer_ = observer; }
  void set_profile(OpProfile* profile) { context_.profile = profile; }
  void set_trace(TraceWriter* trace) { trace_ = trace; }
  TraceWriter* trace() const { return trace_; }

 private:
  struct Slot;
  struct Arenas;

  void plan_memory();
  void dry_run(int64_t docs);
  void note_growth();
  int64_t max_units() const;
  bool is_global() const { return options_.routing.unit == RoutingUnit::kGlobal; }
  void begin_output(std::span<const MicroBatch> micro_batches, StepOutput& output);
  void set_tokens(Slot& slot, const MicroBatch* micro_batch, bool training, int64_t planned_docs = 0);
  void set_units(Slot& slot, const MicroBatch* micro_batch, bool training);
  SegmentContext segment_context(Slot& slot, bool training);
  void forward(Slot& slot);
  void forward_together(int64_t slots);
  void choose_together(const Unit& unit, size_t index, int64_t slots);
  void forward_only(Slot& slot);
  void start_forward(Slot& slot, int32_t index, const MicroBatch& micro_batch);
  void finish_forward(Slot& slot, StepOutput& output);
  void router_losses(Slot& slot, RouterLossValues& values);
  void losses_together(RouterLossValues& values);
  void backward(Slot& slot);
  void backward_input(Slot& slot);
  void backward_weight(Slot& slot);
  void finish_backward(Slot& slot, StepOutput& output);
  void loss_scales(const MicroBatch& micro_batch, Slot& slot) const;

  const Stage& stage_;
  ParameterStore& store_;
  ExecutorOptions options_;
  Context context_;
  MemoryPlan memory_;
  Observer* observer_ = nullptr;
  TraceWriter* trace_ = nullptr;
  std::unique_ptr<Arenas> arenas_;
  RouterLosses losses_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<std::pair<Arena*, std::vector<Arena::Growth>>> growth_;  // of each arena, in a usual step
  std::vector<int64_t> slot_of_;  // [micro-batches of the step] slot index, -1: not in flight
  struct Totals {
    std::array<int64_t, kMaxLosses> targets{};
    int64_t tokens = 0, micro_batches = 0;
  } totals_;  // of the step
  // routing_unit global: the unit over all micro-batches.
  struct Together;
  std::unique_ptr<Together> together_;
};

}  // namespace concerto
