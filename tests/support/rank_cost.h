// What a rank of a layout holds, computes and sends in a step, measured, and the same by the formulas of
// arch/layout_cost.h.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "concerto/arch/layout_cost.h"
#include "concerto/data/micro_batch.h"
#include "concerto/ops/backend.h"
#include "concerto/parallel/rank_groups.h"
#include "concerto/schedule/pipeline.h"

namespace concerto {
class ParameterStore;
}

namespace concerto::test {

// By MoE layer: the experts of each token [tokens of the step * k], in the order of the step; -1: dropped.
using Choices = std::map<int, std::vector<int>>;

struct RankCost {
  ShardPlan plan;
  MeshPlace place;
  LayoutCost measured;  // FLOPs of all products in linear_flops
};

// `backend` (whose kernels run on the calling thread) with products that count their FLOPs for the calling thread.
const Backend& counting_backend(const Backend& backend);
double counted_flops();  // of this thread so far

// Bytes of the store by kind.
void measure_store(const ParameterStore& store, LayoutCost& cost);
// Bytes that this rank has sent so far.
void measure_traffic(const RankGroups& groups, LayoutCost& cost);

// By formula. `step`: the micro-batches of all data ranks. `choices`: empty where routers may drop none of the rows that
// are counted: loads then count as even.
LayoutCost expected_cost(const RunConfig& config, const MeshSizes& sizes, const RankCost& rank,
                         const PipelineSchedule& schedule, std::span<const MicroBatch> step, const Choices& choices);

}  // namespace concerto::test
