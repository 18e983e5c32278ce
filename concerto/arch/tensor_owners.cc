#include "concerto/arch/tensor_owners.h"

#include <algorithm>
#include <unordered_map>

namespace concerto {

std::vector<std::vector<int>> ownership_units(const std::vector<TensorSpec>& specs, Replicas kind) {
  std::vector<std::vector<int>> units;
  std::unordered_map<int64_t, size_t> of_expert;  // (layer, expert)
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& s = specs[i];
    if (s.replicas != kind) continue;
    if (s.expert >= 0) {
      const auto [at, fresh] = of_expert.try_emplace((static_cast<int64_t>(s.layer) << 32) + s.expert, units.size());
      if (!fresh) {
        units[at->second].push_back(static_cast<int>(i));
        continue;
      }
    }
    units.push_back({static_cast<int>(i)});
  }
  return units;
}

std::vector<int> tensor_owners(const std::vector<TensorSpec>& specs,
                               const std::array<int, kReplicaKinds.size()>& owners) {
  std::vector<int> by_spec(specs.size(), 0);
  for (const Replicas kind : kReplicaKinds) {
    const std::vector<std::vector<int>> units = ownership_units(specs, kind);
    const int64_t ranks = owners[static_cast<size_t>(kind)];
    const auto size_of = [&](const std::vector<int>& unit) {
      int64_t n = 0;
      for (const int i : unit) n += specs[static_cast<size_t>(i)].shape.elements();
      return n;
    };
    int64_t total = 0, before = 0;
    for (const auto& unit : units) total += size_of(unit);
    for (const auto& unit : units) {
      const int64_t size = size_of(unit);
      const int64_t owner = total > 0 ? (2 * before + size) * ranks / (2 * total) : 0;
      for (const int i : unit) by_spec[static_cast<size_t>(i)] = static_cast<int>(std::min(owner, ranks - 1));
      before += size;
    }
  }
  return by_spec;
}

}  // namespace concerto
