// `concerto config show --layout`: which rank holds and does what.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "concerto/config/run_config.h"
#include "concerto/topology/mesh.h"

namespace concerto {

// The smallest number of ranks that the sizes of a layout take: tp x pp x the fewest data ranks over which experts fold.
int64_t least_ranks(const ParallelSection& parallel);

// A table of stages and one of ranks, in human units; the same as data.
std::string layout_report(const RunConfig& config, const MeshSizes& sizes);
nlohmann::json layout_json(const RunConfig& config, const MeshSizes& sizes);
std::string layout_svg(const RunConfig& config, const MeshSizes& sizes);

}  // namespace concerto
