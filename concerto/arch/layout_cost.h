// What a layout costs one rank: bytes that it holds, FLOPs of the products that it computes and bytes that it sends in a
// step, by formulas alone. The planner compares layouts with these, and the oracle test holds every executed step to
// them. Notation: T tokens of a micro-batch, T_r those of a tensor parallel rank (part_of), H hidden size, c bytes of the
// compute type, s of the stat type.
#pragma once

#include <cstdint>
#include <vector>

#include "concerto/arch/shard.h"
#include "concerto/base/dtype.h"
#include "concerto/config/run_config.h"

namespace concerto {

// A rank, where it stands, and what it does in a step.
struct RankWork {
  ShardPlan plan;
  int dp = 1, dp_rank = 0;
  int pp = 1, pp_rank = 0;
  bool v_shape = false;  // the last pipeline rank holds the two stages at the turn

  DType compute = DType::kBF16, moments = DType::kF32;
  bool packs = false;  // weights of products lie packed for forward and again for backward, in place of a plain copy
  int zero = 1;
  bool bf16_gradients = false;  // parallel.grad_wire
  Recompute recompute = Recompute::kNone;
  bool global_routing = false;  // training.routing_unit: global

  std::vector<int64_t> micro_batches;  // tokens of each that this rank's data rank plays, empty ones too
  // Rows that travel to experts in a step, over all MoE layers of the rank: from its own tokens, by expert [E]; and to its
  // experts, by sender [ep * etp], itself included. Empty: loads are even and all senders have as many tokens.
  std::vector<double> sent_rows, received_rows;
  // Of these, those of later dispatch rounds (parallel.dispatch_buffer_mib): copies sent to other ranks, rows received.
  double later_sent = 0, later_received = 0;
  // Routing units of a micro-batch whose balance is pooled over layers, so that it travels from stage to stage; 0: none.
  int64_t pooled_units = 0;
  bool trains_pool = false;  // whether gradients of it travel back
};

struct LayoutCost {
  // ---- Bytes held. Each run of fused tensors begins at a multiple of 64 elements, as in the parameter store.
  int64_t weight_bytes = 0;  // masters: s a element of the rank's tensors (tensor_specs of its plan)
  int64_t copy_bytes = 0;    // c a element of a matrix that is not kept in f32, where c < s; twice that packed
  int64_t gradient_bytes =
      0;  // s a element; zero 2: of the tensors it owns (arch/tensor_owners.h), of the greatest layer,
          // and of what is outside of layers
  int64_t moment_bytes = 0;  // 2 moments a element; zero 1 and 2: of the tensors it owns

  // ---- FLOPs of matrix products, forward and backward: 2 a weight and row for each of forward, gradient of the input and
  // gradient of the weight; one more where forward runs again (recompute: MLP and MoE halves; full: attention too).
  double linear_flops = 0;  // q, k, v, o, dense and shared MLPs: T rows of the rank's slice; MTP projection: T_r rows
  double router_flops = 0;  // T_r rows
  double expert_flops = 0;  // received rows; those of later rounds run forward once more in backward
  double head_flops = 0;    // T rows of the slice of the vocabulary; each MTP depth once more
  double product_flops() const { return linear_flops + router_flops + expert_flops + head_flops; }

  // ---- Bytes sent to other ranks in a step, as Communicator::Traffic counts them.
  // Tensor parallel. G = T_r H c (tp - 1) a gather of rows, S = (T - T_r) H s a sum of shares.
  //   attention, MLP, shared experts: forward G + S (again when recomputed), backward 2 G + S
  //   embedding, MTP's too: forward S, backward G; head: G + S and 16 T (tp - 1) for the loss
  //   a MoE layer: T_r E s (tp - 1) for the logits
  int64_t tp_gather_bytes = 0, tp_reduce_scatter_bytes = 0;
  // Expert parallel. A row goes to each etp rank of its expert's ep rank, and comes back from each.
  //   to the experts: H c + s forward (again when recomputed), H c backward
  //   back: H c forward (again when recomputed), H c + s backward
  //   rows of later rounds: H c + s to the experts once more in backward
  //   counts: 4 for each expert of each other rank, layer and micro-batch
  int64_t dispatch_bytes = 0;  // of all_to_all, both ways
  // Pipeline: T_r H c a micro-batch, to the next stage forward and to the one before backward, unless it is on the same rank;
  // with a pooled balance 16 E a routing unit forward and, if it is trained, s E backward.
  int64_t pipeline_bytes = 0;
  // Gradients of trainable tensors to their owners: 2 or s a element that it does not own (zero 2: in every micro-batch).
  // From owners, weights (zero 0:
  // gradients): s a element that it owns, to each other rank of the tensor's group.
  int64_t reduce_to_owners_bytes = 0, broadcast_bytes = 0;
  // Left out: sums of norms, losses and statistics (all_reduce), which grow with neither tokens nor parameters.
};

LayoutCost layout_cost(const ModelConfig& config, const RankWork& work);

}  // namespace concerto
