// The groups that a rank of a parallel job belongs to, made before the first step from the world and the mesh.
#pragma once

#include <memory>
#include <vector>

#include "concerto/arch/shard.h"
#include "concerto/comm/communicator.h"
#include "concerto/topology/mesh.h"

namespace concerto {

class RankGroups {
 public:
  // All ranks of the world call it. `kv_sharers`: tp ranks that hold the same key/value heads (1: none do).
  RankGroups(Communicator& world, const MeshSizes& sizes, int kv_sharers = 1);

  const Mesh& mesh() const { return mesh_; }
  const MeshPlace& place() const { return place_; }
  Communicator& world() const { return world_; }
  // Null where the rank would be alone.
  Communicator* tp() const { return tp_.get(); }
  Communicator* dp() const { return dp_.get(); }
  Communicator* pp() const { return pp_.get(); }
  Communicator* dispatch() const { return dispatch_.get(); }  // ep * etp ranks
  // Those that hold the same slice of a tensor; null where the rank is alone, or (kEmbedding) holds none.
  Communicator* replicas(Replicas kind) const;
  // How many of them may own it: the embedding belongs to the first stage, whose ranks come first.
  int owners(Replicas kind) const;

 private:
  Communicator& world_;
  Mesh mesh_;
  MeshPlace place_;
  int kv_sharers_;
  std::unique_ptr<Communicator> tp_, dp_, pp_, stage_, dispatch_, edp_, kv_, embedding_;
};

// tp ranks that share a key/value head.
int kv_sharers(const ModelConfig& config, int tp);

}  // namespace concerto
