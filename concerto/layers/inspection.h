// A MoE layer laid open: the seven parts of the reference's `gate_and_dispatch`, its `forward_experts` and
// `combine_expert_output` (3.5), made from the same ops as training but with padded buffers [E, C, H] that training
// never makes. For looking (`concerto inspect routing`) and for tests.
#pragma once

#include <optional>

#include "concerto/config/model_config.h"
#include "concerto/ops/backend.h"

namespace concerto {

struct GateSettings {
  int64_t top_k = 0;
  Gate gate = Gate::kTopK;
  Scoring scoring = Scoring::kSoftmax;
  int64_t groups = 1;
  bool sinkhorn = false;  // sinkhorn_2gate: acts in training, with kTop2 and a capacity
  double sinkhorn_temp = 0.03;
  FullExperts full = FullExperts::kUniform;
  std::optional<CapacityFactors> capacity;  // none: nothing is dropped, and C is the largest load
  bool at_least_one = false;  // a capacity of 0 is 1, as in training; else it is an error, as in the reference
  bool training = false;
  DropOrder order = DropOrder::kRankMajor;
  bool reverse = false;
  bool normalize = true;
  double norm_min = 1e-12;
  bool count_drops = true;  // dispatch_mask counts what an expert was asked to take (Paddle), or only what it took
  int32_t nowhere = -1;     // scatter_index of a dropped choice: -1 as the released PyTorch code, 0 as Paddle
};

GateSettings gate_settings(const ModelConfig& config, bool training);

// The seven, in the reference's order, and what they were made of. Owns its memory.
struct GateAndDispatch {
  View dispatched_input;  // [E, C, H] compute: rows of tokens, zero where nobody sits
  View combine_weights;   // [T, K] compute: normalised after drops, 0 where dropped
  View dispatch_mask;     // [E] i64: tokens per expert
  View scatter_index;     // [T, K] i32: e * C + slot
  View router_loss;       // [1] f32: zero, as in the reference at this point
  View gate_logits;       // [T, E] stat
  View gate_prob;         // [T, E] stat
  View expert_ids;        // [T, K] i32: as chosen, before drops
  View slots;             // [T, K] i32: -1: dropped (the top-2 gate's own mask is slots >= 0)
  int64_t capacity = 0;   // C
  Arena memory;
  Buffer dispatched_memory;
};
// The call's tokens are one routing unit. `bias`: [E] stat, or null. Error(kConfig) if C would be 0. `ctx.scratch` is
// not used.
GateAndDispatch gate_and_dispatch(const Context& ctx, const GateSettings& settings, View x, View w, View bias);

struct OwnedTensor {
  View view;
  Buffer memory;
};
// Every expert on its C rows: down(silu(gate x) * up x).
OwnedTensor forward_experts(const Context& ctx, View dispatched_input, View gate_up,
                            View down);  // [E, 2 F, H], [E, H, F]
// The weighted sum of each token's experts, [T, H]; choices with weight 0 are not looked at.
OwnedTensor combine_expert_output(const Context& ctx, View expert_output, View combine_weights, View scatter_index);

}  // namespace concerto
