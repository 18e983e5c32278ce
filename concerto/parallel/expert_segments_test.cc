// A MoE layer over a dispatch group of thread ranks equals the layer on one rank.
#include "concerto/parallel/expert_segments.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/test_errors.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/ops/cpu/cpu_backend.h"
#include "concerto/ops/ref/ref_backend.h"
#include "concerto/parallel/test_expert_layer.h"

namespace concerto::test {
namespace {

ExpertResult run_group(const ExpertCase& c, const LocalOptions& options = {}, const Between& between = {}) {
  ExpertResult whole;
  run_local_ranks(
      c.ranks(), [&](Communicator& world) { run_rank(c, world, whole, between); }, options);
  return whole;
}

double largest(const std::vector<double>& v) {
  double most = 0;
  for (const double x : v) most = std::max(most, std::abs(x));
  return most;
}

// Elements differ by `tolerance` of the largest at most; 0: not by a bit.
void expect_close(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  const double room = tolerance * largest(wanted);
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(tolerance == 0 ? got[i] == wanted[i] : std::abs(got[i] - wanted[i]) <= room)
        << what << "[" << i << "] " << got[i] << " instead of " << wanted[i] << ", room " << room;
}

struct Tolerances {
  double hidden = 0, dnormed = 0, dweights = 0, experts = 0, shared = 0;
};

void expect_equal(const ExpertResult& got, const ExpertResult& wanted, const Tolerances& t) {
  expect_close(got.hidden, wanted.hidden, t.hidden, "hidden");
  expect_close(got.dnormed, wanted.dnormed, t.dnormed, "dnormed");
  expect_close(got.dweights, wanted.dweights, t.dweights, "dweights");
  ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
  for (const auto& [name, gradient] : wanted.gradients)
    expect_close(got.gradients.at(name), gradient, name.find("shared") == std::string::npos ? t.experts : t.shared,
                 name);
}

Tolerances everything(double tolerance) { return {tolerance, tolerance, tolerance, tolerance, tolerance}; }

struct Layout {
  int ep, etp;
  int64_t experts;
  std::vector<int> places;
};
// Uneven numbers of experts, ranks without any, and tables that follow no order.
const Layout kLayouts[] = {{1, 1, 4, {}},
                           {2, 1, 4, {}},
                           {2, 1, 5, {1, 0, 0, 1, 0}},
                           {3, 1, 7, {}},
                           {4, 1, 6, {3, 1, 0, 2, 3, 1}},
                           {4, 1, 3, {}},
                           {3, 1, 3, {2, 2, 0}},
                           {1, 2, 4, {}},
                           {2, 2, 5, {1, 0, 1, 0, 0}},
                           {1, 3, 4, {}},
                           {3, 2, 7, {}}};

ExpertCase layout_case(const Layout& l, const Backend& backend, DType type, int64_t shared = 1) {
  ExpertCase c = small_case(backend, type, l.experts, shared);
  c.ep = l.ep;
  c.etp = l.etp;
  c.rank_of_expert = l.places;
  return c;
}

std::string text(const Layout& l) {
  return "ep " + std::to_string(l.ep) + " etp " + std::to_string(l.etp) + " experts " + std::to_string(l.experts);
}

TEST(ExpertParallel, EqualsOneRankInF64) {
  for (const Layout& l : kLayouts)
    for (const int64_t tokens : {23, 2}) {
      SCOPED_TRACE(text(l) + " tokens " + std::to_string(tokens));
      ExpertCase c = layout_case(l, ref_backend(), DType::kF64);
      set_tokens(c, tokens);
      expect_equal(run_group(c), run_one_rank(c), everything(1e-12));
    }
}

// Without a tensor parallel expert every row is the same product on the same row, and sums have the same order: only
// where the shared experts' gradients come in do sums have another order.
TEST(ExpertParallel, BitsEqualOneRank) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Layout& l : kLayouts) {
      if (l.etp > 1) continue;
      for (const int64_t shared : {0, 2}) {
        SCOPED_TRACE(text(l) + " " + std::string(dtype_name(type)) + " shared " + std::to_string(shared));
        ExpertCase c = layout_case(l, cpu_backend(), type, shared);
        set_tokens(c, 37);
        // The sum of the shared experts' product and K rows, rounded once or twice; gradients summed over ranks.
        const double u = type == DType::kBF16 ? 0x1p-8 : 0x1p-23;
        expect_equal(run_group(c), run_one_rank(c), {.dnormed = shared > 0 ? 3 * u : 0, .shared = 37 * 0x1p-23});
      }
    }
}

