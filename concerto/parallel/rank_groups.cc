#include "concerto/parallel/rank_groups.h"

#include "concerto/base/error.h"

namespace concerto {
namespace {

std::unique_ptr<Communicator> made(Communicator& world, int color, int members, const char* name) {
  auto group = world.split(color, world.rank(), name);
  if (members == 1) return nullptr;
  CHECK(!group || group->size() == members, "group {} has {} members, not {}", name, group ? group->size() : 0,
        members);
  return group;
}

}  // namespace

int kv_sharers(const ModelConfig& config, int tp) {
  return config.num_key_value_heads < tp ? tp / static_cast<int>(config.num_key_value_heads) : 1;
}

RankGroups::RankGroups(Communicator& world, const MeshSizes& s, int kv_sharers)
    : world_(world), mesh_(s), place_(mesh_.place(world.rank())), kv_sharers_(kv_sharers) {
  CHECK(world.size() == s.world(), "{} ranks in a mesh of {}", world.size(), s.world());
  const int me = world.rank();
  const auto group = [&](MeshGroup kind, int members, const char* name) {
    return made(world, mesh_.color(me, kind), members, name);
  };
  tp_ = group(MeshGroup::kTp, s.tp, "tp");
  dp_ = group(MeshGroup::kDp, s.dp, "dp");
  pp_ = group(MeshGroup::kPp, s.pp, "pp");
  stage_ = group(MeshGroup::kStage, s.stage(), "stage");
  dispatch_ = group(MeshGroup::kDispatch, s.ep * s.etp, "ep");
  edp_ = group(MeshGroup::kEdp, s.edp(), "edp");
  // One group a stage and set of sharers: all data ranks of tp ranks [i * sharers, (i + 1) * sharers).
  kv_ = made(world, place_.pp * s.tp + place_.tp / kv_sharers, s.dp * kv_sharers, "kv");
  const bool at_an_end = place_.pp == 0 || place_.pp == s.pp - 1;
  embedding_ = made(world, at_an_end ? place_.tp : -1, s.pp > 1 ? 2 * s.dp : s.dp, "embedding");
}

Communicator* RankGroups::replicas(Replicas kind) const {
  switch (kind) {
    case Replicas::kDp:
      return dp_.get();
    case Replicas::kKv:
      return kv_.get();
    case Replicas::kStage:
      return stage_.get();
    case Replicas::kEdp:
      return edp_.get();
    case Replicas::kEmbedding:
      return embedding_.get();
  }
  return nullptr;
}

int RankGroups::owners(Replicas kind) const {
  const Communicator* group = replicas(kind);
  if (!group) return 1;
  return kind == Replicas::kEmbedding && mesh_.sizes().pp > 1 ? group->size() / 2 : group->size();
}

}  // namespace concerto
