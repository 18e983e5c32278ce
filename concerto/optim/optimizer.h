// One optimizer step over the whole store: global norm, clipping folded into the update, AdamW or LAMB. Parameters
// without a gradient (the correction bias, a frozen router) are never touched; an expert that no token chose has a zero
// gradient and is updated like any other.
#pragma once

#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/ops/context.h"
#include "concerto/ops/optimizer_step.h"
#include "concerto/optim/gradient_sync.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

class Optimizer {
 public:
  // `seed`: of the draws that round bf16 moments; nothing else draws. `sync`: with other ranks, or null.
  Optimizer(ParameterStore& store, const OptimizerSection& settings, uint64_t seed = 0, GradientSync* sync = nullptr);

  // sqrt of the sum over the model's parameters, in their order, of |gradient|^2, each summed by itself first; f64.
  double gradient_norm(const Context& ctx) const;
  // Step `step` (from 1) with learning rate `lr`. Gradients count as multiplied by min(1, clip_norm / (norm + 1e-6)).
  void step(const Context& ctx, int64_t step, double lr, double norm) const;
  // Make the memory of weights, copies and moments, and of gradients, where step() uses it. Contents are lost.
  void first_touch_state(ThreadPool& pool) const;
  void first_touch_gradients(ThreadPool& pool) const;
  // What both take of ctx.scratch at most, from a dry run of them.
  int64_t scratch_bytes(Context ctx) const;

 private:
  // Tensors that lie side by side and take the same settings are one piece for AdamW; LAMB's trust ratio is a tensor's
  // own.
  struct Piece {
    int first = 0;  // spec
    View w, m, v, grad, copy;
    PackedWeight packed;
    bool decays = false, router = false;
    std::vector<uint64_t> streams = {};  // of its tensors: what bf16 moments are rounded with
    std::vector<int64_t> ends = {};
  };
  void add_piece(int first, int last);
  bool is_trained(int i) const;
  AdamStep step_of(const Piece& piece, int64_t step, double lr, double clip) const;
  void lamb(const Context& ctx, int64_t step, double lr, double clip) const;

  ParameterStore& store_;
  OptimizerSection settings_;
  uint64_t seed_;
  GradientSync* sync_;
  std::vector<Piece> pieces_;
  mutable std::vector<double> squares_, lamb_norms_;  // [tensors of the model], [2 x tensors]
  mutable std::vector<RoundingKey> keys_;             // of a piece's tensors at this step; none unless moments are bf16
};

}  // namespace concerto
