// Promise 1: a layout never changes the maths. Each row trains a small model in a layout, ranks as threads, and compares
// losses, every gradient, the norm, router losses, counts, weights and moments after several steps with one rank's.
//
// Pipeline layouts without data, tensor or expert parallelism give the same bits, but for an embedding that two stages
// read (tied head, multi-token prediction): its gradient is then the sum of two stages' sums. In the others sums are made
// in another order; tests run in f64 on `ref`, so what is left is rounding: kRounding of a tensor's greatest element.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "concerto/cli/backends.h"
#include "tests/support/parallel_run.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

constexpr double kRounding = 1e-12;
constexpr int kSteps = 5;

struct Case {
  RunConfig config;
  std::vector<std::vector<MicroBatch>> steps;
};

// `shapes`: the rows of each micro-batch, in turn.
Case make_case(const ModelConfig& model, int micro_batches, const std::vector<Rows>& shapes) {
  int64_t rows = 0, seq = 0;
  for (const Rows& shape : shapes) {
    rows = std::max(rows, static_cast<int64_t>(shape.size()));
    for (const auto& row : shape) seq = std::max<int64_t>(seq, std::accumulate(row.begin(), row.end(), 0));
  }
  Case c{.config = parallel_config(model, "f64", micro_batches, rows, seq), .steps = {}};
  for (int s = 0; s < kSteps; ++s) {
    c.steps.emplace_back();
    for (int m = 0; m < micro_batches; ++m)
      c.steps.back().push_back(
          random_batch(model, shapes[static_cast<size_t>(m) % shapes.size()], static_cast<uint64_t>(100 * s + m)));
  }
  return c;
}

// The models of the table.
Case case_of(const std::string& name, int micro_batches) {
  const std::vector<Rows> even{{{6}, {6}}};
  if (name == "dense") return make_case(tiny_dense(), micro_batches, even);
  if (name == "moe") return make_case(tiny_moe(), micro_batches, even);
  if (name == "padded") return make_case(tiny_moe(), micro_batches, {{{6}, {2}}, {{5}, {1}}, {{3}, {6}}});
  if (name == "packed") return make_case(tiny_moe(), micro_batches, {{{2, 4}, {1, 3, 2}}, {{5, 1}, {6}}});
  if (name == "interval2") {
    ModelConfig m = tiny_moe_with_router_losses();
    m.num_hidden_layers = 5;
    m.moe_layer_start_index = 1;
    m.moe_layer_interval = 2;
    return make_case(m, micro_batches, even);
  }
  if (name == "mtp") {
    ModelConfig m = tiny_moe();
    m.num_nextn_predict_layers = 2;
    return make_case(m, micro_batches, even);
  }
  for (const TinyRouter& r : tiny_routers())
    if (name == r.name) {
      Case c = make_case(r.config, micro_batches, even);
      c.config.training.balance_loss = r.options.balance_loss;
      c.config.training.balance_counts = r.options.balance_counts;
      return c;
    }
  ADD_FAILURE() << "no case " << name;
  return {};
}

struct Row {
  std::string model;
  int micro_batches = 4;
  Layout layout;
  OptimizerName optimizer = OptimizerName::kAdamW;
  RoutingUnit unit = RoutingUnit::kMicroBatch;
  bool exact(const ModelConfig& m) const {
    const bool two_read_the_embedding = layout.mesh.pp > 1 && (m.tie_word_embeddings || m.num_nextn_predict_layers > 0);
    return layout.mesh.tp == 1 && layout.mesh.dp == 1 && !two_read_the_embedding;
  }
};

const RunTrace& alone(const std::string& key, const Case& c) {
  static std::map<std::string, RunTrace> known;
  const auto at = known.find(key);
  if (at != known.end()) return at->second;
  return known.emplace(key, run_alone(c.config, c.steps, backend_by_name("ref"))).first->second;
}

