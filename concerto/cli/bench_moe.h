// `concerto bench moe`: one MoE layer (norm, router, dispatch, experts, combine; forward and backward) over row counts
// and skews, its grouped products beside the best product rate of this machine in the same run.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "concerto/cli/moe_load.h"
#include "concerto/ops/context.h"

namespace CLI {
class App;
}

namespace concerto {

class ThreadPool;

struct MoeCase {
  int64_t tokens = 8192, experts = 64, top_k = 6, hidden = 512, width = 256;
  Skew skew = Skew::kEven;
  DType dtype = DType::kBF16;
};

// Seconds are those of the repetition that was fastest.
struct MoeFigures {
  double seconds = 0;  // forward and backward
  OpProfile profile;   // of that repetition
  double product_flops = 0, product_seconds = 0;
  double max_over_mean = 0;  // rows of the fullest expert over the mean, as the router counted them
};

// Error(kUsage) where the shape cannot be: top_k > experts, or hidden < experts (each expert answers to one of the
// first elements of a hidden row, so that the load is exact).
void check_moe_case(const MoeCase& c);

// Repeats for `seconds`, three times at least.
MoeFigures run_moe_case(const MoeCase& c, const Backend& backend, ThreadPool& pool, double seconds, uint64_t seed);

void add_bench_moe(CLI::App& bench);

}  // namespace concerto
