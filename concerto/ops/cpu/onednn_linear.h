// Dense products by oneDNN, single-threaded from each thread of our pool: a thread takes a fixed slice of rows (of the
// weight's rows for its gradient).
//
// Primitives are made once a shape and kept, up to kMaxPrimitives for each thread that calls ops; a new shape costs
// about 1 ms. Scratch comes from the context's arena. oneDNN itself allocates a few small blocks in every call.
#pragma once

#include "concerto/ops/linear.h"

namespace concerto::cpu {

constexpr int kMaxPrimitives = 256;

bool onednn_built();
LinearKernels onednn_linear_kernels();  // Bug if not built
int onednn_cached_primitives();         // of the calling thread

}  // namespace concerto::cpu
