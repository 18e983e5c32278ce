// From the settings of `parallel` and the number of ranks to the meshes of a job. Data parallel ranks are what is left:
// dp = ranks / (tp * pp).
#pragma once

#include <string>
#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/topology/mesh.h"

namespace concerto {

// Everything that keeps the layout from working on so many ranks, one sentence each ("parallel.tp: ..."): the rules of the
// config that concern the plan, and those that need the number of ranks. Empty: it works.
std::vector<std::string> layout_faults(const RunConfig& config, int ranks);

// Layouts that do work on so many ranks, the nearest to the asked one first: sizes by the product of their ratios, then
// the smaller pp and tp. What need not change does not.
std::vector<ParallelSection> nearest_layouts(const RunConfig& config, int ranks, size_t most = 3);

// "tp: 2, pp: 2, ep: 4 (dp 2)": the sizes, and what of the rest differs from `asked`.
std::string layout_text(const ParallelSection& layout, const ParallelSection& asked, int ranks);

// Error(kConfig) with every fault, the nearest layouts, and the nearest numbers of ranks on which this one works.
MeshSizes resolve_layout(const RunConfig& config, int ranks);

}  // namespace concerto
