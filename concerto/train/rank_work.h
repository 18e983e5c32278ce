// What the formulas of arch/layout_cost.h ask about a rank, from the settings of a run.
#pragma once

#include "concerto/arch/layout_cost.h"
#include "concerto/config/run_config.h"
#include "concerto/schedule/pipeline.h"
#include "concerto/topology/mesh.h"

namespace concerto {

// Micro-batches are full ones of training.seq_length tokens a row, and tokens are spread evenly over the experts: who
// knows better sets `micro_batches`, `sent_rows` and `received_rows`. `packs`: whether the backend packs weights.
RankWork rank_work(const RunConfig& config, const MeshSizes& sizes, const MeshPlace& place,
                   const PipelineSchedule& schedule, bool packs = false);

}  // namespace concerto
