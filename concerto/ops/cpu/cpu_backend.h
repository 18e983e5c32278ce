// The fast CPU backend: packed products of our own or oneDNN's, and vectorised kernels for the rest, chosen at run time
// by what the processor has. Two environment variables serve tests and measurements; results stay within the ops'
// tolerances:
//   CONCERTO_ISA=generic|avx2|avx512|avx512_bf16|amx
//     caps the instruction set (tests run every level that the machine has)
//   CONCERTO_DENSE=own|onednn
//     picks the dense products (dense_products.h)
#pragma once

#include "concerto/ops/backend.h"

namespace concerto {
const Backend& cpu_backend();
}  // namespace concerto
