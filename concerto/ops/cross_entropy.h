// Softmax cross entropy on logits, and the chunked head + loss built from it and the dense product: logits of a chunk
// of tokens at a time, never the whole [tokens, vocab]. A loss is a sum and a count until the last moment; `scale` (1 /
// valid targets of the whole step) multiplies gradients only.
#pragma once

#include "concerto/ops/packed_weight.h"

namespace concerto {

struct CrossEntropy {
  View logits;   // [T, V] stat
  View targets;  // [T] i32; negative: ignored, gradient zero
  double scale = 1;
  View loss_sum;    // [1] f64, +=, token by token in order
  View dlogits;     // [T, V] compute, or null; may be the same memory as logits when types agree
  View token_loss;  // [T] stat, or null; 0 where ignored
};

// The same over a vocabulary that is cut among ranks (reference 5.1). Each rank tells of its slice; from what all have
// told come the loss, the same bits on every rank, and the slice's gradient.
struct CrossEntropyShare {
  View logits;        // [T, V_r] stat: of the ids from `begin` on
  View targets;       // [T] i32 of the whole vocabulary; negative: ignored
  int64_t begin = 0;  // of the slice
  View share;         // [T, 2] f64: log(sum(exp(logits))), and the target's logit or 0 where the slice has it not
};
struct CrossEntropyOfShares {
  View logits, targets;  // as above
  int64_t begin = 0;
  View shares;  // [ranks, T, 2] f64, added in this order
  double scale = 1;
  View loss_sum;    // [1] f64, +=, token by token in order
  View dlogits;     // [T, V_r] compute, or null; may be the same memory as logits when types agree
  View token_loss;  // [T] stat, or null; 0 where ignored
};

struct CrossEntropyKernels {
  void (*apply)(const Context&, const CrossEntropy&) = nullptr;
  void (*share)(const Context&, const CrossEntropyShare&) = nullptr;
  void (*of_shares)(const Context&, const CrossEntropyOfShares&) = nullptr;
};

void cross_entropy(const Context& ctx, const CrossEntropy& args);
void cross_entropy_share(const Context& ctx, const CrossEntropyShare& args);
void cross_entropy_of_shares(const Context& ctx, const CrossEntropyOfShares& args);

// The two sums of a token over the ranks' shares: log(sum(exp(logits))) and the target's logit.
struct JoinedShares {
  double lse = 0, target = 0;
};
JoinedShares join_shares(const View& shares, int64_t token);

// logits = x W^T + bias, loss, and (if dx is given) dx, dw, db in the same pass.
struct HeadLoss {
  View x;        // [T, H] compute
  View w;        // [V, H] compute
  View bias;     // [V] stat, or null
  View targets;  // [T] i32
  double scale = 1;
  View loss_sum;             // [1] f64, +=
  View dx;                   // [T, H] compute or stat, overwritten, or null: loss only
  View dw;                   // [V, H] stat, or null
  View db;                   // [V] stat, +=, or null
  View token_loss;           // [T] stat, or null
  PackedWeight packed = {};  // w, packed: w then has no memory
  bool accumulate = true;    // dw += instead of dw =
};
void head_loss(const Context& ctx, const HeadLoss& args);

}  // namespace concerto
