#include "concerto/optim/gradient_sync.h"

#include <algorithm>
#include <unordered_map>

namespace concerto {
namespace {

constexpr std::array kKindsOfReplicas = {Replicas::kDp, Replicas::kKv, Replicas::kStage, Replicas::kEdp,
                                         Replicas::kEmbedding};

// What is owned as one: a tensor, or all of an expert.
std::vector<std::vector<int>> units_of(const std::vector<TensorSpec>& specs, Replicas kind) {
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

// Tensors side by side that go the same way are one piece.
void add_piece(std::vector<OwnedPiece>& pieces, View view, int owner) {
  View flat = view;
  flat.shape = Shape{view.elements()};
  flat.row_stride = view.elements();
  if (!pieces.empty() && pieces.back().owner == owner) {
    View& last = pieces.back().data;
    if (static_cast<char*>(last.data) + last.bytes() == flat.data) {
      last.shape = Shape{last.elements() + flat.elements()};
      last.row_stride = last.elements();
      return;
    }
  }
  pieces.push_back({flat, owner});
}

}  // namespace

std::vector<int> tensor_owners(const std::vector<TensorSpec>& specs, const RankGroups& groups) {
  std::vector<int> owners(specs.size(), 0);
  for (const Replicas kind : kKindsOfReplicas) {
    const std::vector<std::vector<int>> units = units_of(specs, kind);
    const int64_t ranks = groups.owners(kind);
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
      for (const int i : unit) owners[static_cast<size_t>(i)] = static_cast<int>(std::min(owner, ranks - 1));
      before += size;
    }
  }
  return owners;
}

std::vector<uint8_t> owned_tensors(const std::vector<TensorSpec>& specs, const RankGroups& groups) {
  const std::vector<int> owners = tensor_owners(specs, groups);
  std::vector<uint8_t> owned(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const Communicator* group = groups.replicas(specs[i].replicas);
    owned[i] = !group || owners[i] == group->rank();
  }
  return owned;
}

GradientSync::GradientSync(ParameterStore& store, const RankGroups& groups, const std::vector<TensorSpec>& model_specs,
                           int zero, Wire wire)
    : store_(store),
      groups_(groups),
      zero_(zero),
      tensors_(static_cast<int>(model_specs.size())),
      wire_(wire),
      owned_(owned_tensors(store.specs(), groups)) {
  const std::vector<int> owners = tensor_owners(store.specs(), groups);
  std::unordered_map<std::string, int> place;
  for (int i = 0; i < tensors_; ++i) place[model_specs[static_cast<size_t>(i)].name] = i;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    places_.push_back(place.at(s.name));
    if (!s.trainable) continue;
    const auto kind = static_cast<size_t>(s.replicas);
    add_piece(gradients_[kind], store.gradient(i), owners[static_cast<size_t>(i)]);
    add_piece(weights_[kind], store.master(i), owners[static_cast<size_t>(i)]);
  }
}

void GradientSync::reduce_gradients() {
  const CommScope scope("sum gradients");
  for (const Replicas kind : kKindsOfReplicas)
    if (Communicator* group = groups_.replicas(kind); group && !gradients_[static_cast<size_t>(kind)].empty())
      group->reduce_to_owners(gradients_[static_cast<size_t>(kind)], wire_);
}

void GradientSync::share_gradients() {
  if (zero_ > 0) return;
  const CommScope scope("share gradients");
  for (const Replicas kind : kKindsOfReplicas)
    if (Communicator* group = groups_.replicas(kind); group && !gradients_[static_cast<size_t>(kind)].empty())
      group->broadcast_from_owners(gradients_[static_cast<size_t>(kind)]);
}

void GradientSync::share_weights() {
  if (zero_ == 0) return;
  const CommScope scope("share weights");
  for (const Replicas kind : kKindsOfReplicas)
    if (Communicator* group = groups_.replicas(kind); group && !weights_[static_cast<size_t>(kind)].empty())
      group->broadcast_from_owners(weights_[static_cast<size_t>(kind)]);
  for (int i = 0; i < store_.size(); ++i)
    if (!owns(i)) store_.refresh_copy(i);
}

void GradientSync::sum(std::span<double> by_tensor) const {
  const CommScope scope("gradient norm");
  groups_.world().all_reduce(View(by_tensor.data(), {static_cast<int64_t>(by_tensor.size())}, DType::kF64));
}

}  // namespace concerto
