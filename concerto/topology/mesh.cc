#include "concerto/topology/mesh.h"

#include "concerto/base/error.h"

namespace concerto {

Mesh::Mesh(const MeshSizes& sizes) : sizes_(sizes) {
  CHECK(sizes.tp > 0 && sizes.dp > 0 && sizes.pp > 0 && sizes.ep > 0 && sizes.etp > 0,
        "a mesh of tp {}, dp {}, pp {}, ep {}, etp {}", sizes.tp, sizes.dp, sizes.pp, sizes.ep, sizes.etp);
  CHECK(sizes.stage() % (sizes.ep * sizes.etp) == 0, "ep {} x etp {} does not divide tp {} x dp {}", sizes.ep,
        sizes.etp, sizes.tp, sizes.dp);
}

MeshPlace Mesh::place(int rank) const {
  CHECK(rank >= 0 && rank < sizes_.world(), "rank {} of {}", rank, sizes_.world());
  const int inside = rank % sizes_.stage();
  return {.tp = inside % sizes_.tp,
          .dp = inside / sizes_.tp,
          .pp = rank / sizes_.stage(),
          .etp = inside % sizes_.etp,
          .ep = inside / sizes_.etp % sizes_.ep,
          .edp = inside / (sizes_.etp * sizes_.ep)};
}

int Mesh::expert_rank(int pp, int edp, int ep, int etp) const {
  return pp * sizes_.stage() + (edp * sizes_.ep + ep) * sizes_.etp + etp;
}

int Mesh::color(int rank, MeshGroup group) const {
  const MeshPlace at = place(rank);
  switch (group) {
    case MeshGroup::kWorld:
      return 0;
    case MeshGroup::kTp:
      return at.pp * sizes_.dp + at.dp;
    case MeshGroup::kDp:
      return at.pp * sizes_.tp + at.tp;
    case MeshGroup::kPp:
      return at.dp * sizes_.tp + at.tp;
    case MeshGroup::kStage:
      return at.pp;
    case MeshGroup::kDispatch:
      return at.pp * sizes_.edp() + at.edp;
    case MeshGroup::kEtp:
      return (at.pp * sizes_.edp() + at.edp) * sizes_.ep + at.ep;
    case MeshGroup::kEdp:
      return (at.pp * sizes_.ep + at.ep) * sizes_.etp + at.etp;
  }
  CHECK(false, "no such group");
  return 0;
}

std::vector<int> Mesh::members(int rank, MeshGroup group) const {
  std::vector<int> found;
  const int wanted = color(rank, group);
  for (int r = 0; r < sizes_.world(); ++r)
    if (color(r, group) == wanted) found.push_back(r);
  return found;
}

std::string mesh_text(const MeshSizes& s) {
  const auto axes = [](std::initializer_list<std::pair<const char*, int>> sizes) {
    std::string text;
    for (const auto& [name, size] : sizes)
      if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, size);
    return text;
  };
  const std::string all = axes({{"tp", s.tp}, {"pp", s.pp}, {"dp", s.dp}}),
                    experts = axes({{"ep", s.ep}, {"etp", s.etp}});
  return fmt::format("{}{}{}{}{}", s.world(), all.empty() ? "" : ": ", all, experts.empty() ? "" : "; experts ",
                     experts);
}

std::string Mesh::describe(int rank) const {
  const MeshPlace at = place(rank);
  std::string axes;
  const auto add = [&](const char* name, int size, int value) {
    if (size > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : ", ", name, value);
  };
  add("pp", sizes_.pp, at.pp);
  add("dp", sizes_.dp, at.dp);
  add("tp", sizes_.tp, at.tp);
  add("ep", sizes_.ep, at.ep);
  add("etp", sizes_.etp, at.etp);
  return axes.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, axes);
}

}  // namespace concerto
