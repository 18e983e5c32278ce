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

struct CrossEntropyKernels {
  void (*apply)(const Context&, const CrossEntropy&) = nullptr;
};

void cross_entropy(const Context& ctx, const CrossEntropy& args);

// logits = x W^T + bias, loss, and (if dx is given) dx, dw, db in the same pass.
struct HeadLoss {
  View x;        // [T, H] compute
  View w;        // [V, H] compute
  View bias;     // [V] stat, or null
  View targets;  // [T] i32
  double scale = 1;
  View loss_sum;             // [1] f64, +=
  View dx;                   // [T, H] compute, overwritten, or null: loss only
  View dw;                   // [V, H] stat, or null
  View db;                   // [V] stat, +=, or null
  View token_loss;           // [T] stat, or null
  PackedWeight packed = {};  // w, packed: w then has no memory
  bool accumulate = true;    // dw += instead of dw =
};
void head_loss(const Context& ctx, const HeadLoss& args);

}  // namespace concerto
