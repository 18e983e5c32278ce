#include "concerto/parallel/test_expert_layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/rng.h"
#include "concerto/layers/mlp_segment.h"
#include "concerto/tensor/values.h"

namespace concerto::test {
namespace {

constexpr int kLayer = 0;
const std::string kPrefix = "model.layers.0.";
constexpr uint64_t kSeed = 7;

double draw(const char* name, int64_t i) { return Rng(kSeed, name).normal(static_cast<uint64_t>(i)); }

void put(View v, int64_t i, double value) {
  if (v.dtype == DType::kF64) v.as<double>()[i] = value;
  if (v.dtype == DType::kF32) v.as<float>()[i] = static_cast<float>(value);
  if (v.dtype == DType::kBF16) v.as<bf16>()[i] = bf16(static_cast<float>(value));
}

// Element (i, j) of a shard is element (row0 + i, col0 + j) of the whole.
struct Window {
  int64_t rows, cols, row0, col0, whole_cols;
  explicit Window(const TensorSpec& s)
      : rows(s.shape[0]),
        cols(s.shape.rank() > 1 ? s.shape[1] : 1),
        row0(s.cut_dim == 0 ? s.cut_begin : 0),
        col0(s.cut_dim == 1 ? s.cut_begin : 0),
        whole_cols(s.shape.rank() > 1 ? s.whole()[1] : 1) {}
};

void fill(ParameterStore& store, const ExpertCase& c) {
  std::vector<float> values;
  for (int t = 0; t < store.size(); ++t) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(t)];
    const Window w(s);
    values.clear();
    for (int64_t i = 0; i < w.rows; ++i)
      for (int64_t j = 0; j < w.cols; ++j) {
        const int64_t row = w.row0 + i, col = w.col0 + j;
        values.push_back(static_cast<float>(c.weight ? c.weight(s.name, row, col)
                                                     : 0.3 * draw(s.name.c_str(), row * w.whole_cols + col)));
      }
    store.set(t, values.data());
  }
}

// The layer of one rank: segments, what they keep, and the memory they were planned for.
class Run {
 public:
  Run(const ExpertCase& c, Communicator* comm)
      : c_(c),
        comm_(comm),
        rank_(comm ? comm->rank() : 0),
        plan_{.etp = comm ? c.etp : 1,
              .etp_rank = comm ? rank_ % c.etp : 0,
              .ep = comm ? c.ep : 1,
              .ep_rank = comm ? rank_ / c.etp : 0,
              .rank_of_expert = comm ? c.rank_of_expert : std::vector<int>{}},
        store_(tensor_specs(c.config, plan_), c.type, StoreUse::kTrain, c.backend),
        pool_(1) {
    fill(store_, c);
    std::unique_ptr<Segment> shared;
    if (c.config.moe_num_shared_experts > 0)
      shared = std::make_unique<SharedExpertsSegment>(store_, c.config, kPrefix, kLayer);
    if (comm) {
      add_expert_segments(segments_, store_, c.config, kPrefix, kLayer, {comm, plan_, c.most_rows}, std::move(shared));
    } else {
      if (shared) segments_.push_back(std::move(shared));
      segments_.push_back(std::make_unique<DispatchSegment>(c.config, kLayer));
      segments_.push_back(std::make_unique<ExpertsSegment>(store_, c.config, kPrefix, kLayer));
      segments_.push_back(std::make_unique<CombineSegment>(kLayer));
    }
    saved_.resize(segments_.size());
    for (int r = 0; comm && r < rank_; ++r) first_ += c.tokens[static_cast<size_t>(r)];
    tokens_.count = comm ? c.tokens[static_cast<size_t>(rank_)] : c.all_tokens();
  }

  // Room for the longest of the ranks.
  void plan_memory(ExpertResult& result) {
    const Tokens real = tokens_;
    if (comm_) tokens_.count = *std::max_element(c_.tokens.begin(), c_.tokens.end());
    dry_ = true;
    const auto played = [&](bool usual) {
      usual_ = usual;
      forward();
      backward();
      return keep_.high_water() + forward_.high_water();
    };
    result.usual_bytes = played(true);
    result.most_bytes = played(false);
    dry_ = false;
    tokens_ = real;
    for (Arena* a : {&inputs_, &keep_, &forward_, &backward_, &scratch_}) {
      *a = Arena(a->high_water() + 4096);
      a->poison();
    }
  }

  void step(const Between& between) {
    between_ = between;
    store_.clear_gradients(pool_);
    forward();
    backward();
    store_.settle_gradients(pool_);
  }

