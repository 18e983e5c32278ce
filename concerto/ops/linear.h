// Dense product y = x W^T + b with W [out, in] as in safetensors. "compute type" below: the type C of x and w; "stat
// type": stat_dtype(C). x, y, dx, dy may be strided rows. Sums are taken in the stat type. Weight gradients are of
// the stat type and accumulate (+=) unless said otherwise; the rest overwrites.
#pragma once

#include "concerto/ops/packed_weight.h"

namespace concerto {

struct LinearForward {
  View x;                    // [M, K] compute
  View w;                    // [N, K] compute, dense
  View bias;                 // [N] stat, or null
  View y;                    // [M, N] compute or stat
  PackedWeight packed = {};  // w, packed: w then has no memory
};
struct LinearBackwardInput {
  View dy;                   // [M, N] compute
  View w;                    // [N, K] compute, dense
  View dx;                   // [M, K] compute or stat
  bool accumulate = false;   // dx += instead of dx =
  PackedWeight packed = {};  // as above
};
struct LinearBackwardWeight {
  View x;                  // [M, K] compute
  View dy;                 // [M, N] compute
  View dw;                 // [N, K] stat, dense
  View db;                 // [N] stat, +=, or null
  bool accumulate = true;  // dw += instead of dw =
  View bias_dy = {};       // [M', N] compute: the rows that db sums, where they are not those of dy
};

struct LinearKernels {
  void (*forward)(const Context&, const LinearForward&) = nullptr;
  void (*backward_input)(const Context&, const LinearBackwardInput&) = nullptr;
  void (*backward_weight)(const Context&, const LinearBackwardWeight&) = nullptr;
  const WeightPacking* packing = nullptr;  // of bf16 weights; null: read as they are
};

void linear_forward(const Context& ctx, const LinearForward& args);
void linear_backward_input(const Context& ctx, const LinearBackwardInput& args);
void linear_backward_weight(const Context& ctx, const LinearBackwardWeight& args);

}  // namespace concerto
