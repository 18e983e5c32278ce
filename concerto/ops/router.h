// Top-k softmax router with a correction bias that selects only (reference 3.3). Everything in the stat type:
//   logits = x W^T; p = softmax(logits); s = p + bias; ids = top-k of s (ties: lower expert id); weights = p[ids] /
//   max(sum p[ids], norm_min).
// Order of the k choices: by s, largest first. The aux loss wants the counts of top-k of bare p (golden README,
// surprise 3): `bare_counts`.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct RouterLogits {
  View x;       // [T, H] compute
  View w;       // [E, H] stat
  View logits;  // [T, E] stat
};
struct RouterSelect {
  View logits;  // [T, E] stat
  View bias;    // [E] stat, or null
  double norm_min = 1e-12;
  View probs;           // [T, E] stat
  View expert_ids;      // [T, K] i32
  View weights;         // [T, K] stat
  View counts;          // [E] i64, overwritten: tokens that chose each expert
  View bare_counts;     // [E] i64, overwritten: the same from p without bias
  View prob_sums;       // [E] f64, overwritten: sum over tokens of p, in token order inside blocks fixed by T alone
  bool replay = false;  // expert_ids, counts and bare_counts are given (recompute): only probs, weights and prob_sums
                        // are made again
};
// dlogits of weights and of the aux loss, which adds aux_dprob[e] to the gradient of every token's p[e].
struct RouterSelectBackward {
  View dweights;    // [T, K] stat
  View aux_dprob;   // [E] stat, or null
  View probs;       // [T, E] stat
  View expert_ids;  // [T, K] i32
  double norm_min = 1e-12;
  View dlogits;  // [T, E] stat
};
struct RouterLogitsBackwardInput {
  View dlogits;  // [T, E] stat
  View w;        // [E, H] stat
  View dx;       // [T, H] compute, += (what came from the experts is already there)
};
struct RouterLogitsBackwardWeight {
  View dlogits;  // [T, E] stat
  View x;        // [T, H] compute
  View dw;       // [E, H] stat, +=
};

struct RouterKernels {
  void (*logits)(const Context&, const RouterLogits&) = nullptr;
  void (*select)(const Context&, const RouterSelect&) = nullptr;
  void (*select_backward)(const Context&, const RouterSelectBackward&) = nullptr;
  void (*logits_backward_input)(const Context&, const RouterLogitsBackwardInput&) = nullptr;
  void (*logits_backward_weight)(const Context&, const RouterLogitsBackwardWeight&) = nullptr;
};

void router_logits(const Context& ctx, const RouterLogits& args);
void router_select(const Context& ctx, const RouterSelect& args);
void router_select_backward(const Context& ctx, const RouterSelectBackward& args);
void router_logits_backward_input(const Context& ctx, const RouterLogitsBackwardInput& args);
void router_logits_backward_weight(const Context& ctx, const RouterLogitsBackwardWeight& args);

}  // namespace concerto
