// Where a rank stands: arithmetic of the device meshes. Pure functions; no communication.
//
// World ranks are numbered with tp fastest, then dp, then pp, so that tensor parallel ranks are neighbours:
//   rank = (pp_rank * dp + dp_rank) * tp + tp_rank
// Inside a pipeline stage the same tp * dp ranks are folded a second time for the experts:
//   dp_rank * tp + tp_rank = (edp_rank * ep + ep_rank) * etp + etp_rank
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

struct MeshSizes {
  int tp = 1, dp = 1, pp = 1, ep = 1, etp = 1;
  int edp() const { return tp * dp / (ep * etp); }
  int stage() const { return tp * dp; }  // ranks of a pipeline stage
  int world() const { return tp * dp * pp; }
};

struct MeshPlace {
  int tp = 0, dp = 0, pp = 0;
  int etp = 0, ep = 0, edp = 0;
};

std::string mesh_text(const MeshSizes& sizes);  // "8: tp 2, pp 2, dp 2; experts ep 4"

// Which ranks form a group together.
enum class MeshGroup {
  kWorld,
  kTp,        // same pp, dp
  kDp,        // same pp, tp
  kPp,        // same dp, tp
  kStage,     // same pp
  kDispatch,  // same pp, edp: the ep * etp ranks that share all experts once
  kEtp,       // same pp, edp, ep
  kEdp,       // same pp, ep, etp: hold the same experts
};

class Mesh {
 public:
  explicit Mesh(const MeshSizes& sizes);  // Bug unless ep * etp divides tp * dp
  const MeshSizes& sizes() const { return sizes_; }
  MeshPlace place(int rank) const;
  int rank(int pp, int dp, int tp) const { return (pp * sizes_.dp + dp) * sizes_.tp + tp; }
  int expert_rank(int pp, int edp, int ep, int etp) const;
  // The members in ascending order of rank, and the number of the group among its kind (the color of a split).
  std::vector<int> members(int rank, MeshGroup group) const;
  int color(int rank, MeshGroup group) const;
  std::string describe(int rank) const;  // "rank 5 (pp 1, dp 0, tp 1, ep 1)": axes of size 1 are left out

 private:
  MeshSizes sizes_;
};

}  // namespace concerto
