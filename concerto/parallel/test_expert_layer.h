// A MoE layer from dispatch to combine, on one rank or on a group: what the tests of expert parallelism run and compare.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/ops/backend.h"
#include "concerto/parallel/expert_segments.h"

namespace concerto::test {

struct ExpertCase {
  const Backend* backend = nullptr;
  DType type = DType::kF32;
  ModelConfig config;
  int ep = 1, etp = 1;
  std::vector<int> rank_of_expert;
  std::vector<int64_t> tokens;   // of each rank of the group, in order
  std::vector<int32_t> choices;  // [T, K] expert ids of all tokens; E: dropped
  bool may_drop = false;
  int64_t most_rows = 0;  // of a round
  bool recompute = false;
  int steps = 1;  // all the same: only left-over memory could make a difference
  // Changes what tensors hold: name, elements by (row, column) of the whole tensor.
  std::function<double(const std::string&, int64_t, int64_t)> weight;
  std::function<double(int64_t, int64_t)> input;  // normed by (token, column)
  double residual = 1;                            // scale of `hidden`
  std::vector<double> routing_weights;            // [K] of every token; empty: random

  int64_t all_tokens() const;
  int ranks() const { return ep * etp; }
};

// A small layer: hidden 16, experts 12 wide, two choices a token.
ExpertCase small_case(const Backend& backend, DType type, int64_t experts, int64_t shared = 1);
// `tokens` cut evenly, random choices (different ones of a token).
void set_tokens(ExpertCase& c, int64_t tokens, uint64_t seed = 1);

struct ExpertResult {
  std::vector<double> hidden, dnormed;                      // [T, H]
  std::vector<double> dweights;                             // [T, K]; 0 where dropped
  std::map<std::string, std::vector<double>> gradients;     // whole tensors, summed over the ranks that hold them
  int64_t keep_bytes = 0, most_bytes = 0, usual_bytes = 0;  // of rank 0: Saved::keep + forward: used; planned
  Communicator::Traffic traffic;                            // of rank 0, of the last step
};

// The layer on one rank, with the segments of layers/moe_segments.h.
ExpertResult run_one_rank(const ExpertCase& c);
// What a rank of the group runs, steps after the second under an AllocationGuard; results of all ranks are put together in `whole`, which all share. `around`: called
// between segments of the forward (number of the next segment) and backward (the same, + 100).
using Between = std::function<void(int rank, int at)>;
void run_rank(const ExpertCase& c, Communicator& comm, ExpertResult& whole, const Between& between = {});

}  // namespace concerto::test