// The worst |a - b| over a tensor's greatest |b|, and where.
Distance worst(const Tensors& got, const Tensors& want) {
  Distance d;
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, w] : want) {
    const auto at = got.find(name);
    if (at == got.end()) {
      ADD_FAILURE() << name << " is nobody's";
      continue;
    }
    double scale = 0;
    for (const double x : w) scale = std::max(scale, std::abs(x));
    for (size_t i = 0; i < w.size(); ++i) {
      const double off = std::abs(at->second[i] - w[i]) / (scale > 0 ? scale : 1.0);
      if (!(off <= d.value)) d = {off, name};
    }
  }
  return d;
}

double relative(double got, double want) { return std::abs(got - want) / std::max(1e-3, std::abs(want)); }

// The worst of all that is compared, as a share of what is allowed.
double compare(const RunTrace& got, const RunTrace& want, double allowed) {
  EXPECT_TRUE(got.played_as_planned);
  double ratio = 0;
  const auto note = [&](double off, const std::string& what) {
    ratio = std::max(ratio, allowed > 0 ? off / allowed : off > 0 ? 1e300 : 0);
    EXPECT_LE(off, allowed) << what;
  };
  EXPECT_EQ(got.steps.size(), want.steps.size());
  for (size_t s = 0; s < std::min(got.steps.size(), want.steps.size()); ++s) {
    const StepTrace &g = got.steps[s], &w = want.steps[s];
    EXPECT_EQ(g.tokens, w.tokens);
    EXPECT_EQ(g.tokens_per_expert, w.tokens_per_expert);
    EXPECT_EQ(g.dropped_per_expert, w.dropped_per_expert);
    EXPECT_EQ(g.correction_bias, w.correction_bias);
    const std::string step = fmt::format(" of step {}", s + 1);
    note(relative(g.loss, w.loss), "loss" + step);
    note(relative(g.total_loss, w.total_loss), "total loss" + step);
    note(relative(g.grad_norm, w.grad_norm), "norm" + step);
    note(relative(g.aux_loss, w.aux_loss), "balance loss" + step);
    note(relative(g.z_loss, w.z_loss), "z loss" + step);
    note(relative(g.orthogonal_loss, w.orthogonal_loss), "orthogonal loss" + step);
    for (size_t m = 0; m < w.mtp_losses.size(); ++m)
      note(relative(g.mtp_losses[m], w.mtp_losses[m]), "mtp loss" + step);
  }
  const std::pair<const char*, Distance> tensors[] = {
      {"gradient of ", worst(got.first_gradients, want.first_gradients)},
      {"weight ", worst(got.weights, want.weights)},
      {"moment ", worst(got.moments, want.moments)}};
  for (const auto& [what, d] : tensors) note(d.value, what + d.name);
  return ratio;
}

void check(const Row& row) {
  SCOPED_TRACE(row.model + " " + row.layout.name());
  Case c = case_of(row.model, row.micro_batches);
  c.config.optimizer.name = row.optimizer;
  c.config.training.routing_unit = row.unit;
  const std::string key = fmt::format("{} {} {} {}", row.model, row.micro_batches, static_cast<int>(row.unit),
                                      row.optimizer == OptimizerName::kLamb ? "lamb" : "adamw");
  const RunTrace& want = alone(key, c);
  Layout quick = row.layout;
  quick.local.deadline_seconds = 20;
  const RunTrace got = run_layout(c.config, c.steps, quick, backend_by_name("ref"));
  const double ratio = compare(got, want, row.exact(c.config.model.config) ? 0 : kRounding);
  fmt::print("{:<18} {:<44} {}\n", key, row.layout.name(),
             row.exact(c.config.model.config) ? "bit-equal" : fmt::format("{:.2g} of {:.0e}", ratio, kRounding));
}

Layout layout(MeshSizes mesh, const std::string& schedule = "1f1b", int zero = 1, int vpp = 1) {
  return {.mesh = mesh, .vpp = vpp, .zero = zero, .schedule = schedule};
}

