// The kernels that stream memory (norm, rope, swiglu, attention, router choice, permute, cross entropy, optimizer,
// ...), built once per instruction set from the same sources and chosen at run time.
#pragma once

#include "concerto/ops/backend.h"
#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

// Fills every table of `backend` but linear, grouped_linear and the three products of router.
void fill_vector_kernels(Backend& backend, Isa isa);

}  // namespace concerto::cpu