// Slices of an expert's width are rounded before they are summed, at both ends of the products.
TEST(ExpertParallel, SlicedExpertsAreCloseToOneRank) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Layout& l : kLayouts) {
      if (l.etp == 1) continue;
      SCOPED_TRACE(text(l) + " " + std::string(dtype_name(type)));
      ExpertCase c = layout_case(l, cpu_backend(), type);
      set_tokens(c, 37);
      const double u = type == DType::kBF16 ? 0x1p-8 : 0x1p-22;
      // Each of K * etp rows and what they are added to is rounded; weights' gradients have no row that is summed.
      const double room = u * static_cast<double>(c.config.moe_k * l.etp + 1);
      expect_equal(run_group(c), run_one_rank(c),
                   {.hidden = room, .dnormed = room, .dweights = room, .experts = room, .shared = 37 * 0x1p-23});
    }
}

// Experts that give back their input: gate x = 64 in every row, silu(64) = 64, up is 1 / 64, down is 1, and the first
// element of every row is 1.
TEST(ExpertParallel, IdentityExpertsGiveBackTheirInput) {
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const Layout& l : kLayouts) {
      if (l.etp > 1) continue;
      for (const int64_t tokens : {1, 2, 3, 29}) {
        ExpertCase c = layout_case(l, cpu_backend(), type, 0);
        c.config.moe_intermediate_size = c.config.hidden_size;
        c.weight = [](const std::string& name, int64_t row, int64_t col) {
          if (name.find("gate_proj") != std::string::npos) return col == 0 ? 64.0 : 0.0;
          if (name.find("up_proj") != std::string::npos) return row == col ? 1.0 / 64 : 0.0;
          return row == col ? 1.0 : 0.0;
        };
        c.input = [](int64_t token, int64_t col) { return col == 0 ? 1.0 : static_cast<double>(token * 4 + col % 4); };
        c.residual = 0;
        c.routing_weights = {0.5, 0.5};
        set_tokens(c, tokens);
        const ExpertResult got = run_group(c);
        for (int64_t i = 0; i < tokens * c.config.hidden_size; ++i)
          ASSERT_EQ(got.hidden[static_cast<size_t>(i)], c.input(i / c.config.hidden_size, i % c.config.hidden_size))
              << text(l) << " token " << i / c.config.hidden_size;
      }
    }
}

// Each of 2^4 patterns of ranks without tokens: no rank stands aside, none makes a token up.
TEST(ExpertParallel, RanksWithoutTokens) {
  for (int pattern = 0; pattern < 16; ++pattern) {
    SCOPED_TRACE(pattern);
    ExpertCase c = layout_case({4, 1, 6, {}}, ref_backend(), DType::kF64);
    set_tokens(c, 3 * __builtin_popcount(static_cast<unsigned>(pattern)));
    for (int r = 0; r < 4; ++r) c.tokens[static_cast<size_t>(r)] = pattern >> r & 1 ? 3 : 0;
    expect_equal(run_group(c), run_one_rank(c), everything(1e-12));
  }
}

TEST(ExpertParallel, AllTokensToOneExpert) {
  for (const int etp : {1, 2}) {
    ExpertCase c = layout_case({3, etp, 6, {}}, cpu_backend(), DType::kF32);
    c.config.moe_k = 1;
    set_tokens(c, 40);
    c.choices.assign(40, 5);
    const ExpertResult one = run_one_rank(c), got = run_group(c);
    const double room = etp == 1 ? 0 : 3 * 0x1p-22;
    expect_equal(got, one, {room, 3 * 0x1p-22, room, room, 40 * 0x1p-23});
    for (const auto& [name, gradient] : got.gradients)
      EXPECT_EQ(largest(gradient) == 0,
                name.find("experts.5.") == std::string::npos && name.find("shared") == std::string::npos)
          << name;
  }
}

// Dropped choices stay at home and count as nothing.
TEST(ExpertParallel, DroppedChoicesDoNotTravel) {
  for (const Layout& l : kLayouts) {
    SCOPED_TRACE(text(l));
    ExpertCase c = layout_case(l, ref_backend(), DType::kF64);
    c.may_drop = true;
    set_tokens(c, 31);
    for (size_t i = 0; i < c.choices.size(); ++i)
      if (i % 3 == 0 || i / 2 == 5) c.choices[i] = static_cast<int32_t>(l.experts);
    expect_equal(run_group(c), run_one_rank(c), everything(1e-12));
    c.choices.assign(c.choices.size(), static_cast<int32_t>(l.experts));  // all of them
    const ExpertResult got = run_group(c);
    expect_equal(got, run_one_rank(c), everything(1e-12));
    if (l.ep * l.etp > 1) {
      int64_t counts = 0;  // what rank 0 sends: only how many rows it has for the others' experts, which is none
      const ExpertPlaces places = expert_places(c.config, {.etp = l.etp, .ep = l.ep, .rank_of_expert = l.places});
      for (int r = 1; r < places.ranks(); ++r) counts += places.count(r / l.etp) * 4;
      EXPECT_EQ(got.traffic.all_to_all, counts);
    }
  }
}

