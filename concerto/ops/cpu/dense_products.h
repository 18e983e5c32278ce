// Dense products of the backend: our own kernels (product.h) or oneDNN by CONCERTO_DENSE. Own kernels keep a
// row's bits independent of the number of rows and threads and allocate nothing. docs/decisions/0005 has the
// measurements.
#pragma once

#include <string_view>

#include "concerto/ops/cpu/isa.h"
#include "concerto/ops/linear.h"

namespace concerto::cpu {

struct DenseChoice {
  bool onednn_f32 = false, onednn_bf16 = false;
};

// `wish` is CONCERTO_DENSE: empty or `own`, or `onednn`. Error(kUnsupported) for another word, and for
// `onednn` if it is not in this build. Below AVX-512-BF16 oneDNN has no bf16 products: those stay our own.
DenseChoice choose_dense(std::string_view wish, Isa isa, bool onednn_built);

// By CONCERTO_DENSE and the active instruction set.
LinearKernels dense_kernels();

}  // namespace concerto::cpu
