#include "concerto/optim/gradient_sync.h"

#include <unordered_map>

namespace concerto {
namespace {

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
  std::array<int, kReplicaKinds.size()> owners{};
  for (const Replicas kind : kReplicaKinds) owners[static_cast<size_t>(kind)] = groups.owners(kind);
  return tensor_owners(specs, owners);
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
    add_piece(layers_[store.layer_of(i)].gradients[kind], store.working_gradient(i), owners[static_cast<size_t>(i)]);
    add_piece(weights_[kind], store.master(i), owners[static_cast<size_t>(i)]);
  }
  under_way_.reserve(layers_.size() * kReplicaKinds.size());
}

void GradientSync::start(Layer& layer) {
  layer.started = true;
  for (const Replicas kind : kReplicaKinds) {
    const std::vector<OwnedPiece>& pieces = layer.gradients[static_cast<size_t>(kind)];
    if (Communicator* group = groups_.replicas(kind); group && !pieces.empty())
      under_way_.push_back(group->start_reduce_to_owners(pieces, wire_));
  }
}

void GradientSync::finish() {
  for (CommTicket& ticket : under_way_) ticket.wait();
  under_way_.clear();
}

void GradientSync::layer_done(const Context& ctx, int number, bool last) {
  const auto at = layers_.find(number);
  if (at == layers_.end()) return;
  const bool each = store_.gradients_of() == GradientsOf::kUpdated;
  if (!each && (!last || number == kOutsideLayers)) return;  // what two stages hold is summed when both have ended
  const CommScope scope("sum gradients", -1, number);
  store_.settle_layer(*ctx.pool, number);
  start(at->second);
  if (!each) return;
  finish();
  store_.add_layer(ctx, number);
}

void GradientSync::reduce_gradients() {
  const CommScope scope("sum gradients");
  const bool each = store_.gradients_of() == GradientsOf::kUpdated;
  for (auto& [number, layer] : layers_) {
    if (!layer.started && !each) start(layer);
    layer.started = false;
  }
  finish();
}

void GradientSync::share_gradients() {
  if (zero_ > 0) return;
  const CommScope scope("share gradients");
  for (const auto& [number, layer] : layers_)
    for (const Replicas kind : kReplicaKinds) {
      const std::vector<OwnedPiece>& pieces = layer.gradients[static_cast<size_t>(kind)];
      if (Communicator* group = groups_.replicas(kind); group && !pieces.empty()) group->broadcast_from_owners(pieces);
    }
}

void GradientSync::share_weights() {
  if (zero_ == 0) return;
  const CommScope scope("share weights");
  for (const Replicas kind : kReplicaKinds)
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
