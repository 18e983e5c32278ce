// A picture of the two meshes of a job: for each pipeline stage the attention mesh (data parallel ranks downwards, tensor
// parallel ones across) beside the expert mesh, the same ranks folded (edp downwards, ep x etp across).
#pragma once

#include <string>
#include <vector>

#include "concerto/topology/mesh.h"

namespace concerto {

// `stage_titles`: what each pipeline rank holds, written above its meshes; `pictured_stages`: at most so many are drawn,
// the rest is named.
std::string mesh_svg(const Mesh& mesh, const std::vector<std::string>& stage_titles, int pictured_stages = 64);

}  // namespace concerto