// Recompute sends the rows again but asks nobody how many there are: the plan is kept.
TEST(ExpertParallel, RecomputeReplaysThePlan) {
  for (const Layout& l : {Layout{3, 1, 7, {}}, Layout{2, 2, 5, {1, 0, 1, 0, 0}}}) {
    ExpertCase c = layout_case(l, cpu_backend(), DType::kF32);
    set_tokens(c, 33);
    const ExpertResult kept = run_group(c);
    c.recompute = true;
    const ExpertResult again = run_group(c);
    expect_equal(again, kept, {});
    EXPECT_EQ(kept.traffic.operations, 1 + 3 + 3);
    EXPECT_EQ(again.traffic.operations, 1 + 3 + 3 + 3);
  }
}

// All memory is poisoned before the first step and whenever it is given back: a value that nobody wrote would be NaN.
TEST(ExpertParallel, StepsRepeatInUsedMemoryAndAllocateNone) {
  ExpertCase c = layout_case({2, 2, 5, {1, 0, 1, 0, 0}}, cpu_backend(), DType::kBF16);
  set_tokens(c, 26);
  c.recompute = true;
  const ExpertResult once = run_group(c);
  c.steps = 3;
  AllocationGuard::reset();
  expect_equal(run_group(c), once, {});
  EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
}

TEST(ExpertParallel, DelaysChangeNoBit) {
  ExpertCase c = layout_case({2, 2, 5, {1, 0, 1, 0, 0}}, cpu_backend(), DType::kBF16);
  set_tokens(c, 26);
  c.steps = 2;
  const ExpertResult wanted = run_group(c);
  for (uint64_t seed = 1; seed <= 4; ++seed) expect_equal(run_group(c, {.delay_seed = seed}), wanted, {});
}

// Rows are what travels, once for each slice of their expert, with their weights; nothing is padded.
TEST(ExpertParallel, BytesOnTheWire) {
  for (const Layout& l : {Layout{3, 1, 7, {}}, Layout{2, 2, 5, {}}}) {
    ExpertCase c = layout_case(l, cpu_backend(), DType::kBF16);
    set_tokens(c, 31);
    const ExpertPlaces places = expert_places(c.config, {.etp = l.etp, .ep = l.ep});
    int64_t out = 0, in = 0, counts = 0;  // of rank 0: rows to others, rows from others
    std::vector<int> owner(static_cast<size_t>(l.experts));
    for (int r = 0; r < l.ep; ++r)
      for (const int e : places.experts[static_cast<size_t>(r)]) owner[static_cast<size_t>(e)] = r;
    for (size_t i = 0; i < c.choices.size(); ++i) {
      const int to = owner[static_cast<size_t>(c.choices[i])];
      if (i < static_cast<size_t>(2 * c.tokens[0]))
        out += to == 0 ? l.etp - 1 : l.etp;
      else if (to == 0)
        ++in;
    }
    for (int r = 1; r < places.ranks(); ++r) counts += places.count(r / l.etp) * 4;
    const int64_t row = c.config.hidden_size * 2;
    EXPECT_EQ(run_group(c).traffic.all_to_all,
              counts + out * (row + 4) + in * row /* forward */ + out * row + in * (row + 4) /* backward */);
  }
}

// Planned memory holds the worst that can come; a usual load is predicted as half as much again as a balanced one.
TEST(ExpertParallel, MemoryIsPlannedForTheWorst) {
  ExpertCase c = layout_case({4, 1, 16, {}}, cpu_backend(), DType::kF32);
  set_tokens(c, 400);
  const ExpertResult random = run_group(c);
  for (size_t i = 0; i < c.choices.size(); ++i) c.choices[i] = static_cast<int32_t>(i % 2);
  const ExpertResult worst = run_group(c);
  EXPECT_LT(random.keep_bytes, random.usual_bytes);
  EXPECT_GT(worst.keep_bytes, worst.usual_bytes);
  EXPECT_LE(worst.keep_bytes, worst.most_bytes);
  EXPECT_GT(static_cast<double>(worst.keep_bytes), 0.9 * static_cast<double>(worst.most_bytes));
}

