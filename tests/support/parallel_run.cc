#include "tests/support/parallel_run.h"

#include <mutex>

#include "concerto/checkpoint/store_tensors.h"
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

// The values of a whole model, by tensor.
std::map<std::string, std::vector<float>> start_values(const RunConfig& c) {
  ParameterStore whole(tensor_specs(c.model.config), DType::kF32, StoreUse::kInfer);
  fill_random(whole, 7);
  std::map<std::string, std::vector<float>> values;
  for (int i = 0; i < whole.size(); ++i) {
    std::vector<float>& v = values[whole.specs()[static_cast<size_t>(i)].name];
    v.resize(static_cast<size_t>(whole.specs()[static_cast<size_t>(i)].shape.elements()));
    whole.get(i, v.data());
  }
  return values;
}

void set_slices(ParameterStore& store, const std::map<std::string, std::vector<float>>& values) {
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

// One rank's steps. Only what it owns goes into `trace`; the numbers of a step from the first rank.
void run_rank(const RunConfig& config, const std::vector<std::vector<MicroBatch>>& steps, const Backend& backend,
              const RankGroups* groups, const std::map<std::string, std::vector<float>>& start, std::mutex& guard,
              RunTrace& trace) {
  ThreadPool pool(1);
  StepEngine engine(config, backend, pool, static_cast<double>(config.training.seq_length), true, groups);
  ParameterStore& store = engine.store();
  set_slices(store, start);
  const auto owns = [&](int i) { return !engine.sync() || engine.sync()->owns(i); };
  const MeshSizes sizes = groups ? groups->mesh().sizes() : MeshSizes{};
  const MeshPlace place = groups ? groups->place() : MeshPlace{};
  std::vector<Action> played;
  engine.executor().set_played(&played);
  for (size_t s = 0; s < steps.size(); ++s) {
    const Part mine = dealt_micro_batches(static_cast<int64_t>(steps[s].size()), sizes.dp, place.dp);
    StepReport report;
    std::string why;
    played.clear();
    engine.step(static_cast<int64_t>(s) + 1,
                std::span(steps[s]).subspan(static_cast<size_t>(mine.begin), static_cast<size_t>(mine.count)), nullptr,
                report, why);
    const std::lock_guard lock(guard);
    if (played != engine.schedule().ranks[static_cast<size_t>(place.pp)]) trace.played_as_planned = false;
    if (!groups || groups->world().rank() == 0) trace.steps.push_back(trace_of(report));
    for (int i = 0; i < store.size() && s == 0; ++i) {
      const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
      if (spec.trainable && owns(i)) put(spec, store.gradient(i), spec.name, trace.first_gradients);
    }
  }
  const std::lock_guard lock(guard);
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
    if (!owns(i)) continue;
    put(spec, store.master(i), spec.name, trace.weights);
    if (!spec.trainable) continue;
    put(spec, store.moment1(i), "1." + spec.name, trace.moments);
    put(spec, store.moment2(i), "2." + spec.name, trace.moments);
  }
}

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

RunTrace run_layout(const RunConfig& base, const std::vector<std::vector<MicroBatch>>& steps, const Layout& layout,
                    const Backend& backend) {
  RunConfig config = base;
  config.parallel.tp = layout.mesh.tp;
  config.parallel.pp = layout.mesh.pp;
  config.parallel.vpp = layout.vpp;
  config.parallel.ep = layout.mesh.ep;
  config.parallel.etp = layout.mesh.etp;
  config.parallel.zero = layout.zero;
  config.parallel.schedule = layout.schedule;
  config.parallel.recompute = layout.recompute;
  const auto start = start_values(config);
  RunTrace trace;
  std::mutex guard;
  run_local_ranks(
      layout.mesh.world(),
      [&](Communicator& world) {
        const int chunks = layout.schedule == "zero_bubble_v" ? 2 : layout.vpp;
        const RankGroups groups(world, layout.mesh, kv_sharers(config.model.config, layout.mesh.tp), chunks);
        run_rank(config, steps, backend, &groups, start, guard, trace);
      },
      layout.local);
  return trace;
}

RunTrace run_alone(const RunConfig& base, const std::vector<std::vector<MicroBatch>>& steps, const Backend& backend,
                   Recompute recompute) {
  RunConfig config = base;
  config.parallel.recompute = recompute;
  RunTrace trace;
  std::mutex guard;
  run_rank(config, steps, backend, nullptr, start_values(config), guard, trace);
  return trace;
}

}  // namespace concerto::test
