// Row look-up and its gradient. The gradient sums tokens in token order (deterministic), and skips `skip_id`: HF's
// padding_idx row takes no look-up gradient.
//
// A `slice` holds rows [begin, begin + V) of a table that is cut among ranks: an id outside it gives a row of zeros, and
// adds nothing. Without, V is the vocabulary and every id lies in it.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct EmbeddingForward {
  View ids;    // [T] i32
  View table;  // [V, H] compute, or stat: rows are rounded as they are read
  View y;      // [T, H] compute
  int64_t begin = 0;
  bool slice = false;
};
struct EmbeddingBackwardWeight {
  View ids;  // [T] i32
  View dy;   // [T, H] compute
  int64_t skip_id = -1;
  View dtable;  // [V, H] stat, +=
  int64_t begin = 0;
  bool slice = false;
};

struct EmbeddingKernels {
  void (*forward)(const Context&, const EmbeddingForward&) = nullptr;
  void (*backward_weight)(const Context&, const EmbeddingBackwardWeight&) = nullptr;
};

void embedding_forward(const Context& ctx, const EmbeddingForward& args);
void embedding_backward_weight(const Context& ctx, const EmbeddingBackwardWeight& args);

}  // namespace concerto