// In rounds the output has the bits of one round; weight gradients add up in another order.
TEST(ExpertParallel, RoundsChangeOnlyTheOrderOfWeightGradients) {
  for (const Layout& l : kLayouts)
    for (const int64_t most : {9, 1000}) {
      SCOPED_TRACE(text(l) + " rounds of " + std::to_string(most));
      ExpertCase c = layout_case(l, ref_backend(), DType::kF64);
      set_tokens(c, 37);
      const ExpertResult whole = run_group(c);
      c.most_rows = most;
      c.steps = l.experts == 5 ? 3 : 1;
      c.recompute = most == 9;
      AllocationGuard::reset();
      const ExpertResult got = run_group(c);
      EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
      const double other_order = most < 1000 ? 1e-14 : 0;
      expect_equal(got, whole, {.experts = other_order});
    }
}

TEST(ExpertParallel, RoundsInBf16) {
  for (const bool drops : {false, true}) {
    ExpertCase c = layout_case({3, 1, 7, {}}, cpu_backend(), DType::kBF16);
    c.may_drop = drops;
    set_tokens(c, 64);
    for (size_t i = 0; i < c.choices.size() && drops; i += 5) c.choices[i] = 7;
    const ExpertResult one = run_one_rank(c), whole = run_group(c);
    c.most_rows = 20;
    const ExpertResult got = run_group(c);
    // f32 sums of at most 64 rows.
    expect_equal(got, whole, {.experts = 64 * 0x1p-23});
    expect_equal(got, one, {.dnormed = 3 * 0x1p-8, .experts = 64 * 0x1p-23, .shared = 64 * 0x1p-23});
  }
}

// Everything to one rank: kept memory stays within the bound, and so does what is planned.
TEST(ExpertParallel, RoundsBoundMemory) {
  ExpertCase c = layout_case({4, 1, 16, {}}, cpu_backend(), DType::kF32);
  set_tokens(c, 400);
  for (size_t i = 0; i < c.choices.size(); ++i) c.choices[i] = static_cast<int32_t>(i % 2);
  const ExpertResult unbounded = run_group(c);
  c.most_rows = 100;
  const ExpertResult got = run_group(c);
  EXPECT_LE(got.keep_bytes, got.most_bytes);
  EXPECT_LT(3 * got.most_bytes, unbounded.most_bytes);
  expect_close(got.hidden, unbounded.hidden, 0, "hidden");
  // Counts, rounds; forward 8 rounds of rows, weights, rows back; backward: rows and weights again but for the first.
  EXPECT_EQ(got.traffic.operations, 2 + 8 * 3 + 7 * 2 + 8 * 3);
  for (const int64_t rank_rows : {1, 3}) {
    c.most_rows = rank_rows;
    EXPECT_THROW(run_group(c), Bug);
  }
}

// A rank that never sends its counts: the others say which layer, what they waited for, and whom.
TEST(ExpertParallel, MissingCountsAreNamed) {
  ExpertCase c = layout_case({3, 1, 6, {}}, cpu_backend(), DType::kF32);
  set_tokens(c, 12);
  const auto silent = [](int rank, int at) {
    if (rank == 2 && at == 0) std::this_thread::sleep_for(std::chrono::milliseconds(900));
  };
  expect_error(ErrorCode::kComm, {"dispatch counts of layer 0", "rank 2"},
               [&] { run_group(c, {.deadline_seconds = 0.2}, silent); });
}

// A rank that ends while rows are under way, in either direction, ends the others at once.
TEST(ExpertParallel, ADeadRankEndsTheOthers) {
  ExpertCase c = layout_case({4, 1, 6, {}}, cpu_backend(), DType::kF32);
  set_tokens(c, 24);
  // Segments: 0 dispatch_start, 1 shared, 2 dispatch_finish, 3 experts, 4 return, 5 combine.
  for (const int where : {1, 2, 4, 104, 102, 101, 100}) {
    SCOPED_TRACE(where);
    const auto start = std::chrono::steady_clock::now();
    const auto dies = [&](int rank, int at) {
      if (rank == 1 && at == where) throw Error(ErrorCode::kIo, "test", "the rank is gone", "none");
    };
    expect_error(ErrorCode::kIo, {"rank 1", "the rank is gone"}, [&] { run_group(c, {}, dies); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  }
}

}  // namespace
}  // namespace concerto::test
