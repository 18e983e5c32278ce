#include "tests/multirank/shard_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "concerto/base/rng.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/parallel/token_exchange.h"
#include "concerto/tensor/values.h"

namespace concerto::test {
namespace {

View ints(const std::vector<int32_t>& v, Shape shape) {
  return View(const_cast<int32_t*>(v.data()), shape, DType::kI32);
}

class Collector final : public Observer {
 public:
  bool wants_logits() const override { return true; }
  void record(const std::string& name, View value) override {
    std::vector<double>& to = shown[name];
    const std::vector<double> from = to_doubles(value);
    to.insert(to.end(), from.begin(), from.end());
  }
  Tensors shown;
};

// Where element i of a shard lies in the whole tensor.
int64_t place_of(const TensorSpec& s, int64_t i) {
  const Shape whole = s.whole();
  const int64_t own_cols = s.shape.rank() == 2 ? s.shape[1] : 1, cols = whole.rank() == 2 ? whole[1] : 1;
  const int64_t row = i / own_cols + (s.cut_dim == 0 ? s.cut_begin : 0);
  return row * cols + i % own_cols + (s.cut_dim == 1 ? s.cut_begin : 0);
}

class Rank {
 public:
  Rank(const ShardSetup& setup, const MicroBatch& batch, const TensorShard& shard)
      : setup_(setup),
        pool_(setup.threads),
        store_(tensor_specs(setup.config, {.tp = shard.size, .tp_rank = shard.rank}), setup.dtype, StoreUse::kTrain,
               setup.backend),
        stage_(setup.config, store_, setup.recompute, std::max<int64_t>(1, batch.tokens()), setup.unit,
               {.span = {0, setup.config.num_hidden_layers, true, true}, .shard = shard}) {
    load();
    set_tokens(batch);
    const auto layers = static_cast<int64_t>(stage_.moe_layers().size());
    router_ = RouterMemory(setup.config, {.layers = layers,
                                          .units = std::max<int64_t>(1, batch.rows()),
                                          .stat = store_.stat(),
                                          .balance = true,
                                          .z = setup.config.router_z_loss_coef > 0});
    for (const Unit& unit : stage_.units())
      saved_.push_back({.input = {}, .segments = std::vector<Saved>(unit.segments.size())});
    for (int i = 0; i <= setup.config.num_nextn_predict_layers; ++i) losses_.scale[i] = 0.25 + 0.5 * i;
    measure();
  }

  void forward(bool training) {
    keep_.reset();
    const SegmentContext ctx = context(training);
    Acts acts;
    for (size_t u = 0; u < saved_.size(); ++u)
      if (training || !stage_.units()[u].training_only) unit_forward(stage_.units()[u], ctx, acts, saved_[u], arenas());
  }
  void backward_input() {
    const SegmentContext ctx = context(true);
    Acts grads;
    for (size_t u = saved_.size(); u-- > 0;) unit_backward_input(stage_.units()[u], ctx, grads, saved_[u], arenas());
  }
  void backward_weight() {
    const SegmentContext ctx = context(true);
    for (size_t u = saved_.size(); u-- > 0;) unit_backward_weight(stage_.units()[u], ctx, saved_[u]);
    store_.settle_gradients(pool_);
  }
  // What the losses would give back: any numbers, the same on every rank.
  void set_router_gradients() {
    const RouterStats& s = router_.stats;
    const Rng rng(3, "router gradients");
    for (int64_t i = 0; i < s.aux_dprob.elements(); ++i) {
      const auto value = static_cast<float>(0.1 * rng.normal(static_cast<uint64_t>(i)));
      if (s.aux_dprob.dtype == DType::kF64)
        s.aux_dprob.as<double>()[i] = value;
      else
        s.aux_dprob.as<float>()[i] = value;
    }
    for (int64_t u = 0; s.z_scale && u < s.z_scale.elements(); ++u)
      s.z_scale.as<double>()[u] = 0.01 * (1.0 + static_cast<double>(u));
  }

