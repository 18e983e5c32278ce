#include "tests/support/parallel_run.h"

#include <cstdio>
#include <mutex>

#include "concerto/base/rng.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"

namespace concerto::test {
namespace {

// Visits the elements of a slice: fn(number in the whole tensor, number in the slice).
template <class F>
void each_element(const TensorSpec& s, F&& fn) {
  const int64_t cols = s.shape.rank() == 1 ? 1 : s.shape[1], whole_cols = s.shape.rank() == 1 ? 1 : s.whole()[1];
  const int64_t row0 = s.cut_dim == 0 ? s.cut_begin : 0, col0 = s.cut_dim == 1 ? s.cut_begin : 0;
  for (int64_t i = 0; i < s.shape[0]; ++i)
    for (int64_t j = 0; j < cols; ++j)
      fn(static_cast<size_t>((row0 + i) * whole_cols + col0 + j), static_cast<size_t>(i * cols + j));
}

void put(const TensorSpec& s, const View& slice, const std::string& name, Tensors& all) {
  std::vector<double>& whole = all[name];
  whole.resize(static_cast<size_t>(s.whole().elements()));
  const std::vector<double> values = to_doubles(slice);
  each_element(s, [&](size_t in_whole, size_t in_slice) { whole[in_whole] = values[in_slice]; });
}

Weights random_weights(const RunConfig& c) {
  ParameterStore whole(tensor_specs(c.model.config), DType::kF32, StoreUse::kInfer);
  fill_random(whole, 7);
  Weights values;
  for (int i = 0; i < whole.size(); ++i) {
    std::vector<float>& v = values[whole.specs()[static_cast<size_t>(i)].name];
    v.resize(static_cast<size_t>(whole.specs()[static_cast<size_t>(i)].shape.elements()));
    whole.get(i, v.data());
  }
  return values;
}

void set_slices(ParameterStore& store, const Weights& values) {
  std::vector<float> slice;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    const std::vector<float>& whole = values.at(s.name);
    slice.resize(static_cast<size_t>(s.shape.elements()));
    each_element(s, [&](size_t in_whole, size_t in_slice) { slice[in_slice] = whole[in_whole]; });
    store.set(i, slice.data());
  }
}

StepTrace trace_of(const StepReport& r) {
  return {.loss = r.loss,
          .total_loss = r.total_loss,
          .grad_norm = r.grad_norm,
          .aux_loss = r.aux_loss,
          .z_loss = r.z_loss,
          .orthogonal_loss = r.orthogonal_loss,
          .mtp_losses = r.mtp_losses,
          .tokens = r.tokens,
          .tokens_per_expert = r.tokens_per_expert,
          .dropped_per_expert = r.dropped_per_expert,
          .correction_bias = r.correction_bias};
}

// The experts that each token of a step goes to.
class ChoiceRecorder final : public Observer {
 public:
  explicit ChoiceRecorder(Choices& choices) : choices_(choices) {}
  bool wants_logits() const override { return false; }
  void record(const std::string& name, View value) override {
    int layer = 0;
    char what[32] = {};
    if (std::sscanf(name.c_str(), "router.%d.%31s", &layer, what) != 2) return;
    const std::vector<double> values = to_doubles(value);
    std::vector<int>& experts = choices_[layer];
    if (what == std::string("topk_index")) experts.insert(experts.end(), values.begin(), values.end());
    if (what != std::string("topk_weight")) return;
    for (size_t i = 0; i < values.size(); ++i)  // what was dropped weighs nothing
      if (values[i] == 0) experts[experts.size() - values.size() + i] = -1;
  }