TEST(Oracle, OneRankWithGroups) { check({"moe", 3, layout({})}); }

TEST(Oracle, Data) {
  for (const int dp : {2, 3, 5})
    for (const int zero : {0, 1, 2}) {
      check({"dense", 5, layout({.dp = dp}, "1f1b", zero)});
      check({"moe", 5, layout({.dp = dp}, "zero_bubble", zero)});
    }
  check({"mtp", 4, layout({.dp = 2}), OptimizerName::kLamb});
}

TEST(Oracle, Pipeline) {
  for (const char* schedule : {"1f1b", "zero_bubble"})
    for (const int pp : {2, 3, 5})
      for (const char* model : {"dense", "moe", "mtp", "padded", "plain_per_layer_z"})
        check({model, 4, layout({.pp = pp}, schedule)});
  for (const char* model : {"moe", "interval2", "mtp", "first_choices"})
    for (const int m : {1, 2, 4, 6}) {
      check({model, m, layout({.pp = 2}, "zero_bubble_v")});
      check({model, m, layout({.pp = 3}, "zero_bubble_v")});
      if (m % 2 == 0) check({model, m, layout({.pp = 2}, "interleaved", 1, 2)});
      if (m == 6) check({model, m, layout({.pp = 3}, "interleaved", 1, 2)});
    }
  check({"mtp", 1, layout({.pp = 3}), OptimizerName::kLamb});
}

TEST(Oracle, Expert) {
  for (const int ep : {2, 3})
    for (const char* model : {"moe", "padded", "plain_per_layer_z"}) check({model, 6, layout({.dp = ep, .ep = ep})});
  check({"moe", 5, layout({.dp = 4, .ep = 2})});
  check({"moe", 5, layout({.dp = 4, .ep = 2, .etp = 2})});
  check({"moe", 6, layout({.dp = 2, .pp = 2, .ep = 2}, "zero_bubble_v"), OptimizerName::kLamb});
}

TEST(Oracle, Tensor) {
  for (const int tp : {2, 4})
    for (const char* model : {"dense", "moe", "padded", "packed", "mtp", "plain_per_layer_z"})
      check({model, 3, layout({.tp = tp})});
  check({"moe", 3, layout({.tp = 4, .ep = 4})});
  check({"moe", 4, layout({.tp = 2, .dp = 2, .pp = 2, .ep = 4}, "zero_bubble"), OptimizerName::kLamb});
}

TEST(Oracle, GlobalUnit) {
  for (const TinyRouter& r : tiny_routers())
    for (const Layout& l : {layout({.pp = 2}), layout({.dp = 2}), layout({.tp = 2}),
                            layout({.dp = 3, .pp = 2, .ep = 3}), layout({.tp = 2, .dp = 2, .ep = 4}, "zero_bubble")})
      check({.model = r.name, .micro_batches = 4, .layout = l, .unit = RoutingUnit::kGlobal});
}

TEST(Oracle, GradientsOfOwnersOnly) {
  for (const char* model : {"moe", "mtp", "old_gate_drops"}) {
    check({model, 5, layout({.dp = 2, .ep = 2}, "1f1b", 2)});
    check({model, 5, layout({.tp = 2, .dp = 2, .ep = 2}, "zero_bubble", 2), OptimizerName::kLamb});
    check({model, 3, layout({.tp = 2, .dp = 3, .ep = 3, .etp = 2}, "zero_bubble_v", 2)});
  }
}

TEST(Oracle, Mixed) {
  for (const char* model : {"moe", "mtp", "dense"})
    for (const char* schedule : {"1f1b", "zero_bubble", "zero_bubble_v"})
      check({model, 6, layout({.dp = 2, .pp = 2}, schedule), OptimizerName::kLamb});
}

}  // namespace
}  // namespace concerto::test
