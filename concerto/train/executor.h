// Plays a rank's action list on tensors: the one switch over actions. Holds the rank's virtual pipeline stages (chunks),
// what each micro-batch in flight in them needs (its slot), and the arenas; every byte is planned by a dry run of the same
// code before the first step; lists are sized by the first.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/data/micro_batch.h"
#include "concerto/model/stage.h"
#include "concerto/optim/gradient_sync.h"
#include "concerto/parallel/rank_groups.h"
#include "concerto/parallel/token_exchange.h"
#include "concerto/schedule/pipeline.h"
#include "concerto/train/router_losses.h"
#include "concerto/train/trace_writer.h"

namespace concerto {

// The ranks that play a step together; null: this one alone.
struct ExecutorGroups {
  std::span<const RankGroups::PipelineChannel> pp = {};  // of each chunk, by pipeline rank; none: no pipeline
  Communicator* dp = nullptr;                            // ranks that work on other micro-batches of the step
  int pp_rank = 0;
  int tp = 1, tp_rank = 0;       // how the tokens of a micro-batch are cut
  GradientSync* sync = nullptr;  // hears of every layer whose weight gradients are made
};

struct ExecutorOptions {
  int64_t max_tokens = 0;         // of one micro-batch
  int64_t max_rows = 0;           // rows (sequences) of one micro-batch; 0: as many as tokens
  int64_t max_docs = 0;           // documents of one micro-batch that there is room for; 0: as many as tokens
  int64_t usual_docs = 0;         // documents that the predicted memory counts on; 0: max_docs
  bool train = true;              // false: forward only
  bool split = false;             // schedules with B and W apart
  std::vector<int64_t> slots{1};  // [chunks] micro-batches in flight
  LossAverage loss_average = LossAverage::kTokens;
  int64_t token_balance_seqlen = 0;  // with kTokenBalance
  RoutingOptions routing;            // its unit is the stage's
  int64_t cache_rows = 0;            // generation: rows of the KV cache, at least max_tokens
  int64_t scratch = 0;               // bytes that others who work with ops() need at least: the optimizer
  bool poison = false;               // tests: unused memory is NaN
  ExecutorGroups groups;
};

// Sums over the micro-batches of a step (or of an evaluation). A loss is (sum, count) until the last moment.
struct StepOutput {
  std::array<double, kMaxLosses>
      loss_sum{};  // [0] language model, [1 + m] MTP depth m; with kMicroBatches: sums of means
  std::array<int64_t, kMaxLosses> loss_count{};         // valid targets; with kMicroBatches: micro-batches
  std::array<double, kMaxLosses> differentiated{};      // with kTokenBalance: what was, factors included
  RouterLossValues router;                              // unscaled, means over units as they weigh
  int64_t tokens = 0;                                   // tokens that went through the model
  std::vector<std::vector<int64_t>> tokens_per_expert;  // [MoE layers of the model][experts], before drops
  std::vector<std::vector<int64_t>> drops_per_expert;   // likewise

  double aux_loss() const { return router.balance(); }  // balance loss
  double z_loss() const { return router.z(); }
  double loss(int i = 0) const { return loss_count[i] > 0 ? loss_sum[i] / static_cast<double>(loss_count[i]) : 0.0; }
};

// Bytes by kind, from a dry run.
struct MemoryPlan {
  int64_t keep = 0;       // all slots: activations from forward to backward
  int64_t backward = 0;   // gradients of activations: recycled arenas, and (split) one a slot
  int64_t temporary = 0;  // recompute
  int64_t scratch = 0;    // room for max_docs; only what is touched takes memory
  int64_t total = 0;      // what a step touches, with usual_docs
};

class Executor {
 public:
  Executor(const Stage& stage, ParameterStore& store, const Backend& backend, ThreadPool& pool,
           const ExecutorOptions& options);
  // `stages`: the rank's, in the order of the model. With several ranks all of the group make theirs.
  Executor(std::vector<const Stage*> stages, ParameterStore& store, const Backend& backend, ThreadPool& pool,
           const ExecutorOptions& options);
  ~Executor();

  const MemoryPlan& memory() const { return memory_; }
  // Makes the memory that a step will use, each part in the thread that will use it first. Before the first step.
  void first_touch();
  const Context& ops() const { return context_; }

  // Plays this rank's list of a schedule over micro_batches (their memory stays where it is until this returns).
  // Gradients of (LM loss + router losses with their coefficients + MTP losses) add up in the store. `output` holds
  // what this rank has seen; who plays with others sums it over them.
  void run(const PipelineSchedule& schedule, std::span<const MicroBatch> micro_batches, StepOutput& output);

