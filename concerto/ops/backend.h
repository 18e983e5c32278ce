// A backend is a table of kernels, filled by an explicit list in ops/<backend>/backend.cc. `ref` has every op in plain
// loops. What a stage needs is asked at start-up (`check_backend`); a backend that is not built is a stub that says how
// to get it.
#pragma once

#include "concerto/ops/attention.h"
#include "concerto/ops/cross_entropy.h"
#include "concerto/ops/elementwise.h"
#include "concerto/ops/embedding.h"
#include "concerto/ops/grouped_linear.h"
#include "concerto/ops/linear.h"
#include "concerto/ops/optimizer_step.h"
#include "concerto/ops/permute.h"
#include "concerto/ops/rms_norm.h"
#include "concerto/ops/rope.h"
#include "concerto/ops/router.h"
#include "concerto/ops/routing.h"
#include "concerto/ops/swiglu.h"

namespace concerto {

struct Backend {
  const char* name = "";
  bool f32 = false, bf16 = false, f64 = false;  // compute types it has
  LinearKernels linear;
  GroupedLinearKernels grouped_linear;
  RmsNormKernels rms_norm;
  RopeKernels rope;
  AttentionKernels attention;
  SwigluKernels swiglu;
  EmbeddingKernels embedding;
  RouterKernels router;
  RoutingKernels routing;
  PermuteKernels permute;
  CrossEntropyKernels cross_entropy;
  ElementwiseKernels elementwise;
  OptimizerKernels optimizer;

  bool has(DType compute) const {
    return (compute == DType::kF32 && f32) || (compute == DType::kBF16 && bf16) || (compute == DType::kF64 && f64);
  }
};

// Error(kUnsupported) naming backend, type and op if a kernel is missing.
void check_backend(const Backend& backend, DType compute);

}  // namespace concerto