 private:
  Choices& choices_;
};

struct Shared {
  const Job& job;
  const Backend& backend;
  const Weights& start;
  std::mutex guard;
  RunTrace trace;
};

class RankRun {
 public:
  RankRun(Shared& shared, const RunConfig& config, const RankGroups* groups, const Layout& layout)
      : shared_(shared),
        groups_(groups),
        backend_(groups && &shared.backend == &backend_by_name("ref") ? counting_backend(shared.backend)
                                                                      : shared.backend),
        pool_(1),
        engine_(config, backend_, pool_, static_cast<double>(config.training.seq_length), true, groups,
                layout.rank_of_expert),
        config_(config) {
    if (groups) sizes_ = groups->mesh().sizes(), place_ = groups->place();
    if (layout.shuffle) {
      int64_t swaps = 0;
      engine_.set_schedule(shuffled(engine_.schedule(), layout.shuffle, swaps));
      const std::lock_guard lock(shared.guard);
      shared.trace.swaps = swaps;
    }
    set_slices(engine_.store(), shared.start);
    engine_.executor().set_played(&played_);
    if (!groups) return;
    rank_cost_ = {.plan = shard_plan(config, sizes_, place_, engine_.schedule()), .place = place_, .measured = {}};
    rank_cost_.plan.rank_of_expert = layout.rank_of_expert;
  }

  void run() {
    ChoiceRecorder recorder(shared_.trace.choices);
    for (size_t s = 0; s < shared_.job.steps.size(); ++s) {
      if (!groups_) engine_.executor().set_observer(s == 0 ? &recorder : nullptr);
      const double flops_before = counted_flops();
      step(s);
      if (s == 0 && groups_) measure(counted_flops() - flops_before);
      if (s == 0) gather_gradients();
    }
    gather_weights();
  }

 private:
  void step(size_t s) {
    const std::vector<MicroBatch>& all = shared_.job.steps[s];
    const Part mine = dealt_micro_batches(static_cast<int64_t>(all.size()), sizes_.dp, place_.dp);
    std::string why;
    played_.clear();
    engine_.step(static_cast<int64_t>(s) + 1,
                 std::span(all).subspan(static_cast<size_t>(mine.begin), static_cast<size_t>(mine.count)), nullptr,
                 report_, why);
    const std::lock_guard lock(shared_.guard);
    if (played_ != engine_.schedule().ranks[static_cast<size_t>(place_.pp)]) shared_.trace.played_as_planned = false;
    if (!groups_ || groups_->world().rank() == 0) shared_.trace.steps.push_back(trace_of(report_));
  }

  // Before anybody's second step: bytes sent count up to here.
  void measure(double flops) {
    measure_store(engine_.store(), rank_cost_.measured);
    measure_traffic(*groups_, rank_cost_.measured);
    rank_cost_.measured.linear_flops = flops;
    const std::lock_guard lock(shared_.guard);
    shared_.trace.costs[static_cast<size_t>(groups_->world().rank())] = rank_cost_;
  }

  bool owns(int i) { return !engine_.sync() || engine_.sync()->owns(i); }

  void gather_gradients() {
    const std::lock_guard lock(shared_.guard);
    const ParameterStore& store = engine_.store();
    for (int i = 0; i < store.size(); ++i) {
      const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
      if (spec.trainable && owns(i)) put(spec, store.gradient(i), spec.name, shared_.trace.first_gradients);
    }
  }

  void gather_weights() {
    const std::lock_guard lock(shared_.guard);
    const ParameterStore& store = engine_.store();
    for (int i = 0; i < store.size(); ++i) {
      const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
      if (!owns(i)) continue;
      put(spec, store.master(i), spec.name, shared_.trace.weights);
      if (!spec.trainable) continue;
      put(spec, store.moment1(i), "1." + spec.name, shared_.trace.moments);
      put(spec, store.moment2(i), "2." + spec.name, shared_.trace.moments);
    }
  }

  Shared& shared_;
  const RankGroups* groups_;
  const Backend& backend_;
  ThreadPool pool_;
  StepEngine engine_;
  const RunConfig& config_;
  MeshSizes sizes_;
  MeshPlace place_;
  StepReport report_;
  std::vector<Action> played_;
  RankCost rank_cost_;
};

}  // namespace