  // Forward only: adds the micro-batch's loss sum and count to `output`, on the rank that has the head.
  void evaluate(const PipelineSchedule& schedule, const MicroBatch& micro_batch, StepOutput& output);
  void evaluate(const MicroBatch& micro_batch, StepOutput& output);

  void set_observer(Observer* observer) { observer_ = observer; }
  void set_profile(OpProfile* profile) { context_.profile = profile; }
  void set_trace(TraceWriter* trace) { trace_ = trace; }
  TraceWriter* trace() const { return trace_; }
  // Tests: every action that run() plays, as it plays it.
  void set_played(std::vector<Action>* played) { played_ = played; }

 private:
  struct Slot;
  struct Chunk;
  struct Arenas;
  struct Together;

  const ModelConfig& config() const { return stages_[0]->config(); }
  void make_slots(Chunk& chunk, int64_t count);
  MemoryPlan counted() const;
  void plan_memory();
  void dry_run(int64_t docs);
  void dry_run(Chunk& chunk, int64_t docs);
  void note_growth();
  void take_memory();
  int64_t max_units() const;
  bool is_global() const { return options_.routing.unit == RoutingUnit::kGlobal; }
  void begin_output(std::span<const MicroBatch> micro_batches, StepOutput& output);
  void sum_totals();
  void set_tokens(Slot& slot, const MicroBatch* micro_batch, bool training, int64_t planned_docs = 0);
  void set_units(Slot& slot, const MicroBatch* micro_batch, bool training);
  SegmentContext segment_context(Slot& slot, bool training);

  void play(const PipelineSchedule& schedule, const Action& action, std::span<const MicroBatch> micro_batches,
            StepOutput& output);
  void place_chunks(const PipelineSchedule& schedule);
  Slot& claim(Chunk& chunk, int32_t micro_batch, const MicroBatch& b);
  Slot& slot_of(Chunk& chunk, int32_t micro_batch);
  RouterPool pool_of(const Chunk& chunk, const Slot& slot) const;
  View take_input(Slot& slot);
  void bring_input(Chunk& chunk, int32_t micro_batch, const MicroBatch& b);
  void receive_forward(Chunk& chunk, Slot& slot);
  void send_forward(Chunk& chunk, Slot& slot);
  void receive_backward(Chunk& chunk, Slot& slot);
  void send_backward(Chunk& chunk, Slot& slot);
  void weights_done(Chunk& chunk, size_t unit);
  void hand_gradient_on(Chunk& chunk, Slot& slot, const Acts& grads);
  void release(Chunk& chunk, Slot& slot, StepOutput& output);

  void forward(Chunk& chunk, Slot& slot);
  void forward_together(Chunk& chunk, int64_t slots);
  void choose_together(Chunk& chunk, const Unit& unit, size_t index, int64_t slots);
  void forward_only(Chunk& chunk, Slot& slot);
  void finish_forward(Chunk& chunk, Slot& slot, StepOutput& output);
  void router_losses(Chunk& chunk, Slot& slot, RouterLossValues& values);
  void losses_together(Chunk& chunk, RouterLossValues& values);
  void backward(Chunk& chunk, Slot& slot);
  void backward_input(Chunk& chunk, Slot& slot);
  void backward_weight(Chunk& chunk, Slot& slot);
  void finish_backward(Chunk& chunk, Slot& slot, StepOutput& output);
  void loss_scales(const MicroBatch& micro_batch, Slot& slot) const;

  std::vector<const Stage*> stages_;
  ParameterStore& store_;
  ExecutorOptions options_;
  Context context_;
  MemoryPlan memory_;
  Observer* observer_ = nullptr;
  TraceWriter* trace_ = nullptr;
  std::vector<Action>* played_ = nullptr;
  bool usual_load_ = false;                     // while memory is planned
  std::unique_ptr<DataRowExchange> data_rows_;  // routing_unit global over data ranks
  std::unique_ptr<Arenas> arenas_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<std::pair<Arena*, std::vector<Arena::Growth>>> growth_;  // of each arena, in a usual step
  struct Totals {
    std::array<int64_t, kMaxLosses> targets{};
    int64_t tokens = 0, micro_batches = 0;  // micro-batches: those with tokens
  } totals_;                                // of the step, over all data ranks
};

}  // namespace concerto
