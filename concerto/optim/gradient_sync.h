// Gradients and weights between the ranks that hold copies of them. ZeRO's unit is a whole tensor's slice or a whole
// expert: each belongs to one rank of those that hold it (Replicas).
//   zero 0   gradients are summed for everybody, everybody updates
//   zero 1   gradients are summed at the owner, who alone has moments and updates; weights are sent around
//   zero 2   the same, and gradients of other ranks' tensors live for one layer of one micro-batch (those
//            outside of layers for one micro-batch)
// With zero 0 and 1 a layer's sum starts when backward has made the last of its gradients, and is under way while
// backward goes on; with zero 2 it is awaited there, in every micro-batch.
// Sums are made in rank order, so all layouts of a group give the same bits on every transport.
#pragma once

#include <array>
#include <map>
#include <span>
#include <vector>

#include "concerto/arch/tensor_owners.h"
#include "concerto/parallel/rank_groups.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

// By spec: the rank in the tensor's group of replicas that owns it (arch/tensor_owners.h).
std::vector<int> tensor_owners(const std::vector<TensorSpec>& specs, const RankGroups& groups);
// By spec: whether this rank owns it.
std::vector<uint8_t> owned_tensors(const std::vector<TensorSpec>& specs, const RankGroups& groups);

class GradientSync {
 public:
  // `model_specs`: of the whole model, whose order sums follow.
  GradientSync(ParameterStore& store, const RankGroups& groups, const std::vector<TensorSpec>& model_specs, int zero,
               Wire wire);

  bool owns(int i) const { return owned_[static_cast<size_t>(i)] != 0; }
  int place(int i) const { return places_[static_cast<size_t>(i)]; }  // among the model's tensors
  int tensors() const { return tensors_; }                            // of the model
  // Backward of a micro-batch has made all of a layer's weight gradients (kOutsideLayers: of all that is outside of
  // layers). `last`: nothing of the step adds to them any more. In the same order on all ranks that hold the layer.
  void layer_done(const Context& ctx, int layer, bool last);
  // After backward: the sums are at the owners.
  void reduce_gradients();
  // zero 0: the sums, to everybody. May follow what owners add to them.
  void share_gradients();
  // After the update, zero 1: the owners' weights, to everybody; compute copies follow.
  void share_weights();
  // Sums by tensor of the model, each element given by one rank: in all ranks. Slices of a tensor add up in rank order.
  void sum(std::span<double> by_tensor) const;

 private:
  ParameterStore& store_;
  const RankGroups& groups_;
  int zero_, tensors_;
  Wire wire_;
  std::vector<uint8_t> owned_;
  std::vector<int> places_;
  using Pieces = std::array<std::vector<OwnedPiece>, kReplicaKinds.size()>;
  struct Layer {
    Pieces gradients;
    bool started = false;  // in this step
  };
  void start(Layer& layer);
  void finish();

  std::map<int, Layer> layers_;  // by number, kOutsideLayers too
  Pieces weights_;
  std::vector<CommTicket> under_way_;
};

}  // namespace concerto
