// Who of the ranks that hold the same slice of a tensor owns it: sums its gradient, and with ZeRO updates it alone. The
// unit is a whole slice, or all of an expert.
#pragma once

#include <array>
#include <vector>

#include "concerto/arch/model_spec.h"

namespace concerto {

constexpr std::array kReplicaKinds = {Replicas::kDp, Replicas::kKv, Replicas::kStage, Replicas::kEdp,
                                      Replicas::kEmbedding};

// The specs of each unit of a kind, in the order of their first.
std::vector<std::vector<int>> ownership_units(const std::vector<TensorSpec>& specs, Replicas kind);

// By spec: the rank that owns it, in its group of replicas of which the first `owners[kind]` ranks may own something.
// Contiguous blocks of units of about equal size: a unit belongs to the rank in whose share its middle lies.
std::vector<int> tensor_owners(const std::vector<TensorSpec>& specs,
                               const std::array<int, kReplicaKinds.size()>& owners);

}  // namespace concerto
