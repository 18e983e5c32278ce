// Everything between the router's logits and the dispatch plan that is more than softmax top-k (router.h has that one,
// fused and fast): other scores and gates, capacity, what drops and in which order, the weights after drops, the
// router's losses, the update of the correction bias (reference 3.3-3.6, 4, 5). One micro-batch of one layer runs
//     forward    scores, choose, [drop], weights, make_dispatch_plan; for the losses sums, then balance
//     backward   dlogits of weights, balance loss and z loss together
//     recompute  scores, weights and sums (for lse) only: ids, slots and the plan are kept
// A *routing unit* is a range of tokens, [unit_offsets[u], unit_offsets[u + 1]): counts, capacity, drop order, Sinkhorn
// and losses know one unit only. The units cover the tokens in order; a unit may be empty. Counts are integers and made
// once, before anything is dropped, unless said otherwise.
//
// Letters: T tokens, E experts, K choices a token, U units, C slots an expert. "stat": f32, or f64 in an f64 run.
#pragma once

#include <span>

#include "concerto/ops/context.h"

namespace concerto {

// softmax over all experts, or inside each of `groups` contiguous groups of E / groups experts; or sigmoid, which knows
// no groups.
enum class Scoring { kSoftmax, kSigmoid };
struct RoutingScores {
  View logits;  // [T, E] stat
  Scoring scoring = Scoring::kSoftmax;
  int64_t groups = 1;  // > 1: group gating, groups = K
  View probs;          // [T, E] stat
};

// kTopK: the k largest of s = p + bias, largest first, ties to the lower id; a bias however negative only ranks. With
// groups, choice j is the best of group j by s = p / (largest p of the group) + bias; the weights come from p itself,
// since what the reference divides by, it multiplies back.
// kTop2 (softmax): the first by p + bias; the second by logits without the first, with a bias by softmax of those +
// bias; or by Sinkhorn-2Gate.
enum class Gate { kTopK, kTop2 };
// Sinkhorn's columns when first choices fill every expert of a unit. kUniform: 1 / E each, as the released PyTorch
// code. kLowest: the older gate's 0 / 0, which makes every second choice the lowest id that is not the first. Either
// way all of them are dropped; the counts before drops differ.
enum class FullExperts { kUniform, kLowest };
struct RoutingChoose {
  View logits;        // [T, E] stat; read by kTop2
  View probs;         // [T, E] stat
  View bias;          // [E] stat, or null
  View unit_offsets;  // [U + 1] i32
  Gate gate = Gate::kTopK;
  int64_t groups = 1;
  bool sinkhorn = false;  // kTop2 in training; computed in f64, which still ranks where f32 would underflow to zeros
  double sinkhorn_temp = 0.03;
  FullExperts full = FullExperts::kUniform;
  View capacity;     // [U] i64: C for Sinkhorn (the unit's tokens where nothing is dropped); null without
  View expert_ids;   // [T, K] i32: different ones
  View claims;       // [U, K, E] i64, overwritten: tokens whose choice j is e
  View counts;       // [U, E] i64, overwritten: sum of claims over j
  View bare_counts;  // [U, E] i64, overwritten: the same from the top-k of bare p: the balance loss of a biased router
};

// Who gets the C slots of an expert. kRankMajor: first choices in token order, then second choices, ... (Paddle's
// kernel; Top2Gate, where this puts all firsts before all seconds). kTokenMajor: token by token, choices in order (the
// released PyTorch code). `reverse`: tokens from the last to the first.
enum class DropOrder { kRankMajor, kTokenMajor };
struct RoutingDrop {
  View expert_ids;    // [T, K] i32
  View unit_offsets;  // [U + 1] i32
  View capacity;      // [U] i64, at least 1 where the unit has tokens; null: nothing is dropped
  View claims;        // [U, K, E] i64 of these tokens
  View before;        // [U, K, E] i64 (claims_before), or null: each unit is whole here
  DropOrder order = DropOrder::kRankMajor;
  bool reverse = false;
  View slots;        // [T, K] i32: place among those who claim the expert, 0 .. C - 1, or -1: dropped
  View kept_ids;     // [T, K] i32: the expert, or E if dropped: for make_dispatch_plan with offsets of size E + 2
  View kept_counts;  // [U, E] i64, overwritten: tokens that an expert keeps, of those here
};

// weights = p / max(sum of the kept p, norm_min), or p without `normalize`; 0 where dropped: a token that loses every
// expert gets nothing.
struct RoutingWeights {
  View probs;       // [T, E] stat
  View expert_ids;  // [T, K] i32
  View slots;       // [T, K] i32, or null: nothing was dropped
  bool normalize = true;
  double norm_min = 1e-12;
  View weights;  // [T, K] stat
};

// Sums for the losses of a unit. Sigmoid rows are divided by their sum (at least 1e-12) first. Added in token order.
struct RoutingSums {
  View probs;         // [T, E] stat
  View logits;        // [T, E] stat; read for z
  View unit_offsets;  // [U + 1] i32
  Scoring scoring = Scoring::kSoftmax;
  View prob_sums;  // [U, E] f64, overwritten
  View lse;        // [T] stat, or null: no z loss. log of the sum of exp(logits), for backward
  View z_sums;     // [U] f64, overwritten: sum of lse^2; given if lse is. z loss = z_sums / tokens of the unit
};

// Balance loss of each unit: E * sum_e (counts_e / tokens) * (prob_sums_e / tokens) / groups, and its gradient by any
// token's p_e. Counts and sums are those of the whole unit, over every rank and micro-batch that holds a part of it; a
// unit without tokens has loss 0.
struct RoutingBalance {
  View counts;     // [U, E] i64: top-k counts, first choices (a view of claims with row stride K * E), or bare counts
  View prob_sums;  // [U, E] f64
  View tokens;     // [U] i64
  View scale;      // [U] f64: what the total loss multiplies each unit's loss by
  int64_t groups = 1;
  View loss;       // [U] f64, not scaled
  View aux_dprob;  // [U, E] stat, scaled; or null
};

struct RoutingBackward {
  View dweights;      // [T, K] stat; entries that were dropped are not read
  View probs;         // [T, E] stat
  View expert_ids;    // [T, K] i32
  View slots;         // [T, K] i32, or null
  View unit_offsets;  // [U + 1] i32
  Scoring scoring = Scoring::kSoftmax;
  int64_t groups = 1;
  bool normalize = true;
  double norm_min = 1e-12;
  View aux_dprob;  // [U, E] stat, or null: gradient by each (normalised) p_e of the unit's tokens
  View logits;     // [T, E] stat; null without z loss
  View lse;        // [T] stat; null without z loss
  View z_scale;    // [U] f64: gradient of the total loss by lse^2 of one token (coefficient / tokens of the unit); null
                   // without z loss
  View dlogits;    // [T, E] stat
};

// Orthogonal loss of the router matrix: |W~ W~^T - I|^2 / E^2 with rows w~ = w / max(|w|, 1e-12); with blocks: of each
// block of E / blocks rows, mean over their blocks * (E / blocks)^2 entries.
struct OrthogonalLoss {
  View w;  // [E, H] stat
  int64_t blocks = 1;
  double scale = 1;
  View loss;  // [1] f64, not scaled
  View dw;    // [E, H] stat, += scale * gradient; or null
};
// The same as a step after the optimizer's, decoupled as weight decay is: w -= rate * gradient.
struct OrthogonalStep {
  View w;  // [E, H] stat, changed
  int64_t blocks = 1;
  double rate = 0;
  View loss;  // [1] f64: before the step
};

// bias += rate * sign(mean of usage - usage), each row for itself, compared in integers; sign(0) = 0. Usage becomes 0,
// so that no count is used twice. A row that must stay (a frozen router) is left out of both views.
struct BiasUpdate {
  View usage;  // [rows, E] i64: tokens an expert was chosen by since the last update, before drops
  View bias;   // [rows, E] stat
  double rate = 1e-3;
};

// A dropped choice has a row of its own behind those of the experts (expert id E: rows [offsets[E], offsets[E + 1])),
// which no expert writes: the experts get the first E + 1 offsets only. This makes them 0: after the experts' forward,
// so that combine adds nothing for them; after their backward, so that dispatch's backward adds nothing.
struct ClearDropped {
  View offsets;  // [E + 2] i32 of make_dispatch_plan on kept_ids
  View rows;     // [R, H] compute
};

// The padded form of the reference (3.5), for inspection and tests: buffers [E, C, H], zero where nobody sits.
struct PadDispatch {
  View x;                // [T, H] compute
  View expert_ids;       // [T, K] i32
  View slots;            // [T, K] i32
  int32_t nowhere = -1;  // scatter_index of what was dropped: -1 as the released PyTorch code, 0 as Paddle
  View scatter_index;    // [T, K] i32: e * C + slot
  View buffer;           // [E, C, H] compute
};
struct PadCombine {
  View buffer;         // [E, C, H] compute
  View scatter_index;  // [T, K] i32; entries that are negative or weigh 0 are not read from the buffer
  View weights;        // [T, K] compute
  View y;              // [T, H] compute
};

struct RoutingKernels {
  void (*scores)(const Context&, const RoutingScores&) = nullptr;
  void (*choose)(const Context&, const RoutingChoose&) = nullptr;
  void (*drop)(const Context&, const RoutingDrop&) = nullptr;
  void (*weights)(const Context&, const RoutingWeights&) = nullptr;
  void (*sums)(const Context&, const RoutingSums&) = nullptr;
  void (*balance)(const Context&, const RoutingBalance&) = nullptr;
  void (*backward)(const Context&, const RoutingBackward&) = nullptr;
  void (*orthogonal_loss)(const Context&, const OrthogonalLoss&) = nullptr;
  void (*orthogonal_step)(const Context&, const OrthogonalStep&) = nullptr;
  void (*bias_update)(const Context&, const BiasUpdate&) = nullptr;
  void (*clear_dropped)(const Context&, const ClearDropped&) = nullptr;
  void (*pad_dispatch)(const Context&, const PadDispatch&) = nullptr;
  void (*pad_combine)(const Context&, const PadCombine&) = nullptr;
};

void routing_scores(const Context& ctx, const RoutingScores& args);
void routing_choose(const Context& ctx, const RoutingChoose& args);
void routing_drop(const Context& ctx, const RoutingDrop& args);
void routing_weights(const Context& ctx, const RoutingWeights& args);
void routing_sums(const Context& ctx, const RoutingSums& args);
void routing_balance(const Context& ctx, const RoutingBalance& args);
void routing_backward(const Context& ctx, const RoutingBackward& args);
void orthogonal_loss(const Context& ctx, const OrthogonalLoss& args);
void orthogonal_step(const Context& ctx, const OrthogonalStep& args);
void bias_update(const Context& ctx, const BiasUpdate& args);
void clear_dropped(const Context& ctx, const ClearDropped& args);
void pad_dispatch(const Context& ctx, const PadDispatch& args);
void pad_combine(const Context& ctx, const PadCombine& args);

// Factors, not slots (moe_capacity): for training, for evaluation, and for evaluation of fewer tokens than experts.
struct CapacityFactors {
  double train = 0, eval = 0, few_tokens = 0;
};
// C = int(factor * tokens // experts) as Python computes it; `tokens` of the whole unit. 0 for a unit without tokens;
// Error(kConfig) if it would be 0 with.
int64_t expert_capacity(const CapacityFactors& factors, bool training, int64_t tokens, int64_t experts);

// For a unit in pieces (ranks, micro-batches; pieces in token order): what goes ahead of piece `piece`, from the claims
// [K, E] of each. For RoutingDrop.
void claims_before(DropOrder order, bool reverse, std::span<const int64_t* const> claims, int64_t piece, int64_t top_k,
                   int64_t experts, int64_t* before);

}  // namespace concerto
