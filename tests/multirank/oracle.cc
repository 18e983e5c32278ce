#include "tests/multirank/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "concerto/cli/backends.h"

namespace concerto::test {
namespace {

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
      if (std::isnan(off)) return {off, name};
      if (off > d.value) d = {off, name};
    }
  }
  return d;
}

double relative(double got, double want) { return std::abs(got - want) / std::max(1e-3, std::abs(want)); }

// f64 on `ref`: what is left of 2^-53 after five steps, each of which divides by the root of a small second moment.
// Else a walk of rounding errors, which grows with the root of the longest sum (the tokens of all steps) and with the
// layers that it goes through both ways; twice that, as second moments are squares.
double rounding(const Job& job) {
  if (job.config.training.dtype == "f64") return 1e-12;
  const double unit = std::ldexp(1.0, job.config.training.dtype == "f32" ? -24 : -9);
  int64_t tokens = 0;
  for (const auto& step : job.steps)
    for (const MicroBatch& b : step) tokens += b.tokens();
  return 2 * 2 * static_cast<double>(job.config.model.config.num_hidden_layers) *
         std::sqrt(static_cast<double>(tokens)) * unit;
}

const Backend& backend_of(const OracleRow& row) { return backend_by_name(row.dtype == "f64" ? "ref" : "cpu"); }

void expect_cost(const char* what, int rank, double got, double want) {
  if (want == 0)
    EXPECT_EQ(got, 0) << what << " of rank " << rank;
  else
    EXPECT_NEAR(got, want, 0.1 * want) << what << " of rank " << rank;
}

// Nobody holds, computes or sends what is not theirs.
void check_costs(const OracleRow& row, const Job& job, const RunTrace& got, const Choices& choices) {
  const RunConfig config = config_of(job.config, row.layout);
  const PipelineSchedule schedule = step_schedule(config, row.layout.mesh);
  for (size_t r = 0; r < got.costs.size(); ++r) {
    const LayoutCost& m = got.costs[r].measured;
    const LayoutCost want = expected_cost(config, row.layout.mesh, got.costs[r], schedule, job.steps[0], choices);
    const auto near = [&](const char* what, auto got_bytes, auto want_bytes) {
      expect_cost(what, static_cast<int>(r), static_cast<double>(got_bytes), static_cast<double>(want_bytes));
    };
    near("weight bytes", m.weight_bytes, want.weight_bytes);
    near("copy bytes", m.copy_bytes, want.copy_bytes);
    near("gradient bytes", m.gradient_bytes, want.gradient_bytes);
    near("moment bytes", m.moment_bytes, want.moment_bytes);
    near("product FLOPs", m.product_flops(), want.product_flops());
    near("bytes gathered over tp", m.tp_gather_bytes, want.tp_gather_bytes);
    near("bytes reduced over tp", m.tp_reduce_scatter_bytes, want.tp_reduce_scatter_bytes);
    near("dispatch bytes", m.dispatch_bytes, want.dispatch_bytes);
    near("pipeline bytes", m.pipeline_bytes, want.pipeline_bytes);
    near("bytes of gradients to owners", m.reduce_to_owners_bytes, want.reduce_to_owners_bytes);
    near("bytes from owners", m.broadcast_bytes, want.broadcast_bytes);
  }
}

}  // namespace

void expect_equal(const RunTrace& got, const RunTrace& want) {
  expect_near(got, want, 0);
  for (size_t s = 0; s < std::min(got.steps.size(), want.steps.size()); ++s)
    EXPECT_EQ(got.steps[s].grad_norm, want.steps[s].grad_norm);
}

double expect_near(const RunTrace& got, const RunTrace& want, double allowed) {
  EXPECT_TRUE(got.played_as_planned);
  double ratio = 0;
  const auto note = [&](double off, const std::string& what) {
    ratio = std::max(ratio, allowed > 0 ? off / allowed : 0);
    EXPECT_LE(off, allowed) << what;
  };
  EXPECT_EQ(got.steps.size(), want.steps.size());
  for (size_t s = 0; s < std::min(got.steps.size(), want.steps.size()); ++s) {
    const StepTrace &g = got.steps[s], &w = want.steps[s];
    EXPECT_EQ(g.tokens, w.tokens);
    EXPECT_EQ(g.tokens_per_expert, w.tokens_per_expert) << "step " << s + 1;
    EXPECT_EQ(g.dropped_per_expert, w.dropped_per_expert);
    const std::string step = fmt::format(" of step {}", s + 1);
    EXPECT_EQ(g.correction_bias.size(), w.correction_bias.size());
    for (size_t l = 0; l < std::min(g.correction_bias.size(), w.correction_bias.size()); ++l)
      for (size_t e = 0; e < w.correction_bias[l].size(); ++e)
        note(std::abs(g.correction_bias[l].at(e) - w.correction_bias[l][e]), "correction bias" + step);
    note(relative(g.loss, w.loss), "loss" + step);
    note(relative(g.total_loss, w.total_loss), "total loss" + step);
    note(relative(g.grad_norm, w.grad_norm), "norm" + step);
    note(relative(g.aux_loss, w.aux_loss), "balance loss" + step);
    note(relative(g.z_loss, w.z_loss), "z loss" + step);
    note(relative(g.orthogonal_loss, w.orthogonal_loss), "orthogonal loss" + step);
    EXPECT_EQ(g.mtp_losses.size(), w.mtp_losses.size());
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

double check_row(const OracleRow& row) {
  SCOPED_TRACE(row.name());
  const Job job = row.job();
  const RunTrace want = run_alone(job, backend_of(row));
  Layout layout = row.layout;
  layout.local.deadline_seconds = 60;
  const RunTrace got = run_layout(job, layout, backend_of(row));
  const double allowed = row.exact() ? 0 : rounding(job);
  const double ratio = expect_near(got, want, allowed);
  if (row.dtype == "f64") check_costs(row, job, got, want.choices);
  if (row.no_targets) {
    double gate = 0;
    for (const auto& [name, values] : want.first_gradients)
      if (name.find("mlp.gate.weight") != std::string::npos)
        for (const double x : values) gate = std::max(gate, std::abs(x));
    EXPECT_GT(gate, 1e-4) << "the router's losses make no gradient";
    EXPECT_EQ(got.steps[0].loss, 0);
  }
  return ratio;
}

}  // namespace concerto::test