  void add_to(ExpertResult& whole) const {
    const int64_t h = c_.config.hidden_size, k = c_.config.moe_k;
    const auto place = [&](std::vector<double>& to, View from, int64_t cols) {
      to.resize(static_cast<size_t>(c_.all_tokens() * cols));
      const std::vector<double> values = to_doubles(from);
      std::copy(values.begin(), values.end(), to.begin() + first_ * cols);
    };
    place(whole.hidden, hidden_, h);
    place(whole.dnormed, dnormed_, h);
    place(whole.dweights, dweights_, k);
    for (size_t i = 0; i < c_.choices.size(); ++i)
      if (c_.choices[i] == c_.config.moe_num_experts) whole.dweights[i] = 0;
    for (int t = 0; t < store_.size(); ++t) {
      const TensorSpec& s = store_.specs()[static_cast<size_t>(t)];
      if (s.expert < 0 && s.role != TensorRole::kSharedIn && s.role != TensorRole::kSharedDown) continue;
      const Window w(s);
      const std::vector<double> values = to_doubles(store_.gradient(t));
      std::vector<double>& to = whole.gradients[s.name];
      to.resize(static_cast<size_t>(s.whole().elements()));
      for (int64_t i = 0; i < w.rows; ++i)
        for (int64_t j = 0; j < w.cols; ++j)
          to[static_cast<size_t>((w.row0 + i) * w.whole_cols + w.col0 + j)] +=
              values[static_cast<size_t>(i * w.cols + j)];
    }
    if (rank_ == 0) whole.keep_bytes = keep_.high_water() + forward_.high_water();
  }

 private:
  SegmentContext context() {
    SegmentContext ctx;
    ctx.ops = {.backend = c_.backend, .pool = &pool_, .scratch = &scratch_, .dry_run = dry_};
    ctx.tokens = &tokens_;
    ctx.training = true;
    ctx.usual_load = usual_;
    return ctx;
  }

  View values(const char* name, int64_t cols, DType type, double scale) {
    const View v = inputs_.take({tokens_.count, cols}, type);
    for (int64_t i = 0; i < v.elements() && !dry_; ++i) put(v, i, scale * draw(name, first_ * cols + i));
    return v;
  }

  Acts inputs(const SegmentContext& ctx) {
    inputs_.reset();
    const ModelConfig& m = c_.config;
    Acts a;
    a.hidden = values("hidden", m.hidden_size, c_.type, c_.residual);
    a.normed = values("normed", m.hidden_size, c_.type, 1);
    a.weights = values("weights", m.moe_k, store_.stat(), 1);
    if (c_.input && !dry_)
      for (int64_t i = 0; i < a.normed.elements(); ++i)
        put(a.normed, i, c_.input(first_ + i / m.hidden_size, i % m.hidden_size));
    if (!c_.routing_weights.empty() && !dry_)
      for (int64_t i = 0; i < a.weights.elements(); ++i)
        put(a.weights, i, c_.routing_weights[static_cast<size_t>(i % m.moe_k)]);
    const View ids = inputs_.take({tokens_.count, m.moe_k}, DType::kI32);
    if (!dry_) std::copy_n(c_.choices.begin() + first_ * m.moe_k, ids.elements(), ids.as<int32_t>());
    a.offsets = inputs_.take({m.moe_num_experts + (c_.may_drop ? 2 : 1)}, DType::kI32);
    a.row_token = inputs_.take({ids.elements()}, DType::kI32);
    a.row_of = inputs_.take(ids.shape, DType::kI32);
    make_dispatch_plan(ctx.ops,
                       {.expert_ids = ids, .offsets = a.offsets, .row_token = a.row_token, .row_of = a.row_of});
    return a;
  }

