// The fast CPU backend: oneDNN for dense products, own kernels for the rest, chosen at run time by what the processor
// has. The environment variable CONCERTO_ISA=avx2|avx512|avx512_bf16 caps the choice (tests run every level that the
// machine has).
#pragma once

#include "concerto/ops/backend.h"

namespace concerto {
const Backend& cpu_backend();
}  // namespace concerto
