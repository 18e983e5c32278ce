// The router on tensor parallel ranks: choices, drops, weights, plan, gradients and statistics have the bits of one
// rank's, wherever the border between ranks cuts a routing unit.
#include <gtest/gtest.h>

#include <cstring>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/layers/router_segments.h"
#include "concerto/parallel/token_exchange.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

using Bits = std::vector<std::byte>;

void append(Bits& to, View v) {
  const auto* data = static_cast<const std::byte*>(v.data);
  to.insert(to.end(), data, data + v.bytes());
}

// What the ranks have together: rows of rank after rank.
struct Routed {
  Bits logits, weights, again, dlogits;  // by token
  Bits stats, together;                  // of the units, the same on every rank
  std::vector<int64_t> expert_rows;      // of the dispatch plans
  void add(const Routed& rank) {
    for (const auto part : {&Routed::logits, &Routed::weights, &Routed::again, &Routed::dlogits})
      (this->*part).insert((this->*part).end(), (rank.*part).begin(), (rank.*part).end());
    if (expert_rows.empty()) expert_rows.resize(rank.expert_rows.size());
    for (size_t e = 0; e < expert_rows.size(); ++e) expert_rows[e] += rank.expert_rows[e];
    stats = rank.stats;
  }
};

int first_moe_layer(const ModelConfig& c) {
  int layer = 0;
  while (!c.is_moe_layer(layer)) ++layer;
  return layer;
}

class RouterRank {
 public:
  RouterRank(const ModelConfig& config, const Backend& backend, const std::vector<std::vector<int32_t>>& units,
             const TensorShard& shard)
      : config_(config),
        backend_(backend),
        shard_(shard),
        store_(tensor_specs(config), DType::kF32, StoreUse::kTrain),
        layer_(first_moe_layer(config)),
        router_(store_, config, prefix(), layer_, shard),
        route_(store_, config, prefix(), layer_, 0, shard) {
    fill_random(store_, 7);
    arena_.poison();
    scratch_.poison();
    for (const auto& offsets : units) parts_.push_back(make_part(offsets));
  }

  // Each micro-batch for itself.
  Routed run() {
    Routed all;
    for (Batch& b : parts_) forward(b, false), finish(b, all);
    return all;
  }
  // One unit over all of them.
  Routed run_together() {
    std::vector<int32_t> whole{0, 0};
    for (Batch& b : parts_) {
      SegmentContext ctx = context(b);
      Acts in{.hidden = b.hidden}, out = in;
      router_.forward(ctx, in, out, b.router_saved);
      b.acts = out;
      whole[1] += static_cast<int32_t>(b.tokens.count);
      b.route_saved.keep = &arena_;
    }
    std::vector<int64_t> room{expert_room(config_, true, whole[1])};
    Tokens all_tokens{.count = whole[1],
                      .units = {.offsets = View(whole.data(), {2}, DType::kI32),
                                .capacity = View(room.data(), {1}, DType::kI64),
                                .drops = true}};
    std::vector<RouteSegment::Part> list;
    for (Batch& b : parts_)
      list.push_back({.logits = b.acts.logits, .tokens = &b.tokens, .stats = &b.stats.stats, .saved = &b.route_saved});
    SegmentContext ctx = context(parts_[0]);
    ctx.tokens = &all_tokens;
    route_.choose_together(ctx, list, {});
    Routed all;
    for (Batch& b : parts_) {
      forward(b, true);
      finish(b, all);
    }
    return all;
  }

 private:
  struct Batch {
    std::vector<int32_t> offsets;
    std::vector<int64_t> rooms;
    Tokens tokens;
    RouterMemory stats;
    View hidden, dweights;  // own rows
    Saved router_saved, route_saved;
    Acts acts;
  };

  std::string prefix() const { return "model.layers." + std::to_string(layer_) + "."; }

  // Own rows of a matrix that does not depend on the ranks.
  View own_rows(const char* name, int64_t tokens, int64_t cols) {
    const Part own = shard_.own(tokens);
    const View v = arena_.take({own.count, cols}, DType::kF32);
    const Rng rng(11, name);
    for (int64_t i = 0; i < v.elements(); ++i)
      v.as<float>()[i] = static_cast<float>(rng.normal(static_cast<uint64_t>(own.begin * cols + i)));
    return v;
  }

  Batch make_part(const std::vector<int32_t>& offsets) {
    Batch b;
    const int64_t tokens = offsets.back(), units = static_cast<int64_t>(offsets.size()) - 1;
    b.offsets = offsets;
    for (int64_t u = 0; u < units; ++u)
      b.rooms.push_back(
          expert_room(config_, true, offsets[static_cast<size_t>(u) + 1] - offsets[static_cast<size_t>(u)]));
    b.stats = RouterMemory(config_, {.units = units, .balance = true, .z = config_.router_z_loss_coef > 0});
    b.hidden = own_rows("hidden", tokens, config_.hidden_size);
    b.dweights = own_rows("dweights", tokens, config_.moe_k);
    b.tokens.count = tokens;
    b.tokens.local = shard_.own(tokens);
    for (Saved* s : {&b.router_saved, &b.route_saved})
      s->keep = s->forward = s->output = s->backward = s->passing = &arena_;
    return b;
  }

  SegmentContext context(Batch& b) {
    const auto units = static_cast<int64_t>(b.rooms.size());
    b.tokens.units = {.offsets = View(b.offsets.data(), {units + 1}, DType::kI32),
                      .capacity = View(b.rooms.data(), {units}, DType::kI64),
                      .drops = true};
    return {.ops = {.backend = &backend_, .pool = &pool_, .scratch = &scratch_},
            .tokens = &b.tokens,
            .router = &b.stats.stats,
            .training = true};
  }