std::string Layout::name() const {
  std::string text;
  const auto axis = [&](const char* of, int n) {
    if (n != 1) text += fmt::format("{}{} ", of, n);
  };
  axis("tp", mesh.tp);
  axis("pp", mesh.pp);
  axis("vpp", vpp);
  axis("dp", mesh.dp);
  axis("ep", mesh.ep);
  axis("etp", mesh.etp);
  text += fmt::format("zero{} {}", zero, schedule);
  if (recompute != Recompute::kNone) text += recompute == Recompute::kFull ? " full" : " selective";
  if (!rank_of_expert.empty()) text += " placed";
  if (shuffle) text += " shuffled";
  if (local.delay_seed) text += " delayed";
  return text;
}

RunConfig parallel_config(const ModelConfig& model, const std::string& dtype, int64_t micro_batches, int64_t rows,
                          int64_t seq) {
  RunConfig c;
  c.model.config = model;
  c.training.steps = 100;
  c.training.micro_batch_size = rows;
  c.training.global_batch_size = micro_batches * rows;
  c.training.seq_length = seq;
  c.training.dtype = dtype;
  c.optimizer.lr = 0.01;
  c.optimizer.schedule = LrSchedule::kConstant;
  c.optimizer.clip_norm = 0.5;
  return c;
}

RunConfig config_of(const RunConfig& base, const Layout& layout) {
  RunConfig config = base;
  config.parallel.tp = layout.mesh.tp;
  config.parallel.pp = layout.mesh.pp;
  config.parallel.vpp = layout.vpp;
  config.parallel.ep = layout.mesh.ep;
  config.parallel.etp = layout.mesh.etp;
  config.parallel.zero = layout.zero;
  config.parallel.schedule = layout.schedule;
  config.parallel.recompute = layout.recompute;
  return config;
}

RunTrace run_layout(const Job& job, const Layout& layout, const Backend& backend) {
  const RunConfig config = config_of(job.config, layout);
  const Weights start = job.start.empty() ? random_weights(config) : job.start;
  Shared shared{.job = job, .backend = backend, .start = start, .guard = {}, .trace = {}};
  shared.trace.costs.resize(static_cast<size_t>(layout.mesh.world()));
  run_local_ranks(
      layout.mesh.world(),
      [&](Communicator& world) {
        const int chunks = layout.schedule == "zero_bubble_v" ? 2 : layout.vpp;
        const RankGroups groups(world, layout.mesh, kv_sharers(config.model.config, layout.mesh.tp), chunks);
        RankRun(shared, config, &groups, layout).run();
      },
      layout.local);
  return std::move(shared.trace);
}

RunTrace run_alone(const Job& job, const Backend& backend, Recompute recompute) {
  RunConfig config = job.config;
  config.parallel.recompute = recompute;
  const Weights start = job.start.empty() ? random_weights(config) : job.start;
  Shared shared{.job = job, .backend = backend, .start = start, .guard = {}, .trace = {}};
  RankRun(shared, config, nullptr, {}).run();
  return std::move(shared.trace);
}

namespace {

// What adds to sums in the order in which it is played: two of a kind in one chunk.
bool may_swap(const Action& a, const Action& b) { return a.kind != b.kind || a.chunk != b.chunk; }

}  // namespace

PipelineSchedule shuffled(const PipelineSchedule& schedule, uint64_t seed, int64_t& swaps) {
  const Rng rng(seed, "shuffle");
  PipelineSchedule s = schedule;
  uint64_t draw = 0;
  for (int round = 0; round < 4; ++round)
    for (std::vector<Action>& list : s.ranks)
      for (size_t i = 0; i + 1 < list.size(); ++i) {
        if (rng.below(draw++, 2) == 0 || !may_swap(list[i], list[i + 1])) continue;
        std::swap(list[i], list[i + 1]);
        try {
          validate_pipeline(s);
        } catch (const Bug&) {
          std::swap(list[i], list[i + 1]);
        }
      }
  swaps = 0;
  for (size_t r = 0; r < s.ranks.size(); ++r)
    for (size_t i = 0; i < s.ranks[r].size(); ++i) swaps += s.ranks[r][i] != schedule.ranks[r][i];
  return s;
}

}  // namespace concerto::test
