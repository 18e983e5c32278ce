#include "concerto/layers/inspection.h"

#include <gtest/gtest.h>

#include "concerto/base/rng.h"
#include "concerto/ops/ref/ref_backend.h"
#include "concerto/ops/test_routing_model.h"

namespace concerto::test {
namespace {

using model::Ids;
using model::Matrix;
using model::Row;

// A tensor of an f64 run from values.
struct Held {
  Held(Shape shape, const Row& values) : memory(shape.elements() * 8), view(memory.data(), shape, DType::kF64) {
    std::copy(values.begin(), values.end(), memory.data() ? view.as<double>() : nullptr);
  }
  Buffer memory;
  View view;
};

Row doubles(const View& v) { return Row(v.as<double>(), v.as<double>() + v.elements()); }
std::vector<int64_t> integers(const View& v) {
  if (v.dtype == DType::kI64) return {v.as<int64_t>(), v.as<int64_t>() + v.elements()};
  return {v.as<int32_t>(), v.as<int32_t>() + v.elements()};
}
Matrix rows(const View& v) {
  Matrix m;
  const Row all = doubles(v);
  for (int64_t r = 0; r < v.rows(); ++r) m.emplace_back(all.begin() + r * v.cols(), all.begin() + (r + 1) * v.cols());
  return m;
}
Row random(uint64_t seed, int64_t n) {
  const Rng rng(seed, "inspection");
  Row values;
  for (int64_t i = 0; i < n; ++i) values.push_back(rng.normal(static_cast<uint64_t>(i)));
  return values;
}
void expect_near(const Row& got, const Row& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

class Inspection : public testing::Test {
 protected:
  ThreadPool pool{1};
  Context context{.backend = &ref_backend(), .pool = &pool};
};

// Tokens are unit vectors and the router holds z, so that the logits are those of the golden example (reference 4.3).
class GoldenInspection : public Inspection {
 protected:
  Held x{{4, 4}, {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}};
  Held w{{4, 4}, {1.0, 0.9, 1.2, 0.8, 0.5, 0.6, 0.2, 0.7, 0, 0.1, 0.3, -0.2, -0.5, -0.4, 0, 0.1}};
  GateSettings settings{.top_k = 2, .capacity = CapacityFactors{2, 4, 4}, .training = true};
};

TEST_F(GoldenInspection, SevenParts) {
  const GateAndDispatch r = gate_and_dispatch(context, settings, x.view, w.view, {});
  EXPECT_EQ(r.capacity, 2);
  EXPECT_EQ(r.dispatched_input.shape, Shape({4, 2, 4}));
  EXPECT_EQ(doubles(r.dispatched_input), Row({1, 0, 0, 0, 0, 1, 0, 0,  // expert 0: tokens 0 and 1
                                              1, 0, 0, 0, 0, 1, 0, 0,  // expert 1: the same
                                              0, 0, 1, 0, 0, 0, 0, 0,  // expert 2: token 2
                                              0, 0, 0, 0, 0, 0, 0, 0}));
  expect_near(doubles(r.combine_weights), {.622459, .377541, .574443, .425557, 0, 1, 0, 0}, 5.1e-7);
  EXPECT_EQ(integers(r.dispatch_mask), std::vector<int64_t>({4, 3, 1, 0}));
  EXPECT_EQ(integers(r.scatter_index), std::vector<int64_t>({0, 2, 1, 3, -1, 4, -1, -1}));
  EXPECT_EQ(r.router_loss.as<float>()[0], 0.0f);
  expect_near(doubles(r.gate_logits), {1.0, 0.5, 0, -0.5, 0.9, 0.6, 0.1, -0.4, 1.2, 0.2, 0.3, 0, 0.8, 0.7, -0.2, 0.1},
              0);
  expect_near(rows(r.gate_prob)[3], {.361102, .326738, .132842, .179318}, 5.1e-7);
  settings.count_drops = false;
  settings.nowhere = 0;
  const GateAndDispatch other = gate_and_dispatch(context, settings, x.view, w.view, {});
  EXPECT_EQ(integers(other.dispatch_mask), std::vector<int64_t>({2, 2, 1, 0}));
  EXPECT_EQ(integers(other.scatter_index), std::vector<int64_t>({0, 2, 1, 3, 0, 4, 0, 0}));
}

TEST_F(GoldenInspection, SinkhornInTrainingGreedyInEvaluation) {
  settings.gate = Gate::kTop2;
  settings.sinkhorn = true;
  settings.norm_min = 1e-6;
  const GateAndDispatch train = gate_and_dispatch(context, settings, x.view, w.view, {});
  EXPECT_EQ(integers(train.expert_ids), std::vector<int64_t>({0, 1, 0, 1, 0, 2, 0, 3}));
  expect_near(doubles(train.combine_weights), {.622459, .377541, .574443, .425557, 0, 1, 0, 1}, 5.1e-7);
  settings.training = false;
  const GateAndDispatch eval = gate_and_dispatch(context, settings, x.view, w.view, {});
  EXPECT_EQ(eval.capacity, 4);
  EXPECT_EQ(integers(eval.expert_ids), std::vector<int64_t>({0, 1, 0, 1, 0, 2, 0, 1}));
  settings.training = true;
  settings.capacity.reset();  // room for all in every expert
  const GateAndDispatch free = gate_and_dispatch(context, settings, x.view, w.view, {});
  EXPECT_EQ(free.capacity, 4);
  EXPECT_EQ(integers(free.expert_ids), std::vector<int64_t>({0, 1, 0, 1, 0, 2, 0, 3}));
}

TEST_F(GoldenInspection, NoSlotsIsAnError) {
  settings.capacity = CapacityFactors{0.5, 0.5, 0.5};
  EXPECT_THROW(gate_and_dispatch(context, settings, x.view, w.view, {}), Error);
}

// The three functions against the model and plain loops: capacity that binds, both orders, reverse, none.
TEST_F(Inspection, AgreesWithTheModel) {
  int64_t dropped = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tokens = static_cast<int64_t>(seed % 12), experts = 5, hidden = 3, width = 4, k = 2;
    const Held x({tokens, hidden}, random(10 * seed, tokens * hidden)),
        w({experts, hidden}, random(10 * seed + 1, experts * hidden));
    const Held bias({experts}, random(10 * seed + 2, experts));
    const Held gate_up({experts, 2 * width, hidden}, random(10 * seed + 3, experts * 2 * width * hidden));
    const Held down({experts, hidden, width}, random(10 * seed + 4, experts * hidden * width));
    GateSettings s{.top_k = k, .training = seed % 2 == 0, .reverse = seed % 3 == 0};
    if (seed % 4) s.capacity = CapacityFactors{5, 5, 5};
    if (seed % 4 == 3) s.capacity = CapacityFactors{1, 1, 5};
    if (seed % 5 == 0) s.scoring = Scoring::kSigmoid;
    s.order = seed % 7 < 3 ? DropOrder::kTokenMajor : DropOrder::kRankMajor;
    if (s.capacity && s.training && tokens && s.capacity->train * static_cast<double>(tokens) < 5) {
      EXPECT_THROW(gate_and_dispatch(context, s, x.view, w.view, bias.view), Error);
      continue;
    }
    const GateAndDispatch r = gate_and_dispatch(context, s, x.view, w.view, bias.view);
    const OwnedTensor y = forward_experts(context, r.dispatched_input, gate_up.view, down.view);
    const OwnedTensor combined = combine_expert_output(context, y.view, r.combine_weights, r.scatter_index);

    const Matrix x_rows = rows(x.view), w_rows = rows(w.view);
    Ids ids;
    Matrix p;
    std::vector<int64_t> counts(static_cast<size_t>(experts)), index;
    for (const Row& token : x_rows) {
      Row z, score;
      for (const Row& e : w_rows) z.push_back(std::inner_product(token.begin(), token.end(), e.begin(), 0.0));
      p.push_back(model::scores(z, s.scoring == Scoring::kSigmoid, 1));
      for (size_t e = 0; e < z.size(); ++e) score.push_back(p.back()[e] + doubles(bias.view)[e]);
      ids.push_back(model::best(score, static_cast<int>(k)));
      for (int e : ids.back()) ++counts[static_cast<size_t>(e)];
    }
    const long capacity = s.capacity ? static_cast<long>(r.capacity) : 1000;
    const Ids slots = model::slots(ids, capacity, s.order == DropOrder::kRankMajor, s.reverse);
    Row weights, want, buffer(static_cast<size_t>(experts * r.capacity * hidden));
    for (size_t t = 0; t < ids.size(); ++t) {
      const Row mine = model::weights(p[t], ids[t], slots[t], true, 1e-12);
      Row sum(static_cast<size_t>(hidden));
      for (size_t j = 0; j < ids[t].size(); ++j) {
        const auto e = static_cast<size_t>(ids[t][j]);
        const auto place = e * static_cast<size_t>(r.capacity) + static_cast<size_t>(slots[t][j]);
        weights.push_back(mine[j]);
        index.push_back(slots[t][j] < 0 ? -1 : static_cast<int64_t>(place));
        dropped += slots[t][j] < 0;
        if (slots[t][j] < 0) continue;
        std::copy(x_rows[t].begin(), x_rows[t].end(),
                  buffer.begin() + static_cast<long>(place * static_cast<size_t>(hidden)));
        const auto weight = [&](const Held& m, size_t row, size_t col, size_t cols) {
          return m.view.as<double>()[row * cols + col];
        };
        for (size_t f = 0; f < 4; ++f) {
          double gate = 0, up = 0;
          for (size_t h = 0; h < 3; ++h) {
            gate += weight(gate_up, e * 8 + f, h, 3) * x_rows[t][h];
            up += weight(gate_up, e * 8 + 4 + f, h, 3) * x_rows[t][h];
          }
          for (size_t h = 0; h < 3; ++h)
            sum[h] += mine[j] * weight(down, e * 3 + h, f, 4) * gate / (1 + std::exp(-gate)) * up;
        }
      }
      want.insert(want.end(), sum.begin(), sum.end());
    }
    expect_near(doubles(r.combine_weights), weights, 1e-14);
    EXPECT_EQ(integers(r.scatter_index), index);
    EXPECT_EQ(integers(r.dispatch_mask), counts);
    EXPECT_EQ(doubles(r.dispatched_input), buffer);
    expect_near(doubles(combined.view), want, 1e-12);
  }
  EXPECT_GT(dropped, 50);
}

TEST_F(Inspection, WeightsHaveTheTypeOfActivations) {
  Buffer x_memory(2 * 3 * 2), w_memory(4 * 3 * 4);
  const View x(x_memory.data(), {2, 3}, DType::kBF16), w(w_memory.data(), {4, 3}, DType::kF32);
  const GateAndDispatch r = gate_and_dispatch(context, {.top_k = 2}, x, w, {});
  EXPECT_EQ(r.combine_weights.dtype, DType::kBF16);
  EXPECT_EQ(r.gate_prob.dtype, DType::kF32);
  EXPECT_EQ(static_cast<float>(r.combine_weights.as<bf16>()[0]), 0.5f);
}

}  // namespace
}  // namespace concerto::test