  void forward(Batch& b, bool routed) {
    SegmentContext ctx = context(b);
    ctx.routed = routed;
    Acts in{.hidden = b.hidden}, out = in;
    if (!routed) {
      router_.forward(ctx, in, out, b.router_saved);
      b.acts = out;
    }
    in = b.acts;
    route_.forward(ctx, in, b.acts, b.route_saved);
    b.acts.logits = in.logits;
  }

  void add_stats(const Batch& b, Bits& to) const {
    const RouterStats& s = b.stats.stats;
    const auto units = static_cast<int64_t>(b.rooms.size());
    for (const View& v : {s.counts, s.bare_counts, s.kept_counts, s.prob_sums}) append(to, s.layer(v, 0, units));
    append(to, s.layer_claims(0, units));
    if (s.z_sums) append(to, s.layer_z_sums(0, units));
  }

  void finish(Batch& b, Routed& all) {
    SegmentContext ctx = context(b);
    append(all.logits, b.acts.logits);
    append(all.weights, b.acts.weights);
    all.expert_rows.resize(static_cast<size_t>(b.acts.offsets.dim(0)) - 1);
    const int32_t* offsets = b.acts.offsets.as<int32_t>();
    for (size_t e = 0; e < all.expert_rows.size(); ++e) all.expert_rows[e] += offsets[e + 1] - offsets[e];
    EXPECT_EQ(offsets[all.expert_rows.size()], b.tokens.local.count * config_.moe_k);
    Bits before, after;
    add_stats(b, before);
    // Recompute makes weights again, and nothing else.
    ctx.replay = true;
    Acts in{.logits = b.acts.logits}, out = in;
    route_.forward(ctx, in, out, b.route_saved);
    append(all.again, out.weights);
    if (shard_.exchange) {
      add_stats(b, after);
      EXPECT_EQ(before, after);
    }
    const RouterStats& s = b.stats.stats;
    const Rng rng(5, "aux");
    for (int64_t i = 0; i < s.aux_dprob.elements(); ++i)
      s.aux_dprob.as<float>()[i] = static_cast<float>(rng.normal(static_cast<uint64_t>(i)));
    for (int64_t u = 0; s.z_scale && u < s.z_scale.elements(); ++u)
      s.z_scale.as<double>()[u] = 0.1 + static_cast<double>(u);
    Acts dout{.weights = b.dweights}, din = dout;
    route_.backward_input(ctx, dout, din, b.route_saved);
    append(all.dlogits, din.logits);
    all.stats.insert(all.stats.end(), before.begin(), before.end());
  }

  const ModelConfig& config_;
  const Backend& backend_;
  TensorShard shard_;
  ThreadPool pool_{2};
  ParameterStore store_;
  int layer_;
  RouterSegment router_;
  RouteSegment route_;
  Arena arena_{1 << 21}, scratch_{1 << 21};
  std::vector<Batch> parts_;
};

Routed on_ranks(const ModelConfig& config, const Backend& backend, const std::vector<std::vector<int32_t>>& units,
                int tp, bool together) {
  std::vector<Routed> ranks(static_cast<size_t>(tp));
  run_local_ranks(tp, [&](Communicator& world) {
    const GroupTokenExchange exchange(world);
    RouterRank rank(config, backend, units,
                    {.exchange = tp > 1 ? &exchange : nullptr, .size = tp, .rank = world.rank()});
    ranks[static_cast<size_t>(world.rank())] = together ? rank.run_together() : rank.run();
  });
  Routed all;
  for (const Routed& r : ranks) {
    EXPECT_EQ(r.stats, ranks[0].stats);
    all.add(r);
  }
  return all;
}

void expect_same(const Routed& got, const Routed& want) {
  EXPECT_TRUE(got.logits == want.logits);
  EXPECT_TRUE(got.weights == want.weights);
  EXPECT_TRUE(got.again == want.again);
  EXPECT_TRUE(got.again == got.weights);
  EXPECT_TRUE(got.dlogits == want.dlogits);
  EXPECT_TRUE(got.stats == want.stats);
  EXPECT_EQ(got.expert_rows, want.expert_rows);
}

class ShardedRouter : public ::testing::TestWithParam<TinyRouter> {};

TEST_P(ShardedRouter, HasTheBitsOfOneRank) {
  const std::vector<std::vector<int32_t>> units[] = {{{0, 13}}, {{0, 4, 9, 9, 16}}, {{0, 1}}, {{0, 2, 3}}, {{0, 0}}};
  for (const char* name : {"ref", "cpu"})
    for (const auto& u : units) {
      const Routed one = on_ranks(GetParam().config, backend_by_name(name), u, 1, false);
      for (const int tp : {2, 3, 4}) {
        SCOPED_TRACE(fmt::format("{}, {} tokens in {} units on {} ranks", name, u[0].back(), u[0].size() - 1, tp));
        expect_same(on_ranks(GetParam().config, backend_by_name(name), u, tp, false), one);
      }
    }
}

// Choices of several micro-batches at once. Rows by rank are not in token order then: statistics and plans are.
TEST_P(ShardedRouter, ChoosesTogether) {
  const std::vector<std::vector<int32_t>> units{{0, 7}, {0, 1}, {0, 10}};
  for (const char* name : {"ref", "cpu"}) {
    const Routed one = on_ranks(GetParam().config, backend_by_name(name), units, 1, true);
    for (const int tp : {2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} on {} ranks", name, tp));
      const Routed got = on_ranks(GetParam().config, backend_by_name(name), units, tp, true);
      EXPECT_TRUE(got.stats == one.stats);
      EXPECT_EQ(got.expert_rows, one.expert_rows);
      EXPECT_TRUE(got.again == got.weights);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Routers, ShardedRouter, ::testing::ValuesIn(tiny_routers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