  void add_gradients(Tensors& whole) const {
    for (int i = 0; i < store_.size(); ++i) {
      const TensorSpec& s = store_.specs()[static_cast<size_t>(i)];
      std::vector<double>& to = whole[s.name];
      to.resize(static_cast<size_t>(s.whole().elements()));
      const std::vector<double> own = to_doubles(store_.gradient(i));
      for (size_t j = 0; j < own.size(); ++j) to[static_cast<size_t>(place_of(s, static_cast<int64_t>(j)))] += own[j];
    }
  }
  void take(ShardResult& to) const {
    to.shown = collector_.shown;
    to.loss_sums.assign(losses_.sum, losses_.sum + 1 + setup_.config.num_nextn_predict_layers);
    const RouterStats& s = router_.stats;
    const int64_t experts = setup_.config.moe_num_experts;
    for (size_t l = 0; l < stage_.moe_layers().size(); ++l)
      for (const View& v : {s.counts, s.bare_counts, s.kept_counts}) {
        const View used = s.layer(v, static_cast<int>(l), units());
        to.counts.insert(to.counts.end(), used.as<int64_t>(), used.as<int64_t>() + units() * experts);
      }
    for (size_t l = 0; l < stage_.moe_layers().size(); ++l) {
      const View used = s.layer(s.prob_sums, static_cast<int>(l), units());
      to.sums.insert(to.sums.end(), used.as<double>(), used.as<double>() + units() * experts);
      if (s.z_sums)
        for (int64_t u = 0; u < units(); ++u)
          to.sums.push_back(s.layer_z_sums(static_cast<int>(l), units()).as<double>()[u]);
    }
  }
  void clear() {
    store_.clear_gradients(pool_);
    std::fill(std::begin(losses_.sum), std::end(losses_.sum), 0.0);
  }
  double loss() const { return losses_.sum[0]; }
  void observe(bool on) { observer_ = on ? &collector_ : nullptr; }

 private:
  int64_t units() const { return tokens_.units.offsets.dim(0) - 1; }
  UnitArenas arenas() { return {&keep_, &backward_, &backward_}; }
  SegmentContext context(bool training) {
    return {.ops = {.backend = setup_.backend, .pool = &pool_, .scratch = &scratch_, .dry_run = keep_.counting()},
            .tokens = &tokens_,
            .losses = &losses_,
            .router = &router_.stats,
            .observer = observer_,
            .training = training};
  }

  // The shard of a whole store's values, which do not depend on the layout.
  void load() {
    ParameterStore whole(tensor_specs(setup_.config), DType::kF32, StoreUse::kInfer);
    fill_random(whole, 7);
    std::vector<float> all, own;
    for (int i = 0; i < store_.size(); ++i) {
      const TensorSpec& s = store_.specs()[static_cast<size_t>(i)];
      all.resize(static_cast<size_t>(s.whole().elements()));
      own.resize(static_cast<size_t>(s.shape.elements()));
      whole.get(whole.find(s.name), all.data());
      for (size_t j = 0; j < own.size(); ++j) own[j] = all[static_cast<size_t>(place_of(s, static_cast<int64_t>(j)))];
      store_.set(i, own.data());
    }
  }

  void set_tokens(const MicroBatch& b) {
    const int64_t t = b.tokens(), depth = setup_.config.num_nextn_predict_layers;
    const bool sequences = setup_.unit == RoutingUnit::kSequence;
    whole_ = {0, static_cast<int32_t>(t)};
    const std::vector<int32_t>& offsets = sequences ? b.row_offsets : whole_;
    for (size_t u = 0; u + 1 < offsets.size(); ++u)
      rooms_.push_back(expert_room(setup_.config, true, offsets[u + 1] - offsets[u]));
    tokens_ = {.ids = ints(b.token_ids, {t}),
               .positions = ints(b.positions, {t}),
               .targets = ints(b.targets, {t}),
               .doc_offsets = ints(b.doc_offsets, {static_cast<int64_t>(b.doc_offsets.size())}),
               .count = t,
               .local = stage_.shard().own(t),
               .units = {.offsets = ints(offsets, {static_cast<int64_t>(offsets.size())}),
                         .capacity = View(rooms_.data(), {static_cast<int64_t>(rooms_.size())}, DType::kI64),
                         .drops = true}};
    if (depth > 0) {
      tokens_.mtp_ids = ints(b.mtp_token_ids, {depth, t});
      tokens_.mtp_targets = ints(b.mtp_targets, {depth, t});
    }
  }