  void play_forward(const SegmentContext& ctx) {
    Acts acts = inputs_acts_;
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (between_ && !dry_) between_(rank_, static_cast<int>(i));
      saved_[i].keep = &keep_;
      saved_[i].forward = saved_[i].output = &forward_;
      saved_[i].passing = &scratch_;
      Acts out = acts;
      segments_[i]->forward(ctx, acts, out, saved_[i]);
      acts = out;
    }
    hidden_ = acts.hidden;
  }

  void forward() {
    for (Arena* a : {&keep_, &forward_, &backward_}) a->reset();
    const SegmentContext ctx = context();
    inputs_acts_ = inputs(ctx);
    const ArenaScope passing(scratch_);
    play_forward(ctx);
  }

  void backward() {
    SegmentContext ctx = context();
    const ArenaScope passing(scratch_);
    if (c_.recompute) {
      forward_.reset();
      ctx.replay = true;
      const ArenaScope again(scratch_);
      play_forward(ctx);
      ctx.replay = false;
    }
    Acts grads;
    grads.hidden = backward_.take(hidden_.shape, c_.type);
    for (int64_t i = 0; i < grads.hidden.elements() && !dry_; ++i)
      put(grads.hidden, i, draw("dhidden", first_ * c_.config.hidden_size + i));
    for (size_t i = segments_.size(); i-- > 0;) {
      if (between_ && !dry_) between_(rank_, static_cast<int>(i) + 100);
      saved_[i].backward = &backward_;
      Acts din = grads;
      segments_[i]->backward_input(ctx, grads, din, saved_[i]);
      grads = din;
    }
    for (size_t i = segments_.size(); i-- > 0;) segments_[i]->backward_weight(ctx, saved_[i]);
    dnormed_ = grads.normed;
    dweights_ = grads.weights;
  }

  const ExpertCase& c_;
  Communicator* comm_;
  int rank_;
  ShardPlan plan_;
  ParameterStore store_;
  ThreadPool pool_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<Saved> saved_;
  Tokens tokens_;
  int64_t first_ = 0;
  bool dry_ = false, usual_ = false;
  Arena inputs_, keep_, forward_, backward_, scratch_;
  Acts inputs_acts_;
  View hidden_, dnormed_, dweights_;
  Between between_;
};

}  // namespace

int64_t ExpertCase::all_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), int64_t{0}); }

ExpertCase small_case(const Backend& backend, DType type, int64_t experts, int64_t shared) {
  ExpertCase c{.backend = &backend, .type = type};
  ModelConfig& m = c.config;
  m.vocab_size = 8;
  m.hidden_size = 16;
  m.intermediate_size = 8;
  m.num_hidden_layers = 1;
  m.num_attention_heads = m.num_key_value_heads = 1;
  m.head_dim = 4;
  m.moe_num_experts = experts;
  m.moe_k = 2;
  m.moe_intermediate_size = 12;
  m.moe_num_shared_experts = shared;
  m.moe_layer_start_index = 0;
  return c;
}

void set_tokens(ExpertCase& c, int64_t tokens, uint64_t seed) {
  c.tokens.clear();
  for (int r = 0; r < c.ranks(); ++r) c.tokens.push_back(part_of(tokens, c.ranks(), r).count);
  const Rng rng(seed, "choices");
  const auto experts = static_cast<uint64_t>(c.config.moe_num_experts);
  c.choices.clear();
  for (int64_t t = 0; t < tokens; ++t) {
    const uint64_t first = rng.below(static_cast<uint64_t>(2 * t), experts),
                   step = c.config.moe_k == 2 ? 1 + rng.below(static_cast<uint64_t>(2 * t + 1), experts - 1) : 1;
    for (int64_t k = 0; k < c.config.moe_k; ++k)
      c.choices.push_back(static_cast<int32_t>((first + static_cast<uint64_t>(k) * step) % experts));
  }
}

ExpertResult run_one_rank(const ExpertCase& c) {
  ExpertResult result;
  Run run(c, nullptr);
  run.plan_memory(result);
  for (int s = 0; s < c.steps; ++s) run.step({});
  run.add_to(result);
  return result;
}

void run_rank(const ExpertCase& c, Communicator& comm, ExpertResult& whole, const Between& between) {
  Run run(c, &comm);
  ExpertResult planned;
  run.plan_memory(planned);
  Communicator::Traffic before = comm.traffic();
  try {
    for (int s = 0; s < c.steps; ++s) {
      before = comm.traffic();
      std::optional<AllocationGuard> guard;
      if (s >= 2) guard.emplace();
      run.step(between);
    }
  } catch (const std::exception& e) {
    comm.abort(e.what());  // before memory goes away in which rows may be under way
    throw;
  }
  if (comm.rank() == 0) {
    whole.most_bytes = planned.most_bytes;
    whole.usual_bytes = planned.usual_bytes;
    whole.traffic = comm.traffic();
    whole.traffic.all_to_all -= before.all_to_all;
    whole.traffic.operations -= before.operations;
  }
  for (int r = 0; r < comm.size(); ++r) {  // one after the other: sums have an order
    if (r == comm.rank()) run.add_to(whole);
    comm.barrier();
  }
}

}  // namespace concerto::test
