// One optimizer step over one tensor, in one pass over its memory; the bf16 copy is written in the same pass. Gradients
// are multiplied by grad_scale (clipping) as they are read. Bias corrections c1 = 1 - beta1^t, c2 = 1 - beta2^t come
// from the caller.
//   AdamW (decoupled decay, Loshchilov & Hutter 2019):
//     w *= 1 - lr * weight_decay; m, v as Adam; w -= lr * (m / c1) / (sqrt(v / c2) + eps).
//   LAMB (You et al. 2020, algorithm 2):
//     u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * w; w -= lr * ratio * u, ratio = |w| / |u|, 1 if either is 0.
// Moments may be kept in bf16: they are computed in f32, and rounded stochastically as they are stored. AdamW's update
// takes them before they are rounded; LAMB's takes them as stored, since its second pass has nothing else.
#pragma once

#include "concerto/ops/moment_rounding.h"
#include "concerto/ops/packed_weight.h"

namespace concerto {

struct AdamStep {
  View w;                    // stat, dense, any shape (master weight)
  View m, v;                 // stat, or both bf16 where stat is f32
  View grad;                 // stat, read only
  View copy;                 // compute copy of w, or null
  PackedWeight packed = {};  // AdamW: w as a bf16 copy, packed, written in the same pass; or null
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0, c1 = 1, c2 = 1, grad_scale = 1;
  MomentRounding rounding = {};  // over all of w; for bf16 moments only
};
struct LambNorms {  // first pass: updates m and v, sums |w|^2 and |u|^2 (f64, fixed blocks)
  AdamStep step;
  View norms;  // [2] f64, overwritten
};
struct LambApply {  // second pass: recomputes u from m, v, w
  AdamStep step;
  double trust_ratio = 1;
};

struct OptimizerKernels {
  void (*adamw)(const Context&, const AdamStep&) = nullptr;
  void (*lamb_norms)(const Context&, const LambNorms&) = nullptr;
  void (*lamb_apply)(const Context&, const LambApply&) = nullptr;
};

void adamw_step(const Context& ctx, const AdamStep& args);
void lamb_step(const Context& ctx, const AdamStep& args);  // both passes
void lamb_norms(const Context& ctx, const LambNorms& args);
void lamb_apply(const Context& ctx, const LambApply& args);
double lamb_trust_ratio(double w_squares, double u_squares);

}  // namespace concerto