  // A dry run gives the arenas' sizes; they are then exactly so large.
  void measure() {
    const Tokens real = tokens_;
    for (View* v : {&tokens_.ids, &tokens_.positions, &tokens_.targets, &tokens_.doc_offsets, &tokens_.mtp_ids,
                    &tokens_.mtp_targets, &tokens_.units.offsets, &tokens_.units.capacity})
      v->data = nullptr;
    tokens_.local = {0, stage_.shard().most_own(real.count)};
    forward(false);
    forward(true);
    backward_input();
    backward_weight();
    const int64_t bytes[] = {keep_.high_water(), backward_.high_water(), scratch_.high_water()};
    tokens_ = real;
    keep_ = Arena(bytes[0]);
    backward_ = Arena(bytes[1]);
    // Kernels may want a little more for fewer rows.
    scratch_ = Arena(bytes[2] + (setup_.dtype == DType::kF64 ? 0 : 1 << 16));
    for (Arena* a : {&keep_, &backward_, &scratch_}) a->poison();
  }

  const ShardSetup& setup_;
  ThreadPool pool_;
  ParameterStore store_;
  Stage stage_;
  Tokens tokens_;
  std::vector<int32_t> whole_;
  std::vector<int64_t> rooms_;
  LossSums losses_;
  RouterMemory router_;
  std::vector<UnitSaved> saved_;
  Arena keep_, backward_, scratch_;  // counting, until they are measured
  Collector collector_;
  Observer* observer_ = nullptr;
};

}  // namespace

ShardResult run_shards(const ShardSetup& setup, const MicroBatch& batch, int tp) {
  std::vector<ShardResult> results(static_cast<size_t>(tp));
  std::vector<Tensors> shards(static_cast<size_t>(tp));
  run_local_ranks(tp, [&](Communicator& world) {
    const GroupTokenExchange exchange(world);
    Rank rank(setup, batch, {.exchange = tp > 1 ? &exchange : nullptr, .size = tp, .rank = world.rank()});
    ShardResult& result = results[static_cast<size_t>(world.rank())];
    rank.clear();
    rank.forward(false);
    result.eval_loss_sum = rank.loss();
    rank.clear();
    rank.observe(true);
    rank.forward(true);
    rank.observe(false);
    rank.set_router_gradients();
    rank.backward_input();
    const int64_t operations = world.traffic().operations;
    rank.backward_weight();
    EXPECT_EQ(world.traffic().operations, operations);
    rank.take(result);
    rank.add_gradients(shards[static_cast<size_t>(world.rank())]);
  });
  ShardResult whole = results[0];
  for (const ShardResult& r : results) {
    EXPECT_EQ(r.loss_sums, whole.loss_sums);
    EXPECT_EQ(r.eval_loss_sum, whole.eval_loss_sum);
    EXPECT_EQ(r.counts, whole.counts);
    EXPECT_EQ(r.sums, whole.sums);
    EXPECT_EQ(r.shown, whole.shown);
  }
  for (const Tensors& shard : shards)
    for (const auto& [name, values] : shard) {
      std::vector<double>& to = whole.gradients[name];
      to.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) to[i] += values[i];
    }
  return whole;
}

void expect_close(const Tensors& got, const Tensors& want, double tolerance, double floor) {
  ASSERT_EQ(got.size(), want.size());
  std::map<std::string, double> norms;
  double largest = 0;
  for (const auto& [name, values] : want) {
    norms[name] = distance(values, std::vector<double>(values.size()));
    largest = std::max(largest, norms[name]);
  }
  for (const auto& [name, values] : want) {
    ASSERT_TRUE(got.count(name)) << name;
    const double norm = std::max(norms[name], floor * largest);
    const double error =
        norms[name] > 0 ? norms[name] * distance(got.at(name), values) : distance(got.at(name), values);
    EXPECT_LE(error, tolerance * norm) << name;
  }
}

}  // namespace concerto::test
